//! Requests to one resource that blocks, such as a log that is synced: carried out on the caller's thread if no other is carried out just
//! then. The ones that come meanwhile wait, and the first of them carries out all of them together. So a request changes threads only if
//! it waits, and one sync serves many.
//!
//! A batch that takes long, as on a disk that hangs, is noticed by a thread of its own: that wakes a thread of the runtime, which then
//! waits for sockets and timers in place of the blocked one, and reports the batch to its server.

mod long;

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Semaphore, oneshot};

use crate::woken;
use long::UnderWay;

pub use long::LONG;

/// Requests that may wait; further ones wait for a slot.
const QUEUE: usize = 1024;

/// A server that executes requests.
pub trait Serve: Send + Sync + 'static {
    type Request: Send + 'static;
    type Outcome: Send + 'static;

    /// Carries out requests in their order, and returns the outcome of each. Blocks the thread.
    fn serve(&self, requests: Vec<Self::Request>) -> Vec<Self::Outcome>;

    /// Returns the amount that a request adds to the weight of its batch.
    fn weight(request: &Self::Request) -> usize;

    /// Returns whether `upkeep` is due after a batch.
    fn wants_upkeep(&self) -> bool {
        false
    }

    /// Work between two batches for which no caller waits. Blocks the thread.
    fn upkeep(&self) {}

    /// Called once for a batch that has taken longer than [`LONG`], from another thread. Does not block.
    fn takes_long(&self) {}
}

/// Requests in their order. Clones share it.
pub struct Batches<S: Serve>(Arc<BatchServer<S>>);

struct BatchServer<S: Serve> {
    server: S,
    /// A batch that is at least as heavy gets no other request: bounds its time.
    weight_max: usize,
    queue: Mutex<Queue<S>>,
    slots: Semaphore,
}

struct Queue<S: Serve> {
    waiting: VecDeque<(S::Request, oneshot::Sender<Turn<S>>)>,
    /// True while a leader executes requests; it passes the lead on when it is done.
    is_led: bool,
}

/// The message that a waiting request receives.
enum Turn<S: Serve> {
    Done(S::Outcome),
    /// It is the first of the waiting ones, and carries them out.
    Lead(Leader<S>),
}

/// A request that has its place in the order.
pub enum Entered<S: Serve> {
    First(Leader<S>),
    Waiting(Waiting<S>),
}

pub struct Waiting<S: Serve>(oneshot::Receiver<Turn<S>>);

/// The right to carry out requests, with the own one. One that is dropped, since its caller is gone, carries them out all the same.
pub struct Leader<S: Serve> {
    shared: Arc<BatchServer<S>>,
    own: Option<S::Request>,
}

impl<S: Serve> Clone for Batches<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Serve> Batches<S> {
    pub fn new(server: S, weight_max: usize) -> Self {
        let queue = Mutex::new(Queue {
            waiting: VecDeque::new(),
            is_led: false,
        });
        Self(Arc::new(BatchServer {
            server,
            weight_max,
            queue,
            slots: Semaphore::new(QUEUE),
        }))
    }

    pub fn server(&self) -> &S {
        &self.0.server
    }

    /// Carries out a request. `None`: a defect ended it. Dropping the future does not undo it.
    pub async fn request(&self, request: S::Request) -> Option<S::Outcome> {
        self.request_in_order(|| Some(((), request))).await
    }

    /// The same with a request that is made when its place in the order is fixed; what comes with it, such as a lock guard, is dropped
    /// after that. `None`: there is nothing to do.
    pub async fn request_in_order<L>(
        &self,
        request: impl FnOnce() -> Option<(L, S::Request)>,
    ) -> Option<S::Outcome> {
        // no error: it is never closed
        let _slot = self.0.slots.acquire().await.ok()?;
        let entered = {
            let (_lock, request) = request()?;
            self.enter(request)
        };
        entered.outcome().await
    }

    /// Gives a request its place in the order, beyond the bound of those that wait. Does not block.
    pub fn enter(&self, request: S::Request) -> Entered<S> {
        let mut queue = self.0.queue.lock();
        if mem::replace(&mut queue.is_led, true) {
            let (turn, waiting) = oneshot::channel();
            queue.waiting.push_back((request, turn));
            return Entered::Waiting(Waiting(waiting));
        }
        Entered::First(Leader {
            shared: self.0.clone(),
            own: Some(request),
        })
    }
}

impl<S: Serve> Entered<S> {
    pub async fn outcome(self) -> Option<S::Outcome> {
        match self {
            Self::First(leader) => leader.lead(),
            // no error: `None` says that the leader was dropped
            Self::Waiting(waiting) => match waiting.0.await.ok()? {
                Turn::Done(outcome) => Some(outcome),
                Turn::Lead(leader) => leader.lead(),
            },
        }
    }
}

