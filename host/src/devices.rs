//! The device manager: extended resources, and what pods hold of them.
//!
//! Is given device plugins that registered, pools of drivers that carry a resource's name, and pods' requests; keeps each step in
//! the checkpoint (intent before the call, result before the answer). The plugin, or the driver's inventory, is the only truth for
//! devices and health. Never prepares a claim: devices of a pool are chosen here, and held by a claim that somebody else prepares.

pub mod merge;
mod pooled;
mod resources;
mod view;

#[cfg(test)]
mod fixtures;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::base::changes::Changes;
use crate::base::conditions::Conditions;
use crate::base::locks::Locks;
use crate::base::tasks::Tasks;
use crate::checkpoint::Checkpoint;
use crate::driver::DeviceDriver;
use crate::model::{ExtendedResource, PluginDevice, PodAllocation, PodRequest, Problem, Uid};
use crate::registry::Registry;

pub use pooled::{pooled_claim, pooled_claims};
pub use resources::PluginId;
use resources::Resources;
pub use view::{
    Capacity, DeviceHolders, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource,
    ResourceView, TopologyHint,
};

/// How the manager behaves where that is a matter of choice.
#[derive(Debug, Clone)]
pub struct DeviceSettings {
    /// Deadline of a plugin's calls for one request.
    pub call_deadline: Duration,
    /// Deadline of a call before a container starts.
    pub pre_start_deadline: Duration,
    /// How long a resource stays after its source has gone.
    pub grace: Duration,
    /// NUMA nodes of this machine, ascending.
    pub numa_nodes: Vec<u32>,
}

/// What the manager stands on.
pub struct DeviceParts {
    pub records: Vec<PodAllocation>,
    pub checkpoint: Checkpoint,
    pub registry: Registry,
    pub holders: Arc<dyn DeviceHolders>,
    pub settings: DeviceSettings,
    pub changes: Changes,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

/// Handle to the device manager.
#[derive(Clone)]
pub struct Devices(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    /// One request at a time for a pod. Taken before `resource_locks`.
    pod_locks: Locks<Uid>,
    /// One choice at a time of a resource's devices; never two of them at once.
    resource_locks: Locks<ExtendedResource>,
    checkpoint: Checkpoint,
    registry: Registry,
    holders: Arc<dyn DeviceHolders>,
    settings: DeviceSettings,
    changes: Changes,
    conditions: Conditions,
    tasks: Tasks,
    /// Counts the times that resources, their devices or their allocation became different.
    followed: watch::Sender<u64>,
    /// Wakes the task that ends grace periods.
    left: Notify,
}

#[derive(Default)]
struct State {
    resources: Resources,
}

impl Devices {
    pub fn new(parts: DeviceParts) -> Self {
        let DeviceParts { records, checkpoint, registry, holders, settings, changes, conditions, tasks } =
            parts;
        let known = records.iter().flat_map(|record| &record.entries).map(|entry| entry.resource.clone());
        let resources = Resources::remembered(known.collect(), Instant::now());
        Self(Arc::new(Inner {
            state: Mutex::new(State { resources }),
            pod_locks: Locks::default(),
            resource_locks: Locks::default(),
            checkpoint,
            registry,
            holders,
            settings,
            changes,
            conditions,
            tasks,
            followed: watch::Sender::new(0),
            left: Notify::new(),
        }))
    }

    /// Starts what goes on without requests: drivers' pools are followed, grace periods end.
    pub fn start(&self) {}

    /// A resource's plugin registered. It replaces the one before, whose end does it no harm; what was allocated stays.
    pub fn plugin_arrived(
        &self,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        self.0.state().resources.arrive(&resource, source, driver)
    }

    /// A plugin's list, which replaces the one before. What is wrong in it is dropped, and said in a condition.
    pub fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        let listed = devices.iter().map(|device| (device.id.clone(), device.clone())).collect();
        self.0.state().resources.list(id, Arc::new(listed));
    }

    /// A plugin's stream ended, or its registration did. One that was replaced meanwhile is not there to leave.
    pub fn plugin_left(&self, id: &PluginId, why: &Problem) {
        tracing::warn!(resource = %id.resource(), %why, "a device plugin left");
        self.0.state().resources.leave(id, Instant::now());
    }

    /// Gives a pod's containers the devices of their limits: one outcome for each container and resource, in the pod's order. A
    /// repeated request is answered from the record. Goes on when the caller goes away.
    pub async fn allocate(&self, request: PodRequest, request_id: Arc<str>) -> Vec<ResourceOutcome> {
        drop((request, request_id));
        Vec::new()
    }

    /// Takes back what a pod has. A pod that has nothing is success. Claims that stood for its devices are given up by others.
    pub async fn free(&self, pod: &Uid) -> Result<(), Problem> {
        tracing::debug!(%pod, "nothing to free");
        Err(refused())
    }

    /// Chooses anew for a container whose pool's device was taken by somebody else before its claim was prepared. That claim must
    /// have been given up.
    pub async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        request_id: Arc<str>,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
        tracing::debug!(%pod, container, %resource, request = %request_id, "no other device");
        Err(refused())
    }

    /// What a pod has.
    pub fn allocation(&self, pod: &str) -> Option<Arc<PodAllocation>> {
        tracing::trace!(pod, "asked");
        None
    }

    /// What pods have, by their UIDs.
    pub fn allocations(&self) -> Vec<Arc<PodAllocation>> {
        Vec::new()
    }

    /// Tells the plugins that want to know that a container is about to start. One without devices is success.
    pub async fn pre_start(&self, pod: &Uid, container: &str, request_id: Arc<str>) -> Result<(), Problem> {
        tracing::debug!(%pod, container, request = %request_id, "not started");
        Err(refused())
    }

    /// Every resource, as a kubelet counts it.
    pub fn capacity(&self) -> Capacity {
        Capacity::default()
    }

    /// Changes whenever `capacity` may be different.
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.0.followed.subscribe()
    }

    /// NUMA nodes from which a pod's requests can be served: for each container and resource that is known here, or each resource of
    /// the pod.
    pub fn hints(&self, request: &PodRequest, scope: HintScope) -> Vec<ResourceHints> {
        drop((request, scope));
        Vec::new()
    }

    /// Raises a node's allocatable to what pods have, never lowers it, where the pod is among those that have something: it passes a
    /// check of its resources although their plugin is away.
    pub fn cover_allocated(&self, pod: &str, allocatable: &mut BTreeMap<ExtendedResource, u64>) {
        drop((pod, allocatable));
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused() -> Problem {
    Problem::unavailable("no-allocation", "this release allocates nothing")
}
