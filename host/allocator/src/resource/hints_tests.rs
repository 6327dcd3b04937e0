//! Hints by table. The tables say what a kubelet's do, over the nodes that have devices.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::choose::Stock;
use super::fixtures::{device, devices, ids, resource};
use super::hints;
use super::hints::TopologyHint;
use nodedock_model::{ContainerKind, PluginDevice, PodContainer};

#[derive(Default)]
struct Case {
    devices: BTreeMap<String, PluginDevice>,
    taken: BTreeSet<String>,
    held: BTreeSet<String>,
    reusable: BTreeSet<String>,
    count: usize,
}

fn case(found: impl IntoIterator<Item = PluginDevice>, count: usize) -> Case {
    Case {
        devices: devices(found),
        count,
        ..Case::default()
    }
}

fn set(names: &[&str]) -> BTreeSet<String> {
    ids(names).into_iter().collect()
}

impl Case {
    /// Devices that others have.
    fn taken(mut self, names: &[&str]) -> Self {
        self.taken.extend(set(names));
        self
    }

    fn held(mut self, names: &[&str]) -> Self {
        self.held = set(names);
        self.taken(names)
    }

    fn reusable(mut self, names: &[&str]) -> Self {
        self.reusable = set(names);
        self.taken(names)
    }

    fn hints_on(&self, machine: &[u32]) -> Option<Vec<TopologyHint>> {
        let stock = Stock {
            devices: &self.devices,
            taken: &self.taken,
        };
        hints::hints(&stock, machine, &self.held, &self.reusable, self.count)
    }

    /// Nodes of each hint as text, with `!` where it is preferred.
    fn words(&self) -> Option<Vec<String>> {
        let word = |hint: TopologyHint| {
            let nodes: Vec<_> = hint.numa_nodes.iter().map(u32::to_string).collect();
            nodes.join("+") + if hint.preferred { "!" } else { "" }
        };
        self.hints_on(&[0, 1, 2, 3])
            .map(|hints| hints.into_iter().map(word).collect())
    }
}

fn pair() -> [PluginDevice; 2] {
    [device("Dev1", &[0]), device("Dev2", &[1])]
}

/// Two devices on each of two nodes.
fn four() -> [PluginDevice; 4] {
    [
        device("Dev1", &[0]),
        device("Dev2", &[1]),
        device("Dev3", &[0]),
        device("Dev4", &[1]),
    ]
}

#[test]
fn hints_are_those_of_a_kubelet() {
    let near = || [device("Dev1", &[0]), device("Dev2", &[0])];
    for (what, case, wanted) in [
        (
            "no alignment",
            case([device("Dev1", &[]), device("Dev2", &[])], 1),
            None,
        ),
        (
            "one of two aligned",
            case([device("Dev1", &[]), device("Dev2", &[1])], 1),
            Some(&["1!"][..]),
        ),
        ("one a node", case(pair(), 1), Some(&["0!", "1!", "0+1"])),
        ("two over two nodes", case(pair(), 2), Some(&["0+1!"])),
        (
            "two of one node",
            case(four(), 2),
            Some(&["0!", "1!", "0+1"]),
        ),
        (
            "forced over nodes",
            case(four(), 2).taken(&["Dev1", "Dev2"]),
            Some(&["0+1"]),
        ),
        ("more than there are", case(four(), 6), Some(&[])),
        (
            "more than are free",
            case(four(), 3).taken(&["Dev1", "Dev2"]),
            Some(&[]),
        ),
        (
            "held",
            case(near(), 2).held(&["Dev1", "Dev2"]),
            Some(&["0!"]),
        ),
        (
            "held over two nodes",
            case(four(), 2).held(&["Dev1", "Dev2"]),
            Some(&["0+1"]),
        ),
        (
            "fewer held than wanted",
            case(four(), 4).held(&["Dev1", "Dev2"]),
            Some(&[]),
        ),
        (
            "more held than wanted",
            case(four(), 2).held(&["Dev1", "Dev2", "Dev3", "Dev4"]),
            Some(&[]),
        ),
        (
            "reusable of one node",
            case(four(), 2).reusable(&["Dev1"]),
            Some(&["0!", "0+1"]),
        ),
        (
            "reusable of each node",
            case(four(), 2).reusable(&["Dev1", "Dev2"]),
            Some(&["0+1"]),
        ),
        (
            "reusable is all there is",
            case(pair(), 2).reusable(&["Dev1", "Dev2"]),
            Some(&["0+1!"]),
        ),
        (
            "reusable without a node",
            case([device("Dev1", &[]), device("Dev2", &[1])], 1).reusable(&["Dev1"]),
            Some(&["1!"]),
        ),
        (
            "a device of two nodes",
            case([device("Dev1", &[0, 1]), device("Dev2", &[1])], 2),
            Some(&["1!", "0+1"]),
        ),
        (
            "nodes that have none do not come up",
            case([device("Dev1", &[2]), device("Dev2", &[3])], 1),
            Some(&["2!", "3!", "2+3"]),
        ),
        (
            "a node that the machine lacks",
            case([device("Dev1", &[0]), device("Dev2", &[9])], 1),
            Some(&["0!"]),
        ),
        (
            "only nodes that the machine lacks",
            case([device("Dev1", &[8, 9])], 1),
            Some(&[]),
        ),
    ] {
        assert_eq!(case.words(), wanted.map(ids), "{what}");
    }
}

