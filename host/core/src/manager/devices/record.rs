//! Changes of a pod's record: entries added, answered, left out. Pure.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_model::{
    AllocationEntry, ContainerKind, ExtendedResource, PodAllocation, PodContainer, PodRequest,
};

/// The key of an entry: a container and a resource.
pub(super) type Key = (String, ExtendedResource);

/// One resource of one container of a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Want {
    pub(super) container: String,
    pub(super) kind: ContainerKind,
    pub(super) resource: ExtendedResource,
    pub(super) count: usize,
    pub(super) affinity: Vec<u32>,
}

impl Want {
    pub(super) fn key(&self) -> Key {
        (self.container.clone(), self.resource.clone())
    }
}

pub(super) fn key(entry: &AllocationEntry) -> Key {
    (entry.container.clone(), entry.resource.clone())
}

/// The wants of a request, in the order in which containers start, then by resource.
pub(super) fn wants(request: &PodRequest) -> Vec<Want> {
    let of = |container: &PodContainer| {
        let want = |(resource, count): (&ExtendedResource, &u32)| Want {
            container: container.name.clone(),
            kind: container.kind,
            resource: resource.clone(),
            count: *count as usize,
            affinity: container.numa_affinity.clone(),
        };
        container.resources.iter().map(want).collect::<Vec<_>>()
    };
    in_order(request).into_iter().flat_map(of).collect()
}

/// The containers and resources of a request, in the pod's order.
pub(super) fn keys(request: &PodRequest) -> impl Iterator<Item = Key> {
    let of = |container: &PodContainer| {
        let keys = container.resources.keys().map(|resource| (container.name.clone(), resource.clone()));
        keys.collect::<Vec<_>>()
    };
    request.containers.iter().flat_map(of)
}

/// Init containers and sidecars start before the others.
fn in_order(request: &PodRequest) -> Vec<&PodContainer> {
    let mut containers: Vec<_> = request.containers.iter().collect();
    containers.sort_by_key(|container| container.kind.is_app());
    containers
}

/// The record without some entries, and the others in the pod's order.
pub(super) fn ordered(
    record: &PodAllocation,
    request: &PodRequest,
    without: &BTreeSet<Key>,
) -> PodAllocation {
    let order: Vec<_> = in_order(request).into_iter().map(|container| &container.name).collect();
    let place = |entry: &AllocationEntry| order.iter().position(|name| **name == entry.container);
    let mut record = record.clone();
    record.entries.retain(|entry| !without.contains(&key(entry)));
    record.entries.sort_by_cached_key(|entry| (place(entry).unwrap_or(usize::MAX), entry.resource.clone()));
    record
}

/// The record with the entries that plugins answered. Those that were refused are left out.
pub(super) fn answered<E>(
    record: &PodAllocation,
    ends: &BTreeMap<Key, Result<AllocationEntry, E>>,
) -> PodAllocation {
    let answer = |entry: &AllocationEntry| match ends.get(&key(entry)) {
        None => Some(entry.clone()),
        Some(answer) => answer.as_ref().ok().cloned(),
    };
    PodAllocation { entries: record.entries.iter().filter_map(answer).collect(), ..record.clone() }
}
