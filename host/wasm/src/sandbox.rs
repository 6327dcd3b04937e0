//! One call into a driver: a fresh store and instance, its limits, and what became of it.
//!
//! Is given a compiled driver and what to call; gives back the answer or why there is none. The store is dropped after each
//! call, so that nothing of a call, nor of a trap, outlives it. A call begins on the caller's thread, which costs nothing, and goes
//! on in the slow lane when it has used up its share there; one of a function that was slow lately begins in that lane.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use wasmtime::component::{Instance, InstancePre, ResourceTable};
use wasmtime::{Store, Trap, UpdateDeadline, WasmBacktrace};
use wasmtime_wasi::WasiCtx;

use super::engine::Runtime;
use super::hostcalls::CallView;
use super::limiter::{Limiter, Reached, millis};
use super::log::{DriverLog, LogSink};
use super::meter::{Meter, Metered};
use super::nodes::DevRoot;
use super::places::{Ask, Place, Places};
use super::stats::{Counters, Limit, Operation, Outcome, Usage};
use super::{Exports, wasi};
use nodedock_base::printable::printable;
use nodedock_core::driver::containment::{Containment, Ending, QUARANTINED};
use nodedock_core::driver::values::Journal;
use nodedock_core::driver::{Ledger, NodeFacts};
use nodedock_core::sysfs::SysfsRoot;
use nodedock_model::grant::{Effective, Limits};
use nodedock_model::limit::{FAST_LANE_CPU, HANDLES_MAX, LONG_CALL};
use nodedock_model::{DriverName, ObjectRef, Problem};

/// Frames of a backtrace that go into a message.
const FRAME_NAME_BYTES: usize = 120;
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
    /// The sandbox's.
    pub(super) counters: Arc<Counters>,
    pub(super) node: Arc<Node>,
    /// Reads below `/sys` that run or hang: a stuck one keeps its place.
    pub(super) blocking: Arc<Semaphore>,
}

/// A compiled driver within its bounds.
pub(super) struct Sandbox {
    pub(super) runtime: Arc<Runtime>,
    pub(super) pre: InstancePre<State>,
    pub(super) exports: Arc<Exports>,
    pub(super) scope: Arc<Scope>,
    /// Whose calls take turns with others'.
    pub(super) owner: u64,
    /// Linear memories of an instance.
    pub(super) memories: usize,
    pub(super) places: Places,
    pub(super) containment: Arc<Containment>,
    pub(super) counters: Arc<Counters>,
}

/// What a call may take.
pub(super) struct CallSpec {
    pub(super) operation: Operation,
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
    /// It did not begin.
    #[error("{0}")]
    Quarantined(Box<Problem>),
    #[error("{0}")]
    Busy(Crowd),
    #[error("the driver did not answer within {0:?}")]
    Timeout(Duration),
    #[error("the driver used more than {0:?} of CPU")]
    Cpu(Duration),
    #[error("the driver wanted more than {} MiB of memory", .0 >> 20)]
    Memory(usize),
    #[error("the driver passed more than {0} bytes at once")]
    TooMuchData(usize),
    /// Another limit of the sandbox.
    #[error(transparent)]
    Limit(#[from] Reached),
    #[error("the driver ended itself with exit({0})")]
    Exited(i32),
    #[error("the driver trapped: {message}")]
    Trapped { message: String, frames: Vec<String> },
}

/// A call that got no place in time among those that may run at once.
#[derive(Debug, Clone, Copy)]
pub struct Crowd {
    /// Of the driver's calls, or of all drivers'.
    limit: Limit,
    /// None: it had a place, and no turn.
    max: Option<usize>,
    waited: Duration,
}

impl std::fmt::Display for Crowd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whose = if self.limit == Limit::DriverCalls { "the driver" } else { "the node" };
        let others = self.max.map_or(String::new(), |max| format!("{max} "));
        write!(f, "{whose} was busy with {others}other calls for {:?}", self.waited)
    }
}

