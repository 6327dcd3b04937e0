//! Statistics of a driver's calls.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Operation;
use nodedock_base::metrics::HistogramView;
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

/// Statistics of a WASM driver's calls, since it was loaded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats {
    /// By operation and outcome; all entries are present.
    pub operations: BTreeMap<Operation, OperationStats>,
    /// Refusals by limit; all entries are present. One for each call that reached the limit, and one for each line of the log.
    pub limits: BTreeMap<Limit, u64>,
    /// Results that exceed the bounds, are invalid, or violate the grant.
    pub answers_refused: u64,
    /// CPU time of the threads that ran the driver.
    pub cpu: Duration,
    pub host_operations: u64,
    pub host_bytes: u64,
    /// Lines written to the log; dropped lines are counted by limit.
    pub log_lines: u64,
    pub peak: Peak,
}

#[derive(Debug, Clone, PartialEq)]
pub struct OperationStats {
    pub outcomes: BTreeMap<Outcome, u64>,
    /// Seconds, including the wait for a permit.
    pub latency: HistogramView,
}

/// Peak usage of one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    pub cpu: Duration,
    /// Bytes of all memories.
    pub memory: u64,
    pub table_elements: u64,
    pub host_operations: u64,
    pub host_bytes: u64,
}

impl Stats {
    /// Number of started calls.
    pub fn calls(&self) -> u64 {
        let outcomes = self.operations.values().flat_map(|operation| &operation.outcomes);
        outcomes.filter(|(outcome, _)| **outcome != Outcome::Quarantined).map(|(_, count)| count).sum()
    }

    /// Returns the calls with this outcome, of all operations.
    pub fn ended(&self, outcome: Outcome) -> u64 {
        self.operations.values().filter_map(|operation| operation.outcomes.get(&outcome)).sum()
    }

    /// Returns the refusals for a limit.
    pub fn refused_for(&self, limit: Limit) -> u64 {
        self.limits.get(&limit).copied().unwrap_or(0)
    }

    pub fn log_lines_dropped(&self) -> u64 {
        self.refused_for(Limit::LogLines) + self.refused_for(Limit::LogBytes)
    }
}

/// Calls of one method with one code.
#[derive(Debug, Clone, PartialEq)]
pub struct RpcSeconds {
    pub method: &'static str,
    pub code: &'static str,
    pub seconds: HistogramView,
}
