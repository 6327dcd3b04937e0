//! Tests of requests, responses, faults and watches that the recordings do not cover.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{Asking, get, send, send_as, try_ask, watch};
use crate::api_server::{Allocated, ApiServer, Fault, When};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";

fn slice(name: &str, driver: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": name },
        "spec": {
            "driver": driver, "nodeName": "node-1",
            "pool": { "name": "p", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "d-0", "attributes": { "index": { "int": 0 } }, "capacity": { "memory": { "value": "1Gi" } } }],
        },
    })
}

fn claim(device: &str) -> Allocated {
    Allocated::new("default", "c")
        .node("node-1")
        .device("gpu", "gpu.example.com", "p", device)
        .reserved_for("pod", "u-1")
}

fn names(list: &Value) -> Vec<&str> {
    list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["metadata"]["name"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn list_pages_share_one_version() {
    let server = ApiServer::start().await;
    for index in 0..5 {
        server.put(slice(&format!("s-{index}"), "a"));
    }
    let first = get(&server, &format!("{SLICES}?limit=2")).await.body;
    assert_eq!(
        (names(&first), &first["metadata"]["remainingItemCount"]),
        (vec!["s-0", "s-1"], &json!(3))
    );
    let token = first["metadata"]["continue"].as_str().unwrap();
    let second = get(&server, &format!("{SLICES}?limit=9&continue={token}"))
        .await
        .body;
    assert_eq!(names(&second), ["s-2", "s-3", "s-4"]);
    assert_eq!(
        second["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
    assert!(second["metadata"]["continue"].is_null());
    server.put(slice("s-5", "a"));
    server.compact();
    let late = get(&server, &format!("{SLICES}?limit=9&continue={token}")).await;
    assert_eq!((late.code, &late.body["reason"]), (410, &json!("Expired")));
}

#[tokio::test]
async fn selectors_choose() {
    let server = ApiServer::start().await;
    server.put(slice("a", "a.example.com"));
    server.put(slice("b", "b.example.com"));
    for (query, expected) in [
        ("fieldSelector=spec.driver%3Da.example.com", vec!["a"]),
        ("fieldSelector=spec.driver!%3Da.example.com", vec!["b"]),
        (
            "fieldSelector=metadata.name=b,spec.nodeName=node-1",
            vec!["b"],
        ),
        ("fieldSelector=spec.nodeName=node-2", vec![]),
    ] {
        assert_eq!(
            names(&get(&server, &format!("{SLICES}?{query}")).await.body),
            expected,
            "{query}"
        );
    }
    for query in [
        "fieldSelector=spec.pool.name=p",
        "fieldSelector=a",
        "labelSelector=a%20b",
    ] {
        assert_eq!(
            get(&server, &format!("{SLICES}?{query}")).await.code,
            400,
            "{query}"
        );
    }
}

#[tokio::test]
async fn conflicting_creates_and_updates_are_refused() {
    let server = ApiServer::start().await;
    let made = send(&server, "POST", SLICES, &slice("a", "a.example.com")).await;
    assert_eq!(made.code, 201);
    let again = send(&server, "POST", SLICES, &slice("a", "a.example.com")).await;
    assert_eq!(
        (again.code, &again.body["reason"]),
        (409, &json!("AlreadyExists"))
    );
    let mut other = made.body.clone();
    other["metadata"]["uid"] = "other".into();
    let other = send(&server, "PUT", &format!("{SLICES}/a"), &other).await;
    assert_eq!(
        (other.code, &other.body["reason"]),
        (409, &json!("Conflict"))
    );
    let nothing_new = send(&server, "PUT", &format!("{SLICES}/a"), &made.body).await;
    assert_eq!(
        nothing_new.body["metadata"]["resourceVersion"],
        made.body["metadata"]["resourceVersion"]
    );
    let gone = send(&server, "PUT", &format!("{SLICES}/b"), &slice("b", "a")).await;
    assert_eq!(gone.code, 404);
    let misnamed = send(&server, "PUT", &format!("{SLICES}/a"), &slice("b", "a")).await;
    assert_eq!(misnamed.code, 400);
    let proto = send_as(
        &server,
        "POST",
        SLICES,
        "application/vnd.kubernetes.protobuf",
        &json!({}),
    )
    .await;
    assert_eq!(proto.code, 415);
    assert_eq!(
        send(&server, "POST", "/apis/resource.k8s.io/v1/pods", &json!({}))
            .await
            .code,
        404
    );
    assert_eq!(
        send(&server, "POST", &format!("{SLICES}/a"), &json!({}))
            .await
            .code,
        405
    );
    let mut tainted = slice("t", "a");
    let device = json!({ "taints": [{ "key": "k", "effect": "NoSchedule" }] });
    let named = |index| {
        let mut device = device.clone();
        device["name"] = format!("d-{index}").into();
        device
    };
    tainted["spec"]["devices"] = (0..65).map(named).collect();
    let refused = send(&server, "POST", SLICES, &tainted).await;
    assert!(
        refused.body["message"]
            .as_str()
            .unwrap()
            .ends_with("Too many: 65: must have at most 64 items")
    );
}

#[tokio::test]
async fn deletes_mind_preconditions_and_finalizers() {
    let server = ApiServer::start().await;
    server.put(slice("a", "a"));
    let path = format!("{SLICES}/a");
    let options = |key: &str, value: &str| json!({ "kind": "DeleteOptions", "apiVersion": "v1", "preconditions": { key: value } });
    assert_eq!(
        send(&server, "DELETE", &path, &options("uid", "other"))
            .await
            .code,
        409
    );
    assert_eq!(
        send(&server, "DELETE", &path, &options("resourceVersion", "1"))
            .await
            .code,
        409
    );
    let uid = server.get("resourceslices", "", "a").unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        send(&server, "DELETE", &path, &options("uid", &uid))
            .await
            .code,
        200
    );
    assert_eq!(send(&server, "DELETE", &path, &Value::Null).await.code, 404);

    let claim = server.allocate_claim(claim("d-0"));
    let deleting = send(&server, "DELETE", &format!("{CLAIMS}/c"), &Value::Null)
        .await
        .body;
    assert_eq!(
        (
            &deleting["metadata"]["uid"],
            deleting["metadata"]["deletionTimestamp"].is_string()
        ),
        (&json!(claim), true)
    );
    let patch = json!({ "metadata": { "finalizers": null } });
    send_as(
        &server,
        "PATCH",
        &format!("{CLAIMS}/c"),
        "application/merge-patch+json",
        &patch,
    )
    .await;
    assert_eq!(server.get("resourceclaims", "default", "c"), None);
}

#[tokio::test]
async fn each_subresource_changes_its_part_alone() {
    let server = ApiServer::start().await;
    server.allocate_claim(claim("d-0"));
    let mut claim = get(&server, &format!("{CLAIMS}/c")).await.body;
    claim["metadata"]["labels"] = json!({ "a": "b" });
    claim["status"]["devices"] =
        json!([{ "driver": "gpu.example.com", "pool": "p", "device": "d-0" }]);
    let whole = send(&server, "PUT", &format!("{CLAIMS}/c"), &claim)
        .await
        .body;
    assert_eq!(
        (
            &whole["metadata"]["labels"]["a"],
            &whole["status"]["devices"]
        ),
        (&json!("b"), &Value::Null)
    );
    claim["metadata"] = whole["metadata"].clone();
    claim["metadata"]["labels"] = json!({});
    let status = send(&server, "PUT", &format!("{CLAIMS}/c/status"), &claim)
        .await
        .body;
    assert_eq!(
        (
            &status["metadata"]["labels"]["a"],
            &status["status"]["devices"][0]["device"]
        ),
        (&json!("b"), &json!("d-0"))
    );
    claim["metadata"] = status["metadata"].clone();
    claim["status"]["allocation"]["devices"]["results"][0]["device"] = "d-1".into();
    let moved = send(&server, "PUT", &format!("{CLAIMS}/c/status"), &claim).await;
    assert_eq!(moved.code, 422);
    assert!(
        moved.body["message"]
            .as_str()
            .unwrap()
            .contains("status.allocation: Invalid value")
    );
}

#[tokio::test]
async fn invalid_events_are_refused() {
    let server = ApiServer::start().await;
    let path = "/apis/events.k8s.io/v1/namespaces/default/events";
    let mut event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "name": "e" }, "note": "hello", "type": "Warning",
        "regarding": { "kind": "Pod", "namespace": "default", "name": "p" }, "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "nodedock", "reportingInstance": "node-1", "action": "Prepare", "reason": "Refused",
    });
    event.as_object_mut().unwrap().remove("action");
    // Of the old kind of event, which has no such field, it would be refused too.
    event["regarding"]["namespace"] = "elsewhere".into();
    let refused = send(&server, "POST", path, &event).await;
    let causes = refused.body["details"]["causes"].as_array().unwrap();
    let fields: Vec<&str> = causes
        .iter()
        .map(|cause| cause["field"].as_str().unwrap())
        .collect();
    assert_eq!((refused.code, fields), (422, vec!["action"]));
    server.put(json!({ "kind": "Namespace", "metadata": { "name": "default", "deletionTimestamp": "2026-01-01T00:00:00Z" } }));
    let refused = send(&server, "POST", path, &event).await;
    assert_eq!(
        (
            refused.code,
            &refused.body["details"]["causes"][0]["reason"]
        ),
        (403, &json!("NamespaceTerminating"))
    );
}

