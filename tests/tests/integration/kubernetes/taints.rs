//! Taints of devices by rules of the cluster, as the daemon shows them.

use nodedock_proto::node::v1;
use nodedock_stand_ins::api_server::Seen;
use nodedock_tests::cluster::Cluster;
use nodedock_tests::drivers::MOCK_GPU_NAME;
use serde_json::{Value, json};

use super::Node;

fn rule(name: &str, selector: &Value, effect: &str) -> Value {
    json!({
        "kind": "DeviceTaintRule", "metadata": { "name": name },
        "spec": {
            "deviceSelector": selector,
            "taint": { "key": "example.com/service", "value": "due", "effect": effect },
        },
    })
}

#[tokio::test]
async fn taints_are_shown_with_their_source() {
    let hot = "unhealthy: [{index: 1, message: it is hot}]";
    let cluster = Cluster::start().await;
    cluster.api.serve_taint_rules();
    let node = Node::start_in(
        cluster,
        &format!("pools: [{{name: gpus, count: 2, {hot}}}]\n"),
    )
    .await;
    let (api, daemon) = (&node.cluster.api, &node.daemon);
    let has_taint = |slice: &&Value| slice.to_string().contains("nodedock.dev/unhealthy");
    api.wait_until("the host's taint", |state| {
        state.slices(MOCK_GPU_NAME).iter().any(has_taint)
    })
    .await;
    let gpu_0 = json!({ "driver": MOCK_GPU_NAME, "pool": "node-1/gpus", "device": "gpu-0" });
    api.put(rule("one", &gpu_0, "NoExecute"));
    api.put(rule(
        "other-node",
        &json!({ "pool": "node-2/gpus" }),
        "NoExecute",
    ));
    api.put(rule("none", &Value::Null, "NoExecute"));
    api.put(rule("every", &json!({}), "Unheard"));
    let taint = |rule: &str, effect: &str| {
        let (key, value) = ("example.com/service", "due");
        json!({ "key": key, "value": value, "effect": effect, "source": "rule", "rule": rule })
    };
    let hot = json!({
        "key": "nodedock.dev/unhealthy", "value": "it-is-hot", "effect": "NoSchedule", "source": "nodedock",
    });
    let expected = [
        json!([taint("every", "Unheard"), taint("one", "NoExecute")]),
        json!([hot, taint("every", "Unheard")]),
    ];
    daemon
        .until("two taints of each device", async |mut client| {
            let request = v1::ListDevicesRequest::default();
            let devices = client
                .list_devices(request)
                .await
                .unwrap()
                .into_inner()
                .devices;
            let counts: Vec<_> = devices.iter().map(|device| device.taints.len()).collect();
            if counts == [2, 2] {
                Ok(())
            } else {
                Err(format!("{devices:?}"))
            }
        })
        .await;
    let devices = daemon.cli(&["get", "devices", "-o", "json"]).await.json();
    let taints: Vec<_> = devices
        .as_array()
        .unwrap()
        .iter()
        .map(|device| device["taints"].clone())
        .collect();
    assert_eq!(taints, expected);
    let table = daemon.cli(&["get", "devices", "-o", "wide"]).await.done();
    assert!(
        table.contains("example.com/service=due:NoExecute (rule one)"),
        "{table}"
    );
    assert!(
        table.contains("nodedock.dev/unhealthy=it-is-hot:NoSchedule (nodedock)"),
        "{table}"
    );
    let requests = api
        .requests()
        .into_iter()
        .filter(|seen| seen.resource == "devicetaintrules");
    assert_eq!(
        requests.map(|seen| seen.verb).collect::<Vec<_>>(),
        ["list", "watch"]
    );
}

#[tokio::test]
async fn forbidden_rules_cost_only_their_taints() {
    let cluster = Cluster::start().await;
    cluster.api.serve_taint_rules();
    cluster.api.deny("list", "devicetaintrules");
    cluster.api.put(rule("every", &json!({}), "NoSchedule"));
    let node = Node::start_in(cluster, "pools: [{name: gpus, count: 1}]\n").await;
    node.prepared(&node.claim("one", &["gpus/gpu-0"])).await;
    let denied = |seen: &Seen| seen.resource == "devicetaintrules";
    node.cluster
        .api
        .wait_until("a refused list", |state| {
            state.requests().iter().any(denied)
        })
        .await;
    let device = node
        .daemon
        .cli(&["get", "devices", "gpus/gpu-0", "-o", "json"])
        .await
        .json();
    assert_eq!(device[0]["taints"], Value::Null);
    node.daemon.until_conditions(&[]).await;
    node.daemon.until_log("devicetaintrules").await;
}
