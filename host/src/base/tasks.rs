//! Tasks: each has a name, an owner and an end.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

/// The tasks of one owner. Clones belong to the same owner.
#[derive(Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    pub fn new() -> Self {
        Self::default()
    }

    /// Tasks that stop with these, and can be stopped before.
    pub fn child(&self) -> Self {
        Self { tracker: TaskTracker::new(), stop: self.stop.child_token() }
    }

    /// Starts a task under a name. It is expected to end when `stopped` resolves.
    pub fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(work.instrument(tracing::info_span!("task", task = name)));
    }

    /// Resolves when the tasks are told to stop.
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        self.stop.clone().cancelled_owned()
    }

    pub fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Tells the tasks to stop.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Resolves when every task has ended by itself.
    #[cfg(test)]
    pub async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Tells the tasks to stop and waits for them. False: some were still there at the deadline.
    pub async fn drain(&self, deadline: Duration) -> bool {
        self.stop.cancel();
        self.tracker.close();
        tokio::time::timeout(deadline, self.tracker.wait()).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_tasks_that_end_and_gives_up_on_those_that_do_not() {
        let tasks = Tasks::new();
        let stopped = tasks.stopped();
        tasks.spawn("good", stopped);
        assert!(tasks.drain(Duration::from_secs(1)).await);

        let tasks = Tasks::new();
        tasks.spawn("bad", std::future::pending());
        assert!(!tasks.drain(Duration::from_secs(1)).await);
    }
}
