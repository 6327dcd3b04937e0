//! Extended resources: what device plugins and pools of drivers offer, and what pods have of them.
//!
//! The plugin, or the driver's inventory, is the only truth for devices and their health. Devices of a pool are chosen here and held by a
//! pool claim.
//!
//! # Life of an extended resource
//!
//! `active` (a registered plugin, or pools of a driver) ⇄ `left` (no device is healthy) → `removed` after five minutes. After a start a resource
//! in records, or in claims that a driver has not unprepared, is `remembered` for the same five minutes. The first source of a name keeps it; another
//! source waits, with a condition. A plugin that registers again replaces its previous instance at once, whose end is then ignored. Allocations of pods
//! do not depend on any of this.
//!
//! An allocation is one record of a pod: an entry for each container and resource, which is an intent until its plugin has answered. One pod at a
//! time chooses devices of a resource, including the call for the plugin's preference. All waiting and calling ends at one deadline; other resources
//! are not affected. While too few devices are free or healthy the pod waits, as a claim does and for as long, and nothing of that resource is
//! chosen for it. Entries of pools have a claim instead of a response: the caller prepares it, and chooses again (`reallocate`) if the claim
//! manager reports that another claim took the device first.
//!
//! Differences from a kubelet: choices are deterministic; a plugin's preference that fails refuses no pod; a refusal leaves no device marked; a later container does not reuse an unhealthy device; a
//! later container reuses devices of init containers that belong to a pool as a whole claim or not at all.

mod affinity;
mod allocate;
mod choose;
mod free;
mod hints;
mod list;
pub(crate) mod metrics;
mod pools;
mod preference;
mod record;
mod resources;
mod reuse;
mod snapshot;
mod table;
mod upkeep;
mod view;

#[cfg(test)]
mod choose_tests;
#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod hints_tests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::MutexGuard;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::adapters::Adapters;
use crate::driver::DeviceDriver;
use crate::manager::Manager;
use nodedock_model::{
    ExtendedResource, NameRecord, Named, PluginDevice, PodAllocation, PodRequest, Problem, ProblemCode, Uid,
    limit,
};

pub use affinity::{closest, parse_nodes};
pub use choose::Question;
pub use metrics::DeviceMetrics;
pub use resources::PluginId;
pub use view::{
    Capacity, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource, ResourceView,
    TopologyHint,
};

use resources::{Listed, Resources};
use table::AllocationTable;

/// NUMA nodes for hints, one hint for each set of them; a kubelet's topology manager supports no more.
const HINT_NUMA_NODES_MAX: usize = 8;

/// Devices, with the NUMA nodes of each.
pub type DeviceNodes = BTreeMap<String, Vec<u32>>;

/// Resources and allocations. Not locked over an await.
pub(crate) struct DeviceState {
    resources: Resources,
    table: AllocationTable,
    /// Resources whose change is not reported yet.
    unreported: BTreeSet<ExtendedResource>,
}

impl DeviceState {
    /// `pooled`: resources of the pool claims that exist.
    pub(crate) fn new(records: Vec<PodAllocation>, mut pooled: BTreeSet<ExtendedResource>) -> Self {
        let entries = records.iter().flat_map(|record| &record.entries);
        pooled.extend(entries.map(|entry| entry.resource.clone()));
        let resources = Resources::remembered(pooled, Instant::now());
        Self { resources, table: AllocationTable::new(records), unreported: BTreeSet::new() }
    }
}

/// The outcomes of a request that did not end.
pub(super) fn interrupted(request: &PodRequest) -> Vec<ResourceOutcome> {
    let outcome =
        |(container, resource)| ResourceOutcome { container, resource, end: Err(super::interrupted()) };
    record::keys(request).map(outcome).collect()
}

