//! A manager on a real checkpoint and a real CDI directory, with fake drivers, device plugins and claim sources.

mod fakes;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::cdi::{CdiDir, FileAccess};
use crate::cdi_watch;
use crate::checkpoint::tests::{Disk, open_on};
use crate::checkpoint::{self, Checkpoint, Opened};
use crate::device_metadata::MetadataSettings;
use crate::driver::{ClaimDriver, Driver, DriverIdentity, NodeFacts, Published, StoredDrivers};
use crate::hardware::Hardware;
use crate::manager::claims::fixtures::{claim, driver, name, pod};
use crate::manager::claims::{ClaimEnd, PodSelector, ReleaseRequest};
use crate::manager::devices::fixtures::resource;
use crate::manager::devices::{PluginId, ResourceOutcome, ResourceView};
use crate::manager::{
    Manager, ManagerParts, ManagerSettings, PodOutcome, PodResource, pool_claims,
};
use crate::records::table::ClaimTable;
use crate::records::{RecordedValues, SharedClaimTable};
use crate::registry::{DriverState, Registry};
use crate::sysfs::SysfsTree;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Caller, Claim, ClaimRecord, ClaimReference, ClaimState, ContainerClaim, ContainerKind,
    DriverKind, DriverName, Hold, KubeletDevice, ObjectName, ObjectRef, PluginDevice, PodContainer,
    PodRequest, PoolNames, Problem, ReleaseRecord,
};

pub(crate) use fakes::{FakeDriver, FakePlugin, FakeSource, PluginCalls, Preference, Reply};

pub(crate) const GRACE: Duration = Duration::from_secs(300);
pub(crate) const DEADLINE: Duration = Duration::from_secs(45);

/// The directory of a daemon, which outlives it.
pub(crate) struct Home(tempfile::TempDir);

pub(crate) struct Daemon {
    pub(crate) starts: Starts,
    pub(crate) manager: Arc<Manager>,
    pub(crate) claims: Arc<SharedClaimTable>,
    pub(crate) values: Arc<RecordedValues>,
    pub(crate) registry: Registry,
    pub(crate) changes: Changes,
    pub(crate) conditions: Conditions,
    checkpoint: Checkpoint,
    tasks: Tasks,
    pub(crate) source: Arc<FakeSource>,
    pub(crate) cdi: PathBuf,
}

/// A daemon that serves the driver `gpu`, and the pod `a`.
pub(crate) fn with_gpu() -> (Home, Daemon, ObjectRef, Arc<FakeDriver>) {
    let (home, gpu) = (Home::new(), FakeDriver::new(driver("gpu")));
    let daemon = home.start();
    daemon.serve(&gpu);
    (home, daemon, pod("a"), gpu)
}

/// The same with the claim `one` of the device 0 for the pod.
pub(crate) fn with_claim() -> (Home, Daemon, ObjectRef, Arc<FakeDriver>) {
    let (home, daemon, a, gpu) = with_gpu();
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    (home, daemon, a, gpu)
}

/// The same with the claim prepared.
pub(crate) async fn with_prepared() -> (Home, Daemon, ObjectRef, Arc<FakeDriver>) {
    let (home, daemon, a, gpu) = with_claim();
    daemon.prepare(&a, &["one"]).await;
    (home, daemon, a, gpu)
}

/// A daemon that serves the drivers `gpu` and `nic`, and the claim `both` of a device of each for the pod `a`.
pub(crate) fn with_two_drivers() -> (Home, Daemon, ObjectRef, Arc<FakeDriver>, Arc<FakeDriver>) {
    let (home, daemon, a, gpu) = with_gpu();
    let nic = FakeDriver::new(driver("nic"));
    daemon.serve(&nic);
    daemon.source.put(claim("both", &["gpu/0", "nic/0"], &[&a]));
    (home, daemon, a, gpu, nic)
}

