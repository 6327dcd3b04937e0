//! The task and the writer of slices, with an API server in memory. The bridge is played by the test; the clock is turned.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use nodedock_stand_ins::api_server::{Allocated, ApiServer, Fault, When};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::*;
use crate::client::tests::over;
use crate::drivers::DriverSnapshot;
use crate::facts::Facts;
use crate::pools::PoolNames;
use crate::slices::{FailedDevices, SliceParts, SliceReport, SliceSettings, watch_slices};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::{self, Checkpoint};
use nodedock_core::driver::Published;
use nodedock_model::{Device, DriverName, ExtendedResource, Inventory, Pool, ProblemCode};

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
        Self::start_with(server, dir, setting, &[]).await
    }

    /// `in_use`: the mechanisms by which devices are in use.
    async fn start_with(
        server: &Arc<ApiServer>,
        dir: &Path,
        setting: MechanismSetting,
        in_use: &[Mechanism],
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
        let loaded = LoadedSwitch::new(record);
        let handle = loaded.handle();
        handle.report(|reported| reported.in_use = pools_in_use(in_use));
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
            own_devices: Arc::default(),
            on_unhealthy: Arc::new(|_| {}),
            settings: watch::channel(SliceSettings::default()).1,
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
            checkpoint: checkpoint.clone(),
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
        self.handle.mechanisms().of(&driver(), &key().pool, true)
    }

    /// The bridge has replaced its lists; devices are in use by these mechanisms.
    fn bridge(&self, in_use: &[Mechanism]) {
        let generation = self.handle.mechanisms().generation;
        self.handle.report(|reported| {
            (reported.lists, reported.in_use) = (generation, pools_in_use(in_use));
        });
    }

    fn problem(&self, code: ProblemCode) -> Option<String> {
        let conditions = self.conditions.list().into_iter();
        conditions
            .map(|condition| condition.problem)
            .find(|problem| problem.code == code)
            .map(|found| found.message)
    }
}