impl CallFailure {
    /// The limit that it is about.
    pub fn limit(&self) -> Option<Limit> {
        match self {
            Self::Busy(crowd) => Some(crowd.limit),
            Self::Timeout(_) => Some(Limit::Wall),
            Self::Cpu(_) => Some(Limit::Cpu),
            Self::Memory(_) => Some(Limit::Memory),
            Self::TooMuchData(_) => Some(Limit::HostcallData),
            Self::Limit(reached) => Some(reached.limit),
            Self::Quarantined(_) | Self::Exited(_) | Self::Trapped { .. } => None,
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Self::Quarantined(_) => Outcome::Quarantined,
            Self::Busy(_) => Outcome::Busy,
            Self::Timeout(_) => Outcome::Deadline,
            Self::Cpu(_) | Self::Memory(_) | Self::TooMuchData(_) | Self::Limit(_) => Outcome::Limit,
            Self::Exited(_) | Self::Trapped { .. } => Outcome::Trap,
        }
    }

    pub fn code(&self) -> &'static str {
        match self {
            Self::Quarantined(_) => QUARANTINED,
            Self::Busy(_) => "driver-busy",
            Self::Timeout(_) => "driver-deadline",
            Self::Cpu(_) => "driver-cpu-limit",
            Self::Memory(_) => "driver-memory-limit",
            Self::TooMuchData(_) => "driver-answer-too-large",
            Self::Limit(reached) => reached.code(),
            Self::Exited(_) => "driver-exited",
            Self::Trapped { .. } => "driver-trapped",
        }
    }

    pub(super) fn into_problem(self) -> Problem {
        let message = self.to_string();
        match self {
            Self::Quarantined(problem) => *problem,
            // Late is not wrong: the node may be busy.
            Self::Busy(_) | Self::Timeout(_) => Problem::unavailable(self.code(), message),
            _ => Problem::internal(self.code(), message),
        }
    }

    /// What it tells of the driver.
    fn ending(&self) -> Ending {
        match self {
            Self::Busy(_) | Self::Quarantined(_) => Ending::Untold,
            failure => Ending::Failed(failure.to_string()),
        }
    }
}

/// The function that is called in an instance.
pub(super) trait GuestCall<R>:
    for<'a> FnOnce(&'a mut Store<State>, &'a Instance, &'a Exports) -> BoxFuture<'a, wasmtime::Result<R>>
    + Send
    + 'static
{
}

impl<R, F> GuestCall<R> for F where
    F: for<'a> FnOnce(&'a mut Store<State>, &'a Instance, &'a Exports) -> BoxFuture<'a, wasmtime::Result<R>>
        + Send
        + 'static
{
}

/// What a guest came to, and what its store held.
type Finished<R> = (wasmtime::Result<R>, State);

