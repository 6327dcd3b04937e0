//! Extended resources: what device plugins and pools of drivers offer (`Devices`), and which of it containers get (`DeviceChoices`).
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
mod gone_plugins;
mod held;
mod plugin;
mod preference;
mod reuse;
mod upkeep;

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::adapters::Adapters;
use crate::driver::DeviceDriver;
use crate::hardware::Hardware;
use crate::left_out;
use crate::manager::entry::{self, Choices};
use crate::manager::pool_claims;
use crate::manager::request::interrupted;
use crate::records::RecordStore;
use crate::registry::Registry;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::signal::{Listener, Signal};
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    ExtendedResource, LeftOut, NameRecord, Named, PluginDevice, PodRequest, Problem, ProblemCode,
    Uid, limit,
};

pub use crate::resources::{
    Capacity, DeviceView, HintScope, PluginId, ResourceHints, ResourceOutcome, ResourceSource,
    ResourceView,
};
pub(in crate::manager) use allocate::ChoiceSettings;
pub use allocate::DeviceChoices;
pub use nodedock_allocator::resource::{DeviceNodes, Question, TopologyHint, closest, parse_nodes};

use crate::resources::list::{self, Screened};
use crate::resources::{DeviceMetrics, Listed, Offer, Resources};

/// The resources, and which of them changed. Not locked over an await.
struct DeviceState {
    resources: Resources,
    /// Devices of the lists of plugins that are there, as far as they are not used; of other resources there are none.
    left_out: BTreeMap<ExtendedResource, LeftOut>,
    /// Resources whose change is not reported yet.
    unreported: BTreeSet<ExtendedResource>,
}

/// The owner of extended resources: what device plugins and pools of drivers offer.
pub struct Devices {
    records: Arc<RecordStore>,
    registry: Registry,
    adapters: Option<Adapters>,
    conditions: Conditions,
    changes: Changes,
    tasks: Tasks,
    settings: DeviceSettings,
    state: Mutex<DeviceState>,
    metrics: DeviceMetrics,
    /// Changes when resources, their devices or their allocations did.
    changed: Signal,
    /// Wakes the task that ends the grace period of resources without a source.
    source_gone: Notify,
    /// Wakes the task that reports changes of resources.
    changes_unreported: Notify,
}

/// Deadlines and facts of the node for extended resources.
pub(in crate::manager) struct DeviceSettings {
    /// Deadline of a device plugin's call before a container starts.
    pub(in crate::manager) pre_start_deadline: Duration,
    /// Time for which a resource stays after its source is gone.
    pub(in crate::manager) grace: Duration,
    /// A kubelet allocates the devices of native device plugins.
    pub(in crate::manager) kubelet_allocates: bool,
    pub(in crate::manager) hardware: Hardware,
}

/// The outcomes of a request that is refused as a whole.
pub(super) fn refused_outcomes(request: &PodRequest, problem: &Problem) -> Vec<ResourceOutcome> {
    entry::keys(request)
        .map(|(container, resource)| ResourceOutcome {
            container,
            resource,
            end: Err(problem.clone()),
        })
        .collect()
}

/// Returns the outcome of the choice for each container and resource of a request.
pub(in crate::manager) fn outcomes(
    request: &PodRequest,
    choices: &Choices,
) -> Vec<ResourceOutcome> {
    let outcomes = entry::keys(request).map(|key| {
        let end = choices
            .get(&key)
            .cloned()
            .unwrap_or_else(|| Err(interrupted()));
        let (container, resource) = key;
        if let Err(problem) = &end {
            tracing::info!(pod = %request.pod, container, %resource, code = problem.code, %problem, "no devices");
        }
        let end = end.map(|entry| entry.map(|entry| entry.devices).unwrap_or_default());
        ResourceOutcome {
            container,
            resource,
            end,
        }
    });
    outcomes.collect()
}

/// Returns whether a plugin's stream ended because its list is not used, for its size or its form.
pub fn is_of_list(why: &Problem) -> bool {
    why.code == ProblemCode::DriverAnswerTooLarge || why.code == ProblemCode::DriverAnswerNotValid
}

/// The condition of a list of which no device is used.
fn unused_list(resource: &ExtendedResource, why: &Problem) -> Problem {
    let message = format!(
        "the list of the device plugin of {resource} is not used, and none of its devices is offered: {why}; it is read again after a pause          that grows to five minutes, or at once when the plugin registers again"
    );
    Problem::unavailable(ProblemCode::DeviceListFaulty, message)
}

