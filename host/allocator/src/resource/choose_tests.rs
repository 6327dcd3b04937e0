//! Choices by table and by chance. The tables say what a kubelet's do.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::Want;
use super::choose::{self, Question, Step, Stock};
use super::fixtures::{device, devices, ids, resource, sick};
use nodedock_model::{ContainerKind, PluginDevice, Problem};

/// A choice to be made.
#[derive(Debug, Clone, Default)]
struct Case {
    devices: BTreeMap<String, PluginDevice>,
    taken: BTreeSet<String>,
    reusable: BTreeSet<String>,
    held: Option<BTreeMap<String, Vec<u32>>>,
    affinity: Vec<u32>,
    count: usize,
}

fn set(names: &[&str]) -> BTreeSet<String> {
    ids(names).into_iter().collect()
}

/// Devices `prefix` and a number of one node.
fn numbered(range: std::ops::Range<usize>, node: u32) -> impl Iterator<Item = PluginDevice> {
    range.map(move |n| device(&format!("Dev{n}"), &[node]))
}

impl Case {
    fn step(&self) -> Result<Step, Problem> {
        let stock = Stock {
            devices: &self.devices,
            taken: &self.taken,
        };
        let want = Want {
            container: "main".to_owned(),
            kind: ContainerKind::App,
            resource: resource("gpu"),
            count: self.count,
            affinity: self.affinity.clone(),
        };
        choose::choose(&stock, &want, self.held.as_ref(), &self.reusable)
    }

    /// Returns the devices that are chosen when the plugin prefers these.
    fn chosen(&self, preferred: &[&str]) -> BTreeSet<String> {
        match self.step().unwrap() {
            Step::Chosen(ids) => ids,
            Step::Open(open) => open.finish(&ids(preferred)),
        }
    }

    fn question(&self) -> Question {
        match self.step().unwrap() {
            Step::Open(open) => open.question(),
            Step::Chosen(ids) => panic!("no plugin is called: {ids:?}"),
        }
    }

    fn code(&self) -> String {
        self.step().unwrap_err().code
    }

    /// Counts the chosen devices by NUMA node.
    fn alignment(&self, preferred: &[&str]) -> BTreeMap<u32, usize> {
        let mut counts = BTreeMap::new();
        for id in self.chosen(preferred) {
            if let Some(node) = self.devices[&id].numa_nodes.first() {
                *counts.entry(*node).or_default() += 1;
            }
        }
        counts
    }
}

#[test]
fn failed_choice_has_its_reason() {
    let unhealthy = Case {
        devices: devices([sick("a"), sick("b")]),
        count: 1,
        ..Case::default()
    };
    assert_eq!(unhealthy.code(), "no-healthy-device");
    let held = |device: &str| Some(BTreeMap::from([(device.to_owned(), Vec::new())]));
    let lost = Case {
        devices: devices([sick("a"), device("b", &[])]),
        held: held("a"),
        count: 1,
        ..Case::default()
    };
    assert_eq!(lost.code(), "devices-unhealthy");
    assert_eq!(
        Case {
            held: held("gone"),
            ..lost.clone()
        }
        .code(),
        "devices-unhealthy"
    );
    assert_eq!(
        Case {
            held: held("b"),
            ..lost.clone()
        }
        .chosen(&[]),
        set(&["b"]),
        "what is held and healthy stays"
    );
    let changed = Case {
        held: held("b"),
        count: 2,
        ..lost
    };
    assert_eq!(changed.code(), "request-changed");
    assert!(changed.step().unwrap_err().message.contains("from 1 to 2"));
    let few = Case {
        devices: devices([device("a", &[]), device("b", &[])]),
        taken: set(&["a"]),
        count: 2,
        ..Case::default()
    };
    assert_eq!(few.code(), "too-few-devices");
    assert!(
        few.step()
            .unwrap_err()
            .details
            .contains(&("available".to_owned(), "1".to_owned()))
    );
}