#[test]
fn unhealthy_devices_affect_only_preferred_hint() {
    let mut found = four();
    found[0].healthy = false;
    found[1].healthy = false;
    assert_eq!(case(found.clone(), 2).words(), Some(ids(&["0+1"])));
    assert_eq!(case(found, 3).words(), Some(vec![]));
}

#[test]
fn too_many_numa_nodes_prevent_hints() {
    let machine: Vec<u32> = (0..64).collect();
    let of = |nodes: u32| {
        case((0..nodes).map(|n| device(&format!("Dev{n}"), &[n])), 1).hints_on(&machine)
    };
    assert_eq!(of(8).map(|hints| hints.len()), Some(255));
    assert_eq!(of(9), None);
}

#[test]
fn pod_needs_its_peak_device_count() {
    use ContainerKind::{App, Init, Sidecar};
    let of = |kind, gpu, nic| {
        let resources = BTreeMap::from([(resource("gpu"), gpu), (resource("nic"), nic)]);
        PodContainer {
            kind,
            resources,
            ..PodContainer::default()
        }
    };
    for (containers, gpu, nic) in [
        (vec![], 0, 0),
        (vec![of(Init, 2, 0)], 2, 0),
        (vec![of(Init, 2, 0), of(Init, 4, 0)], 4, 0),
        (vec![of(App, 2, 0)], 2, 0),
        (
            vec![of(Init, 2, 2), of(Init, 2, 2), of(App, 1, 1), of(App, 1, 1)],
            2,
            2,
        ),
        (
            vec![of(Init, 2, 1), of(Init, 3, 2), of(App, 1, 1), of(App, 1, 0)],
            3,
            2,
        ),
        (vec![of(Init, 2, 1), of(App, 3, 2), of(App, 3, 2)], 6, 4),
        (vec![of(App, 1, 0), of(Sidecar, 1, 0), of(Init, 3, 0)], 4, 0),
        (vec![of(Sidecar, 2, 0), of(App, 2, 0)], 4, 0),
    ] {
        let wanted = [(resource("gpu"), gpu), (resource("nic"), nic)]
            .into_iter()
            .filter(|(_, count)| *count > 0);
        assert_eq!(
            hints::pod_request(&containers),
            wanted.collect(),
            "{containers:?}"
        );
    }
}

/// Hints as the definition has them: each set of nodes tried against each device.
fn by_definition(case: &Case) -> Vec<TopologyHint> {
    let nodes: BTreeSet<u32> = case
        .devices
        .values()
        .flat_map(|d| d.numa_nodes.clone())
        .collect();
    let sets =
        (1u32..16).filter(|set| (0..4).all(|node| set & 1 << node == 0 || nodes.contains(&node)));
    let inside = |set: u32, d: &PluginDevice| d.numa_nodes.iter().any(|node| set & 1 << node != 0);
    let count = |set: u32, of: &dyn Fn(&PluginDevice) -> bool| {
        case.devices
            .values()
            .filter(|d| inside(set, d) && of(d))
            .count()
    };
    let best = sets
        .clone()
        .filter(|set| count(*set, &|_| true) >= case.count)
        .map(u32::count_ones)
        .min();
    let serves = |set: &u32| {
        let reused = case
            .reusable
            .iter()
            .map(|id| &case.devices[id])
            .filter(|d| !d.numa_nodes.is_empty());
        let usable = |d: &PluginDevice| {
            (d.healthy && !case.taken.contains(&d.id)) || case.reusable.contains(&d.id)
        };
        reused.into_iter().all(|d| inside(*set, d)) && count(*set, &usable) >= case.count
    };
    let mut hints: Vec<_> = sets
        .filter(serves)
        .map(|set| TopologyHint {
            numa_nodes: (0..4).filter(|node| set & 1 << node != 0).collect(),
            preferred: best == Some(set.count_ones()),
        })
        .collect();
    hints.sort_by_key(|hint| (hint.numa_nodes.len(), hint.numa_nodes.clone()));
    hints
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn hints_are_as_they_are_defined(
        found in proptest::collection::vec((any::<bool>(), proptest::collection::btree_set(0..4u32, 0..3), 0..3u8), 1..12),
        count in 1..5usize,
    ) {
        let mut case = case([], count);
        for (n, (healthy, nodes, owner)) in found.into_iter().enumerate() {
            let id = format!("Dev{n}");
            case.taken.extend((owner > 0).then(|| id.clone()));
            case.reusable.extend((owner > 1).then(|| id.clone()));
            case.devices.insert(id.clone(), PluginDevice { id, healthy, numa_nodes: nodes.into_iter().collect() });
        }
        match case.hints_on(&[0, 1, 2, 3]) {
            None => prop_assert!(case.devices.values().all(|device| device.numa_nodes.is_empty())),
            Some(hints) => prop_assert_eq!(hints, by_definition(&case)),
        }
    }
}
