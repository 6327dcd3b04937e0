//! Requests to an API server, as JSON.

use http::{Method, Request};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::PATIENCE;

pub(crate) const JSON: &str = "application/json";
pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

/// A user of an API server.
pub(crate) struct Api(Client);

/// The server's response to a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiResponse {
    pub(crate) code: u16,
    pub(crate) body: Value,
}

impl ApiResponse {
    /// The body of a success.
    #[track_caller]
    pub(crate) fn done(self) -> Value {
        assert!(self.code < 300, "{} {:#}", self.code, self.body);
        self.body
    }

    /// The message of a failure with this code.
    #[track_caller]
    pub(crate) fn refused(self, code: u16) -> String {
        assert_eq!(self.code, code, "{:#}", self.body);
        self.body["message"].as_str().unwrap_or_default().to_owned()
    }
}

impl Api {
    /// The user of a kubeconfig.
    pub(crate) async fn of(kubeconfig: &str) -> Self {
        let kubeconfig = Kubeconfig::from_yaml(kubeconfig).expect("a kubeconfig of the tests");
        let config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        Self(Client::try_from(config.expect("it has one context")).expect("it needs no file"))
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: Option<&Value>,
    ) -> ApiResponse {
        let body = body.map(Value::to_string).unwrap_or_default();
        self.send_text(method, path, kind, body).await
    }

    /// The same with a body as it is written in a file, with spaces: a server keeps those in a claim's parameters.
    pub(crate) async fn post_spaced(&self, path: &str, object: &Value) -> ApiResponse {
        self.send_text(Method::POST, path, JSON, format!("{object:#}"))
            .await
    }

    async fn send_text(&self, method: Method, path: &str, kind: &str, body: String) -> ApiResponse {
        let request = Request::builder()
            .method(&method)
            .uri(path)
            .header("content-type", kind);
        let request = request
            .body(Body::from(body.into_bytes()))
            .expect("a path of the tests");
        let answered = timeout(PATIENCE, async {
            let response = self
                .0
                .send(request)
                .await
                .unwrap_or_else(|error| panic!("{method} {path}: {error}"));
            let code = response.status().as_u16();
            let body = response
                .into_body()
                .collect()
                .await
                .expect("a whole answer")
                .to_bytes();
            ApiResponse {
                code,
                body: serde_json::from_slice(&body).unwrap_or(Value::Null),
            }
        });
        answered
            .await
            .unwrap_or_else(|_| panic!("{method} {path} is not answered"))
    }

    pub(crate) async fn get(&self, path: &str) -> ApiResponse {
        self.send(Method::GET, path, JSON, None).await
    }

    pub(crate) async fn post(&self, path: &str, object: &Value) -> ApiResponse {
        self.send(Method::POST, path, JSON, Some(object)).await
    }

    pub(crate) async fn put(&self, path: &str, object: &Value) -> ApiResponse {
        self.send(Method::PUT, path, JSON, Some(object)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> ApiResponse {
        self.send(Method::DELETE, path, JSON, None).await
    }

    /// Deletes a pod as a kubelet does that has ended it.
    pub(crate) async fn delete_at_once(&self, path: &str) -> ApiResponse {
        self.send(
            Method::DELETE,
            path,
            JSON,
            Some(&json!({"gracePeriodSeconds": 0})),
        )
        .await
    }

    /// Creates an object, or leaves the one that is there.
    pub(crate) async fn ensure(&self, path: &str, object: &Value) {
        let answer = self.post(path, object).await;
        assert!(
            answer.code == 201 || answer.code == 409,
            "{path}: {answer:?}"
        );
    }

    /// The first events of a watch from a resource version.
    pub(crate) async fn watch(&self, path: &str, version: &str, count: usize) -> Vec<Value> {
        let mut body = self.open_watch(path, version).await;
        let mut text = Vec::new();
        let read = timeout(PATIENCE, async {
            while text.iter().filter(|byte| **byte == b'\n').count() < count {
                let Some(frame) = body.frame().await else {
                    break;
                };
                text.extend(
                    frame
                        .expect("a watch goes on")
                        .into_data()
                        .unwrap_or_default(),
                );
            }
        });
        read.await
            .unwrap_or_else(|_| panic!("{path}: fewer than {count} events"));
        let lines = text
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .take(count);
        lines
            .map(|line| serde_json::from_slice(line).expect("an event is JSON"))
            .collect()
    }

    async fn open_watch(&self, path: &str, version: &str) -> Body {
        let mark = if path.contains('?') { '&' } else { '?' };
        let uri = format!("{path}{mark}watch=1&resourceVersion={version}&timeoutSeconds=300");
        let request = Request::get(uri)
            .body(Body::empty())
            .expect("a path of the tests");
        self.0
            .send(request)
            .await
            .unwrap_or_else(|error| panic!("watch {path}: {error}"))
            .into_body()
    }

    /// Returns what `look` finds in a list, which is read again at each change. An error of it is the state that was seen.
    pub(crate) async fn until<T>(
        &self,
        what: &str,
        path: &str,
        look: impl Fn(&[Value]) -> Result<T, String>,
    ) -> T {
        let mut last = "nothing".to_owned();
        let found = timeout(PATIENCE, async {
            loop {
                let list = self.get(path).await.done();
                let items = list["items"]
                    .as_array()
                    .map(Vec::as_slice)
                    .unwrap_or_default();
                match look(items) {
                    Ok(found) => return found,
                    Err(state) => last = state,
                }
                let version = list["metadata"]["resourceVersion"]
                    .as_str()
                    .expect("a list has a version");
                // Any event, including the end of the watch, is a reason to read again.
                let _ = self.open_watch(path, version).await.frame().await;
            }
        });
        let found = found.await;
        found.unwrap_or_else(|_| panic!("waited in vain until {what}; last seen: {last}"))
    }
}