impl Home {
    pub(crate) fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(home.sys()).unwrap();
        home
    }

    pub(crate) fn checkpoint_path(&self) -> PathBuf {
        self.0.path().join("checkpoint.db")
    }

    /// Makes a claim's record unreadable for this release, while no daemon runs.
    pub(crate) fn make_unreadable(&self, uid: &str) {
        let database = rusqlite::Connection::open(self.checkpoint_path()).unwrap();
        let update = "UPDATE records SET version = 255 WHERE kind = 'claims' AND key = ?1";
        assert_eq!(database.execute(update, [uid]).unwrap(), 1);
    }

    /// The node itself, or the machine that a test has recorded here.
    fn hardware(&self) -> Hardware {
        match self.0.path().join("dev").exists() {
            true => Hardware::simulated(self.0.path()),
            false => Hardware::of_node(),
        }
    }

    /// Records a character device and the directory of its device below `/sys/devices`, before a daemon starts.
    pub(crate) fn record_node(&self, path: &str, minor: u32, directory: &str) {
        let root = self.0.path();
        let (node, device) = (
            root.join(path.trim_start_matches('/')),
            root.join("sys/devices").join(directory),
        );
        std::fs::create_dir_all(node.parent().unwrap()).unwrap();
        std::fs::write(node, format!("character 226:{minor}")).unwrap();
        std::fs::create_dir_all(device).unwrap();
        std::fs::create_dir_all(root.join("sys/dev/char")).unwrap();
        let link = root.join(format!("sys/dev/char/226:{minor}"));
        std::os::unix::fs::symlink(format!("../../devices/{directory}"), link).unwrap();
    }

    /// The directory used as `/sys`.
    pub(crate) fn sys(&self) -> PathBuf {
        self.0.path().join("sys")
    }

    pub(crate) fn start(&self) -> Daemon {
        self.start_in("boot-1")
    }

    /// Starts without the tasks that need no request; see `Daemon::start_tasks`.
    pub(crate) fn start_in(&self, boot_id: &str) -> Daemon {
        self.start_with(boot_id, Duration::from_secs(3600))
    }

    /// The same, with a prepare that does not wait for a device.
    pub(crate) fn start_at_once(&self) -> Daemon {
        self.start_with("boot-1", Duration::ZERO)
    }

    /// The same, with a bound for the wait of a prepare for a device.
    pub(crate) fn start_with(&self, boot_id: &str, exclusive_wait: Duration) -> Daemon {
        self.start_storing(boot_id, exclusive_wait, None)
    }

    /// The same, with previous versions of drivers.
    pub(crate) fn start_storing(
        &self,
        boot_id: &str,
        exclusive_wait: Duration,
        stored: Option<Arc<dyn StoredDrivers>>,
    ) -> Daemon {
        self.open(boot_id, exclusive_wait, stored, false)
    }

    /// Starts as `start_in`, with metadata files below `metadata`.
    pub(crate) fn start_with_metadata(&self, boot_id: &str) -> Daemon {
        self.open(boot_id, Duration::from_secs(3600), None, true)
    }

    /// Starts with a prepare that does not wait for a device, and the checkpoint on a disk that fails on request.
    pub(crate) fn start_on(&self, disk: &Disk) -> Daemon {
        self.start_from(open_on(disk), "boot-1", Duration::ZERO, None, false)
    }

    /// The directory of metadata files.
    pub(crate) fn metadata(&self) -> PathBuf {
        self.0.path().join("metadata")
    }

    fn open(
        &self,
        boot_id: &str,
        exclusive_wait: Duration,
        stored: Option<Arc<dyn StoredDrivers>>,
        has_metadata: bool,
    ) -> Daemon {
        let opened = checkpoint::open(&self.checkpoint_path()).unwrap();
        self.start_from(opened, boot_id, exclusive_wait, stored, has_metadata)
    }

    fn start_from(
        &self,
        opened: Opened,
        boot_id: &str,
        exclusive_wait: Duration,
        stored: Option<Arc<dyn StoredDrivers>>,
        has_metadata: bool,
    ) -> Daemon {
        let unreadable = opened.dump.unreadable_claims();
        let claims =
            ClaimTable::new(opened.dump.claims, opened.dump.pods).with_unreadable(unreadable);
        let claims = claims
            .with_released(opened.dump.released)
            .with_ended(opened.dump.ended);
        let (source, changes, tasks) = (
            Arc::new(FakeSource::new()),
            Changes::default(),
            Tasks::new(),
        );
        let sys = SysfsTree::new(crate::sysfs::SysfsRoot::open(&self.sys()).unwrap());
        let values =
            RecordedValues::new(opened.dump.values, boot_id, opened.checkpoint.clone(), sys);
        let cdi = self.0.path().join("cdi");
        let claims = Arc::new(SharedClaimTable::new(claims));
        let values = Arc::new(values);
        let registry = Registry::new(changes.clone(), Conditions::default(), stored);
        let conditions = Conditions::new(changes.clone());
        let checkpoint = opened.checkpoint;
        let manager = Manager::new(ManagerParts {
            adapters: None,
            claims: claims.clone(),
            checkpoint: checkpoint.clone(),
            values: values.clone(),
            cdi: CdiDir::open(&cdi, &[], "test").unwrap(),
            registry: registry.clone(),
            source: source.clone(),
            settings: ManagerSettings {
                node: NodeFacts {
                    name: "node-1".to_owned(),
                    boot_id: boot_id.to_owned(),
                },
                exclusive_wait,
                call_deadline: DEADLINE,
                pre_start_deadline: Duration::from_secs(30),
                resource_grace: GRACE,
                numa_nodes: vec![0, 1],
                metadata: MetadataSettings {
                    is_enabled: has_metadata,
                    directory: self.metadata(),
                    access: FileAccess::default(),
                    pools: PoolNames {
                        node: ObjectName::new("node-1").unwrap(),
                    },
                },
                kubelet_allocates: false,
                hardware: self.hardware(),
            },
            conditions: conditions.clone(),
            changes: changes.clone(),
            tasks: tasks.clone(),
        });
        let starts = Starts {
            manager: manager.clone(),
            tasks: tasks.clone(),
            cdi: cdi.clone(),
        };
        Daemon {
            starts,
            manager,
            claims,
            values,
            registry,
            changes,
            conditions,
            checkpoint,
            tasks,
            source,
            cdi,
        }
    }
}