impl Sandbox {
    /// Calls into a fresh instance.
    pub(super) async fn call<R: Send + 'static>(
        &self,
        spec: CallSpec,
        guest: impl GuestCall<R>,
    ) -> Result<Done<R>, CallFailure> {
        let operation = spec.operation;
        let pass = self.containment.admit(operation).map_err(|problem| {
            self.counters.record_held_back(operation);
            CallFailure::Quarantined(Box::new(problem))
        })?;
        let begin = Instant::now();
        let outcome = self.call_in_turn(begin, spec, guest).await;
        self.counters.record(operation, begin.elapsed(), outcome.as_ref().err());
        pass.ended(outcome.as_ref().err().map_or(Ending::Well, CallFailure::ending));
        outcome
    }

    async fn call_in_turn<R: Send + 'static>(
        &self,
        begin: Instant,
        spec: CallSpec,
        guest: impl GuestCall<R>,
    ) -> Result<Done<R>, CallFailure> {
        let (operation, deadline) = (spec.operation, spec.deadline);
        let ask = Ask {
            owner: self.owner,
            slow: self.containment.is_slow(operation),
            memories: self.memories,
            bytes: self.scope.limits.memory,
            own_max: self.scope.limits.concurrent_calls,
        };
        // Dropping the wait gives up the place in the queue and nothing else.
        let Ok(place) = tokio::time::timeout(deadline, self.places.take(ask)).await else {
            let (limit, max) = self.places.crowd(&ask);
            return Err(CallFailure::Busy(Crowd { limit, max: Some(max), waited: deadline }));
        };
        let waited = begin.elapsed();
        let whole = spec.wall.min(deadline);
        let wall = spec.wall.min(deadline.saturating_sub(waited));
        let meter = Arc::new(Meter::default());
        let work = self.work(place, &meter, spec, guest);
        let run = pin!(self.run(operation, &meter, work));
        let finished = self.in_time(operation, wall, run).await;
        if meter.is_slow() {
            self.containment.was_slow(operation);
        }
        match finished {
            Some((Ok(answer), _)) => Ok(Done { answer }),
            Some((Err(error), mut state)) => Err(self.failure(&mut state, &error)),
            None => Err(late(whole, waited.min(whole - wall), &meter)),
        }
    }

    /// None: the time is over. Dropping the run unwinds its fiber; the store is not used for the guest again.
    async fn in_time<T>(
        &self,
        operation: Operation,
        wall: Duration,
        mut run: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        if let Ok(finished) = tokio::time::timeout(wall.min(LONG_CALL), run.as_mut()).await {
            return Some(finished);
        }
        // It may sleep, or wait for the node: what it holds, others want.
        self.containment.was_slow(operation);
        tokio::time::timeout(wall.checked_sub(LONG_CALL)?, run).await.ok()
    }

    /// The whole of a call, on whatever thread. It holds its place until its store is gone.
    fn work<R: Send + 'static>(
        &self,
        place: Place,
        meter: &Arc<Meter>,
        spec: CallSpec,
        guest: impl GuestCall<R>,
    ) -> BoxFuture<'static, Finished<R>> {
        let held = (place, self.runtime.clock.tick());
        let store = self.store(spec.request, spec.writes_for, Arc::clone(meter));
        let (pre, exports) = (self.pre.clone(), Arc::clone(&self.exports));
        let work = async move {
            // In this order: the store goes first.
            let _held = held;
            let mut store = store;
            let result = async {
                let instance = pre.instantiate_async(&mut store).await?;
                guest(&mut store, &instance, &exports).await
            };
            (result.await, store.into_data())
        };
        Box::pin(Metered::new(Arc::clone(meter), work))
    }

    /// Carries the work on where it belongs.
    async fn run<T: Send + 'static>(
        &self,
        operation: Operation,
        meter: &Arc<Meter>,
        mut work: BoxFuture<'static, T>,
    ) -> T {
        // Another call may have shown meanwhile that the function is slow.
        if !self.containment.is_slow(operation) {
            if let Some(finished) = fast_share(meter, &mut work).await {
                return finished;
            }
            self.containment.was_slow(operation);
        }
        self.runtime.lane.finish(self.owner, meter, work).await
    }

    fn store(
        &self,
        request: Arc<str>,
        writes_for: Option<Arc<[ObjectRef]>>,
        meter: Arc<Meter>,
    ) -> Store<State> {
        let state = State::new(Arc::clone(&self.scope), request, writes_for, meter);
        let mut store = Store::new(&self.runtime.engine, state);
        store.limiter(|state| &mut state.limiter);
        store.set_hostcall_fuel(self.scope.limits.hostcall_bytes);
        store.set_max_component_handles(HANDLES_MAX);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut context| {
            let state = context.data_mut();
            let used = state.meter.now();
            if used >= state.scope.limits.cpu {
                return Ok(UpdateDeadline::Interrupt);
            }
            // A tick tells nothing of a call that began, or went on, just before it.
            let gives_way = state.meter.turns_slow(used);
            Ok(if gives_way { UpdateDeadline::Yield(1) } else { UpdateDeadline::Continue(1) })
        });
        store
    }

    fn failure(&self, state: &mut State, error: &wasmtime::Error) -> CallFailure {
        if let Some(exit) = error.downcast_ref::<wasmtime_wasi::I32Exit>() {
            return CallFailure::Exited(exit.0);
        }
        // Components with several memories can use up the slots before the calls are too many.
        if error.downcast_ref::<wasmtime::PoolConcurrencyLimitError>().is_some() {
            return CallFailure::Busy(Crowd { limit: Limit::NodeCalls, max: None, waited: Duration::ZERO });
        }
        if let Some(reached) = state.limiter.reached(error, self.scope.limits.hostcall_bytes) {
            state.view.refuse(reached.limit, reached.max);
            return match reached {
                Reached { limit: Limit::Memory, max } => CallFailure::Memory(max),
                Reached { limit: Limit::HostcallData, max } => CallFailure::TooMuchData(max),
                reached => CallFailure::Limit(reached),
            };
        }
        if error.downcast_ref::<Trap>() == Some(&Trap::Interrupt) {
            state.view.refuse(Limit::Cpu, millis(self.scope.limits.cpu));
            return CallFailure::Cpu(self.scope.limits.cpu);
        }
        let root = error.root_cause().to_string();
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

/// Polls work until it has used up its share of the fast lane: then None.
async fn fast_share<T>(meter: &Meter, work: &mut BoxFuture<'static, T>) -> Option<T> {
    std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(finished) => Poll::Ready(Some(finished)),
        Poll::Pending if meter.is_slow() => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    })
    .await
}

