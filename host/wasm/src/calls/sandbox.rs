//! One call into a driver: a fresh store and instance, its limits, and its result.
//!
//! The store is dropped after each call, so that nothing of a call, nor of a trap, outlives it. The thread on which a call runs is
//! chosen here by the rules of `executor`; how many calls run at once is limited by `concurrency`.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use wasmtime::component::Instance;
use wasmtime::{Store, Trap, UpdateDeadline, WasmBacktrace};

use crate::engine::Runtime;
use crate::host_functions::state::{CallState, Node, Scope};
use crate::host_functions::tap::Tap;
use crate::limits::call_failure::CallFailure;
use crate::limits::concurrency::{CallPermits, DriverPermits};
use crate::limits::executor::{CpuMeter, FAST_CPU, run_fast};
use crate::limits::limiter::{HANDLES_MAX, Reached, millis, reached};
use crate::load::compiled::{Compiled, Exports};
use crate::stats::{Limit, Operation, Outcome};
use nodedock_base::printable::{printable, shorten};
use nodedock_core::driver::containment::{CallResult, Containment};
use nodedock_core::driver::values::Journal;
use nodedock_core::driver::{Call, NodeFacts, PreparedClaims};
use nodedock_model::grant::Effective;
use nodedock_model::{DriverName, ObjectRef};

/// Wall clock after which a call counts as slow although it computes nothing: other calls wait for its permits.
const LONG_CALL: Duration = Duration::from_secs(1);
/// Bytes of a function's name and of a whole trap message, and frames of the backtrace in it.
const FRAME_NAME_BYTES: usize = 120;
const TRAP_MESSAGE_BYTES: usize = 900;
const FRAMES_SHOWN: usize = 3;

/// A compiled driver within its limits.
#[derive(Clone)]
pub(crate) struct Sandbox {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) compiled: Arc<Compiled>,
    pub(crate) scope: Arc<Scope>,
    pub(crate) permits: DriverPermits,
    pub(crate) containment: Arc<Containment>,
}

/// The function that is called in an instance.
pub(crate) trait GuestCall<R>:
    for<'a> FnOnce(
        &'a mut Store<CallState>,
        &'a Instance,
        &'a Exports,
    ) -> BoxFuture<'a, wasmtime::Result<R>>
    + Send
    + 'static
{
}

impl<R, F> GuestCall<R> for F where
    F: for<'a> FnOnce(
            &'a mut Store<CallState>,
            &'a Instance,
            &'a Exports,
        ) -> BoxFuture<'a, wasmtime::Result<R>>
        + Send
        + 'static
{
}

impl Sandbox {
    /// The same driver on another node with the same hardware.
    pub(crate) fn on_node(
        &self,
        facts: NodeFacts,
        prepared_claims: Arc<dyn PreparedClaims>,
        journal: Arc<dyn Journal>,
    ) -> Self {
        let scope = &self.scope;
        let node = Node {
            facts,
            prepared_claims,
            journal,
            ..(*scope.node).clone()
        };
        let scope = Scope {
            node: Arc::new(node),
            ..(**scope).clone()
        };
        Self {
            scope: Arc::new(scope),
            ..self.clone()
        }
    }

    /// The same driver, as if nothing were granted to it.
    pub(crate) fn with_nothing_granted(&self) -> Self {
        let scope = Scope {
            effective: Arc::new(Effective::none()),
            ..(*self.scope).clone()
        };
        Self {
            scope: Arc::new(scope),
            ..self.clone()
        }
    }

