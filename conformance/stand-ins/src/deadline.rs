//! An end to waiting by the wall clock: tests that turn the clock of their runtime wait here too.

use std::future::Future;
use std::sync::mpsc;
use std::time::Duration;

use tokio::sync::oneshot;

/// Time after which every wait in this crate ends, with a panic that reports the events until then. The daemon keeps the sockets of a driver that is gone
/// for 30 s of it.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// `None` when the time is over first.
pub(crate) async fn within<T>(time: Duration, work: impl Future<Output = T>) -> Option<T> {
    let (over, late) = oneshot::channel();
    // Dropped with this future, which ends the thread.
    let (_keep, dropped) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if dropped.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = over.send(());
        }
    });
    tokio::select! {
        biased;
        done = work => Some(done),
        _ = late => None,
    }
}
