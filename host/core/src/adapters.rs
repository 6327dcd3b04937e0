//! Adapters: device plugins that are DRA drivers of this node.
//!
//! Owns what operators decided about adapters (records of the checkpoint), and the plugins and their lists (`merge`). The drivers made of them are in
//! `publication`. Is given adapters, the
//! arrivals, lists and ends of plugins, and devices that pods have from the time before the adapter. Emits drivers to the registry,
//! with a pool under the resource's name: claims, slices, CDI files, and whether the scheduler or the kubelet's device manager offers the
//! pool are the same as for every other driver. Prepares by calling the plugin (`claims`). Reads below `/sys` what the adapter's rules name (`material`).
//!
//! # Life of an adapter
//!
//! `waiting` (the plugin has not listed, or the kubelet's pods are not known) → `serving`. The driver is in the registry from the start, so its
//! claims can be unprepared; its inventory comes with the first list. A plugin that is gone leaves unhealthy devices, and after a grace
//! period none.
//!
//! Devices that pods have by the plugin's own IDs, of the node API or of a kubelet, from the time before the adapter, are not in the
//! inventory until they are free. Those of a kubelet are read once, after the plugin was withdrawn from it; a record has them
//! over restarts.

mod adapted;
mod claims;
mod material;
mod merge;
mod publication;

fn unknown(driver: &str) -> Problem {
    let message = format!("there is no adapter of the driver {driver:?}");
    Problem::not_found(ProblemCode::AdapterUnknown, message)
}

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::adapted::{Adapted, KnownAdapter};
use self::material::Material;
use self::merge::merged;
use self::publication::Publication;
use crate::checkpoint::{CommitError, StoredRecords};
use crate::driver::DeviceDriver;
use crate::hardware::Hardware;
use crate::registry::Registry;
use crate::standard_attributes::NumaNodeForm;
use crate::sysfs::SysfsRoot;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::signal::{Listener, Signal};
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Adapter, AdapterRecord, DriverKind, DriverName, ExtendedResource, PluginDevice, PoolName,
    Problem, ProblemCode,
};

/// IDs of devices that pods have, by resource.
pub type Taken = BTreeMap<ExtendedResource, BTreeSet<String>>;

/// An adapter, and where it was written: `the config`, or a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterEntry {
    pub adapter: Adapter,
    pub source: String,
}

/// The adapters of all files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdapterEntries {
    pub entries: Vec<AdapterEntry>,
    /// A file or a directory could not be read: an adapter that is missing may be in it.
    pub is_incomplete: bool,
}

/// Dependencies of the adapters.
pub struct AdapterParts {
    pub registry: Registry,
    pub conditions: Conditions,
    pub sysfs: SysfsRoot,
    pub numa_node_form: NumaNodeForm,
    /// Root of the paths on the node that plugins name.
    pub hardware: Hardware,
    /// Time for which devices stay after their plugin is gone.
    pub grace: Duration,
    /// Pods of a kubelet may have devices by the plugin's own IDs.
    pub has_kubelet: bool,
}

/// Handle to the adapters. Clones share the state.
#[derive(Clone)]
pub struct Adapters(Arc<AdapterStore>);

struct AdapterStore {
    parts: Arc<AdapterParts>,
    state: Mutex<AdapterTable>,
    /// The records as the checkpoint has them, written by one at a time.
    stored: tokio::sync::Mutex<StoredRecords<ExtendedResource, AdapterRecord>>,
    changes: Signal,
}

#[derive(Default)]
struct AdapterTable {
    adapted: BTreeMap<ExtendedResource, Adapted>,
    generations: u64,
}

/// An adapter as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterView {
    pub resource: ExtendedResource,
    pub driver: DriverName,
    pub pool: PoolName,
    pub source: String,
    pub enabled: bool,
    /// It is in no file any more, and stays until its devices are free.
    pub is_removed: bool,
    /// The plugin is connected.
    pub is_connected: bool,
    pub devices: usize,
    /// IDs of devices that pods have from the time before the adapter.
    pub held: BTreeSet<String>,
    /// Why it offers no devices, as a sentence; empty: it does.
    pub waits_for: String,
}

