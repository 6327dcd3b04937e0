//! Work on the node's files that may hang in the kernel: off the async threads, bounded in time and in number.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use nodedock_model::Problem;
use nodedock_model::limit::SYSFS_WRITE_WALL;

/// Runs `work` in a thread. One that hangs keeps its place, so that nobody uses up all threads; `stuck` is the
/// problem of who waited for it.
pub async fn blocking<T: Send + 'static>(
    places: &Arc<Semaphore>,
    wall: Duration,
    stuck: impl Fn() -> Problem,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let deadline = Instant::now() + wall;
    let place = tokio::time::timeout_at(deadline, Arc::clone(places).acquire_owned()).await;
    let Ok(Ok(place)) = place else { return Err(stuck()) };
    // What nobody waits for any more is not begun.
    let waited_for = Arc::new(());
    let wanted = Arc::downgrade(&waited_for);
    let thread = tokio::task::spawn_blocking(move || {
        let _place = place;
        if wanted.strong_count() == 0 {
            return Err(Problem::unavailable("given-up", "nobody waits for it any more"));
        }
        work()
    });
    let ended = tokio::time::timeout_at(deadline, thread).await;
    drop(waited_for);
    match ended {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(Problem::unavailable("io-error", "the host could not look")),
        Err(_) => Err(stuck()),
    }
}

/// The kernel did not take a value in time.
pub fn write_stuck() -> Problem {
    let message = format!("the node did not take the value within {SYSFS_WRITE_WALL:?}");
    Problem::unavailable("sysfs-stuck", message)
}