#[tokio::test]
async fn forbidden_requests_are_refused_and_recorded() {
    let server = ApiServer::start().await;
    server.deny("get", "resourceclaims");
    let refused = get(&server, &format!("{CLAIMS}/c")).await;
    assert_eq!(refused.code, 403);
    let message = "resourceclaims.resource.k8s.io \"c\" is forbidden: User \"system:serviceaccount:nodedock:nodedock\" cannot get \
                   resource \"resourceclaims\" in API group \"resource.k8s.io\" in the namespace \"default\"";
    assert_eq!(refused.body["message"], message);
    server.allow_all();
    assert_eq!(get(&server, &format!("{CLAIMS}/c")).await.code, 404);
    server.enforce(&[
        json!({ "apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"] }),
    ]);
    assert_eq!(get(&server, &format!("{CLAIMS}/c")).await.code, 404);
    assert_eq!(get(&server, &format!("{CLAIMS}/c/status")).await.code, 403);
    assert_eq!(get(&server, CLAIMS).await.code, 403);
    assert_eq!(get(&server, "/version").await.code, 200);
    let seen: Vec<(String, String, u16)> = server
        .requests()
        .iter()
        .map(|seen| (seen.verb.clone(), seen.full_resource(), seen.code))
        .collect();
    let claims = "resourceclaims".to_owned();
    assert_eq!(seen[0], ("get".to_owned(), claims.clone(), 403));
    assert_eq!(seen[3], ("get".to_owned(), format!("{claims}/status"), 403));
    assert_eq!(seen[4], ("list".to_owned(), claims, 403));
    assert_eq!(seen[5], ("get".to_owned(), String::new(), 200));
}