/// Starts the tasks of a manager.
pub(crate) struct Starts {
    manager: Arc<Manager>,
    tasks: Tasks,
    cdi: PathBuf,
}

impl Starts {
    /// Starts all tasks that need no request.
    pub(crate) fn all(&self) {
        let (sender, events) = mpsc::channel(16);
        self.tasks.spawn(
            "cdi-watch",
            cdi_watch::watch(self.cdi.clone(), self.tasks.clone(), sender),
        );
        self.manager.start(events);
    }

    /// Starts the task that finishes unprepares, and none that checks files periodically: with a paused clock those fire while the
    /// checkpoint's thread writes.
    pub(crate) fn unprepares(&self) {
        let work = self.manager.unfinished.clone().resume_unprepares();
        self.tasks.spawn("resume-unprepare", work);
    }

    /// Starts the task that follows changes of drivers.
    pub(crate) fn driver_changes(&self) {
        let work = self.manager.driver_changes.clone().follow_drivers();
        self.tasks.spawn("driver-changes", work);
    }

    /// Starts the tasks of extended resources.
    pub(crate) fn devices(&self) {
        let devices = &self.manager.devices;
        self.tasks
            .spawn("device-pools", devices.clone().follow_pools());
        self.tasks
            .spawn("device-grace", devices.clone().end_grace());
        self.tasks
            .spawn("device-changes", devices.clone().report_changes());
    }

    /// Starts the task that reports plugins that are gone.
    pub(crate) fn gone_plugins(&self) {
        let work = self.manager.devices.clone().report_gone_plugins();
        self.tasks.spawn("gone-plugins", work);
    }
}

/// Names and lifecycle.
impl Daemon {
    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    pub(crate) fn commits(&self) -> u64 {
        self.checkpoint().metrics().durable.get()
    }

    pub(crate) fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Waits for requests under way, then closes the checkpoint.
    pub(crate) async fn stop(self) {
        assert!(self.tasks().drain(Duration::from_secs(3600)).await);
        self.checkpoint().close().await;
    }

    /// Closes the checkpoint: it accepts no commit any more, while calls of drivers and plugins continue.
    pub(crate) async fn crash(&self) {
        self.checkpoint().close().await;
    }

