//! The device manager: extended resources, and what pods hold of them.
//!
//! Is given device plugins that registered, pools of drivers that carry a resource's name, and pods' requests; keeps each step in
//! the checkpoint (intent before the call, result before the answer). The plugin, or the driver's inventory, is the only truth for
//! devices and health. Never prepares a claim: devices of a pool are chosen here, and held by a claim that somebody else prepares.

mod affinity;
mod allocate;
mod check;
mod choose;
mod free;
mod hints;
mod list;
pub mod merge;
mod metrics;
mod pooled;
mod pools;
mod record;
mod resources;
mod reuse;
mod start;
mod stock;
mod table;
mod upkeep;
mod view;

#[cfg(test)]
mod choose_tests;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod hints_tests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::driver::DeviceDriver;
use crate::registry::Registry;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, PluginDevice, PodAllocation, PodRequest, Problem, Uid};

pub use affinity::{closest, parse_nodes};
pub use metrics::DeviceStats;
pub use pooled::{pooled_claim, pooled_claims};
pub use resources::PluginId;
pub use view::{
    Capacity, DeviceHolders, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource,
    ResourceView, TopologyHint,
};

use resources::Resources;
use table::Table;

/// How the manager behaves where that is a matter of choice.
#[derive(Debug, Clone)]
pub struct DeviceSettings {
    /// Deadline of a plugin's calls while a request's devices are chosen, and anew while they are allocated.
    pub call_deadline: Duration,
    /// Deadline of a call before a container starts.
    pub pre_start_deadline: Duration,
    /// How long a resource stays after its source has gone.
    pub grace: Duration,
    /// NUMA nodes of this machine, ascending.
    pub numa_nodes: Vec<u32>,
    /// Where the node's paths are that plugins name.
    pub host_root: PathBuf,
}

/// What the manager stands on.
pub struct DeviceParts {
    pub records: Vec<PodAllocation>,
    /// Resources for which pods have claims: a pod that left has no record any more, and its claims until their driver is back.
    pub left: BTreeSet<ExtendedResource>,
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
    /// One choice at a time of a resource's devices; nobody has two of them.
    resource_locks: Locks<ExtendedResource>,
    checkpoint: Checkpoint,
    registry: Registry,
    holders: Arc<dyn DeviceHolders>,
    settings: DeviceSettings,
    changes: Changes,
    conditions: Conditions,
    tasks: Tasks,
    /// Counts the times that resources, their devices or what pods have of them became different.
    followed: watch::Sender<u64>,
    /// Wakes the task that ends grace periods.
    left: Notify,
    /// Wakes the task that tells changes.
    changed: Notify,
    metrics: metrics::Metrics,
}

/// Nothing is awaited while it is locked.
#[derive(Default)]
struct State {
    resources: Resources,
    table: Table,
    /// Resources whose change was not told yet.
    untold: BTreeSet<ExtendedResource>,
}

