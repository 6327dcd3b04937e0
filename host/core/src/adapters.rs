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
//! `waiting` (the plugin has not listed, or it is not known which devices pods have by its own IDs) → `serving`. The driver is in the registry from the
//! begin, so its claims can be unprepared; its inventory comes with the first list. A plugin that is gone leaves unhealthy devices, and after a grace
//! period none.
//!
//! Adapters follow the files. A new one adopts the plugin that is connected. One without a file acts as a disabled one, and ends at a start at which
//! its devices are free.
//!
//! Devices that pods have by the plugin's own IDs, of the node API or of a kubelet, from the time before the adapter, are not in the
//! inventory until they are free. Those of a kubelet are read once, after the plugin was withdrawn from it; a record has them
//! over restarts.

mod adapted;
mod claims;
mod material;
mod merge;
mod plan;
mod publication;

fn unknown(driver: &str) -> Problem {
    let message = format!("there is no adapter of the driver {driver:?}");
    Problem::not_found(ProblemCode::AdapterUnknown, message)
}

fn not_listed(resource: &ExtendedResource) -> String {
    format!("the device plugin of {resource} has registered, and has not listed its devices yet")
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
use self::merge::{Merged, Moment, RECORD, merged};
use self::plan::Plan;
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
    Adapter, AdapterRecord, ClaimRecord, DriverKind, DriverName, ExtendedResource, PluginDevice,
    PoolName, Problem, ProblemCode,
};

/// IDs of devices that pods have, by resource.
pub type Taken = BTreeMap<ExtendedResource, BTreeSet<String>>;

/// Drivers that have claims, each with the kind that prepared them, if that is known.
pub type Claimed = BTreeMap<DriverName, Option<DriverKind>>;