    /// Code and subject of each condition.
    pub(crate) fn conditions(&self) -> Vec<(String, String)> {
        self.conditions
            .list()
            .into_iter()
            .map(|c| (c.problem.code, c.subject))
            .collect()
    }

    pub(crate) fn condition_codes(&self) -> Vec<String> {
        self.conditions()
            .into_iter()
            .map(|(code, _)| code)
            .collect()
    }

    /// Waits until exactly these conditions are set, by code and subject.
    pub(crate) async fn until_conditions(&self, wanted: &[(&str, &str)]) {
        let mut changes = self.changes.listen();
        let is_wanted = || {
            let conditions = self.conditions();
            let conditions = conditions
                .iter()
                .map(|(code, subject)| (code.as_str(), subject.as_str()));
            conditions.eq(wanted.iter().copied())
        };
        while !is_wanted() {
            changes.recv().await.unwrap();
        }
    }
}

/// Drivers and plugins.
impl Daemon {
    /// Serves a driver.
    pub(crate) fn serve(&self, driver: &Arc<FakeDriver>) {
        self.serve_as(driver, DriverKind::Wasm);
    }

    pub(crate) fn serve_as(&self, driver: &Arc<FakeDriver>, kind: DriverKind) {
        self.serve_any(
            &driver.name,
            kind,
            Some(driver.clone()),
            driver.inventory(),
            "sha256:00",
        );
    }

    /// Serves a version of a driver, by the digest of its file.
    pub(crate) fn serve_version(&self, driver: &Arc<FakeDriver>, digest: &str) {
        let (claims, inventory) = (
            Some(driver.clone() as Arc<dyn ClaimDriver>),
            driver.inventory(),
        );
        self.serve_any(&driver.name, DriverKind::Wasm, claims, inventory, digest);
        self.registry.sources.report_devices(&driver.name);
    }

    pub(crate) fn serve_any(
        &self,
        name: &DriverName,
        kind: DriverKind,
        claims: Option<Arc<dyn ClaimDriver>>,
        inventory: Option<watch::Receiver<Arc<Published>>>,
        digest: &str,
    ) {
        let identity = DriverIdentity {
            name: name.clone(),
            kind,
            version: "1.0.0".to_owned(),
            digest: digest.to_owned(),
            source: name.to_string(),
            summary: String::new(),
        };
        let driver = Driver {
            identity: Arc::new(identity),
            claims,
            inventory,
        };
        self.registry.serve(name.as_str(), driver).unwrap();
    }

    /// A driver's file whose name is not known is in this state.
    pub(crate) fn loads(&self, source: &str, state: DriverState) {
        self.registry
            .sources
            .update(DriverKind::Wasm, source, |view| view.state = state);
    }

    pub(crate) fn retire(&self, driver: &FakeDriver) {
        self.registry.retire(driver.name.as_str());
    }

    /// Registers a plugin of `example.com/SHORT`, which lists these devices.
    pub(crate) fn plug(
        &self,
        short: &str,
        plugin: &Arc<FakePlugin>,
        listed: &[PluginDevice],
    ) -> PluginId {
        let socket = format!("/{short}.sock").into();
        let id = self
            .manager
            .devices
            .plugin_arrived(resource(short), socket, plugin.clone());
        self.manager.devices.plugin_listed(&id, listed);
        id
    }
}

/// Requests.
impl Daemon {
    pub(crate) async fn prepare(&self, pod: &ObjectRef, claims: &[&str]) -> PodOutcome {
        self.prepare_request(request(pod, claims), vec![]).await
    }

    pub(crate) async fn prepare_request(
        &self,
        request: PodRequest,
        inline: Vec<Claim>,
    ) -> PodOutcome {
        self.manager
            .pods
            .prepare(request, inline, "test".into())
            .await
    }

    pub(crate) async fn unprepare_outcomes(&self, pod: &ObjectRef) -> Vec<PodOutcome> {
        let selector = PodSelector::Uid(pod.uid.clone());
        self.manager
            .pods
            .unprepare(selector, "test".into())
            .await
            .unwrap()
    }