impl Devices {
    pub fn new(parts: DeviceParts) -> Self {
        let DeviceParts {
            records,
            left,
            checkpoint,
            registry,
            holders,
            settings,
            changes,
            conditions,
            tasks,
        } = parts;
        let known = records.iter().flat_map(|record| &record.entries).map(|entry| entry.resource.clone());
        let resources = Resources::remembered(known.chain(left).collect(), Instant::now());
        let state = State { resources, table: Table::new(records), untold: BTreeSet::new() };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
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
            changed: Notify::new(),
            metrics: metrics::Metrics::default(),
        }))
    }

    /// Starts what goes on without requests: drivers' pools are followed, grace periods end, changes are told.
    pub fn start(&self) {
        let inner = self.0.clone();
        self.0.tasks.spawn("device-pools", async move { inner.follow_pools().await });
        let inner = self.0.clone();
        self.0.tasks.spawn("device-grace", async move { inner.end_grace().await });
        let inner = self.0.clone();
        self.0.tasks.spawn("device-changes", async move { inner.tell_changes().await });
    }

    /// A resource's plugin registered. It replaces the one before, whose end does it no harm; what was allocated stays.
    pub fn plugin_arrived(
        &self,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        tracing::info!(%resource, socket = %source.display(), "device plugin arrived");
        let id = self.0.state().resources.arrive(&resource, source, driver);
        self.0.changed([resource]);
        id
    }

    /// A plugin called to register, whatever becomes of it.
    pub fn plugin_called(&self, resource: &ExtendedResource) {
        self.0.metrics.called(resource);
    }

    /// What was counted since the start, by resource.
    pub fn stats(&self) -> DeviceStats {
        self.0.metrics.view()
    }

    /// A plugin's list, which replaces the one before. What is wrong in it is dropped, and said in a condition. Of lists that come
    /// faster than they are taken in, the caller gives the newest alone.
    pub fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        self.0.plugin_listed(id, devices);
    }

    /// A plugin's stream ended, or its registration did. One that was replaced meanwhile is not there to leave.
    pub fn plugin_left(&self, id: &PluginId, why: &Problem) {
        if !self.0.state().resources.leave(id, Instant::now()) {
            return;
        }
        tracing::warn!(resource = %id.resource(), code = why.code, problem = %why, "device plugin left");
        self.0.left.notify_one();
        self.0.changed([id.resource().clone()]);
    }

    /// Gives a pod's containers the devices of their limits: one outcome for each container and resource, in the pod's order. A
    /// repeated request is answered from the record. Goes on when the caller goes away.
    ///
    /// Devices of a pool are the container's when the claim of its entry (`pooled_claims`) is prepared, which the caller sees to.
    pub async fn allocate(&self, request: &PodRequest, request_id: &Arc<str>) -> Vec<ResourceOutcome> {
        let (inner, asked, request_id) = (self.0.clone(), request.clone(), request_id.clone());
        let work = async move { inner.allocate(&asked, request_id).await };
        self.0.tasks.complete("pod-devices", work).await.unwrap_or_else(|| allocate::interrupted_pod(request))
    }

    /// Takes back what a pod has. A pod that has nothing is success. Claims that stood for its devices are given up by the caller,
    /// before or after.
    pub async fn free(&self, pod: &Uid) -> Result<(), Problem> {
        let (inner, pod) = (self.0.clone(), pod.clone());
        let work = async move { inner.free(&pod).await };
        self.0.tasks.complete("pod-devices", work).await.unwrap_or_else(|| Err(allocate::interrupted()))
    }

    /// Chooses anew for a container whose pool's device was taken by somebody else before its claim was prepared. That claim must
    /// have been given up: it comes again with other devices. A container for which there are none loses its entry.
    pub async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        request_id: &Arc<str>,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
        let (inner, pod, container) = (self.0.clone(), pod.clone(), container.to_owned());
        let (resource, request_id) = (resource.clone(), request_id.clone());
        let work = async move { inner.reallocate(&pod, &container, &resource, &request_id).await };
        self.0.tasks.complete("pod-devices", work).await.unwrap_or_else(|| Err(allocate::interrupted()))
    }

    /// What a pod has. Until `allocate` has answered, entries may be there that are not durable yet, or not complete.
    pub fn allocation(&self, pod: &str) -> Option<Arc<PodAllocation>> {
        self.0.state().table.pod(pod).cloned()
    }

    /// What pods have, by their UIDs.
    pub fn allocations(&self) -> Vec<Arc<PodAllocation>> {
        self.0.state().table.pods().cloned().collect()
    }

    /// Tells the plugins that want to know that a container is about to start. One without devices is success.
    pub async fn pre_start(&self, pod: &Uid, container: &str, request_id: &Arc<str>) -> Result<(), Problem> {
        self.0.pre_start(pod, container, request_id).await
    }

    /// Every resource, as a kubelet counts it.
    pub fn capacity(&self) -> Capacity {
        self.0.capacity()
    }

    /// Changes whenever `capacity` may be different.
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.0.followed.subscribe()
    }

    /// NUMA nodes from which a pod's requests can be served: for each container and resource that is known here, or each resource of
    /// the pod.
    pub fn hints(&self, request: &PodRequest, scope: HintScope) -> Vec<ResourceHints> {
        self.0.hints(request, scope)
    }

    /// Raises a node's allocatable to what pods have, never lowers it, if the pod is one of those: it passes a check of its resources
    /// although their plugin is away.
    pub fn cover_allocated(&self, pod: &Uid, allocatable: &mut BTreeMap<ExtendedResource, u64>) {
        let state = self.0.state();
        if state.table.pod(pod.as_str()).is_none() {
            return;
        }
        for (resource, count) in state.table.counts() {
            let known = allocatable.entry(resource.clone()).or_default();
            *known = (*known).max(count as u64);
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
