//! A manager on a real checkpoint, with plugins, pools and claims that do as they are told.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use super::super::fixtures::{pod, resource, uid};
use super::super::{
    DeviceHolders, DeviceParts, DeviceSettings, Devices, PluginId, ResourceOutcome, ResourceView,
};
use crate::checkpoint::{self, Checkpoint};
use crate::driver::{Call, DeviceDriver, DeviceLists, DeviceOptions, Driver, DriverIdentity, Published};
use crate::registry::Registry;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    ContainerAllocation, ContainerKind, DriverKind, DriverName, ObjectRef, PluginDevice, PodContainer,
    PodRequest, Problem,
};

/// What outlives a daemon.
pub(super) struct Home {
    folder: tempfile::TempDir,
}

pub(super) struct Daemon {
    pub(super) devices: Devices,
    pub(super) checkpoint: Checkpoint,
    pub(super) registry: Registry,
    pub(super) holders: Arc<FakeHolders>,
    pub(super) conditions: Conditions,
    pub(super) changes: Changes,
    pub(super) tasks: Tasks,
}

pub(super) const GRACE: Duration = Duration::from_secs(300);
pub(super) const DEADLINE: Duration = Duration::from_secs(45);

impl Home {
    pub(super) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(super) fn checkpoint_path(&self) -> PathBuf {
        self.folder.path().join("checkpoint.redb")
    }

    /// Starts without the tasks that go on without requests; see `Daemon::tend`.
    pub(super) fn start(&self) -> Daemon {
        let opened = checkpoint::open(&self.checkpoint_path()).unwrap();
        let (changes, tasks) = (Changes::default(), Tasks::new());
        let (registry, holders) = (Registry::new(changes.clone()), Arc::new(FakeHolders::default()));
        let conditions = Conditions::new(changes.clone());
        let settings = DeviceSettings {
            call_deadline: DEADLINE,
            pre_start_deadline: Duration::from_secs(30),
            grace: GRACE,
            numa_nodes: vec![0, 1],
            host_root: self.folder.path().to_owned(),
        };
        let devices = Devices::new(DeviceParts {
            records: opened.allocations,
            left: BTreeSet::new(),
            checkpoint: opened.checkpoint.clone(),
            registry: registry.clone(),
            holders: holders.clone(),
            settings,
            changes: changes.clone(),
            conditions: conditions.clone(),
            tasks: tasks.clone(),
        });
        Daemon { devices, checkpoint: opened.checkpoint, registry, holders, conditions, changes, tasks }
    }
}

impl Daemon {
    /// Registers a plugin of `example.com/SHORT`, which lists these devices.
    pub(super) fn plug(&self, short: &str, plugin: &Arc<FakePlugin>, listed: &[PluginDevice]) -> PluginId {
        let id =
            self.devices.plugin_arrived(resource(short), format!("/{short}.sock").into(), plugin.clone());
        self.devices.plugin_listed(&id, listed);
        id
    }

    pub(super) async fn allocate(&self, short: &str, containers: &[PodContainer]) -> Vec<ResourceOutcome> {
        self.devices.allocate(&request(short, containers), &"test".into()).await
    }

    pub(super) async fn free(&self, short: &str) -> Result<(), Problem> {
        self.devices.free(&uid(short)).await
    }

    pub(super) fn view(&self, short: &str) -> Option<ResourceView> {
        self.devices.capacity().resources.into_iter().find(|view| view.name == resource(short))
    }

    /// Devices and healthy devices of a resource; none: nobody knows it.
    pub(super) fn counts(&self, short: &str) -> Option<(usize, usize)> {
        self.view(short).map(|view| (view.capacity(), view.allocatable()))
    }

    pub(super) fn conditions(&self) -> Vec<String> {
        self.conditions.list().into_iter().map(|condition| condition.problem.code).collect()
    }

    /// Starts what goes on without requests.
    pub(super) fn tend(&self) {
        self.devices.start();
    }

    /// Returns when what is known of resources is as wanted.
    pub(super) async fn until(&self, wanted: impl Fn(&Self) -> bool) {
        let mut followed = self.devices.follow();
        while !wanted(self) {
            followed.changed().await.unwrap();
        }
    }

    /// Waits until nobody works on anything, then closes.
    pub(super) async fn stop(self) {
        assert!(self.tasks.drain(Duration::from_secs(3600)).await);
        self.checkpoint.close().await;
    }

    /// The checkpoint takes nothing more from here; what plugins are asked goes on.
    pub(super) async fn crash(&self) {
        self.checkpoint.close().await;
    }

    /// Puts a driver with pools into service.
    pub(super) fn serve(&self, name: &DriverName, published: &watch::Sender<Arc<Published>>) {
        let identity = DriverIdentity {
            name: name.clone(),
            kind: DriverKind::Wasm,
            version: "1.0.0".to_owned(),
            digest: String::new(),
            source: name.to_string(),
            summary: String::new(),
        };
        let driver =
            Driver { identity: Arc::new(identity), claims: None, inventory: Some(published.subscribe()) };
        self.registry.serve(name.as_str(), driver).unwrap();
    }
}

