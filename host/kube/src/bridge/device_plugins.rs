//! Pools with an extended-resource name as device plugins of the kubelet (`v1beta1`).
//!
//! After a restart a resource is offered as before until its driver serves or publishes other pools, at most for five minutes; then as the
//! device manager has it (`offers`). It registers once for each `kubelet.sock`, and again if the kubelet stops following its list, unless
//! a newer instance is there (`registration`, `controller`).
//!
//! The kubelet allocates devices without naming the container. Each Allocate is a claim, named by its driver, resource and devices:
//! `requested → prepared → in a pod → in no pod → released` (`allocate`, `claim`). An earlier claim with the requested devices serves again
//! within a minute (containers of one pod) and while a pod uses it; otherwise it is unprepared first (`plan`). By the kubelet's list, a
//! claim that no pod uses any more is released after a minute and two looks, and one that no pod ever used after five minutes (`unused`,
//! `in_use`). While the kubelet does not answer, or does not know its pods yet, nothing is released.
//!
//! A device in a claim that the kubelet's device manager did not make (a claim of the API server, a pod of the node API) is listed as
//! unhealthy: the kubelet would allocate it, and the pod would fail. A device that the device manager allocated stays healthy.

mod allocate;
mod claim;
mod controller;
mod in_use;
mod offers;
mod plan;
mod registration;
mod service;
mod unused;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;

use super::{Context, state_file};
use nodedock_base::changes::Changes;
use nodedock_base::device_plugin_sockets::{self, Sockets};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_core::manager::devices::ResourceSource;
use nodedock_model::{ChangedKind, DriverName, ExtendedResource, Problem, limit};

pub(super) use allocate::Allocations;
pub(super) use claim::{Ids, device_id, is_plugin_claim, split_id};
pub(super) use in_use::PodDevices;
pub(super) use offers::{Offers, PoolOffer};
pub use registration::PluginRegistration;

use controller::ResourceController;
use in_use::UnusedClaims;
use offers::ObservedPools;
use service::{CurrentOffer, DevicePluginService};

/// There are more resources than can be offered.
const TOO_MANY: &str = "too-many-resources";

/// How one resource is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginStatus {
    pub resource: ExtendedResource,
    pub driver: DriverName,
    pub devices: usize,
    /// As the kubelet is told.
    pub healthy: usize,
    pub registration: PluginRegistration,
}

pub(super) type Resources = BTreeMap<ExtendedResource, Resource>;

/// A resource that is offered.
pub(super) struct Resource {
    current: Arc<CurrentOffer>,
    registration: Arc<Mutex<PluginRegistration>>,
    /// Stopped when it is offered no more.
    tasks: Tasks,
}

