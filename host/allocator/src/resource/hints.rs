//! Topology hints: which NUMA nodes can serve a request. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::HINT_NUMA_NODES_MAX;
use super::affinity;
use super::choose::Stock;
use nodedock_model::{ContainerKind, ExtendedResource, PluginDevice, PodContainer};

/// NUMA nodes that can serve a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyHint {
    /// Ascending.
    pub numa_nodes: Vec<u32>,
    /// No smaller set of nodes could serve the request.
    pub preferred: bool,
}

/// Hints for a container or a pod. `machine`: the machine's NUMA nodes. `held`: devices that it has already. None: there is nothing to
/// align, or the devices are on more nodes than a kubelet aligns.
pub fn hints(
    stock: &Stock<'_>,
    machine: &[u32],
    held: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    count: usize,
) -> Option<Vec<TopologyHint>> {
    if !affinity::has_topology(stock.devices.values()) {
        return None;
    }
    let nodes: Vec<u32> = affinity::nodes_of(stock.devices.values(), machine)
        .into_iter()
        .collect();
    if nodes.len() > HINT_NUMA_NODES_MAX {
        return None;
    }
    if !held.is_empty() {
        let same = held.len() == count;
        return Some(if same {
            generate(stock, &nodes, held, &BTreeSet::new(), count)
        } else {
            Vec::new()
        });
    }
    let available = stock
        .available()
        .map(|device| device.id.clone())
        .collect::<BTreeSet<_>>();
    if available.union(reusable).count() < count {
        return Some(Vec::new());
    }
    Some(generate(stock, &nodes, &available, reusable, count))
}

/// The number of devices for each combination of nodes, of which a machine has few.
type Counts = BTreeMap<u32, usize>;

fn generate(
    stock: &Stock<'_>,
    nodes: &[u32],
    available: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    count: usize,
) -> Vec<TopologyHint> {
    let all = counts(stock.devices.values(), nodes);
    let [available, reusable] = [available, reusable]
        .map(|ids| counts(ids.iter().filter_map(|id| stock.devices.get(id)), nodes));
    let sets = affinity::sets(nodes.len());
    let smallest = sets
        .iter()
        .filter(|set| within(&all, **set) >= count)
        .map(|set| set.count_ones())
        .min();
    let fitting = sets.into_iter().filter(|set| {
        reusable.keys().all(|bits| bits & set != 0)
            && within(&available, *set) + within(&reusable, *set) >= count
    });
    let hints = fitting.map(|set| TopologyHint {
        numa_nodes: (0..nodes.len())
            .filter(|place| set & 1 << place != 0)
            .map(|place| nodes[place])
            .collect(),
        preferred: smallest == Some(set.count_ones()),
    });
    hints.collect()
}

/// Counts devices; those without a node of the machine are left out.
fn counts<'a>(devices: impl Iterator<Item = &'a PluginDevice>, nodes: &[u32]) -> Counts {
    let mut counts = Counts::new();
    for bits in devices
        .map(|device| affinity::bits(device, nodes))
        .filter(|bits| *bits != 0)
    {
        *counts.entry(bits).or_default() += 1;
    }
    counts
}

fn within(counts: &Counts, set: u32) -> usize {
    counts
        .iter()
        .filter(|(bits, _)| *bits & set != 0)
        .map(|(_, count)| count)
        .sum()
}

/// The largest number of devices that a pod needs at once: its containers and sidecars together, or an init container with the sidecars that
/// started before it.
pub fn pod_request(containers: &[PodContainer]) -> BTreeMap<ExtendedResource, usize> {
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
