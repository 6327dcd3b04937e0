//! Resources at one moment: for choices, for hints, and for those who list them.

use std::collections::BTreeSet;

use super::choose::{self, Stock};
use super::hints;
use super::resources::Offer;
use super::reuse::Reuse;
use super::{Capacity, DeviceView, HintScope, ResourceHints, ResourceSource, ResourceView, TopologyHint};
use crate::manager::claims::machine;
use crate::manager::{Manager, pool_claims};
use nodedock_model::{
    DriverName, ExtendedResource, HeldKeys, PluginDevice, PodContainer, PodRequest, Problem, Uid,
};

pub(super) struct Snapshot {
    pub(super) offer: Offer,
    /// Devices of pods, and of claims.
    taken: BTreeSet<String>,
}

impl Snapshot {
    pub(super) fn stock(&self) -> Stock<'_> {
        Stock { devices: &self.offer.devices, taken: &self.taken }
    }

    pub(super) fn is_healthy(&self, id: &str) -> bool {
        self.offer.devices.get(id).is_some_and(|device| device.healthy)
    }
}

impl Manager {
    /// Returns a resource, if it has a source. `own`: a pod, and its pool claim whose devices do not count as taken.
    pub(super) fn snapshot(
        &self,
        resource: &ExtendedResource,
        own: Option<(&Uid, &Uid)>,
    ) -> Result<Snapshot, Problem> {
        let mut snapshot = {
            let state = self.devices();
            let offer = state.resources.source(resource).ok_or_else(|| choose::unregistered(resource))?;
            let taken = match own {
                Some((pod, claim)) => state.table.taken_but(resource, pod, claim),
                None => state.table.taken(resource),
            };
            Snapshot { offer: offer.clone(), taken }
        };
        // After the lock of the devices was dropped: the claims have their own.
        if let ResourceSource::Pools(driver) = &snapshot.offer.source {
            let held = self.held_by_claims(driver, &snapshot, own.map(|(_, claim)| claim));
            snapshot.taken.extend(held);
        }
        Ok(snapshot)
    }

    fn held_by_claims(&self, driver: &DriverName, snapshot: &Snapshot, own: Option<&Uid>) -> Vec<String> {
        let allocated = self.held_by_allocations();
        let is_held = |id: &String| {
            let Some((pool, device)) = pool_claims::split_id(id) else { return true };
            let holders = self.holders_of_device(driver, pool.as_str(), device.as_str());
            let is_allocated = || {
                let holds = self.facts(driver, pool.as_str(), device.as_str()).exclusive_holds(
                    driver,
                    pool.as_str(),
                    device.as_str(),
                );
                holds.iter().any(|hold| allocated.in_the_way(own, hold).is_some())
            };
            holders.iter().any(|claim| Some(&claim.uid) != own) || is_allocated()
        };
        snapshot.stock().available().map(|device| device.id.clone()).filter(is_held).collect()
    }

    /// What claims have that are allocated and not prepared.
    fn held_by_allocations(&self) -> HeldKeys<Uid> {
        let facts = |driver: &DriverName, pool: &str, device: &str| self.facts(driver, pool, device);
        let mut held = HeldKeys::default();
        for (uid, allocation) in self.source.allocated() {
            machine::holds(&allocation, facts).iter().for_each(|hold| held.add(&uid, hold));
        }
        held
    }

    /// Every resource, as a kubelet counts it.
    pub fn capacity(&self) -> Capacity {
        let state = self.devices();
        let view = |name: &ExtendedResource, device: &PluginDevice| DeviceView {
            device: device.clone(),
            pods: state.table.pods_with(name, &device.id),
        };
        let resources = state.resources.iter().map(|(name, offer)| ResourceView {
            name: name.clone(),
            source: offer.source.clone(),
            active: offer.is_active(),
            options: offer.plugin.as_ref().filter(|_| offer.has_listed).map(|(_, plugin)| plugin.options()),
            devices: offer.devices.values().map(|device| view(name, device)).collect(),
        });
        Capacity { resources: resources.collect(), removed: state.resources.removed().cloned().collect() }
    }

    /// Whether a claim has a device of a pool, by its ID in the resource.
    pub fn is_claimed(&self, driver: &DriverName, id: &str) -> bool {
        pool_claims::split_id(id).is_some_and(|(pool, device)| {
            !self.users_of_device(driver, pool.as_str(), device.as_str()).is_empty()
        })
    }

    /// NUMA nodes that can serve a pod's requests: for each container and known resource, or each resource of the pod.
    pub fn hints(&self, request: &PodRequest, scope: HintScope) -> Vec<ResourceHints> {
        match scope {
            HintScope::Pod => self.pod_hints(request),
            HintScope::Container => self.container_hints(request),
        }
    }

    fn pod_hints(&self, request: &PodRequest) -> Vec<ResourceHints> {
        let record = self.allocation(request.pod.uid.as_str());
        let hint = |(resource, count): (ExtendedResource, usize)| {
            let entries = record.iter().flat_map(|record| &record.entries);
            let held = entries.filter(|entry| entry.resource == resource).flat_map(|e| e.devices.keys());
            let hints = self.hint(&resource, &held.cloned().collect(), &BTreeSet::new(), count)?;
            Some(ResourceHints { container: String::new(), resource, hints })
        };
        hints::pod_request(&request.containers).into_iter().filter_map(hint).collect()
    }

    fn container_hints(&self, request: &PodRequest) -> Vec<ResourceHints> {
        let of = |container: &PodContainer| {
            let wanted = container.resources.iter().filter(|(_, count)| **count > 0);
            let hint = |(resource, count): (&ExtendedResource, &u32)| {
                let (held, reusable) = self.held_and_reusable(request, container, resource);
                let hints = self.hint(resource, &held, &reusable, *count as usize)?;
                Some(ResourceHints { container: container.name.clone(), resource: resource.clone(), hints })
            };
            wanted.filter_map(hint).collect::<Vec<_>>()
        };
        request.containers.iter().flat_map(of).collect()
    }

    /// The devices of a container, and those that it may reuse from containers before it.
    fn held_and_reusable(
        &self,
        request: &PodRequest,
        container: &PodContainer,
        resource: &ExtendedResource,
    ) -> (BTreeSet<String>, BTreeSet<String>) {
        let Some(record) = self.allocation(request.pod.uid.as_str()) else { return Default::default() };
        let mut reuse = Reuse::default();
        let entries = record.entries.iter().filter(|entry| entry.resource == *resource);
        entries.take_while(|entry| entry.container != container.name).for_each(|entry| reuse.settle(entry));
        let held =
            record.entry(&container.name, resource).map(|entry| entry.devices.keys().cloned().collect());
        (held.unwrap_or_default(), reuse.devices().clone())
    }

    /// None: the resource has no source.
    fn hint(
        &self,
        resource: &ExtendedResource,
        held: &BTreeSet<String>,
        reusable: &BTreeSet<String>,
        count: usize,
    ) -> Option<Option<Vec<TopologyHint>>> {
        let snapshot = self.snapshot(resource, None).ok()?;
        Some(hints::hints(&snapshot.stock(), &self.settings.numa_nodes, held, reusable, count))
    }
}