/// Returns the drivers of claims.
pub fn claimed<'a>(claims: impl Iterator<Item = &'a ClaimRecord>) -> Claimed {
    let mut claimed = Claimed::new();
    for (driver, part) in claims.flat_map(|claim| &claim.drivers) {
        // A claim that was rebuilt from its CDI file has the kind of a driver file, and no digest.
        let by = part
            .by
            .as_ref()
            .filter(|by| by.kind != DriverKind::Wasm || !by.digest.is_empty());
        let known = claimed.entry(driver.clone()).or_default();
        if *known != Some(DriverKind::Adapter) {
            *known = by.map(|by| by.kind).or(*known);
        }
    }
    claimed
}

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
        claimed: &Claimed,
    ) -> Self {
        let moment = Moment {
            has_kubelet: parts.has_kubelet,
            is_start: true,
        };
        let Merged {
            mut adapted,
            conflicts,
        } = merged(moment, entries, stored.records().clone(), claimed);
        for (source, problem) in conflicts {
            parts.conditions.set(&source, problem);
        }
        for (resource, adapted) in &mut adapted {
            if adapted.source == RECORD {
                let (driver, is_unread) = (&adapted.adapter.driver, !adapted.is_removed);
                tracing::warn!(%resource, %driver, is_unread, "an adapter is in no file that counts");
            }
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
            self.start_one(resource, tasks);
        }
    }

    fn start_one(&self, resource: ExtendedResource, tasks: &Tasks) {
        let publication = Publication::new(self.clone(), self.0.parts.clone(), resource);
        // What is not published is published after the next start.
        tasks.spawn_until_stopped("adapter", publication.run());
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
        adapted.set_left(Some((since, not_listed(resource))));
        drop(state);
        self.changed();
        Some(generation)
    }

    /// Takes a plugin that registered before its resource had an adapter, with its list, if there was one. Its registration stays the same.
    pub(crate) fn adopt(
        &self,
        resource: &ExtendedResource,
        generation: u64,
        plugin: Arc<dyn DeviceDriver>,
        listed: Option<BTreeMap<String, PluginDevice>>,
    ) {
        let mut state = self.state();
        state.generations = state.generations.max(generation);
        let adapted = state.adapted.get_mut(resource);
        // One that registered since the adapter is there replaced this one.
        let Some(adapted) = adapted.filter(|adapted| adapted.plugin.is_none()) else {
            return;
        };
        adapted.plugin = Some((generation, plugin));
        let left = match &listed {
            Some(_) => None,
            None => Some((Instant::now(), not_listed(resource))),
        };
        adapted.listed = listed;
        adapted.set_left(left);
        drop(state);
        self.changed();
    }

    /// Returns whether a plugin has this registration.
    pub(crate) fn has_registration(&self, resource: &ExtendedResource, generation: u64) -> bool {
        let state = self.state();
        let adapted = state.adapted.get(resource);
        let plugin = adapted.and_then(|adapted| adapted.plugin.as_ref());
        plugin.is_some_and(|(known, _)| *known == generation)
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
                .map(|adapted| adapted.adapter.resource.clone())
                .collect()
        };
        for resource in returned {
            self.change_record(&resource, |record| {
                // It may have been enabled meanwhile.
                let state = self.state();
                let adapted = state.adapted.get(&resource);
                record.is_returned |= adapted.is_some_and(|adapted| !adapted.is_enabled());
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
                "the adapter of the driver {driver} is in no file any more: write it again"
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

    /// Takes all adapters as they are written now: new ones, and changed rules, paths and `enabled`. One that is in no file any more acts as a
    /// disabled one, until it is written again. Starts the tasks of new ones, whose devices are published once they are settled
    /// ([`Self::settle`]). Returns the sources of those that name another driver or pool for their resource, which only a start changes.
    ///
    /// # Errors
    ///
    /// The checkpoint takes no writes now. Nothing has changed then.
    pub async fn apply(
        &self,
        entries: AdapterEntries,
        claimed: &Claimed,
        tasks: &Tasks,
    ) -> Result<BTreeSet<String>, Problem> {
        let mut stored = self.0.stored.lock().await;
        let moment = Moment {
            has_kubelet: self.0.parts.has_kubelet,
            is_start: false,
        };
        let records = self.state().records();
        let Merged { adapted, conflicts } = merged(moment, entries, records, claimed);
        let plan = Plan::new(&self.state().adapted, adapted);
        if !stored.has(&plan.records) {
            failpoint::pass(Point::AdapterDecided);
            stored
                .save(&plan.records)
                .await
                .map_err(|error| error.problem())?;
            failpoint::pass(Point::AdapterRecorded);
        }
        self.set_conflicts(&conflicts);
        let Plan {
            records,
            rewritten,
            removed,
            new,
            renamed,
        } = plan;
        let is_changed = !(rewritten.is_empty() && removed.is_empty() && new.is_empty());
        let begun: Vec<_> = new.keys().cloned().collect();
        {
            let mut state = self.state();
            for (resource, (adapter, source)) in rewritten {
                tracing::info!(%resource, %source, "adapter read again");
                if let Some(adapted) = state.adapted.get_mut(&resource) {
                    (adapted.adapter, adapted.source) = (adapter, source);
                    (adapted.is_removed, adapted.is_dirty) = (false, true);
                    // A plugin that is gone is reported again.
                    adapted.is_expired = false;
                }
            }
            for resource in removed {
                tracing::warn!(%resource, "an adapter has no entry that counts any more, and acts as a disabled one");
                if let Some(adapted) = state.adapted.get_mut(&resource) {
                    (adapted.source, adapted.is_removed) = (RECORD.to_owned(), true);
                    let conditions = &self.0.parts.conditions;
                    conditions.clear(ProblemCode::AdapterWithoutPlugin, resource.as_str());
                }
            }
            for (resource, adapted) in new {
                tracing::info!(%resource, driver = %adapted.adapter.driver, source = %adapted.source, "adapter added");
                state.adapted.insert(resource, adapted);
            }
            for (resource, record) in records {
                if let Some(adapted) = state.adapted.get_mut(&resource) {
                    adapted.record = record;
                }
            }
        }
        drop(stored);
        for resource in begun {
            let (adapters, parts) = (self.clone(), self.0.parts.clone());
            Publication::new(adapters, parts, resource.clone()).register();
            self.start_one(resource, tasks);
        }
        if is_changed {
            self.changed();
        }
        Ok(renamed)
    }

    /// Sets the conditions of entries that do not count, by source. Those with the name of a resource are its publication's.
    fn set_conflicts(&self, conflicts: &BTreeMap<String, Problem>) {
        let resources = self.resources();
        let conditions = &self.0.parts.conditions;
        for (source, problem) in conflicts {
            conditions.set(source, problem.clone());
        }
        conditions.retain(ProblemCode::AdapterConflict, |subject| {
            let is_resource = resources
                .iter()
                .any(|resource| resource.as_str() == subject);
            is_resource || conflicts.contains_key(subject)
        });
    }

    /// Returns the resources of new adapters of which requests may be about to take devices by the plugins' own IDs.
    pub(crate) fn unsettled(&self) -> Vec<ExtendedResource> {
        let state = self.state();
        let unsettled = state.adapted.iter().filter(|(_, of)| !of.is_settled);
        unsettled.map(|(resource, _)| resource.clone()).collect()
    }

    /// Takes what pods of the node API have by the plugin's IDs, none of which is taken any more: the devices may be published.
    pub(crate) fn settle(&self, resource: &ExtendedResource, taken: BTreeSet<String>) {
        if let Some(adapted) = self.state().adapted.get_mut(resource) {
            (adapted.taken, adapted.is_settled, adapted.is_dirty) = (taken, true, true);
        }
        self.changed();
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
        if adapted.is_removed {
            return;
        }
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
