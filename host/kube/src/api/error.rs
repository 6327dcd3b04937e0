//! What an API server's answer means when it is not what was asked for.

use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;

use nodedock_base::printable::one_line;
use nodedock_model::{Problem, limit};

/// A request that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The object is not there.
    #[error("the API server says: {0}")]
    NotFound(String),
    /// The whole path is not there: the version or the group is not served.
    #[error("the API server does not serve {0}")]
    NotServed(String),
    /// The object has changed in between, or is another (409).
    #[error("the API server says: {0}")]
    Conflict(String),
    #[error("the API server says: {0}")]
    AlreadyExists(String),
    /// The resource version is too old (410): what is watched has to be listed again.
    #[error("the API server says: {0}")]
    Expired(String),
    /// 429, or what we have not sent because of one.
    #[error("the API server asks to be left alone: {words}")]
    TooManyRequests { words: String, retry_after: Option<Duration> },
    #[error("the API server forbids it: {0}")]
    Forbidden(String),
    #[error("the API server does not know us: {0}")]
    Unauthorized(String),
    /// What was sent is refused for what it is.
    #[error("the API server refuses it: {words}")]
    Invalid { words: String, causes: Vec<Cause> },
    /// What came is not of an API server.
    #[error("what answers is no API server: {0}")]
    NotAnswer(String),
    /// No answer, or one that says that there is none now.
    #[error("the API server cannot be reached: {words}")]
    Unavailable { words: String, retry_after: Option<Duration> },
}

/// A field that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    pub field: String,
    pub reason: String,
    pub message: String,
}

impl ApiError {
    pub(super) fn unavailable(words: impl Into<String>) -> Self {
        Self::Unavailable { words: words.into(), retry_after: None }
    }

    /// Whether the same request may succeed later without a change of it.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TooManyRequests { .. }
            | Self::Unavailable { .. }
            | Self::NotAnswer(_)
            | Self::Unauthorized(_)
            | Self::Expired(_) => true,
            Self::NotFound(_)
            | Self::NotServed(_)
            | Self::Conflict(_)
            | Self::AlreadyExists(_)
            | Self::Forbidden(_)
            | Self::Invalid { .. } => false,
        }
    }

    /// Whether no API server that takes us for somebody was reached.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::NotAnswer(_) | Self::Unauthorized(_))
    }

    /// When to come again, if it says so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { retry_after, .. } | Self::Unavailable { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    pub fn problem(&self) -> Problem {
        let words = self.to_string();
        let problem = match self {
            Self::NotFound(_) => Problem::not_found("api-not-found", words),
            Self::NotServed(_) => Problem::unavailable("api-not-served", words),
            Self::Conflict(_) | Self::AlreadyExists(_) => Problem::conflict("api-conflict", words),
            Self::Expired(_) => Problem::unavailable("api-expired", words),
            Self::TooManyRequests { .. } => Problem::unavailable("api-server-busy", words),
            Self::Forbidden(_) => Problem::denied("api-forbidden", words),
            Self::Invalid { .. } => Problem::invalid("api-refused", words),
            Self::Unauthorized(_) | Self::NotAnswer(_) | Self::Unavailable { .. } => {
                Problem::unavailable("api-server-unreachable", words)
            }
        };
        if !self.is_retryable() {
            return problem;
        }
        problem.retry_after(self.retry_after().unwrap_or(limit::API_RETRY_MIN * 2))
    }
}

/// The `Status` of an API server, as far as it says what went wrong.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    kind: String,
    message: Option<String>,
    reason: Option<String>,
    code: Option<u16>,
    details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    name: Option<String>,
    kind: Option<String>,
    causes: Option<Vec<StatusCause>>,
    retry_after_seconds: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StatusCause {
    field: Option<String>,
    reason: Option<String>,
    message: Option<String>,
}

/// What an answer of another status than success means. `path` is for words, `retry_after` and `content_type` are its headers.
pub(super) fn of_answer(
    code: StatusCode,
    path: &str,
    content_type: &str,
    retry_after: Option<Duration>,
    body: &[u8],
) -> ApiError {
    match serde_json::from_slice::<Status>(body) {
        Ok(status) if status.kind == "Status" => of_status(code.as_u16(), &status, path, retry_after),
        _ => of_stranger(code, path, content_type, retry_after, body),
    }
}