impl Adapters {
    /// Registers the drivers. `stored`: what operators decided before the start. `taken`: what pods of the node API have by the plugins' IDs.
    /// `claimed`: drivers that have claims, each with the kind that prepared them, if that is known.
    pub async fn load(
        parts: AdapterParts,
        entries: AdapterEntries,
        stored: StoredRecords<ExtendedResource, AdapterRecord>,
        mut taken: Taken,
        claimed: &BTreeMap<DriverName, Option<DriverKind>>,
    ) -> Self {
        let mut adapted = merged(&parts, entries, stored.records().clone(), claimed);
        for (resource, adapted) in &mut adapted {
            adapted.taken = taken.remove(resource).unwrap_or_default();
        }
        let mut state = AdapterTable {
            adapted,
            generations: 0,
        };
        state.begin();
        let adapters = Self(Arc::new(AdapterStore {
            parts: Arc::new(parts),
            state: Mutex::new(state),
            stored: tokio::sync::Mutex::new(stored),
            changes: Signal::new(),
        }));
        if let Err(error) = adapters.store().await {
            // The checkpoint reports that it takes no writes; the next decision stores these as well.
            tracing::warn!(
                error = chain(&error),
                "the adapters of this start are not stored yet"
            );
        }
        for resource in adapters.resources() {
            Publication::new(adapters.clone(), adapters.0.parts.clone(), resource).register();
        }
        adapters
    }

    async fn store(&self) -> Result<(), CommitError> {
        let mut stored = self.0.stored.lock().await;
        let records = self.state().records();
        stored.save(&records).await
    }

    /// Starts the tasks that publish devices, one for each adapter: what one reads below `/sys` may hang.
    pub fn start(&self, tasks: &Tasks) {
        for resource in self.resources() {
            let publication = Publication::new(self.clone(), self.0.parts.clone(), resource);
            // What is not published is published after the next start.
            tasks.spawn_until_stopped("adapter", publication.run());
        }
    }

