//! Refusals are as an API server of Kubernetes 1.36 wrote them.

use http::{HeaderMap, StatusCode};
use kube::core::Status;
use serde_json::Value;
use std::time::Duration;

use super::super::error::{is_status, retry_after};
use super::*;
use crate::client::API_RETRY_AFTER_MAX;

fn refusals() -> Vec<(u16, ApiError)> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/kubernetes-1.36/refusals.json"
    );
    let recorded: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let read = |refusal: Value| {
        let body = refusal["body"].to_string();
        assert!(is_status(body.as_bytes()), "{body}");
        let status: Status = serde_json::from_str(&body).unwrap();
        (
            u16::try_from(refusal["status"].as_u64().unwrap()).unwrap(),
            ApiError::of_status(&status),
        )
    };
    recorded.into_iter().map(read).collect()
}

#[test]
fn recorded_refusals_are_what_they_say() {
    use ErrorKind::{Conflict, Invalid, NotFound, NotServed, Unauthorized};
    let kinds: Vec<_> = refusals()
        .iter()
        .map(|(code, error)| (*code, error.kind))
        .collect();
    let wanted = [
        (422, Invalid),
        (422, Invalid),
        (409, Conflict),
        (422, Invalid),
        (422, Invalid),
        (404, NotFound),
        (401, Unauthorized),
        (422, Invalid),
        (404, NotServed),
    ];
    assert_eq!(kinds, wanted);
    let (_, error) = refusals().remove(0);
    assert!(error.message.contains("Bad_Name"), "{error}");
    assert_eq!(error.fields, ["spec.devices[0].name"]);
    let problem = error.problem();
    assert_eq!(
        (problem.kind.as_str(), problem.code.as_str()),
        ("invalid", "api-refused")
    );
    let missing = &refusals()[5].1;
    let name = missing.object.clone().unwrap();
    assert!(missing.is_missing(&name) && !missing.is_missing("another"));
}

fn stranger(code: u16, content_type: &str, body: &str) -> ApiError {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", content_type.parse().unwrap());
    ApiError::of_answer(
        StatusCode::from_u16(code).unwrap(),
        &headers,
        body.as_bytes(),
    )
}

#[test]
fn non_status_responses_suggest_a_proxy() {
    let html = "<!DOCTYPE html>\n<html><head><title>Sign in</title>";
    assert!(
        !is_status(html.as_bytes()) && !is_status(b"{}") && !is_status(b"null") && !is_status(b"")
    );
    for code in [302, 403, 404, 418, 500] {
        let error = stranger(code, "text/html; charset=utf-8", html);
        let words = error.to_string();
        assert_eq!(error.kind, ErrorKind::NotKubernetes, "{code}: {words}");
        assert!(
            words.contains("is there a proxy") && words.contains("Sign in"),
            "{words}"
        );
        assert!(error.is_unreachable() && error.is_retryable());
    }
    for (code, content_type, body, kind) in [
        (503, "text/html", html, ErrorKind::Unreachable),
        (401, "text/plain", "Unauthorized", ErrorKind::Unauthorized),
        (403, "text/plain", "no", ErrorKind::Forbidden),
        (
            404,
            "text/plain",
            "404 page not found\n",
            ErrorKind::NotServed,
        ),
        (404, "text/plain", "nothing here", ErrorKind::NotKubernetes),
        (429, "", "", ErrorKind::Throttled),
    ] {
        assert_eq!(
            stranger(code, content_type, body).kind,
            kind,
            "{code} {body}"
        );
    }
}

#[test]
fn server_messages_become_one_short_line() {
    let long = Status::failure(&format!("a\nb{}", "é".repeat(5000)), "Forbidden").with_code(403);
    let words = ApiError::of_status(&long).message;
    assert!(
        words.len() <= nodedock_model::limit::API_WORDS_BYTES_MAX
            && words.starts_with("a b")
            && words.contains('…')
    );
    let odd = stranger(500, "text/plain", "\u{1b}[2Jboom\u{202e}\r\nnext");
    assert!(
        !odd.to_string()
            .contains(nodedock_base::printable::is_unprintable),
        "{odd:?}"
    );
}

#[test]
fn retry_after_is_bounded() {
    let status = |seconds: u32| {
        let body = format!(
            r#"{{"code":429,"message":"slow down","details":{{"retryAfterSeconds":{seconds}}}}}"#
        );
        ApiError::of_status(&serde_json::from_str(&body).unwrap()).retry_after
    };
    assert_eq!(status(3), Some(Duration::from_secs(3)));
    assert_eq!(status(0), None);
    assert_eq!(status(u32::MAX), Some(API_RETRY_AFTER_MAX));
    let mut headers = HeaderMap::new();
    assert_eq!(retry_after(&headers), None);
    for (value, wanted) in [
        ("7", Some(Duration::from_secs(7))),
        ("-1", None),
        ("soon", None),
        ("99999999", Some(API_RETRY_AFTER_MAX)),
    ] {
        headers.insert(http::header::RETRY_AFTER, value.parse().unwrap());
        assert_eq!(retry_after(&headers), wanted, "{value}");
    }
}

#[test]
fn every_error_becomes_a_problem() {
    use ErrorKind::*;
    for (kind, problem_kind, again) in [
        (NotFound, "not-found", false),
        (NotServed, "unavailable", false),
        (Conflict, "conflict", false),
        (Expired, "unavailable", true),
        (Throttled, "unavailable", true),
        (Forbidden, "denied", false),
        (NamespaceTerminating, "denied", false),
        (Unauthorized, "unavailable", true),
        (Invalid, "invalid", false),
        (NotKubernetes, "unavailable", true),
        (Unreachable, "unavailable", true),
    ] {
        let problem = ApiError::new(kind, "a").problem();
        assert_eq!(
            (problem.kind.as_str(), problem.retry_after_ms.is_some()),
            (problem_kind, again),
            "{kind:?}"
        );
        assert!(problem.code.len() <= nodedock_model::limit::PROBLEM_CODE_BYTES_MAX);
    }
    let terminating = r#"{"code":403,"reason":"Forbidden","message":"being terminated",
        "details":{"causes":[{"reason":"NamespaceTerminating","field":"metadata.namespace"}]}}"#;
    let terminating = ApiError::of_status(&serde_json::from_str(terminating).unwrap());
    assert_eq!(terminating.kind, NamespaceTerminating);
}

proptest::proptest! {
    #[test]
    fn no_answer_reaches_a_panic(code in 100u16..1000, kind in "[ -~]{0,40}", body in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
        let error = stranger(code, &kind, &String::from_utf8_lossy(&body));
        proptest::prop_assert!(!error.to_string().contains('\n'));
    }
}