    /// Calls into a fresh instance. `writes_for` are the claims for which the driver may write below `/sys`.
    pub(crate) async fn call<R: Send + 'static>(
        &self,
        call: &Call,
        operation: Operation,
        writes_for: Option<Arc<[ObjectRef]>>,
        tap: Option<Tap>,
        guest: impl GuestCall<R>,
    ) -> Result<R, CallFailure> {
        let counters = &self.scope.counters;
        let admitted = self.containment.admit(operation).map_err(|problem| {
            counters.calls(operation, Outcome::Quarantined).inc();
            CallFailure::Quarantined(Box::new(problem))
        })?;
        let start = Instant::now();
        let answer = self
            .call_admitted(start, call, operation, writes_for, tap, guest)
            .await;
        let outcome = answer
            .as_ref()
            .err()
            .map_or(Outcome::Answered, CallFailure::outcome);
        counters.record(operation, start.elapsed(), outcome);
        // The call's store counted the other limits.
        match &answer {
            Err(CallFailure::Busy { limit, .. }) => counters.refuse(*limit),
            Err(CallFailure::Timeout(_)) => counters.refuse(Limit::Wall),
            Ok(_)
            | Err(
                CallFailure::Quarantined(_)
                | CallFailure::Limit(_)
                | CallFailure::Exited(_)
                | CallFailure::Trapped(_),
            ) => {}
        }
        admitted.ended(
            answer
                .as_ref()
                .err()
                .map_or(CallResult::Succeeded, CallFailure::call_result),
        );
        answer
    }

    /// Calls without a check of the quarantine.
    pub(crate) async fn call_admitted<R: Send + 'static>(
        &self,
        start: Instant,
        call: &Call,
        operation: Operation,
        writes_for: Option<Arc<[ObjectRef]>>,
        tap: Option<Tap>,
        guest: impl GuestCall<R>,
    ) -> Result<R, CallFailure> {
        let acquired = self.permits.acquire(self.containment.is_slow(operation));
        let Ok(permits) = tokio::time::timeout(call.deadline, acquired).await else {
            let (limit, max) = self.permits.exhausted();
            return Err(CallFailure::Busy {
                limit,
                max: Some(max),
                waited: call.deadline,
            });
        };
        let admitted = Instant::now();
        let wall_max = self.scope.wall(operation).min(call.deadline);
        let wall = wall_max.min(call.deadline.saturating_sub(admitted - start));
        let meter = Arc::new(CpuMeter::default());
        let state = CallState::new(&self.scope, call, writes_for, tap, &meter);
        let work = self.work(permits, state, guest);
        let ended = self
            .in_time(operation, wall, pin!(self.run(operation, &meter, work)))
            .await;
        if meter.is_slow() {
            self.containment.was_slow(operation);
        }
        match ended {
            Some((answer, mut state)) => answer.map_err(|error| self.failure(&mut state, &error)),
            None => {
                let for_thread = meter
                    .first_poll()
                    .map_or(wall, |first| first.saturating_duration_since(admitted));
                Err(timed_out(wall_max, wall_max - wall + for_thread, &meter))
            }
        }
    }

    /// None: the time is over. Dropping the run unwinds its fiber; the store is not used for the guest again.
    async fn in_time<T>(
        &self,
        operation: Operation,
        wall: Duration,
        mut run: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        if let Ok(ended) = tokio::time::timeout(wall.min(LONG_CALL), run.as_mut()).await {
            return Some(ended);
        }
        self.containment.was_slow(operation);
        // no error: `None` is the time that is over
        tokio::time::timeout(wall.checked_sub(LONG_CALL)?, run)
            .await
            .ok()
    }

    /// Runs the whole of a call, on any thread. It holds its permits until its store is dropped.
    fn work<R: Send + 'static>(
        &self,
        permits: CallPermits,
        state: CallState,
        guest: impl GuestCall<R>,
    ) -> BoxFuture<'static, (wasmtime::Result<R>, CallState)> {
        let held = (permits, self.runtime.clock.begin());
        let (compiled, meter) = (Arc::clone(&self.compiled), Arc::clone(&state.meter));
        let mut store = self.store(state);
        Box::pin(meter.measure(Box::pin(async move {
            let _held = held;
            let answer = async {
                let instance = compiled.pre.instantiate_async(&mut store).await?;
                guest(&mut store, &instance, &compiled.exports).await
            };
            (answer.await, store.into_data())
        })))
    }

    /// Runs the work on this thread, and on the slow runtime when it is slow, or calls of the same function were slow lately.
    async fn run<T: Send + 'static>(
        &self,
        operation: Operation,
        meter: &CpuMeter,
        mut work: BoxFuture<'static, T>,
    ) -> T {
        // Another call may have been slow since the permits were acquired.
        if !self.containment.is_slow(operation) {
            if let Some(ended) = run_fast(meter, &mut work).await {
                return ended;
            }
            self.containment.was_slow(operation);
        }
        self.runtime.slow.run(work).await
    }

    fn store(&self, state: CallState) -> Store<CallState> {
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
            // A tick alone says nothing: the call may have begun just before it.
            Ok(if used >= FAST_CPU {
                UpdateDeadline::Yield(1)
            } else {
                UpdateDeadline::Continue(1)
            })
        });
        store
    }

    fn failure(&self, state: &mut CallState, error: &wasmtime::Error) -> CallFailure {
        if let Some(exit) = error.downcast_ref::<wasmtime_wasi::I32Exit>() {
            return CallFailure::Exited(exit.0);
        }
        // Components with several memories can use up the slots before the calls are too many.
        if error
            .downcast_ref::<wasmtime::PoolConcurrencyLimitError>()
            .is_some()
        {
            return CallFailure::Busy {
                limit: Limit::NodeCalls,
                max: None,
                waited: Duration::ZERO,
            };
        }
        let interrupted = error.downcast_ref::<Trap>() == Some(&Trap::Interrupt);
        if let Some(Reached { limit, max }) = reached(error, self.scope.limits.hostcall_bytes)
            .or_else(|| {
                interrupted.then(|| Reached {
                    limit: Limit::Cpu,
                    max: millis(self.scope.limits.cpu),
                })
            })
        {
            return CallFailure::Limit(state.refuse(limit, max));
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
        CallFailure::Trapped(trap_message(state, &root, &frames))
    }
}

