//! Why a request failed, in terms that an operator can act on.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Kind of a problem, with the names of the driver contract and the node API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// The request can never succeed unchanged.
    Invalid,
    /// Forbidden by a grant or a rule.
    Denied,
    /// Something named in the request does not exist.
    NotFound,
    /// In use by another claim.
    Conflict,
    /// Temporarily not possible.
    Unavailable,
    /// A defect of the driver, or of the host.
    Internal,
}

impl ProblemKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Denied => "denied",
            Self::NotFound => "not-found",
            Self::Conflict => "conflict",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
        }
    }

    /// Returns whether the same request can succeed later.
    pub fn is_permanent(self) -> bool {
        matches!(self, Self::Invalid | Self::Denied | Self::NotFound)
    }
}

impl fmt::Display for ProblemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A problem: kind, code, message, and when to retry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    pub kind: ProblemKind,
    /// Stable, lower-case words with dashes, at most 63 bytes.
    pub code: String,
    /// One sentence, at most 1 KiB.
    pub message: String,
    /// Milliseconds until the retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u32>,
    /// Facts for logs and `explain`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<(String, String)>,
}

impl Problem {
    pub fn new(kind: ProblemKind, code: &str, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: code.to_owned(),
            message: message.into(),
            retry_after_ms: None,
            details: Vec::new(),
        }
    }

    pub fn invalid(code: &str, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Invalid, code, message)
    }

    pub fn denied(code: &str, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Denied, code, message)
    }

    pub fn not_found(code: &str, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, code, message)
    }

    pub fn conflict(code: &str, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Conflict, code, message)
    }

    pub fn unavailable(code: &str, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Unavailable, code, message)
    }

    pub fn internal(code: &str, message: impl Into<String>) -> Self {
        Self::new(ProblemKind::Internal, code, message)
    }

    /// Adds a detail.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.details.push((key.to_owned(), value.to_string()));
        self
    }

    /// Sets the time until the retry.
    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after_ms = Some(u32::try_from(delay.as_millis()).unwrap_or(u32::MAX));
        self
    }
}
