use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use super::*;

/// Gives its turn away a number of times, noting each turn.
async fn turns(name: &'static str, count: usize, notes: Arc<Mutex<Vec<&'static str>>>) {
    for _ in 0..count {
        notes.lock().unwrap().push(name);
        let mut yielded = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}

#[test]
fn owners_take_turns_and_so_do_the_items_of_one() {
    let mut turns = Turns::default();
    for item in ["a1", "a2", "a3"] {
        turns.push(1, item);
    }
    turns.push(2, "b1");
    turns.push(3, "c1");
    assert_eq!(turns.pop(), Some("a1"));
    turns.push(2, "b2");
    turns.push(1, "a1 again");
    let rest: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
    assert_eq!(rest, ["b1", "c1", "a2", "b2", "a3", "a1 again"]);
    assert!(turns.is_empty() && turns.items.is_empty());
}

#[tokio::test]
async fn a_driver_with_many_calls_gets_no_more_turns_than_one_with_a_single_call() {
    let lane = Lane::with_threads(1).unwrap();
    let (notes, meter) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<Meter>::default());
    // Nobody is polled before all are there.
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let first = lane.finish(9, &meter, async move { may_go.recv().unwrap() }.boxed());
    let greedy: Vec<_> = (0..8)
        .map(|_| lane.finish(1, &meter, turns("greedy", 10, Arc::clone(&notes)).boxed()).boxed())
        .collect();
    let modest = lane.finish(2, &meter, turns("modest", 10, Arc::clone(&notes)).boxed());
    let all = futures::future::join3(first, futures::future::join_all(greedy), modest);
    tokio::pin!(all);
    assert!(futures::poll!(&mut all).is_pending());
    go.send(()).unwrap();
    all.await;
    let notes = notes.lock().unwrap();
    let last = notes.iter().rposition(|name| *name == "modest").unwrap();
    let greedy = notes[..last].iter().filter(|name| **name == "greedy").count();
    assert!((9..=11).contains(&greedy), "{greedy} turns of the greedy driver for 10 of the modest one");
}

#[tokio::test]
async fn work_may_wait_for_timers_and_blocking_threads_of_the_callers_runtime() {
    let lane = Lane::with_threads(1).unwrap();
    let work = async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        tokio::task::spawn_blocking(|| std::thread::current().name().map(str::to_owned)).await.unwrap()
    };
    let (meter, thread) = (Arc::default(), std::thread::current().id());
    let of_work = async { (std::thread::current().id(), std::thread::current().name().map(str::to_owned)) };
    lane.finish(1, &meter, work.boxed()).await;
    let (other, name) = lane.finish(1, &meter, of_work.boxed()).await;
    assert_eq!(name.as_deref(), Some("slow-lane"));
    assert_ne!(other, thread);
}

/// Counts its end.
struct Held(Arc<AtomicUsize>, Option<oneshot::Sender<()>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        // The test may be over.
        let _ = self.1.take().map(|told| told.send(()));
    }
}

#[tokio::test]
async fn work_is_dropped_when_its_caller_goes_away_whether_it_waits_or_computes() {
    let lane = Lane::with_threads(1).unwrap();
    let ends = Arc::<AtomicUsize>::default();
    let (told, dropped) = oneshot::channel();
    let held = Held(Arc::clone(&ends), Some(told));
    let (begun, has_begun) = oneshot::channel();
    let waiting = async move {
        let _held = held;
        begun.send(()).unwrap();
        std::future::pending::<()>().await;
    };
    let meter = Arc::default();
    {
        let call = lane.finish(1, &meter, waiting.boxed());
        tokio::pin!(call);
        assert!(futures::poll!(&mut call).is_pending());
        has_begun.await.unwrap();
        assert_eq!(ends.load(SeqCst), 0);
    }
    dropped.await.unwrap();

    let (told, dropped) = oneshot::channel();
    let held = Held(Arc::clone(&ends), Some(told));
    let computing = async move {
        let _held = held;
        turns("endless", usize::MAX, Arc::default()).await;
    };
    {
        let call = lane.finish(1, &meter, computing.boxed());
        tokio::pin!(call);
        assert!(futures::poll!(&mut call).is_pending());
    }
    dropped.await.unwrap();
    assert_eq!(ends.load(SeqCst), 2);
}

#[tokio::test]
async fn a_panic_reaches_the_caller_and_the_lane_goes_on() {
    let lane = Lane::with_threads(1).unwrap();
    let meter = Arc::default();
    let bad = AssertUnwindSafe(lane.finish(1, &meter, async { panic!("story") }.boxed())).catch_unwind();
    let panic: Result<(), _> = bad.await;
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"story"));
    assert_eq!(lane.finish(1, &meter, async { 7 }.boxed()).await, 7);
}
