//! Refusals: the one error type of the contract.

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// What kind of trouble a [`Problem`] is. It decides whether the host asks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProblemKind {
    /// The request or a config can never succeed as it is. Not retried until it changes.
    Invalid,
    /// Forbidden by a grant or by the driver's own rules. Not retried until it changes.
    Denied,
    /// Something named in the request does not exist.
    NotFound,
    /// Held by somebody else. Retried.
    Conflict,
    /// Not possible now. Retried.
    Unavailable,
    /// A defect of the driver. Retried with backoff, then the driver is quarantined.
    Internal,
}

impl ProblemKind {
    /// The name as in the contract and in logs: `not-found`.
    pub fn as_str(self) -> &'static str {
        match self {
            ProblemKind::Invalid => "invalid",
            ProblemKind::Denied => "denied",
            ProblemKind::NotFound => "not-found",
            ProblemKind::Conflict => "conflict",
            ProblemKind::Unavailable => "unavailable",
            ProblemKind::Internal => "internal",
        }
    }
}

impl fmt::Display for ProblemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A refusal that a person can act on.
///
/// ```
/// use nodedock_sdk::{Problem, ProblemKind};
/// use std::time::Duration;
///
/// let problem = Problem::unavailable("firmware-loading", "gpu-0 still loads its firmware")
///     .retry_after(Duration::from_secs(2))
///     .with_detail("device", "gpu-0");
/// assert_eq!(problem.kind, ProblemKind::Unavailable);
/// assert_eq!(problem.retry_after_ms, Some(2000));
/// assert_eq!(problem.to_string(), "unavailable (firmware-loading): gpu-0 still loads its firmware");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Whether and when it makes sense to ask again.
    pub kind: ProblemKind,
    /// Which trouble exactly: stable, lower-case words with dashes, at most 63 bytes, such as `no-such-profile`.
    pub code: String,
    /// One sentence that names the thing and the reason, at most 1 KiB.
    pub message: String,
    /// Milliseconds after which a retry makes sense; none leaves it to the host's backoff.
    pub retry_after_ms: Option<u32>,
    /// Facts for logs, at most 16: a key of at most 253 bytes, a value of at most 1 KiB.
    pub details: Vec<(String, String)>,
}

impl Problem {
    /// A problem of this kind, with a code (lower-case words with dashes) and one sentence.
    pub fn new(kind: ProblemKind, code: impl Into<String>, message: impl Into<String>) -> Self {
        Problem {
            kind,
            code: code.into(),
            message: message.into(),
            retry_after_ms: None,
            details: Vec::new(),
        }
    }

    /// The request or a config can never succeed as it is.
    pub fn invalid(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Invalid, code, message)
    }

    /// Forbidden by a grant or by the driver's own rules.
    pub fn denied(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Denied, code, message)
    }

    /// Something named in the request does not exist.
    pub fn not_found(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, code, message)
    }

    /// Held by somebody else; the host asks again.
    pub fn conflict(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Conflict, code, message)
    }

    /// Not possible now; the host asks again.
    pub fn unavailable(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Unavailable, code, message)
    }

    /// A defect of the driver.
    pub fn internal(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Internal, code, message)
    }

    /// When a retry makes sense, in whole milliseconds; more than 49 days counts as 49 days.
    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after_ms = Some(u32::try_from(delay.as_millis()).unwrap_or(u32::MAX));
        self
    }

    /// One fact more, for logs and `nodedock explain`.
    #[must_use]
    pub fn with_detail(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.details.push((key.into(), value.into()));
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.kind, self.code, self.message)
    }
}

impl Error for Problem {}