#[test]
fn devices_follow_the_affinity() {
    let two = || [device("Dev1", &[0]), device("Dev2", &[1])];
    let four = || {
        numbered(0..4, 0).map(|d| PluginDevice {
            numa_nodes: vec![d.id.ends_with(['1', '3']).into()],
            ..d
        })
    };
    let six = || {
        numbered(0..6, 0).map(|d| PluginDevice {
            numa_nodes: vec![d.id.ends_with(['1', '3', '5']).into()],
            ..d
        })
    };
    let eight = || (0..8).map(|n| device(&format!("Dev{n}"), &[n % 4]));
    let free = || [device("Dev1", &[]), device("Dev2", &[])];
    let partial = || [device("Dev1", &[]), device("Dev2", &[1])];
    for (devices, affinity, count, wanted) in [
        (devices(free()), vec![0, 1], 1, vec![]),
        (devices(partial()), vec![1], 1, vec![(1, 1)]),
        (devices(two()), vec![0], 1, vec![(0, 1)]),
        (devices(two()), vec![1], 1, vec![(1, 1)]),
        (devices(four()), vec![0], 2, vec![(0, 2)]),
        (devices(four()), vec![1], 2, vec![(1, 2)]),
        (devices(six()), vec![0], 4, vec![(0, 3), (1, 1)]),
        (devices(six()), vec![1], 4, vec![(0, 1), (1, 3)]),
        (devices(eight()), vec![1, 3], 4, vec![(1, 2), (3, 2)]),
    ] {
        let case = Case {
            devices,
            affinity: affinity.clone(),
            count,
            ..Case::default()
        };
        assert_eq!(
            case.alignment(&[]),
            wanted.into_iter().collect(),
            "{count} of {affinity:?}"
        );
        assert_eq!(case.chosen(&[]).len(), count);
    }
}

#[test]
fn plugin_preference_is_used_where_possible() {
    let halves = || devices(numbered(0..100, 0).chain(numbered(100..200, 1)));
    let one = || devices(numbered(0..100, 1));
    let few = || devices(numbered(0..3, 0).chain(numbered(3..100, 1)));
    for (devices, affinity, preferred, chosen, alignment) in [
        (
            halves(),
            0,
            vec!["Dev0", "Dev19", "Dev83", "Dev42", "Dev77"],
            5,
            vec![(0, 5)],
        ),
        (
            halves(),
            0,
            vec!["Dev0", "Dev19", "Dev83", "Dev150", "Dev186"],
            3,
            vec![(0, 5)],
        ),
        (
            one(),
            1,
            vec!["Dev0", "Dev19", "Dev83", "bogus0", "bogus1"],
            3,
            vec![(1, 5)],
        ),
        (
            few(),
            0,
            vec!["Dev0", "Dev1", "Dev2", "Dev42", "Dev83"],
            5,
            vec![(0, 3), (1, 2)],
        ),
        (
            few(),
            0,
            vec!["Dev0", "Dev1", "Dev2", "Dev42", "bogus0"],
            4,
            vec![(0, 3), (1, 2)],
        ),
    ] {
        let case = Case {
            devices,
            affinity: vec![affinity],
            count: 5,
            ..Case::default()
        };
        assert_eq!(
            case.alignment(&preferred),
            alignment.into_iter().collect(),
            "{preferred:?}"
        );
        assert!(
            case.chosen(&preferred)
                .is_superset(&set(&preferred[..chosen])),
            "{preferred:?}"
        );
    }
    let case = Case {
        devices: halves(),
        taken: set(&["Dev0"]),
        affinity: vec![0],
        count: 2,
        ..Case::default()
    };
    let chosen = case.chosen(&["Dev0", "Dev7", "Dev7", "Dev8", "Dev9"]);
    assert_eq!(
        chosen,
        set(&["Dev7", "Dev8"]),
        "neither what is taken nor more than is wanted"
    );
}

#[test]
fn plugin_gets_available_required_and_size() {
    let same = |count: usize| devices(numbered(0..count, 0));
    let split = || devices(numbered(0..4, 0).chain(numbered(4..8, 1)));
    let all = &[
        "Dev0", "Dev1", "Dev2", "Dev3", "Dev4", "Dev5", "Dev6", "Dev7",
    ][..];
    for (devices, taken, reusable, count, available, must) in [
        (same(4), &[][..], &[][..], 1, &all[..4], &[][..]),
        (
            same(8),
            &["Dev0", "Dev5"],
            &["Dev0", "Dev5"],
            4,
            all,
            &["Dev0", "Dev5"],
        ),
        (
            same(8),
            &["Dev0", "Dev5", "Dev4", "Dev1"],
            &["Dev0", "Dev5"],
            4,
            &["Dev0", "Dev2", "Dev3", "Dev5", "Dev6", "Dev7"],
            &["Dev0", "Dev5"],
        ),
        (
            split(),
            &["Dev1", "Dev6"],
            &["Dev1", "Dev6"],
            6,
            all,
            &["Dev0", "Dev1", "Dev2", "Dev3", "Dev6"],
        ),
        (
            split(),
            &["Dev0", "Dev1", "Dev6", "Dev7"],
            &["Dev1", "Dev6"],
            6,
            &["Dev1", "Dev2", "Dev3", "Dev4", "Dev5", "Dev6"],
            &["Dev1", "Dev2", "Dev3", "Dev6"],
        ),
    ] {
        let (taken, reusable) = (set(taken), set(reusable));
        let case = Case {
            devices,
            taken,
            reusable,
            affinity: vec![0],
            count,
            held: None,
        };
        let wanted = Question {
            available: ids(available),
            must_include: ids(must),
            size: count,
        };
        assert_eq!(case.question(), wanted);
    }
}

