//! Watches.

use std::time::Duration;

use serde_json::{Value, json};

use super::client::{get, send, watch};
use crate::api_server::ApiServer;

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

fn put(server: &ApiServer, name: &str, driver: &str) -> Value {
    server.put(json!({
        "kind": "ResourceSlice", "metadata": { "name": name }, "spec": { "driver": driver, "nodeName": "node-1" },
    }))
}

fn told(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

#[tokio::test]
async fn a_watch_goes_on_from_the_version_of_a_list() {
    let server = ApiServer::start().await;
    put(&server, "a", "x");
    let list = get(&server, SLICES).await.body;
    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    put(&server, "b", "x");
    put(&server, "a", "y");
    let mut watch = watch(&server, &format!("{SLICES}?watch=1&resourceVersion={version}")).await;
    assert_eq!(watch.next_name().await, told("ADDED", "b"));
    assert_eq!(watch.next_name().await, told("MODIFIED", "a"));
    server.wait_until("the watch", |state| state.watches("resourceslices") == 1).await;
    send(&server, "DELETE", &format!("{SLICES}?fieldSelector=spec.driver=x"), &Value::Null).await;
    assert_eq!(watch.next_name().await, told("DELETED", "b"));
    server.close_watches();
    assert_eq!(watch.next().await, None);
    server.wait_until("its end", |state| state.watches("resourceslices") == 0).await;
}

#[tokio::test]
async fn a_watch_through_a_selector_sees_objects_come_and_go() {
    let server = ApiServer::start().await;
    let mut watch = watch(&server, &format!("{SLICES}?watch=true&fieldSelector=spec.driver=x")).await;
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
    assert_eq!(watch.next_name().await, told("MODIFIED", "a"));
    assert_eq!(watch.next_name().await, told("DELETED", "a"));
    assert_eq!(watch.next_name().await, told("ADDED", "b"));
}

#[tokio::test(start_paused = true)]
async fn a_watch_ends_after_the_time_it_asked_for() {
    let server = ApiServer::start().await;
    let began = tokio::time::Instant::now();
    let mut watch = watch(&server, &format!("{SLICES}?watch=true&timeoutSeconds=60")).await;
    assert_eq!(watch.next().await, None);
    assert!(began.elapsed() >= Duration::from_secs(60));
}
