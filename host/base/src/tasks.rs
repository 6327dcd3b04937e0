//! Tasks: each has a name, an owner and an end.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument;

use crate::woken;

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

    /// Returns tasks that stop with these, and can be stopped earlier.
    pub fn child(&self) -> Self {
        Self {
            tracker: TaskTracker::new(),
            stop: self.stop.child_token(),
        }
    }

    /// Starts a named task. It must end when `stopped` resolves.
    pub fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        woken::note();
        self.tracker
            .spawn(work.instrument(tracing::info_span!("task", task = name)));
    }

    /// Starts a named task that is dropped when the tasks must stop.
    pub fn spawn_until_stopped(
        &self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let stopped = self.stopped();
        self.spawn(name, async move {
            tokio::select! {
                () = stopped => {}
                () = work => {}
            }
        });
    }

    /// Runs work to completion even if the caller is cancelled: in the caller's own task while it waits, which saves two thread switches,
    /// and in a task of its own after a cancellation. `None`: the work panicked.
    pub async fn complete<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let span = tracing::info_span!("task", task = name);
        let work = AssertUnwindSafe(work)
            .catch_unwind()
            .instrument(span)
            .boxed();
        let token = self.tracker.token();
        let mut rest = Rest {
            work: Some(work),
            tracker: self.tracker.clone(),
            _token: token,
        };
        // no error: the task panicked or was aborted, which its owner reports
        std::future::poll_fn(|cx| rest.poll(cx)).await.ok()
    }

    /// Resolves when the tasks must stop.
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        self.stop.clone().cancelled_owned()
    }

    pub fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Resolves when every task has ended by itself.
    pub async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Signals the tasks to stop and waits for them. Returns false if some were still running at the deadline.
    pub async fn drain(&self, deadline: Duration) -> bool {
        self.stop.cancel();
        self.tracker.close();
        tokio::time::timeout(deadline, self.tracker.wait())
            .await
            .is_ok()
    }
}

/// Work in progress.
struct Rest<T: Send + 'static> {
    work: Option<BoxFuture<'static, std::thread::Result<T>>>,
    tracker: TaskTracker,
    /// Makes a drain wait for the work while it runs in the caller's task.
    _token: TaskTrackerToken,
}

impl<T: Send + 'static> Rest<T> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<std::thread::Result<T>> {
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let outcome = std::task::ready!(work.poll_unpin(cx));
        self.work = None;
        Poll::Ready(outcome)
    }
}

impl<T: Send + 'static> Drop for Rest<T> {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // Without a runtime the process is ending.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.tracker
                .spawn_on(async move { drop(work.await) }, &runtime);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_outlives_caller_and_delays_drain() {
        let tasks = Tasks::new();
        let (go, may_go) = tokio::sync::oneshot::channel::<()>();
        let (done, is_done) = tokio::sync::oneshot::channel();
        let work = tasks.complete("work", async move {
            may_go.await.unwrap();
            done.send(()).unwrap();
        });
        assert!(
            tokio::time::timeout(Duration::from_secs(1), work)
                .await
                .is_err()
        );
        assert!(!tasks.drain(Duration::from_secs(1)).await);
        go.send(()).unwrap();
        is_done.await.unwrap();
        assert!(tasks.drain(Duration::from_secs(1)).await);
    }

    #[tokio::test]
    async fn panicked_work_has_no_outcome() {
        let tasks = Tasks::new();
        assert_eq!(tasks.complete("good", async { 7 }).await, Some(7));
        assert_eq!(
            tasks
                .complete::<i32>("bad", async { panic!("story") })
                .await,
            None
        );
    }

    #[tokio::test(start_paused = true)]
    async fn drain_waits_until_the_deadline() {
        let tasks = Tasks::new();
        let stopped = tasks.stopped();
        tasks.spawn("good", stopped);
        assert!(tasks.drain(Duration::from_secs(1)).await);

        let tasks = Tasks::new();
        tasks.spawn("bad", std::future::pending());
        assert!(!tasks.drain(Duration::from_secs(1)).await);
    }
}
