//! Status of the writer: metrics, and whether the last commit succeeded.

use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::CommitError;
use super::outage::{OutageLine, OutageLog};
use crate::checkpoint::CHECKPOINT_SLOW;
use nodedock_base::{clock, error};

/// Health of the checkpoint: whether it accepts writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// Error of the last commit; `None`: it succeeded.
    pub degraded: Option<String>,
    /// Time of the first of the failed commits, in milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// Metrics of the commits since the checkpoint was opened.
#[derive(Debug)]
pub struct CommitMetrics {
    /// Durable commits: one sync each.
    pub durable: Counter,
    pub failed: Counter,
    /// Records put or deleted by a durable commit.
    pub changes: Histogram,
    /// Seconds of a durable commit, mostly its sync: a good disk syncs within a millisecond, a slow one is reported after five seconds.
    pub seconds: Histogram,
    /// Bytes of the values that were put.
    pub value_bytes: Counter,
}

impl Default for CommitMetrics {
    fn default() -> Self {
        Self {
            durable: Counter::default(),
            failed: Counter::default(),
            changes: Histogram::new([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]),
            seconds: Histogram::new([
                0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
                10.0, 30.0,
            ]),
            value_bytes: Counter::default(),
        }
    }
}

pub(super) struct Status {
    now: Mutex<Now>,
    outages: Mutex<OutageLog>,
    pub(super) metrics: CommitMetrics,
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
}

impl Default for Status {
    fn default() -> Self {
        let (now, metrics, news) = (Mutex::default(), CommitMetrics::default(), Notify::new());
        Self {
            now,
            outages: Mutex::default(),
            metrics,
            news,
            takes_writes: watch::Sender::new(true),
        }
    }
}

impl Status {
    pub(super) fn health(&self) -> Health {
        self.now
            .lock()
            .failure
            .as_ref()
            .map_or_else(Health::default, |(failure, since_ms)| Health {
                degraded: Some(error::chain(failure)),
                since_ms: *since_ms,
            })
    }

    pub(super) fn takes_writes(&self) -> watch::Receiver<bool> {
        self.takes_writes.subscribe()
    }

    /// Returns the activity for the monitor, which `news` wakes after a change.
    pub(super) fn look(&self) -> Now {
        self.now.lock().clone()
    }

    pub(super) async fn news(&self) {
        self.news.notified().await;
    }

    /// Records the begin of a commit.
    pub(super) fn begin(&self) {
        self.now.lock().under_way = Some(Instant::now());
    }

    /// Wakes the monitor for a commit that may become slow: most end before that.
    pub(super) fn takes_long(&self) {
        self.news.notify_one();
    }

    fn end(&self, failure: Option<&CommitError>) {
        let mut now = self.now.lock();
        let was_slow = now
            .under_way
            .take()
            .is_some_and(|began| began.elapsed() >= CHECKPOINT_SLOW);
        let failed_before = now.failure.take();
        if let Some(failure) = failure {
            let since_ms = failed_before
                .as_ref()
                .map_or_else(clock::now_ms, |(_, since_ms)| *since_ms);
            now.failure = Some((failure.clone(), since_ms));
        }
        drop(now);
        self.log(failure);
        if was_slow || failure.is_some() || failed_before.is_some() {
            self.news.notify_one();
        }
        let takes = failure.is_none();
        self.takes_writes
            .send_if_modified(|took| std::mem::replace(took, takes) != takes);
    }

    /// Writes the line of the log that is due after a commit.
    fn log(&self, failure: Option<&CommitError>) {
        let line = self
            .outages
            .lock()
            .observe(failure.is_some(), Instant::now());
        match (line, failure) {
            (Some(OutageLine::Fails(lasts)), Some(failure)) => {
                let (error, seconds) = (error::chain(failure), lasts.as_secs());
                tracing::error!(
                    error,
                    seconds,
                    "the checkpoint takes no writes, new work is refused"
                );
            }
            (Some(OutageLine::Ended(lasted)), _) => {
                let seconds = lasted.as_secs();
                tracing::info!(seconds, "the checkpoint takes writes again");
            }
            _ => {}
        }
    }

    /// Records the success of the current commit, which put or deleted `changes` records.
    pub(super) fn succeeded(&self, changes: usize, value_bytes: usize, elapsed: Duration) {
        self.metrics.durable.inc();
        self.metrics.changes.observe(changes as f64);
        self.metrics.seconds.observe(elapsed.as_secs_f64());
        self.metrics.value_bytes.inc_by(value_bytes as u64);
        self.end(None);
    }

    pub(super) fn failed(&self, failure: &CommitError) {
        self.metrics.failed.inc();
        self.end(Some(failure));
    }
}
