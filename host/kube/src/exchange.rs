//! One request to the API server, and what its answer means. The port through which the facts of the node, status, events and the
//! reconcile reach it: bodies travel as they are, since the status of a claim has to be written without a byte of its allocation changed.
//!
//! What is not plainly said by an API server is no fact: a page of a proxy, a 404 of a path that is not served and an answer about
//! another object are all `Away`, which heals or does not, but never means that something is gone.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde::Deserialize;

use nodedock_base::printable::one_line;

/// Bytes of an API server's words that are repeated in ours.
const WORDS_MAX: usize = 512;

/// The way to the API server. Deadlines, credentials and the rate of requests are its business.
#[async_trait]
pub trait Exchange: Send + Sync {
    /// Any answer that came, whatever its status.
    async fn exchange(&self, request: Request) -> Result<Answer, Away>;

    /// Group and version of ResourceClaims that the server serves and we use, such as `resource.k8s.io/v1`.
    fn resource_api(&self) -> String;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Get,
    Post,
    Put,
    /// A JSON merge patch (RFC 7386).
    MergePatch,
}

/// How bodies are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Media {
    Json,
    /// `application/vnd.kubernetes.protobuf`
    Protobuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub verb: Verb,
    /// With its query.
    pub path: String,
    /// Empty: none.
    pub body: Vec<u8>,
    /// Of the body that is sent.
    pub sends: Media,
    /// Of the answer that is wanted.
    pub wants: Media,
}

#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub body: Bytes,
}

/// No answer came, or none that an API server gives.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Away {
    pub why: String,
    /// When the server wants to be asked again, if it said so.
    pub retry_after: Option<Duration>,
}

/// Why a request did not have its effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The API server says that this very object does not exist.
    #[error("it does not exist")]
    Missing,
    /// Somebody else changed it since it was read.
    #[error("it was changed meanwhile")]
    Conflict,
    #[error("it exists")]
    Exists,
    #[error("the API server forbids it: {0}")]
    Forbidden(String),
    /// Never, as it is.
    #[error("the API server refuses it ({status}): {words}")]
    Refused { status: u16, words: String, fields: Vec<String> },
    #[error("{0}")]
    Away(#[from] Away),
}

impl Verb {
    pub fn method(self) -> http::Method {
        match self {
            Self::Get => http::Method::GET,
            Self::Post => http::Method::POST,
            Self::Put => http::Method::PUT,
            Self::MergePatch => http::Method::PATCH,
        }
    }
}

impl Media {
    fn mime(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
        }
    }
}

impl Request {
    pub fn get(path: impl Into<String>) -> Self {
        Self::with(Verb::Get, path, Vec::new())
    }

    /// JSON, both ways.
    pub fn with(verb: Verb, path: impl Into<String>, body: Vec<u8>) -> Self {
        Self { verb, path: path.into(), body, sends: Media::Json, wants: Media::Json }
    }

    /// Value of `Content-Type`.
    pub fn content_type(&self) -> &'static str {
        match (self.verb, self.sends) {
            (Verb::MergePatch, _) => "application/merge-patch+json",
            (_, media) => media.mime(),
        }
    }

    /// Value of `Accept`. Errors come as JSON where the server cannot do otherwise.
    pub fn accept(&self) -> &'static str {
        self.wants.mime()
    }
}

impl Away {
    pub fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), retry_after: None }
    }
}

