//! NUMA nodes of devices: which devices are aligned with a container, and which set of nodes is the smallest. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::HINT_NUMA_NODES_MAX;
use nodedock_model::{PluginDevice, limit};

/// Ids of devices by their alignment with an affinity; each part in the order in which it is used.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) aligned: Vec<String>,
    pub(super) unaligned: Vec<String>,
    /// Devices without a NUMA node, or all of them without an affinity.
    pub(super) indifferent: Vec<String>,
}

/// Returns true if a device of the resource has NUMA nodes.
pub(super) fn has_topology<'a>(mut devices: impl Iterator<Item = &'a PluginDevice>) -> bool {
    devices.any(|device| !device.numa_nodes.is_empty())
}

/// Splits devices that are available. Nodes of the affinity come first, then the others; among either the one with fewer devices
/// first, so that large groups stay whole. A device of several nodes counts to the first of them.
pub(super) fn split(available: &[&PluginDevice], affinity: &[u32], has_topology: bool) -> Split {
    let mut split = Split::default();
    if affinity.is_empty() || !has_topology {
        split.indifferent = available.iter().map(|device| device.id.clone()).collect();
        split.indifferent.sort_unstable();
        return split;
    }
    let places = places(available, affinity);
    let mut placed: Vec<_> = available
        .iter()
        .map(|device| (place(device, &places), &device.id))
        .collect();
    placed.sort_unstable();
    for (place, id) in placed {
        let part = match place {
            Some((_, node)) if affinity.contains(&node) => &mut split.aligned,
            Some(_) => &mut split.unaligned,
            None => &mut split.indifferent,
        };
        part.push(id.clone());
    }
    split
}

/// Each node's place among the nodes of the devices.
fn places(available: &[&PluginDevice], affinity: &[u32]) -> BTreeMap<u32, usize> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for node in available.iter().flat_map(|device| &device.numa_nodes) {
        *counts.entry(*node).or_default() += 1;
    }
    let mut nodes: Vec<_> = counts
        .into_iter()
        .map(|(n, count)| (!affinity.contains(&n), count, n))
        .collect();
    nodes.sort_unstable();
    nodes
        .into_iter()
        .enumerate()
        .map(|(place, (_, _, node))| (node, place))
        .collect()
}

/// The first of a device's nodes, and its place.
fn place(device: &PluginDevice, places: &BTreeMap<u32, usize>) -> Option<(usize, u32)> {
    device
        .numa_nodes
        .iter()
        .map(|node| (places[node], *node))
        .min()
}

/// NUMA nodes that have devices, of those that the machine has; ascending.
pub(super) fn nodes_of<'a>(
    devices: impl Iterator<Item = &'a PluginDevice>,
    machine: &[u32],
) -> BTreeSet<u32> {
    devices
        .flat_map(|device| &device.numa_nodes)
        .copied()
        .filter(|node| machine.contains(node))
        .collect()
}

/// Nodes of a device as bits, by their places in `nodes`, of which there are at most `HINT_NUMA_NODES_MAX`.
pub(super) fn bits(device: &PluginDevice, nodes: &[u32]) -> u32 {
    let places = device
        .numa_nodes
        .iter()
        .filter_map(|node| nodes.iter().position(|known| known == node));
    places.fold(0, |bits, place| bits | 1 << place)
}

/// Every set of that many nodes, the smaller first, and among equals those of lower nodes.
pub(super) fn sets(nodes: usize) -> Vec<u32> {
    let mut sets: Vec<u32> = (1..1 << nodes).collect();
    sets.sort_by_key(|set| (set.count_ones(), set.reverse_bits() ^ u32::MAX));
    sets
}

/// Returns the best `size` devices of `available` that contain `must_include`: those of the fewest NUMA nodes, and of equally good sets that
/// which leaves the fewest devices behind.
pub fn closest(available: &[&PluginDevice], must_include: &[String], size: usize) -> Vec<String> {
    let nodes: BTreeSet<u32> = available
        .iter()
        .flat_map(|device| &device.numa_nodes)
        .copied()
        .collect();
    let nodes: Vec<u32> = nodes.into_iter().collect();
    let must = |device: &PluginDevice| must_include.contains(&device.id);
    let mut devices: Vec<_> = available
        .iter()
        .map(|device| (bits(device, &nodes[..nodes.len().min(32)]), *device))
        .collect();
    devices.sort_by(|a, b| a.1.id.cmp(&b.1.id));
    let wanted = if nodes.len() > HINT_NUMA_NODES_MAX {
        None
    } else {
        tightest(&devices, must, size, nodes.len())
    };
    devices
        .sort_by_key(|(bits, device)| (!must(device), wanted.is_none_or(|set| *bits & set == 0)));
    devices
        .into_iter()
        .take(size)
        .map(|(_, device)| device.id.clone())
        .collect()
}

