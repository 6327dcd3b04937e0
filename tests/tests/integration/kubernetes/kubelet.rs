//! A kubelet that comes, goes and asks, beside a daemon that does the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use native_null::{
    Device, HealthState, Options as PluginOptions, Plugin, Script, ScriptedOutcome, Versions,
};
use nodedock_stand_ins::api_server::{Allocated, State};
use nodedock_stand_ins::kubelet::{Call, ClaimRef, Driver, Resource, View};
use nodedock_tests::DEADLINE;
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE, gpu_claim};
use nodedock_tests::drivers::{
    Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, digest, version, wasm,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{GPUS, Node};

const RESOURCE: &str = "example.com/gpu";

impl Node {
    async fn until_devices_in_slices(&self, count: usize) {
        let has_all = |state: &State| {
            let slices = state.slices(MOCK_GPU_NAME);
            let devices = slices
                .iter()
                .map(|slice| slice["spec"]["devices"].as_array().map_or(0, Vec::len));
            devices.sum::<usize>() == count
        };
        self.cluster
            .api
            .wait_until(&format!("{count} devices are published"), has_all)
            .await;
    }

    /// Waits until the kubelet has so many healthy devices: one that a claim has is not for others.
    async fn until_healthy(&self, count: usize) {
        let are = |resource: Resource| resource.healthy().len() == count;
        let what = format!("{count} healthy devices");
        self.kubelet
            .wait_until(&what, |view| view.resource(RESOURCE).is_some_and(are))
            .await;
    }

    /// Returns the number of calls for the driver's identity.
    fn registrations(&self) -> usize {
        let is_one = |call: &&Call| call.what == "GetInfo" && call.whom.contains(MOCK_GPU_NAME);
        self.kubelet.calls().iter().filter(is_one).count()
    }

    /// Returns the daemon's requests that the API server refused as forbidden.
    fn forbidden(&self) -> Vec<String> {
        let seen = self
            .cluster
            .api
            .requests()
            .into_iter()
            .filter(|seen| seen.code == 403);
        seen.map(|seen| format!("{} {}", seen.verb, seen.full_resource()))
            .collect()
    }
}

#[tokio::test]
async fn prepared_claims_survive_all_restarts() {
    let mut node = Node::start(GPUS).await;
    let claim = node.claim("one", &["gpus/gpu-0"]);
    let before = node.prepared(&claim).await;
    node.kubelet.start_again().await;
    node.kubelet.registered(MOCK_GPU_NAME).await;
    assert_eq!(node.prepared(&claim).await, before);
    // The kubelet deleted them.
    node.until_devices_in_slices(8).await;

    node.crash().await;
    assert_eq!(node.prepared(&claim).await, before);

    node.kubelet.stop().await;
    node.daemon.kill9().await;
    node.kubelet.start_again().await;
    node.daemon.run().await;
    node.kubelet.registered(MOCK_GPU_NAME).await;
    assert_eq!(node.prepared(&claim).await, before);
    node.unprepared(&claim).await;
    assert!(node.daemon.cdi_files().is_empty() && node.daemon.claims().await.is_empty());
    node.until_devices_in_slices(8).await;
    assert_eq!(node.forbidden(), Vec::<String>::new());
}

#[tokio::test]
async fn driver_replacement_needs_no_new_registration() {
    let node = Node::start(GPUS).await;
    let claim = node.claim("one", &["gpus/gpu-0"]);
    let before = node.prepared(&claim).await;
    let count = node.registrations();
    let file = version(wasm(MOCK_GPU, Form::Core), "next");
    let new = digest(&file);
    node.daemon.drop_in(MOCK_GPU_FILE, &file);
    node.daemon
        .until_driver(MOCK_GPU_FILE, |driver| driver.digest == new)
        .await;
    assert_eq!(node.prepared(&claim).await, before);
    node.unprepared(&claim).await;
    assert_eq!(node.registrations(), count);

    node.daemon.take_out(MOCK_GPU_FILE);
    node.kubelet.deregistered(MOCK_GPU_NAME).await;
    let are_gone = |state: &State| state.slices(MOCK_GPU_NAME).is_empty();
    node.cluster
        .api
        .wait_until("the driver's slices are gone", are_gone)
        .await;
}

#[tokio::test]
async fn pool_registers_with_every_new_kubelet() {
    let mut node = Node::start(GPUS).await;
    let devices = node.kubelet.devices(RESOURCE, 8).await;
    assert_eq!(devices.healthy().len(), 8);
    let allocation = node
        .kubelet
        .allocate(RESOURCE, 2)
        .await
        .expect("two are there");
    let named: Vec<_> = allocation
        .answer
        .cdi_devices
        .iter()
        .map(|device| device.name.clone())
        .collect();
    assert_eq!(node.daemon.only_cdi_file().devices(), named);

    node.kubelet.start_again().await;
    node.kubelet.devices(RESOURCE, 8).await;
    node.daemon.crash().await;
    let devices = node.kubelet.devices(RESOURCE, 8).await;
    assert_eq!(
        devices.healthy().len(),
        8,
        "devices are offered before their driver serves"
    );
    let held = node.claim("own", &["plugged/gpu-15"]);
    node.prepared(&held).await;
    node.until_healthy(7).await;
    node.unprepared(&held).await;
    node.until_healthy(8).await;
}

#[tokio::test]
async fn native_plugin_registers_with_device_health() {
    const NATIVE: &str = "null.example.com";
    let node = Node::start(GPUS).await;
    let directory = node.daemon.path().join("native");
    let mut options = PluginOptions::new(
        NATIVE,
        &node.daemon.state().join("plugins_registry"),
        &directory,
    );
    options.versions = Versions {
        health_v1: true,
        ..Versions::default()
    };
    let device = Device {
        pool: NODE.to_owned(),
        device: "null-0".to_owned(),
        ..Device::default()
    };
    let script = Script::prepare(ScriptedOutcome::Devices(vec![device]));
    let plugin = Plugin::start(options, script).await.unwrap();
    node.kubelet.registered(NATIVE).await;
    let claim = Allocated::new(NAMESPACE, "one")
        .node(NODE)
        .device("null", NATIVE, NODE, "null-0");
    let claim = [ClaimRef::new(
        NAMESPACE,
        "one",
        &node.cluster.api.allocate_claim(claim),
    )];
    let driver = node.kubelet.driver(NATIVE);
    let devices = driver
        .prepare(&claim)
        .await
        .unwrap()
        .remove(&claim[0].uid)
        .unwrap();
    assert_eq!(
        (
            devices[0].pool_name.as_str(),
            devices[0].device_name.as_str()
        ),
        (NODE, "null-0")
    );
    driver.unprepare(&claim).await.unwrap();
    assert!(node.daemon.claims().await.is_empty());
    for (state, healthy) in [
        (HealthState::Healthy, true),
        (HealthState::Unhealthy, false),
    ] {
        plugin.report_health(vec![native_null::DeviceHealth {
            pool: "pool".into(),
            device: "a".into(),
            state,
            message: "says the plugin".into(),
            timeout_seconds: 0,
        }]);
        let is_known = |view: &View<'_>| {
            let health = view.health(NATIVE);
            let found = health.get(&("pool".to_owned(), "a".to_owned()));
            found.is_some_and(|found| {
                found.healthy == Some(healthy) && found.message == "says the plugin"
            })
        };
        node.kubelet
            .wait_until("the plugin's health", is_known)
            .await;
    }
    // Lost, it is still offered; deregistered, it is not.
    plugin.disconnect();
    node.daemon.until_state(NATIVE, "lost").await;
    node.kubelet.registered(NATIVE).await;
    plugin.unregister().unwrap();
    node.kubelet.deregistered(NATIVE).await;
}

