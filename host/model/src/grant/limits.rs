//! The limits of a driver's calls: requested, granted, and effective.

use std::time::Duration;

use serde::Deserialize;
use serde_saphyr::Spanned;

use super::{GrantError, at};
use crate::limit;

/// Limits that a driver requests; `None` is the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitRequest {
    pub memory_mib: Option<u32>,
    pub wall_ms: Option<u32>,
    pub cpu_ms: Option<u32>,
}

/// Limits that the operator sets; `None` is the default. Limits that a driver cannot request apply unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitGrant {
    pub memory_mib: Option<u32>,
    pub wall_ms: Option<u32>,
    pub cpu_ms: Option<u32>,
    pub answer_mib: Option<u32>,
    pub host_operations: Option<u32>,
    pub host_mib: Option<u32>,
    pub log_lines_per_second: Option<u32>,
    pub log_bytes_per_second: Option<u32>,
    pub concurrent_calls: Option<u32>,
}

/// The limits of a driver's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all linear memories.
    pub memory: usize,
    /// Elapsed time of a prepare or unprepare; a discovery or health check has half of it.
    pub wall: Duration,
    pub cpu: Duration,
    /// Bytes of one result, or of the arguments of one host operation, in the host's memory.
    pub hostcall_bytes: usize,
    /// Host operations in one call.
    pub host_operations: usize,
    /// Bytes that the host returns in one call.
    pub host_bytes: usize,
    pub log: LogRates,
    /// Concurrent calls; further ones wait.
    pub concurrent_calls: usize,
}

/// Rate of a driver's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogRates {
    pub lines: u32,
    pub bytes: u32,
}

/// A limit in a grant file; the minimum is 1.
#[derive(Clone, Copy)]
pub(super) struct Knob {
    pub(super) key: &'static str,
    pub(super) default: u32,
    pub(super) max: u32,
    /// Comment for readers of a grant file.
    pub(super) what: &'static str,
}

pub(super) const MEMORY: Knob = Knob {
    key: "memoryMiB",
    default: mib(limit::CALL_MEMORY),
    max: mib(limit::CALL_MEMORY_MAX),
    what: "memory of a call, over all its memories",
};
pub(super) const WALL: Knob = Knob {
    key: "wallMs",
    default: millis(limit::CALL_WALL),
    max: millis(limit::CALL_WALL_MAX),
    what: "time of a prepare or an unprepare; a call that looks has half of it",
};
pub(super) const CPU: Knob = Knob {
    key: "cpuMs",
    default: millis(limit::CALL_CPU),
    max: millis(limit::CALL_CPU_MAX),
    what: "CPU time of a call",
};
pub(super) const ANSWER: Knob = Knob {
    key: "answerMiB",
    default: mib(limit::HOSTCALL_BYTES),
    max: mib(limit::HOSTCALL_BYTES_MAX),
    what: "an answer, as the host holds it",
};
pub(super) const HOST_OPERATIONS: Knob = Knob {
    key: "hostOperations",
    default: small(limit::HOST_OPERATIONS_PER_CALL),
    max: small(limit::HOST_OPERATIONS_PER_CALL_MAX),
    what: "reads, writes and other questions to the host in a call",
};
pub(super) const HOST_BYTES: Knob = Knob {
    key: "hostMiB",
    default: mib(limit::HOST_BYTES_PER_CALL),
    max: mib(limit::HOST_BYTES_PER_CALL_MAX),
    what: "what the host gives in a call",
};
pub(super) const LOG_LINES: Knob = Knob {
    key: "logLinesPerSecond",
    default: limit::LOG_LINES_PER_SECOND,
    max: limit::LOG_LINES_PER_SECOND_MAX,
    what: "lines in the log; more are dropped and counted",
};
pub(super) const LOG_BYTES: Knob = Knob {
    key: "logBytesPerSecond",
    default: limit::LOG_BYTES_PER_SECOND,
    max: limit::LOG_BYTES_PER_SECOND_MAX,
    what: "bytes in the log",
};
pub(super) const CONCURRENT_CALLS: Knob = Knob {
    key: "concurrentCalls",
    default: small(limit::CALLS_PER_DRIVER),
    max: small(limit::CALLS_PER_DRIVER_MAX),
    what: "calls at once; more wait",
};

/// For constants only: a value that does not fit does not compile.
const fn small(number: usize) -> u32 {
    assert!(number <= u32::MAX as usize);
    number as u32
}