/// A call that lost most of its time waiting for permits or for a thread says nothing about the driver.
fn timed_out(wall: Duration, waited: Duration, meter: &CpuMeter) -> CallFailure {
    if waited > wall / 2 && !meter.is_slow() {
        CallFailure::Busy {
            limit: Limit::NodeCalls,
            max: None,
            waited: wall,
        }
    } else {
        CallFailure::Timeout(wall)
    }
}

/// The driver's last error in the log, which is what a panic says; else the trap and where it was.
fn trap_message(state: &CallState, root: &str, frames: &[String]) -> String {
    let message = state.log.last_error().unwrap_or_else(|| match frames {
        [] => root.to_owned(),
        frames => format!(
            "{root} in {}",
            frames[..frames.len().min(FRAMES_SHOWN)].join(" < ")
        ),
    });
    shorten(&message, TRAP_MESSAGE_BYTES)
}

fn frames(error: &wasmtime::Error) -> Vec<String> {
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else {
        return Vec::new();
    };
    backtrace.frames().iter().map(frame_name).collect()
}

fn frame_name(frame: &wasmtime::FrameInfo) -> String {
    match (frame.func_name(), frame.module_offset()) {
        (Some(name), _) => printable(name, FRAME_NAME_BYTES),
        (None, Some(offset)) => format!("function {} at {offset:#x}", frame.func_index()),
        (None, None) => format!("function {}", frame.func_index()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_start_is_no_driver_timeout() {
        let (wall, meter) = (Duration::from_secs(5), CpuMeter::default());
        assert!(matches!(
            timed_out(wall, Duration::from_secs(4), &meter),
            CallFailure::Busy { .. }
        ));
        assert!(matches!(
            timed_out(wall, Duration::from_secs(1), &meter),
            CallFailure::Timeout(_)
        ));
        while !meter.is_slow() {
            meter.charge(|| std::hint::black_box((0..10_000u64).sum::<u64>()));
        }
        assert!(matches!(
            timed_out(wall, Duration::from_secs(4), &meter),
            CallFailure::Timeout(_)
        ));
    }
}