/// Devices of the node, claims at once, and how often each claim is another one.
const DEVICES: usize = 1000;
const CLAIMS: usize = 200;
const ROUNDS: usize = 2;

/// A claim on a device, prepared and unprepared in turn under new UIDs, as pods of a deployment come and go.
async fn come_and_go(
    cluster: Arc<Cluster>,
    driver: Driver,
    number: usize,
    restarts: watch::Receiver<u32>,
) -> Result<(), String> {
    let name = format!("claim-{number}");
    for _ in 0..ROUNDS {
        let uid = cluster
            .api
            .allocate_claim(gpu_claim(&name, &[&format!("gpus/gpu-{number}")]));
        let claim = [ClaimRef::new(NAMESPACE, &name, &uid)];
        repeated(restarts.clone(), || async {
            match driver.prepare(&claim).await?[&uid].len() {
                1 => Ok(()),
                devices => Err(format!("{devices} devices")),
            }
        })
        .await?;
        repeated(restarts.clone(), || driver.unprepare(&claim)).await?;
        cluster.api.delete("resourceclaims", NAMESPACE, &name);
    }
    Ok(())
}

/// A kubelet retries in its own time. A test retries after the restart that refused a call, or soon if the API server was busy, until its
/// deadline. The error is the last refusal.
async fn repeated<F: Future<Output = Result<(), String>>>(
    mut restarts: watch::Receiver<u32>,
    once: impl Fn() -> F,
) -> Result<(), String> {
    let mut last = String::new();
    let until = async {
        while let Err(why) = once().await {
            last = why;
            // Without a restart, the time leaves others their turn.
            timeout(Duration::from_millis(20), restarts.changed())
                .await
                .ok();
        }
    };
    let ended = timeout(DEADLINE * 3, until).await;
    ended.map_err(|_| last)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_survive_load_and_restarts() {
    let mut node = Node::start(&format!("pools: [{{name: gpus, count: {DEVICES}}}]\n")).await;
    node.until_devices_in_slices(DEVICES).await;
    let (mut pods, restarts) = (JoinSet::new(), watch::Sender::new(0));
    for number in 0..CLAIMS {
        let driver = node.kubelet.driver(MOCK_GPU_NAME);
        pods.spawn(come_and_go(
            node.cluster.clone(),
            driver,
            number,
            restarts.subscribe(),
        ));
    }
    let file = version(wasm(MOCK_GPU, Form::Core), "next");
    node.daemon.drop_in(MOCK_GPU_FILE, &file);
    node.kubelet.start_again().await;
    restarts.send_modify(|restarts| *restarts += 1);
    node.crash().await;
    node.daemon.until_serving(MOCK_GPU_FILE).await;
    restarts.send_modify(|restarts| *restarts += 1);
    let ends = pods.join_all().await;
    let failed: Vec<_> = ends.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{failed:#?}\n{}", node.daemon.log());
    assert!(node.daemon.cdi_files().is_empty());
    assert_eq!(node.daemon.claims().await.len(), 0);
    node.until_devices_in_slices(DEVICES).await;
    let published = node.cluster.api.look(|state| {
        let mut devices = BTreeMap::<String, usize>::new();
        for slice in state.slices(MOCK_GPU_NAME) {
            for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
                *devices.entry(device["name"].to_string()).or_default() += 1;
            }
        }
        devices
    });
    assert!(published.len() == DEVICES && published.values().all(|count| *count == 1));
    assert_eq!(node.forbidden(), Vec::<String>::new());
}