/// What the object of an event of type `ERROR` means.
pub(super) fn of_event(object: serde_json::Value, path: &str) -> ApiError {
    match serde_json::from_value::<Status>(object) {
        Ok(status) => of_status(status.code.unwrap_or(0), &status, path, None),
        Err(error) => ApiError::NotAnswer(format!("an error in a watch that is no Status: {error}")),
    }
}

fn of_status(code: u16, status: &Status, path: &str, retry_after: Option<Duration>) -> ApiError {
    let reason = status.reason.as_deref().unwrap_or_default();
    let words = match status.message.as_deref().unwrap_or_default() {
        "" => format!("{code} {reason}"),
        message => line(message),
    };
    let details = status.details.as_ref();
    let retry_after = retry_after
        .or_else(|| bounded(Duration::from_secs(details?.retry_after_seconds.filter(|s| *s > 0)?)));
    match (code, reason) {
        (404, _) if details.is_none_or(|d| d.name.is_none() && d.kind.is_none()) => {
            ApiError::NotServed(line(path))
        }
        (404, _) => ApiError::NotFound(words),
        (409, "AlreadyExists") => ApiError::AlreadyExists(words),
        (409, _) => ApiError::Conflict(words),
        (410, _) | (_, "Expired" | "Gone") => ApiError::Expired(words),
        (429, _) => ApiError::TooManyRequests { words, retry_after },
        (401, _) => ApiError::Unauthorized(words),
        (403, _) => ApiError::Forbidden(words),
        (400 | 405 | 406 | 413 | 415 | 422, _) => ApiError::Invalid { words, causes: causes(details) },
        (408 | 500..=599, _) => ApiError::Unavailable { words: format!("{code}: {words}"), retry_after },
        _ => ApiError::NotAnswer(format!("status {code}: {words}")),
    }
}

/// An answer that is no `Status`: of something between, or of a part of the API server that knows none.
fn of_stranger(
    code: StatusCode,
    path: &str,
    content_type: &str,
    retry_after: Option<Duration>,
    body: &[u8],
) -> ApiError {
    let words = described(content_type, body);
    match code.as_u16() {
        // The API server says so where not even the group exists.
        404 if body.starts_with(b"404 page not found") => ApiError::NotServed(line(path)),
        401 => ApiError::Unauthorized(words),
        403 if !is_html(content_type, body) => ApiError::Forbidden(words),
        429 => ApiError::TooManyRequests { words, retry_after },
        408 | 502 | 503 | 504 => {
            ApiError::Unavailable { words: format!("{code}, with {words}"), retry_after }
        }
        _ => ApiError::NotAnswer(format!("{code}, with {words}")),
    }
}

/// What came, in words.
pub(super) fn described(content_type: &str, body: &[u8]) -> String {
    if body.is_empty() {
        return "an empty answer".to_owned();
    }
    let start = String::from_utf8_lossy(&body[..body.len().min(200)]);
    let start = one_line(start.split_whitespace().collect::<Vec<_>>().join(" ").as_str(), 80);
    let kind = match content_type {
        "" => "no content type".to_owned(),
        kind => one_line(kind, 64),
    };
    let hint = if is_html(content_type, body) { "; is there a proxy or a login page between?" } else { "" };
    format!("an answer of {kind} that begins {start:?}{hint}")
}

fn is_html(content_type: &str, body: &[u8]) -> bool {
    let start = body.trim_ascii_start();
    content_type.starts_with("text/html") || start.starts_with(b"<!") || start.starts_with(b"<html")
}

fn causes(details: Option<&Details>) -> Vec<Cause> {
    let causes = details.and_then(|details| details.causes.as_ref()).into_iter().flatten();
    let text = |text: &Option<String>| line(text.as_deref().unwrap_or_default());
    let cause = |cause: &StatusCause| Cause {
        field: text(&cause.field),
        reason: text(&cause.reason),
        message: text(&cause.message),
    };
    causes.take(limit::API_CAUSES_MAX).map(cause).collect()
}

/// `Retry-After` in seconds; as a date it is not read: clocks differ.
pub(super) fn retry_after(headers: &http::HeaderMap) -> Option<Duration> {
    let seconds = headers.get(http::header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    bounded(Duration::from_secs(seconds))
}

fn bounded(delay: Duration) -> Option<Duration> {
    Some(delay.min(limit::API_RETRY_AFTER_MAX))
}

fn line(text: &str) -> String {
    one_line(text, limit::API_WORDS_BYTES_MAX)
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
