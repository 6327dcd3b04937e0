//! The CPU of one call: measured by the thread's own clock around each poll, so that a thread that others displaced is not taken
//! for a guest that computes.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use nodedock_model::limit::FAST_LANE_CPU;

/// What one call has used, for the call itself, its owner and the slow lane.
#[derive(Default)]
pub(super) struct Meter {
    /// Nanoseconds of polls that have ended, and of the host's threads for it.
    used: AtomicU64,
    /// The thread's clock when the poll under way began.
    began: AtomicU64,
    /// It used more than is meant for the fast lane.
    is_slow: AtomicBool,
    waits: Mutex<Waits>,
}

#[derive(Default)]
struct Waits {
    total: Duration,
    since: Option<Instant>,
}

impl Meter {
    /// CPU so far, seen from within a poll.
    pub(super) fn now(&self) -> Duration {
        let poll = thread_cpu().saturating_sub(self.began.load(Relaxed));
        Duration::from_nanos(self.used.load(Relaxed).saturating_add(poll))
    }

    /// Runs what the host computes for the call on a thread of its own.
    pub(super) fn charge<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = thread_cpu();
        let done = work();
        self.used.fetch_add(thread_cpu().saturating_sub(began), Relaxed);
        done
    }

    /// CPU of polls that have ended.
    pub(super) fn used(&self) -> Duration {
        Duration::from_nanos(self.used.load(Relaxed))
    }

    /// From within a poll: whether the call has to leave the fast lane. It stays so.
    pub(super) fn turns_slow(&self, used: Duration) -> bool {
        let is_slow = used >= FAST_LANE_CPU;
        if is_slow {
            self.is_slow.store(true, Relaxed);
        }
        is_slow
    }

    pub(super) fn is_slow(&self) -> bool {
        self.is_slow.load(Relaxed) || self.used() >= FAST_LANE_CPU
    }

    /// It could go on, and has no turn.
    pub(super) fn waits(&self) {
        self.waiting().since.get_or_insert_with(Instant::now);
    }

    pub(super) fn has_its_turn(&self) {
        let mut waits = self.waiting();
        if let Some(since) = waits.since.take() {
            waits.total += since.elapsed();
        }
    }

    /// How long it waited for turns in all.
    pub(super) fn waited(&self) -> Duration {
        let waits = self.waiting();
        waits.total + waits.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn waiting(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Work whose CPU is measured.
pub(super) struct Metered<W> {
    meter: Arc<Meter>,
    work: Pin<Box<W>>,
}

impl<W> Metered<W> {
    pub(super) fn new(meter: Arc<Meter>, work: W) -> Self {
        Self { meter, work: Box::pin(work) }
    }
}

impl<W: Future> Future for Metered<W> {
    type Output = W::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<W::Output> {
        let began = thread_cpu();
        self.meter.began.store(began, Relaxed);
        let polled = self.work.as_mut().poll(cx);
        self.meter.used.fetch_add(thread_cpu().saturating_sub(began), Relaxed);
        polled
    }
}

/// Nanoseconds of CPU that this thread has had.
fn thread_cpu() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of our own, which the call fills in (clock_gettime(2)).
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    debug_assert_eq!(failed, 0, "every Linux has this clock");
    let nanoseconds = time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec);
    u64::try_from(nanoseconds).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn computing_is_counted_and_waiting_is_not() {
        let meter = Arc::new(Meter::default());
        let of_work = Arc::clone(&meter);
        let (go, may_go) = tokio::sync::oneshot::channel::<()>();
        let work = Metered::new(Arc::clone(&meter), async move {
            while of_work.now() < Duration::from_millis(2) {}
            may_go.await.unwrap();
            of_work.turns_slow(of_work.now())
        });
        tokio::pin!(work);
        assert!(futures::poll!(&mut work).is_pending());
        let before = meter.used();
        assert!(before >= Duration::from_millis(2), "{before:?}");
        let began = thread_cpu();
        while thread_cpu() - began < 20_000_000 {}
        go.send(()).unwrap();
        assert!(!work.await, "what others computed meanwhile is not its own");
        assert!(!meter.is_slow() && meter.used() < before + Duration::from_millis(2));
    }

    #[test]
    fn waits_for_turns_add_up() {
        let meter = Meter::default();
        assert_eq!(meter.waited(), Duration::ZERO);
        meter.waits();
        meter.waits();
        while meter.waited() < Duration::from_millis(2) {}
        meter.has_its_turn();
        let waited = meter.waited();
        assert!(waited >= Duration::from_millis(2));
        assert_eq!(meter.waited(), waited);
    }
}
