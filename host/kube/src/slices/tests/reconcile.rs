//! The task that writes, with an API server in memory. The clock is turned, not waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nodedock_stand_ins::api_server::{ApiServer, Fault, When};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

use super::super::report::{Outcome, WRITES};
use super::super::{
    DriverSnapshot, FailedDevices, SliceParts, SliceReport, SliceSettings, start, watch_slices,
};
use super::*;
use crate::client::tests::over;
use crate::drivers::SLICE_SETTLE;
use crate::extended_resources::{ExtendedResources, Mechanism};
use crate::facts::Facts;
use crate::pools::PoolNames;
use crate::slices::pace::{SLICE_CALM, SLICE_REPAIR_MAX, SLICE_RETRY_MAX};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::OwnDevices;
use nodedock_model::ProblemCode;

/// A server with the Node object.
pub(super) async fn server() -> Arc<ApiServer> {
    let server = Arc::new(ApiServer::start().await);
    server.add_node(NODE);
    server
}

pub(super) fn slices(server: &ApiServer) -> Vec<Arc<Slice>> {
    let objects = server.list("resourceslices").into_iter();
    objects
        .map(|object| Arc::new(serde_json::from_value(object).unwrap()))
        .collect()
}

pub(super) fn names(server: &ApiServer) -> Vec<String> {
    slices(server)
        .iter()
        .map(|slice| slice.metadata.name.clone().unwrap())
        .collect()
}

/// Writes of slices since the last call: verb and name.
pub(super) fn writes(server: &ApiServer) -> Vec<String> {
    let seen = server
        .requests()
        .into_iter()
        .filter(|seen| seen.resource == "resourceslices");
    let writes = seen.filter(|seen| matches!(seen.verb.as_str(), "create" | "update" | "delete"));
    let writes = writes
        .map(|seen| format!("{} {}", seen.verb, seen.name))
        .collect();
    server.forget_requests();
    writes
}

fn edit(server: &ApiServer, name: &str, change: impl FnOnce(&mut Value)) {
    server.edit("resourceslices", "", name, change);
}

/// A slice of another client.
fn put_foreign(server: &ApiServer, name: &str, driver: &str, pool: &str) {
    server.put(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": name },
        "spec": {
            "driver": driver,
            "nodeName": NODE,
            "pool": { "name": pool, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "theirs" }],
        },
    }));
}

/// A daemon on the node.
pub(super) struct Daemon {
    pub(super) drivers: watch::Sender<DriverSnapshot>,
    pub(super) facts: Facts,
    pub(super) conditions: Conditions,
    pub(super) report: SliceReport,
    /// Messages of devices that became unhealthy.
    pub(super) unhealthy: Arc<Mutex<Vec<String>>>,
    pub(super) failed: watch::Sender<FailedDevices>,
    pub(super) settings: watch::Sender<SliceSettings>,
    own_devices: Arc<OwnDevices>,
    tasks: Tasks,
}

pub(super) fn serving(driver: &str, published: Published) -> DriverSnapshot {
    let serving = BTreeMap::from([(super::driver(driver), Arc::new(published))]);
    let present = serving.keys().cloned().collect();
    DriverSnapshot {
        present,
        serving,
        is_settled: true,
        ..DriverSnapshot::default()
    }
}

pub(super) fn none() -> DriverSnapshot {
    DriverSnapshot {
        is_settled: true,
        ..DriverSnapshot::default()
    }
}

impl Daemon {
    pub(super) fn start(server: &Arc<ApiServer>, drivers: DriverSnapshot) -> Self {
        Self::start_named(server, drivers, NODE, None)
    }

    /// A device that is unhealthy for so long evicts its pods.
    pub(super) fn start_evicting(
        server: &Arc<ApiServer>,
        drivers: DriverSnapshot,
        after: Duration,
    ) -> Self {
        Self::start_named(server, drivers, NODE, Some(after))
    }