#[tokio::test]
async fn metadata_only_requests_get_only_metadata() {
    let server = ApiServer::start().await;
    server.add_node("node-1");
    let accept = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    let asking = Asking {
        accept,
        ..Asking::get("/api/v1/nodes/node-1")
    };
    let body = try_ask(&server, &asking).await.unwrap().body;
    assert_eq!(
        (&body["kind"], &body["spec"]),
        (&json!("PartialObjectMetadata"), &Value::Null)
    );
    assert_eq!(body["metadata"]["name"], "node-1");
}

#[tokio::test]
async fn faults_hit_matching_requests_only() {
    let server = ApiServer::start().await;
    server.fail_times(
        2,
        Fault::TooMany { retry_after: 7 },
        When::any().verb("list").resource("resourceslices"),
    );
    for _ in 0..2 {
        let answer = get(&server, SLICES).await;
        assert_eq!(answer.code, 429);
        assert_eq!(answer.headers["retry-after"], "7");
    }
    assert_eq!(get(&server, SLICES).await.code, 200);
    let id = server.fail(Fault::Html(200), When::any());
    let page = get(&server, "/version").await;
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    assert!(page.text.starts_with("<!DOCTYPE html>"));
    server.lift(id);
    assert_eq!(get(&server, "/version").await.body["minor"], "36");
    server.fail(Fault::Status(503), When::any().version("v1"));
    assert_eq!(
        get(&server, SLICES).await.body["reason"],
        "ServiceUnavailable"
    );
    server.lift_all();
    assert_eq!(get(&server, SLICES).await.code, 200);
}

