//! Pods and their claims, with the API server.

use std::sync::Arc;

use serde_json::Value;

use super::plugin::{Behaviour, Plugin, kubelet, quick};
use crate::api_server::{Allocated, ApiServer, Pod};
use crate::kubelet::KubeletOptions;

const DRIVER: &str = "gpu.example.com";

fn options(server: &Arc<ApiServer>) -> KubeletOptions {
    let KubeletOptions { claims, wipes, .. } = KubeletOptions::of_node(server, "node-1");
    KubeletOptions { claims, wipes, ..quick() }
}

fn pod(server: &ApiServer, name: &str) -> Value {
    server.get("pods", "default", name).unwrap()
}

fn claim(name: &str, uid: &str) -> Allocated {
    Allocated::new("default", name).uid(uid).node("node-1").device("gpu", DRIVER, "p", "d-0")
}

#[tokio::test]
async fn a_claim_is_prepared_once_and_unprepared_with_its_last_pod() {
    let server = Arc::new(ApiServer::start().await);
    let (dir, mut kubelet) = kubelet(options(&server)).await;
    let plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    let one = server.add_pod(Pod::new("default", "one", "node-1").claim("gpu", "c"));
    let two = server.add_pod(Pod::new("default", "two", "node-1").claim("gpu", "c"));
    server.allocate_claim(claim("c", "u-1").reserved_for("one", &one).reserved_for("two", &two));
    let devices = kubelet.run_pod(&pod(&server, "one")).await.unwrap();
    assert_eq!(devices["main"], ["example.com/gpu=u-1"]);
    kubelet.run_pod(&pod(&server, "two")).await.unwrap();
    assert_eq!(plugin.calls().len(), 1);
    kubelet.stop_pod(&one).await.unwrap();
    assert_eq!(plugin.calls().len(), 1);
    // After a restart nothing is known to be prepared.
    kubelet.restart().await;
    kubelet.registered(DRIVER).await;
    kubelet.run_pod(&pod(&server, "two")).await.unwrap();
    assert_eq!(plugin.calls().len(), 2);
    server.delete("resourceclaims", "default", "c");
    kubelet.stop_pod(&two).await.unwrap();
    let calls: Vec<&str> = plugin.calls().iter().map(|(_, call, _)| *call).collect();
    assert_eq!(calls, ["prepare", "prepare", "unprepare"]);
    assert!(kubelet.cached_claims().is_empty());
}

#[tokio::test]
async fn a_pod_is_refused_what_is_not_its_own() {
    let server = Arc::new(ApiServer::start().await);
    let (dir, kubelet) = kubelet(options(&server)).await;
    let uid = server.add_pod(Pod::new("default", "one", "node-1").claim("gpu", "c"));
    let run = async || kubelet.run_pod(&pod(&server, "one")).await.unwrap_err();
    assert_eq!(run().await, "prepare dynamic resources: fetch ResourceClaim c: not found");
    server.allocate_claim(claim("c", "u-1"));
    assert!(run().await.ends_with(&format!("pod one ({uid}) is not allowed to use ResourceClaim c (u-1)")));
    server.reserve_claim("default", "c", "one", &uid);
    assert!(run().await.ends_with("DRA driver gpu.example.com is not registered"));
    let busy = Behaviour { claim_error: "busy".to_owned(), ..Behaviour::of(DRIVER) };
    let plugin = Plugin::start(dir.path(), "", busy);
    kubelet.registered(DRIVER).await;
    assert!(run().await.ends_with("NodePrepareResources failed for ResourceClaim c: busy"));
    // What may be prepared is unprepared before a claim of the same name can be.
    plugin.change(|behaviour| behaviour.claim_error.clear());
    server.allocate_claim(claim("c", "u-2").reserved_for("one", &uid));
    assert!(run().await.contains("old ResourceClaim with same name c and different UID u-1 still exists"));
    kubelet.stop_pod(&uid).await.unwrap();
    kubelet.run_pod(&pod(&server, "one")).await.unwrap();
    assert_eq!(kubelet.cached_claims(), ["u-2"]);
    server.edit("resourceclaims", "default", "c", |claim| drop(claim["status"]["allocation"].take()));
    assert!(run().await.ends_with("ResourceClaim c: not allocated"));
}

#[tokio::test]
async fn a_claim_from_a_template_must_be_owned() {
    let server = Arc::new(ApiServer::start().await);
    let (dir, kubelet) = kubelet(options(&server)).await;
    let _plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    let uid = server.add_pod(Pod::new("default", "one", "node-1").template("gpu", "t", "one-gpu-x"));
    server.allocate_claim(claim("one-gpu-x", "u-1").reserved_for("one", &uid));
    let why = kubelet.run_pod(&pod(&server, "one")).await.unwrap_err();
    assert!(why.ends_with("was not created for Pod default/one (Pod is not owner)"), "{why}");
    let owned = claim("one-gpu-x", "u-1").reserved_for("one", &uid).owned_by("one", &uid, "gpu");
    server.allocate_claim(owned);
    kubelet.run_pod(&pod(&server, "one")).await.unwrap();
}

#[tokio::test]
async fn slices_go_when_a_kubelet_starts_and_when_it_misses_their_driver() {
    let server = Arc::new(ApiServer::start().await);
    let put = |name: &str, driver: &str, node: &str| {
        let spec = serde_json::json!({ "driver": driver, "nodeName": node });
        server.put(serde_json::json!({ "kind": "ResourceSlice", "metadata": { "name": name }, "spec": spec }))
    };
    put("a", DRIVER, "node-1");
    put("elsewhere", DRIVER, "node-2");
    let (dir, kubelet) = kubelet(options(&server)).await;
    let names = |server: &ApiServer| -> Vec<String> {
        let slices = server.list("resourceslices");
        slices.iter().map(|slice| slice["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&server), ["elsewhere"]);
    let plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    put("a", DRIVER, "node-1");
    put("other", "nic.example.com", "node-1");
    // It dies; its sockets stay.
    drop(plugin);
    server.wait_until("the wipe", |state| state.slices(DRIVER).len() == 1).await;
    assert_eq!(names(&server), ["elsewhere", "other"]);
}
