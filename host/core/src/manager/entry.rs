//! Devices for containers, with the claims that have them. Pure.

use std::collections::BTreeMap;

use nodedock_allocator::resource::{DeviceNodes, Want};
use nodedock_model::{
    ContainerKind, ExtendedResource, PodRequest, PooledClaim, Problem, plugin_driver,
};

/// A container and a resource.
pub(crate) type Key = (String, ExtendedResource);

/// The choice for each want. None: no devices are wanted, and none are held.
pub(crate) type Choices = BTreeMap<Key, Chosen>;
pub(crate) type Chosen = Result<Option<Entry>, Problem>;

/// Devices of a resource for a container, and the claim that has them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) container: String,
    pub(crate) kind: ContainerKind,
    pub(crate) resource: ExtendedResource,
    pub(crate) claim: PooledClaim,
    pub(crate) devices: DeviceNodes,
    /// Its claim was prepared once.
    pub(crate) is_prepared: bool,
}

impl Entry {
    /// Returns whether the devices belong to a device plugin without an adapter.
    pub(crate) fn is_of_plugin(&self) -> bool {
        self.claim.driver == plugin_driver(&self.resource)
    }
}

pub(super) fn key(want: &Want) -> Key {
    (want.container.clone(), want.resource.clone())
}

/// The want that an entry serves. The affinity of its container is not recorded; the nodes of its devices are.
pub(super) fn want(entry: &Entry) -> Want {
    Want {
        container: entry.container.clone(),
        kind: entry.kind,
        resource: entry.resource.clone(),
        count: entry.devices.len(),
        affinity: entry.devices.values().flatten().copied().collect(),
    }
}

pub(super) fn entry(want: &Want, claim: PooledClaim, devices: DeviceNodes) -> Entry {
    let (container, kind, resource) = (want.container.clone(), want.kind, want.resource.clone());
    Entry {
        container,
        kind,
        resource,
        claim,
        devices,
        is_prepared: false,
    }
}

/// The containers and resources of a request, in the pod's order.
pub(super) fn keys(request: &PodRequest) -> impl Iterator<Item = Key> {
    request.containers.iter().flat_map(|container| {
        let keys = container
            .resources
            .keys()
            .map(|resource| (container.name.clone(), resource.clone()));
        keys.collect::<Vec<_>>()
    })
}
