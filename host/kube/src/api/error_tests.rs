//! Refusals are as an API server of Kubernetes 1.36 wrote them.

use serde_json::Value;

use super::*;

const JSON: &str = "application/json";

fn refusals() -> Vec<(u16, String, ApiError)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/kubernetes-1.36/refusals.json");
    let recorded: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let read = |refusal: Value| {
        let code = u16::try_from(refusal["status"].as_u64().unwrap()).unwrap();
        let path = refusal["path"].as_str().unwrap().to_owned();
        let body = refusal["body"].to_string();
        let error = of_answer(StatusCode::from_u16(code).unwrap(), &path, JSON, None, body.as_bytes());
        (code, path, error)
    };
    recorded.into_iter().map(read).collect()
}

#[test]
fn recorded_refusals_are_what_they_say() {
    let kind = |error: &ApiError| match error {
        ApiError::NotFound(_) => "not found",
        ApiError::NotServed(_) => "not served",
        ApiError::Conflict(_) => "conflict",
        ApiError::Unauthorized(_) => "unauthorized",
        ApiError::Invalid { .. } => "invalid",
        _ => "another",
    };
    let kinds: Vec<_> = refusals().iter().map(|(code, _, error)| (*code, kind(error))).collect();
    let wanted = [
        (422, "invalid"),
        (422, "invalid"),
        (409, "conflict"),
        (422, "invalid"),
        (422, "invalid"),
        (404, "not found"),
        (401, "unauthorized"),
        (422, "invalid"),
        (404, "not served"),
    ];
    assert_eq!(kinds, wanted);
}

#[test]
fn a_refusal_keeps_the_field_that_is_wrong() {
    let (_, _, error) = refusals().remove(0);
    let ApiError::Invalid { words, causes } = &error else { panic!("{error}") };
    assert!(words.contains("Bad_Name"), "{words}");
    assert_eq!(causes[0].field, "spec.devices[0].name");
    assert_eq!(causes[0].reason, "FieldValueInvalid");
    let problem = error.problem();
    assert_eq!((problem.kind.as_str(), problem.code.as_str()), ("invalid", "api-refused"));
}

fn plain(code: u16, content_type: &str, body: &str) -> ApiError {
    of_answer(StatusCode::from_u16(code).unwrap(), "/a", content_type, None, body.as_bytes())
}

#[test]
fn what_strangers_answer_is_said_to_be_theirs() {
    let html = "<!DOCTYPE html>\n<html><head><title>Sign in</title>";
    for code in [302, 403, 404, 418, 500] {
        let error = plain(code, "text/html; charset=utf-8", html);
        let words = error.to_string();
        assert!(matches!(error, ApiError::NotAnswer(_)), "{code}: {words}");
        assert!(words.contains("is there a proxy") && words.contains("Sign in"), "{words}");
        assert!(error.is_away() && error.is_retryable());
    }
    assert!(matches!(plain(503, "text/html", html), ApiError::Unavailable { .. }));
    assert!(matches!(plain(401, "text/plain", "Unauthorized"), ApiError::Unauthorized(_)));
    assert!(matches!(plain(403, "text/plain", "no"), ApiError::Forbidden(_)));
    assert!(matches!(plain(404, "text/plain", "404 page not found\n"), ApiError::NotServed(_)));
    assert!(matches!(plain(404, "text/plain", "nothing here"), ApiError::NotAnswer(_)));
    assert!(matches!(plain(429, "", ""), ApiError::TooManyRequests { .. }));
}

#[test]
fn words_of_others_are_one_short_line() {
    let long = format!(r#"{{"kind":"Status","code":403,"message":"a\nb{}"}}"#, "é".repeat(5000));
    let ApiError::Forbidden(words) = plain(403, JSON, &long) else { panic!() };
    assert!(words.len() < limit::API_WORDS_BYTES_MAX + 4 && words.starts_with("a b") && words.ends_with('…'));
    let odd = plain(500, "text/plain\u{1b}[31m", "\u{1b}[2Jboom\u{202e}\r\nnext");
    assert!(!odd.to_string().contains(nodedock_base::printable::is_unprintable), "{odd:?}");
}

#[test]
fn the_delay_that_a_server_asks_for_is_kept_within_bounds() {
    let status = |seconds: u64| {
        let body = serde_json::json!({
            "kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "slow down",
            "details": {"retryAfterSeconds": seconds},
        });
        plain(429, JSON, &body.to_string()).retry_after()
    };
    assert_eq!(status(3), Some(Duration::from_secs(3)));
    assert_eq!(status(0), None);
    assert_eq!(status(u64::MAX), Some(limit::API_RETRY_AFTER_MAX));
    let mut headers = http::HeaderMap::new();
    assert_eq!(retry_after(&headers), None);
    for (value, wanted) in [
        ("7", Some(Duration::from_secs(7))),
        ("-1", None),
        ("soon", None),
        ("99999999", Some(limit::API_RETRY_AFTER_MAX)),
    ] {
        headers.insert(http::header::RETRY_AFTER, value.parse().unwrap());
        assert_eq!(retry_after(&headers), wanted, "{value}");
    }
}

#[test]
fn every_error_has_a_problem_and_says_when_to_come_again_if_it_may_heal() {
    let errors = [
        (ApiError::NotFound("a".into()), "not-found", false),
        (ApiError::NotServed("a".into()), "unavailable", false),
        (ApiError::Conflict("a".into()), "conflict", false),
        (ApiError::AlreadyExists("a".into()), "conflict", false),
        (ApiError::Expired("a".into()), "unavailable", true),
        (ApiError::TooManyRequests { words: "a".into(), retry_after: None }, "unavailable", true),
        (ApiError::Forbidden("a".into()), "denied", false),
        (ApiError::Unauthorized("a".into()), "unavailable", true),
        (ApiError::Invalid { words: "a".into(), causes: vec![] }, "invalid", false),
        (ApiError::NotAnswer("a".into()), "unavailable", true),
        (ApiError::unavailable("a"), "unavailable", true),
    ];
    for (error, kind, again) in errors {
        let problem = error.problem();
        assert_eq!(problem.kind.as_str(), kind, "{error:?}");
        assert_eq!(problem.retry_after_ms.is_some(), again, "{error:?}");
        assert!(problem.code.len() <= limit::PROBLEM_CODE_BYTES_MAX);
    }
}

proptest::proptest! {
    #[test]
    fn no_answer_reaches_a_panic(code in 100u16..1000, kind in ".{0,40}", body in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
        let code = StatusCode::from_u16(code).unwrap();
        let error = of_answer(code, "/a", &kind, None, &body);
        proptest::prop_assert!(!error.to_string().contains('\n'));
    }
}
