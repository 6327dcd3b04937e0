//! What the writer tells of itself: counters, and whether the last commit succeeded.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::CommitError;
use crate::base::{clock, error};

/// Whether the checkpoint takes writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// Why the last commit failed; none: it succeeded.
    pub degraded: Option<String>,
    /// When the first of the failed commits was, in milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// Counters since the checkpoint was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Durable commits: one sync each.
    pub commits: u64,
    pub failed_commits: u64,
    /// Requests that the durable commits answered.
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

#[derive(Default)]
pub(super) struct Status {
    health: Mutex<Health>,
    commits: AtomicU64,
    failed_commits: AtomicU64,
    requests: AtomicU64,
    changes: AtomicU64,
    value_bytes: AtomicU64,
    changes_max: AtomicU64,
    nanos: AtomicU64,
    nanos_max: AtomicU64,
    nanos_last: AtomicU64,
}

/// Size of a commit.
pub(super) struct Size {
    pub(super) requests: u64,
    pub(super) changes: u64,
    pub(super) value_bytes: u64,
}

impl Status {
    pub(super) fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn stats(&self) -> Stats {
        Stats {
            commits: self.commits.load(Relaxed),
            failed_commits: self.failed_commits.load(Relaxed),
            requests: self.requests.load(Relaxed),
            changes: self.changes.load(Relaxed),
            value_bytes: self.value_bytes.load(Relaxed),
            changes_max: self.changes_max.load(Relaxed),
            commit_time: Duration::from_nanos(self.nanos.load(Relaxed)),
            commit_time_max: Duration::from_nanos(self.nanos_max.load(Relaxed)),
            commit_time_last: Duration::from_nanos(self.nanos_last.load(Relaxed)),
        }
    }

    pub(super) fn succeeded(&self, size: &Size, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.commits.fetch_add(1, Relaxed);
        self.requests.fetch_add(size.requests, Relaxed);
        self.changes.fetch_add(size.changes, Relaxed);
        self.value_bytes.fetch_add(size.value_bytes, Relaxed);
        self.changes_max.fetch_max(size.changes, Relaxed);
        self.nanos.fetch_add(nanos, Relaxed);
        self.nanos_max.fetch_max(nanos, Relaxed);
        self.nanos_last.store(nanos, Relaxed);
        self.recovered();
    }

    fn recovered(&self) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        if health.degraded.is_some() {
            *health = Health::default();
            tracing::info!("the checkpoint takes writes again");
        }
    }

    pub(super) fn failed(&self, failure: &CommitError) {
        self.failed_commits.fetch_add(1, Relaxed);
        let reason = error::chain(failure);
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        if health.degraded.is_none() {
            health.since_ms = clock::now_ms();
            tracing::error!(error = %reason, "the checkpoint does not take writes");
        }
        health.degraded = Some(reason);
    }
}