impl<S: Serve> Leader<S> {
    /// Carries out the own request and those that wait, and passes on. Returns the own outcome.
    pub fn lead(mut self) -> Option<S::Outcome> {
        in_place(|| self.carry_out())
    }

    fn carry_out(&mut self) -> Option<S::Outcome> {
        let own = self.own.take()?;
        let next = Next(Some(self.shared.clone()));
        let (mut requests, mut others) = (vec![own], Vec::new());
        let mut weight = S::weight(&requests[0]);
        {
            let mut queue = self.shared.queue.lock();
            while weight < self.shared.weight_max
                && let Some((request, turn)) = queue.waiting.pop_front()
            {
                weight += S::weight(&request);
                requests.push(request);
                others.push(turn);
            }
        }
        let under_way = UnderWay::begin(self.shared.clone());
        let mut outcomes = self.shared.server.serve(requests).into_iter();
        drop(under_way);
        let own = outcomes.next();
        if !others.is_empty() {
            woken::note();
        }
        for (turn, outcome) in others.into_iter().zip(outcomes) {
            // A cancelled caller gets no response.
            turn.send(Turn::Done(outcome)).ok();
        }
        if self.shared.server.wants_upkeep() {
            next.after_upkeep();
        }
        own
    }
}

impl<S: Serve> Drop for Leader<S> {
    fn drop(&mut self) {
        self.carry_out();
    }
}

/// Makes the first of the waiting requests the leader when it is dropped, also by a panic.
struct Next<S: Serve>(Option<Arc<BatchServer<S>>>);

impl<S: Serve> Next<S> {
    /// Passes on after the upkeep, which runs on a thread of its own.
    fn after_upkeep(mut self) {
        let next = Self(self.0.take());
        let upkeep = move || {
            if let Some(shared) = &next.0 {
                shared.server.upkeep();
            }
        };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(upkeep)),
            Err(_) => upkeep(),
        }
    }
}

impl<S: Serve> Drop for Next<S> {
    fn drop(&mut self) {
        let Some(shared) = self.0.take() else { return };
        let next = {
            let mut queue = shared.queue.lock();
            let next = queue.waiting.pop_front();
            queue.is_led = next.is_some();
            next
        };
        if let Some((request, turn)) = next {
            woken::note();
            // A caller that is gone drops its leader, which carries the requests out.
            drop(turn.send(Turn::Lead(Leader {
                shared,
                own: Some(request),
            })));
        }
    }
}

