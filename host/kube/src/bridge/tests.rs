//! The bridge on the real managers, with drivers that are fakes, and on its sockets clients that do what a kubelet does.

mod allocations;
mod claims;
mod health;
mod plugins;
mod resources;
mod sockets;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use nodedock_proto::kubelet::registration as wire;
use tokio::sync::{Notify, mpsc, watch};
use tonic::Status;
use tonic::transport::Channel;
use wire::registration_client::RegistrationClient;

use super::*;
use crate::events::Refusal;
use crate::extended_resources::Mechanism;
use crate::pools::PoolNames;
use nodedock_base::socket::connect;
use nodedock_core::cdi::{CdiDir, FileAccess};
use nodedock_core::checkpoint::{self, Change};
use nodedock_core::device_metadata::MetadataSettings;
use nodedock_core::driver::{
    Call, ClaimDriver, Driver, DriverIdentity, NodeFacts, Outcomes, Published,
};
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::manager::{Manager, ManagerParts, ManagerSettings};
use nodedock_core::records::RecordedValues;
use nodedock_core::records::SharedClaimTable;
use nodedock_core::records::table::ClaimTable;
use nodedock_core::registry::DriverState;
use nodedock_core::sysfs::SysfsTree;
use nodedock_model::{
    AllocatedDevice, Allocation, Claim, Consumer, Device, DeviceAccess, DeviceHealth, DeviceName,
    DriverClaim, DriverClaimRecord, DriverKind, Edits, HealthReport, HealthState, Inventory,
    ObjectRef, Pool, PoolName, PreparedClaim, PreparedDevice,
};

const GPU: &str = "gpu.example.com";
const NIC: &str = "nic.example.com";
/// The process start in the names of sockets.
const START: &str = "start1";
/// Longer than any of it takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(20);

fn name(driver: &str) -> DriverName {
    DriverName::new(driver).unwrap()
}

fn source(driver: &str) -> String {
    format!("{driver}.wasm")
}

fn resource() -> ExtendedResource {
    ExtendedResource::new("example.com/gpu").unwrap()
}

/// Devices of one pool, each healthy, unhealthy or of no reported state, with a message.
fn published<'a>(
    pool: &str,
    extended_resource: Option<ExtendedResource>,
    devices: impl IntoIterator<Item = (String, Option<bool>, &'a str)>,
) -> Published {
    let name = PoolName::new(pool).unwrap();
    let (mut pool, mut health) = (
        Pool {
            extended_resource,
            ..Pool::default()
        },
        HealthReport::new(),
    );
    for (device, is_healthy, message) in devices {
        let device = DeviceName::new(device).unwrap();
        pool.devices.insert(device.clone(), Device::default());
        let Some(is_healthy) = is_healthy else {
            continue;
        };
        let state = if is_healthy {
            HealthState::Healthy
        } else {
            HealthState::Unhealthy
        };
        health.insert(
            (name.clone(), device),
            DeviceHealth {
                state,
                message: message.to_owned(),
            },
        );
    }
    Published {
        inventory: Inventory {
            pools: [(name, pool)].into(),
        },
        health,
        ..Published::default()
    }
}

/// A kubelet's root, and the managers of a daemon.
struct Node {
    dir: tempfile::TempDir,
    checkpoint: Checkpoint,
    manager: Arc<Manager>,
    registry: Registry,
    source: Arc<FakeSource>,
    driver: Arc<FakeDriver>,
    /// Published devices of the driver, while it serves.
    published: Mutex<Option<watch::Sender<Arc<Published>>>>,
    refusals: Arc<Mutex<Vec<String>>>,
    changes: Changes,
    conditions: Conditions,
    tasks: Tasks,
}

impl Node {
    /// A resource goes with its driver.
    fn new() -> Self {
        Self::with_grace(Duration::ZERO)
    }

