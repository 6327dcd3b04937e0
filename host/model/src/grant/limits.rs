//! The limits of a driver's calls: requested, granted, and effective.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_saphyr::Spanned;
use strum::{Display, VariantArray};

use crate::limit;
use crate::side_file::SideFileError;

/// Limits that a driver requests, or that the operator sets. A missing one has its default; the minimum of each is 1.
pub type LimitValues = BTreeMap<LimitKey, u32>;

/// A limit with its unit, as a grant file names it: `memoryMiB`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Display, VariantArray,
)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "camelCase")]
pub enum LimitKey {
    MemoryMiB,
    WallMs,
    CpuMs,
    AnswerMiB,
    HostOperations,
    HostMiB,
    LogLinesPerSecond,
    LogBytesPerSecond,
    ConcurrentCalls,
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

impl LimitKey {
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Returns whether a driver can request it; the others are set by the operator only.
    pub fn can_be_requested(self) -> bool {
        matches!(
            self,
            Self::MemoryMiB | Self::WallMs | Self::CpuMs | Self::ConcurrentCalls
        )
    }

    /// Returns the default and the maximum.
    pub(super) fn bounds(self) -> (u32, u32) {
        match self {
            Self::MemoryMiB => (mib(limit::CALL_MEMORY), mib(limit::CALL_MEMORY_MAX)),
            Self::WallMs => (millis(limit::CALL_WALL), millis(limit::CALL_WALL_MAX)),
            Self::CpuMs => (millis(limit::CALL_CPU), millis(limit::CALL_CPU_MAX)),
            Self::AnswerMiB => (mib(limit::HOSTCALL_BYTES), mib(limit::HOSTCALL_BYTES_MAX)),
            Self::HostOperations => (
                small(limit::HOST_OPERATIONS_PER_CALL),
                small(limit::HOST_OPERATIONS_PER_CALL_MAX),
            ),
            Self::HostMiB => (
                mib(limit::HOST_BYTES_PER_CALL),
                mib(limit::HOST_BYTES_PER_CALL_MAX),
            ),
            Self::LogLinesPerSecond => {
                (limit::LOG_LINES_PER_SECOND, limit::LOG_LINES_PER_SECOND_MAX)
            }
            Self::LogBytesPerSecond => {
                (limit::LOG_BYTES_PER_SECOND, limit::LOG_BYTES_PER_SECOND_MAX)
            }
            Self::ConcurrentCalls => (
                small(limit::CALLS_PER_DRIVER),
                small(limit::CALLS_PER_DRIVER_MAX),
            ),
        }
    }

    /// Returns a comment for readers of a grant file.
    pub(super) fn comment(self) -> &'static str {
        match self {
            Self::MemoryMiB => "memory of a call, over all its memories",
            Self::WallMs => "time of a prepare or an unprepare; a call that looks has half of it",
            Self::CpuMs => "CPU time of a call",
            Self::AnswerMiB => "an answer, as the host holds it",
            Self::HostOperations => "reads, writes and other questions to the host in a call",
            Self::HostMiB => "what the host gives in a call",
            Self::LogLinesPerSecond => "lines in the log; more are dropped and counted",
            Self::LogBytesPerSecond => "bytes in the log",
            Self::ConcurrentCalls => "calls at once; more wait",
        }
    }

    /// Returns the effective value: the request within the grant; without a request, the grant; else the default.
    pub fn effective(self, requested: &LimitValues, granted: &LimitValues) -> u32 {
        let (default, max) = self.bounds();
        let most = granted.get(&self).copied().unwrap_or(default).clamp(1, max);
        requested
            .get(&self)
            .map_or(most, |requested| (*requested).clamp(1, most))
    }
}

fn small(number: usize) -> u32 {
    u32::try_from(number).expect("the bounds of limits are small")
}

fn mib(bytes: usize) -> u32 {
    small(bytes >> 20)
}

fn millis(duration: Duration) -> u32 {
    small(duration.as_millis() as usize)
}

/// Returns the limits that a driver requests.
pub fn requested_limits(
    memory_mib: Option<u32>,
    wall_ms: Option<u32>,
    cpu_ms: Option<u32>,
    concurrent_calls: Option<u32>,
) -> LimitValues {
    let values = [
        (LimitKey::MemoryMiB, memory_mib),
        (LimitKey::WallMs, wall_ms),
        (LimitKey::CpuMs, cpu_ms),
        (LimitKey::ConcurrentCalls, concurrent_calls),
    ];
    values
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)))
        .collect()
}

/// Checks the limits of a grant file.
pub(super) fn check(
    entries: BTreeMap<LimitKey, Option<Spanned<u32>>>,
) -> Result<LimitValues, SideFileError> {
    entries
        .into_iter()
        .filter_map(|(key, entry)| Some((key, entry?)))
        .map(|(key, entry)| match key.bounds() {
            (_, max) if !(1..=max).contains(&entry.value) => Err(SideFileError::at(
                &entry,
                format!("{key} is {}, and 1 to {max} is allowed", entry.value),
            )),
            _ => Ok((key, entry.value)),
        })
        .collect()
}

/// Returns the requested limits beyond the grant, one readable line each.
pub(super) fn beyond(
    requested: &LimitValues,
    granted: &LimitValues,
) -> impl Iterator<Item = String> {
    let beyond = requested.iter().filter(move |(key, requested)| {
        **requested > granted.get(key).copied().unwrap_or(key.bounds().0)
    });
    beyond.map(|(key, requested)| format!("limits.{key}: {requested}"))
}

impl Limits {
    pub fn new(requested: &LimitValues, granted: &LimitValues) -> Self {
        let value = |key: LimitKey| key.effective(requested, granted);
        let bytes = |key| (value(key) as usize) << 20;
        let time = |key| Duration::from_millis(value(key).into());
        Self {
            memory: bytes(LimitKey::MemoryMiB),
            wall: time(LimitKey::WallMs),
            cpu: time(LimitKey::CpuMs),
            hostcall_bytes: bytes(LimitKey::AnswerMiB),
            host_operations: value(LimitKey::HostOperations) as usize,
            host_bytes: bytes(LimitKey::HostMiB),
            log: LogRates {
                lines: value(LimitKey::LogLinesPerSecond),
                bytes: value(LimitKey::LogBytesPerSecond),
            },
            concurrent_calls: value(LimitKey::ConcurrentCalls) as usize,
        }
    }

    /// Returns the elapsed-time limit of a discovery or health check.
    pub fn look_wall(&self) -> Duration {
        self.wall / 2
    }
}