    /// Starts a daemon whose pools have the node name `node_of_pools`.
    fn start_named(
        server: &Arc<ApiServer>,
        drivers: DriverSnapshot,
        node_of_pools: &str,
        evict_after: Option<Duration>,
    ) -> Self {
        let (kube, node_name, (drivers, snapshots)) =
            (over(server), node().name, watch::channel(drivers));
        let (conditions, report, tasks) =
            (Conditions::default(), SliceReport::default(), Tasks::new());
        let facts = Facts::start(&tasks, &kube, node_name.clone(), Conditions::default());
        let failed = watch::Sender::default();
        let unhealthy = Arc::<Mutex<Vec<String>>>::default();
        let messages = unhealthy.clone();
        let own_devices = Arc::<OwnDevices>::default();
        let settings = watch::Sender::new(SliceSettings {
            evict_after,
            ..SliceSettings::default()
        });
        let events = watch_slices(&kube, &node_name);
        let parts = SliceParts {
            turns: Arc::new(Semaphore::new(1)),
            kube,
            drivers: snapshots,
            node: facts.clone(),
            names: PoolNames {
                node: ObjectName::new(node_of_pools).unwrap(),
            },
            own_devices: own_devices.clone(),
            on_unhealthy: Arc::new(move |device| messages.lock().push(device.message.clone())),
            settings: settings.subscribe(),
            failed: failed.subscribe(),
            extended_resources: ExtendedResources::fixed(Mechanism::DevicePlugin),
            conditions: conditions.clone(),
            report: report.clone(),
            tasks: tasks.clone(),
        };
        start(parts, events);
        Self {
            drivers,
            facts,
            conditions,
            report,
            unhealthy,
            failed,
            settings,
            own_devices,
            tasks,
        }
    }

    pub(super) fn serve(&self, published: Published) {
        self.drivers.send_replace(serving(GPU, published));
    }

    /// The driver is there and does not serve.
    fn lose_driver(&self) {
        self.drivers.send_replace(DriverSnapshot {
            present: [driver(GPU)].into(),
            ..none()
        });
    }

    pub(super) async fn stop(self) {
        assert!(self.tasks.drain(Duration::from_secs(1)).await);
    }

    pub(super) fn codes(&self) -> Vec<String> {
        self.conditions
            .list()
            .into_iter()
            .map(|condition| condition.problem.code)
            .collect()
    }
}

/// A daemon that has published its driver's pools, and its server.
pub(super) async fn publishing(had: &Published) -> (Arc<ApiServer>, Daemon) {
    let server = server().await;
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    assert!(is_there(&server, had));
    (server, daemon)
}

/// The pool as the API has it.
fn ours(pool: &str) -> PoolKey {
    key(GPU, &format!("{NODE}/{pool}"))
}

pub(super) async fn pass(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

pub(super) fn is_there(server: &ApiServer, published: &Published) -> bool {
    let (slices, pools) = (slices(server), &published.inventory.pools);
    pools
        .iter()
        .all(|(name, pool)| visible(&slices, &ours(name.as_str())) == Some(content(pool)))
}

#[tokio::test(start_paused = true)]
async fn an_inventory_is_written_once() {
    let had = published(&[("p", &devices(200)), ("q", &devices(1))]);
    let (server, daemon) = publishing(&had).await;
    assert_eq!(writes(&server).len(), 3);
    daemon.serve(had.clone());
    pass(700).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    let status = daemon.report.pool(&ours("p")).unwrap();
    assert_eq!(
        (
            status.is_current,
            status.slices,
            status.devices,
            status.generation
        ),
        (true, 2, 200, 1)
    );
    daemon.stop().await;
    assert_eq!(slices(&server).len(), 3, "they stay when the daemon stops");
}

#[tokio::test(start_paused = true)]
async fn constant_changes_are_rate_limited() {
    let (server, daemon) = publishing(&published(&[("p", &devices(1))])).await;
    writes(&server);
    for turn in 0..1000 {
        let mut pool = devices(1);
        pool.devices.get_mut(&device_name(0)).unwrap().taints = vec![taint(&turn.to_string())];
        daemon.serve(published(&[("p", &pool)]));
        sleep(Duration::from_millis(10)).await;
    }
    pass(2).await;
    let writes = writes(&server).len();
    assert!((9..=13).contains(&writes), "{writes}");
}

#[tokio::test(start_paused = true)]
async fn slices_deleted_by_kubelet_are_rewritten() {
    let had = published(&[("p", &devices(300)), ("q", &devices(2))]);
    let (server, daemon) = publishing(&had).await;
    assert_eq!(writes(&server).len(), 4);
    assert_eq!(server.kubelet_starts(NODE), 4);
    sleep(2 * SLICE_SETTLE).await;
    assert!(is_there(&server, &had));
    assert_eq!((writes(&server).len(), daemon.report.repairs.get()), (4, 2));
    // A kubelet that restarts all the time.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(120) {
        server.kubelet_starts(NODE);
        sleep(Duration::from_millis(500)).await;
    }
    let writes = writes(&server).len();
    assert!((20..=60).contains(&writes), "{writes}");
    assert!(
        daemon
            .codes()
            .contains(&ProblemCode::SlicesContested.to_string())
    );
    pass(SLICE_CALM.as_secs() + SLICE_REPAIR_MAX.as_secs() + 1).await;
    assert!(is_there(&server, &had));
    assert_eq!(daemon.codes(), Vec::<String>::new());
    // The other writer stopped: its next change is repaired at once.
    assert_eq!(server.kubelet_starts(NODE), 4);
    pass(2).await;
    assert!(is_there(&server, &had));
}

