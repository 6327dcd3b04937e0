//! Claims from the API server, prepared and unprepared through the sockets that a kubelet knows.

use nodedock_stand_ins::kubelet::ClaimRef;
use nodedock_tests::cluster::{NAMESPACE, gpu_claim};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use serde_json::{Value, json};

use super::{GPUS, Node};

#[tokio::test]
async fn kubelet_prepares_and_unprepares_a_claim() {
    let node = Node::start(GPUS).await;
    let (api, daemon) = (&node.cluster.api, &node.daemon);
    let claim = node.claim("one", &["gpus/gpu-0", "gpus/gpu-1"]);
    let devices = node.prepare(&claim).await.unwrap();
    let named: Vec<_> = devices
        .iter()
        .map(|device| (device.pool_name.as_str(), device.device_name.as_str()))
        .collect();
    assert_eq!(
        named,
        [("node-1/gpus", "gpu-0"), ("node-1/gpus", "gpu-1")],
        "as the API server has them"
    );
    let file = daemon.only_cdi_file();
    for device in &devices {
        let [name] = device.cdi_device_ids.as_slice() else {
            panic!("{device:?}")
        };
        assert!(
            file.text.contains(name.rsplit_once('=').unwrap().1),
            "{name} in {}",
            file.text
        );
    }
    assert_eq!(daemon.only_claim().await.state, "prepared");
    assert_eq!(
        node.prepare(&claim).await.unwrap(),
        devices,
        "the same question has the same answer"
    );

    node.unprepared(&claim).await;
    assert!(daemon.claims().await.is_empty() && daemon.cdi_files().is_empty());
    let requests = api
        .requests()
        .into_iter()
        .filter(|seen| seen.resource == "resourceclaims" && seen.verb == "get");
    assert_eq!(requests.count(), 2, "one request for each prepare");
    node.unprepared(&claim).await;

    // Another claim of the name has nothing to do with the old one.
    api.delete("resourceclaims", NAMESPACE, "one");
    let new = api.allocate_claim(gpu_claim("one", &["gpus/gpu-1"]).uid("another-uid"));
    node.prepared(&ClaimRef::new(NAMESPACE, "one", &new)).await;
    node.unprepared(&claim).await;
    let refused = node.prepare(&claim).await.unwrap_err();
    assert!(refused.contains("replaced"), "{refused}");
    assert_eq!(daemon.only_claim().await.id.unwrap().uid, new);
}

#[tokio::test]
async fn known_claims_work_without_api_server() {
    let mut node = Node::start(GPUS).await;
    let known = node.claim("known", &["gpus/gpu-0"]);
    let other = node.claim("other", &["gpus/gpu-1"]);
    node.prepared(&known).await;
    node.cluster.api.stop().await;
    let refused = node.prepare(&other).await.unwrap_err();
    assert!(refused.contains("API server"), "{refused}");
    node.prepared(&known).await;
    // Nor does it take the API server to start.
    node.crash().await;
    node.daemon.until_serving(MOCK_GPU_FILE).await;
    node.prepared(&known).await;
    node.unprepared(&known).await;
    node.unprepared(&other).await;
    assert!(node.daemon.claims().await.is_empty());
    node.cluster.api.start_again().await;
    node.daemon.until_conditions(&[]).await;
    node.prepared(&other).await;
}

#[tokio::test]
async fn foreign_or_unallocated_claims_are_refused() {
    let node = Node::start(GPUS).await;
    let api = &node.cluster.api;
    let elsewhere = api.allocate_claim(gpu_claim("elsewhere", &["gpus/gpu-0"]).node("node-2"));
    let refused = node
        .prepare(&ClaimRef::new(NAMESPACE, "elsewhere", &elsewhere))
        .await
        .unwrap_err();
    assert!(
        refused.contains("node-2") || refused.contains("this node"),
        "{refused}"
    );
    let unallocated = node.claim("unallocated", &["gpus/gpu-0"]);
    api.deallocate_claim(NAMESPACE, "unallocated");
    let refused = node.prepare(&unallocated).await.unwrap_err();
    assert!(refused.contains("not allocated"), "{refused}");
    for name in ["elsewhere", "unallocated"] {
        let what = format!("an event on {name}");
        let is_on_it = |event: &Value| {
            let about = &event["involvedObject"];
            about["kind"] == "ResourceClaim" && about["name"] == name
        };
        api.wait_until(&what, |state| {
            state.objects("events").iter().any(|event| is_on_it(event))
        })
        .await;
    }
}

#[tokio::test]
async fn pod_group_claim_is_prepared() {
    let node = Node::start(GPUS).await;
    let reserved = gpu_claim("team", &["gpus/gpu-0"]).reserved_for_group("train", "uid-train");
    let claim = ClaimRef::new(
        NAMESPACE,
        "team",
        &node.cluster.api.allocate_claim(reserved),
    );
    node.prepared(&claim).await;
    let table = node.daemon.cli(&["get", "claims"]).await.done();
    assert!(table.contains("pod,podgroups/train (kubelet)"), "{table}");
    let shown = node
        .daemon
        .cli(&["get", "claims", "-o", "json"])
        .await
        .json();
    let group = json!({
        "apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "train", "uid": "uid-train",
    });
    assert_eq!(shown[0]["kubelet"]["consumers"][1], group);
    let explained = node
        .daemon
        .cli(&["explain", "claim", "default/team"])
        .await
        .done();
    assert!(
        explained.contains("podgroups.scheduling.k8s.io train (UID uid-train)"),
        "{explained}"
    );
    node.unprepared(&claim).await;
    assert!(node.daemon.claims().await.is_empty());
}