impl Devices {
    pub(in crate::manager) fn new(
        records: Arc<RecordStore>,
        registry: Registry,
        adapters: Option<Adapters>,
        conditions: Conditions,
        changes: Changes,
        tasks: Tasks,
        settings: DeviceSettings,
    ) -> Arc<Self> {
        let known = pool_claims::resources(records.table().pods().map(|pod| &**pod));
        let state = DeviceState {
            resources: Resources::remembered(known, Instant::now()),
            left_out: BTreeMap::new(),
            unreported: BTreeSet::new(),
        };
        let devices = Arc::new(Self {
            records,
            registry,
            adapters,
            conditions,
            changes,
            tasks,
            settings,
            state: Mutex::new(state),
            metrics: DeviceMetrics::default(),
            changed: Signal::new(),
            source_gone: Notify::new(),
            changes_unreported: Notify::new(),
        });
        devices.serve_plugins_of_claims();
        devices
    }

    /// A resource as its source offers it.
    fn offer(&self, resource: &ExtendedResource) -> Option<Offer> {
        self.state.lock().resources.source(resource).cloned()
    }

    /// Takes the sources that extended resources had before the start, among the names of the checkpoint.
    pub fn remember_owners(&self, names: &[NameRecord]) {
        let adapters = self.adapters.iter().flat_map(Adapters::list);
        let adapters = adapters
            .map(|adapter| (adapter.resource, adapter.driver))
            .collect();
        let mut state = self.state.lock();
        state.resources.set_adapters(adapters);
        state.resources.remember_owners(
            names.iter().filter_map(|record| match &record.name {
                Named::Resource(resource) => Some((resource.clone(), record.source.clone())),
                Named::Driver(_) => None,
            }),
            Instant::now(),
        );
    }

    /// Counts a plugin's call to register, regardless of its outcome.
    pub fn plugin_called(&self, resource: &ExtendedResource) {
        self.metrics.called(resource);
    }

    /// A resource's plugin registered. It replaces the one before, whose end does not matter any more; allocations stay.
    pub fn plugin_arrived(
        self: &Arc<Self>,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        tracing::info!(%resource, socket = %source.display(), "device plugin arrived");
        let arrived = {
            // No adapter comes between the two.
            let mut state = self.state.lock();
            let adapters = self.adapters.as_ref();
            match adapters.and_then(|adapters| adapters.arrived(&resource, driver.clone())) {
                Some(generation) => Err(generation),
                None => Ok(state.resources.arrive(&resource, source, driver)),
            }
        };
        let id = match arrived {
            Ok(id) => id,
            Err(generation) => return PluginId::new(resource, generation),
        };
        if !self.settings.kubelet_allocates {
            self.serve_plugin(&resource);
        }
        // That of a plugin before it.
        self.conditions
            .clear(ProblemCode::PreferenceFailed, id.resource().as_str());
        self.report_resources([resource]);
        id
    }

