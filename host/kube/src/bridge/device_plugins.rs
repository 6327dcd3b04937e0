//! Pools with an extended-resource name, and native device plugins, as device plugins of the kubelet (`v1beta1`).
//!
//! The kubelet's calls for a native device plugin are passed on to it (`service`). The kubelet alone allocates its devices.
//!
//! After a restart a resource is offered as before until its driver serves or publishes other pools, at most for five minutes; then as the
//! device manager has it (`offers`). It registers once for each `kubelet.sock`, and again if the kubelet ends its list
//! (`registration`, `controller`).
//!
//! The kubelet allocates devices without naming the container. Each Allocate is a claim, named by its driver, resource and devices:
//! `requested → prepared → in a pod → in no pod → released` (`allocate`, `claim`). An earlier claim with the requested devices serves again
//! within a minute (containers of one pod) and while a pod uses it; otherwise it is unprepared first (`plan`). By the kubelet's list, a
//! claim that no pod uses any more is released after two lists without it, some seconds after its pod, and one that no list ever had after five minutes (`unused`,
//! `in_use`). While the kubelet does not answer, or does not know its pods yet, nothing is released.
//!
//! A device in a claim that the kubelet's device manager did not make (a claim of the API server, a pod of the node API) is listed as
//! unhealthy: the kubelet would allocate it, and the pod would fail. A device that the device manager allocated stays healthy.

mod allocate;
mod controller;
pub(super) mod in_use;
mod offers;
mod plan;
pub(super) mod registration;
mod service;
mod takeover;
mod unused;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::BRIDGE_LOOK_PERIOD;
use super::Context;
use crate::extended_resources::Mechanisms;
use nodedock_base::device_plugin_sockets::{self, Sockets};
use nodedock_base::error::chain;
use nodedock_base::rest::rest_after;
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::StoredRecords;
use nodedock_core::manager::devices::{DeviceView, ResourceSource};
use nodedock_model::{
    ChangedKind, DriverName, ExtendedResource, OfferSource, PluginDevice, Problem, ProblemCode,
    ResourceOffer, limit,
};

pub(super) use allocate::Allocations;
pub(super) use nodedock_core::resources::pools::{device_id, split_id};
pub(super) use offers::Offers;
pub use registration::PluginRegistration;

use controller::ResourceController;
use in_use::UnusedClaims;
use offers::ObservedPools;

/// Interval between two writes of the offered devices, and the retry delay.
const BRIDGE_MEMORY_PERIOD: Duration = Duration::from_secs(1);
const BRIDGE_MEMORY_RETRY: Duration = Duration::from_secs(30);

/// Deadline of reading which devices pods use, and the deadline while another call waits for it.
const IN_USE_DEADLINE: Duration = Duration::from_secs(10);
const IN_USE_DEADLINE_SHORT: Duration = Duration::from_secs(2);

/// Delay from the end of a kubelet's last list to a new registration; doubled up to `REGISTER_RETRY_MAX` while lists end early.
const LIST_LOST: Duration = Duration::from_secs(1);

/// State of one resource's offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginStatus {
    pub resource: ExtendedResource,
    pub devices: usize,
    /// Number of healthy devices in the kubelet's list.
    pub healthy: usize,
    pub registration: PluginRegistration,
}

/// A resource that is offered: what its controller and the services on its sockets share.
pub(super) struct OfferedResource {
    name: ExtendedResource,
    context: Arc<Context>,
    /// Offer as the kubelet's list has it.
    offer: watch::Sender<Arc<ResourceOffer>>,
    /// Number of lists that the kubelet has open.
    lists: watch::Sender<usize>,
    registration: Mutex<PluginRegistration>,
    /// Stopped when it is offered no more.
    tasks: Tasks,
}

impl OfferedResource {
    pub(super) fn status(&self) -> PluginStatus {
        let offer = self.offer.borrow().clone();
        PluginStatus {
            resource: self.name.clone(),
            devices: offer.devices.len(),
            healthy: offer.devices.iter().filter(|device| device.healthy).count(),
            registration: self.registration.lock().clone(),
        }
    }
}

/// Offers resources until the tasks stop, and releases claims whose devices no pod uses.
pub(super) fn start(context: &Arc<Context>) {
    let tasks = &context.parts.tasks;
    let (sender, sockets) = watch::channel(Arc::default());
    let directory = context.directories.device_plugins.clone();
    tasks.spawn(
        "device-plugins-directory",
        device_plugin_sockets::follow(directory, tasks.clone(), sender),
    );
    let before = context.parts.offered_before.resources.iter();
    let remembered: Offers = before
        .map(|offer| (offer.resource.clone(), offer.clone()))
        .collect();
    let controller = DevicePluginController {
        context: context.clone(),
        sockets: sockets.clone(),
        remembered: remembered.clone(),
        remembered_until: Instant::now() + limit::RESOURCE_GRACE,
        stored: StoredRecords::new(context.parts.checkpoint.clone(), remembered),
        next_save: Instant::now(),
    };
    // Both may be dropped anywhere: what they would do is done after the next start.
    context
        .handover
        .changing
        .spawn_until_stopped("device-plugins", controller.run());
    let takeover = takeover::run(context.clone(), sockets.clone());
    // What is not taken over is read after the next start.
    context
        .handover
        .changing
        .spawn_until_stopped("adapters-takeover", takeover);
    let unused = UnusedClaims::new(context.clone(), sockets);
    context
        .handover
        .changing
        .spawn_until_stopped("device-plugins-in-use", unused.run());
}

