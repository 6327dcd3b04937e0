//! One call into a driver: a fresh store and instance, its limits, and what became of it.
//!
//! Is given a compiled driver and what to call; gives back the answer or why there is none. The store is dropped after each
//! call, so that nothing of a call, nor of a trap, outlives it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use wasmtime::component::{Instance, InstancePre, ResourceTable};
use wasmtime::{ResourceLimiter, Store, Trap, UpdateDeadline, WasmBacktrace};
use wasmtime_wasi::WasiCtx;

use super::engine::Runtime;
use super::hostcalls::CallView;
use super::log::{DriverLog, LogSink};
use super::nodes::DevRoot;
use super::stats::Counters;
use super::sysfs::SysfsRoot;
use super::{Exports, wasi};
use crate::driver::grant::{Effective, Limits};
use crate::driver::values::Journal;
use crate::driver::{Ledger, NodeFacts};
use crate::model::limit::{EPOCH_TICK, HANDLES_MAX, HOSTCALL_BYTES};
use crate::model::{DriverName, ObjectRef, Problem};

/// Core instances, memories and tables of a store, and entries of a table. Python components have some ten instances.
pub(super) const INSTANCES_MAX: usize = 64;
pub(super) const MEMORIES_MAX: usize = 16;
pub(super) const TABLES_MAX: usize = 64;
pub(super) const TABLE_ELEMENTS_MAX: usize = 100_000;
/// Frames of a backtrace that go into a message.
const FRAMES_SHOWN: usize = 3;

/// The node as every driver sees it.
pub(super) struct Node {
    pub(super) facts: NodeFacts,
    pub(super) sysfs: Arc<SysfsRoot>,
    pub(super) dev: Arc<DevRoot>,
    pub(super) ledger: Arc<dyn Ledger>,
    pub(super) journal: Arc<dyn Journal>,
}

/// What is the same in all calls of a driver.
pub(super) struct Scope {
    /// None until it has said who it is.
    pub(super) driver: Option<DriverName>,
    pub(super) effective: Effective,
    pub(super) limits: Limits,
    pub(super) log: Arc<DriverLog>,
    pub(super) node: Arc<Node>,
    /// Reads below `/sys` that run or hang: a stuck one keeps its place.
    pub(super) blocking: Arc<Semaphore>,
}

/// A compiled driver within its bounds.
pub(super) struct Sandbox {
    pub(super) runtime: Arc<Runtime>,
    pub(super) pre: InstancePre<State>,
    pub(super) exports: Exports,
    pub(super) scope: Arc<Scope>,
    /// Calls of this driver, and of all drivers, at once.
    pub(super) own_calls: Arc<Semaphore>,
    pub(super) all_calls: Arc<Semaphore>,
    pub(super) counters: Arc<Counters>,
}

/// What a call may take.
pub(super) struct CallSpec {
    pub(super) request: Arc<str>,
    /// From now on, waiting for a place included.
    pub(super) deadline: Duration,
    /// Of the guest's run.
    pub(super) wall: Duration,
    /// Claims for which it may write below `/sys`; none: it only looks.
    pub(super) writes_for: Option<Arc<[ObjectRef]>>,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Done<R> {
    pub(super) answer: R,
}

/// Why a call gave no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallFailure {
    #[error("the driver, or the node, was busy with other calls for {0:?}")]
    Busy(Duration),
    #[error("the driver did not answer within {0:?}")]
    Timeout(Duration),
    #[error("the driver used more than {0:?} of CPU")]
    Cpu(Duration),
    #[error("the driver wanted more than {} MiB of memory", .0 >> 20)]
    Memory(usize),
    #[error("the driver passed more than {HOSTCALL_BYTES} bytes at once")]
    TooMuchData,
    #[error("the driver ended itself with exit({0})")]
    Exited(i32),
    #[error("the driver trapped: {message}")]
    Trapped { message: String, frames: Vec<String> },
}

