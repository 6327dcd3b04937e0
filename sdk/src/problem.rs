//! Problems: the error type of the contract.

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// The host's code for an attribute that has no value at the moment.
const NO_VALUE: &str = "no-value";

/// Kind of a [`Problem`], which decides whether the host retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProblemKind {
    /// The request or a config is invalid. The host does not retry until it changes.
    Invalid,
    /// Forbidden by a grant or by the driver's own rules. The host does not retry until that changes.
    Denied,
    /// Something named in the request does not exist.
    NotFound,
    /// The device is in use by another claim. The host retries.
    Conflict,
    /// Temporarily not possible. The host retries.
    Unavailable,
    /// A defect of the driver. The host retries with backoff, then quarantines the driver.
    Internal,
}

impl ProblemKind {
    /// Returns the name in the contract and in logs, such as `not-found`.
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

/// Why a request failed, in terms that an operator can act on.
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
    /// Decides whether and when the host retries.
    pub kind: ProblemKind,
    /// Stable identifier: lower-case words with dashes, at most 63 bytes, such as `no-such-profile`.
    pub code: String,
    /// One sentence that names the object and the reason, at most 1 KiB.
    pub message: String,
    /// Milliseconds after which the host retries; `None` is the host's backoff.
    pub retry_after_ms: Option<u32>,
    /// Facts for logs, at most 16: a key of at most 253 bytes, a value of at most 1 KiB.
    pub details: Vec<(String, String)>,
}

impl Problem {
    /// Creates a problem of this kind, with a code (lower-case words with dashes) and one sentence.
    pub fn new(kind: ProblemKind, code: impl Into<String>, message: impl Into<String>) -> Self {
        Problem {
            kind,
            code: code.into(),
            message: message.into(),
            retry_after_ms: None,
            details: Vec::new(),
        }
    }

    /// Creates a problem of kind [`Invalid`](ProblemKind::Invalid).
    pub fn invalid(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Invalid, code, message)
    }

    /// Creates a problem of kind [`Denied`](ProblemKind::Denied).
    pub fn denied(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Denied, code, message)
    }

    /// Something named in the request does not exist.
    pub fn not_found(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, code, message)
    }

    /// Creates a problem of kind [`Conflict`](ProblemKind::Conflict).
    pub fn conflict(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Conflict, code, message)
    }

    /// Creates a problem of kind [`Unavailable`](ProblemKind::Unavailable).
    pub fn unavailable(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Unavailable, code, message)
    }

    /// A defect of the driver.
    pub fn internal(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Internal, code, message)
    }

    /// Returns whether a read of the host found nothing: the file does not exist, or the kernel has no value now (`no-value`). Any other
    /// problem of a read says nothing about the node. A discovery returns it, and the host keeps the last inventory.
    ///
    /// ```
    /// use nodedock_sdk::Problem;
    ///
    /// assert!(Problem::not_found("no-such-path", "/sys/class/net/eth9 does not exist").is_absent());
    /// assert!(Problem::unavailable("no-value", "the kernel has no value of /sys/class/net/eth0/speed now").is_absent());
    /// assert!(!Problem::unavailable("io-error", "/sys/class/net/eth0/mtu: Cannot allocate memory").is_absent());
    /// ```
    pub fn is_absent(&self) -> bool {
        self.kind == ProblemKind::NotFound || self.code == NO_VALUE
    }

    /// Sets the delay of the retry in whole milliseconds, at most 49 days.
    ///
    /// ```
    /// use nodedock_sdk::Problem;
    /// use std::time::Duration;
    ///
    /// let problem = Problem::unavailable("resetting", "gpu-0 is resetting").retry_after(Duration::from_secs(2));
    /// assert_eq!(problem.retry_after_ms, Some(2000));
    /// ```
    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after_ms = Some(u32::try_from(delay.as_millis()).unwrap_or(u32::MAX));
        self
    }

    /// Adds a detail for logs and `nodedock explain`.
    #[must_use]
    pub fn with_detail(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.details.push((key.into(), value.into()));
        self
    }
}

/// Returns what was read, and `None` for what does not exist or has no value now: a device may disappear while it is read.
///
/// ```
/// use nodedock_sdk::{Problem, present};
///
/// assert_eq!(present(Ok(4)), Ok(Some(4)));
/// assert_eq!(present::<u32>(Err(Problem::not_found("no-such-path", "/sys/class/net/eth9 does not exist"))), Ok(None));
/// let failed = Problem::unavailable("io-error", "/sys/class/net/eth0/mtu: Cannot allocate memory");
/// assert_eq!(present::<u32>(Err(failed.clone())), Err(failed));
/// ```
///
/// # Errors
///
/// The problem of a read that failed: see [`Problem::is_absent`].
pub fn present<T>(read: Result<T, Problem>) -> Result<Option<T>, Problem> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(problem) if problem.is_absent() => Ok(None),
        Err(problem) => Err(problem),
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.kind, self.code, self.message)
    }
}

impl Error for Problem {}