#[tokio::test(start_paused = true)]
async fn only_own_slices_are_repaired() {
    let (server, had) = (server().await, published(&[("p", &devices(300))]));
    put_foreign(&server, "other", "other.example.com", "p");
    let _daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    writes(&server);
    let name = names(&server).remove(0);
    edit(&server, &name, |object| {
        drop(object["spec"]["devices"].as_array_mut().unwrap().pop())
    });
    pass(5).await;
    assert_eq!(writes(&server), [format!("update {name}")]);
    put_foreign(&server, "foreign-1", GPU, "node-1/p");
    put_foreign(&server, "foreign-2", GPU, "none-of-ours");
    pass(60).await;
    assert!(is_there(&server, &had));
    let left: Vec<_> = slices(&server)
        .iter()
        .map(|slice| slice.spec.key().to_string())
        .collect();
    assert_eq!(
        left.iter()
            .filter(|key| *key == "other.example.com/p")
            .count(),
        1
    );
    assert_eq!(left.len(), 4, "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn restart_writes_only_differences() {
    let mut pool = devices(300);
    let (server, daemon) = publishing(&published(&[("p", &pool)])).await;
    daemon.stop().await;
    writes(&server);
    // The driver is there, and does not serve yet.
    let daemon = Daemon::start(
        &server,
        DriverSnapshot {
            present: [driver(GPU)].into(),
            ..none()
        },
    );
    pass(600).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    pool.devices
        .get_mut(&device_name(130))
        .unwrap()
        .allow_multiple_allocations = true;
    let had = published(&[("p", &pool)]);
    daemon.serve(had.clone());
    pass(5).await;
    assert_eq!(writes(&server).len(), 1);
    assert!(is_there(&server, &had));
    // Slices of a lost driver are written again as well.
    daemon.lose_driver();
    pass(60).await;
    server.kubelet_starts(NODE);
    pass(5).await;
    assert!(is_there(&server, &had));
}

/// A native plugin publishes itself: the daemon learns its devices from its slices alone.
#[tokio::test(start_paused = true)]
async fn native_plugins_devices_are_reported() {
    let server = server().await;
    put_foreign(&server, "native", "native.example.com", "p");
    put_foreign(&server, "other", "other.example.com", "p");
    let native = super::driver("native.example.com");
    let present = DriverSnapshot {
        present: [native.clone()].into(),
        native: [native.clone()].into(),
        ..none()
    };
    let daemon = Daemon::start(&server, present.clone());
    let devices = || {
        let known = daemon.own_devices.of(&native)?;
        Some(
            known
                .iter()
                .map(|(_, name)| name.clone())
                .collect::<Vec<_>>(),
        )
    };
    pass(5).await;
    assert_eq!(devices(), Some(vec!["theirs".to_owned()]));
    assert_eq!(
        daemon.own_devices.of(&super::driver("other.example.com")),
        None
    );
    edit(&server, "native", |object| {
        object["spec"]["devices"][0]["name"] = "another".into();
    });
    pass(5).await;
    assert_eq!(devices(), Some(vec!["another".to_owned()]));
    server.delete("resourceslices", "", "native");
    pass(5).await;
    assert_eq!(devices(), Some(vec![]), "it had devices");
    daemon.drivers.send_replace(none());
    pass(5).await;
    assert_eq!(devices(), None, "a plugin that is gone");
}

#[tokio::test(start_paused = true)]
async fn removed_drivers_slices_are_withdrawn() {
    let (server, had) = (server().await, published(&[("p", &devices(200))]));
    put_foreign(&server, "native", "native.example.com", "p");
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    // A file that is being replaced is missing for a moment.
    daemon.drivers.send_replace(none());
    pass(5).await;
    daemon.serve(had.clone());
    pass(60).await;
    assert!(is_there(&server, &had));
    daemon.stop().await;

    let nameless = vec!["broken.wasm".to_owned()];
    let daemon = Daemon::start(&server, DriverSnapshot::default());
    pass(60).await;
    assert!(is_there(&server, &had), "not all files were examined");
    daemon
        .drivers
        .send_replace(DriverSnapshot { nameless, ..none() });
    pass(60).await;
    assert!(
        is_there(&server, &had),
        "the driver may be in the file that cannot be read"
    );
    assert_eq!(daemon.codes(), [ProblemCode::SlicesKept]);
    daemon.drivers.send_replace(none());
    pass(60).await;
    let left: Vec<_> = slices(&server)
        .iter()
        .map(|slice| slice.spec.key().to_string())
        .collect();
    assert_eq!(left, ["native.example.com/p"]);
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.serve(had.clone());
    pass(5).await;
    assert!(is_there(&server, &had), "it is back");
}

#[tokio::test(start_paused = true)]
async fn refused_pool_delays_no_other() {
    let server = server().await;
    let mut bad = devices(1);
    // More than a server takes.
    let taints = (0..17).map(|index| taint(&index.to_string()));
    bad.devices.get_mut(&device_name(0)).unwrap().taints = taints.collect();
    let daemon = Daemon::start(
        &server,
        serving(GPU, published(&[("bad", &bad), ("good", &devices(2))])),
    );
    pass(5).await;
    assert!(is_there(&server, &published(&[("good", &devices(2))])));
    let [condition] = &daemon.conditions.list()[..] else {
        panic!()
    };
    assert_eq!(
        (condition.problem.code.as_str(), condition.subject.as_str()),
        (
            ProblemCode::SlicesRefused.as_str(),
            "gpu.example.com/node-1/bad"
        )
    );
    assert!(
        condition
            .problem
            .message
            .contains("spec.devices[0].taints: Too many"),
        "{condition:?}"
    );
    writes(&server);
    pass(600).await;
    let tries = writes(&server).len();
    assert!((4..=10).contains(&tries), "{tries}");
    // Another content is tried at once.
    daemon.serve(published(&[("bad", &devices(3)), ("good", &devices(2))]));
    pass(3).await;
    assert!(is_there(&server, &published(&[("bad", &devices(3))])));
    assert_eq!(daemon.codes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn dropped_fields_are_not_rewritten() {
    let server = server().await;
    server.fail(
        Fault::DropField("spec.devices[*].taints".to_owned()),
        When::any(),
    );
    let mut pool = devices(200);
    pool.devices
        .values_mut()
        .for_each(|device| device.taints = vec![taint("a")]);
    let daemon = Daemon::start(&server, serving(GPU, published(&[("p", &pool)])));
    pass(600).await;
    assert_eq!(writes(&server).len(), 4);
    let [condition] = &daemon.conditions.list()[..] else {
        panic!()
    };
    assert_eq!(
        (condition.problem.code.as_str(), condition.subject.as_str()),
        (ProblemCode::SliceFieldsDropped.as_str(), GPU)
    );
    assert!(
        condition.problem.message.contains("devices[].taints"),
        "{condition:?}"
    );
    server.compact();
    server.close_watches();
    pass(60).await;
    assert_eq!(writes(&server), Vec::<String>::new());
    daemon.serve(published(&[("p", &devices(200))]));
    pass(60).await;
    assert_eq!(daemon.codes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn slices_are_written_after_server_outage() {
    let had = published(&[("p", &devices(300))]);
    let (server, daemon) = publishing(&published(&[("p", &devices(1))])).await;
    writes(&server);
    server.fail(Fault::Away, When::any());
    server.close_watches();
    daemon.serve(had.clone());
    pass(600).await;
    let tries = writes(&server).len();
    assert!((5..=15).contains(&tries), "{tries}");
    assert!(!daemon.report.pool(&ours("p")).unwrap().is_current);
    // A kubelet starts meanwhile.
    server.kubelet_starts(NODE);
    server.lift_all();
    pass(SLICE_RETRY_MAX.as_secs()).await;
    assert!(is_there(&server, &had));
    assert!(daemon.report.pool(&ours("p")).unwrap().is_current);
}

#[tokio::test(start_paused = true)]
async fn conflict_is_resolved_after_watch_event() {
    let had = published(&[("p", &devices(300))]);
    let (server, daemon) = publishing(&published(&[("p", &devices(200))])).await;
    // The watch reports nothing for a while: the write finds out.
    server.fail(
        Fault::Away,
        When::any().resource("resourceslices").verb("list"),
    );
    server.fail(
        Fault::Away,
        When::any().resource("resourceslices").verb("watch"),
    );
    server.close_watches();
    let name = names(&server).remove(0);
    edit(&server, &name, |object| {
        object["metadata"]["annotations"] = json!({ "a": "b" })
    });
    daemon.serve(had.clone());
    pass(5).await;
    assert!(!is_there(&server, &had));
    server.lift_all();
    pass(60).await;
    assert!(is_there(&server, &had));
    let slice = server.get("resourceslices", "", &name).unwrap();
    assert_eq!(slice["metadata"]["annotations"], json!({ "a": "b" }));
    let conflicts = WRITES.map(|verb| daemon.report.writes(verb, Outcome::Conflict).get());
    assert!(conflicts.iter().sum::<u64>() > 0);
}

#[tokio::test(start_paused = true)]
async fn too_long_name_sets_a_condition() {
    let (server, long) = (server().await, ["a".repeat(60).as_str(); 4].join("."));
    let both = published(&[(&long, &devices(1)), ("q", &devices(1))]);
    let node = "node-1".repeat(5);
    let daemon = Daemon::start_named(&server, serving(GPU, both.clone()), &node, None);
    pass(5).await;
    let pools: BTreeSet<_> = slices(&server)
        .iter()
        .map(|slice| slice.spec.key().pool.to_string())
        .collect();
    assert_eq!(pools, BTreeSet::from([format!("{node}/q")]));
    for (drivers, codes) in [
        (serving(GPU, published(&[("q", &devices(1))])), vec![]),
        (serving(GPU, both.clone()), vec![ProblemCode::SlicesRefused]),
        (none(), vec![]),
        (serving(GPU, both), vec![ProblemCode::SlicesRefused]),
    ] {
        daemon.drivers.send_replace(drivers);
        pass(5).await;
        assert_eq!(daemon.codes(), codes);
    }
}

#[tokio::test(start_paused = true)]
async fn failed_device_is_tainted_while_listed() {
    let had = published(&[("p", &devices(2))]);
    let (server, daemon) = publishing(&had).await;
    let tainted = || {
        let slices =
            server.look(|state| state.slices(GPU).into_iter().cloned().collect::<Vec<_>>());
        let devices = slices
            .iter()
            .flat_map(|slice| slice["spec"]["devices"].as_array().unwrap().clone());
        let tainted =
            devices.filter(|device| device["taints"][0]["key"] == "nodedock.dev/prepare-failed");
        tainted
            .map(|device| device["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let device = had
        .inventory
        .pools
        .values()
        .flat_map(|pool| pool.devices.keys())
        .next()
        .unwrap()
        .clone();
    let pool = had.inventory.pools.keys().next().unwrap().clone();
    let other = (driver("other.example.com"), pool.clone(), device.clone());
    let reported = || daemon.report.host_taints(&driver(GPU), &pool, &device, &[]);
    daemon
        .failed
        .send_replace([(driver(GPU), pool.clone(), device.clone()), other].into());
    pass(5).await;
    assert_eq!(tainted(), [device.to_string()]);
    assert_eq!(
        reported()
            .iter()
            .map(|taint| &*taint.key)
            .collect::<Vec<_>>(),
        ["nodedock.dev/prepare-failed"]
    );
    daemon.failed.send_replace(FailedDevices::new());
    pass(5).await;
    assert!(tainted().is_empty() && reported().is_empty() && is_there(&server, &had));
    daemon.stop().await;
}
