//! Counters of a driver's calls.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::sandbox::CallFailure;

#[derive(Default)]
pub(super) struct Counters {
    calls: AtomicU64,
    busy: AtomicU64,
    trapped: AtomicU64,
    timeout: AtomicU64,
    cpu: AtomicU64,
    memory: AtomicU64,
    refused: AtomicU64,
    peak_memory: AtomicU64,
    last_us: AtomicU64,
    total_us: AtomicU64,
}

/// What a driver's calls came to, since it was loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    pub calls: u64,
    /// Calls that got no place in time.
    pub busy: u64,
    /// Traps, and exits by its own will.
    pub trapped: u64,
    pub timeout: u64,
    pub cpu: u64,
    pub memory: u64,
    /// Answers beyond the bounds or against the grant.
    pub refused: u64,
    /// Bytes over all memories of a call.
    pub peak_memory: u64,
    pub last: Duration,
    pub total: Duration,
}

impl Counters {
    pub(super) fn record(&self, took: Duration, failure: Option<&CallFailure>) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.calls.fetch_add(1, Relaxed);
        self.last_us.store(micros, Relaxed);
        self.total_us.fetch_add(micros, Relaxed);
        let counter = match failure {
            None => return,
            // It did not begin.
            Some(CallFailure::Quarantined(_)) => return,
            Some(CallFailure::Busy(_)) => &self.busy,
            Some(CallFailure::Timeout(_)) => &self.timeout,
            Some(CallFailure::Cpu(_)) => &self.cpu,
            Some(CallFailure::Memory(_)) => &self.memory,
            Some(CallFailure::TooMuchData) => &self.refused,
            Some(CallFailure::Exited(_) | CallFailure::Trapped { .. }) => &self.trapped,
        };
        counter.fetch_add(1, Relaxed);
    }

    pub(super) fn record_memory(&self, bytes: usize) {
        self.peak_memory.fetch_max(bytes as u64, Relaxed);
    }

    pub(super) fn record_refusal(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot(&self) -> Stats {
        Stats {
            calls: self.calls.load(Relaxed),
            busy: self.busy.load(Relaxed),
            trapped: self.trapped.load(Relaxed),
            timeout: self.timeout.load(Relaxed),
            cpu: self.cpu.load(Relaxed),
            memory: self.memory.load(Relaxed),
            refused: self.refused.load(Relaxed),
            peak_memory: self.peak_memory.load(Relaxed),
            last: Duration::from_micros(self.last_us.load(Relaxed)),
            total: Duration::from_micros(self.total_us.load(Relaxed)),
        }
    }
}
