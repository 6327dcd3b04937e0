//! A claim manager on a real checkpoint and CDI folder, with a driver and a device manager that do as they are told.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use super::super::allocator::Allocator;
use super::super::{PodOutcome, Pods};
use crate::cdi::{CdiDir, Durability};
use crate::checkpoint;
use crate::claims::source::ClaimFolder;
use crate::claims::{ClaimParts, ClaimSettings, Claims, PodSelector, SharedTable, Values};
use crate::devices::ResourceOutcome;
use crate::driver::{Call, ClaimDriver, Driver, DriverIdentity, NodeFacts, Outcomes};
use crate::registry::Registry;
use crate::sysfs::SysfsTree;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    AllocatedDevice, Allocation, AllocationEntry, Claim, ClaimReference, Consumer, ContainerAllocation,
    ContainerClaim, DeviceAccess, DeviceName, DriverClaim, DriverKind, DriverName, Edits, ExtendedResource,
    LiveClaim, ObjectName, ObjectRef, PodAllocation, PodContainer, PodRequest, PoolName, PooledClaim,
    PreparedClaim, PreparedDevice, Problem, Uid,
};

pub(super) const DRIVER: &str = "gpu.example.com";
/// Of a device plugin, and of a pool of the driver.
pub(super) const PLUGIN: &str = "example.com/nic";
pub(super) const POOL: &str = "example.com/gpu";

pub(super) struct Node {
    pub(super) pods: Pods,
    pub(super) claims: Claims,
    pub(super) devices: Arc<FakeDevices>,
    pub(super) tasks: Tasks,
    registry: Registry,
    _folder: tempfile::TempDir,
}

impl Node {
    pub(super) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let opened = checkpoint::open(&folder.path().join("checkpoint.redb")).unwrap();
        let (registry, tasks, changes) =
            (Registry::new(Changes::default()), Tasks::new(), Changes::default());
        let claims = Claims::new(ClaimParts {
            released: opened.released,
            table: SharedTable::new(opened.claims, opened.pods),
            values: Values::new(
                opened.values,
                "boot-1",
                opened.checkpoint.clone(),
                SysfsTree::open(folder.path()).unwrap(),
            ),
            cdi: CdiDir::open(&folder.path().join("cdi"), "test", Durability::Rendered).unwrap(),
            registry: registry.clone(),
            source: Arc::new(ClaimFolder::new(folder.path().join("claims"))),
            settings: ClaimSettings {
                node: NodeFacts { name: "node-1".to_owned(), boot_id: "boot-1".to_owned() },
                exclusive_wait: Duration::ZERO,
                call_deadline: Duration::from_secs(45),
            },
            changes: changes.clone(),
            conditions: Conditions::new(changes),
            tasks: tasks.clone(),
        });
        let devices = Arc::new(FakeDevices::default());
        let pods = Pods::over(claims.clone(), devices.clone(), tasks.clone());
        let node = Self { pods, claims, devices, tasks, registry, _folder: folder };
        node.driver_comes();
        node
    }

    pub(super) fn driver_comes(&self) {
        let identity = DriverIdentity {
            name: driver(),
            kind: DriverKind::Wasm,
            version: "1.0.0".to_owned(),
            digest: "sha256:00".to_owned(),
            source: DRIVER.to_owned(),
            summary: String::new(),
        };
        let driver =
            Driver { identity: Arc::new(identity), claims: Some(Arc::new(FakeDriver)), inventory: None };
        self.registry.serve(DRIVER, driver).unwrap();
    }

    pub(super) fn driver_goes(&self) {
        self.registry.retire(DRIVER);
    }

    pub(super) async fn prepare(&self, request: &PodRequest, claims: &[Claim]) -> PodOutcome {
        self.pods.prepare_pod(request.clone(), claims.to_vec(), "test".into()).await
    }

    pub(super) async fn unprepare(&self, pod: &ObjectRef) -> Vec<PodOutcome> {
        self.pods.unprepare_pod(PodSelector::Uid(pod.uid.clone()), "test".into()).await.unwrap()
    }

    pub(super) async fn start_container(
        &self,
        pod: &ObjectRef,
        name: &str,
    ) -> Result<super::super::ContainerAnswer, Problem> {
        self.pods.start_container(pod.uid.clone(), name.to_owned(), "test".into()).await
    }
}

fn driver() -> DriverName {
    DriverName::new(DRIVER).unwrap()
}

pub(super) fn resource(name: &str) -> ExtendedResource {
    ExtendedResource::new(name).unwrap()
}

pub(super) fn pod(name: &str) -> ObjectRef {
    ObjectRef::new("default", name, &format!("uid-{name}")).unwrap()
}

