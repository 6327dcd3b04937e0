//! Requests whose bodies travel as they are, for those who must not change a byte of them.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};

use super::connection::Live;
use super::{AGENT, Api, ApiError, Ask, Verb, Version, answer, error, version};
use crate::exchange::{self, Answer, Away, Exchange, Request};
use nodedock_model::limit;

/// The way to the API server for claims' statuses, events and the reconcile.
pub struct ApiExchange {
    api: Api,
    /// Place in `Version::ALL` of the version that was spoken last: paths are made without waiting.
    spoken: AtomicUsize,
}

impl ApiExchange {
    pub fn new(api: Api) -> Self {
        Self { api, spoken: AtomicUsize::new(0) }
    }

    /// Learns which version is served. What cannot be asked now stays as it is.
    async fn learn(&self) {
        let Ok(version) = self.api.version().await else { return };
        let place = Version::ALL.iter().position(|known| *known == version);
        self.spoken.store(place.unwrap_or_default(), Relaxed);
    }

    fn version(&self) -> Version {
        Version::ALL.get(self.spoken.load(Relaxed)).copied().unwrap_or(Version::V1)
    }
}

#[async_trait]
impl Exchange for ApiExchange {
    async fn exchange(&self, request: Request) -> Result<Answer, Away> {
        if request.path.starts_with(version::GROUP_PATH) {
            let said = self.version();
            self.learn().await;
            if self.version() != said {
                // The path is of the other version: whoever asks makes it anew.
                return Err(Away::new(
                    "the API server serves another version of resource.k8s.io than it did",
                ));
            }
        }
        let away = |error: ApiError| Away { retry_after: error.retry_after(), why: error.to_string() };
        self.api.exchange(request).await.map_err(away)
    }

    fn resource_api(&self) -> String {
        self.version().api_version()
    }
}

/// The verb as it is counted. A name stands at the end of a path, and lists are of what has none.
fn verb(request: &Request) -> Verb {
    match request.verb {
        exchange::Verb::Get if is_list(&request.path) => Verb::List,
        exchange::Verb::Get => Verb::Get,
        exchange::Verb::Post => Verb::Create,
        exchange::Verb::Put => Verb::Update,
        exchange::Verb::MergePatch => Verb::Patch,
    }
}

fn is_list(path: &str) -> bool {
    let path = path.split('?').next().unwrap_or_default();
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    ["pods", "events", "resourceclaims", "resourceslices", "nodes"].contains(&last)
}

impl Api {
    /// Any answer, whatever its status.
    async fn exchange(&self, request: Request) -> Result<Answer, ApiError> {
        let mut ask = Ask::of(verb(&request), request.path.clone());
        ask.bytes_max = match ask.verb {
            Verb::List => limit::API_PAGE_BYTES_MAX,
            _ => limit::API_OBJECT_BYTES_MAX,
        };
        let used = self.inner.connection.current().await;
        let first = self.exchange_once(&ask, &request, &used).await?;
        if first.status != 401 || !self.inner.connection.is_other_than(&used).await {
            return Ok(first);
        }
        self.inner.counts.retries.fetch_add(1, Relaxed);
        let now = self.inner.connection.current().await;
        self.exchange_once(&ask, &request, &now).await
    }

    async fn exchange_once(&self, ask: &Ask, request: &Request, live: &Live) -> Result<Answer, ApiError> {
        let work = async {
            let sent = live.client.send(http_request(request, live)?).await;
            let response = sent.map_err(|error| ApiError::unavailable(answer::spoken(error)))?;
            let (status, pause) = (response.status(), error::retry_after(response.headers()));
            let body = answer::collect(response.into_body(), ask.bytes_max).await?;
            if let Some(pause) = pause.filter(|_| matches!(status.as_u16(), 429 | 503)) {
                self.inner.rate.pause(pause);
            }
            Ok(Answer { status: status.as_u16(), body })
        };
        self.timed_as(ask, work, |answer| answer.status).await
    }
}

fn http_request(request: &Request, live: &Live) -> Result<http::Request<kube::client::Body>, ApiError> {
    let mut built = http::Request::builder()
        .method(request.verb.method())
        .uri(request.path.as_str())
        .header(USER_AGENT, AGENT)
        .header(ACCEPT, request.accept());
    if let Some(authorization) = &live.authorization {
        built = built.header(AUTHORIZATION, authorization);
    }
    if !request.body.is_empty() {
        built = built.header(CONTENT_TYPE, request.content_type());
    }
    let wrong = |error| ApiError::Invalid {
        words: format!("{:?} is no path of a request: {error}", request.path),
        causes: Vec::new(),
    };
    built.body(kube::client::Body::from(Bytes::from(request.body.clone()))).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::fake;
    use super::*;
    use crate::exchange::Media;

    #[tokio::test]
    async fn bodies_travel_as_they_are_and_every_status_is_an_answer() {
        let (api, asked) = fake::api(|asked| async move {
            match asked.path.as_str() {
                "/apis/resource.k8s.io" => fake::group(&["v1beta2"]),
                _ => fake::refusal(404, "NotFound", "there is none"),
            }
        });
        let exchange = ApiExchange::new(api.clone());
        let path = "/api/v1/namespaces/default/events".to_owned();
        let request = Request {
            sends: Media::Json,
            ..Request::with(exchange::Verb::Post, path, b"{\"a\":  1}".to_vec())
        };
        let answer = exchange.exchange(request).await.unwrap();
        assert_eq!(answer.status, 404);
        assert_eq!(asked.lock().unwrap()[0].body, json!({"a": 1}));
        let counts = api.counts().requests;
        assert_eq!(counts, [(Verb::Create, "events", 404, 1)]);
        // The first path is of a version that is not served, and the next is right.
        let claim = |exchange: &ApiExchange| {
            Request::get(format!("/apis/{}/namespaces/d/resourceclaims/c", exchange.resource_api()))
        };
        exchange.exchange(claim(&exchange)).await.unwrap_err();
        assert_eq!(exchange.resource_api(), "resource.k8s.io/v1beta2");
        assert_eq!(exchange.exchange(claim(&exchange)).await.unwrap().status, 404);
    }

    #[test]
    fn lists_are_told_from_objects_by_their_paths() {
        assert!(is_list("/api/v1/pods?fieldSelector=spec.nodeName%3Dn"));
        assert!(!is_list("/api/v1/namespaces/default/pods/pods-1"));
    }
}
