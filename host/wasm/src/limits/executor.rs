//! Execution of a guest's code, and the CPU time that it uses.
//!
//! A call starts on the caller's thread, where most calls end within microseconds. A call that has used `FAST_CPU` yields at its next epoch
//! tick and is then spawned on the slow runtime, whose threads have a lower priority. There, each poll lasts one epoch tick. CPU time is
//! read from the thread's own clock, so that a busy node is not mistaken for a busy guest.

use std::future::{Future, poll_fn};
use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::runtime::{Builder, Runtime};
use tokio_util::task::AbortOnDropHandle;

use nodedock_base::clock::thread_cpu;

/// CPU time that a call may use on a thread that serves other requests as well. Small drivers use a hundredth of it.
pub(crate) const FAST_CPU: Duration = Duration::from_millis(5);
/// Threads of the slow runtime: half of the cores, so that the other half is free for new calls, and never more than these.
const SLOW_THREADS_MAX: usize = 4;
/// Nice value of those threads: the serving threads come first, and on a busy node a slow call still ends.
const SLOW_NICE: i32 = 5;

/// The CPU time of one call.
#[derive(Default)]
pub(crate) struct CpuMeter {
    /// Nanoseconds of polls that have ended, and of the host's own threads that worked for the call.
    used: AtomicU64,
    /// The thread's clock when the current poll started.
    poll_start: AtomicU64,
    first_poll: OnceLock<Instant>,
}

impl CpuMeter {
    /// Polls a future and measures each poll.
    pub(crate) fn measure<T>(
        self: Arc<Self>,
        mut work: BoxFuture<'static, T>,
    ) -> impl Future<Output = T> + Send {
        poll_fn(move |cx| {
            self.first_poll.get_or_init(Instant::now);
            let start = thread_cpu();
            self.poll_start.store(nanoseconds(start), Relaxed);
            let polled = work.as_mut().poll(cx);
            self.add_since(start);
            polled
        })
    }

    /// Runs `work` on this thread and adds its CPU time to the call's.
    pub(crate) fn charge<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = thread_cpu();
        let result = work();
        self.add_since(start);
        result
    }

    fn add_since(&self, start: Duration) {
        self.used
            .fetch_add(nanoseconds(thread_cpu().saturating_sub(start)), Relaxed);
    }

    /// CPU time up to now, the current poll included. Only for code that runs within a poll.
    pub(crate) fn now(&self) -> Duration {
        let poll = nanoseconds(thread_cpu()).saturating_sub(self.poll_start.load(Relaxed));
        self.used() + Duration::from_nanos(poll)
    }

    /// CPU time of polls that have ended.
    pub(crate) fn used(&self) -> Duration {
        Duration::from_nanos(self.used.load(Relaxed))
    }

    /// Returns true if the call used more CPU time than a serving thread allows.
    pub(crate) fn is_slow(&self) -> bool {
        self.used() >= FAST_CPU
    }

    /// Returns the time at which the guest first got a thread.
    pub(crate) fn first_poll(&self) -> Option<Instant> {
        self.first_poll.get().copied()
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Polls `work` on this thread until it ends, or until it yields and has used too much CPU time for this thread: then `None`.
pub(crate) async fn run_fast<T>(meter: &CpuMeter, work: &mut BoxFuture<'static, T>) -> Option<T> {
    poll_fn(|cx| match work.as_mut().poll(cx) {
        std::task::Poll::Pending if meter.is_slow() => std::task::Poll::Ready(None),
        polled => polled.map(Some),
    })
    .await
}

/// A tokio runtime with low-priority threads.
pub(crate) struct SlowRuntime(Option<Runtime>);

impl SlowRuntime {
    pub(crate) fn start() -> io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = Builder::new_multi_thread()
            .worker_threads((cores / 2).clamp(1, SLOW_THREADS_MAX))
            .thread_name("slow-drivers")
            .on_thread_start(lower_priority)
            // A poll lasts a whole epoch tick: new tasks and timers are checked after each of them.
            .global_queue_interval(1)
            .event_interval(1)
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// Runs `work` to its end. When the returned future is dropped, the runtime drops `work` at its next yield.
    pub(crate) async fn run<T: Send + 'static>(&self, work: BoxFuture<'static, T>) -> T {
        let runtime = self
            .0
            .as_ref()
            .expect("the runtime is taken only when this is dropped");
        let ended = AbortOnDropHandle::new(runtime.spawn(work)).await;
        // A task is aborted only when its caller no longer waits for it: it has panicked.
        ended.unwrap_or_else(|error| resume_unwind(error.into_panic()))
    }
}

impl Drop for SlowRuntime {
    /// Does not wait for the threads: a guest may still run until its next tick.
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn lower_priority() {
    if let Err(error) = rustix::process::nice(SLOW_NICE) {
        tracing::warn!(%error, "slow drivers run with the same priority as everything else");
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn only_cpu_time_is_counted() {
        let meter = Arc::new(CpuMeter::default());
        let of_work = Arc::clone(&meter);
        let (go, gone) = oneshot::channel::<()>();
        let work = async move {
            while of_work.now() < Duration::from_millis(2) {}
            gone.await.unwrap();
        };
        let mut work = Box::pin(Arc::clone(&meter).measure(work.boxed()));
        assert!(futures::poll!(&mut work).is_pending());
        let before = meter.used();
        assert!(
            before >= Duration::from_millis(2) && meter.first_poll().is_some(),
            "{before:?}"
        );
        // Much more than the last poll may take, also on a machine whose CPU time others steal.
        let (start, between) = (thread_cpu(), FAST_CPU * 40);
        while thread_cpu() - start < between {}
        go.send(()).unwrap();
        work.await;
        assert!(meter.used() < before + between / 2);
        meter.charge(|| while thread_cpu() - start < between + 2 * FAST_CPU {});
        assert!(meter.is_slow());
    }

    #[tokio::test]
    async fn slow_work_ends_with_its_caller() {
        let slow = SlowRuntime::start().unwrap();
        let name = || std::thread::current().name().map(str::to_owned);
        let work = async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            tokio::task::spawn_blocking(name).await.unwrap().and(name())
        };
        assert_eq!(
            slow.run(work.boxed()).await.as_deref(),
            Some("slow-drivers")
        );
        for spins in [false, true] {
            let (held, dropped) = oneshot::channel::<()>();
            let (start, started) = oneshot::channel();
            let work = async move {
                let _held = held;
                start.send(()).unwrap();
                if !spins {
                    std::future::pending::<()>().await;
                }
                loop {
                    tokio::task::yield_now().await;
                }
            };
            {
                let mut call = Box::pin(slow.run(work.boxed()));
                assert!(futures::poll!(&mut call).is_pending());
                started.await.unwrap();
            }
            assert!(
                dropped.await.is_err(),
                "the sender is dropped with the work"
            );
        }
    }

    #[tokio::test]
    async fn panic_reaches_caller_and_spares_runtime() {
        let slow = SlowRuntime::start().unwrap();
        let panic = std::panic::AssertUnwindSafe(slow.run(async { panic!("story") }.boxed()))
            .catch_unwind();
        let panic: Result<(), _> = panic.await;
        assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"story"));
        assert_eq!(slow.run(async { 7 }.boxed()).await, 7);
    }
}
