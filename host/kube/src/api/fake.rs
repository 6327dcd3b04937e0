//! An API server that is a function, for tests: no sockets, so that the clock can be turned.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::connection::Connection;
use super::{Api, Pace};

pub(crate) type Answer = Response<UnsyncBoxBody<Bytes, std::io::Error>>;

/// A request, as it came.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: Method,
    pub(crate) path: String,
    /// Still encoded.
    pub(crate) query: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl Asked {
    pub(crate) fn is_watch(&self) -> bool {
        self.query.contains("watch=true")
    }
}

type Log = Arc<Mutex<Vec<Asked>>>;

/// The API behind which that function answers, and what was asked.
pub(crate) fn api<F>(answer: impl Fn(Asked) -> F + Send + Sync + 'static) -> (Api, Log)
where
    F: Future<Output = Answer> + Send + 'static,
{
    let (answer, log) = (Arc::new(answer), Log::default());
    let asked = log.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (answer, asked) = (answer.clone(), asked.clone());
        let work = async move {
            let (head, body) = request.into_parts();
            let bytes = body.collect().await.unwrap().to_bytes();
            let request = Asked {
                method: head.method,
                path: head.uri.path().to_owned(),
                query: head.uri.query().unwrap_or_default().to_owned(),
                headers: head.headers,
                body: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
            };
            asked.lock().unwrap().push(request.clone());
            Ok::<_, Infallible>(answer(request).await)
        };
        Box::pin(work) as Pin<Box<dyn Future<Output = _> + Send>>
    });
    (Api::over(Connection::fixed(kube::Client::new(service, "default")), Pace::default()), log)
}

pub(crate) fn text(code: u16, content_type: &str, body: &str) -> Answer {
    let body = Full::new(Bytes::copy_from_slice(body.as_bytes()));
    let body = body.map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(code).header("content-type", content_type).body(body).unwrap()
}

pub(crate) fn answer(code: u16, body: &Value) -> Answer {
    text(code, "application/json", &body.to_string())
}

/// A refusal as an API server words it, of an object.
pub(crate) fn refusal(code: u16, reason: &str, message: &str) -> Answer {
    let details = json!({"name": "one", "kind": "things"});
    answer(
        code,
        &json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, "details": details}),
    )
}

pub(crate) fn list(resource_version: &str, items: &[Value]) -> Answer {
    answer(200, &json!({"kind": "List", "metadata": {"resourceVersion": resource_version}, "items": items}))
}

/// The answer to discovery.
pub(crate) fn group(versions: &[&str]) -> Answer {
    let versions: Vec<_> = versions.iter().map(|version| json!({"version": version})).collect();
    answer(200, &json!({"kind": "APIGroup", "versions": versions}))
}

/// An open answer: each sending is a part of it; an error breaks it off.
pub(crate) fn open() -> (mpsc::Sender<std::io::Result<Bytes>>, Answer) {
    let (sender, receiver) = mpsc::channel(64);
    let frames = ReceiverStream::new(receiver).map(|part: std::io::Result<Bytes>| part.map(Frame::data));
    let body = StreamBody::new(frames).boxed_unsync();
    (sender, Response::builder().status(200).header("content-type", "application/json").body(body).unwrap())
}

/// A line of a watch.
pub(crate) fn event(kind: &str, object: &Value) -> std::io::Result<Bytes> {
    Ok(Bytes::from(json!({"type": kind, "object": object}).to_string() + "\n"))
}

/// An object with what every one has.
pub(crate) fn object(name: &str, resource_version: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "resourceVersion": resource_version}})
}
