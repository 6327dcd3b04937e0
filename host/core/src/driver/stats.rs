//! What the calls of a driver came to, as its side measures them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Operation;
use nodedock_base::metrics::HistogramView;
use nodedock_base::worded;

worded! {
    /// A limit of the sandbox. Every refusal for one is counted under it.
    Limit {
        /// Time of a call by the clock on the wall.
        Wall = "wall",
        Cpu = "cpu",
        /// Bytes over all linear memories of a call.
        Memory = "memory",
        Memories = "memories",
        Tables = "tables",
        /// Entries over all tables of a call.
        TableElements = "table-elements",
        Instances = "instances",
        /// Bytes that one call across the border carries to the host.
        HostcallData = "hostcall-data",
        Handles = "handles",
        /// Questions to the host in one call.
        HostOperations = "host-operations",
        /// Bytes that the host gave in one call.
        HostBytes = "host-bytes",
        /// Time of a look at the node.
        HostLook = "host-look",
        SysfsWrites = "sysfs-writes",
        /// Entries of a list in an answer: pools, devices, attributes, edits.
        AnswerEntries = "answer-entries",
        /// Bytes of a text in an answer.
        AnswerBytes = "answer-bytes",
        Memo = "memo",
        /// A problem's texts are cut.
        ProblemBytes = "problem-bytes",
        LogLines = "log-lines",
        LogBytes = "log-bytes",
        /// Calls of the driver at once.
        DriverCalls = "driver-calls",
        /// Calls of all drivers at once.
        NodeCalls = "node-calls",
    }
}

worded! {
    /// How a call ended.
    Outcome {
        /// With an answer, which may be a refusal.
        Answered = "answered",
        /// It did not begin: the driver is in quarantine.
        Quarantined = "quarantined",
        /// It got no place in time.
        Busy = "busy",
        Deadline = "deadline",
        /// At another limit.
        Limit = "limit",
        /// Traps, and exits by the driver's own will.
        Trap = "trap",
    }
}

/// What a driver's calls came to, since it was loaded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats {
    /// Each operation is there, and in it each outcome.
    pub operations: BTreeMap<Operation, OperationStats>,
    /// Refusals by limit; each limit is there. One for each call that reached it, and one for each line of the log.
    pub limits: BTreeMap<Limit, u64>,
    /// Answers beyond the bounds, not valid, or against the grant.
    pub answers_refused: u64,
    /// Of the threads that ran the driver.
    pub cpu: Duration,
    pub host_operations: u64,
    pub host_bytes: u64,
    /// Lines that went into the log; those that did not are counted by limit.
    pub log_lines: u64,
    pub peak: Peak,
}

#[derive(Debug, Clone, PartialEq)]
pub struct OperationStats {
    pub outcomes: BTreeMap<Outcome, u64>,
    /// Seconds, the wait for a place included.
    pub latency: HistogramView,
}

/// The most that one call used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    pub cpu: Duration,
    /// Bytes over all memories.
    pub memory: u64,
    pub table_elements: u64,
    pub host_operations: u64,
    pub host_bytes: u64,
}

impl Stats {
    /// Calls that began.
    pub fn calls(&self) -> u64 {
        let outcomes = self.operations.values().flat_map(|operation| &operation.outcomes);
        outcomes.filter(|(outcome, _)| **outcome != Outcome::Quarantined).map(|(_, count)| count).sum()
    }

    /// Calls that ended so, of all operations.
    pub fn ended(&self, outcome: Outcome) -> u64 {
        self.operations.values().filter_map(|operation| operation.outcomes.get(&outcome)).sum()
    }

    /// Refusals for a limit.
    pub fn refused_for(&self, limit: Limit) -> u64 {
        self.limits.get(&limit).copied().unwrap_or(0)
    }

    pub fn log_lines_dropped(&self) -> u64 {
        self.refused_for(Limit::LogLines) + self.refused_for(Limit::LogBytes)
    }
}

/// Calls of one method that ended with one code.
#[derive(Debug, Clone, PartialEq)]
pub struct RpcSeconds {
    pub method: &'static str,
    pub code: &'static str,
    pub seconds: HistogramView,
}
