//! Pools with an extended-resource name as device plugins of a kubelet (`v1beta1`).
//!
//! Is given what drivers offer under names of resources, and a port to the claim manager. Owns a socket for each resource in the
//! kubelet's folder, its registration, the lists that the kubelet follows, and the claims that stand for what the kubelet gave: an
//! Allocate is a prepare of such a claim, and since nobody tells that a pod ends, the kubelet's list of devices in use is looked at to
//! give claims up. Never talks to a driver.
//!
//! A device that is held by somebody who did not get it from the kubelet's device manager (a claim of the API server, a pod of the
//! node API) is listed as unhealthy: the kubelet would give it, and the pod would fail. One that the device manager gave stays healthy.

mod absence;
mod allocate;
mod claim;
mod convert;
mod counters;
mod dial;
mod face;
mod in_use;
mod keeper;
mod memory;
mod offer;
mod offering;
mod plan;
mod register;
mod socket;
mod source;
mod standing;
#[cfg(test)]
mod tests;
mod upkeep;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;

use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::device_plugin_sockets;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::devices::DeviceHolders;
use nodedock_model::{Claim, DriverName, ExtendedResource, KubeletDevice, ObjectRef, Problem, Uid};

pub use claim::{device_id, is_plugin_claim};
pub use counters::{PluginCounts, ResourceCounts};
pub use in_use::OwnPod;
pub use keeper::Registration;
pub use offer::{Offers, PoolOffer, Pooled};
pub use source::PoolsOfDrivers;

use allocate::Allocations;
use counters::Counters;
use keeper::Home;
use offering::{Offering, Resource};
use upkeep::Upkeep;

/// Below the kubelet's root.
const FOLDER: &str = "device-plugins";
const POD_RESOURCES: &str = "pod-resources/kubelet.sock";

/// The claims that stand for devices which a kubelet's device manager gave. They are no objects of the API server.
#[async_trait]
pub trait PluginClaims: Send + Sync {
    /// Makes a claim ready, or answers from its record.
    async fn prepare(
        &self,
        driver: &DriverName,
        claim: Claim,
        request_id: Arc<str>,
    ) -> Result<PreparedDevices, Problem>;

    /// Gives a claim up. One that is not known is success.
    async fn unprepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<(), Problem>;

    /// Every claim for which `is_plugin_claim` holds, prepared or on its way, also from before our start.
    fn held(&self) -> Vec<HeldDevices>;
}

/// What a claim comes to for the containers that use it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreparedDevices {
    /// With their CDI names.
    pub devices: Vec<KubeletDevice>,
    /// For every container that uses any of the devices.
    pub annotations: BTreeMap<String, String>,
}

/// A claim of ours, and what it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldDevices {
    pub claim: ObjectRef,
    pub driver: DriverName,
    /// By `device_id`.
    pub devices: BTreeSet<String>,
}

/// What is known of pools with a resource's name.
pub trait PooledResources: Send + Sync {
    fn now(&self) -> Pooled;

    /// Whether a driver can be asked.
    fn driver(&self, driver: &DriverName) -> DriverNow;

    /// One of them changes whenever `now` may be different, or a driver begins to serve.
    fn follow(&self) -> Vec<watch::Receiver<u64>>;
}

/// How it stands with a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DriverNow {
    #[default]
    Serves,
    /// It does not serve, and may do so soon.
    Comes,
    Away,
}

/// What the device plugins stand on.
pub struct PluginsParts {
    /// The kubelet's root, `/var/lib/kubelet` as a rule.
    pub kubelet_root: PathBuf,
    /// Tells this instance from another one that serves the same node while one replaces the other.
    pub instance: Option<Uid>,
    /// The pod in which this daemon runs, if it does: a kubelet's list without it is not complete yet.
    pub own_pod: Option<OwnPod>,
    pub pools: Arc<dyn PooledResources>,
    pub claims: Arc<dyn PluginClaims>,
    pub holders: Arc<dyn DeviceHolders>,
    /// Where changes of claims are told.
    pub changes: Changes,
    pub conditions: Conditions,
    pub tasks: Tasks,
    /// The file that keeps the offered devices over a restart.
    pub memory: PathBuf,
}

/// How one resource is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginStatus {
    pub resource: ExtendedResource,
    pub driver: DriverName,
    pub devices: usize,
    /// As the kubelet is told.
    pub healthy: usize,
    pub registration: Registration,
}

/// Handle to the device plugins.
#[derive(Clone)]
pub struct Plugins(Arc<Inner>);

type Resources = BTreeMap<ExtendedResource, Resource>;

struct Inner {
    parts: PluginsParts,
    /// Stopped when nothing is to change any more.
    changing: Tasks,
    home: Arc<Home>,
    allocations: Arc<Allocations>,
    resources: Mutex<Resources>,
}

/// Whether the sockets of device plugins can be named below a kubelet's root; the error names the fix.
pub fn check_paths(kubelet_root: &Path, instance: Option<&Uid>) -> Result<(), Problem> {
    socket::check(&kubelet_root.join(FOLDER), instance)
}

impl Plugins {
    /// Nothing happens before `start`. The error names a path that is too long.
    pub fn new(parts: PluginsParts) -> Result<Self, Problem> {
        check_paths(&parts.kubelet_root, parts.instance.as_ref())?;
        let counters = Arc::new(Counters::default());
        let home = Arc::new(Home {
            folder: parts.kubelet_root.join(FOLDER),
            conditions: parts.conditions.clone(),
            counters: counters.clone(),
            away: Mutex::default(),
        });
        let lister =
            in_use::Lister { socket: parts.kubelet_root.join(POD_RESOURCES), own_pod: parts.own_pod.clone() };
        let allocations = Allocations::new(
            parts.claims.clone(),
            parts.pools.clone(),
            Arc::new(lister),
            counters,
            parts.tasks.clone(),
        );
        let changing = parts.tasks.child();
        let inner =
            Inner { parts, changing, home, allocations: Arc::new(allocations), resources: Mutex::default() };
        Ok(Self(Arc::new(inner)))
    }

    /// Starts what goes on until the tasks stop: resources are offered, registered, and what nobody uses is given up.
    pub fn start(&self) {
        let inner = &self.0;
        let tasks = &inner.parts.tasks;
        let (sender, seen) = watch::channel(Arc::default());
        tasks.spawn(
            "device-plugins-folder",
            device_plugin_sockets::follow(inner.home.folder.clone(), tasks.clone(), sender),
        );
        tasks.spawn("device-plugins", Offering::new(inner.clone(), seen.clone()).run());
        let upkeep = Upkeep {
            allocations: inner.allocations.clone(),
            counters: inner.home.counters.clone(),
            conditions: inner.parts.conditions.clone(),
            subject: inner.parts.kubelet_root.join(POD_RESOURCES).display().to_string(),
            seen,
            tasks: inner.changing.clone(),
        };
        tasks.spawn("device-plugins-in-use", upkeep.run());
    }

    /// Leaves everything as it stands until the tasks stop: resources stay offered, and nothing is given up.
    pub fn hold(&self) {
        self.0.changing.stop();
    }

    /// Every resource that is offered, by name.
    pub fn status(&self) -> Vec<PluginStatus> {
        let resources = self.0.resources();
        resources.iter().map(|(name, resource)| resource.status(name)).collect()
    }

    /// What was counted since the start.
    pub fn counts(&self) -> PluginCounts {
        self.0.home.counters.view()
    }
}

impl Inner {
    fn resources(&self) -> MutexGuard<'_, Resources> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