    fn state(&self) -> MutexGuard<'_, AdapterTable> {
        self.0.state.lock()
    }

    fn resources(&self) -> Vec<ExtendedResource> {
        self.state().adapted.keys().cloned().collect()
    }

    /// Returns whether a plugin of the resource is a driver here.
    pub fn adapts(&self, resource: &ExtendedResource) -> bool {
        self.state().adapted.contains_key(resource)
    }

    /// Changes whenever an adapter does.
    pub fn changes(&self) -> Listener {
        self.0.changes.subscribe()
    }

    fn changed(&self) {
        self.0.changes.send();
    }

    /// The plugin of a resource, while it is connected.
    pub fn plugin(&self, resource: &ExtendedResource) -> Option<Arc<dyn DeviceDriver>> {
        let state = self.state();
        state
            .adapted
            .get(resource)?
            .plugin
            .as_ref()
            .map(|(_, plugin)| plugin.clone())
    }

    /// A plugin registered. It replaces the one before. Returns the number of its registration; `None`: the resource has no adapter.
    pub fn arrived(
        &self,
        resource: &ExtendedResource,
        plugin: Arc<dyn DeviceDriver>,
    ) -> Option<u64> {
        let mut state = self.state();
        state.generations += 1;
        let generation = state.generations;
        let adapted = state.adapted.get_mut(resource)?;
        adapted.plugin = Some((generation, plugin));
        // The devices of the list before are not healthy until there is another one.
        let since = adapted
            .left
            .as_ref()
            .map_or_else(Instant::now, |(since, _)| *since);
        let why = format!(
            "the device plugin of {resource} has registered, and has not listed its devices yet"
        );
        adapted.set_left(Some((since, why)));
        drop(state);
        self.changed();
        Some(generation)
    }

    /// Sets a plugin's list: devices by their IDs. False: the registration was replaced.
    pub fn listed(
        &self,
        resource: &ExtendedResource,
        generation: u64,
        devices: BTreeMap<String, PluginDevice>,
    ) -> bool {
        self.of_plugin(resource, generation, |adapted| {
            adapted.listed = Some(devices);
            adapted.set_left(None);
            // Before others see the state: a withdrawal sets it in the same way.
            self.0
                .parts
                .conditions
                .clear(ProblemCode::AdapterWithoutPlugin, resource.as_str());
        })
    }

    /// A plugin's stream or registration ended. False: the registration was replaced.
    pub fn left(&self, resource: &ExtendedResource, generation: u64, why: &Problem) -> bool {
        self.of_plugin(resource, generation, |adapted| {
            adapted.plugin = None;
            // A plugin that comes and goes without a list does not begin again.
            let since = adapted
                .left
                .as_ref()
                .map_or_else(Instant::now, |(since, _)| *since);
            adapted.set_left(Some((since, why.message.clone())));
        })
    }

    /// Changes what is known by a registration. False: it was replaced.
    fn of_plugin(
        &self,
        resource: &ExtendedResource,
        generation: u64,
        change: impl FnOnce(&mut Adapted),
    ) -> bool {
        let mut state = self.state();
        let adapted = state.adapted.get_mut(resource).filter(|adapted| {
            let plugin = adapted.plugin.as_ref();
            plugin.is_some_and(|(known, _)| *known == generation)
        });
        let Some(adapted) = adapted else {
            return false;
        };
        change(adapted);
        drop(state);
        self.changed();
        true
    }

    /// Takes what pods of the node API have by the plugins' IDs. It becomes only less, whichever of two calls comes first.
    pub fn set_taken(&self, taken: &Taken) {
        let mut state = self.state();
        let mut is_changed = false;
        for (resource, adapted) in &mut state.adapted {
            let before = adapted.taken.len();
            adapted
                .taken
                .retain(|id| taken.get(resource).is_some_and(|ids| ids.contains(id)));
            if adapted.taken.len() != before {
                (adapted.is_dirty, is_changed) = (true, true);
            }
        }
        drop(state);
        if is_changed {
            self.changed();
        }
    }

    /// Identity strings of devices that pods have by the plugins' IDs, each with the resource and the ID: no claim has this hardware meanwhile.
    pub fn held_identities(&self) -> BTreeMap<String, (ExtendedResource, String)> {
        let state = self.state();
        state
            .adapted
            .values()
            .flat_map(|adapted| {
                let resource = adapted.adapter.resource.clone();
                let held = adapted.held_identities().into_iter();
                held.map(|(identity, id)| (identity, (resource.clone(), id)))
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    /// Identity strings of devices that pods of a kubelet may have by the plugins' IDs, each with the resource and its driver: it is not known
    /// yet whether they do.
    pub fn unread_identities(&self) -> BTreeMap<String, (ExtendedResource, DriverName)> {
        let state = self.state();
        state
            .adapted
            .values()
            .flat_map(|adapted| {
                let Adapter {
                    resource, driver, ..
                } = adapted.adapter.clone();
                let unread = adapted
                    .unread_identities(self.0.parts.has_kubelet)
                    .into_iter();
                unread
                    .map(|identity| (identity, (resource.clone(), driver.clone())))
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    /// Returns whether pods of the node API have devices by a plugin's IDs.
    pub fn has_taken(&self) -> bool {
        self.state()
            .adapted
            .values()
            .any(|adapted| !adapted.taken.is_empty())
    }

    /// Resources of which pods of a kubelet may have devices by the plugin's IDs, with those that are known to have some.
    pub fn awaited(&self) -> BTreeMap<ExtendedResource, BTreeSet<String>> {
        let state = self.state();
        let awaited = state.adapted.iter().filter(|(_, adapted)| {
            !adapted.record.is_taken_over || !adapted.record.held.is_empty()
        });
        awaited
            .map(|(resource, adapted)| (resource.clone(), adapted.record.held.clone()))
            .collect()
    }

    /// Devices, by the plugin's IDs, that pods of a kubelet have, by resource and with the name of the driver.
    pub fn held_at_kubelet(&self) -> Vec<(ExtendedResource, DriverName, BTreeSet<String>)> {
        let state = self.state();
        let held = state
            .adapted
            .values()
            .filter(|adapted| !adapted.record.held.is_empty());
        held.map(|adapted| {
            let Adapter {
                resource, driver, ..
            } = &adapted.adapter;
            (
                resource.clone(),
                driver.clone(),
                adapted.record.held.clone(),
            )
        })
        .collect()
    }

    /// Takes the devices, by the plugin's IDs, that pods of a kubelet have. Once they are known they become only fewer: a kubelet
    /// is offered none of them any more.
    pub async fn set_held(
        &self,
        resource: &ExtendedResource,
        ids: &BTreeSet<String>,
    ) -> Result<(), Problem> {
        self.change_record(resource, |record| {
            match record.is_taken_over {
                true => record.held.retain(|id| ids.contains(id)),
                false => record.held = ids.clone(),
            }
            record.is_taken_over = true;
        })
        .await
    }

    /// The kubelet's device manager offers the pools of these drivers, and no slice has them. Of disabled adapters this is durable: one that is
    /// in no file is forgotten then.
    pub async fn set_returned(&self, drivers: &BTreeSet<DriverName>) -> Result<(), Problem> {
        let returned: Vec<_> = {
            let state = self.state();
            let returned = state.adapted.values().filter(|adapted| {
                !adapted.is_enabled() && drivers.contains(&adapted.adapter.driver)
            });
            returned
                .map(|adapted| (adapted.adapter.resource.clone(), adapted.is_removed))
                .collect()
        };
        for (resource, is_removed) in returned {
            // One that has a file may have been enabled meanwhile.
            self.change_record(&resource, |record| {
                record.is_returned = is_removed || record.enabled != Some(true)
            })
            .await?;
        }
        Ok(())
    }

    /// Decides by which way a device plugin's devices are offered, by the name of the driver.
    pub async fn set_enabled(&self, driver: &str, enabled: bool) -> Result<AdapterView, Problem> {
        let known = self
            .state()
            .adapted
            .values()
            .find(|adapted| adapted.adapter.driver.as_str() == driver)
            .map(|adapted| (adapted.adapter.resource.clone(), adapted.is_removed));
        let (resource, is_removed) = known.ok_or_else(|| unknown(driver))?;
        if is_removed && enabled {
            let message = format!(
                "the adapter of the driver {driver} is in no file any more: write it again, and restart the daemon"
            );
            return Err(Problem::invalid(ProblemCode::AdapterUnknown, message));
        }
        self.change_record(&resource, |record| {
            record.enabled = Some(enabled);
            record.is_returned &= !enabled;
        })
        .await?;
        tracing::info!(driver, %resource, enabled, "adapter switched by an operator");
        let view = self
            .list()
            .into_iter()
            .find(|view| view.resource == resource);
        view.ok_or_else(|| unknown(driver))
    }

    /// Takes an adapter that was written again: its rules and paths, and whether it is enabled. False: it is not the adapter of that source
    /// since the start, or it names another driver or pool, which only a start changes.
    pub async fn update(&self, source: &str, adapter: Adapter) -> Result<bool, Problem> {
        let resource = adapter.resource.clone();
        let is_same = |known: &Adapted| {
            let names = (&known.adapter.driver, &known.adapter.pool);
            known.source == source && !known.is_removed && names == (&adapter.driver, &adapter.pool)
        };
        if !self.state().adapted.get(&resource).is_some_and(is_same) {
            return Ok(false);
        }
        let paths = adapter.paths.as_ref().map(|paths| paths.texts().to_vec());
        let (rules, is_enabled) = (adapter.rules.clone(), adapter.enabled);
        self.change_record(&resource, |record| {
            (record.paths, record.rules) = (paths, rules);
            // Slices may have its pool again.
            record.is_returned &= !record.enabled.unwrap_or(is_enabled);
        })
        .await?;
        if let Some(adapted) = self.state().adapted.get_mut(&resource) {
            (adapted.adapter, adapted.is_dirty) = (adapter, true);
        }
        self.changed();
        tracing::info!(%resource, source, "adapter read again");
        Ok(true)
    }

    /// Changes a record, which is durable before it counts.
    async fn change_record(
        &self,
        resource: &ExtendedResource,
        change: impl FnOnce(&mut AdapterRecord),
    ) -> Result<(), Problem> {
        let mut stored = self.0.stored.lock().await;
        let mut records = self.state().records();
        let Some(record) = records.get_mut(resource) else {
            return Ok(());
        };
        change(record);
        let changed = record.clone();
        if stored.has(&records) {
            return Ok(());
        }
        failpoint::pass(Point::AdapterDecided);
        stored
            .save(&records)
            .await
            .map_err(|error| error.problem())?;
        failpoint::pass(Point::AdapterRecorded);
        if let Some(adapted) = self.state().adapted.get_mut(resource) {
            (adapted.record, adapted.is_dirty) = (changed, true);
        }
        self.changed();
        Ok(())
    }

    /// Returns the pools of adapters that are not enabled. The kubelet's device manager offers them, regardless of the decision for the
    /// node.
    pub fn disabled(&self) -> BTreeSet<(DriverName, PoolName)> {
        let state = self.state();
        let disabled = state
            .adapted
            .values()
            .filter(|adapted| !adapted.is_enabled());
        disabled
            .map(|adapted| (adapted.adapter.driver.clone(), adapted.adapter.pool.clone()))
            .collect()
    }

    pub fn list(&self) -> Vec<AdapterView> {
        self.state()
            .adapted
            .values()
            .map(|adapted| adapted.view(self.0.parts.has_kubelet))
            .collect()
    }

    /// Returns the time at which the devices of a plugin that is gone are withdrawn.
    fn expiry(&self, resource: &ExtendedResource) -> Option<Instant> {
        let state = self.state();
        let adapted = state
            .adapted
            .get(resource)
            .filter(|adapted| !adapted.is_expired)?;
        Some(adapted.left.as_ref()?.0 + self.0.parts.grace)
    }

    /// Withdraws the devices of a plugin that has been gone for long, or has not listed any since it registered.
    fn expire(&self, resource: &ExtendedResource) {
        let mut state = self.state();
        let Some(adapted) = state
            .adapted
            .get_mut(resource)
            .filter(|adapted| !adapted.is_expired)
        else {
            return;
        };
        let Some((_, why)) = adapted
            .left
            .as_ref()
            .filter(|(since, _)| Instant::now() >= *since + self.0.parts.grace)
        else {
            return;
        };
        let message = format!(
            "the driver {} of {} has no devices: {why}",
            adapted.adapter.driver, adapted.source
        );
        (adapted.listed, adapted.is_dirty, adapted.is_expired) =
            (Some(BTreeMap::new()), true, true);
        let problem = Problem::unavailable(ProblemCode::AdapterWithoutPlugin, message);
        self.0.parts.conditions.set(resource.as_str(), problem);
    }

    /// An adapter as its driver is made of it.
    fn known(&self, resource: &ExtendedResource) -> Option<KnownAdapter> {
        self.state().adapted.get(resource).map(Adapted::known)
    }

    /// Returns the material to publish for an adapter, and the semaphore of its threads below `/sys`. None: nothing changed since the last
    /// call, or the devices that pods had before are not known yet.
    fn take_changed(&self, resource: &ExtendedResource) -> Option<(Material, Arc<Semaphore>)> {
        let mut state = self.state();
        let adapted = state.adapted.get_mut(resource).filter(|adapted| {
            adapted.refused.is_none()
                && adapted.is_ready(self.0.parts.has_kubelet)
                && adapted.is_dirty
        })?;
        adapted.is_dirty = false;
        Some((adapted.material(), adapted.looks.clone()))
    }

    /// Marks an adapter as changed again, because its material was not published.
    fn set_changed(&self, resource: &ExtendedResource) {
        if let Some(adapted) = self.state().adapted.get_mut(resource) {
            adapted.is_dirty = true;
        }
    }

    /// Sets why an adapter does not serve under the name of its driver; None: it does.
    fn set_refused(&self, resource: &ExtendedResource, refused: Option<String>) {
        if let Some(adapted) = self.state().adapted.get_mut(resource) {
            adapted.refused = refused;
        }
    }
}

impl AdapterTable {
    fn records(&self) -> BTreeMap<ExtendedResource, AdapterRecord> {
        self.adapted
            .iter()
            .map(|(resource, adapted)| (resource.clone(), adapted.record.clone()))
            .collect()
    }

    /// Clears `is_returned` of every enabled adapter, so that the next process knows that slices may have been written.
    fn begin(&mut self) {
        let adapted = self.adapted.values_mut();
        adapted
            .filter(|adapted| adapted.is_enabled())
            .for_each(|adapted| adapted.record.is_returned = false);
    }
}