impl CallFailure {
    pub fn code(&self) -> &'static str {
        match self {
            Self::Busy(_) => "driver-busy",
            Self::Timeout(_) => "driver-deadline",
            Self::Cpu(_) => "driver-cpu-limit",
            Self::Memory(_) => "driver-memory-limit",
            Self::TooMuchData => "driver-answer-too-large",
            Self::Exited(_) => "driver-exited",
            Self::Trapped { .. } => "driver-trapped",
        }
    }

    pub(super) fn into_problem(self) -> Problem {
        let message = self.to_string();
        match self {
            // Late is not wrong: the node may be busy.
            Self::Busy(_) | Self::Timeout(_) => Problem::unavailable(self.code(), message),
            _ => Problem::internal(self.code(), message),
        }
    }
}

/// The function that is called in an instance.
pub(super) trait GuestCall<R>:
    for<'a> FnOnce(&'a mut Store<State>, &'a Instance, &'a Exports) -> BoxFuture<'a, wasmtime::Result<R>> + Send
{
}

impl<R, F> GuestCall<R> for F where
    F: for<'a> FnOnce(&'a mut Store<State>, &'a Instance, &'a Exports) -> BoxFuture<'a, wasmtime::Result<R>>
        + Send
{
}

impl Sandbox {
    /// Calls into a fresh instance.
    pub(super) async fn call<R: Send>(
        &self,
        spec: CallSpec,
        guest: impl GuestCall<R>,
    ) -> Result<Done<R>, CallFailure> {
        let begin = Instant::now();
        let outcome = self.call_in_turn(begin, spec, guest).await;
        self.counters.record(begin.elapsed(), outcome.as_ref().err());
        outcome
    }

    async fn call_in_turn<R: Send>(
        &self,
        begin: Instant,
        spec: CallSpec,
        guest: impl GuestCall<R>,
    ) -> Result<Done<R>, CallFailure> {
        let places = async { (self.own_calls.acquire().await, self.all_calls.acquire().await) };
        // Dropping the wait gives up the place in the queue and nothing else.
        let Ok(_places) = tokio::time::timeout(spec.deadline, places).await else {
            return Err(CallFailure::Busy(spec.deadline));
        };
        let wall = spec.wall.min(spec.deadline.saturating_sub(begin.elapsed()));
        let _ticking = self.runtime.clock.tick();
        let mut store = self.store(spec.request, spec.writes_for);
        let run = async {
            let instance = self.pre.instantiate_async(&mut store).await?;
            guest(&mut store, &instance, &self.exports).await
        };
        // Dropping the run unwinds its fiber; the store is not used for the guest again.
        let result = tokio::time::timeout(wall, run).await;
        let state = store.into_data();
        self.counters.record_memory(state.limiter.peak);
        match result {
            Ok(Ok(answer)) => Ok(Done { answer }),
            Ok(Err(error)) => Err(self.failure(&state, &error)),
            Err(_) => Err(CallFailure::Timeout(wall)),
        }
    }

    fn store(&self, request: Arc<str>, writes_for: Option<Arc<[ObjectRef]>>) -> Store<State> {
        let state = State::new(Arc::clone(&self.scope), request, writes_for);
        let mut store = Store::new(&self.runtime.engine, state);
        store.limiter(|state| &mut state.limiter);
        store.set_hostcall_fuel(HOSTCALL_BYTES);
        store.set_max_component_handles(HANDLES_MAX);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut context| {
            let state = context.data_mut();
            state.ticks += 1;
            if state.ticks > state.ticks_max {
                return Ok(UpdateDeadline::Interrupt);
            }
            Ok(UpdateDeadline::Yield(1))
        });
        store
    }

    fn failure(&self, state: &State, error: &wasmtime::Error) -> CallFailure {
        if let Some(exit) = error.downcast_ref::<wasmtime_wasi::I32Exit>() {
            return CallFailure::Exited(exit.0);
        }
        // Components with several memories can use up the slots before the calls are too many.
        if error.downcast_ref::<wasmtime::PoolConcurrencyLimitError>().is_some() {
            return CallFailure::Busy(Duration::ZERO);
        }
        if state.limiter.refused {
            return CallFailure::Memory(state.limiter.memory_max);
        }
        if error.downcast_ref::<Trap>() == Some(&Trap::Interrupt) {
            return CallFailure::Cpu(self.scope.limits.cpu);
        }
        let root = error.root_cause().to_string();
        // wasmtime's type for this is private.
        if root.contains("hostcall fuel") || root.contains("too much data") {
            return CallFailure::TooMuchData;
        }
        let frames = frames(error);
        tracing::warn!(
            driver = self.scope.driver.as_ref().map_or("", DriverName::as_str),
            request = &*state.request,
            error = root,
            backtrace = frames.join(" < "),
            "driver trapped"
        );
        CallFailure::Trapped { message: trap_message(state, &root, &frames), frames }
    }
}