/// Runs a step that usually takes less time than to wake another thread, and may hang with its disk. At most one thread of a runtime waits
/// for such a step itself; for others tokio replaces the thread first.
fn in_place<T>(step: impl FnOnce() -> T) -> T {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    struct Taken;
    impl Drop for Taken {
        fn drop(&mut self) {
            IS_TAKEN.store(false, Ordering::Release);
        }
    }
    let Ok(runtime) = Handle::try_current() else {
        return step();
    };
    if runtime.runtime_flavor() != RuntimeFlavor::MultiThread {
        return step();
    }
    if runtime.metrics().num_workers() < 2 || IS_TAKEN.swap(true, Ordering::Acquire) {
        return tokio::task::block_in_place(step);
    }
    let _taken = Taken;
    woken::release();
    step()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Adds up numbers; 0 is an error of its own, and a multiple of 100 wants upkeep.
    #[derive(Default)]
    struct Sums {
        batches: Mutex<Vec<Vec<usize>>>,
        upkeeps: AtomicUsize,
    }

    impl Serve for Sums {
        type Request = usize;
        type Outcome = usize;

        fn serve(&self, requests: Vec<usize>) -> Vec<usize> {
            assert!(!requests.contains(&usize::MAX), "story");
            self.batches.lock().push(requests.clone());
            requests.iter().map(|number| number * 2).collect()
        }

        fn weight(_: &usize) -> usize {
            1
        }

        fn wants_upkeep(&self) -> bool {
            self.batches
                .lock()
                .last()
                .is_some_and(|last| last[0].is_multiple_of(100))
        }

        fn upkeep(&self) {
            self.upkeeps.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn leader(batches: &Batches<Sums>, number: usize) -> Leader<Sums> {
        match batches.enter(number) {
            Entered::First(leader) => leader,
            Entered::Waiting(_) => panic!("another leads"),
        }
    }

    #[tokio::test]
    async fn waiting_requests_form_bounded_batches() {
        let batches = Batches::new(Sums::default(), 3);
        assert_eq!(batches.request(1).await, Some(2));
        let first = leader(&batches, 2);
        let mut waiting: Vec<_> = (3..8)
            .map(|number| Box::pin(batches.request(number)))
            .collect();
        for request in &mut waiting {
            assert!(futures::poll!(request).is_pending());
        }
        assert_eq!(first.lead(), Some(4));
        assert_eq!(
            futures::future::join_all(waiting).await,
            [6, 8, 10, 12, 14].map(Some)
        );
        assert_eq!(
            *batches.server().batches.lock(),
            [vec![1], vec![2, 3, 4], vec![5, 6, 7]]
        );
    }

    #[tokio::test]
    async fn cancelled_request_does_not_stop_queue() {
        let batches = Batches::new(Sums::default(), 1);
        let first = leader(&batches, 1);
        let mut last = Box::pin(batches.request(3));
        {
            let mut gone = Box::pin(batches.request(2));
            assert!(
                futures::poll!(&mut gone).is_pending() && futures::poll!(&mut last).is_pending()
            );
        }
        drop(first);
        assert_eq!(last.await, Some(6));
        assert_eq!(*batches.server().batches.lock(), [[1], [2], [3]]);
    }

    #[tokio::test]
    async fn upkeep_runs_between_batches_without_waiting() {
        let batches = Batches::new(Sums::default(), 1);
        assert_eq!(batches.request(100).await, Some(200));
        // It waits for the upkeep.
        assert_eq!(batches.request(1).await, Some(2));
        assert_eq!(batches.server().upkeeps.load(Ordering::Relaxed), 1);
    }

    /// Carries out a request only after something else has happened: fails if it does not.
    struct Hangs {
        happened: Mutex<std::sync::mpsc::Receiver<()>>,
        happens: std::sync::mpsc::Sender<()>,
        is_reported: bool,
    }

    impl Hangs {
        fn new(is_reported: bool) -> Self {
            let (happens, happened) = std::sync::mpsc::channel();
            Self {
                happened: Mutex::new(happened),
                happens,
                is_reported,
            }
        }
    }

    impl Serve for Hangs {
        type Request = Option<std::os::unix::net::UnixStream>;
        type Outcome = bool;

        fn serve(&self, requests: Vec<Self::Request>) -> Vec<bool> {
            for mut socket in requests.into_iter().flatten() {
                std::io::Write::write_all(&mut socket, b"x").unwrap();
            }
            let deadline = std::time::Duration::from_secs(60);
            vec![self.happened.lock().recv_timeout(deadline).is_ok()]
        }

        fn weight(_: &Self::Request) -> usize {
            1
        }

        fn takes_long(&self) {
            if self.is_reported {
                self.happens.send(()).unwrap();
            }
        }
    }

    #[tokio::test]
    async fn long_batch_is_reported_to_server() {
        let batches = Batches::new(Hangs::new(true), 1);
        assert_eq!(batches.request(None).await, Some(true));
        assert_eq!(batches.request(None).await, Some(true));
        let left = batches.server().happened.lock().try_recv();
        assert!(left.is_err(), "each is reported once");
    }

    /// A thread that blocked in a batch had waited for the sockets before, and no other did.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn sockets_are_read_during_long_batch() {
        use tokio::io::AsyncReadExt;
        let batches = Batches::new(Hangs::new(false), 1);
        for _ in 0..8 {
            let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
            here.set_nonblocking(true).unwrap();
            let mut here = tokio::net::UnixStream::from_std(here).unwrap();
            let happens = batches.server().happens.clone();
            let reader = tokio::spawn(async move {
                assert_eq!(here.read(&mut [0]).await.unwrap(), 1);
                happens.send(()).unwrap();
            });
            let of_request = batches.clone();
            let request = tokio::spawn(async move { of_request.request(Some(there)).await });
            assert_eq!(request.await.unwrap(), Some(true));
            reader.await.unwrap();
        }
    }

    #[tokio::test]
    async fn panic_ends_only_its_batch() {
        let batches = Batches::new(Sums::default(), 2);
        let first = leader(&batches, usize::MAX);
        let (mut with_it, mut after) = (Box::pin(batches.request(1)), Box::pin(batches.request(2)));
        assert!(
            futures::poll!(&mut with_it).is_pending() && futures::poll!(&mut after).is_pending()
        );
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| first.lead()));
        assert!(panic.is_err());
        assert_eq!((with_it.await, after.await), (None, Some(4)));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn concurrent_requests_complete_despite_cancellation() {
        let batches = Batches::new(Sums::default(), 8);
        let caller = |n: usize| {
            let batches = batches.clone();
            tokio::spawn(async move {
                for round in 1..50 {
                    let number = n * 100 + round;
                    let request = batches.request(number);
                    if n.is_multiple_of(4) {
                        // Polled once, and dropped if it waits.
                        let _ = futures::poll!(std::pin::pin!(request));
                    } else {
                        assert_eq!(request.await, Some(number * 2));
                    }
                }
            })
        };
        for caller in (0..16).map(caller).collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        assert_eq!(batches.request(7).await, Some(14));
        let carried_out: usize = batches.server().batches.lock().iter().map(Vec::len).sum();
        assert!(carried_out > 12 * 49, "{carried_out}");
    }
}
