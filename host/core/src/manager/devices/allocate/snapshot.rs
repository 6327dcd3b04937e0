//! Resources at one moment, for choices and for hints.

use std::collections::BTreeSet;

use super::DeviceChoices;
use crate::manager::claims::machine;
use crate::manager::devices::held;
use crate::manager::devices::reuse::Reuse;
use crate::manager::pool_claims;
use crate::resources::{HintScope, Offer, ResourceHints, ResourceSource};
use nodedock_allocator::resource::{self as choose, Stock, TopologyHint, Want};
use nodedock_model::{
    DeviceName, DriverName, ExtendedResource, HeldKeys, PodContainer, PodRequest, Problem, Uid,
    device_name, plugin_driver,
};

pub(super) struct Snapshot {
    pub(super) offer: Offer,
    /// Devices of pods, and of claims.
    taken: BTreeSet<String>,
}

impl Snapshot {
    pub(super) fn stock(&self) -> Stock<'_> {
        Stock {
            devices: &self.offer.devices,
            taken: &self.taken,
        }
    }

    pub(super) fn is_healthy(&self, id: &str) -> bool {
        self.offer
            .devices
            .get(id)
            .is_some_and(|device| device.healthy)
    }
}

impl DeviceChoices {
    /// Returns a resource, if it has a source. `own`: the claim whose devices do not count as taken.
    pub(super) fn snapshot(
        &self,
        resource: &ExtendedResource,
        own: Option<&Uid>,
    ) -> Result<Snapshot, Problem> {
        let offer = self
            .devices
            .offer(resource)
            .ok_or_else(|| choose::unregistered(resource))?;
        // Before the claims are read: a device that is reserved no more is in one of them.
        let taken = {
            let chosen = self.chosen.lock();
            let reserved = chosen
                .iter()
                .filter(|(claim, of)| of.resource == *resource && own != Some(claim));
            reserved
                .flat_map(|(_, of)| of.devices.iter().cloned())
                .collect()
        };
        let mut snapshot = Snapshot { offer, taken };
        let held = match &snapshot.offer.source {
            ResourceSource::Pools(driver) => self.held_of_pools(driver, &snapshot, own),
            ResourceSource::Plugin(_) => self.held_of_plugin(resource, &snapshot, own),
            ResourceSource::Remembered => Vec::new(),
        };
        snapshot.taken.extend(held);
        Ok(snapshot)
    }

    fn held_of_pools(
        &self,
        driver: &DriverName,
        snapshot: &Snapshot,
        own: Option<&Uid>,
    ) -> Vec<String> {
        let allocated = self.held_by_allocations();
        let stock = snapshot.stock();
        let held = stock.available().filter(|device| {
            let Some((pool, device)) = pool_claims::split_id(&device.id) else {
                return true;
            };
            self.is_held(driver, pool.as_str(), device.as_str(), own, &allocated)
        });
        held.map(|device| device.id.clone()).collect()
    }

    /// A plugin may list very many devices: those that no claim has are not looked at one by one.
    fn held_of_plugin(
        &self,
        resource: &ExtendedResource,
        snapshot: &Snapshot,
        own: Option<&Uid>,
    ) -> Vec<String> {
        let driver = plugin_driver(resource);
        let mut held: BTreeSet<DeviceName> = {
            let table = self.records.table();
            let others = table
                .claims_of_driver(&driver)
                .filter(|claim| own != Some(&claim.id.uid));
            others
                .flat_map(|claim| claim.allocation.of_driver(&driver))
                .map(|d| d.device.clone())
                .collect()
        };
        // Whose nodes are known may be with another driver.
        let known = self.holds.of_driver(&driver);
        let allocated = if known.is_empty() {
            HeldKeys::default()
        } else {
            self.held_by_allocations()
        };
        held.extend(known.into_iter().filter_map(|(pool, device)| {
            self.is_held(&driver, pool.as_str(), device.as_str(), own, &allocated)
                .then_some(device)
        }));
        if held.is_empty() {
            return Vec::new();
        }
        let available = snapshot.stock().available().map(|device| device.id.clone());
        available
            .filter(|id| held.contains(&device_name(id)))
            .collect()
    }