/// A container that wants so many of each `example.com/SHORT`.
pub(super) fn container(name: &str, kind: ContainerKind, wants: &[(&str, u32)]) -> PodContainer {
    let resources = wants.iter().map(|(short, count)| (resource(short), *count)).collect();
    PodContainer { name: name.to_owned(), kind, resources, ..PodContainer::default() }
}

pub(super) fn app(wants: &[(&str, u32)]) -> Vec<PodContainer> {
    vec![container("main", ContainerKind::App, wants)]
}

pub(super) fn request(short: &str, containers: &[PodContainer]) -> PodRequest {
    PodRequest { pod: pod(short), claims: Vec::new(), containers: containers.to_vec() }
}

/// What became of each container's resource: its devices, or the code of the refusal.
pub(super) fn ends(outcomes: &[ResourceOutcome]) -> Vec<String> {
    let end = |outcome: &ResourceOutcome| match &outcome.end {
        Ok(devices) => devices.keys().cloned().collect::<Vec<_>>().join(","),
        Err(problem) => problem.code.clone(),
    };
    outcomes.iter().map(end).collect()
}

/// Claims of others that hold devices.
#[derive(Default)]
pub(super) struct FakeHolders(Mutex<BTreeMap<String, BTreeSet<ObjectRef>>>);

impl FakeHolders {
    pub(super) fn hold(&self, pool_device: &str, claim: &ObjectRef) {
        self.0.lock().unwrap().entry(pool_device.to_owned()).or_default().insert(claim.clone());
    }
}

impl DeviceHolders for FakeHolders {
    fn holders(&self, _: &DriverName, pool: &str, device: &str) -> Vec<ObjectRef> {
        let holders = self.0.lock().unwrap();
        holders.get(&format!("{pool}/{device}")).into_iter().flatten().cloned().collect()
    }
}

/// A preferred allocation's arguments.
pub(super) type Asked = (Vec<String>, Vec<String>, u32);

/// What a plugin was asked.
#[derive(Debug, Default, Clone)]
pub(super) struct Calls {
    pub(super) allocate: Vec<Vec<String>>,
    pub(super) preferred: Vec<Asked>,
    pub(super) pre_start: Vec<Vec<String>>,
}

#[derive(Default)]
pub(super) struct FakePlugin {
    options: Mutex<DeviceOptions>,
    /// What it answers at the next calls of Allocate, before it answers well.
    refusals: Mutex<Vec<Problem>>,
    answer: Mutex<ContainerAllocation>,
    prefers: Mutex<Vec<String>>,
    calls: watch::Sender<Calls>,
    /// Calls wait while it is shut.
    shut: watch::Sender<bool>,
}

impl FakePlugin {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(super) fn preferring(ids: &[&str]) -> Arc<Self> {
        let plugin = Self::new();
        plugin.options.lock().unwrap().preferred_allocation_available = true;
        *plugin.prefers.lock().unwrap() = super::super::fixtures::ids(ids);
        plugin
    }

    pub(super) fn wanting_pre_start() -> Arc<Self> {
        let plugin = Self::new();
        plugin.options.lock().unwrap().pre_start_required = true;
        plugin
    }

    pub(super) fn refuse(&self, problem: Problem) {
        self.refusals.lock().unwrap().push(problem);
    }

    pub(super) fn answer(&self, answer: ContainerAllocation) {
        *self.answer.lock().unwrap() = answer;
    }

    pub(super) fn shut(&self, shut: bool) {
        self.shut.send_replace(shut);
    }

    pub(super) fn calls(&self) -> Calls {
        self.calls.borrow().clone()
    }

    /// Returns when calls have begun.
    pub(super) async fn called(&self, wanted: impl Fn(&Calls) -> bool) {
        self.calls.subscribe().wait_for(wanted).await.unwrap();
    }

    async fn pass(&self) {
        self.shut.subscribe().wait_for(|shut| !*shut).await.unwrap();
    }
}

#[async_trait]
impl DeviceDriver for FakePlugin {
    fn options(&self) -> DeviceOptions {
        *self.options.lock().unwrap()
    }

    async fn list_and_watch(&self, _: &Call) -> Result<DeviceLists, Problem> {
        Err(Problem::internal("not-followed", "tests give lists by themselves"))
    }

    async fn allocate(&self, _: &Call, device_ids: &[String]) -> Result<ContainerAllocation, Problem> {
        self.calls.send_modify(|calls| calls.allocate.push(device_ids.to_vec()));
        self.pass().await;
        match self.refusals.lock().unwrap().pop() {
            Some(problem) => Err(problem),
            None => Ok(self.answer.lock().unwrap().clone()),
        }
    }

    async fn preferred_allocation(
        &self,
        _: &Call,
        available: &[String],
        must_include: &[String],
        size: u32,
    ) -> Result<Vec<String>, Problem> {
        self.calls
            .send_modify(|calls| calls.preferred.push((available.to_vec(), must_include.to_vec(), size)));
        self.pass().await;
        Ok(self.prefers.lock().unwrap().clone())
    }

    async fn pre_start(&self, _: &Call, device_ids: &[String]) -> Result<(), Problem> {
        self.calls.send_modify(|calls| calls.pre_start.push(device_ids.to_vec()));
        self.pass().await;
        Ok(())
    }
}
