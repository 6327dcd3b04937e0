//! Requests in-process, and storages that fail or remember.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::HeaderMap;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};

use crate::{Body, Change, Loaded, Memory, Options, Server, Storage, StorageError};

pub(super) const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
pub(super) const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
pub(super) const JSON: &str = "application/json";

#[derive(Debug)]
pub(super) struct ApiResponse {
    pub(super) code: u16,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
    pub(super) body: Value,
}

impl ApiResponse {
    pub(super) fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }

    pub(super) fn version(&self) -> String {
        self.body["metadata"]["resourceVersion"]
            .as_str()
            .unwrap()
            .to_owned()
    }
}

pub(super) async fn server() -> Server {
    Server::open(Options::default(), Arc::new(Memory), Loaded::default())
        .await
        .unwrap()
}

pub(super) async fn ask(
    server: &Server,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Bytes,
) -> ApiResponse {
    let mut request = http::Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (head, body) = server
        .handle(request.body(Full::new(body)).unwrap())
        .await
        .into_parts();
    let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
    let body = serde_json::from_str(&text).unwrap_or(Value::Null);
    ApiResponse {
        code: head.status.as_u16(),
        headers: head.headers,
        text,
        body,
    }
}

pub(super) async fn send_as(
    server: &Server,
    method: &str,
    path: &str,
    kind: &str,
    body: &Value,
) -> ApiResponse {
    let text = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    ask(
        server,
        method,
        path,
        &[("content-type", kind), ("user-agent", "test/1.0")],
        text.into(),
    )
    .await
}

pub(super) async fn send(server: &Server, method: &str, path: &str, body: &Value) -> ApiResponse {
    send_as(server, method, path, JSON, body).await
}

pub(super) async fn get(server: &Server, path: &str) -> ApiResponse {
    send(server, "GET", path, &Value::Null).await
}

pub(super) async fn get_as(server: &Server, path: &str, accept: &str) -> ApiResponse {
    ask(server, "GET", path, &[("accept", accept)], Bytes::new()).await
}

pub(super) fn names(list: &Value) -> Vec<&str> {
    list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["metadata"]["name"].as_str().unwrap())
        .collect()
}

/// The events of a watch.
pub(super) struct Lines {
    body: Body,
}

impl Lines {
    pub(super) async fn open(server: &Server, path: &str) -> Self {
        let request = http::Request::get(path)
            .body(Full::new(Bytes::new()))
            .unwrap();
        Self {
            body: server.handle(request).await.into_body(),
        }
    }

    pub(super) async fn next(&mut self) -> Option<Value> {
        let line = self.body.frame().await?.unwrap().into_data().unwrap();
        Some(serde_json::from_slice(&line).unwrap())
    }

    /// The type and the name of the next event.
    pub(super) async fn next_name(&mut self) -> (String, String) {
        let event = self.next().await.expect("the watch goes on");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (
            text(&event["type"]),
            text(&event["object"]["metadata"]["name"]),
        )
    }
}

pub(super) fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": { "name": name },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": { "deviceClassName": "gpu.example.com" } }] } },
    })
}

pub(super) fn slice(name: &str, driver: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": name },
        "spec": {
            "driver": driver, "nodeName": "node-1",
            "pool": { "name": "p", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "d-0" }],
        },
    })
}

/// Remembers what it stored, and stores nothing while it fails.
#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) fails: AtomicBool,
    /// Name of an object that it cannot store, and with it no other of the same commit.
    pub(super) refused: Mutex<Option<&'static str>>,
    pub(super) changes: Mutex<Vec<Change>>,
    /// Number of changes of each commit.
    pub(super) commits: Mutex<Vec<usize>>,
    /// Held by a test, a commit waits.
    pub(super) gate: tokio::sync::Mutex<()>,
    /// The next commit waits for a test twice, and blocks its thread, as one that syncs a file.
    pub(super) blocks: Mutex<Option<Arc<std::sync::Barrier>>>,
}

impl Disk {
    /// Returns the objects that a server which is opened after this one loads.
    pub(super) fn load(&self) -> Loaded {
        let mut objects = std::collections::BTreeMap::new();
        let mut revision = 0;
        for change in self.changes.lock().unwrap().iter() {
            revision = change.revision;
            match &change.object {
                Some(object) => drop(objects.insert(change.key.clone(), object.as_ref().clone())),
                None => drop(objects.remove(&change.key)),
            }
        }
        Loaded {
            objects: objects.into_values().collect(),
            revision,
        }
    }
}

impl Storage for Disk {
    fn commit(&self, changes: Vec<Change>) -> BoxFuture<'_, Result<(), StorageError>> {
        Box::pin(async move {
            let blocks = self.blocks.lock().unwrap().take();
            if let Some(barrier) = blocks {
                barrier.wait();
                barrier.wait();
            }
            let _open = self.gate.lock().await;
            let refused = *self.refused.lock().unwrap();
            let mut names = changes.iter().map(|change| change.key.name.as_str());
            if self.fails.load(Ordering::Relaxed) || names.any(|name| Some(name) == refused) {
                return Err(StorageError {
                    changes: changes.len(),
                    is_reported: true,
                    source: "the disk is full".into(),
                });
            }
            self.commits.lock().unwrap().push(changes.len());
            self.changes.lock().unwrap().extend(changes);
            Ok(())
        })
    }
}