/// A pod with one container `main`, its claims under their own names.
pub(super) fn request(pod: &ObjectRef, claims: &[&str], resources: &[(&str, u32)]) -> PodRequest {
    let reference = |name: &&str| ClaimReference {
        pod_claim_name: (*name).to_owned(),
        claim_name: ObjectName::new(name).unwrap(),
        claim_uid: None,
    };
    let uses = |name: &&str| ContainerClaim { pod_claim_name: (*name).to_owned(), request: None };
    let container =
        PodContainer { claims: claims.iter().map(uses).collect(), ..container("main", resources) };
    PodRequest {
        pod: pod.clone(),
        claims: claims.iter().map(reference).collect(),
        containers: vec![container],
    }
}

pub(super) fn container(name: &str, resources: &[(&str, u32)]) -> PodContainer {
    PodContainer {
        name: name.to_owned(),
        resources: resources.iter().map(|(name, count)| (resource(name), *count)).collect(),
        ..PodContainer::default()
    }
}

/// A claim for one device of the pool `pool`, reserved for the pod.
pub(super) fn claim(name: &str, device: &str, pod: &ObjectRef) -> Claim {
    let device = AllocatedDevice {
        request: "r".to_owned(),
        driver: driver(),
        pool: PoolName::new("pool").unwrap(),
        device: DeviceName::new(device).unwrap(),
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
    };
    Claim {
        id: ObjectRef::new("default", name, &format!("claim-{name}")).unwrap(),
        allocation: Some(Allocation { devices: vec![device], ..Allocation::default() }),
        reserved_for: vec![Consumer::of_pod(pod)],
        annotations: BTreeMap::new(),
        owner_pod: None,
    }
}

/// The name under which a container gets a device of a claim.
pub(super) fn cdi(claim_uid: &str, device: &str) -> String {
    format!("{DRIVER}/claim={claim_uid}-{device}")
}

/// The UID of the claim that stands for devices of the pool.
pub(super) fn pooled_uid(pod: &ObjectRef, container: &str) -> String {
    format!("pooled-{}-{container}", pod.uid)
}

/// Prepares whatever it is asked for.
struct FakeDriver;

#[async_trait]
impl ClaimDriver for FakeDriver {
    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let device = |device: &AllocatedDevice| PreparedDevice {
            requests: Vec::new(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: None,
            access: DeviceAccess::Edits(Edits {
                env: vec![("GPU".to_owned(), device.device.to_string())],
                ..Edits::default()
            }),
            status: None,
        };
        let prepared = |claim: &DriverClaim| PreparedClaim {
            devices: claim.devices.iter().map(device).collect(),
            annotations: BTreeMap::from([("by".to_owned(), "claim".to_owned())]),
            ..PreparedClaim::default()
        };
        claims.iter().map(|claim| (claim.id.uid.clone(), Ok(prepared(claim)))).collect()
    }

    async fn unprepare(&self, _: &Call, claims: &[LiveClaim]) -> Outcomes<()> {
        claims.iter().map(|live| (live.claim.id.uid.clone(), Ok(()))).collect()
    }
}

/// Gives what was laid out for it.
pub(super) struct FakeDevices {
    state: Mutex<State>,
    pub(super) calls: watch::Sender<Vec<String>>,
    /// `allocate` waits while it is shut.
    pub(super) open: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    records: BTreeMap<Uid, Arc<PodAllocation>>,
    /// What the plugin answers.
    response: Option<ContainerAllocation>,
    /// Devices of the pool, as they will be chosen.
    choices: VecDeque<Result<String, Problem>>,
    refuse_plugin: Option<Problem>,
    refuse_free: Option<Problem>,
    refuse_start: Option<Problem>,
    silent: bool,
    panics: bool,
}

impl Default for FakeDevices {
    fn default() -> Self {
        Self { state: Mutex::default(), calls: watch::Sender::default(), open: watch::Sender::new(true) }
    }
}

impl FakeDevices {
    fn told(&self, call: &str) {
        self.calls.send_modify(|calls| calls.push(call.to_owned()));
    }

    pub(super) fn count(&self, call: &str) -> usize {
        self.calls.borrow().iter().filter(|known| *known == call).count()
    }

    pub(super) fn respond(&self, response: ContainerAllocation) {
        self.state.lock().unwrap().response = Some(response);
    }

    pub(super) fn choose(&self, devices: &[&str]) {
        let choices = devices.iter().map(|device| Ok((*device).to_owned()));
        self.state.lock().unwrap().choices.extend(choices);
    }

    pub(super) fn choose_nothing(&self, problem: Problem) {
        self.state.lock().unwrap().choices.push_back(Err(problem));
    }

    pub(super) fn refuse_plugin(&self, problem: Option<Problem>) {
        self.state.lock().unwrap().refuse_plugin = problem;
    }

    pub(super) fn refuse_free(&self, problem: Option<Problem>) {
        self.state.lock().unwrap().refuse_free = problem;
    }

