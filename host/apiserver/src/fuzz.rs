//! Requests of a client: what the server accepts it has stored, serves in each form, and has again after a restart; typed clients can
//! read it; and the devices that the allocator chooses for a claim are a status that the server takes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request, Uri};
use http_body_util::{BodyExt, Full};
use k8s_openapi::api::core::v1::{Event, Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use nodedock_allocator::allocate::{Bounds, InUse, Inventory, NodeRef, allocate};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::storage::{Change, Loaded, Memory, ObjectKey, Storage, StorageError};
use crate::{Options, Resource, Server, resource, resources};

/// Requests that are made of one input.
const REQUESTS_MAX: usize = 16;
const SEPARATOR: &str = "\n---\n";
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

/// Requests, between lines of `---`: a line with the method, the address, and if need be the content type; then the body. Returns whether
/// all of them were answered with success.
///
/// # Panics
///
/// If the server breaks a promise.
pub fn api(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    let Some(requests) = text
        .split(SEPARATOR)
        .take(REQUESTS_MAX)
        .map(request)
        .collect()
    else {
        return false;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.expect("a runtime starts").block_on(serve(requests))
}

fn request(text: &str) -> Option<Request<Full<Bytes>>> {
    let (head, body) = text.split_once('\n').unwrap_or((text, ""));
    let mut words = head.split_ascii_whitespace();
    let method = Method::from_bytes(words.next()?.as_bytes()).ok()?;
    let uri: Uri = words.next()?.parse().ok()?;
    let content_type = words.next().unwrap_or("application/json");
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header(CONTENT_TYPE, content_type);
    request
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
        .ok()
}

/// Objects as they were last stored.
#[derive(Default)]
struct Stored(Mutex<BTreeMap<ObjectKey, Arc<Value>>>);

impl Storage for Stored {
    fn commit(&self, changes: Vec<Change>) -> BoxFuture<'_, Result<(), StorageError>> {
        let mut objects = self.0.lock().expect("no holder panics");
        for Change { key, object, .. } in changes {
            match object {
                Some(object) => objects.insert(key, object),
                None => objects.remove(&key),
            };
        }
        std::future::ready(Ok(())).boxed()
    }
}

async fn serve(requests: Vec<Request<Full<Bytes>>>) -> bool {
    let storage = Arc::new(Stored::default());
    let server = Server::open(
        Options::default(),
        Arc::<Stored>::clone(&storage),
        Loaded::default(),
    )
    .await;
    let server = server.expect("a server without objects opens");
    let mut all_succeeded = true;
    for request in requests {
        all_succeeded &= answered(&server, request).await;
    }
    check_objects(&server, &storage).await;
    allocate_all(&server).await;
    check_objects(&server, &storage).await;
    all_succeeded
}

/// A refusal is a status with the code of the answer and a message.
async fn answered(server: &Server, request: Request<Full<Bytes>>) -> bool {
    let is_watch = server
        .route(request.method(), request.uri())
        .is_some_and(|route| route.verb == "watch");
    let response = server.handle(request).await;
    let code = response.status();
    if code.is_success() {
        // The body of a watch has no end.
        if !is_watch {
            let _: Bytes = body_of(response.into_body()).await;
        }
        return true;
    }
    let status: Value =
        serde_json::from_slice(&body_of(response.into_body()).await).expect("a status is JSON");
    let message = status["message"].as_str().unwrap_or_default();
    let is_status =
        status["kind"] == "Status" && status["code"] == code.as_u16() && !message.is_empty();
    assert!(is_status, "{code} with {status}");
    false
}

async fn body_of(body: crate::Body) -> Bytes {
    body.collect()
        .await
        .expect("a body of an answer has no errors")
        .to_bytes()
}

async fn check_objects(server: &Server, storage: &Stored) {
    let snapshot = server.snapshot();
    let served: BTreeMap<ObjectKey, Arc<Value>> = snapshot
        .all()
        .map(|(key, object)| (key.clone(), Arc::clone(object)))
        .collect();
    assert_eq!(
        *storage.0.lock().expect("no holder panics"),
        served,
        "what is served is what is stored"
    );
    served
        .iter()
        .for_each(|(key, object)| check_type(key, object));
    for resource in resources() {
        let count = snapshot.objects(resource).count();
        assert_eq!(
            listed(server, resource, "application/json").await["items"]
                .as_array()
                .map(Vec::len),
            Some(count)
        );
        assert_eq!(
            listed(server, resource, TABLE).await["rows"]
                .as_array()
                .map(Vec::len),
            Some(count)
        );
    }
    let objects = served
        .values()
        .map(|object| object.as_ref().clone())
        .collect();
    let loaded = Loaded {
        objects,
        revision: snapshot.revision(),
    };
    let again = Server::open(Options::default(), Arc::new(Memory), loaded).await;
    let again = again
        .expect("a server opens with what it stored")
        .snapshot();
    assert!(
        served
            .iter()
            .all(|(key, object)| again.at(key) == Some(object)),
        "an object is another after a restart"
    );
}

async fn listed(server: &Server, resource: &Resource, accept: &str) -> Value {
    let group = if resource.group.is_empty() {
        "/api/v1".to_owned()
    } else {
        format!("/apis/{}/v1", resource.group)
    };
    let request = Request::get(format!("{group}/{}", resource.plural)).header(ACCEPT, accept);
    let response = server
        .handle(request.body(Full::<Bytes>::default()).expect("a request"))
        .await;
    if response.status() == 404 {
        // Not served without an option.
        return json!({ "items": [], "rows": [] });
    }
    assert_eq!(response.status(), 200, "a list of {}", resource.plural);
    serde_json::from_slice(&body_of(response.into_body()).await).expect("a list is JSON")
}

/// One object that a typed client cannot read hides all others from it.
fn check_type(key: &ObjectKey, object: &Value) {
    fn read<K: DeserializeOwned>(object: &Value) -> Option<serde_json::Error> {
        serde_json::from_str::<K>(&object.to_string()).err()
    }
    let error = match key.resource {
        "events" => read::<Event>(object),
        "namespaces" => read::<Namespace>(object),
        "nodes" => read::<Node>(object),
        "pods" => read::<Pod>(object),
        "deviceclasses" => read::<DeviceClass>(object),
        "resourceclaims" => read::<ResourceClaim>(object),
        "resourceclaimtemplates" => read::<ResourceClaimTemplate>(object),
        "resourceslices" => read::<ResourceSlice>(object),
        other => panic!("{other} is a resource that no client is known of"),
    };
    assert!(error.is_none(), "{key:?}: {error:?} in {object}");
}

fn typed<K: DeserializeOwned>(server: &Server, plural: &str) -> Vec<Arc<K>> {
    let snapshot = server.snapshot();
    let resource = resource(plural).expect("a resource of the server");
    let objects = snapshot
        .objects(resource)
        .map(|(_, object)| object.as_ref().clone());
    objects
        .map(|object| serde_json::from_value(object).expect("it was read before"))
        .collect()
}

/// Allocates the claims as the daemon does: one after the other, each with the devices that the claims before it left.
async fn allocate_all(server: &Server) {
    let node = NodeRef {
        name: "node".to_owned(),
        labels: BTreeMap::new(),
    };
    let inventory = Inventory::new(
        typed::<ResourceSlice>(server, "resourceslices").into_iter(),
        &node,
    );
    let classes = typed::<DeviceClass>(server, "deviceclasses");
    let class = |name: &str| {
        classes
            .iter()
            .find(|class| class.metadata.name.as_deref() == Some(name))
            .cloned()
    };
    let claims = typed::<ResourceClaim>(server, "resourceclaims");
    let allocation = |claim: &ResourceClaim| {
        claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.clone())
    };
    let mut in_use = InUse::default();
    for claim in &claims {
        if let Some(allocation) = allocation(claim) {
            in_use.add(
                claim.metadata.uid.as_deref().unwrap_or_default(),
                &allocation,
            );
        }
    }
    let is_waiting = |claim: &&Arc<ResourceClaim>| {
        allocation(claim).is_none() && claim.metadata.deletion_timestamp.is_none()
    };
    for claim in claims.iter().filter(is_waiting) {
        let allocate = || {
            let mut count = 0_u64;
            let mut share_ids = || {
                count += 1;
                format!("00000000-0000-4000-8000-{count:012}")
            };
            let bounds = Bounds {
                steps: 10_000,
                selector_steps: 100_000,
                excluded: 16,
            };
            let now = jiff::Timestamp::UNIX_EPOCH;
            allocate(
                &inventory,
                &in_use,
                &class,
                claim,
                &bounds,
                now,
                &mut share_ids,
            )
        };
        let result = allocate();
        assert_eq!(allocate(), result, "the same claim gets the same devices");
        if let Ok(allocation) = result {
            store(server, claim, &allocation).await;
            in_use.add(
                claim.metadata.uid.as_deref().unwrap_or_default(),
                &allocation,
            );
        }
    }
}

async fn store(server: &Server, claim: &ResourceClaim, allocation: &AllocationResult) {
    let (namespace, name) = (
        claim.metadata.namespace.as_deref(),
        claim.metadata.name.as_deref(),
    );
    let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
    let path =
        format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status");
    let patch = json!({ "status": { "allocation": allocation } }).to_string();
    let request = Request::patch(path).header(CONTENT_TYPE, "application/merge-patch+json");
    let response = server
        .handle(
            request
                .body(Full::new(Bytes::from(patch)))
                .expect("a request"),
        )
        .await;
    let code = response.status();
    let answer = body_of(response.into_body()).await;
    assert_eq!(code, 200, "{}", String::from_utf8_lossy(&answer));
}