/// Makes what is offered match the pools of drivers.
struct DevicePluginController {
    context: Arc<Context>,
    /// Sockets in the kubelet's directory.
    sockets: watch::Receiver<Arc<Sockets>>,
    /// Offers from before a restart that are not confirmed or withdrawn yet.
    remembered: Offers,
    remembered_until: Instant,
    stored: StoredRecords<ExtendedResource, ResourceOffer>,
    next_save: Instant,
}

impl DevicePluginController {
    async fn run(mut self) {
        let context = self.context.clone();
        let mut pools = context.parts.manager.devices.changes();
        let mut serving = context.parts.registry.instances.changes();
        let mut claims = context.parts.changes.signal_of(ChangedKind::Claim);
        let (mut mechanisms, mut alone) = (
            context.parts.extended_resources.changes(),
            context.alone.subscribe(),
        );
        let mut adapters = context
            .parts
            .manager
            .adapters
            .as_ref()
            .map(|adapters| adapters.changes());
        loop {
            pools.mark_unchanged();
            if let Some(adapters) = &mut adapters {
                adapters.mark_unchanged();
            }
            serving.mark_unchanged();
            claims.mark_unchanged();
            let began = Instant::now();
            let (mechanisms_now, is_alone) = (
                mechanisms.borrow_and_update().clone(),
                *alone.borrow_and_update(),
            );
            let offers = self.desired(&mechanisms_now);
            self.reconcile(&offers);
            // The lists of an instance before are not replaced by this one.
            let busy = self.report_lists(is_alone.then_some(mechanisms_now.generation));
            let save = self.save(&offers).await;
            let grace = (!self.remembered.is_empty()).then_some(self.remembered_until);
            let rest = rest_after(began, limit::LIST_PACE);
            let relist = Instant::now() + limit::RELIST_PERIOD;
            let wake = [save, grace, busy]
                .into_iter()
                .flatten()
                .fold(relist, Instant::min);
            tokio::select! {
                // Whichever it was, the next round checks everything.
                _ = pools.changed() => {}
                _ = serving.changed() => {}
                // The senders are in the context.
                _ = mechanisms.changed() => {}
                _ = alone.changed() => {}
                () = crate::extended_resources::changed(&mut adapters) => {}
                _ = claims.changed() => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            // Claims and health change in bursts.
            tokio::time::sleep(rest).await;
        }
    }

    /// Reports which pools are in use, after the lists were replaced. Returns when to look again: an Allocate that fails changes nothing
    /// else.
    fn report_lists(&self, generation: Option<u64>) -> Option<Instant> {
        let context = &self.context;
        let extended_resources = &context.parts.extended_resources;
        let in_use = context.pools_in_use();
        extended_resources.report(|reported| {
            (reported.lists, reported.in_use) = (generation.unwrap_or(reported.lists), in_use);
        });
        let is_busy = !context.allocations.devices_under_way().is_empty();
        is_busy.then(|| Instant::now() + BRIDGE_LOOK_PERIOD)
    }

    /// Returns the offers, without regard to claims.
    fn desired(&mut self, mechanisms: &Mechanisms) -> Offers {
        if Instant::now() >= self.remembered_until && !self.remembered.is_empty() {
            let resources: Vec<_> = self.remembered.keys().map(ToString::to_string).collect();
            tracing::warn!(
                resources = resources.join(", "),
                "withdrawn: the drivers of the last run did not come back"
            );
            self.remembered.clear();
        }
        let (code, max) = (ProblemCode::TooManyResources, limit::PLUGIN_RESOURCES_MAX);
        let offers = offers::desired(&self.observed(), &mut self.remembered);
        let offers = offers::by_mechanism(offers, mechanisms, &self.context.allocated_devices());
        let adapters = self.context.parts.manager.adapters.as_ref();
        let held = adapters
            .map(|adapters| adapters.held_at_kubelet())
            .unwrap_or_default();
        let mut offers = offers::with_held(offers, held);
        let problem = offers.keys().nth(max).cloned().map(|first| {
            let count = offers.split_off(&first).len();
            let message = format!(
                "{count} extended resources beyond the {max} that are offered to a kubelet are not offered, the first is {first}"
            );
            Problem::unavailable(code, message)
        });
        self.context.parts.conditions.update(code, "", problem);
        offers
    }

    /// The pools with a resource's name, as the registry and the device manager have them.
    fn observed(&self) -> ObservedPools {
        let parts = &self.context.parts;
        let mut observed = ObservedPools::default();
        let adapted = parts
            .manager
            .adapters
            .as_ref()
            .map(|adapters| adapters.list());
        observed.adapted = adapted
            .into_iter()
            .flatten()
            .map(|view| view.resource)
            .collect();
        // The registry before the device manager, which polls inventories a moment after they change: what that has is the newer.
        for driver in parts.registry.instances.all() {
            let Some(published) = &driver.inventory else {
                continue;
            };
            let published = published.borrow();
            let resources = published
                .inventory
                .pools
                .values()
                .filter_map(|pool| pool.extended_resource.clone());
            observed
                .published
                .insert(driver.identity.name.clone(), resources.collect());
        }
        for view in parts.manager.devices.capacity().resources {
            let source = match (view.source, view.options) {
                (ResourceSource::Pools(driver), _) => OfferSource::Driver(driver),
                (ResourceSource::Plugin(_), Some(options)) => OfferSource::Plugin(options),
                (ResourceSource::Plugin(_), None) => {
                    observed.of_plugins.insert(view.name);
                    continue;
                }
                (ResourceSource::Remembered, _) => continue,
            };
            let is_plugin = matches!(source, OfferSource::Plugin(_));
            let devices = view.devices.into_iter().map(|DeviceView { device, pods }| {
                // Of a native plugin, a pod of the node API may have it since before the kubelet was given the resource.
                PluginDevice {
                    healthy: device.healthy && (!is_plugin || pods.is_empty()),
                    ..device
                }
            });
            let devices = devices.collect();
            let resource = view.name.clone();
            observed.offers.insert(
                view.name,
                ResourceOffer {
                    resource,
                    source,
                    devices,
                },
            );
        }
        observed
    }

    /// Starts and stops controllers of resources, and publishes lists.
    fn reconcile(&self, offers: &Offers) {
        let claims = self.context.device_claims().into_iter();
        let allocated: BTreeSet<_> = claims
            .flat_map(|claim| {
                claim
                    .devices
                    .into_iter()
                    .map(move |id| (claim.driver.clone(), id))
            })
            .collect();
        let mut resources = self.context.resources.lock();
        for (name, gone) in resources.extract_if(.., |name, _| !offers.contains_key(name)) {
            tracing::info!(resource = %name, "withdrawn from the kubelet");
            // A call that is under way takes no device any more.
            gone.offer
                .send_modify(|offer| Arc::make_mut(offer).devices.clear());
            gone.tasks.stop();
            if gone.offer.borrow().source.driver().is_none() {
                let mut withdrawn = self.context.withdrawn.lock();
                withdrawn.retain(|(_, gone)| gone.strong_count() > 0);
                withdrawn.push((name, Arc::downgrade(&gone)));
            }
        }
        for (name, offer) in offers {
            let listed = Arc::new(self.listed(offer, &allocated));
            match resources.get(name) {
                Some(resource) => {
                    resource.offer.send_if_modified(|current| {
                        let differs = *current != listed;
                        *current = listed;
                        differs
                    });
                }
                None => {
                    resources.insert(name.clone(), self.begin(listed));
                }
            }
        }
    }

    /// An offer as the kubelet's list has it: a device that is used elsewhere cannot be allocated, so it is not healthy. `allocated`: the
    /// devices that the kubelet's device manager allocated.
    fn listed(
        &self,
        offer: &ResourceOffer,
        allocated: &BTreeSet<(DriverName, String)>,
    ) -> ResourceOffer {
        let mut listed = offer.clone();
        let Some(driver) = offer.source.driver() else {
            return listed;
        };
        for device in &mut listed.devices {
            let is_allocated = allocated.contains(&(driver.clone(), device.id.clone()));
            device.healthy &= is_allocated || !self.context.is_used_elsewhere(driver, &device.id);
        }
        listed
    }

    fn begin(&self, listed: Arc<ResourceOffer>) -> Arc<OfferedResource> {
        let tasks = &self.context.parts.tasks;
        let resource = Arc::new(OfferedResource {
            name: listed.resource.clone(),
            context: self.context.clone(),
            offer: watch::Sender::new(listed),
            lists: watch::Sender::new(0),
            registration: Mutex::default(),
            tasks: tasks.child(),
        });
        let controller = ResourceController::new(resource.clone(), self.sockets.clone());
        tasks.spawn("device-plugin", controller.run());
        resource
    }

    /// Saves what is offered, if it differs and the last write is not too recent. Returns when to try again.
    async fn save(&mut self, offers: &Offers) -> Option<Instant> {
        if self.stored.has(offers) {
            return None;
        }
        let offers = offers::storable(offers);
        if self.stored.has(&offers) {
            return None;
        }
        let now = Instant::now();
        if now < self.next_save {
            return Some(self.next_save);
        }
        match self.stored.save(&offers).await {
            Ok(()) => {
                self.next_save = now + BRIDGE_MEMORY_PERIOD;
                None
            }
            Err(error) => {
                // The checkpoint reports that it takes no writes. Until then a restart offers what is stored.
                tracing::debug!(
                    error = chain(&error),
                    "offered resources are not stored yet"
                );
                self.next_save = now + BRIDGE_MEMORY_RETRY;
                Some(self.next_save)
            }
        }
    }
}
