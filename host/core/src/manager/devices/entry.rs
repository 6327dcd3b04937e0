//! What was chosen for containers, and what their pods have by claims. Pure.

use std::collections::BTreeMap;

use crate::manager::claims::table::ClaimTable;
use crate::manager::pool_claims;
use nodedock_allocator::resource::{DeviceNodes, Want};
use nodedock_model::{
    ClaimRecord, ClaimState, ContainerKind, ExtendedResource, ObjectRef, PodContainer, PodRequest,
    PooledClaim, Problem, plugin_driver,
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
    /// Whether a device plugin without an adapter has the devices.
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

/// What a pod has, in the order of its containers: of claims that are not being unprepared.
pub(super) fn entries(table: &ClaimTable, pod: &str) -> Vec<Entry> {
    let Some(record) = table.pod(pod) else {
        return Vec::new();
    };
    let entry = |user: pool_claims::User| {
        let claim = table
            .claim(user.claim.uid.as_str())
            .filter(|claim| claim.pods.contains_key(pod))?;
        let driver = claim.allocation.devices.first()?.driver.clone();
        Some(Entry {
            container: user.container,
            kind: user.kind,
            resource: user.resource,
            claim: PooledClaim {
                driver,
                id: user.claim,
            },
            devices: pool_claims::devices_of(claim),
            is_prepared: is_prepared(claim),
        })
    };
    pool_claims::users(record)
        .into_iter()
        .filter_map(entry)
        .collect()
}

fn is_prepared(claim: &ClaimRecord) -> bool {
    claim.state == ClaimState::Prepared
        || claim.drivers.values().any(|part| part.prepared.is_some())
}

/// Pods that have devices of each resource, by device.
pub(super) fn owners(
    table: &ClaimTable,
) -> BTreeMap<ExtendedResource, BTreeMap<String, Vec<ObjectRef>>> {
    let mut owners: BTreeMap<_, BTreeMap<_, Vec<ObjectRef>>> = BTreeMap::new();
    for claim in table.claims() {
        let Some(of) = &claim.resource else { continue };
        let of_resource = owners.entry(of.resource.clone()).or_default();
        for device in of.devices.keys() {
            let pods: &mut Vec<_> = of_resource.entry(device.clone()).or_default();
            // Containers of one pod may have it one after the other.
            pods.extend(
                claim
                    .pods
                    .values()
                    .filter(|pod| !pods.contains(pod))
                    .cloned()
                    .collect::<Vec<_>>(),
            );
        }
    }
    owners
}

/// The containers and resources of a request, in the pod's order.
pub(super) fn keys(request: &PodRequest) -> impl Iterator<Item = Key> {
    let of = |container: &PodContainer| {
        let keys = container
            .resources
            .keys()
            .map(|resource| (container.name.clone(), resource.clone()));
        keys.collect::<Vec<_>>()
    };
    request.containers.iter().flat_map(of)
}
