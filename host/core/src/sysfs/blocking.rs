//! Work on the node's files that may hang in the kernel: in threads of its own, bounded in time and in number.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use nodedock_model::limit::SYSFS_WRITE_WALL;
use nodedock_model::{Problem, ProblemCode};

/// Threads of one driver that read below `/sys` or hang in it.
pub const SYSFS_THREADS_PER_DRIVER: usize = 8;
/// A read from the node that takes longer hangs in the kernel.
pub const LOOK_WALL: Duration = Duration::from_secs(2);

/// Runs `work` in a thread. A thread that hangs keeps its permit, so that a driver cannot use up all threads; its caller gets `stuck`.
pub async fn blocking<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    wall: Duration,
    stuck: impl Fn() -> Problem,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let deadline = Instant::now() + wall;
    let permit = tokio::time::timeout_at(deadline, Arc::clone(permits).acquire_owned()).await;
    let Ok(Ok(permit)) = permit else {
        return Err(stuck());
    };
    // Work is not started when its caller no longer waits.
    let caller = Arc::new(());
    let waiting = Arc::downgrade(&caller);
    let thread = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        match waiting.strong_count() {
            0 => Err(Problem::unavailable(
                ProblemCode::GivenUp,
                "the caller no longer waits for it",
            )),
            _ => work(),
        }
    });
    let ended = tokio::time::timeout_at(deadline, thread).await;
    drop(caller);
    match ended {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(Problem::unavailable(
            ProblemCode::IoError,
            "the host could not look",
        )),
        Err(_) => Err(stuck()),
    }
}

/// The kernel did not take a value in time.
pub fn write_stuck() -> Problem {
    let message = format!("the node did not take the value within {SYSFS_WRITE_WALL:?}");
    Problem::unavailable(ProblemCode::SysfsStuck, message)
}