#[test]
fn reusable_devices_are_chosen_first() {
    let mut all = devices(numbered(0..4, 0));
    let taken = set(&["Dev1", "Dev3"]);
    let case = Case {
        devices: all.clone(),
        reusable: taken.clone(),
        taken,
        count: 2,
        ..Case::default()
    };
    assert_eq!(
        case.step(),
        Ok(Step::Chosen(set(&["Dev1", "Dev3"]))),
        "no plugin is called"
    );
    assert_eq!(
        Case {
            count: 1,
            ..case.clone()
        }
        .chosen(&[]),
        set(&["Dev1"])
    );
    assert!(
        Case {
            count: 3,
            ..case.clone()
        }
        .chosen(&[])
        .is_superset(&set(&["Dev1", "Dev3"]))
    );
    all.insert("Dev1".to_owned(), sick("Dev1"));
    let chosen = Case {
        devices: all,
        ..case
    }
    .chosen(&[]);
    assert!(
        chosen.contains("Dev3") && !chosen.contains("Dev1"),
        "what is not healthy is not used again: {chosen:?}"
    );
}

fn any_device() -> impl Strategy<Value = (bool, Vec<u32>, bool, bool)> {
    (
        any::<bool>(),
        proptest::collection::btree_set(0..4u32, 0..3),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(healthy, nodes, taken, reusable)| {
            (healthy, nodes.into_iter().collect(), taken, reusable)
        })
}

fn any_case() -> impl Strategy<Value = Case> {
    let devices = proptest::collection::vec(any_device(), 1..20);
    (devices, proptest::collection::vec(0..4u32, 0..3), 1..8usize).prop_map(
        |(found, affinity, count)| {
            let mut case = Case {
                affinity,
                count,
                ..Case::default()
            };
            for (n, (healthy, numa_nodes, taken, reusable)) in found.into_iter().enumerate() {
                let id = format!("Dev{n}");
                case.taken.extend((taken || reusable).then(|| id.clone()));
                case.reusable.extend(reusable.then(|| id.clone()));
                case.devices.insert(
                    id.clone(),
                    PluginDevice {
                        id,
                        healthy,
                        numa_nodes,
                    },
                );
            }
            case
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn choice_has_enough_free_healthy_devices(
        case in any_case(),
        preferred in proptest::collection::vec(0..25usize, 0..10),
    ) {
        let preferred: Vec<_> = preferred.into_iter().map(|n| format!("Dev{n}")).collect();
        let preferred: Vec<_> = preferred.iter().map(String::as_str).collect();
        let is_free = |d: &&PluginDevice| d.healthy && (!case.taken.contains(&d.id) || case.reusable.contains(&d.id));
        let free: BTreeSet<_> = case.devices.values().filter(is_free).map(|d| d.id.clone()).collect();
        match case.step() {
            Err(_) => prop_assert!(free.len() < case.count, "{} are free", free.len()),
            Ok(step) => {
                let chosen = case.chosen(&preferred);
                prop_assert_eq!(chosen.len(), case.count);
                prop_assert!(chosen.is_subset(&free));
                prop_assert_eq!(&chosen, &case.chosen(&preferred), "the same twice");
                if let Step::Open(open) = step {
                    let asked = open.question();
                    prop_assert!(asked.must_include.iter().all(|id| asked.available.contains(id)));
                    prop_assert!(asked.must_include.len() < asked.size && asked.size == case.count);
                    prop_assert!(asked.must_include.iter().all(|id| chosen.contains(id)));
                }
            }
        }
    }

    #[test]
    fn aligned_devices_are_chosen_before_others(case in any_case()) {
        prop_assume!(case.step().is_ok() && !case.affinity.is_empty());
        let chosen = case.chosen(&[]);
        let near = |id: &String| case.devices[id].numa_nodes.iter().any(|node| case.affinity.contains(node));
        let left = case.devices.values().filter(|d| d.healthy && !case.taken.contains(&d.id) && !chosen.contains(&d.id));
        if left.map(|d| &d.id).any(near) {
            let new = chosen.iter().filter(|id| !case.reusable.contains(*id));
            prop_assert!(new.into_iter().all(near));
        }
    }
}