impl Resource {
    pub(super) fn status(&self, name: &ExtendedResource) -> PluginStatus {
        let offer = self.current.borrow().clone();
        PluginStatus {
            resource: name.clone(),
            driver: offer.driver.clone(),
            devices: offer.devices.len(),
            healthy: offer.devices.iter().filter(|device| device.healthy).count(),
            registration: self.registration.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// Offers resources until the tasks stop, and releases claims whose devices no pod uses.
pub(super) fn start(context: &Arc<Context>, allocations: &Arc<Allocations>) {
    let tasks = &context.parts.tasks;
    let (sender, sockets) = watch::channel(Arc::default());
    let directory = context.directories.device_plugins();
    tasks.spawn("device-plugins-folder", device_plugin_sockets::follow(directory, tasks.clone(), sender));
    let controller = DevicePluginController {
        context: context.clone(),
        allocations: allocations.clone(),
        sockets: sockets.clone(),
        remembered: Offers::new(),
        remembered_until: Instant::now() + limit::RESOURCE_GRACE,
        saved: None,
        next_save: Instant::now(),
    };
    tasks.spawn("device-plugins", stoppable(context.changing.clone(), controller.run()));
    let unused = UnusedClaims::new(context.clone(), allocations.clone(), sockets);
    tasks.spawn("device-plugins-in-use", stoppable(context.changing.clone(), unused.run()));
}

/// Runs work that never ends until the tasks stop. It may be dropped anywhere: what it would do is done after the next start.
async fn stoppable(tasks: Tasks, work: impl Future<Output = ()>) {
    tokio::select! {
        () = tasks.stopped() => {}
        () = work => {}
    }
}

/// Makes what is offered match the pools of drivers.
struct DevicePluginController {
    context: Arc<Context>,
    allocations: Arc<Allocations>,
    /// In the kubelet's directory.
    sockets: watch::Receiver<Arc<Sockets>>,
    /// What was offered before a restart, and is not known yet.
    remembered: Offers,
    remembered_until: Instant,
    /// What the file has.
    saved: Option<Offers>,
    next_save: Instant,
}

impl DevicePluginController {
    async fn run(mut self) {
        let context = self.context.clone();
        let (mut pools, mut serving) =
            (context.parts.devices.device_changes(), context.parts.registry.serving_changes());
        let mut changes = context.parts.changes.listen();
        self.recall().await;
        loop {
            pools.mark_unchanged();
            serving.mark_unchanged();
            let offers = self.desired();
            self.reconcile(&offers);
            let again = self.save(offers).await;
            let grace = (!self.remembered.is_empty()).then_some(self.remembered_until);
            let relist = Instant::now() + limit::RELIST_PERIOD;
            let wake = [again, grace].into_iter().flatten().fold(relist, Instant::min);
            tokio::select! {
                // Whichever it was, the next round looks at everything.
                _ = pools.changed() => {}
                _ = serving.changed() => {}
                () = Changes::next_of(&mut changes, ChangedKind::Claim) => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            // Claims and health change in bursts.
            tokio::time::sleep(limit::LIST_PACE).await;
        }
    }

    /// Reads what was offered before a restart.
    async fn recall(&mut self) {
        let path = self.context.parts.devices_file.clone();
        match tokio::task::spawn_blocking(move || state_file::load_devices(&path)).await {
            Ok(Ok(offers)) => {
                self.saved = Some(offers.clone());
                self.remembered = offers;
            }
            Ok(Err(error)) => {
                tracing::warn!(error = chain(&error), "resources are offered when their drivers serve");
            }
            Err(error) => tracing::error!(%error, "the devices of the last run were not read"),
        }
    }

    /// What is offered, without regard to claims.
    fn desired(&mut self) -> Offers {
        if Instant::now() >= self.remembered_until && !self.remembered.is_empty() {
            let resources: Vec<_> = self.remembered.keys().map(ToString::to_string).collect();
            tracing::warn!(?resources, "withdrawn: the drivers of the last run did not come back");
            self.remembered.clear();
        }
        let parts = &self.context.parts;
        let mut offers = offers::desired(&self.observed(), &mut self.remembered);
        let dropped: Vec<_> = offers.keys().skip(limit::PLUGIN_RESOURCES_MAX).cloned().collect();
        match dropped.first() {
            None => parts.conditions.clear(TOO_MANY, ""),
            Some(first) => {
                let (count, max) = (dropped.len(), limit::PLUGIN_RESOURCES_MAX);
                let message = format!(
                    "{count} extended resources beyond the {max} that are offered to a kubelet are not offered, the first is {first}"
                );
                parts.conditions.set("", Problem::unavailable(TOO_MANY, message));
            }
        }
        offers.retain(|resource, _| !dropped.contains(resource));
        offers
    }

    /// The pools with a resource's name, as the registry and the device manager have them.
    fn observed(&self) -> ObservedPools {
        let (registry, devices): (_, &Manager) = (&self.context.parts.registry, &self.context.parts.devices);
        let mut observed = ObservedPools::default();
        // Before the device manager is asked: it looks at inventories a moment after they change, and what it has is the newer.
        for driver in registry.all_serving() {
            let Some(published) = &driver.inventory else { continue };
            let published = published.borrow();
            let resources =
                published.inventory.pools.values().filter_map(|pool| pool.extended_resource.clone());
            observed.published.insert(driver.identity.name.clone(), resources.collect());
        }
        for view in devices.capacity().resources {
            match view.source {
                ResourceSource::Pools(driver) => {
                    let devices = view.devices.into_iter().map(|device| device.device).collect();
                    observed.offers.insert(view.name, PoolOffer { driver, devices });
                }
                ResourceSource::Plugin(_) => {
                    observed.of_plugins.insert(view.name);
                }
                ResourceSource::Remembered => {}
            }
        }
        observed
    }

    /// Starts and stops controllers of resources, and publishes lists.
    fn reconcile(&self, offers: &Offers) {
        let allocated = self.allocated();
        let mut resources = self.context.resources();
        for (name, gone) in resources.extract_if(.., |name, _| !offers.contains_key(name)) {
            tracing::info!(resource = %name, "withdrawn from the kubelet");
            gone.tasks.stop();
        }
        for (name, offer) in offers {
            let listed = Arc::new(self.listed(offer, &allocated));
            match resources.get(name) {
                Some(resource) => {
                    resource.current.send_if_modified(|current| {
                        let differs = *current != listed;
                        *current = listed;
                        differs
                    });
                }
                None => {
                    resources.insert(name.clone(), self.begin(name, listed));
                }
            }
        }
    }

    /// Devices that the kubelet's device manager allocated.
    fn allocated(&self) -> BTreeSet<(DriverName, String)> {
        let claims = self.context.claims.device_claims().into_iter();
        claims.flat_map(|claim| claim.devices.into_iter().map(move |id| (claim.driver.clone(), id))).collect()
    }

    fn listed(&self, offer: &PoolOffer, allocated: &BTreeSet<(DriverName, String)>) -> PoolOffer {
        let driver = &offer.driver;
        let is_used_elsewhere = |id: &str| {
            if allocated.contains(&(driver.clone(), id.to_owned())) {
                return false;
            }
            let Some((pool, device)) = split_id(id) else { return false };
            let (pool, device) = (pool.as_str(), device.as_str());
            self.context.claims.is_used_elsewhere(driver, pool, device)
        };
        PoolOffer { driver: driver.clone(), devices: offers::listed(offer, is_used_elsewhere) }
    }

    fn begin(&self, name: &ExtendedResource, listed: Arc<PoolOffer>) -> Resource {
        let tasks = self.context.parts.tasks.child();
        let (current, registration) = (Arc::new(watch::Sender::new(listed)), Arc::default());
        let service = DevicePluginService {
            resource: name.clone(),
            current: current.clone(),
            following: Arc::new(watch::Sender::new(0)),
            allocations: self.allocations.clone(),
            context: self.context.clone(),
            tasks: tasks.clone(),
        };
        let resource = Resource { current, registration: Arc::clone(&registration), tasks };
        let controller = ResourceController::new(service, self.sockets.clone(), registration);
        self.context.parts.tasks.spawn("device-plugin", controller.run());
        resource
    }

    /// Saves what is offered, if it differs and the last write is not too recent. Returns when to try again.
    async fn save(&mut self, offers: Offers) -> Option<Instant> {
        if self.saved.as_ref() == Some(&offers) {
            return None;
        }
        let now = Instant::now();
        if now < self.next_save {
            return Some(self.next_save);
        }
        let parts = &self.context.parts;
        let (path, to_write) = (parts.devices_file.clone(), offers.clone());
        let write = move || state_file::save_devices(&path, &to_write);
        let consequence = "after a restart the kubelet has no devices until drivers serve";
        if state_file::save(&parts.conditions, &parts.devices_file, consequence, write).await {
            (self.saved, self.next_save) = (Some(offers), now + limit::BRIDGE_MEMORY_PERIOD);
            return None;
        }
        self.next_save = now + limit::BRIDGE_MEMORY_RETRY;
        Some(self.next_save)
    }
}