    pub(super) fn refuse_start(&self, problem: Option<Problem>) {
        self.state.lock().unwrap().refuse_start = problem;
    }

    pub(super) fn fall_silent(&self) {
        self.state.lock().unwrap().silent = true;
    }

    pub(super) fn panic(&self) {
        self.state.lock().unwrap().panics = true;
    }

    /// A plugin was asked, and the daemon died before its answer.
    pub(super) fn forget_response(&self, pod: &ObjectRef) {
        let mut state = self.state.lock().unwrap();
        let record = state.records.get_mut(&pod.uid).unwrap();
        Arc::make_mut(record).entries.iter_mut().for_each(|entry| entry.response = None);
    }
}

impl State {
    fn entry(
        &mut self,
        pod: &ObjectRef,
        container: &PodContainer,
        name: &ExtendedResource,
    ) -> Result<AllocationEntry, Problem> {
        let bare = |devices: BTreeMap<String, Vec<u32>>| AllocationEntry {
            container: container.name.clone(),
            kind: container.kind,
            resource: name.clone(),
            devices,
            claim: None,
            response: None,
            pre_start: true,
            unknown: BTreeMap::new(),
        };
        if name.as_str() == PLUGIN {
            if let Some(problem) = &self.refuse_plugin {
                return Err(problem.clone());
            }
            let entry = bare(BTreeMap::from([("nic-0".to_owned(), vec![1])]));
            return Ok(AllocationEntry {
                response: Some(self.response.clone().unwrap_or_default()),
                ..entry
            });
        }
        let device = self.choices.pop_front().expect("a choice was laid out")?;
        let id =
            ObjectRef::new("default", &format!("p-{}", container.name), &pooled_uid(pod, &container.name));
        let claim = PooledClaim { driver: driver(), id: id.unwrap() };
        Ok(AllocationEntry { claim: Some(claim), ..bare(BTreeMap::from([(device, vec![0])])) })
    }
}

#[async_trait]
impl Allocator for FakeDevices {
    async fn allocate(&self, request: &PodRequest, _: &Arc<str>) -> Vec<ResourceOutcome> {
        self.told("allocate");
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        let mut state = self.state.lock().unwrap();
        assert!(!state.panics, "a panic that was asked for");
        if state.silent {
            return Vec::new();
        }
        let empty = || PodAllocation {
            pod: request.pod.clone(),
            entries: Vec::new(),
            since_ms: 0,
            unknown: BTreeMap::new(),
        };
        let mut record =
            state.records.get(&request.pod.uid).map_or_else(empty, |known| PodAllocation::clone(known));
        let mut outcomes = Vec::new();
        for container in &request.containers {
            for name in container.resources.keys() {
                let end = match record.entry(&container.name, name) {
                    Some(known) => Ok(known.devices.clone()),
                    None => state.entry(&request.pod, container, name).map(|entry| {
                        record.entries.push(entry.clone());
                        entry.devices
                    }),
                };
                let (container, resource) = (container.name.clone(), name.clone());
                outcomes.push(ResourceOutcome { container, resource, end });
            }
        }
        state.records.insert(request.pod.uid.clone(), Arc::new(record));
        outcomes
    }

    async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        _: &Arc<str>,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
        self.told("reallocate");
        let mut state = self.state.lock().unwrap();
        let chosen = state.choices.pop_front().expect("a choice was laid out");
        let chosen = chosen.map(|device| BTreeMap::from([(device, vec![0])]));
        let entries = &mut Arc::make_mut(state.records.get_mut(pod).unwrap()).entries;
        let is_of = |e: &AllocationEntry| e.container == container && e.resource == *resource;
        match &chosen {
            Ok(devices) => {
                entries.iter_mut().filter(|e| is_of(e)).for_each(|e| e.devices = devices.clone());
            }
            Err(_) => entries.retain(|e| !is_of(e)),
        }
        chosen
    }

    async fn free(&self, pod: &Uid) -> Result<(), Problem> {
        self.told("free");
        let mut state = self.state.lock().unwrap();
        if let Some(problem) = &state.refuse_free {
            return Err(problem.clone());
        }
        state.records.remove(pod);
        Ok(())
    }

    async fn pre_start(&self, _: &Uid, container: &str, _: &Arc<str>) -> Result<(), Problem> {
        self.told(&format!("pre_start {container}"));
        self.state.lock().unwrap().refuse_start.clone().map_or(Ok(()), Err)
    }

    fn allocation(&self, pod: &str) -> Option<Arc<PodAllocation>> {
        self.state.lock().unwrap().records.get(pod).cloned()
    }

    fn allocations(&self) -> Vec<Arc<PodAllocation>> {
        self.state.lock().unwrap().records.values().cloned().collect()
    }
}