    pub(crate) async fn unprepare(&self, pod: &ObjectRef) -> Vec<Result<ClaimEnd, Problem>> {
        let outcomes = self.unprepare_outcomes(pod).await;
        outcomes
            .into_iter()
            .flat_map(|outcome| outcome.claims)
            .map(|claim| claim.end)
            .collect()
    }

    /// A kubelet prepares a driver's part.
    pub(crate) async fn kubelet_prepare(
        &self,
        driver: &DriverName,
        claim: &Claim,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        self.manager
            .kubelet
            .prepare(driver, &claim.id, "test".into())
            .await
    }

    pub(crate) async fn kubelet_unprepare(
        &self,
        driver: &DriverName,
        claim: &Claim,
    ) -> Result<(), Problem> {
        self.manager
            .kubelet
            .unprepare(driver, &claim.id, "test".into())
            .await
    }

    /// An operator releases a claim by force.
    pub(crate) async fn release(&self, claim: &str) -> Result<ReleaseRecord, Problem> {
        self.manager
            .releases
            .release(release_request(claim), "test".into())
            .await
            .map(Arc::unwrap_or_clone)
    }

    /// Gives a pod its devices.
    pub(crate) async fn allocate(
        &self,
        short: &str,
        containers: &[PodContainer],
    ) -> Vec<ResourceOutcome> {
        self.allocate_request(device_request(short, containers))
            .await
    }

    pub(crate) async fn allocate_request(&self, request: PodRequest) -> Vec<ResourceOutcome> {
        self.prepare_request(request, Vec::new()).await.resources
    }

    /// Frees the devices of a pod. The first problem, if there is one.
    pub(crate) async fn free(&self, short: &str) -> Result<(), Problem> {
        let outcomes = self.unprepare_outcomes(&pod(short)).await;
        outcomes
            .into_iter()
            .flat_map(|outcome| outcome.resources)
            .try_for_each(|outcome| outcome.end.map(drop))
    }

    /// Returns the extended resources of a pod.
    pub(crate) fn devices_of(&self, short: &str) -> Vec<PodResource> {
        self.manager
            .pods
            .get(pod(short).uid.as_str())
            .map(|view| view.resources)
            .unwrap_or_default()
    }
}

/// State.
impl Daemon {
    pub(crate) fn state(&self, uid: &str) -> Option<ClaimState> {
        let claims = self.manager.records.claims();
        claims
            .into_iter()
            .find(|record| record.id.uid.as_str() == uid)
            .map(|record| record.state)
    }

    /// Returns whether no claim and no pod is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.manager.records.claims().is_empty() && self.manager.pods.list().is_empty()
    }

    /// Waits until a claim is gone.
    pub(crate) async fn gone(&self, uid: &str) {
        let mut changes = self.changes.listen();
        while self.state(uid).is_some() {
            changes.recv().await.unwrap();
        }
    }

    /// Paths of the CDI files, by name.
    pub(crate) fn cdi_files(&self) -> Vec<PathBuf> {
        let mut paths: Vec<_> = std::fs::read_dir(&self.cdi)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        paths.sort();
        paths
    }

    /// Does what the manager does when files of the CDI directory changed, without waiting for events.
    pub(crate) async fn touched(&self, names: &[&str]) {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let found = self.manager.files.claims_of_files(names).await;
        self.manager.files.repair_files(found).await;
    }

    /// Does what the manager does periodically for files.
    pub(crate) async fn sweep(&self) {
        let found = self.manager.files.sweep_files().await;
        self.manager.files.repair_files(found).await;
    }

    pub(crate) fn view(&self, short: &str) -> Option<ResourceView> {
        self.manager
            .devices
            .capacity()
            .resources
            .into_iter()
            .find(|view| view.name == resource(short))
    }

    /// Devices and healthy devices of a resource. None: the resource is unknown.
    pub(crate) fn counts(&self, short: &str) -> Option<(usize, usize)> {
        self.view(short)
            .map(|view| (view.capacity(), view.allocatable()))
    }

    /// Waits until the resources are as wanted.
    pub(crate) async fn until(&self, wanted: impl Fn(&Self) -> bool) {
        let mut changes = self.manager.devices.changes();
        while !wanted(self) {
            changes.changed().await.unwrap();
        }
    }

    /// Lets another claim hold a device `POOL/DEVICE` of the driver `gpu`.
    pub(crate) fn hold(&self, device: &str, by: &ObjectRef) {
        let (pool, name) = pool_claims::split_id(device).unwrap();
        let mut table = self.manager.records.table();
        let mut holding = claim("x", &["gpu/0"], &[]).allocation.unwrap();
        (holding.devices[0].pool, holding.devices[0].device) = (pool, name);
        let new = ClaimRecord::new(by.clone(), ClaimState::Prepared, "boot-1");
        let known = table
            .claim(by.uid.as_str())
            .map(|known| ClaimRecord::clone(known));
        let mut record = known.unwrap_or(ClaimRecord {
            allocation: holding,
            ..new
        });
        record.holds.push(Hold {
            key: format!("{}/{device}", driver("gpu")),
            shared: false,
            driver: None,
            derived: false,
            uses: Vec::new(),
        });
        table.put(Arc::new(record));
    }
}

