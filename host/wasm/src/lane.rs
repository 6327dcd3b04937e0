//! The slow lane: a few threads of lower priority, on which calls go on that have used up their share of the serving threads.
//!
//! Drivers take turns, and within a driver its calls: a turn is one poll, which a guest ends at its next epoch tick. So a driver
//! with many calls that compute gets no more than one with a single such call, and fresh calls of all find the serving threads
//! free.

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::meter::Meter;
use nodedock_model::limit::{SLOW_THREADS_MAX, SLOW_THREADS_NICE};

/// The threads end when it is dropped and nothing is left to do.
pub(super) struct Lane(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    turns: Turns<Arc<Job>>,
    stopped: bool,
}

impl Lane {
    pub(super) fn start() -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads((cores / 2).clamp(1, SLOW_THREADS_MAX))
    }

    fn with_threads(count: usize) -> std::io::Result<Self> {
        let lane = Self(Arc::new(Shared { queue: Mutex::default(), ready: Condvar::new() }));
        for _ in 0..count {
            let shared = Arc::clone(&lane.0);
            std::thread::Builder::new().name("slow-lane".into()).spawn(move || {
                if let Err(error) = rustix::process::nice(SLOW_THREADS_NICE) {
                    tracing::warn!(%error, "slow drivers run with the priority of all others");
                }
                shared.work();
            })?;
        }
        Ok(lane)
    }

    /// Carries work on to its end. When the caller goes away the work is dropped, at the end of its turn.
    pub(super) async fn finish<T: Send + 'static>(
        &self,
        owner: u64,
        meter: &Arc<Meter>,
        work: BoxFuture<'static, T>,
    ) -> T {
        let (done, outcome) = oneshot::channel();
        let work = async move {
            let outcome = AssertUnwindSafe(work).catch_unwind().await;
            // The caller may have gone away.
            drop(done.send(outcome));
        };
        let job = Arc::new(Job {
            owner,
            meter: Arc::clone(meter),
            runtime: Handle::current(),
            lane: Arc::downgrade(&self.0),
            state: Mutex::new(State { work: Some(work.boxed()), step: Step::Waits, given_up: false }),
        });
        let _call = GivenUp(Arc::clone(&job));
        job.wake_by_ref();
        match outcome.await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_) => unreachable!("work is dropped before its end only when its caller goes away"),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.0.queue().stopped = true;
        self.0.ready.notify_all();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            job.take_turn();
        }
    }

    /// None: there is nothing more to come.
    fn next(&self) -> Option<Arc<Job>> {
        let idle = |queue: &mut Queue| queue.turns.is_empty() && !queue.stopped;
        let mut queue = self.ready.wait_while(self.queue(), idle).unwrap_or_else(PoisonError::into_inner);
        queue.turns.pop()
    }

    fn enqueue(&self, job: Arc<Job>) {
        job.meter.waits();
        self.queue().turns.push(job.owner, job);
        self.ready.notify_one();
    }
}

/// A call in the lane.
struct Job {
    owner: u64,
    meter: Arc<Meter>,
    /// For the timers and blocking threads of host functions.
    runtime: Handle,
    lane: Weak<Shared>,
    state: Mutex<State>,
}

struct State {
    /// None while it is polled, and after its end.
    work: Option<BoxFuture<'static, ()>>,
    step: Step,
    given_up: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// For what a host function waits for.
    Waits,
    Queued,
    Polled,
    /// It may go on at once when the poll has ended.
    PolledAndWoken,
    Over,
}

impl Job {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_turn(self: &Arc<Self>) {
        self.meter.has_its_turn();
        let mut state = self.state();
        let Some(mut work) = state.work.take() else { return };
        let given_up = state.given_up;
        state.step = if given_up { Step::Over } else { Step::Polled };
        drop(state);
        let _runtime = self.runtime.enter();
        if given_up {
            drop(work);
            return;
        }
        let waker = Waker::from(Arc::clone(self));
        let polled = work.as_mut().poll(&mut Context::from_waker(&waker));
        self.turn_ended(work, polled);
    }

    fn turn_ended(self: &Arc<Self>, work: BoxFuture<'static, ()>, polled: Poll<()>) {
        let mut state = self.state();
        if polled.is_ready() || state.given_up {
            state.step = Step::Over;
            // What it holds is dropped without the lock.
            drop(state);
            drop(work);
            return;
        }
        state.work = Some(work);
        let again = state.step == Step::PolledAndWoken;
        state.step = if again { Step::Queued } else { Step::Waits };
        drop(state);
        if again {
            self.enqueue();
        }
    }

    fn enqueue(self: &Arc<Self>) {
        match self.lane.upgrade() {
            Some(lane) => lane.enqueue(Arc::clone(self)),
            // The threads are gone, so nobody polls it.
            None => drop(self.state().work.take()),
        }
    }

    /// Has it dropped by the lane's threads: to give its memory back takes time.
    fn give_up(self: &Arc<Self>) {
        let mut state = self.state();
        state.given_up = true;
        if state.step == Step::Waits {
            state.step = Step::Queued;
            drop(state);
            self.enqueue();
        }
    }
}

impl Wake for Job {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.state();
        match state.step {
            Step::Waits => {
                state.step = Step::Queued;
                drop(state);
                self.enqueue();
            }
            Step::Polled => state.step = Step::PolledAndWoken,
            Step::Queued | Step::PolledAndWoken | Step::Over => {}
        }
    }
}

/// Gives a job up when its caller goes away.
struct GivenUp(Arc<Job>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// Items of several owners, who take turns.
struct Turns<T> {
    /// Those with items, the next first.
    owners: VecDeque<u64>,
    items: HashMap<u64, VecDeque<T>>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { owners: VecDeque::new(), items: HashMap::new() }
    }
}

impl<T> Turns<T> {
    fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    fn push(&mut self, owner: u64, item: T) {
        let items = self.items.entry(owner).or_default();
        if items.is_empty() {
            self.owners.push_back(owner);
        }
        items.push_back(item);
    }

    fn pop(&mut self) -> Option<T> {
        let owner = self.owners.pop_front()?;
        let items = self.items.get_mut(&owner)?;
        let item = items.pop_front();
        if items.is_empty() {
            self.items.remove(&owner);
        } else {
            self.owners.push_back(owner);
        }
        item
    }
}

#[cfg(test)]
mod tests;