#[tokio::test]
async fn stopped_server_restarts_with_its_objects() {
    let server = ApiServer::start().await;
    server.put(json!({ "kind": "ResourceSlice", "metadata": { "name": "a" } }));
    let open = async || TcpStream::connect(("127.0.0.1", server.port)).await;
    let mut stream = open().await.unwrap();
    let request = format!("GET {SLICES}?watch=true HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    assert_ne!(stream.read(&mut [0; 4096]).await.unwrap(), 0);
    server.stop().await;
    // The open watch breaks, and there is no new connection.
    let _ = stream.read_to_end(&mut Vec::new()).await;
    assert!(open().await.is_err());
    server.start_again().await;
    assert!(open().await.is_ok());
    assert_eq!(
        get(&server, SLICES).await.body["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
}

fn put(server: &ApiServer, name: &str, driver: &str) -> Value {
    server.put(json!({
        "kind": "ResourceSlice", "metadata": { "name": name }, "spec": { "driver": driver, "nodeName": "node-1" },
    }))
}

fn event(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

#[tokio::test]
async fn watch_resumes_from_list_version() {
    let server = ApiServer::start().await;
    put(&server, "a", "x");
    let list = get(&server, SLICES).await.body;
    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    put(&server, "b", "x");
    put(&server, "a", "y");
    let mut watch = watch(
        &server,
        &format!("{SLICES}?watch=1&resourceVersion={version}"),
    )
    .await;
    assert_eq!(watch.next_name().await, event("ADDED", "b"));
    assert_eq!(watch.next_name().await, event("MODIFIED", "a"));
    server
        .wait_until("the watch", |state| state.watches("resourceslices") == 1)
        .await;
    send(
        &server,
        "DELETE",
        &format!("{SLICES}?fieldSelector=spec.driver=x"),
        &Value::Null,
    )
    .await;
    assert_eq!(watch.next_name().await, event("DELETED", "b"));
    server.close_watches();
    assert_eq!(watch.next().await, None);
    server
        .wait_until("its end", |state| state.watches("resourceslices") == 0)
        .await;
}

#[tokio::test]
async fn selector_watch_follows_matching_objects() {
    let server = ApiServer::start().await;
    let mut watch = watch(
        &server,
        &format!("{SLICES}?watch=true&fieldSelector=spec.driver=x"),
    )
    .await;
    put(&server, "a", "y");
    let came = put(&server, "a", "x");
    put(&server, "a", "x");
    put(&server, "a", "y");
    put(&server, "a", "y");
    put(&server, "b", "x");
    assert_eq!(
        watch.next().await.unwrap()["object"]["metadata"]["resourceVersion"],
        came["metadata"]["resourceVersion"]
    );
    assert_eq!(watch.next_name().await, event("MODIFIED", "a"));
    assert_eq!(watch.next_name().await, event("DELETED", "a"));
    assert_eq!(watch.next_name().await, event("ADDED", "b"));
}

#[tokio::test(start_paused = true)]
async fn watch_ends_after_requested_timeout() {
    let server = ApiServer::start().await;
    let began = tokio::time::Instant::now();
    let mut watch = watch(&server, &format!("{SLICES}?watch=true&timeoutSeconds=60")).await;
    assert_eq!(watch.next().await, None);
    assert!(began.elapsed() >= Duration::from_secs(60));
}
