//! Differences between the command line's JSON and YAML and the messages of the node API. `build.rs` names the function of each field.

use serde::{Serialize, Serializer};

use crate::node::v1::{DriverTrust, Problem};

/// Returns a time in milliseconds since the Unix epoch as RFC 3339 in UTC; a time that no calendar has stays a number.
pub fn rfc3339(at_ms: u64) -> String {
    let ms = i64::try_from(at_ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms)
        .map_or_else(|_| at_ms.to_string(), |time| format!("{time:.3}"))
}

pub(crate) fn time<S: Serializer>(at_ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    rfc3339(*at_ms).serialize(serializer)
}

pub(crate) fn time_or_null<S: Serializer>(at_ms: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    (*at_ms > 0).then(|| rfc3339(*at_ms)).serialize(serializer)
}

pub(crate) fn text_or_null<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    Some(text)
        .filter(|text| !text.is_empty())
        .serialize(serializer)
}

/// Writes the value that a JSON text describes.
pub(crate) fn parsed<S: Serializer>(json: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serde_json::from_str::<serde_json::Value>(json)
        .unwrap_or_default()
        .serialize(serializer)
}

pub(crate) fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Returns whether a driver's file was not judged at all.
pub(crate) fn is_unchecked(trust: &Option<DriverTrust>) -> bool {
    trust.as_ref().is_none_or(|trust| trust.mode == "off")
}

/// Leaves out `retryAfterMs`: in a history and beside a `retry` it no longer counts.
pub(crate) fn problem_without_retry<S: Serializer>(
    problem: &Option<Problem>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let problem = problem.clone().map(|problem| Problem {
        retry_after_ms: None,
        ..problem
    });
    problem.serialize(serializer)
}

pub(crate) fn code_and_message<S: Serializer>(
    problem: &Option<Problem>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Short<'a> {
        code: &'a str,
        message: &'a str,
    }
    let short = problem
        .as_ref()
        .map(|Problem { code, message, .. }| Short { code, message });
    short.serialize(serializer)
}

/// Writes the problem of a condition, which has no kind, and always its details.
pub(crate) fn condition<S: Serializer>(
    problem: &Option<Problem>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Flat<'a> {
        code: &'a str,
        message: &'a str,
        details: &'a std::collections::BTreeMap<String, String>,
    }
    let none = Problem::default();
    let Problem {
        code,
        message,
        details,
        ..
    } = problem.as_ref().unwrap_or(&none);
    Flat {
        code,
        message,
        details,
    }
    .serialize(serializer)
}
