//! Metrics of a driver's calls.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

pub use super::Operation;
use nodedock_base::worded;

worded! {
    /// A limit of the sandbox; refusals are counted by limit.
    Limit {
        /// Elapsed time of a call.
        Wall = "wall",
        Cpu = "cpu",
        /// Bytes of all linear memories of a call.
        Memory = "memory",
        Memories = "memories",
        Tables = "tables",
        /// Entries of all tables of a call.
        TableElements = "table-elements",
        Instances = "instances",
        /// Bytes that one call passes to the host.
        HostcallData = "hostcall-data",
        Handles = "handles",
        /// Host operations in one call.
        HostOperations = "host-operations",
        /// Bytes that the host returned in one call.
        HostBytes = "host-bytes",
        /// Time of a host operation on the node.
        HostLook = "host-look",
        SysfsWrites = "sysfs-writes",
        /// Entries of a list in a result: pools, devices, attributes, edits.
        AnswerEntries = "answer-entries",
        /// Bytes of a text in a result.
        AnswerBytes = "answer-bytes",
        Memo = "memo",
        /// Truncated texts of a problem.
        ProblemBytes = "problem-bytes",
        LogLines = "log-lines",
        LogBytes = "log-bytes",
        /// Concurrent calls of the driver.
        DriverCalls = "driver-calls",
        /// Concurrent calls of all drivers.
        NodeCalls = "node-calls",
    }
}

worded! {
    /// Outcome of a call.
    Outcome {
        /// A result, which may be a refusal.
        Answered = "answered",
        /// Not started: the driver is in quarantine.
        Quarantined = "quarantined",
        /// No permit before the deadline.
        Busy = "busy",
        Deadline = "deadline",
        /// Another limit.
        Limit = "limit",
        /// A trap, or an exit by the driver.
        Trap = "trap",
    }
}

/// Metrics of a WASM driver's calls, since it was loaded.
#[derive(Debug, Default)]
pub struct Stats {
    outcomes: [[Counter; Outcome::ALL.len()]; Operation::ALL.len()],
    seconds: [CallSeconds; Operation::ALL.len()],
    /// One refusal for each call that reached the limit, and one for each line of the log.
    refusals: [Counter; Limit::ALL.len()],
    /// Results that exceed the bounds, are invalid, or violate the grant.
    pub answers_refused: Counter,
    /// CPU time of the threads that ran the driver.
    pub cpu_seconds: Counter<f64, AtomicU64>,
    pub host_operations: Counter,
    pub host_bytes: Counter,
    /// Lines written to the log; dropped lines are counted by limit.
    pub log_lines: Counter,
    /// Peak usage of one call.
    pub peak_cpu_seconds: Gauge<f64, AtomicU64>,
    /// Bytes of all memories.
    pub peak_memory: Gauge<u64, AtomicU64>,
    /// Bytes that all memories of one call may have.
    pub memory_limit: Gauge<u64, AtomicU64>,
    pub peak_table_elements: Gauge<u64, AtomicU64>,
    pub peak_host_operations: Gauge<u64, AtomicU64>,
    pub peak_host_bytes: Gauge<u64, AtomicU64>,
}

/// Seconds of an operation's calls, including the wait for a permit: from an empty call, which takes some tens of microseconds, to the
/// longest that may be granted.
#[derive(Debug)]
struct CallSeconds(Histogram);

impl Default for CallSeconds {
    fn default() -> Self {
        Self(Histogram::new([
            0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
            2.5, 5.0, 10.0, 40.0,
        ]))
    }
}

/// Usage of one call.
#[derive(Debug, Default)]
pub struct Usage {
    pub cpu: Duration,
    pub memory: usize,
    pub table_elements: usize,
    pub host_operations: usize,
    pub host_bytes: usize,
    /// Limits at which the host refused the driver something, even if the driver continued.
    pub reached: BTreeSet<Limit>,
}

impl Stats {
    pub fn record(&self, operation: Operation, elapsed: Duration, outcome: Outcome) {
        self.calls(operation, outcome).inc();
        self.seconds(operation).observe(elapsed.as_secs_f64());
    }

    /// Counts the usage of a call, and the limits that it reached.
    pub fn record_usage(&self, usage: &Usage) {
        usage.reached.iter().for_each(|limit| self.refuse(*limit));
        let cpu = usage.cpu.as_secs_f64();
        self.cpu_seconds.inc_by(cpu);
        // Numbers that are not negative are in the order of their bits.
        self.peak_cpu_seconds
            .inner()
            .fetch_max(cpu.to_bits(), Relaxed);
        self.host_operations.inc_by(usage.host_operations as u64);
        self.host_bytes.inc_by(usage.host_bytes as u64);
        for (peak, used) in [
            (&self.peak_memory, usage.memory),
            (&self.peak_table_elements, usage.table_elements),
            (&self.peak_host_operations, usage.host_operations),
            (&self.peak_host_bytes, usage.host_bytes),
        ] {
            peak.inner().fetch_max(used as u64, Relaxed);
        }
    }

    pub fn refuse(&self, limit: Limit) {
        self.refusals(limit).inc();
    }

    /// Returns the calls of an operation that had an outcome.
    pub fn calls(&self, operation: Operation, outcome: Outcome) -> &Counter {
        &self.outcomes[operation as usize][outcome as usize]
    }

    pub fn seconds(&self, operation: Operation) -> &Histogram {
        &self.seconds[operation as usize].0
    }

    pub fn refusals(&self, limit: Limit) -> &Counter {
        &self.refusals[limit as usize]
    }

    /// Returns the number of calls with this outcome, of all operations.
    pub fn ended(&self, outcome: Outcome) -> u64 {
        self.outcomes
            .iter()
            .map(|outcomes| outcomes[outcome as usize].get())
            .sum()
    }

    pub fn log_lines_dropped(&self) -> u64 {
        self.refusals(Limit::LogLines).get() + self.refusals(Limit::LogBytes).get()
    }
}

/// Seconds of the calls of a native plugin since it registered, by path of the method and name of the code.
pub type RpcSeconds = Vec<([String; 2], Histogram)>;