/// What the driver logged last as an error is what a panic said; else the trap and where it was.
fn trap_message(state: &State, root: &str, frames: &[String]) -> String {
    let said = state.log.last_error();
    let mut message = said.unwrap_or_else(|| match frames {
        [] => root.to_owned(),
        frames => format!("{root} in {}", frames[..frames.len().min(FRAMES_SHOWN)].join(" < ")),
    });
    let mut end = message.len().min(512);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message.truncate(end);
    message
}

fn frames(error: &wasmtime::Error) -> Vec<String> {
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else { return Vec::new() };
    let name = |frame: &wasmtime::FrameInfo| match (frame.func_name(), frame.module_offset()) {
        (Some(name), _) => name.chars().filter(|c| !c.is_control()).take(120).collect(),
        (None, Some(offset)) => format!("function {} at {offset:#x}", frame.func_index()),
        (None, None) => format!("function {}", frame.func_index()),
    };
    backtrace.frames().iter().map(name).collect()
}

/// What a store holds for its call.
pub(super) struct State {
    pub(super) scope: Arc<Scope>,
    pub(super) request: Arc<str>,
    pub(super) log: LogSink,
    pub(super) view: CallView,
    pub(super) writes_for: Option<Arc<[ObjectRef]>>,
    limiter: Limiter,
    ticks: u128,
    ticks_max: u128,
    table: ResourceTable,
    wasi: Option<Box<WasiCtx>>,
}

impl State {
    fn new(scope: Arc<Scope>, request: Arc<str>, writes_for: Option<Arc<[ObjectRef]>>) -> Self {
        let mut table = ResourceTable::new();
        table.set_max_capacity(HANDLES_MAX);
        Self {
            log: LogSink::new(Arc::clone(&scope.log), Arc::clone(&request)),
            view: CallView::new(),
            writes_for,
            limiter: Limiter { memory: 0, peak: 0, memory_max: scope.limits.memory, refused: false },
            ticks: 0,
            ticks_max: (scope.limits.cpu.as_millis() / EPOCH_TICK.as_millis()).max(1),
            table,
            wasi: None,
            scope,
            request,
        }
    }

    pub(super) fn table(&mut self) -> &mut ResourceTable {
        &mut self.table
    }

    pub(super) fn wasi_parts(&mut self) -> (&mut WasiCtx, &mut ResourceTable) {
        let log = &self.log;
        (self.wasi.get_or_insert_with(|| Box::new(wasi::context(log))), &mut self.table)
    }
}

/// Sums the memory of all linear memories of a store.
struct Limiter {
    memory: usize,
    peak: usize,
    memory_max: usize,
    refused: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("the limit of the driver's {0} is reached")]
struct LimitReached(&'static str);

impl ResourceLimiter for Limiter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let wanted = self.memory.saturating_add(desired.saturating_sub(current));
        if wanted > self.memory_max {
            self.refused = true;
            return Err(LimitReached("memory").into());
        }
        self.memory = wanted;
        self.peak = self.peak.max(wanted);
        Ok(true)
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired > TABLE_ELEMENTS_MAX {
            return Err(LimitReached("table elements").into());
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        INSTANCES_MAX
    }

    fn tables(&self) -> usize {
        TABLES_MAX
    }

    fn memories(&self) -> usize {
        MEMORIES_MAX
    }
}
