//! Extended resources on a node where the scheduler allocates them, and the change from the kubelet's device manager to it.

use nodedock_stand_ins::api_server::State;
use nodedock_stand_ins::kubelet::Resource;
use nodedock_tests::cluster::{Cluster, NODE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, assert_parts};
use serde_json::{Value, json};

use super::{GPUS, Node};

const RESOURCE: &str = "example.com/gpu";
const ATTRIBUTE: &str = "nodedock.dev/extendedResource";

/// A class as the command prints it, for `kubectl apply -f -`.
async fn classes(daemon: &Daemon) -> Vec<Value> {
    let list = daemon
        .cli(&["get", "deviceclasses", "-o", "json"])
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
async fn a_node_of_1_37_with_the_class_offers_a_named_pool_in_slices_and_a_claim_of_the_scheduler_is_prepared()
 {
    let cluster = Cluster::start().await;
    cluster.api.report_minor_version("37");
    cluster.api.report_kubelet(NODE, "v1.37.1", json!({}));
    let mut node = Node::start_in(cluster, GPUS).await;
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
    // A start reads the classes at once.
    node.crash().await;
    until_offered(&node.cluster, 8).await;
    node.daemon.until_serving(MOCK_GPU_FILE).await;
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
async fn a_device_of_the_device_manager_stays_out_of_slices_when_the_mechanism_changes() {
    let mut node = Node::start(GPUS).await;
    node.kubelet.devices(RESOURCE, 8).await;
    node.cluster
        .api
        .report_kubelet(NODE, "v1.36.2", json!({ RESOURCE: "8" }));
    let allocation = node
        .kubelet
        .allocate(RESOURCE, 1)
        .await
        .expect("eight are there");
    let allocated = allocation.ids[0].trim_start_matches("plugged/").to_owned();
    let options = std::mem::take(node.daemon.options());
    *node.daemon.options() = options.config("kubernetes: {extendedResources: dra}\n");
    node.crash().await;
    // The kubelet keeps the device of its pod, and has none to allocate.
    let is_withdrawn =
        |of: Resource| of.running && of.devices.len() == 1 && of.healthy().is_empty();
    let what = "the device of the pod, unhealthy";
    node.kubelet
        .wait_until(what, |view| {
            view.resource(RESOURCE).is_some_and(is_withdrawn)
        })
        .await;
    // The resource is known when its driver serves again.
    node.daemon
        .until_resource(RESOURCE, |resource| resource.mechanism == "none")
        .await;
    assert!(
        node.explained()
            .await
            .contains("is offered by neither mechanism now")
    );
    assert_eq!(node.cluster.api.look(offered), Vec::<String>::new());
    node.cluster
        .api
        .report_kubelet(NODE, "v1.36.2", json!({ RESOURCE: "0" }));
    until_offered(&node.cluster, 7).await;
    assert!(!node.cluster.api.look(offered).contains(&allocated));
    node.crash().await;
    node.daemon.until_serving(MOCK_GPU_FILE).await;
    node.kubelet
        .wait_until(what, |view| {
            view.resource(RESOURCE).is_some_and(is_withdrawn)
        })
        .await;
    let offered = node.cluster.api.look(offered);
    assert!(
        offered.len() == 7 && !offered.contains(&allocated),
        "{offered:?}"
    );
}