    /// Sets a plugin's list. Devices that are left out and other faults of the list are conditions.
    pub fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        let max = if self.adapting(id.resource()).is_some() {
            limit::ADAPTED_DEVICES_MAX
        } else {
            limit::RESOURCE_DEVICES_MAX
        };
        let Screened {
            devices,
            left_out,
            faults,
        } = list::screen(devices, max);
        let changed = {
            // The plugin becomes no adapter's between the two.
            let mut state = self.state.lock();
            if let Some(adapters) = self.adopting(id) {
                if !adapters.listed(id.resource(), id.generation(), devices) {
                    return;
                }
                false
            } else {
                let listed = state.resources.list(id, Listed::new(devices));
                let Some(changed) = listed else { return };
                changed
            }
        };
        let subject = id.resource().as_str();
        let faults = faults.problem(id.resource());
        self.conditions
            .update(ProblemCode::DeviceListFaulty, subject, faults);
        self.set_left_out(id.resource(), left_out);
        if changed {
            self.report_resources([id.resource().clone()]);
        }
    }

    /// Notes the devices of a plugin's list that are not used.
    fn set_left_out(&self, resource: &ExtendedResource, left_out: LeftOut) {
        let plugin = format!("the device plugin of {resource}");
        let problem = left_out::problem(&left_out, &plugin, &format!("resource {resource}"));
        // The list and the condition change together.
        let mut state = self.state.lock();
        self.conditions
            .update(ProblemCode::DevicesLeftOut, resource.as_str(), problem);
        match left_out.count() {
            0 => state.left_out.remove(resource),
            _ => state.left_out.insert(resource.clone(), left_out),
        };
    }

    /// A plugin's stream or registration ended. Has no effect if the registration was replaced. A list that is not used at all is a condition
    /// until there is another one.
    pub fn plugin_left(&self, id: &PluginId, why: &Problem) {
        let was_there = {
            let mut state = self.state.lock();
            match self.adopting(id) {
                Some(adapters) => adapters.left(id.resource(), id.generation(), why),
                None => state.resources.leave(id, Instant::now()),
            }
        };
        if !was_there {
            return;
        }
        // What a plugin that is gone would leave out is not known.
        self.set_left_out(id.resource(), LeftOut::default());
        tracing::warn!(resource = %id.resource(), code = why.code, problem = %why, "device plugin left");
        if is_of_list(why) {
            self.conditions
                .set(id.resource().as_str(), unused_list(id.resource(), why));
        }
        self.source_gone.notify_one();
        self.report_resources([id.resource().clone()]);
    }

    /// Gives the plugins of resources that have an adapter now to the adapters, with their lists.
    pub(in crate::manager) fn adopt_plugins(&self) {
        let Some(adapters) = &self.adapters else {
            return;
        };
        let drivers: BTreeMap<_, _> = adapters
            .list()
            .into_iter()
            .map(|adapter| (adapter.resource, adapter.driver))
            .collect();
        let mut adopted = BTreeMap::new();
        {
            let mut state = self.state.lock();
            state.resources.set_adapters(drivers.clone());
            for resource in drivers.into_keys() {
                let Some(offer) = state.resources.take_plugin(&resource, Instant::now()) else {
                    continue;
                };
                let listed: Vec<_> = offer.devices.values().cloned().collect();
                let screened = list::screen(&listed, limit::ADAPTED_DEVICES_MAX);
                let is_active = offer.is_active();
                if let Some((generation, plugin)) = offer.plugin.filter(|_| is_active) {
                    let listed = offer.has_listed.then_some(screened.devices);
                    adapters.adopt(&resource, generation, plugin, listed);
                }
                adopted.insert(resource, (is_active, screened.left_out));
            }
        }
        for (resource, (is_active, left_out)) in &adopted {
            if *is_active {
                tracing::info!(%resource, "a device plugin is a driver now");
            }
            // It is not asked for a preference any more.
            self.conditions
                .clear(ProblemCode::PreferenceFailed, resource.as_str());
            if left_out.count() > 0 {
                self.set_left_out(resource, left_out.clone());
            }
        }
        if !adopted.is_empty() {
            self.source_gone.notify_one();
            self.report_resources(adopted.into_keys());
        }
    }

    /// The adapters, if one of them has a registration.
    fn adopting(&self, id: &PluginId) -> Option<&Adapters> {
        self.adapters
            .as_ref()
            .filter(|adapters| adapters.has_registration(id.resource(), id.generation()))
    }

    /// The adapters, if one of them has a resource.
    fn adapting(&self, resource: &ExtendedResource) -> Option<&Adapters> {
        self.adapters
            .as_ref()
            .filter(|adapters| adapters.adapts(resource))
    }

    pub fn metrics(&self) -> &DeviceMetrics {
        &self.metrics
    }

    /// Changes whenever `capacity` may have changed.
    pub fn changes(&self) -> Listener {
        self.changed.subscribe()
    }

    /// Raises a node's allocatable to what pods have, if the pod is one of those, so that it passes a check of its resources although their
    /// plugin is gone. Never lowers it.
    pub fn cover_allocated(&self, pod: &Uid, allocatable: &mut BTreeMap<ExtendedResource, u64>) {
        let table = self.records.table();
        if held::entries(&table, pod.as_str()).is_empty() {
            return;
        }
        for (resource, devices) in held::owners(&table) {
            let known = allocatable.entry(resource).or_default();
            *known = (*known).max(devices.len() as u64);
        }
    }

    /// Returns the devices of plugins' lists that are not used, with the source of the resource. `None`: the plugin is not the source, but waits
    /// behind another one, or for the kubelet.
    pub fn left_out(&self) -> Vec<(ExtendedResource, Option<ResourceSource>, LeftOut)> {
        let state = self.state.lock();
        let left_out = state.left_out.iter().map(|(resource, left_out)| {
            let offer = state.resources.source(resource);
            let offer =
                offer.filter(|offer| offer.plugin.is_some() || self.adapting(resource).is_some());
            let source = offer.map(|offer| offer.source.clone());
            (resource.clone(), source, left_out.clone())
        });
        left_out.collect()
    }

    /// Every resource, as a kubelet counts it.
    pub fn capacity(&self) -> Capacity {
        let owners = held::owners(&self.records.table());
        let state = self.state.lock();
        let resources = state.resources.iter().map(|(name, offer)| ResourceView {
            name: name.clone(),
            source: offer.source.clone(),
            active: offer.is_active(),
            options: offer
                .plugin
                .as_ref()
                .filter(|_| offer.has_listed)
                .map(|(_, plugin)| plugin.options()),
            devices: offer
                .devices
                .values()
                .map(|device| DeviceView {
                    device: device.clone(),
                    pods: owners
                        .get(name)
                        .and_then(|of| of.get(&device.id))
                        .cloned()
                        .unwrap_or_default(),
                })
                .collect(),
        });
        Capacity {
            resources: resources.collect(),
            removed: state.resources.removed().cloned().collect(),
        }
    }
}
