//! Extended resources on a node where the scheduler allocates them, and the change from the kubelet's device manager to it.

use nodedock_proto::node::v1;
use nodedock_stand_ins::api_server::State;
use nodedock_stand_ins::kubelet::Resource;
use nodedock_tests::cluster::{Cluster, NODE};
use nodedock_tests::drivers::MOCK_GPU_NAME;
use nodedock_tests::{Daemon, assert_parts};
use serde_json::{Value, json};

use super::{GPUS, Node};

const RESOURCE: &str = "example.com/gpu";
const ATTRIBUTE: &str = "nodedock.dev/extendedResource";

/// A class as the command prints it, for `kubectl apply -f -`.
async fn classes(daemon: &Daemon) -> Vec<Value> {
    let list = daemon
        .cli(&["get", "classmanifests", "-o", "json"])
        .await
        .json();
    assert_eq!(list["kind"], "List");
    list["items"].as_array().expect("it has items").clone()
}

/// Names of the devices in slices that have the attribute of the resource.
fn offered(state: &State) -> Vec<String> {
    let slices = state.slices(MOCK_GPU_NAME);
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let offered = devices.filter(|device| device["attributes"][ATTRIBUTE]["string"] == RESOURCE);
    let mut names: Vec<_> = offered
        .filter_map(|device| device["name"].as_str())
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

async fn until_offered(cluster: &Cluster, count: usize) {
    let what = format!("{count} devices of {RESOURCE} in slices");
    cluster
        .api
        .wait_until(&what, |state| offered(state).len() == count)
        .await;
}

impl Node {
    async fn explained(&self) -> String {
        self.daemon
            .cli(&["explain", "resource", RESOURCE])
            .await
            .done()
    }
}

#[tokio::test]
async fn extended_resource_claim_prepares_on_137() {
    let cluster = Cluster::start().await;
    cluster.api.report_minor_version("37");
    cluster.api.report_kubelet(NODE, "v1.37.1", json!({}));
    let node = Node::start_in(cluster, GPUS).await;
    node.kubelet.devices(RESOURCE, 8).await;
    node.daemon
        .until_conditions(&["device-class-missing"])
        .await;
    let explained = node.explained().await;
    assert_parts(
        &explained,
        &[
            "is offered by device-plugin",
            "a DeviceClass of example.com/gpu",
            "no DeviceClass",
        ],
    );

    let items = classes(&node.daemon).await;
    let [class] = items.as_slice() else {
        panic!("{items:#?}")
    };
    assert_eq!(class["spec"]["extendedResourceName"], RESOURCE);
    node.cluster.api.put(class.clone());
    until_offered(&node.cluster, 8).await;
    let explained = node.explained().await;
    assert_parts(
        &explained,
        &["is offered by dra", "the kubelet 1.37", "example.com-gpu"],
    );
    assert!(!explained.contains("no DeviceClass"), "{explained}");
    let claim = node.claim("of-the-scheduler", &["plugged/gpu-9"]);
    node.prepared(&claim).await;
    node.unprepared(&claim).await;
    let forbidden = node
        .cluster
        .api
        .requests()
        .into_iter()
        .filter(|seen| seen.code == 403);
    assert_eq!(forbidden.count(), 0);
}

#[tokio::test]
async fn pool_in_use_stays_with_kubelet() {
    let mut node = Node::start(GPUS).await;
    node.kubelet.devices(RESOURCE, 8).await;
    let allocated = node.kubelet.allocate(RESOURCE, 1).await;
    assert_eq!(allocated.expect("eight are there").ids.len(), 1);
    let options = std::mem::take(node.daemon.options());
    *node.daemon.options() = options.config("kubernetes: {extendedResources: dra}\n");
    node.crash().await;
    let stays = |resource: &v1::Resource| {
        let reason = &resource.mechanism_reason;
        resource.mechanism == "device-plugin" && reason.contains("its devices to be free")
    };
    node.daemon.until_resource(RESOURCE, stays).await;
    let is_offered = |of: Resource| of.running && of.healthy().len() == 8;
    let what = "eight healthy devices";
    node.kubelet
        .wait_until(what, |view| view.resource(RESOURCE).is_some_and(is_offered))
        .await;
    let allocated = node.kubelet.allocate(RESOURCE, 1).await;
    assert_eq!(allocated.expect("seven are free").ids.len(), 1);
    assert_eq!(node.cluster.api.look(offered), Vec::<String>::new());
}
