//! Why a request to the API server failed.
//!
//! Only what an API server plainly says is a fact: a page of a proxy, a path that is not served and an answer about another object are
//! kinds of their own, and none of them means that an object is gone.

use std::error::Error as StdError;
use std::time::Duration;

use http::StatusCode;
use kube::core::{Status, TypeMeta};
use tower::BoxError;

use crate::client::{API_RETRY_AFTER_MAX, API_RETRY_MIN};
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_model::{Problem, ProblemCode, ProblemKind, limit};

/// Causes of a refusal that are kept.
const API_CAUSES_MAX: usize = 16;

/// A request that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", kind.prefix())]
pub struct ApiError {
    pub kind: ErrorKind,
    /// The status code of the API server's answer; 0: there is none.
    pub code: u16,
    /// Message of the server, if it answered; one line.
    pub message: String,
    /// Delay before a retry, if the server asked for one.
    pub retry_after: Option<Duration>,
    /// Paths of the fields that are refused.
    pub fields: Vec<String>,
    /// Name of the object that the server's answer is about.
    pub object: Option<String>,
}

/// Kind of a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The object does not exist.
    NotFound,
    /// The version, the group or the whole path is not served.
    NotServed,
    /// The object changed since it was read, is another one, or exists already.
    Conflict,
    /// The resource version is too old: what is watched has to be listed again.
    Expired,
    /// 429, or a request that was not sent because of an earlier one.
    Throttled,
    Forbidden,
    /// Nothing is created in a namespace that is being deleted. This says nothing of our rights.
    NamespaceTerminating,
    Unauthorized,
    /// The request is refused for what it contains.
    Invalid,
    /// The answer is not an API server's, but a proxy's or a login page.
    NotKubernetes,
    /// No answer, or one that says that the server cannot answer now.
    Unreachable,
}

impl ErrorKind {
    fn prefix(self) -> &'static str {
        match self {
            Self::NotFound | Self::Conflict | Self::Expired => "the API server answers: ",
            Self::NotServed => "the API server does not serve ",
            Self::Throttled => "the API server throttles requests: ",
            Self::Forbidden | Self::NamespaceTerminating => "the API server forbids it: ",
            Self::Unauthorized => "the API server does not accept our credentials: ",
            Self::Invalid => "the API server refuses the request: ",
            Self::NotKubernetes => "what answers is not an API server: ",
            Self::Unreachable => "the API server cannot be reached: ",
        }
    }

    fn of_status(code: u16, reason: &str) -> Self {
        match (code, reason) {
            (404, _) => Self::NotFound,
            (409, _) => Self::Conflict,
            (410, _) | (_, "Expired" | "Gone") => Self::Expired,
            (429, _) => Self::Throttled,
            (401, _) => Self::Unauthorized,
            (403, _) => Self::Forbidden,
            (400 | 405 | 406 | 413 | 415 | 422, _) => Self::Invalid,
            (408 | 500..=599, _) => Self::Unreachable,
            _ => Self::NotKubernetes,
        }
    }
}

