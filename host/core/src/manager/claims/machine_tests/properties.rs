//! Generated histories of a node, with crashes, reboots and drivers that come, go, refuse and answer late.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::fixtures::{claim, driver, pod};
use super::node::{Crash, Luck, Node};
use crate::manager::claims::machine::DeviceFacts;
use nodedock_model::{Claim, DriverName, ObjectRef, Uid};

#[derive(Debug, Clone)]
enum Event {
    Prepare { pod: usize, claims: Vec<usize>, luck: Vec<Luck> },
    Unprepare { pod: usize, luck: Vec<Luck> },
    Resume { luck: Vec<Luck> },
    Release { claim: usize, luck: Vec<Luck> },
    KubeletPrepare { claim: usize, driver: usize, luck: Vec<Luck> },
    KubeletUnprepare { claim: usize, driver: usize, luck: Vec<Luck> },
    KubeletGivesUp { claim: usize, luck: Vec<Luck> },
    Restart,
    Reboot,
    Serving { driver: usize, serves: bool },
}

const DRIVERS: [&str; 3] = ["gpu", "nic", "net"];
const PODS: [&str; 3] = ["a", "b", "c"];
/// Some want the same device, or a share of it, or hardware that another driver's device is; some are of several drivers; one
/// has the name of another.
const CLAIMS: [(&str, &[&str]); 10] = [
    ("one", &["gpu/0"]),
    ("both", &["gpu/0", "nic/0"]),
    ("three", &["gpu/1", "nic/1", "net/1"]),
    ("share-a", &["gpu/part#a", "nic/0"]),
    ("share-b", &["gpu/part#b"]),
    ("whole", &["gpu/part"]),
    ("monitor", &["!gpu/0", "!gpu/part#c"]),
    ("one@uid-one-again", &["gpu/2"]),
    ("many-a", &["net/many", "nic/2"]),
    ("many-b", &["net/many", "net/twin"]),
];

fn pods() -> Vec<ObjectRef> {
    PODS.iter().map(|name| pod(name)).collect()
}

fn claims() -> Vec<Claim> {
    let pods = pods();
    let pods: Vec<_> = pods.iter().collect();
    CLAIMS.iter().map(|(name, devices)| claim(name, devices, &pods)).collect()
}

/// `net/many` may be in several claims, and `net/twin` is the same hardware as `nic/2`.
fn facts() -> BTreeMap<(DriverName, String), DeviceFacts> {
    let shared = DeviceFacts { allow_multiple_allocations: true, identity: Vec::new() };
    let same =
        DeviceFacts { allow_multiple_allocations: false, identity: vec!["pci:0000:3b:00.0".to_owned()] };
    BTreeMap::from([
        ((driver("net"), "many".to_owned()), shared),
        ((driver("net"), "twin".to_owned()), same.clone()),
        ((driver("nic"), "2".to_owned()), same),
    ])
}

fn luck() -> impl Strategy<Value = Vec<Luck>> {
    let one = prop_oneof![
        8 => Just(Luck::Good),
        2 => Just(Luck::Refused),
        2 => Just(Luck::Later),
        2 => Just(Luck::TooLateDone),
        1 => Just(Luck::CrashBefore),
        1 => Just(Luck::CrashAfter),
    ];
    prop::collection::vec(one, 0..10)
}

fn event() -> impl Strategy<Value = Event> {
    let claims = prop::collection::vec(0..CLAIMS.len(), 1..4);
    prop_oneof![
        8 => (0..PODS.len(), claims, luck()).prop_map(|(pod, claims, luck)| Event::Prepare { pod, claims, luck }),
        5 => (0..PODS.len(), luck()).prop_map(|(pod, luck)| Event::Unprepare { pod, luck }),
        2 => luck().prop_map(|luck| Event::Resume { luck }),
        3 => (0..CLAIMS.len(), luck()).prop_map(|(claim, luck)| Event::Release { claim, luck }),
        8 => (0..CLAIMS.len(), 0..DRIVERS.len(), luck())
            .prop_map(|(claim, driver, luck)| Event::KubeletPrepare { claim, driver, luck }),
        5 => (0..CLAIMS.len(), 0..DRIVERS.len(), luck())
            .prop_map(|(claim, driver, luck)| Event::KubeletUnprepare { claim, driver, luck }),
        2 => (0..CLAIMS.len(), luck()).prop_map(|(claim, luck)| Event::KubeletGivesUp { claim, luck }),
        1 => Just(Event::Restart),
        1 => Just(Event::Reboot),
        2 => (0..DRIVERS.len(), any::<bool>()).prop_map(|(driver, serves)| Event::Serving { driver, serves }),
    ]
}

fn happen(node: &mut Node, event: &Event) {
    let end = match event {
        Event::Prepare { pod, claims: wanted, luck } => {
            node.set_luck(luck);
            let (pods, claims) = (pods(), claims());
            let wanted: BTreeMap<Uid, &Claim> =
                wanted.iter().map(|index| (claims[*index].id.uid.clone(), &claims[*index])).collect();
            node.prepare(&pods[*pod], &wanted)
        }
        Event::Unprepare { pod, luck } => {
            node.set_luck(luck);
            node.unprepare(&pods()[*pod].uid)
        }
        Event::Resume { luck } => {
            node.set_luck(luck);
            node.resume()
        }
        Event::Release { claim, luck } => {
            node.set_luck(luck);
            node.release(&claims()[*claim].id.uid)
        }
        Event::KubeletPrepare { claim, driver, luck } => {
            node.set_luck(luck);
            let claim = &claims()[*claim];
            part_of(claim, *driver).map_or(Ok(()), |driver| node.kubelet_prepare(&driver, claim))
        }
        Event::KubeletUnprepare { claim, driver, luck } => {
            node.set_luck(luck);
            let claim = &claims()[*claim];
            let driver = part_of(claim, *driver);
            driver.map_or(Ok(()), |driver| node.kubelet_unprepare(&claim.id.uid, Some(&driver)))
        }
        Event::KubeletGivesUp { claim, luck } => {
            node.set_luck(luck);
            node.kubelet_unprepare(&claims()[*claim].id.uid, None)
        }
        Event::Restart => Err(Crash),
        Event::Reboot => {
            node.reboot();
            Ok(())
        }
        Event::Serving { driver: index, serves } => {
            node.set_serving(&driver(DRIVERS[*index]), *serves);
            Ok(())
        }
    };
    if end.is_err() {
        node.restart();
    }
}

/// One of the drivers of a claim.
fn part_of(claim: &Claim, index: usize) -> Option<DriverName> {
    let devices = &claim.allocation.as_ref()?.devices;
    Some(devices.get(index % devices.len())?.driver.clone())
}

/// Faults stop, drivers come back, the kubelet unprepares what it holds, and every pod leaves.
fn settle(node: &mut Node) {
    node.set_luck(&[]);
    node.serve_all();
    assert!(node.resume().is_ok());
    for claim in claims() {
        assert!(node.kubelet_unprepare(&claim.id.uid, None).is_ok());
    }
    for pod in node.pods() {
        assert!(node.unprepare(&pod).is_ok());
    }
    node.assert_sound();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_history_loses_a_claim_shares_a_device_or_answers_what_is_not_durable(
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut node = Node::new(DRIVERS.iter().map(|name| driver(name)), facts());
        for event in &events {
            happen(&mut node, event);
            node.assert_sound();
            pods().iter().for_each(|pod| node.assert_strangers_take_nothing(&pod.uid));
        }
        settle(&mut node);
        node.assert_empty();
    }
}
