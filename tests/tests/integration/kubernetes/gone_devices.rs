//! Devices of prepared claims that their driver does not have any more, of a driver file and of a native plugin.

use native_null::{Device, Options as PluginOptions, Plugin, Script, ScriptedOutcome};
use nodedock_stand_ins::api_server::Allocated;
use nodedock_stand_ins::kubelet::ClaimRef;
use nodedock_tests::cluster::{NAMESPACE, NODE};
use nodedock_tests::drivers::MOCK_GPU_NAME;
use serde_json::{Value, json};

use super::Node;

const GONE: &str = "claim-devices-gone";
const NATIVE: &str = "null.example.com";

impl Node {
    /// Waits until a condition and the claim say that the device is gone.
    async fn until_gone(&self, claim: &str, driver: &str, device: &str) {
        let conditions = self.daemon.until_conditions(&[GONE]).await;
        assert_eq!(conditions[0].subject, driver);
        let marked = format!("{driver}/{device} (gone)");
        let get = self.daemon.cli(&["get", "claims"]).await;
        get.done_with(&[&marked]);
        let why = format!("device {device} is gone: the driver does not have it any more");
        let explain = self.daemon.cli(&["explain", "claim", claim]).await;
        explain.done_with(&[&why]);
        let claims = self.json(&["get", "claims", "-o", "json"]).await;
        let of_driver = &claims[0]["drivers"][0];
        assert_eq!(of_driver["goneDevices"], json!([device]), "{claims:#}");
    }

    /// Waits until nothing says so any more.
    async fn until_there(&self) {
        self.daemon.until_conditions(&[]).await;
        let claims = self.json(&["get", "claims", "-o", "json"]).await;
        let claims = claims.as_array().expect("a list");
        assert!(
            claims
                .iter()
                .all(|claim| claim["drivers"][0]["goneDevices"].is_null()),
            "{claims:#?}"
        );
    }

    async fn json(&self, args: &[&str]) -> Value {
        self.daemon.cli(args).await.json()
    }
}

fn pools(count: u32) -> String {
    format!("pools: [{{name: gpus, count: {count}}}]\n")
}

#[tokio::test]
async fn device_gone_from_driver_is_marked() {
    let node = Node::start(&pools(4)).await;
    let claim = node.claim("one", &["gpus/gpu-3"]);
    node.prepared(&claim).await;
    let device = format!("{NODE}/gpus/gpu-3");
    node.daemon.install_gpus(&pools(2));
    node.until_gone("one", MOCK_GPU_NAME, &device).await;
    node.daemon.install_gpus(&pools(4));
    node.until_there().await;
    node.daemon.install_gpus(&pools(2));
    node.until_gone("one", MOCK_GPU_NAME, &device).await;
    node.unprepared(&claim).await;
    node.until_there().await;
}

/// The slice of a plugin that publishes itself.
fn slice(devices: &[&str]) -> Value {
    let devices: Vec<_> = devices.iter().map(|name| json!({ "name": name })).collect();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": "of-the-plugin" },
        "spec": {
            "driver": NATIVE,
            "nodeName": NODE,
            "pool": { "name": NODE, "generation": 1, "resourceSliceCount": 1 },
            "devices": devices,
        },
    })
}

#[tokio::test]
async fn device_gone_from_plugin_is_marked() {
    let node = Node::start(&pools(1)).await;
    let api = &node.cluster.api;
    let options = PluginOptions::new(
        NATIVE,
        &node.daemon.state().join("plugins_registry"),
        &node.daemon.path().join("native"),
    );
    let device = Device {
        pool: NODE.to_owned(),
        device: "null-0".to_owned(),
        ..Device::default()
    };
    let script = Script::prepare(ScriptedOutcome::Devices(vec![device]));
    let _plugin = Plugin::start(options, script).await.expect("it starts");
    node.kubelet.registered(NATIVE).await;
    api.put(slice(&["null-0", "null-1"]));
    let claim = Allocated::new(NAMESPACE, "one")
        .node(NODE)
        .device("null", NATIVE, NODE, "null-0");
    let claim = [ClaimRef::new(NAMESPACE, "one", &api.allocate_claim(claim))];
    let driver = node.kubelet.driver(NATIVE);
    driver.prepare(&claim).await.expect("it is prepared");
    let device = format!("{NODE}/null-0");
    api.put(slice(&["null-1"]));
    node.until_gone("one", NATIVE, &device).await;
    api.put(slice(&["null-0"]));
    node.until_there().await;
    api.put(slice(&["null-1"]));
    node.until_gone("one", NATIVE, &device).await;
    driver.unprepare(&claim).await.expect("it is unprepared");
    node.until_there().await;
}