const fn mib(bytes: usize) -> u32 {
    small(bytes >> 20)
}

const fn millis(duration: Duration) -> u32 {
    small(duration.as_millis() as usize)
}

/// The limits of a grant file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct LimitEntries {
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<Spanned<u32>>,
    wall_ms: Option<Spanned<u32>>,
    cpu_ms: Option<Spanned<u32>>,
    #[serde(rename = "answerMiB")]
    answer_mib: Option<Spanned<u32>>,
    host_operations: Option<Spanned<u32>>,
    #[serde(rename = "hostMiB")]
    host_mib: Option<Spanned<u32>>,
    log_lines_per_second: Option<Spanned<u32>>,
    log_bytes_per_second: Option<Spanned<u32>>,
    concurrent_calls: Option<Spanned<u32>>,
}

impl LimitEntries {
    pub(super) fn check(self) -> Result<LimitGrant, GrantError> {
        Ok(LimitGrant {
            memory_mib: MEMORY.check(self.memory_mib)?,
            wall_ms: WALL.check(self.wall_ms)?,
            cpu_ms: CPU.check(self.cpu_ms)?,
            answer_mib: ANSWER.check(self.answer_mib)?,
            host_operations: HOST_OPERATIONS.check(self.host_operations)?,
            host_mib: HOST_BYTES.check(self.host_mib)?,
            log_lines_per_second: LOG_LINES.check(self.log_lines_per_second)?,
            log_bytes_per_second: LOG_BYTES.check(self.log_bytes_per_second)?,
            concurrent_calls: CONCURRENT_CALLS.check(self.concurrent_calls)?,
        })
    }
}

impl Knob {
    fn check(&self, entry: Option<Spanned<u32>>) -> Result<Option<u32>, GrantError> {
        let Knob { key, max, .. } = self;
        match entry {
            Some(entry) if entry.value == 0 || entry.value > *max => {
                Err(at(&entry, format!("{key} is {}, and 1 to {max} is allowed", entry.value)))
            }
            entry => Ok(entry.map(|entry| entry.value)),
        }
    }

    /// Returns the granted value, or the default.
    fn granted(&self, granted: Option<u32>) -> u32 {
        granted.unwrap_or(self.default).clamp(1, self.max)
    }

    /// Returns the requested value within the grant.
    fn within(&self, asked: Option<u32>, granted: Option<u32>) -> u32 {
        let most = self.granted(granted);
        asked.map_or(most, |asked| asked.clamp(1, most))
    }
}

impl LimitRequest {
    /// Returns the requested limits beyond the grant, one readable line each.
    pub(super) fn beyond(&self, grant: &LimitGrant) -> Vec<String> {
        let asked = [
            (MEMORY, self.memory_mib, grant.memory_mib),
            (WALL, self.wall_ms, grant.wall_ms),
            (CPU, self.cpu_ms, grant.cpu_ms),
        ];
        let line = |(knob, asked, granted): (Knob, Option<u32>, Option<u32>)| {
            let asked = asked.filter(|asked| *asked > granted.unwrap_or(knob.default))?;
            Some(format!("limits.{}: {asked}", knob.key))
        };
        asked.into_iter().filter_map(line).collect()
    }
}

impl Limits {
    /// Returns the effective limits: the request within the grant; without a request, the grant; else the default.
    pub fn new(request: &LimitRequest, grant: &LimitGrant) -> Self {
        let bytes = |mib: u32| (mib as usize) << 20;
        let time = |ms: u32| Duration::from_millis(ms.into());
        Self {
            memory: bytes(MEMORY.within(request.memory_mib, grant.memory_mib)),
            wall: time(WALL.within(request.wall_ms, grant.wall_ms)),
            cpu: time(CPU.within(request.cpu_ms, grant.cpu_ms)),
            hostcall_bytes: bytes(ANSWER.granted(grant.answer_mib)),
            host_operations: HOST_OPERATIONS.granted(grant.host_operations) as usize,
            host_bytes: bytes(HOST_BYTES.granted(grant.host_mib)),
            log: LogRates {
                lines: LOG_LINES.granted(grant.log_lines_per_second),
                bytes: LOG_BYTES.granted(grant.log_bytes_per_second),
            },
            concurrent_calls: CONCURRENT_CALLS.granted(grant.concurrent_calls) as usize,
        }
    }

    /// Returns the elapsed-time limit of a discovery or health check.
    pub fn look_wall(&self) -> Duration {
        self.wall / 2
    }
}