    /// Returns whether another claim has a device, or something that the device would hold.
    fn is_held(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
        own: Option<&Uid>,
        allocated: &HeldKeys<Uid>,
    ) -> bool {
        let holders = self.holds.holders_of_device(driver, pool, device);
        if holders.iter().any(|claim| Some(&claim.uid) != own) {
            return true;
        }
        let facts = self.holds.facts(driver, pool, device);
        let holds = facts.exclusive_holds(driver, pool, device);
        holds
            .iter()
            .any(|hold| allocated.in_the_way(own, hold).is_some())
    }

    /// Returns the holds of claims that are allocated and not prepared.
    fn held_by_allocations(&self) -> HeldKeys<Uid> {
        let mut held = HeldKeys::default();
        for (uid, allocation) in self.source.allocated() {
            machine::holds(&allocation, |driver, pool, device| {
                self.holds.facts(driver, pool, device)
            })
            .iter()
            .for_each(|hold| held.add(&uid, hold));
        }
        held
    }

    /// Returns as many devices as a container wants that fit beside each other, since they may use one counter: first of the chosen
    /// devices, then of all others.
    pub(super) fn that_fit_together(
        &self,
        want: &Want,
        snapshot: &Snapshot,
        chosen: BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Problem> {
        let Some(driver) = snapshot.offer.driver(&want.resource) else {
            return Ok(chosen);
        };
        let fit = |ids: &BTreeSet<String>| {
            let devices = ids
                .iter()
                .filter_map(|id| pool_claims::device_of(&want.resource, &driver, id));
            self.holds.fit_together(&driver, devices)
        };
        if fit(&chosen) {
            return Ok(chosen);
        }
        let mut fitting = BTreeSet::new();
        for id in chosen
            .iter()
            .chain(snapshot.stock().available().map(|device| &device.id))
        {
            fitting.insert(id.clone());
            if !fit(&fitting) {
                fitting.remove(id);
            }
            if fitting.len() == want.count {
                return Ok(fitting);
            }
        }
        Err(choose::too_few(want, want.count, fitting.len()))
    }

    /// NUMA nodes that can serve a pod's requests: for each container and known resource, or each resource of the pod.
    pub fn hints(&self, request: &PodRequest, scope: HintScope) -> Vec<ResourceHints> {
        match scope {
            HintScope::Pod => self.pod_hints(request),
            HintScope::Container => self.container_hints(request),
        }
    }

    fn pod_hints(&self, request: &PodRequest) -> Vec<ResourceHints> {
        let entries = held::entries(&self.records.table(), request.pod.uid.as_str());
        let resources = choose::pod_request(&request.containers).into_iter();
        let hints = resources.filter_map(|(resource, count)| {
            let held = entries
                .iter()
                .filter(|entry| entry.resource == resource)
                .flat_map(|e| e.devices.keys());
            let hints = self.hint(&resource, &held.cloned().collect(), &BTreeSet::new(), count)?;
            Some(ResourceHints {
                container: String::new(),
                resource,
                hints,
            })
        });
        hints.collect()
    }

    fn container_hints(&self, request: &PodRequest) -> Vec<ResourceHints> {
        let hints = request.containers.iter().flat_map(|container| {
            let wanted = container.resources.iter().filter(|(_, count)| **count > 0);
            wanted.filter_map(move |(resource, count)| {
                let (held, reusable) = self.held_and_reusable(request, container, resource);
                let hints = self.hint(resource, &held, &reusable, *count as usize)?;
                Some(ResourceHints {
                    container: container.name.clone(),
                    resource: resource.clone(),
                    hints,
                })
            })
        });
        hints.collect()
    }

    /// The devices of a container, and those that it may reuse from containers before it.
    fn held_and_reusable(
        &self,
        request: &PodRequest,
        container: &PodContainer,
        resource: &ExtendedResource,
    ) -> (BTreeSet<String>, BTreeSet<String>) {
        let entries = held::entries(&self.records.table(), request.pod.uid.as_str());
        let mut reuse = Reuse::default();
        let of = entries.iter().filter(|entry| entry.resource == *resource);
        of.clone()
            .take_while(|entry| entry.container != container.name)
            .for_each(|entry| reuse.settle(entry));
        let held = of
            .filter(|entry| entry.container == container.name)
            .flat_map(|entry| entry.devices.keys());
        (held.cloned().collect(), reuse.devices().clone())
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
        Some(choose::hints(
            &snapshot.stock(),
            &self.settings.numa_nodes,
            held,
            reusable,
            count,
        ))
    }
}
