//! What goes wrong on request.

use serde_json::{Value, json};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{Asking, get, send, try_ask, watch};
use crate::api_server::{ApiServer, Fault, When};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

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
    assert_eq!(get(&server, SLICES).await.body["reason"], "ServiceUnavailable");
    server.lift_all();
    assert_eq!(get(&server, SLICES).await.code, 200);
}

#[tokio::test]
async fn answers_get_lost_or_break_off() {
    let server = ApiServer::start().await;
    let body = slice().to_string();
    let create = Asking { method: "POST", kind: "application/json", body: &body, ..Asking::get(SLICES) };
    server.fail_times(1, Fault::Away, When::any());
    assert!(try_ask(&server, &create).await.is_none());
    assert_eq!(server.list("resourceslices").len(), 0);
    server.fail_times(1, Fault::HalfAnswer, When::any());
    assert!(try_ask(&server, &create).await.is_none());
    assert_eq!(server.list("resourceslices").len(), 1);
    assert_eq!(server.requests().iter().map(|seen| seen.code).collect::<Vec<_>>(), [0, 201]);
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
    assert_eq!(get(&server, SLICES).await.body["items"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn tokens_rotate() {
    let server = ApiServer::start().await;
    server.require_tokens(&["old"]);
    let with = |token| Asking { token, ..Asking::get(SLICES) };
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