/// What a request is about, for the reading of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// Empty: the core group.
    pub group: &'a str,
    /// Such as `resourceclaims`.
    pub resource: &'a str,
    /// Such as `ResourceClaim`: of the answer.
    pub kind: &'a str,
    pub name: &'a str,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    kind: String,
    api_version: String,
    reason: String,
    message: String,
    details: Details,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Details {
    name: String,
    group: String,
    kind: String,
    causes: Vec<Cause>,
    retry_after_seconds: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Cause {
    reason: String,
    field: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Head {
    kind: String,
    api_version: String,
}

impl Answer {
    /// The body of a success with an object of the wanted kind in JSON, or what the answer means otherwise.
    pub fn object(self, of: Subject<'_>) -> Result<Bytes, Refusal> {
        let body = self.success(of)?;
        let head: Head = serde_json::from_slice(&body).map_err(|_| no_answer(200, "no JSON object"))?;
        let group = head.api_version.rsplit_once('/').map_or("", |(group, _)| group);
        if head.kind == of.kind && group == of.group {
            return Ok(body);
        }
        let got = one_line(&format!("an object {} of {}", head.kind, head.api_version), WORDS_MAX);
        Err(no_answer(200, &got))
    }

    /// The body of a success, in whatever form it was asked for.
    pub fn success(self, of: Subject<'_>) -> Result<Bytes, Refusal> {
        if (200..300).contains(&self.status) {
            return Ok(self.body);
        }
        let status: Option<Status> = serde_json::from_slice(&self.body).ok();
        let Some(status) = status.filter(|s| s.kind == "Status" && s.api_version == "v1") else {
            return Err(no_answer(self.status, "no Status of an API server"));
        };
        Err(refusal(self.status, status, of))
    }
}

fn no_answer(status: u16, what: &str) -> Refusal {
    Away::new(format!("the answer {status} to a request for the API server has {what}")).into()
}

fn refusal(status: u16, said: Status, of: Subject<'_>) -> Refusal {
    let words = one_line(&said.message, WORDS_MAX);
    let about_it = said.details.kind == of.resource
        && said.details.group == of.group
        && (said.details.name == of.name || of.name.is_empty());
    let fields = || said.details.causes.iter().map(|cause| cause.field.clone()).collect();
    let ending = || said.details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating");
    match (status, said.reason.as_str()) {
        (404, "NotFound") if about_it && !of.name.is_empty() => Refusal::Missing,
        (409, "Conflict") => Refusal::Conflict,
        (409, "AlreadyExists") => Refusal::Exists,
        // Nothing comes into a namespace that is being deleted: that is about the object, not about our rights.
        (403, _) if !ending() => Refusal::Forbidden(words),
        // A token that is over is followed by a new one.
        (401 | 408 | 429 | 500.., _) => Away {
            why: format!("the API server answers {status}: {words}"),
            retry_after: Some(said.details.retry_after_seconds).filter(|s| *s > 0).map(Duration::from_secs),
        }
        .into(),
        _ => Refusal::Refused { status, words, fields: fields() },
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::VecDeque;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// An API server that answers by a function, and remembers what it was asked.
    pub(crate) struct Scripted<F> {
        answer: F,
        asked: Mutex<VecDeque<Request>>,
    }

    impl<F: Fn(&Request) -> Result<Answer, Away> + Send + Sync> Scripted<F> {
        pub(crate) fn new(answer: F) -> Self {
            Self { answer, asked: Mutex::default() }
        }

        /// What it was asked since this was called last.
        pub(crate) fn asked(&self) -> Vec<Request> {
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
        }
    }

    #[async_trait]
    impl<F: Fn(&Request) -> Result<Answer, Away> + Send + Sync> Exchange for Scripted<F> {
        async fn exchange(&self, request: Request) -> Result<Answer, Away> {
            let answer = (self.answer)(&request);
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).push_back(request);
            answer
        }

        fn resource_api(&self) -> String {
            "resource.k8s.io/v1".to_owned()
        }
    }

    pub(crate) fn json(status: u16, body: &serde_json::Value) -> Answer {
        Answer { status, body: body.to_string().into() }
    }

    /// A Status as an API server gives it.
    pub(crate) fn failure(status: u16, reason: &str, of: Subject<'_>) -> Answer {
        let body = serde_json::json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": format!("{reason}!"),
            "reason": reason, "details": {"name": of.name, "group": of.group, "kind": of.resource}, "code": status,
        });
        json(status, &body)
    }

    const CLAIM: Subject<'_> =
        Subject { group: "resource.k8s.io", resource: "resourceclaims", kind: "ResourceClaim", name: "none" };

    fn meaning(status: u16, body: &str) -> Result<Bytes, Refusal> {
        Answer { status, body: Bytes::copy_from_slice(body.as_bytes()) }.object(CLAIM)
    }

    /// As recorded from an API server 1.36.
    const MISSING: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",
        "message":"resourceclaims.resource.k8s.io \"none\" not found","reason":"NotFound",
        "details":{"name":"none","group":"resource.k8s.io","kind":"resourceclaims"},"code":404}"#;

    #[test]
    fn only_a_real_not_found_of_this_very_object_means_that_it_is_gone() {
        assert_eq!(meaning(404, MISSING), Err(Refusal::Missing));
        let group_not_served = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",
            "message":"the server could not find the requested resource","reason":"NotFound","details":{},"code":404}"#;
        assert!(matches!(meaning(404, group_not_served), Err(Refusal::Refused { status: 404, .. })));
        for other in ["<html>404</html>", "", "404 page not found", "{}", "null", "[]"] {
            assert!(matches!(meaning(404, other), Err(Refusal::Away(_))), "{other}");
        }
        let another = MISSING.replace(r#""name":"none""#, r#""name":"other""#);
        assert!(matches!(meaning(404, &another), Err(Refusal::Refused { .. })));
        assert!(!matches!(meaning(403, MISSING), Err(Refusal::Missing)));
    }

    #[test]
    fn a_success_has_an_object_of_the_wanted_kind() {
        let claim = r#"{"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1beta1","metadata":{}}"#;
        assert!(meaning(200, claim).is_ok());
        for other in ["<html>welcome</html>", "{}", "", r#"{"kind":"Pod","apiVersion":"v1"}"#] {
            assert!(matches!(meaning(200, other), Err(Refusal::Away(_))), "{other}");
        }
    }

    #[test]
    fn each_status_has_its_meaning() {
        let of = |status, reason: &str| failure(status, reason, CLAIM).object(CLAIM).unwrap_err();
        assert_eq!(of(409, "Conflict"), Refusal::Conflict);
        assert_eq!(of(409, "AlreadyExists"), Refusal::Exists);
        assert!(matches!(of(403, "Forbidden"), Refusal::Forbidden(_)));
        assert!(matches!(of(422, "Invalid"), Refusal::Refused { status: 422, .. }));
        for (status, reason) in
            [(401, "Unauthorized"), (429, "TooManyRequests"), (500, "InternalError"), (503, "")]
        {
            assert!(matches!(of(status, reason), Refusal::Away(_)), "{status}");
        }
        let ending = r#"{"kind":"Status","apiVersion":"v1","reason":"Forbidden","message":"being terminated",
            "details":{"causes":[{"reason":"NamespaceTerminating","field":"metadata.namespace"}]},"code":403}"#;
        assert!(matches!(meaning(403, ending), Err(Refusal::Refused { .. })));
    }
}
