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
//! What a container has of a resource is a claim that the manager makes for it (`pool_claims`), of the driver of the pools, or of the plugin as a
//! driver (`plugin`). So the table of claims alone says what is taken. One pod at a time chooses devices of a resource, including the call for the
//! plugin's preference; what is chosen is reserved until its claim is in the table. All waiting and choosing ends at one deadline; other resources
//! are not affected. While too few devices are free or healthy the pod waits, as a claim does and for as long, and nothing of that resource is
//! chosen for it. If another claim was faster, or a prepare finds the hardware with another one, devices are chosen again.
//!
//! Differences from a kubelet: choices are deterministic; a plugin's preference that fails refuses no pod; a refusal leaves no device marked; a later container does not reuse an unhealthy device; a
//! later container reuses devices of init containers that belong to a pool as a whole claim or not at all.

mod allocate;
mod entry;
mod plugin;
mod preference;
mod reuse;
mod snapshot;
mod upkeep;

#[cfg(test)]
pub(crate) mod fixtures;
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
use crate::manager::claims::table::ClaimTable;
use nodedock_model::{
    ExtendedResource, NameRecord, Named, PluginDevice, PodRequest, Problem, ProblemCode, Uid, limit,
};

pub use crate::resources::{
    Capacity, DeviceView, HintScope, PluginId, ResourceHints, ResourceOutcome, ResourceSource,
    ResourceView,
};
pub(in crate::manager) use entry::{Choices, Entry};
#[cfg(test)]
pub(in crate::manager) use entry::{Chosen, Key};
pub use nodedock_allocator::resource::{DeviceNodes, Question, TopologyHint, closest, parse_nodes};

use crate::resources::{DeviceMetrics, Listed, Resources, list};

/// Resources, and devices that were chosen. Not locked over an await.
pub(crate) struct DeviceState {
    resources: Resources,
    /// Devices for claims that are not in the table yet, by the claim's UID.
    chosen: BTreeMap<Uid, Reserved>,
    /// Resources whose change is not reported yet.
    unreported: BTreeSet<ExtendedResource>,
}

/// Devices that a pod is about to have by a claim.
struct Reserved {
    pod: Uid,
    resource: ExtendedResource,
    devices: BTreeSet<String>,
}

impl DeviceState {
    /// `known`: resources of claims.
    pub(crate) fn new(known: BTreeSet<ExtendedResource>) -> Self {
        let resources = Resources::remembered(known, Instant::now());
        Self {
            resources,
            chosen: BTreeMap::new(),
            unreported: BTreeSet::new(),
        }
    }
}

/// The outcomes of a request that did not end.
pub(super) fn interrupted(request: &PodRequest) -> Vec<ResourceOutcome> {
    let outcome = |(container, resource)| ResourceOutcome {
        container,
        resource,
        end: Err(super::interrupted()),
    };
    entry::keys(request).map(outcome).collect()
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
        let adapters = adapters
            .map(|adapter| (adapter.resource, adapter.driver))
            .collect();
        let mut state = self.devices();
        state.resources.set_adapters(adapters);
        state
            .resources
            .remember_owners(names.iter().filter_map(of), Instant::now());
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
        if let Some(generation) =
            adapters.and_then(|adapters| adapters.arrived(&resource, driver.clone()))
        {
            return PluginId::new(resource, generation);
        }
        if !self.settings.kubelet_allocates {
            self.serve_plugin(&resource);
        }
        let id = self.devices().resources.arrive(&resource, source, driver);
        // That of a plugin before it.
        self.conditions
            .clear(ProblemCode::PreferenceFailed, id.resource().as_str());
        self.report_resources([resource]);
        id
    }

    /// Sets a plugin's list. Its faults are dropped, and reported in a condition.
    pub fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        let adapters = self.adapting(id.resource());
        let max = if adapters.is_some() {
            limit::ADAPTED_DEVICES_MAX
        } else {
            limit::RESOURCE_DEVICES_MAX
        };
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
            None => self
                .conditions
                .clear(ProblemCode::DeviceListFaulty, subject),
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
        self.adapters
            .as_ref()
            .filter(|adapters| adapters.adapts(resource))
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
        let table = self.table();
        if entry::entries(&table, pod.as_str()).is_empty() {
            return;
        }
        for (resource, devices) in entry::owners(&table) {
            let known = allocatable.entry(resource).or_default();
            *known = (*known).max(devices.len() as u64);
        }
    }

    /// Tells the adapters what pods have by the plugins' IDs, from the time before them.
    pub(in crate::manager) fn tell_adapters(&self) {
        if let Some(adapters) = self
            .adapters
            .as_ref()
            .filter(|adapters| adapters.has_taken())
        {
            let taken = taken_of_plugins(&self.table());
            adapters.set_taken(&taken);
        }
    }
}

/// What pods have of device plugins without an adapter, by resource.
pub fn taken_of_plugins(table: &ClaimTable) -> BTreeMap<ExtendedResource, BTreeSet<String>> {
    let mut taken: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for claim in table.claims().filter(|claim| claim.is_of_plugin()) {
        let Some(of) = &claim.resource else { continue };
        taken
            .entry(of.resource.clone())
            .or_default()
            .extend(of.devices.keys().cloned());
    }
    taken
}
