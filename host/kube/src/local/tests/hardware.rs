//! Claims whose devices are one piece of hardware, and claims that the node has prepared without the API.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt;
use nodedock_allocator::allocate::DeviceHolds;
use proptest::prelude::*;

use super::super::state::allocation;
use super::{Event, Machine, devices, event, name, refusals};
use nodedock_model::Hold;

fn hold(hardware: &str) -> Vec<Hold> {
    let key = format!("/sys/devices/{hardware}");
    vec![Hold {
        key,
        shared: false,
        driver: None,
        derived: false,
        uses: Vec::new(),
    }]
}

/// Returns the holds of devices, `d0` first; an empty string is no hold.
fn device_holds(hardware: &[&str]) -> Arc<DeviceHolds> {
    let mut holds = DeviceHolds::default();
    for (index, hardware) in hardware
        .iter()
        .enumerate()
        .filter(|(_, hardware)| !hardware.is_empty())
    {
        holds.set("d.dev", "n/p", &format!("d{index}"), hold(hardware));
    }
    Arc::new(holds)
}

#[test]
fn claims_never_share_hardware() {
    let mut machine = Machine::new(3);
    machine
        .state
        .set_device_holds(device_holds(&["usb1", "usb1/tty", "usb2"]));
    for claim in ["a", "b", "c"] {
        machine.create(claim, 1);
    }
    machine.settle();
    let of_all = ["a", "b", "c"].map(|claim| machine.devices(claim));
    assert_eq!(
        of_all,
        [Some(vec!["d0".into()]), Some(vec!["d2".into()]), None]
    );
    let refused: BTreeMap<_, _> = refusals(&machine.state).into_iter().collect();
    let of_c = &refused[&name("c")];
    assert!(
        of_c.message.contains("1 with hardware that is in use"),
        "{of_c}"
    );
    let why = of_c
        .devices
        .iter()
        .find(|left| left.device == "d1")
        .map(|left| left.reason.clone());
    let why = why.expect("a reason");
    assert!(
        why.contains("uid-a") && why.ends_with("which holds /sys/devices/usb1"),
        "{why}"
    );
    machine.delete("a");
    machine.settle();
    assert_eq!(machine.devices("c"), Some(vec!["d0".into()]));
}

#[test]
fn claim_with_taken_hardware_is_reallocated() {
    let mut machine = Machine::new(3);
    machine.create("a", 1);
    machine.create("b", 1);
    machine.settle();
    assert_eq!(machine.devices("b"), Some(vec!["d1".into()]));
    // Only a prepare shows what containers get.
    machine.prepare("a");
    let uid = machine.claims[&name("a")].uid().unwrap();
    machine.node_use.holds.insert(uid, hold("usb1"));
    machine.state.follow_node(machine.node_use.changes());
    machine
        .state
        .set_device_holds(device_holds(&["usb1", "usb1"]));
    machine.reservations.insert(
        name("b"),
        BTreeMap::from([("u".to_owned(), "pod".to_owned())]),
    );
    machine.settle();
    assert_eq!(
        machine.devices("b"),
        Some(vec!["d1".into()]),
        "a prepare of it is under way"
    );
    machine.reservations.clear();
    machine.settle();
    assert_eq!(machine.devices("b"), Some(vec!["d2".into()]));
    assert_eq!(
        machine.devices("a"),
        Some(vec!["d0".into()]),
        "one that is prepared stays"
    );
}

