//! The task and the writer of slices, with an API server in memory. The bridge is played by the test; the clock is turned.

use std::path::Path;

use nodedock_stand_ins::api_server::{Allocated, ApiServer, Fault, When};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;

use super::*;
use crate::client::tests::over;
use crate::facts::Facts;
use crate::slices::{FailedDevices, SliceParts, SliceReport, SliceSettings, watch_slices};
use nodedock_core::checkpoint;
use nodedock_core::driver::Published;
use nodedock_model::{Device, Inventory, Pool};

const NODE: &str = "node-1";
const GPU: &str = "gpu.example.com";
const RESOURCE: &str = "example.com/gpu";

fn driver() -> DriverName {
    GPU.parse().unwrap()
}

fn resource() -> ExtendedResource {
    RESOURCE.parse().unwrap()
}

fn key() -> LocalPool {
    LocalPool {
        driver: driver(),
        pool: "gpus".parse().unwrap(),
    }
}

fn names() -> PoolNames {
    PoolNames {
        node: NODE.parse().unwrap(),
    }
}

async fn pass(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

/// A server of a minor version of Kubernetes 1, with a node whose kubelet has the other.
async fn server(minor: u32, kubelet: u32) -> Arc<ApiServer> {
    let server = Arc::new(ApiServer::start().await);
    server.add_node(NODE);
    upgrade(&server, minor, kubelet);
    server
}

fn upgrade(server: &ApiServer, minor: u32, kubelet: u32) {
    server.report_minor_version(&minor.to_string());
    let known = server.get("nodes", "", NODE).unwrap();
    let allocatable = known["status"]["allocatable"].clone();
    server.report_kubelet(NODE, &format!("v1.{kubelet}.0"), allocatable);
}

fn set_allocatable(server: &ApiServer, count: &str) {
    server.edit("nodes", "", NODE, |node| {
        node["status"]["allocatable"] = json!({ RESOURCE: count, "cpu": "4" });
    });
}

fn claim(devices: &[&str]) -> Allocated {
    let claim = Allocated::new("default", "claim")
        .node(NODE)
        .reserved_for("pod", "pod-uid");
    // Of another node, too, with the same names.
    let claim = claim.device("other", GPU, "node-2/gpus", "b");
    devices.iter().fold(claim, |claim, device| {
        claim.device("request", GPU, "node-1/gpus", device)
    })
}

/// A daemon on the node, whose driver has a pool of devices `a`, `b` and `c`.
struct Daemon {
    handle: ExtendedResources,
    checkpoint: Checkpoint,
    conditions: Conditions,
    tasks: Tasks,
}

impl Daemon {
    async fn start(server: &Arc<ApiServer>, dir: &Path, setting: MechanismSetting) -> Self {
        Self::start_after(server, dir, setting, &[]).await
    }

    /// `allocated`: devices in durable claims of the device plugin.
    async fn start_after(
        server: &Arc<ApiServer>,
        dir: &Path,
        setting: MechanismSetting,
        allocated: &[&str],
    ) -> Self {
        let devices = ["a", "b", "c"]
            .map(|name| (name.parse().unwrap(), Device::default()))
            .into();
        let pool = Pool {
            devices,
            extended_resource: Some(resource()),
            ..Pool::default()
        };
        let inventory = Inventory {
            pools: [(key().pool, pool)].into(),
        };
        let published = Arc::new(Published {
            inventory,
            ..Published::default()
        });
        let snapshot = DriverSnapshot {
            serving: [(driver(), published)].into(),
            present: [driver()].into(),
            is_settled: true,
            ..DriverSnapshot::default()
        };
        let (client, conditions, tasks) = (over(server), Conditions::default(), Tasks::new());
        let drivers = watch::channel(snapshot).1;
        let opened = checkpoint::open(&dir.join("checkpoint.db")).unwrap();
        let (checkpoint, record) = (opened.checkpoint, opened.dump.mechanisms);
        let loaded = load(checkpoint.clone(), record, false).await;
        let handle = loaded.handle();
        handle.set_allocated(ids(allocated));
        let parts = SliceParts {
            failed: watch::channel(FailedDevices::default()).1,
            kube: client.clone(),
            turns: Arc::new(Semaphore::new(1)),
            drivers: drivers.clone(),
            node: Facts::start(
                &tasks,
                &client,
                NODE.parse().unwrap(),
                Conditions::default(),
            ),
            names: names(),
            on_unhealthy: Arc::new(|_| {}),
            settings: SliceSettings::default(),
            extended_resources: handle.clone(),
            conditions: conditions.clone(),
            report: SliceReport::default(),
            tasks: tasks.clone(),
        };
        crate::slices::start(parts, watch_slices(&client, &names().node));
        let (names, conditions_of, tasks_of) = (names(), conditions.clone(), tasks.clone());
        loaded.start(SwitchParts {
            adapters: None,
            client,
            names,
            setting,
            drivers,
            conditions: conditions_of,
            tasks: tasks_of,
        });
        Self {
            handle,
            checkpoint,
            conditions,
            tasks,
        }
    }

    async fn stop(self) {
        assert!(self.tasks.drain(Duration::from_secs(1)).await);
        self.checkpoint.close().await;
    }

    fn mechanism(&self) -> Option<Mechanism> {
        self.handle
            .view()
            .mechanisms
            .of(&driver(), &key().pool, true)
    }

    /// The bridge has replaced its lists; the device manager has these devices.
    fn bridge(&self, allocated: &[&str]) {
        self.handle.set_allocated(ids(allocated));
        self.handle
            .lists_replaced(self.handle.view().mechanisms.generation);
    }

    fn problem(&self, code: ProblemCode) -> Option<String> {
        let conditions = self.conditions.list().into_iter();
        conditions
            .map(|condition| condition.problem)
            .find(|problem| problem.code == code)
            .map(|found| found.message)
    }
}

fn ids(devices: &[&str]) -> DeviceIds {
    devices
        .iter()
        .map(|device| (driver(), format!("gpus/{device}")))
        .collect()
}

fn published(server: &ApiServer) -> Vec<String> {
    let slices = server.list("resourceslices");
    let devices = slices.iter().flat_map(|slice| {
        slice["spec"]["devices"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    });
    devices
        .map(|device| device["name"].as_str().unwrap_or_default().to_owned())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn where_both_are_new_enough_a_pool_is_in_slices_when_its_class_is_there() {
    let (server, dir) = (server(37, 37).await, tempfile::tempdir().unwrap());
    let forbidden = server.fail(Fault::Status(403), When::any().resource("deviceclasses"));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(60).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    let refused = daemon.problem(ProblemCode::DeviceClassMissing).unwrap();
    assert!(
        refused.contains("the right to list deviceclasses"),
        "{refused}"
    );
    server.lift(forbidden);
    pass(61).await;
    assert_eq!(
        (daemon.mechanism(), published(&server)),
        (Some(Mechanism::DevicePlugin), Vec::new())
    );
    let missing = daemon.problem(ProblemCode::DeviceClassMissing).unwrap();
    assert!(missing.contains("nodedock get deviceclasses"), "{missing}");

    server.put(manifest(&resource(), &driver()));
    pass(61).await;
    assert_eq!(daemon.problem(ProblemCode::DeviceClassMissing), None);
    assert_eq!(
        (daemon.mechanism(), published(&server)),
        (None, Vec::new()),
        "the bridge has not replaced its lists"
    );
    daemon.bridge(&[]);
    pass(60).await;
    assert_eq!(published(&server), ["a", "b", "c"]);
    let device = &server.list("resourceslices")[0]["spec"]["devices"][0];
    assert_eq!(
        device["attributes"][ATTRIBUTE]["string"], RESOURCE,
        "{device:#}"
    );
    let mut another = manifest(&resource(), &driver());
    another["metadata"] = json!({ "name": "theirs" });
    server.put(another);
    pass(601).await;
    let conflict = daemon.problem(ProblemCode::DeviceClassConflict).unwrap();
    assert!(conflict.contains("DeviceClass theirs"), "{conflict}");
    server.delete("deviceclasses", "", "theirs");
    // What a server without the feature stores.
    server.edit("deviceclasses", "", "example.com-gpu", |class| {
        class["spec"]
            .as_object_mut()
            .unwrap()
            .remove("extendedResourceName");
    });
    pass(61).await;
    let dropped = daemon.problem(ProblemCode::DeviceClassConflict).unwrap();
    assert!(dropped.contains("dropped"), "{dropped}");
    let verbs: BTreeSet<_> = server
        .requests()
        .into_iter()
        .filter(|seen| seen.full_resource().contains("deviceclasses"))
        .map(|seen| seen.verb)
        .collect();
    assert_eq!(verbs.len(), 1, "a node only lists classes: {verbs:?}");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_withdraws_devices_from_the_kubelet_before_they_are_in_slices() {
    let (server, dir) = (server(36, 36).await, tempfile::tempdir().unwrap());
    server.put(manifest(&resource(), &driver()));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(5).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    daemon.bridge(&["a"]);
    set_allocatable(&server, "3");
    upgrade(&server, 37, 36);
    pass(601).await;
    assert_eq!(
        daemon.mechanism(),
        Some(Mechanism::DevicePlugin),
        "the kubelet is older"
    );
    upgrade(&server, 37, 37);
    pass(601).await;
    assert_eq!(daemon.mechanism(), None);
    daemon.bridge(&["a"]);
    pass(60).await;
    assert_eq!(
        (daemon.mechanism(), published(&server).len()),
        (None, 0),
        "the kubelet still has them"
    );
    pass(300).await;
    let waits = daemon
        .problem(ProblemCode::ExtendedResourceWithheld)
        .unwrap();
    assert!(waits.contains("still has 3 example.com/gpu"), "{waits}");
    set_allocatable(&server, "0");
    pass(31).await;
    assert_eq!(
        (daemon.mechanism(), published(&server)),
        (Some(Mechanism::Dra), vec!["b".to_owned(), "c".to_owned()])
    );
    assert_eq!(daemon.problem(ProblemCode::ExtendedResourceWithheld), None);
    daemon.stop().await;

    // The API server is gone when the daemon starts again: all stays as it was decided.
    let away = server.fail(Fault::Away, When::any());
    let daemon = Daemon::start_after(&server, dir.path(), MechanismSetting::Auto, &["a"]).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::Dra));
    pass(700).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::Dra));
    server.lift(away);
    pass(60).await;
    assert_eq!(
        published(&server),
        ["b", "c"],
        "a pod still has it from the device manager"
    );
    daemon.bridge(&[]);
    pass(5).await;
    assert_eq!(published(&server), ["a", "b", "c"]);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_way_back_waits_for_slices_and_claims() {
    let (server, dir) = (server(37, 37).await, tempfile::tempdir().unwrap());
    server.put(manifest(&resource(), &driver()));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(5).await;
    daemon.bridge(&[]);
    pass(5).await;
    assert_eq!(published(&server).len(), 3);
    daemon.stop().await;

    server.allocate_claim(claim(&["b"]));
    let refused = server.fail(Fault::Away, When::any().verb("delete"));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::DevicePlugin).await;
    pass(60).await;
    assert_eq!(
        (daemon.mechanism(), published(&server).len()),
        (None, 3),
        "the slices cannot be deleted"
    );
    server.lift(refused);
    pass(31).await;
    assert_eq!(
        (daemon.mechanism(), published(&server).len()),
        (None, 0),
        "the scheduler may still allocate one"
    );
    pass(60).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    let claimed = |daemon: &Daemon| {
        let is_claimed = |device: &&str| {
            daemon.handle.view().mechanisms.is_claimed(
                &driver(),
                &key().pool,
                &device.parse().unwrap(),
            )
        };
        ["a", "b", "c"]
            .into_iter()
            .filter(is_claimed)
            .collect::<Vec<_>>()
    };
    assert_eq!(claimed(&daemon), ["b"]);
    daemon.stop().await;
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::DevicePlugin).await;
    assert_eq!(claimed(&daemon), ["b"], "after a restart as well");
    server.deallocate_claim("default", "claim");
    pass(601).await;
    assert_eq!(claimed(&daemon), Vec::<&str>::new());
    server.forget_requests();
    pass(300).await;
    let lists = server
        .requests()
        .into_iter()
        .filter(|seen| seen.full_resource() == "resourceclaims");
    assert_eq!(lists.count(), 0, "claims are listed during a switch only");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_offered_on_a_new_node_before_the_cluster_was_read() {
    let (server, dir) = (server(37, 36).await, tempfile::tempdir().unwrap());
    let away = server.fail(Fault::Away, When::any());
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(60).await;
    let mechanisms = daemon.handle.view().mechanisms;
    assert_eq!((daemon.mechanism(), &mechanisms.decision), (None, &None));
    let status = mechanisms.pools[&key()].clone();
    assert_eq!(status.waits_for, "the versions of API server and kubelet");
    server.lift(away);
    pass(60).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    daemon.stop().await;
}

#[tokio::test]
async fn a_node_is_new_only_without_a_record_and_while_the_checkpoint_takes_writes() {
    let dir = tempfile::tempdir().unwrap();
    let opened = checkpoint::open(&dir.path().join("checkpoint.db")).unwrap();
    let checkpoint = opened.checkpoint;
    let is_new = async |record, is_unreadable| {
        load(checkpoint.clone(), record, is_unreadable)
            .await
            .switch
            .is_new_node
    };
    assert!(!is_new(None, true).await, "a record is unreadable");
    let stored = || checkpoint::read(&dir.path().join("checkpoint.db")).unwrap();
    assert_eq!(stored().mechanisms, None);
    assert!(is_new(None, false).await);
    let record = stored().mechanisms;
    assert_eq!(record, Some(MechanismsRecord::default()));
    assert!(!is_new(record, false).await);
    checkpoint.close().await;
    assert!(
        !is_new(None, false).await,
        "the next start would not know that slices were written"
    );
}
