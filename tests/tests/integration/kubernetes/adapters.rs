//! A device plugin that becomes a DRA driver of a node while pods have its devices, and a device plugin again.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use native_device_plugin::{Device, Options as PluginOptions, Plugin, Script};
use nodedock_proto::node::v1;
use nodedock_stand_ins::api_server::{Allocated, State};
use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions, Resource};
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE};
use nodedock_tests::{DEADLINE, Daemon, assert_parts};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const RESOURCE: &str = "example.com/nic";
const OTHER: &str = "example.com/other";
const DRIVER: &str = "nic.example.com";
const DEVICES: usize = 8;
/// Pause of a client that finds no device.
const PAUSE: Duration = Duration::from_millis(20);
/// Time for which a client uses a device.
const USE: Duration = Duration::from_millis(5);
/// Pause of a client of the scheduler while the adapter is switched.
const REST: Duration = Duration::from_secs(1);
/// Devices that are given by a way before the adapter is switched.
const GIVEN: usize = 50;
/// DRA is the mechanism, regardless of the classes that exist.
const DRA: &str = "kubernetes: {extendedResources: dra}\n";
const ADAPTED: &str = "kubernetes: {extendedResources: dra, requestsPerSecond: 1000, requestBurst: 1000}\n\
    devicePluginAdapters: [{resource: example.com/nic, driver: nic.example.com, pool: nics}]\n";

/// A node with a kubelet and a device plugin.
struct Node {
    cluster: Arc<Cluster>,
    daemon: Daemon,
    kubelet: Kubelet,
    plugin: Plugin,
    other: Plugin,
    /// Pod that has the device of the other plugin, which represents the daemon's own: a kubelet's list with it is complete.
    pod: String,
}

impl Node {
    async fn start() -> Self {
        let cluster = Arc::new(Cluster::start().await);
        cluster
            .api
            .report_kubelet(NODE, "v1.37.1", json!({ RESOURCE: "0" }));
        let daemon = cluster.daemon_with(cluster.options().config(DRA)).await;
        let kubelet = Kubelet::start(&daemon.kubelet(), KubeletOptions::default()).await;
        let options = PluginOptions::new(RESOURCE, &daemon.state().join("device-plugins"));
        let devices = (0..DEVICES)
            .map(|n| Device::healthy(&format!("nic-{n}")))
            .collect();
        let plugin = Plugin::start(options, Script::ok(), devices)
            .await
            .expect("it registers");
        let other = PluginOptions::new(OTHER, &daemon.state().join("device-plugins"));
        let other = Plugin::start(other, Script::ok(), vec![Device::healthy("other")]);
        let other = other.await.expect("it registers");
        kubelet.devices(OTHER, 1).await;
        let pod = kubelet.allocate(OTHER, 1).await.expect("it is free").pod();
        Self {
            cluster,
            daemon,
            kubelet,
            plugin,
            other,
            pod,
        }
    }

    /// Starts the daemon with an adapter of the plugin, which registers again.
    async fn adapt(&mut self) {
        self.start_again(ADAPTED).await;
    }

    async fn start_again(&mut self, config: &str) {
        let options = std::mem::take(self.daemon.options());
        let pod = format!("default/{}", self.pod);
        *self.daemon.options() = options.config(config).env("NODEDOCK_POD", &pod);
        self.daemon.crash().await;
        for plugin in [&self.plugin, &self.other] {
            plugin.serve().expect("its socket is made");
            plugin.register().await.expect("it registers");
        }
    }

    async fn until_slices(&self, wanted: &[&str]) {
        let what = format!("{wanted:?} in slices");
        self.cluster
            .api
            .wait_until(&what, |state| in_slices(state) == wanted)
            .await;
    }

    /// Waits until the kubelet's list has so many healthy devices, and others.
    async fn until_listed(&self, healthy: usize, unhealthy: usize) {
        let is =
            |of: Resource| (of.healthy().len(), of.devices.len()) == (healthy, healthy + unhealthy);
        let what = format!("{healthy} healthy devices and {unhealthy} others");
        self.kubelet
            .wait_until(&what, |view| view.resource(RESOURCE).is_some_and(is))
            .await;
    }

    fn claim(&self, name: &str, device: &str) -> ClaimRef {
        let pool = format!("{NODE}/nics");
        let allocated = Allocated::new(NAMESPACE, name)
            .node(NODE)
            .reserved_for("pod", "pod-uid");
        let allocated = allocated.device("device", DRIVER, &pool, device);
        ClaimRef::new(NAMESPACE, name, &self.cluster.api.allocate_claim(allocated))
    }

