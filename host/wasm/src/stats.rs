//! What a driver's calls came to: counters of its calls, of every limit that it reached, and the peaks.

use std::array::from_fn;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::call_failure::CallFailure;
use nodedock_base::metrics::Histogram;
pub use nodedock_core::driver::Operation;
pub use nodedock_core::driver::stats::{Limit, OperationStats, Outcome, Peak, Stats};

/// Bounds of a call's seconds: from an empty call, which takes some tens of microseconds, to the longest that may be granted.
const SECONDS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    40.0,
];

/// What one call used.
#[derive(Debug, Default)]
pub(super) struct Usage {
    pub(super) cpu: Duration,
    pub(super) memory: usize,
    pub(super) table_elements: usize,
    pub(super) host_operations: usize,
    pub(super) host_bytes: usize,
    /// Limits at which the host refused the driver something, whatever it made of that.
    pub(super) reached: BTreeSet<Limit>,
}

pub(super) struct Counters {
    calls: [[AtomicU64; Outcome::ALL.len()]; Operation::ALL.len()],
    latency: [Histogram; Operation::ALL.len()],
    limits: [AtomicU64; Limit::ALL.len()],
    answers_refused: AtomicU64,
    cpu_ns: AtomicU64,
    host_operations: AtomicU64,
    host_bytes: AtomicU64,
    log_lines: AtomicU64,
    peak_cpu_ns: AtomicU64,
    peak_memory: AtomicU64,
    peak_table_elements: AtomicU64,
    peak_host_operations: AtomicU64,
    peak_host_bytes: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            calls: from_fn(|_| from_fn(|_| zero())),
            latency: from_fn(|_| Histogram::new(SECONDS)),
            limits: from_fn(|_| zero()),
            answers_refused: zero(),
            cpu_ns: zero(),
            host_operations: zero(),
            host_bytes: zero(),
            log_lines: zero(),
            peak_cpu_ns: zero(),
            peak_memory: zero(),
            peak_table_elements: zero(),
            peak_host_operations: zero(),
            peak_host_bytes: zero(),
        }
    }
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Counters {
    /// Counts a call that ended. A limit that its store knows of is counted with what it used.
    pub(super) fn record(&self, operation: Operation, took: Duration, failure: Option<&CallFailure>) {
        let outcome = failure.map_or(Outcome::Answered, CallFailure::outcome);
        self.calls[operation as usize][outcome as usize].fetch_add(1, Relaxed);
        self.latency[operation as usize].observe_time(took);
        if let (Some(failure), Outcome::Busy | Outcome::Deadline) = (failure, outcome) {
            failure.limit().into_iter().for_each(|limit| self.refuse(limit));
        }
    }

    /// Counts a call that did not begin, because the driver is in quarantine.
    pub(super) fn record_held_back(&self, operation: Operation) {
        self.calls[operation as usize][Outcome::Quarantined as usize].fetch_add(1, Relaxed);
    }

    /// Counts what a call used, and the limits that it reached.
    pub(super) fn record_usage(&self, usage: &Usage) {
        usage.reached.iter().for_each(|limit| self.refuse(*limit));
        for (total, peak, used) in [
            (Some(&self.cpu_ns), &self.peak_cpu_ns, nanos(usage.cpu)),
            (None, &self.peak_memory, number(usage.memory)),
            (None, &self.peak_table_elements, number(usage.table_elements)),
            (Some(&self.host_operations), &self.peak_host_operations, number(usage.host_operations)),
            (Some(&self.host_bytes), &self.peak_host_bytes, number(usage.host_bytes)),
        ] {
            peak.fetch_max(used, Relaxed);
            total.map(|total| total.fetch_add(used, Relaxed));
        }
    }

    /// Something was refused for a limit.
    pub(super) fn refuse(&self, limit: Limit) {
        self.limits[limit as usize].fetch_add(1, Relaxed);
    }

    /// An answer was refused.
    pub(super) fn record_refusal(&self) {
        self.answers_refused.fetch_add(1, Relaxed);
    }

    pub(super) fn record_log_line(&self) {
        self.log_lines.fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot(&self) -> Stats {
        let of = |operation: &Operation| {
            let counts = self.calls[*operation as usize].iter().map(|count| count.load(Relaxed));
            let outcomes = Outcome::ALL.iter().copied().zip(counts).collect();
            (*operation, OperationStats { outcomes, latency: self.latency[*operation as usize].view() })
        };
        let limits = self.limits.iter().map(|count| count.load(Relaxed));
        Stats {
            operations: Operation::ALL.iter().map(of).collect(),
            limits: Limit::ALL.iter().copied().zip(limits).collect(),
            answers_refused: self.answers_refused.load(Relaxed),
            cpu: Duration::from_nanos(self.cpu_ns.load(Relaxed)),
            host_operations: self.host_operations.load(Relaxed),
            host_bytes: self.host_bytes.load(Relaxed),
            log_lines: self.log_lines.load(Relaxed),
            peak: Peak {
                cpu: Duration::from_nanos(self.peak_cpu_ns.load(Relaxed)),
                memory: self.peak_memory.load(Relaxed),
                table_elements: self.peak_table_elements.load(Relaxed),
                host_operations: self.peak_host_operations.load(Relaxed),
                host_bytes: self.peak_host_bytes.load(Relaxed),
            },
        }
    }
}