impl ApiError {
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        let message = one_line(message.as_ref(), limit::API_WORDS_BYTES_MAX);
        Self {
            kind,
            code: 0,
            message,
            retry_after: None,
            fields: Vec::new(),
            object: None,
        }
    }

    pub fn unreachable(message: impl AsRef<str>) -> Self {
        Self::new(ErrorKind::Unreachable, message)
    }

    /// Returns whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        use ErrorKind::{Expired, NotKubernetes, Throttled, Unauthorized, Unreachable};
        matches!(
            self.kind,
            Throttled | Unreachable | NotKubernetes | Unauthorized | Expired
        )
    }

    /// Returns whether no API server was reached that accepts our credentials.
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self.kind,
            ErrorKind::Unreachable | ErrorKind::NotKubernetes | ErrorKind::Unauthorized
        )
    }

    /// Returns whether the API server reports that the object of this name does not exist.
    pub fn is_missing(&self, name: &str) -> bool {
        self.kind == ErrorKind::NotFound && self.object.as_deref() == Some(name)
    }

    pub fn problem(&self) -> Problem {
        use ProblemKind::{Conflict, Denied, Invalid, NotFound, Unavailable};
        let (kind, code) = match self.kind {
            ErrorKind::NotFound => (NotFound, ProblemCode::ApiNotFound),
            ErrorKind::NotServed => (Unavailable, ProblemCode::ApiNotServed),
            ErrorKind::Conflict => (Conflict, ProblemCode::ApiConflict),
            ErrorKind::Expired => (Unavailable, ProblemCode::ApiExpired),
            ErrorKind::Throttled => (Unavailable, ProblemCode::ApiServerBusy),
            ErrorKind::Forbidden | ErrorKind::NamespaceTerminating => {
                (Denied, ProblemCode::ApiForbidden)
            }
            ErrorKind::Invalid => (Invalid, ProblemCode::ApiRefused),
            ErrorKind::Unauthorized | ErrorKind::NotKubernetes | ErrorKind::Unreachable => {
                (Unavailable, ProblemCode::ApiServerUnreachable)
            }
        };
        let problem = Problem::new(kind, code, self.to_string());
        match self.is_retryable() {
            true => problem.retry_after(self.retry_after.unwrap_or(API_RETRY_MIN * 2)),
            false => problem,
        }
    }

    /// Converts an error of a connection.
    pub(super) fn of_transport(error: BoxError) -> Self {
        match error.downcast::<kube::Error>() {
            Ok(error) => Self::from(*error),
            Err(error) => Self::from(kube::Error::Service(error)),
        }
    }

    /// Converts a `Status` of the API server.
    pub(super) fn of_status(status: &Status) -> Self {
        let (code, details) = (status.code, status.details.as_ref());
        let words = match status.message.as_str() {
            "" => format!("{code} {}", status.reason),
            message => message.to_owned(),
        };
        let mut error = Self {
            code,
            ..Self::new(ErrorKind::of_status(code, &status.reason), words)
        };
        let causes = details
            .map(|details| details.causes.as_slice())
            .unwrap_or_default();
        match error.kind {
            // A 404 that names no object is of the whole path.
            ErrorKind::NotFound
                if details.is_none_or(|d| d.name.is_empty() && d.kind.is_empty()) =>
            {
                error.kind = ErrorKind::NotServed;
            }
            ErrorKind::Forbidden
                if causes
                    .iter()
                    .any(|cause| cause.reason == "NamespaceTerminating") =>
            {
                error.kind = ErrorKind::NamespaceTerminating;
            }
            _ => {}
        }
        let causes = causes.iter().take(API_CAUSES_MAX);
        error.fields = causes
            .map(|cause| one_line(&cause.field, limit::API_WORDS_BYTES_MAX))
            .collect();
        error.object = details
            .map(|details| details.name.clone())
            .filter(|name| !name.is_empty());
        let seconds = details.map_or(0, |details| details.retry_after_seconds);
        error.retry_after = (seconds > 0).then(|| bounded(Duration::from_secs(seconds.into())));
        error
    }

    /// Converts an answer with an error code.
    pub(super) fn of_answer(code: StatusCode, headers: &http::HeaderMap, body: &[u8]) -> Self {
        let status = is_status(body)
            .then(|| serde_json::from_slice::<Status>(body).ok())
            .flatten();
        let mut error = match status {
            Some(status) => Self::of_status(&status.with_code(code.as_u16())),
            None => Self::without_status(code, content_type(headers), body),
        };
        if !matches!(
            error.kind,
            ErrorKind::NotKubernetes | ErrorKind::Unreachable
        ) {
            error.code = code.as_u16();
        }
        error.retry_after = retry_after(headers).or(error.retry_after);
        error
    }

    /// An answer whose body is no `Status`: it is of a proxy, or of a part of the API server that knows none.
    fn without_status(code: StatusCode, content_type: &str, body: &[u8]) -> Self {
        let words = described(content_type, body);
        match code.as_u16() {
            // Where not even the group exists, the API server says so in plain text.
            404 if body.starts_with(b"404 page not found") => {
                Self::new(ErrorKind::NotServed, "the path")
            }
            401 => Self::new(ErrorKind::Unauthorized, words),
            403 if !is_html(content_type, body) => Self::new(ErrorKind::Forbidden, words),
            429 => Self::new(ErrorKind::Throttled, words),
            408 | 502 | 503 | 504 => Self::unreachable(format!("{code}, with {words}")),
            _ => Self::new(ErrorKind::NotKubernetes, format!("{code}, with {words}")),
        }
    }
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(&status),
            error => of_client(&error),
        }
    }
}

/// An error of the client itself, or one that the layer around it made.
fn of_client(error: &kube::Error) -> ApiError {
    if let Some(ours) = ours(error) {
        return ours.clone();
    }
    let words = match error {
        kube::Error::Service(cause) => chain(cause.as_ref()),
        other => chain(other),
    };
    let words = words
        .strip_prefix("client error (Connect): ")
        .unwrap_or(&words);
    match error {
        kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => {
            ApiError::new(ErrorKind::NotKubernetes, words)
        }
        kube::Error::BuildRequest(_) | kube::Error::HttpError(_) => {
            ApiError::new(ErrorKind::Invalid, words)
        }
        _ => ApiError::unreachable(words),
    }
}

/// The error of ours that is in another's chain of causes.
fn ours<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a ApiError> {
    if let Some(found) = error.downcast_ref() {
        return Some(found);
    }
    // An I/O error gives the source of what it holds, and not what it holds.
    if let Some(inner) = error
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::get_ref)
    {
        return ours(inner);
    }
    error.source().and_then(ours)
}

/// Returns whether a body is a `Status`, by its kind and API version.
pub(super) fn is_status(body: &[u8]) -> bool {
    let head = serde_json::from_slice::<TypeMeta>(body);
    head.is_ok_and(|head| head.kind == "Status" && head.api_version == "v1")
}

pub(super) fn content_type(headers: &http::HeaderMap) -> &str {
    let value = headers
        .get(http::header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

/// The begin of a body, in words.
pub(super) fn described(content_type: &str, body: &[u8]) -> String {
    if body.is_empty() {
        return "an empty answer".to_owned();
    }
    let start = String::from_utf8_lossy(&body[..body.len().min(200)]);
    let start = one_line(
        start
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .as_str(),
        80,
    );
    let kind = match content_type {
        "" => "no content type".to_owned(),
        kind => one_line(kind, 64),
    };
    let hint = if is_html(content_type, body) {
        "; is there a proxy or a login page between?"
    } else {
        ""
    };
    format!("an answer of {kind} that begins {start:?}{hint}")
}

fn is_html(content_type: &str, body: &[u8]) -> bool {
    let start = body.trim_ascii_start();
    content_type.starts_with("text/html") || start.starts_with(b"<!") || start.starts_with(b"<html")
}

/// `Retry-After` in seconds; as a date it is ignored, since clocks differ.
pub(super) fn retry_after(headers: &http::HeaderMap) -> Option<Duration> {
    let seconds = headers
        .get(http::header::RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(bounded(Duration::from_secs(seconds)))
}

fn bounded(delay: Duration) -> Duration {
    delay.min(API_RETRY_AFTER_MAX)
}
