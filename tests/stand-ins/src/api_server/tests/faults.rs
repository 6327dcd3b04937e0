//! What goes wrong on request.

use serde_json::{Value, json};

use super::client::{Asking, get, open, send, try_ask, watch};
use crate::api_server::{ApiServer, Fault, When};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

fn list() -> Asking<'static> {
    Asking { method: "GET", path: SLICES, kind: "", token: "", body: "" }
}

fn slice() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": "s" },
        "spec": {
            "driver": "a", "nodeName": "n", "pool": { "name": "p", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "d", "taints": [{ "key": "k", "effect": "NoSchedule" }] }],
        },
    })
}

#[tokio::test]
async fn faults_meet_the_requests_they_are_for_as_often_as_they_are_meant_to() {
    let server = ApiServer::start().await;
    server.fail_times(
        2,
        Fault::TooMany { retry_after: 7 },
        When::any().verb("list").resource("resourceslices"),
    );
    for _ in 0..2 {
        let answer = get(&server, SLICES).await;
        assert_eq!(answer.code, 429);
        assert!(answer.headers.contains("retry-after: 7\n"));
    }
    assert_eq!(get(&server, SLICES).await.code, 200);
    let id = server.fail(Fault::Html(200), When::any());
    let page = get(&server, "/version").await;
    assert!(page.headers.contains("text/html") && page.text.starts_with("<!DOCTYPE html>"));
    server.lift(id);
    assert_eq!(get(&server, "/version").await.body["minor"], "36");
    server.fail(Fault::Status(503), When::any().user_agent("tests/"));
    assert_eq!(get(&server, SLICES).await.body["reason"], "ServiceUnavailable");
    server.lift_all();
    assert_eq!(get(&server, SLICES).await.code, 200);
}

#[tokio::test]
async fn answers_get_lost_or_break_off() {
    let server = ApiServer::start().await;
    let body = slice().to_string();
    let create = Asking { method: "POST", path: SLICES, kind: "application/json", token: "", body: &body };
    server.fail_times(1, Fault::Away, When::any());
    assert!(try_ask(&server, &create).await.is_none());
    assert_eq!(server.list("resourceslices").len(), 0);
    server.fail_times(1, Fault::Lost, When::any());
    assert!(try_ask(&server, &create).await.is_none());
    assert_eq!(server.list("resourceslices").len(), 1);
    server.fail_times(1, Fault::HalfAnswer, When::any());
    assert!(try_ask(&server, &list()).await.is_none());
    assert_eq!(server.requests().iter().map(|seen| seen.code).collect::<Vec<_>>(), [0, 0, 200]);
}

#[tokio::test]
async fn watches_fail_in_their_own_ways() {
    let server = ApiServer::start().await;
    send(&server, "POST", SLICES, &slice()).await;
    let path = format!("{SLICES}?watch=true");
    server.fail_times(1, Fault::CloseWatchesAtOnce, When::any());
    assert_eq!(get(&server, SLICES).await.code, 200);
    let mut closed = watch(&server, &path).await;
    assert_eq!((closed.code, closed.next().await), (200, None));
    server.fail_times(1, Fault::Expire, When::any().verb("watch"));
    assert_eq!(watch(&server, &path).await.next().await.unwrap()["object"]["code"], 410);
    server.fail_times(1, Fault::HalfAnswer, When::any().verb("watch"));
    assert_eq!(watch(&server, &path).await.next().await, None);
    assert_eq!(watch(&server, &path).await.next().await.unwrap()["type"], "ADDED");
}

#[tokio::test]
async fn a_field_that_the_server_does_not_know_is_dropped() {
    let server = ApiServer::start().await;
    server.fail(Fault::DropField("spec.devices[*].taints".to_owned()), When::any());
    let made = send(&server, "POST", SLICES, &slice()).await;
    assert_eq!((made.code, &made.body["spec"]["devices"]), (201, &json!([{ "name": "d" }])));
}

#[tokio::test]
async fn a_server_that_stops_is_gone_and_comes_back_as_it_was() {
    let server = ApiServer::start().await;
    send(&server, "POST", SLICES, &slice()).await;
    let mut open_one = watch(&server, &format!("{SLICES}?watch=true")).await;
    assert!(open_one.next().await.is_some());
    server.stop().await;
    assert_eq!(open_one.next().await, None);
    assert!(open(&server, &list()).await.is_none());
    server.start_again().await;
    assert_eq!(get(&server, SLICES).await.body["items"].as_array().map(Vec::len), Some(1));
    let mut open_one = watch(&server, &format!("{SLICES}?watch=true")).await;
    assert!(open_one.next().await.is_some());
    server.drop_connections();
    assert_eq!(open_one.next().await, None);
    assert_eq!(get(&server, SLICES).await.code, 200);
}

#[tokio::test]
async fn tokens_rotate() {
    let server = ApiServer::start().await;
    server.require_tokens(&["old"]);
    let with = |token| Asking { token, ..list() };
    assert_eq!(try_ask(&server, &with("old")).await.unwrap().code, 200);
    server.require_tokens(&["new"]);
    assert_eq!(try_ask(&server, &with("old")).await.unwrap().code, 401);
    assert_eq!(try_ask(&server, &with("new")).await.unwrap().code, 200);
    let folder = tempfile::tempdir().unwrap();
    let config: Value =
        serde_json::from_slice(&std::fs::read(server.kubeconfig(folder.path())).unwrap()).unwrap();
    assert_eq!(config["users"][0]["user"]["token"], "new");
    assert_eq!(config["clusters"][0]["cluster"]["server"], server.url());
}