    /// A resource stays for so long when its driver is gone.
    fn with_grace(grace: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for path in ["kubelet/device-plugins", "kubelet/pod-resources", "sys"] {
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let (changes, tasks, source) = (
            Changes::default(),
            Tasks::new(),
            Arc::<FakeSource>::default(),
        );
        let (conditions, registry) = (
            Conditions::default(),
            Registry::new(changes.clone(), Conditions::default(), None),
        );
        let opened = checkpoint::open(&dir.path().join("checkpoint.db")).unwrap();
        let sys =
            SysfsTree::new(nodedock_core::sysfs::SysfsRoot::open(&dir.path().join("sys")).unwrap());
        let manager = Manager::new(ManagerParts {
            adapters: None,
            claims: Arc::new(SharedClaimTable::new(
                ClaimTable::new(opened.dump.claims, opened.dump.pods)
                    .with_released(opened.dump.released),
            )),
            checkpoint: opened.checkpoint.clone(),
            values: Arc::new(RecordedValues::new(
                opened.dump.values,
                "boot-1",
                opened.checkpoint.clone(),
                sys,
            )),
            cdi: CdiDir::open(&dir.path().join("cdi"), &[], "test").unwrap(),
            registry: registry.clone(),
            source: source.clone(),
            settings: ManagerSettings {
                node: NodeFacts {
                    name: "node-1".to_owned(),
                    boot_id: "boot-1".to_owned(),
                },
                exclusive_wait: Duration::ZERO,
                call_deadline: Duration::from_secs(45),
                pre_start_deadline: PATIENCE,
                resource_grace: grace,
                numa_nodes: vec![0],
                hardware: nodedock_core::hardware::Hardware::of_node(),
                metadata: MetadataSettings {
                    is_enabled: false,
                    directory: dir.path().join("metadata"),
                    access: FileAccess::default(),
                    pools: PoolNames {
                        node: ObjectName::new("node-1").unwrap(),
                    },
                },
                kubelet_allocates: true,
            },
            changes: changes.clone(),
            conditions: conditions.clone(),
            tasks: tasks.clone(),
        });
        let (_, no_files) = mpsc::channel(1);
        manager.start(no_files);
        let (driver, published, refusals) = Default::default();
        Self {
            dir,
            checkpoint: opened.checkpoint,
            manager,
            registry,
            source,
            driver,
            published,
            refusals,
            changes,
            conditions,
            tasks,
        }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    fn registration(&self, driver: &str) -> PathBuf {
        self.root()
            .join("plugins_registry")
            .join(format!("{driver}-{START}-reg.sock"))
    }

    fn service(&self, driver: &str) -> PathBuf {
        self.root()
            .join("plugins")
            .join(driver)
            .join(format!("dra-{START}.sock"))
    }

    fn parts(&self) -> BridgeParts {
        let refusals = self.refusals.clone();
        BridgeParts {
            root: self.root(),
            listeners: Listeners::of_start(START),
            is_alone: true,
            own_pod: None,
            own_registry: self.dir.path().join("ours"),
            checkpoint: self.checkpoint.clone(),
            offered_before: self.offered(),
            manager: self.manager.clone(),
            registry: self.registry.clone(),
            pools: NodePools {
                names: PoolNames {
                    node: ObjectName::new("node-1").unwrap(),
                },
                registry: self.registry.clone(),
            },
            extended_resources: ExtendedResources::fixed(Mechanism::DevicePlugin),
            source: self.source.clone(),
            on_refused: Arc::new(
                move |Refusal {
                          action,
                          claim,
                          consumers,
                          problem,
                      }| {
                    let (pods, code) = (consumers.len(), &problem.code);
                    refusals
                        .lock()
                        .unwrap()
                        .push(format!("{action} {} of {pods} pods: {code}", claim.name));
                },
            ),
            changes: self.changes.clone(),
            conditions: self.conditions.clone(),
            times: BridgeTimes {
                look_period: Duration::from_millis(10),
                settle: Duration::ZERO,
                gone: Duration::from_millis(20),
                prepared: Duration::from_millis(20),
                remembered: PATIENCE * 2,
                in_use_period: Duration::from_millis(10),
                unused: Duration::ZERO,
                unseen: Duration::ZERO,
                ..BridgeTimes::default()
            },
            tasks: Tasks::new(),
        }
    }

    /// Returns the earlier offers in the checkpoint.
    fn offered(&self) -> OfferedBefore {
        let dump = checkpoint::read(&self.dir.path().join("checkpoint.db")).unwrap();
        assert!(dump.skipped.is_empty(), "{:?}", dump.skipped);
        OfferedBefore {
            drivers: dump.driver_offers,
            resources: dump.resource_offers,
        }
    }

    /// The GPU driver was offered by another process start, and registered.
    async fn offered_by(&self, start: &str) {
        let offer = DriverOffer {
            driver: name(GPU),
            starts: [start.to_owned()].into(),
            registered: true,
        };
        let change = Change::PutDriverOffer(Arc::new(offer));
        self.checkpoint.commit(vec![change]).await.unwrap();
    }

    fn start(&self) -> Running {
        Running::start(self.parts())
    }

    /// Lets a driver serve that publishes no devices; a later one of the name replaces it.
    fn serve(&self, driver: &str) {
        self.serve_with(driver, None);
    }

    fn serve_with(&self, driver: &str, inventory: Option<watch::Receiver<Arc<Published>>>) {
        self.show(driver, DriverState::Serving);
        let identity = DriverIdentity {
            name: name(driver),
            kind: DriverKind::Wasm,
            version: "1".into(),
            digest: String::new(),
            source: source(driver),
            summary: String::new(),
        };
        let driver = Driver {
            identity: Arc::new(identity),
            claims: Some(self.driver.clone()),
            inventory,
        };
        self.registry
            .serve(&driver.identity.source.clone(), driver)
            .unwrap();
    }

    /// A started bridge that offers the GPU driver, which publishes no devices.
    async fn serving(&self) -> Running {
        self.serve(GPU);
        let running = self.start();
        running.open(GPU).await;
        running
    }

    /// The driver is there and does not serve.
    fn retire(&self, driver: &str, state: DriverState) {
        self.registry.retire(&source(driver));
        self.show(driver, state);
    }

    fn show(&self, driver: &str, state: DriverState) {
        let shown = name(driver);
        self.registry
            .sources
            .update(DriverKind::Wasm, &source(driver), |view| {
                (view.name, view.state) = (Some(shown), state);
            });
    }

    /// Publishes devices by letters in a pool with the resource's name; those in capitals are not healthy.
    fn offer(&self, letters: &str) {
        let device = |c: char| {
            (
                c.to_ascii_lowercase().to_string(),
                Some(c.is_ascii_lowercase()),
                "",
            )
        };
        self.publish(published(
            "p",
            Some(resource()),
            letters.chars().map(device),
        ));
    }

    fn publish(&self, published: Published) {
        let mut sender = self.published.lock().unwrap();
        match &*sender {
            Some(sender) => drop(sender.send_replace(Arc::new(published))),
            None => {
                let (published, inventory) = watch::channel(Arc::new(published));
                self.serve_with(GPU, Some(inventory));
                *sender = Some(published);
            }
        }
    }

    /// Prepares a claim of the GPU driver for a kubelet, beside the bridge.
    async fn prepare(&self, claim: &ObjectRef) {
        self.manager
            .kubelet
            .prepare(&name(GPU), claim, "test".into())
            .await
            .unwrap();
    }

    async fn unprepare(&self, claim: &ObjectRef) {
        self.manager
            .kubelet
            .unprepare(&name(GPU), claim, "test".into())
            .await
            .unwrap();
    }

    /// Returns when the device manager knows of no resource.
    async fn without_resources(&self) {
        let mut changes = self.manager.devices.changes();
        let waited = async {
            while !self.manager.devices.capacity().resources.is_empty() {
                changes.changed().await.unwrap();
            }
        };
        soon(waited).await;
    }

    /// The driver's file is gone.
    fn remove(&self, driver: &str) {
        self.registry.remove(&source(driver));
        self.published.lock().unwrap().take();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// A bridge that was started.
struct Running {
    bridge: Bridge,
    conditions: Conditions,
    tasks: Tasks,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Running {
    fn start(parts: BridgeParts) -> Self {
        let (conditions, tasks) = (parts.conditions.clone(), parts.tasks.clone());
        let bridge = Bridge::new(parts).unwrap();
        bridge.start();
        Self {
            bridge,
            conditions,
            tasks,
        }
    }

    /// Waits until it is so, whenever the bridge has looked at its sockets.
    async fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let mut looks = self.bridge.looks();
        let arrived = async {
            while !is_so(self) {
                looks.changed().await.unwrap();
            }
        };
        if tokio::time::timeout(PATIENCE, arrived).await.is_err() {
            panic!(
                "{what}: {:#?} {:#?}",
                self.bridge.drivers(),
                self.conditions.list()
            );
        }
    }

    async fn open(&self, driver: &str) {
        self.until("open", |this| {
            this.status(driver).is_some_and(|status| status.is_open)
        })
        .await;
    }

    /// Two looks from now: what was there before was seen.
    async fn looked(&self) {
        let mut looks = self.bridge.looks();
        for _ in 0..2 {
            looks.changed().await.unwrap();
        }
    }

    fn status(&self, driver: &str) -> Option<DriverBridgeStatus> {
        self.bridge
            .drivers()
            .into_iter()
            .find(|status| status.driver.as_str() == driver)
    }

    fn resource(&self) -> Option<PluginRegistration> {
        self.bridge
            .resources()
            .into_iter()
            .next()
            .map(|status| status.registration)
    }

    /// The words of a condition.
    fn condition(&self, code: &str) -> Option<String> {
        let found = self
            .conditions
            .list()
            .into_iter()
            .find(|found| found.problem.code == code);
        found.map(|found| format!("{}: {}", found.subject, found.problem.message))
    }

    /// Returns when a resource has a registration.
    async fn registered(&self, expected: &PluginRegistration) {
        self.until("registered", |this| {
            this.resource().as_ref() == Some(expected)
        })
        .await;
    }

    async fn condition_comes(&self, code: &str) -> String {
        self.until(code, |this| this.condition(code).is_some())
            .await;
        self.condition(code).unwrap()
    }

    async fn condition_goes(&self, code: &str) {
        self.until(code, |this| this.condition(code).is_none())
            .await;
    }

    async fn drain(&self) {
        assert!(
            self.tasks.drain(PATIENCE).await,
            "something was still under way"
        );
    }
}

/// Within what a person waits for.
async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work)
        .await
        .expect("it takes too long")
}

/// A kubelet on a registration socket.
struct Registrar(RegistrationClient<Channel>);

impl Registrar {
    async fn dial(node: &Node, driver: &str) -> Self {
        Self(RegistrationClient::new(
            connect(&node.registration(driver)).await.unwrap(),
        ))
    }

    async fn info(&mut self) -> wire::PluginInfo {
        soon(self.0.get_info(wire::InfoRequest {}))
            .await
            .unwrap()
            .into_inner()
    }

    async fn notify(&mut self, error: &str) -> Result<(), Status> {
        let plugin_registered = error.is_empty();
        let status = wire::RegistrationStatus {
            plugin_registered,
            error: error.to_owned(),
        };
        soon(self.0.notify_registration_status(status))
            .await
            .map(drop)
    }
}

/// Claims by name, in the namespace `default`; the UID of each is `uid-NAME`.
#[derive(Default)]
struct FakeSource(Mutex<BTreeMap<ObjectName, Claim>>);

impl FakeSource {
    /// A claim for a device of the GPU driver.
    fn put(&self, name: &str, pool: &str, device: &str) -> ObjectRef {
        let id = ObjectRef::new("default", name, &format!("uid-{name}")).unwrap();
        let device = AllocatedDevice {
            request: "request".to_owned(),
            driver: self::name(GPU),
            pool: PoolName::new(pool).unwrap(),
            device: DeviceName::new(device).unwrap(),
            share_id: None,
            consumed: BTreeMap::new(),
            admin_access: false,
            binding: Default::default(),
        };
        let claim = Claim {
            id: id.clone(),
            allocation: Some(Allocation {
                devices: vec![device],
                ..Allocation::default()
            }),
            reserved_for: vec![Consumer::of_pod(
                &ObjectRef::new("default", "pod", "uid-pod").unwrap(),
            )],
            annotations: BTreeMap::new(),
            owner_pod: None,
            resource: None,
        };
        self.0.lock().unwrap().insert(id.name.clone(), claim);
        id
    }
}

#[async_trait]
impl ClaimSource for FakeSource {
    async fn claim(&self, _: &ObjectName, name: &ObjectName) -> Result<Option<Claim>, Problem> {
        Ok(self.0.lock().unwrap().get(name).cloned())
    }
}

/// A driver that does what is asked of it, if it may.
#[derive(Default)]
struct FakeDriver {
    /// `prepare DEVICES` and `unprepare DEVICES` as they began, devices of a call in order.
    calls: Mutex<Vec<String>>,
    called: Notify,
    refusal: Mutex<Option<Problem>>,
    /// Calls wait while it is shut.
    shut: watch::Sender<bool>,
}

impl FakeDriver {
    /// The calls since the last time.
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    /// The next call.
    async fn call(&self) -> String {
        let next = async {
            loop {
                let next = self.calls.lock().unwrap().drain(..).next();
                match next {
                    Some(call) => return call,
                    None => self.called.notified().await,
                }
            }
        };
        soon(next).await
    }

    fn refuse(&self, problem: Option<Problem>) {
        *self.refusal.lock().unwrap() = problem;
    }

    async fn begin<'a>(
        &self,
        what: &str,
        claims: impl Iterator<Item = &'a DriverClaim>,
    ) -> Option<Problem> {
        let devices = claims
            .flat_map(|claim| &claim.devices)
            .map(|device| device.device.as_str());
        self.calls
            .lock()
            .unwrap()
            .push(format!("{what} {}", devices.collect::<String>()));
        self.called.notify_one();
        self.shut.subscribe().wait_for(|shut| !*shut).await.unwrap();
        self.refusal.lock().unwrap().clone()
    }
}

#[async_trait]
impl ClaimDriver for FakeDriver {
    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let refusal = self.begin("prepare", claims.iter()).await;
        let device = |device: &AllocatedDevice| PreparedDevice {
            requests: vec![device.request.clone()],
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
            access: DeviceAccess::Edits(Edits {
                env: vec![("DEVICE".to_owned(), device.device.to_string())],
                ..Edits::default()
            }),
            status: None,
            attributes: None,
        };
        let prepared = |claim: &DriverClaim| PreparedClaim {
            devices: claim.devices.iter().map(device).collect(),
            annotations: [("example.com/of".to_owned(), claim.id.name.to_string())].into(),
            ..PreparedClaim::default()
        };
        let outcome = |claim| refusal.clone().map_or_else(|| Ok(prepared(claim)), Err);
        claims
            .iter()
            .map(|claim| (claim.id.uid.clone(), outcome(claim)))
            .collect()
    }

    async fn unprepare(&self, _: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let refusal = self
            .begin("unprepare", claims.iter().map(|live| &live.claim))
            .await;
        let outcome = || refusal.clone().map_or(Ok(()), Err);
        claims
            .iter()
            .map(|live| (live.claim.id.uid.clone(), outcome()))
            .collect()
    }
}