/// The smallest set of nodes that has `size` devices, among them all that must be included.
fn tightest(
    devices: &[(u32, &PluginDevice)],
    must: impl Fn(&PluginDevice) -> bool,
    size: usize,
    nodes: usize,
) -> Option<u32> {
    let fitting = sets(nodes).into_iter().filter_map(|set| {
        let near = devices.iter().filter(|(bits, _)| bits & set != 0).count();
        let mut must = devices
            .iter()
            .filter(|(bits, device)| *bits != 0 && must(device));
        let all = must.all(|(bits, _)| bits & set != 0);
        (near >= size && all).then_some((set.count_ones(), near, set))
    });
    fitting
        .min_by_key(|(nodes, near, _)| (*nodes, *near))
        .map(|(_, _, set)| set)
}

/// Parses nodes as the kernel lists them (`0-1,4`).
pub fn parse_nodes(text: &str) -> Option<Vec<u32>> {
    let mut nodes = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if last > limit::NUMA_NODE_ID_MAX {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::fixtures::{device, ids};

    fn part<'a>(devices: &'a [PluginDevice], names: &[&str]) -> Vec<&'a PluginDevice> {
        devices
            .iter()
            .filter(|device| names.contains(&device.id.as_str()))
            .collect()
    }

    #[test]
    fn devices_are_aligned_unaligned_or_indifferent() {
        let devices = [
            device("dev1", &[1]),
            device("dev2", &[1, 2]),
            device("dev3", &[2]),
            device("dev4", &[2]),
            device("free", &[]),
        ];
        let of = |names: &[&str], affinity: &[u32]| split(&part(&devices, names), affinity, true);
        let some = of(&["dev1", "dev2"], &[2]);
        assert_eq!(
            (some.aligned, some.unaligned),
            (ids(&["dev2"]), ids(&["dev1"]))
        );
        let all = of(&["dev1", "dev2", "dev3", "dev4", "free"], &[2]);
        assert_eq!(all.aligned, ids(&["dev2", "dev3", "dev4"]));
        assert_eq!(
            (all.unaligned, all.indifferent),
            (ids(&["dev1"]), ids(&["free"]))
        );
        let elsewhere = of(&["dev1", "dev3"], &[0]);
        assert_eq!(
            (elsewhere.aligned.len(), elsewhere.unaligned),
            (0, ids(&["dev1", "dev3"])),
            "fewer first, then by node"
        );
    }

    #[test]
    fn nodes_with_fewest_devices_come_first() {
        let devices = [
            device("a", &[0]),
            device("b", &[0]),
            device("c", &[1]),
            device("d", &[0, 1]),
            device("e", &[3]),
        ];
        let split = split(&devices.iter().collect::<Vec<_>>(), &[0, 1], true);
        assert_eq!(
            split.aligned,
            ids(&["c", "d", "a", "b"]),
            "node 1 has two devices, node 0 three"
        );
        assert_eq!(split.unaligned, ids(&["e"]));
    }

    #[test]
    fn no_affinity_or_topology_aligns_nothing() {
        let devices = [device("b", &[0]), device("a", &[1])];
        let devices: Vec<_> = devices.iter().collect();
        for (affinity, topology) in [(&[][..], true), (&[0][..], false)] {
            let split = split(&devices, affinity, topology);
            assert_eq!(
                (split.aligned.len(), split.indifferent),
                (0, ids(&["a", "b"]))
            );
        }
    }

    #[test]
    fn closest_devices_use_fewest_nodes() {
        let devices = [
            device("a0", &[0]),
            device("a1", &[0]),
            device("a2", &[0]),
            device("b0", &[1]),
            device("b1", &[1]),
            device("c", &[]),
        ];
        let devices: Vec<_> = devices.iter().collect();
        for (must, size, wanted) in [
            (&[][..], 1, &["b0"][..]),
            (&[], 2, &["b0", "b1"]),
            (&[], 3, &["a0", "a1", "a2"]),
            (&["a1"], 2, &["a1", "a0"]),
            (&["b0"], 3, &["b0", "a0", "a1"]),
            (&[], 6, &["a0", "a1", "a2", "b0", "b1", "c"]),
        ] {
            assert_eq!(
                closest(&devices, &ids(must), size),
                ids(wanted),
                "{must:?} {size}"
            );
        }
    }

    #[test]
    fn kernel_node_list_is_parsed() {
        assert_eq!(parse_nodes("0\n"), Some(vec![0]));
        assert_eq!(parse_nodes("0-2,5"), Some(vec![0, 1, 2, 5]));
        for bad in ["", "a", "0-", "0-99999999"] {
            assert_eq!(parse_nodes(bad), None, "{bad:?}");
        }
    }
}