impl Manager {
    pub(crate) fn devices(&self) -> MutexGuard<'_, DeviceState> {
        self.devices.lock()
    }

    /// Takes the sources that extended resources had before the start, among the names of the checkpoint.
    pub fn remember_owners(&self, names: &[NameRecord]) {
        let of = |record: &NameRecord| match &record.name {
            Named::Resource(resource) => Some((resource.clone(), record.source.clone())),
            Named::Driver(_) => None,
        };
        let adapters = self.adapters.iter().flat_map(Adapters::list);
        let adapters = adapters.map(|adapter| (adapter.resource, adapter.driver)).collect();
        let mut state = self.devices();
        state.resources.set_adapters(adapters);
        state.resources.remember_owners(names.iter().filter_map(of), Instant::now());
    }

    /// The devices of a pod. Until its request is answered, entries may be there that are not durable or not complete yet.
    pub fn allocation(&self, pod: &str) -> Option<Arc<PodAllocation>> {
        self.devices().table.pod(pod).cloned()
    }

    /// The devices of all pods, by UID.
    pub(crate) fn allocations(&self) -> BTreeMap<Uid, Arc<PodAllocation>> {
        self.devices().table.pods().map(|record| (record.uid().clone(), record.clone())).collect()
    }

    /// A plugin called to register, whatever the outcome.
    pub fn plugin_called(&self, resource: &ExtendedResource) {
        self.device_metrics.called(resource);
    }

    /// A resource's plugin registered. It replaces the one before, whose end does not matter any more; allocations stay.
    pub fn plugin_arrived(
        &self,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        tracing::info!(%resource, socket = %source.display(), "device plugin arrived");
        let adapters = self.adapters.as_ref();
        if let Some(generation) = adapters.and_then(|adapters| adapters.arrived(&resource, driver.clone())) {
            return PluginId::new(resource, generation);
        }
        let id = self.devices().resources.arrive(&resource, source, driver);
        // That of a plugin before it.
        self.conditions.clear(ProblemCode::PreferenceFailed, id.resource().as_str());
        self.report_resources([resource]);
        id
    }

    /// Sets a plugin's list. Its faults are dropped, and reported in a condition.
    pub fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        let adapters = self.adapting(id.resource());
        let max = if adapters.is_some() { limit::ADAPTED_DEVICES_MAX } else { limit::RESOURCE_DEVICES_MAX };
        let (devices, faults) = list::screen(devices, max);
        let changed = if let Some(adapters) = adapters {
            adapters.listed(id.resource(), id.generation(), devices);
            false
        } else {
            let listed = self.devices().resources.list(id, Listed::new(devices));
            let Some(changed) = listed else { return };
            changed
        };
        let subject = id.resource().as_str();
        match faults.problem(id.resource()) {
            Some(problem) => self.conditions.set(subject, problem),
            None => self.conditions.clear(ProblemCode::DeviceListFaulty, subject),
        }
        if changed {
            self.report_resources([id.resource().clone()]);
        }
    }

    /// A plugin's stream or registration ended. Has no effect if the registration was replaced.
    pub fn plugin_left(&self, id: &PluginId, why: &Problem) {
        if let Some(adapters) = self.adapting(id.resource()) {
            adapters.left(id.resource(), id.generation(), why);
        } else if !self.devices().resources.leave(id, Instant::now()) {
            return;
        }
        tracing::warn!(resource = %id.resource(), code = why.code, problem = %why, "device plugin left");
        self.source_gone.notify_one();
        self.report_resources([id.resource().clone()]);
    }

    /// The adapters, if one of them has a resource.
    fn adapting(&self, resource: &ExtendedResource) -> Option<&Adapters> {
        self.adapters.as_ref().filter(|adapters| adapters.adapts(resource))
    }

    pub fn device_metrics(&self) -> &DeviceMetrics {
        &self.device_metrics
    }

    /// Changes whenever `capacity` may have changed.
    pub fn device_changes(&self) -> watch::Receiver<u64> {
        self.devices_changed.subscribe()
    }

    /// Raises a node's allocatable to what pods have, if the pod is one of those, so that it passes a check of its resources although their
    /// plugin is gone. Never lowers it.
    pub fn cover_allocated(&self, pod: &Uid, allocatable: &mut BTreeMap<ExtendedResource, u64>) {
        let state = self.devices();
        if state.table.pod(pod.as_str()).is_none() {
            return;
        }
        for (resource, count) in state.table.counts() {
            let known = allocatable.entry(resource.clone()).or_default();
            *known = (*known).max(count as u64);
        }
    }
}