/// A claim of a manifest, or of `prepare --device`, took the device between the allocation and the prepare.
#[test]
fn refused_prepare_reallocates_only_unprepared_claims() {
    let mut machine = Machine::new(2);
    machine.create("a", 1);
    machine.settle();
    let uid = machine.claims[&name("a")].uid().unwrap();
    let taken = allocation(&machine.claims[&name("a")]).unwrap().clone();
    machine
        .node_use
        .claims
        .insert("of-a-manifest".into(), taken);
    machine.state.follow_node(machine.node_use.changes());
    machine.state.refuse(uid.clone());
    machine.settle();
    assert_eq!(machine.devices("a"), Some(vec!["d1".into()]));
    machine.prepare("a");
    machine.state.refuse(uid);
    machine.prepare("a");
    machine.unprepare_all();
    machine.settle();
    assert_eq!(
        machine.devices("a"),
        Some(vec!["d1".into()]),
        "what was refused before its prepare is over"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Hardware of which it is known at once, or only after a prepare, that several devices give it.
    #[test]
    fn prepared_claims_never_share_hardware(
        hardware in prop::collection::vec((0usize..3, any::<bool>()), 4),
        events in prop::collection::vec(event(), 1..60),
    ) {
        let mut machine = Machine::new(hardware.len());
        let words = ["x", "x/y", "z"];
        let mut known: Vec<_> = hardware.iter().map(|(place, known)| if *known { words[*place] } else { "" }).collect();
        let index = |device: &String| device[1..].parse::<usize>().unwrap();
        for event in events {
            let named = |claim: u8| format!("c{claim}");
            match event {
                Event::Create(claim, count) if !machine.claims.contains_key(&name(&named(claim))) => machine.create(&named(claim), count),
                Event::Create(..) => {}
                Event::Delete(claim) => machine.delete(&named(claim)),
                Event::Prepare(claim) => {
                    let found = machine.claims.get(&name(&named(claim))).cloned();
                    if let Some((uid, result)) = found.as_ref().and_then(|claim| Some((claim.uid()?, allocation(claim)?))) {
                        let own: Vec<_> = devices(result).iter().map(index).collect();
                        own.iter().for_each(|device| known[*device] = words[hardware[*device].0]);
                        let holds: Vec<_> = own.iter().flat_map(|device| hold(words[hardware[*device].0])).collect();
                        let others = machine.node_use.holds.iter().filter(|(other, _)| **other != uid);
                        let meets = |one: &Hold, other: &Hold| one.key.starts_with(&other.key) || other.key.starts_with(&one.key);
                        let is_refused = others.flat_map(|(_, holds)| holds).any(|other| holds.iter().any(|own| meets(own, other)));
                        if !is_refused {
                            machine.prepare(&named(claim));
                            machine.node_use.holds.insert(uid, holds);
                            machine.state.follow_node(machine.node_use.changes());
                        }
                    }
                }
                Event::UnprepareAll => machine.unprepare_all(),
                Event::Restart => machine.restart(hardware.len()),
            }
            machine.state.set_device_holds(device_holds(&known));
            machine.settle();
            let mut of_claims = BTreeMap::<String, BTreeSet<usize>>::new();
            let objects = machine.claims.values().filter_map(|claim| Some((claim.uid()?, allocation(claim)?)));
            for (uid, result) in objects.chain(machine.node_use.claims.iter().map(|(uid, result)| (uid.clone(), result))) {
                of_claims.entry(uid).or_default().extend(devices(result).iter().map(index));
            }
            let is_known_to_meet = |one: usize, other: usize| {
                let (one, other) = (known[one], known[other]);
                !one.is_empty() && !other.is_empty() && (one.starts_with(other) || other.starts_with(one))
            };
            for (uid, own) in machine.node_use.holds.keys().map(|uid| (uid, &of_claims[uid])) {
                for (_, devices) in of_claims.iter().filter(|(other, _)| *other != uid) {
                    prop_assert!(!own.iter().any(|one| devices.iter().any(|other| is_known_to_meet(*one, *other))));
                }
            }
            let taken: BTreeSet<usize> = of_claims.values().flatten().copied().collect();
            let is_free = |device: &usize| !taken.contains(device) && !taken.iter().any(|other| is_known_to_meet(*device, *other));
            let free = (0..hardware.len()).filter(is_free).count();
            for claim in machine.claims.values().filter(|claim| allocation(claim).is_none()) {
                let exactly = claim.spec.devices.as_ref().unwrap().requests.as_ref().unwrap()[0].exactly.clone();
                prop_assert!(exactly.unwrap().count.unwrap() as usize > free, "{} waits", claim.name_any());
            }
        }
    }
}
