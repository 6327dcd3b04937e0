//! Resources as they are now: for choices, for hints, and for those who ask.

use std::collections::BTreeSet;

use super::choose::Stock;
use super::hints::{self, Ground};
use super::resources::{Listed, Origin};
use super::reuse::Reuse;
use super::{Capacity, DeviceView, HintScope, Inner, ResourceHints, ResourceView, pooled};
use nodedock_model::{DriverName, ExtendedResource, PluginDevice, PodContainer, PodRequest, Uid};

/// A resource at one moment.
pub(super) struct Snapshot {
    pub(super) devices: Listed,
    pub(super) origin: Origin,
    /// Devices that pods have, or other claims.
    pub(super) taken: BTreeSet<String>,
}

impl Snapshot {
    pub(super) fn stock(&self) -> Stock<'_> {
        Stock { devices: &self.devices, taken: &self.taken }
    }

    pub(super) fn is_healthy(&self, id: &str) -> bool {
        self.devices.get(id).is_some_and(|device| device.healthy)
    }

    fn available(&self) -> BTreeSet<String> {
        let is_free = |device: &&PluginDevice| device.healthy && !self.taken.contains(&device.id);
        self.devices.values().filter(is_free).map(|device| device.id.clone()).collect()
    }
}

impl Inner {
    /// A resource, if anybody offers it. `own`: a pod, and the claim of its entries whose devices are not counted as taken.
    pub(super) fn snapshot(
        &self,
        resource: &ExtendedResource,
        own: Option<(&Uid, &Uid)>,
    ) -> Option<Snapshot> {
        let mut snapshot = {
            let state = self.state();
            let offer = state.resources.source(resource)?;
            let taken = match own {
                Some((pod, claim)) => state.table.taken_but(resource, pod, claim),
                None => state.table.taken(resource),
            };
            Snapshot { devices: offer.devices.clone(), origin: offer.origin.clone(), taken }
        };
        // The claim manager has a lock of its own: ours is given back before it is asked.
        if let Origin::Pools(driver) = &snapshot.origin {
            let held = self.held_by_claims(driver, &snapshot, own.map(|(_, claim)| claim));
            snapshot.taken.extend(held);
        }
        Some(snapshot)
    }

    fn held_by_claims(&self, driver: &DriverName, snapshot: &Snapshot, own: Option<&Uid>) -> Vec<String> {
        let is_held = |id: &String| {
            let Some((pool, device)) = pooled::split(id) else { return true };
            let holders = self.holders.holders(driver, pool.as_str(), device.as_str());
            holders.iter().any(|claim| Some(&claim.uid) != own)
        };
        snapshot.available().into_iter().filter(is_held).collect()
    }

    pub(super) fn capacity(&self) -> Capacity {
        let state = self.state();
        let view = |name: &ExtendedResource, device: &PluginDevice| DeviceView {
            device: device.clone(),
            pods: state.table.pods_with(name, &device.id),
        };
        let resources = state.resources.iter().map(|(name, offer)| ResourceView {
            name: name.clone(),
            source: offer.origin.source(),
            active: offer.is_active(),
            devices: offer.devices.values().map(|device| view(name, device)).collect(),
        });
        Capacity { resources: resources.collect(), removed: state.resources.removed().cloned().collect() }
    }

    pub(super) fn hints(&self, request: &PodRequest, scope: HintScope) -> Vec<ResourceHints> {
        match scope {
            HintScope::Pod => self.pod_hints(request),
            HintScope::Container => self.container_hints(request),
        }
    }

    fn pod_hints(&self, request: &PodRequest) -> Vec<ResourceHints> {
        let record = self.state().table.pod(request.pod.uid.as_str()).cloned();
        let hint = |(resource, count): (ExtendedResource, usize)| {
            let entries = record.iter().flat_map(|record| &record.entries);
            let held =
                entries.filter(|entry| entry.resource == resource).flat_map(|entry| entry.devices.keys());
            let hints = self.hint(&resource, &held.cloned().collect(), &BTreeSet::new(), count)?;
            Some(ResourceHints { container: String::new(), resource, hints })
        };
        hints::pod_request(&request.containers).into_iter().filter_map(hint).collect()
    }

    fn container_hints(&self, request: &PodRequest) -> Vec<ResourceHints> {
        let of = |container: &PodContainer| {
            let wanted = container.resources.iter().filter(|(_, count)| **count > 0);
            let hint = |(resource, count): (&ExtendedResource, &u32)| {
                let (held, reusable) = self.of_container(request, container, resource);
                let hints = self.hint(resource, &held, &reusable, *count as usize)?;
                Some(ResourceHints { container: container.name.clone(), resource: resource.clone(), hints })
            };
            wanted.filter_map(hint).collect::<Vec<_>>()
        };
        request.containers.iter().flat_map(of).collect()
    }

    /// What a container has of a resource, and what it may use again of containers before it.
    fn of_container(
        &self,
        request: &PodRequest,
        container: &PodContainer,
        resource: &ExtendedResource,
    ) -> (BTreeSet<String>, BTreeSet<String>) {
        let record = self.state().table.pod(request.pod.uid.as_str()).cloned();
        let Some(record) = record else { return Default::default() };
        let mut reuse = Reuse::default();
        let entries = record.entries.iter().filter(|entry| entry.resource == *resource);
        entries.take_while(|entry| entry.container != container.name).for_each(|entry| reuse.settle(entry));
        let held =
            record.entry(&container.name, resource).map(|entry| entry.devices.keys().cloned().collect());
        (held.unwrap_or_default(), reuse.devices().clone())
    }

    /// None: nobody offers the resource.
    fn hint(
        &self,
        resource: &ExtendedResource,
        held: &BTreeSet<String>,
        reusable: &BTreeSet<String>,
        count: usize,
    ) -> Option<Option<Vec<super::TopologyHint>>> {
        let snapshot = self.snapshot(resource, None)?;
        let available = snapshot.available();
        let ground = Ground { devices: &snapshot.devices, available, machine: &self.settings.numa_nodes };
        Some(hints::hints(&ground, held, reusable, count))
    }
}
