//! Status of the writer: counters, and whether the last commit succeeded.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::CommitError;
use nodedock_base::metrics::{Histogram, HistogramView};
use nodedock_base::{clock, error};
use nodedock_model::limit;

/// Whether the checkpoint accepts writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// Error of the last commit; `None`: it succeeded.
    pub degraded: Option<String>,
    /// Time of the first of the failed commits, in milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// Counters since the checkpoint was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Durable commits: one sync each.
    pub commits: u64,
    pub failed_commits: u64,
    /// Requests in the durable commits.
    pub requests: u64,
    /// Records put or deleted.
    pub changes: u64,
    /// Bytes of the values that were put.
    pub value_bytes: u64,
    /// Changes of the largest commit.
    pub changes_max: u64,
    /// Time in durable commits, and in the longest and the last of them.
    pub commit_time: Duration,
    pub commit_time_max: Duration,
    pub commit_time_last: Duration,
}

/// Histograms of the durable commits.
#[derive(Debug, Clone, PartialEq)]
pub struct Distributions {
    /// Records put or deleted by a commit.
    pub changes: HistogramView,
    /// Seconds of a commit, mostly its sync.
    pub seconds: HistogramView,
}

/// Buckets of a commit's changes, and of its seconds: a good disk syncs within a millisecond, a slow one is reported after five seconds.
const CHANGES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
const SECONDS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

pub(super) struct Status {
    now: Mutex<Now>,
    sizes: Histogram,
    times: Histogram,
    /// Wakes the monitor.
    news: Notify,
    takes_writes: watch::Sender<bool>,
}

/// Activity of the writer.
#[derive(Debug, Clone, Default)]
pub(super) struct Now {
    /// Error of the last commit, and time of the first failed one.
    pub(super) failure: Option<(CommitError, u64)>,
    /// Start of the current commit.
    pub(super) under_way: Option<Instant>,
    /// Whether the monitor waits for the next begin.
    wants_beginning: bool,
    stats: Stats,
}

/// Size of a commit.
pub(super) struct Size {
    pub(super) requests: u64,
    pub(super) changes: u64,
    pub(super) value_bytes: u64,
}

impl Default for Status {
    fn default() -> Self {
        Self {
            now: Mutex::default(),
            sizes: Histogram::new(CHANGES),
            times: Histogram::new(SECONDS),
            news: Notify::new(),
            takes_writes: watch::Sender::new(true),
        }
    }
}

impl Status {
    pub(super) fn health(&self) -> Health {
        self.now().failure.as_ref().map_or_else(Health::default, |(failure, since_ms)| Health {
            degraded: Some(error::chain(failure)),
            since_ms: *since_ms,
        })
    }

    pub(super) fn takes_writes(&self) -> watch::Receiver<bool> {
        self.takes_writes.subscribe()
    }

    /// Returns the activity for the monitor, which `news` wakes after a change.
    pub(super) fn look(&self) -> Now {
        let mut now = self.now();
        now.wants_beginning = now.under_way.is_none();
        now.clone()
    }

    pub(super) async fn news(&self) {
        self.news.notified().await;
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the begin of a commit. Only the first one wakes the monitor, which checks again when that commit would be slow.
    pub(super) fn begin(&self) {
        let mut now = self.now();
        now.under_way = Some(Instant::now());
        if std::mem::take(&mut now.wants_beginning) {
            self.news.notify_one();
        }
    }

    /// Records the end of the current commit.
    fn end(&self, failure: Option<&CommitError>, count: impl FnOnce(&mut Stats)) {
        let mut now = self.now();
        count(&mut now.stats);
        let was_slow = now.under_way.take().is_some_and(|began| began.elapsed() >= limit::CHECKPOINT_SLOW);
        let failed_before = now.failure.take();
        if let Some(failure) = failure {
            let since_ms = failed_before.as_ref().map_or_else(clock::now_ms, |(_, since_ms)| *since_ms);
            now.failure = Some((failure.clone(), since_ms));
        }
        drop(now);
        if was_slow || failure.is_some() || failed_before.is_some() {
            self.news.notify_one();
        }
        let takes = failure.is_none();
        self.takes_writes.send_if_modified(|took| std::mem::replace(took, takes) != takes);
    }

    pub(super) fn stats(&self) -> Stats {
        self.now().stats
    }

    pub(super) fn distributions(&self) -> Distributions {
        Distributions { changes: self.sizes.view(), seconds: self.times.view() }
    }

    pub(super) fn succeeded(&self, size: &Size, took: Duration) {
        self.sizes.observe(size.changes as f64);
        self.times.observe_time(took);
        self.end(None, |stats| {
            stats.commits += 1;
            stats.requests += size.requests;
            stats.changes += size.changes;
            stats.value_bytes += size.value_bytes;
            stats.changes_max = stats.changes_max.max(size.changes);
            stats.commit_time += took;
            stats.commit_time_max = stats.commit_time_max.max(took);
            stats.commit_time_last = took;
        });
    }

    pub(super) fn failed(&self, failure: &CommitError) {
        self.end(Some(failure), |stats| stats.failed_commits += 1);
    }
}