fn pools_in_use(by: &[Mechanism]) -> PoolsInUse {
    [(key(), by.iter().copied().collect())].into()
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
async fn class_puts_its_pool_in_slices() {
    let (server, dir) = (server(37, 37).await, tempfile::tempdir().unwrap());
    let forbidden = server.fail(Fault::Status(403), When::any().resource("deviceclasses"));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(5).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    let refused = daemon.problem(ProblemCode::DeviceClassMissing).unwrap();
    assert!(
        refused.contains("the right to list and watch deviceclasses"),
        "{refused}"
    );
    server.lift(forbidden);
    pass(61).await;
    assert_eq!(
        (daemon.mechanism(), published(&server)),
        (Some(Mechanism::DevicePlugin), Vec::new())
    );
    let missing = daemon.problem(ProblemCode::DeviceClassMissing).unwrap();
    assert!(missing.contains("nodedock get classmanifests"), "{missing}");

    server.put(manifest(&resource(), &driver()));
    pass(1).await;
    assert_eq!(daemon.problem(ProblemCode::DeviceClassMissing), None);
    assert_eq!(
        (daemon.mechanism(), published(&server)),
        (None, Vec::new()),
        "the bridge has not replaced its lists"
    );
    daemon.bridge(&[]);
    pass(1).await;
    assert_eq!(published(&server), ["a", "b", "c"]);
    let device = &server.list("resourceslices")[0]["spec"]["devices"][0];
    assert_eq!(
        device["attributes"][ATTRIBUTE]["string"], RESOURCE,
        "{device:#}"
    );
    let mut another = manifest(&resource(), &driver());
    another["metadata"] = json!({ "name": "theirs" });
    server.put(another);
    pass(1).await;
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
    pass(1).await;
    let dropped = daemon.problem(ProblemCode::DeviceClassConflict).unwrap();
    assert!(dropped.contains("dropped"), "{dropped}");
    assert_eq!(daemon.mechanism(), Some(Mechanism::Dra), "it stays");
    let verbs: BTreeSet<_> = server
        .requests()
        .into_iter()
        .filter(|seen| seen.full_resource().contains("deviceclasses"))
        .map(|seen| seen.verb)
        .collect();
    assert_eq!(verbs.into_iter().collect::<Vec<_>>(), ["list", "watch"]);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pool_in_use_moves_when_free() {
    let (server, dir) = (server(36, 36).await, tempfile::tempdir().unwrap());
    server.put(manifest(&resource(), &driver()));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(1).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    daemon.bridge(&[Mechanism::DevicePlugin]);
    upgrade(&server, 37, 36);
    pass(601).await;
    let decided = daemon.handle.mechanisms().decision.clone().unwrap();
    assert_eq!(decided.mechanism, Mechanism::DevicePlugin, "{decided:?}");
    upgrade(&server, 37, 37);
    pass(901).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    let waits = daemon
        .problem(ProblemCode::ExtendedResourceWithheld)
        .unwrap();
    assert!(waits.contains("its devices to be free"), "{waits}");
    daemon.stop().await;

    let in_use = [Mechanism::DevicePlugin];
    let daemon = Daemon::start_with(&server, dir.path(), MechanismSetting::Auto, &in_use).await;
    daemon.bridge(&in_use);
    pass(5).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    daemon.bridge(&[]);
    pass(1).await;
    assert_eq!((daemon.mechanism(), published(&server).len()), (None, 0));
    daemon.bridge(&[]);
    pass(1).await;
    assert_eq!(published(&server), ["a", "b", "c"]);
    daemon.stop().await;

    // The API server is gone when the daemon starts again: all stays as it was decided.
    let away = server.fail(Fault::Away, When::any());
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::Dra));
    pass(700).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::Dra));
    server.lift(away);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pool_leaves_slices_after_its_claims() {
    let (server, dir) = (server(37, 37).await, tempfile::tempdir().unwrap());
    server.put(manifest(&resource(), &driver()));
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(1).await;
    daemon.bridge(&[]);
    pass(1).await;
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
    let unread = server.fail(
        Fault::Away,
        When::any().verb("list").resource("resourceclaims"),
    );
    pass(400).await;
    assert_eq!((daemon.mechanism(), published(&server).len()), (None, 0));
    let withheld = daemon
        .problem(ProblemCode::ExtendedResourceWithheld)
        .unwrap();
    assert!(withheld.contains("a list of the claims"), "{withheld}");
    server.lift(unread);
    pass(60).await;
    assert_eq!(
        (daemon.mechanism(), published(&server).len()),
        (Some(Mechanism::Dra), 3),
        "a claim has a device"
    );
    server.forget_requests();
    pass(3600).await;
    let lists = |server: &ApiServer| {
        let claims = server.requests().into_iter();
        let claims = claims.filter(|seen| seen.full_resource() == "resourceclaims");
        let all = claims.filter(|seen| seen.verb == "list" && seen.namespace.is_empty());
        all.count()
    };
    assert_eq!(lists(&server), 0, "the one claim is watched");
    server.deallocate_claim("default", "claim");
    pass(1).await;
    assert_eq!(
        (daemon.mechanism(), published(&server).len()),
        (Some(Mechanism::DevicePlugin), 0)
    );
    assert_eq!(lists(&server), 1);
    assert_eq!(daemon.problem(ProblemCode::ExtendedResourceWithheld), None);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_offered_before_first_read() {
    let (server, dir) = (server(37, 36).await, tempfile::tempdir().unwrap());
    let away = server.fail(Fault::Away, When::any());
    let daemon = Daemon::start(&server, dir.path(), MechanismSetting::Auto).await;
    pass(400).await;
    let mechanisms = daemon.handle.mechanisms();
    assert_eq!((daemon.mechanism(), &mechanisms.decision), (None, &None));
    let undecided = daemon
        .problem(ProblemCode::ExtendedResourceWithheld)
        .unwrap();
    assert!(
        undecided.contains("the versions of API server and kubelet"),
        "{undecided}"
    );
    server.lift(away);
    pass(60).await;
    assert_eq!(daemon.mechanism(), Some(Mechanism::DevicePlugin));
    daemon.stop().await;
}