    async fn prepare(&self, claim: &ClaimRef) -> Result<(), String> {
        let driver = self.kubelet.driver(DRIVER);
        let mut answer = driver.prepare(std::slice::from_ref(claim)).await?;
        answer.remove(&claim.uid).expect("every claim is answered");
        Ok(())
    }

    async fn unprepare(&self, claim: &ClaimRef) {
        self.kubelet
            .driver(DRIVER)
            .unprepare(std::slice::from_ref(claim))
            .await
            .expect("it is unprepared");
    }

    /// Waits until the adapter has a reason, which no event announces.
    async fn until_reason(&self, wanted: &str) {
        let end = Instant::now() + DEADLINE;
        while self.adapter().await.reason != wanted {
            assert!(
                Instant::now() < end,
                "{:?}\n{}",
                self.adapter().await,
                self.daemon.log()
            );
            sleep(PAUSE).await;
        }
    }

    async fn adapter(&self) -> v1::Adapter {
        let answer = self
            .daemon
            .client()
            .list_adapters(v1::ListAdaptersRequest {})
            .await
            .expect("it answers");
        answer.into_inner().adapters.remove(0)
    }

    async fn switch(&self, word: &str) {
        self.daemon.cli(&["adapter", word, DRIVER]).await.done();
    }
}