/// A call that waited for its place or its turn and had hardly one tells nothing of the driver.
fn late(wall: Duration, for_place: Duration, meter: &Meter) -> CallFailure {
    if for_place + meter.waited() > wall / 2 && meter.used() < FAST_LANE_CPU {
        CallFailure::Busy(Crowd { limit: Limit::NodeCalls, max: None, waited: wall })
    } else {
        CallFailure::Timeout(wall)
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
        (Some(name), _) => printable(name, FRAME_NAME_BYTES),
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
    pub(super) meter: Arc<Meter>,
    table: ResourceTable,
    wasi: Option<Box<WasiCtx>>,
}

impl State {
    fn new(
        scope: Arc<Scope>,
        request: Arc<str>,
        writes_for: Option<Arc<[ObjectRef]>>,
        meter: Arc<Meter>,
    ) -> Self {
        let mut table = ResourceTable::new();
        table.set_max_capacity(HANDLES_MAX);
        Self {
            log: LogSink::new(Arc::clone(&scope.log), Arc::clone(&request)),
            view: CallView::new(&scope.limits),
            writes_for,
            limiter: Limiter::new(scope.limits.memory),
            meter,
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

/// What the call used is counted also where it was given up.
impl Drop for State {
    fn drop(&mut self) {
        let mut usage = Usage {
            cpu: self.meter.used(),
            memory: self.limiter.memory(),
            table_elements: self.limiter.table_elements(),
            ..Usage::default()
        };
        self.view.tell(&mut usage);
        self.scope.counters.record_usage(&usage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_got_a_place_when_its_time_was_nearly_over_was_not_late_by_itself() {
        let (wall, meter) = (Duration::from_secs(5), Meter::default());
        assert!(matches!(late(wall, Duration::from_secs(4), &meter), CallFailure::Busy(_)));
        assert!(matches!(late(wall, Duration::from_secs(1), &meter), CallFailure::Timeout(_)));
        let computed = Meter::default();
        while computed.used() < FAST_LANE_CPU {
            computed.charge(|| std::hint::black_box((0..10_000u64).sum::<u64>()));
        }
        assert!(matches!(late(wall, Duration::from_secs(4), &computed), CallFailure::Timeout(_)));
    }
}