/// A request of a pod whose container `main` uses all of the claims.
pub(crate) fn request(pod: &ObjectRef, claims: &[&str]) -> PodRequest {
    let reference = |name: &&str| ClaimReference {
        pod_claim_name: (*name).to_owned(),
        claim_name: ObjectName::new(name).unwrap(),
        claim_uid: None,
    };
    let uses = |name: &&str| ContainerClaim {
        pod_claim_name: (*name).to_owned(),
        request: None,
    };
    let container = PodContainer {
        claims: claims.iter().map(uses).collect(),
        ..container("main", ContainerKind::App, &[])
    };
    let claims = claims.iter().map(reference).collect();
    PodRequest {
        pod: pod.clone(),
        pod_group: None,
        claims,
        containers: vec![container],
    }
}

/// A release by root, of the only claim of a name.
pub(crate) fn release_request(claim: &str) -> ReleaseRequest {
    let by = Caller {
        uid: Some(0),
        user: Some("root".to_owned()),
        pid: Some(7),
    };
    ReleaseRequest {
        namespace: name("default"),
        name: name(claim),
        uid: None,
        by,
    }
}

/// A request of a pod without claims.
pub(crate) fn device_request(short: &str, containers: &[PodContainer]) -> PodRequest {
    PodRequest {
        pod: pod(short),
        pod_group: None,
        claims: Vec::new(),
        containers: containers.to_vec(),
    }
}

/// A container that wants so many of each `example.com/SHORT`.
pub(crate) fn container(name: &str, kind: ContainerKind, wants: &[(&str, u32)]) -> PodContainer {
    let resources = wants
        .iter()
        .map(|(short, count)| (resource(short), *count))
        .collect();
    PodContainer {
        name: name.to_owned(),
        kind,
        resources,
        ..PodContainer::default()
    }
}

pub(crate) fn app(wants: &[(&str, u32)]) -> Vec<PodContainer> {
    vec![container("main", ContainerKind::App, wants)]
}

/// The outcome of each claim, or the code of its problem.
pub(crate) fn ends(outcome: &PodOutcome) -> Vec<&str> {
    outcome
        .claims
        .iter()
        .map(|claim| {
            claim
                .end
                .as_ref()
                .map_or_else(|p| p.code.as_str(), |end| end.as_str())
        })
        .collect()
}

/// The devices of each container's resource, or the code of the problem.
pub(crate) fn device_ends(outcomes: &[ResourceOutcome]) -> Vec<String> {
    let end = |outcome: &ResourceOutcome| match &outcome.end {
        Ok(devices) => devices.keys().cloned().collect::<Vec<_>>().join(","),
        Err(problem) => problem.code.clone(),
    };
    outcomes.iter().map(end).collect()
}

pub(crate) fn cdi_devices(outcome: &PodOutcome) -> Vec<String> {
    outcome
        .containers
        .iter()
        .flat_map(|container| container.allocation.cdi_devices.clone())
        .collect()
}

/// Lets other tasks run as long as they can.
pub(crate) async fn settle() {
    for _ in 0..64 {
        tokio::task::yield_now().await;
    }
}
