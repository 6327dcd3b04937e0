//! Topology hints: from which NUMA nodes a request can be served. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::affinity;
use super::view::TopologyHint;
use nodedock_model::{ContainerKind, ExtendedResource, PluginDevice, PodContainer, limit};

/// A resource as hints see it.
pub(super) struct Ground<'a> {
    pub(super) devices: &'a BTreeMap<String, PluginDevice>,
    /// Healthy devices that nobody has.
    pub(super) available: BTreeSet<String>,
    /// The machine's NUMA nodes.
    pub(super) machine: &'a [u32],
}

/// Hints for a container or a pod. `held`: what it has already. None: there is nothing to align, or it is on more nodes than a
/// kubelet aligns.
pub(super) fn hints(
    ground: &Ground<'_>,
    held: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    count: usize,
) -> Option<Vec<TopologyHint>> {
    if !affinity::has_topology(ground.devices.values()) {
        return None;
    }
    let nodes: Vec<u32> = affinity::nodes_of(ground.devices.values(), ground.machine).into_iter().collect();
    if nodes.len() > limit::HINT_NUMA_NODES_MAX {
        return None;
    }
    if !held.is_empty() {
        let same = held.len() == count;
        return Some(if same { generate(ground, &nodes, held, &BTreeSet::new(), count) } else { Vec::new() });
    }
    if ground.available.union(reusable).count() < count {
        return Some(Vec::new());
    }
    Some(generate(ground, &nodes, &ground.available, reusable, count))
}

/// How many devices there are of each combination of nodes: a machine has few of them, whatever its devices.
type Counts = BTreeMap<u32, usize>;

fn generate(
    ground: &Ground<'_>,
    nodes: &[u32],
    available: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    count: usize,
) -> Vec<TopologyHint> {
    let of = |ids: &BTreeSet<String>| counts(ids.iter().filter_map(|id| ground.devices.get(id)), nodes);
    let (all, available, reusable) = (counts(ground.devices.values(), nodes), of(available), of(reusable));
    let sets = affinity::sets(nodes.len());
    let smallest = sets.iter().filter(|set| within(&all, **set) >= count).map(|set| set.count_ones()).min();
    let covers = |set: u32| reusable.keys().all(|bits| bits & set != 0);
    let serves = |set: &u32| covers(*set) && within(&available, *set) + within(&reusable, *set) >= count;
    let hint = |set: u32| TopologyHint {
        numa_nodes: nodes
            .iter()
            .enumerate()
            .filter(|(place, _)| set & 1 << place != 0)
            .map(|(_, n)| *n)
            .collect(),
        preferred: smallest == Some(set.count_ones()),
    };
    sets.into_iter().filter(serves).map(hint).collect()
}

/// Devices without a node of the machine are of no set.
fn counts<'a>(devices: impl Iterator<Item = &'a PluginDevice>, nodes: &[u32]) -> Counts {
    let mut counts = Counts::new();
    for bits in devices.map(|device| affinity::bits(device, nodes)).filter(|bits| *bits != 0) {
        *counts.entry(bits).or_default() += 1;
    }
    counts
}

fn within(counts: &Counts, set: u32) -> usize {
    counts.iter().filter(|(bits, _)| *bits & set != 0).map(|(_, count)| count).sum()
}

/// What a pod needs at once: its containers and sidecars together, or an init container with the sidecars that started before it.
pub(super) fn pod_request(containers: &[PodContainer]) -> BTreeMap<ExtendedResource, usize> {
    let mut most: BTreeMap<ExtendedResource, usize> = BTreeMap::new();
    let mut running: BTreeMap<ExtendedResource, usize> = BTreeMap::new();
    let mut containers: Vec<_> = containers.iter().collect();
    containers.sort_by_key(|container| container.kind.is_app());
    for container in containers {
        for (resource, count) in container.resources.iter().filter(|(_, count)| **count > 0) {
            let running = running.entry(resource.clone()).or_default();
            let now = *running + *count as usize;
            let most = most.entry(resource.clone()).or_default();
            *most = now.max(*most);
            if container.kind != ContainerKind::Init {
                *running = now;
            }
        }
    }
    most
}