/// Names of the driver's devices in slices.
fn in_slices(state: &State) -> Vec<String> {
    let slices = state.slices(DRIVER);
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let mut names: Vec<_> = devices
        .filter_map(|device| device["name"].as_str())
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn plugin_changes_mechanism_without_losing_devices() {
    let mut node = Node::start().await;
    node.until_listed(DEVICES, 0).await;
    let old = node
        .kubelet
        .allocate(RESOURCE, 1)
        .await
        .expect("eight are there");
    let held = old.ids[0].clone();
    node.adapt().await;
    let free: Vec<_> = (0..DEVICES)
        .map(|n| format!("nic-{n}"))
        .filter(|name| *name != held)
        .collect();
    let free: Vec<_> = free.iter().map(String::as_str).collect();
    node.until_slices(&free).await;
    assert_eq!(node.adapter().await.held, [held.as_str()]);
    assert!(node.kubelet.allocate(RESOURCE, 1).await.is_err());
    node.kubelet.registered(DRIVER).await;
    let claim = node.claim("new", free[0]);
    node.prepare(&claim).await.expect("it is free");
    let refused = node
        .prepare(&node.claim("of-the-pod", &held))
        .await
        .unwrap_err();
    assert_parts(&refused, &[DRIVER, &format!("no device {held}")]);
    node.cluster
        .api
        .delete("resourceclaims", NAMESPACE, "of-the-pod");

    // The kubelet restarts containers of the pod only while their resource has a plugin.
    node.until_listed(0, 1).await;

    // Back to the device manager when the claim is gone, here and then at the API server.
    node.switch("disable").await;
    node.until_reason("the pool waits for its devices to be free, to be offered by device-plugin")
        .await;
    node.unprepare(&claim).await;
    node.cluster.api.delete("resourceclaims", NAMESPACE, "new");
    node.until_slices(&[]).await;
    node.until_listed(DEVICES - 1, 1).await;
    let explained = node
        .daemon
        .cli(&["explain", "resource", RESOURCE])
        .await
        .done();
    assert_parts(
        &explained,
        &[
            "is offered by device-plugin",
            "an operator disabled its adapter",
            "is disabled",
        ],
    );
    let allocated = node.kubelet.allocate(RESOURCE, 1).await;
    assert_eq!(allocated.expect("seven are free").ids.len(), 1);
}

/// A new or deleted adapter had no effect before a restart.
#[tokio::test]
async fn adapter_comes_and_goes_live() {
    let mut node = Node::start().await;
    node.start_again(DRA).await;
    node.until_listed(DEVICES, 0).await;
    let old = node.kubelet.allocate(RESOURCE, 1).await;
    let held = old.expect("eight are there").ids[0].clone();
    let configure = |node: &Node, adapters: &str| {
        let file = node
            .daemon
            .write("nodedock.yaml.new", format!("{DRA}{adapters}"));
        std::fs::rename(file, node.daemon.path().join("nodedock.yaml")).expect("it is replaced");
    };
    configure(
        &node,
        "devicePluginAdapters: [{resource: example.com/nic, driver: nic.example.com, pool: nics}]\n",
    );
    let free: Vec<_> = (0..DEVICES)
        .map(|n| format!("nic-{n}"))
        .filter(|name| *name != held)
        .collect();
    let free: Vec<_> = free.iter().map(String::as_str).collect();
    node.until_slices(&free).await;
    assert_eq!(node.adapter().await.held, [held.as_str()]);
    assert!(node.kubelet.allocate(RESOURCE, 1).await.is_err());
    node.until_listed(0, 1).await;
    node.kubelet.registered(DRIVER).await;
    let claim = node.claim("new", free[0]);
    node.prepare(&claim).await.expect("it is free");

    // Without its entry it acts as a disabled one: the pool moves when it is free.
    configure(&node, "");
    node.until_reason("the pool waits for its devices to be free, to be offered by device-plugin")
        .await;
    assert!(node.adapter().await.removed);
    node.unprepare(&claim).await;
    node.cluster.api.delete("resourceclaims", NAMESPACE, "new");
    node.until_slices(&[]).await;
    node.until_listed(DEVICES - 1, 1).await;
    let allocated = node.kubelet.allocate(RESOURCE, 1).await;
    assert_eq!(allocated.expect("seven are free").ids.len(), 1);
}

/// Sixteen concurrent clients, half of them for each mechanism.
struct Clients {
    node: Node,
    /// Devices that some client has now.
    used: Mutex<BTreeSet<String>>,
    /// A kubelet admits one pod at a time.
    admission: tokio::sync::Mutex<()>,
    /// Numbers of devices that the device manager and the scheduler allocated.
    given: [watch::Sender<usize>; 2],
    /// They rest after each device: the pool moves when it is free.
    is_switched: AtomicBool,
    is_over: AtomicBool,
}

impl Clients {
    /// Uses a device for a moment in which others may get it.
    async fn use_one(&self, way: usize, device: &str) {
        let used = || self.used.lock().expect("no test has failed");
        assert!(used().insert(device.to_owned()), "{device} is given twice");
        sleep(USE).await;
        used().remove(device);
        self.given[way].send_modify(|count| *count += 1);
    }

    async fn rest(&self) {
        if self.is_switched.load(Ordering::Relaxed) {
            sleep(REST).await;
        }
    }

    /// Allocates as a pod with a limit does: by the kubelet's list.
    async fn ask_device_manager(&self) {
        let allocation = {
            let _one = self.admission.lock().await;
            self.node.kubelet.allocate(RESOURCE, 1).await
        };
        match allocation {
            Ok(allocation) => {
                self.use_one(0, allocation.ids[0].rsplit('/').next().expect("an ID"))
                    .await;
                self.node.kubelet.free(&allocation);
            }
            Err(_) => sleep(PAUSE).await,
        }
    }

    /// Allocates as a pod with a claim does: by the slices, which may be old.
    async fn ask_scheduler(&self, client: usize, turn: usize) {
        let devices = self.node.cluster.api.look(in_slices);
        if devices.is_empty() {
            return sleep(PAUSE).await;
        }
        let (name, device) = (
            format!("claim-{client}-{turn}"),
            &devices[(client + turn) % devices.len()],
        );
        let claim = self.node.claim(&name, device);
        if self.node.prepare(&claim).await.is_ok() {
            self.use_one(1, device).await;
        }
        self.node.unprepare(&claim).await;
        self.node
            .cluster
            .api
            .delete("resourceclaims", NAMESPACE, &name);
        self.rest().await;
    }

    /// Waits until devices were given by a way, from now on.
    async fn until_given(&self, way: usize) {
        let mut given = self.given[way].subscribe();
        let before = *given.borrow();
        given
            .wait_for(|count| *count >= before + GIVEN)
            .await
            .expect("the sender is there");
    }
}

#[tokio::test]
async fn racing_clients_share_no_device() {
    let mut node = Node::start().await;
    node.adapt().await;
    let (used, admission, given, is_switched, is_over) = Default::default();
    let clients = Arc::new(Clients {
        node,
        used,
        admission,
        given,
        is_switched,
        is_over,
    });
    let mut running = JoinSet::new();
    for client in 0..16 {
        let clients = clients.clone();
        running.spawn(async move {
            for turn in 0.. {
                match client % 2 {
                    _ if clients.is_over.load(Ordering::Relaxed) => return,
                    0 => clients.ask_device_manager().await,
                    _ => clients.ask_scheduler(client, turn).await,
                }
            }
        });
    }
    let switched = async {
        clients.until_given(1).await;
        clients.is_switched.store(true, Ordering::Relaxed);
        clients.node.switch("disable").await;
        clients.until_given(0).await;
    };
    tokio::select! {
        switched = timeout(DEADLINE, switched) => {
            switched.unwrap_or_else(|_| panic!("{}", clients.node.daemon.log()));
        }
        ended = running.join_next() => panic!("a client ended: {ended:?}"),
    }
    clients.is_over.store(true, Ordering::Relaxed);
    while let Some(client) = running.join_next().await {
        client.expect("no device is given twice");
    }
}
