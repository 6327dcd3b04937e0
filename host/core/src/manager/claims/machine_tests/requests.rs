//! Requests, claims and an invariant that the generated histories of the machine and of the real manager share.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::fixtures::{claim, driver, pod};
use crate::manager::claims::machine::{CounterFacts, DeviceFacts};
use nodedock_model::{AllocatedDevice, Claim, ClaimRecord, DriverName, ObjectRef, Uid};

/// Pods, claims and a driver's part of a claim by their indexes.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Prepare {
        pod: usize,
        claims: BTreeSet<usize>,
    },
    Unprepare {
        pod: usize,
    },
    Release {
        claim: usize,
    },
    KubeletPrepare {
        claim: usize,
        part: usize,
    },
    /// None: every part that the kubelet uses.
    KubeletUnprepare {
        claim: usize,
        part: Option<usize>,
    },
    /// Prepares a part before a kubelet knows the claim.
    EarlyPrepare {
        claim: usize,
        part: usize,
    },
    EarlyUnprepare {
        claim: usize,
    },
}

const PODS: [&str; 3] = ["a", "b", "c"];
/// Some have the same device, or a share of it, or hardware that another driver's device is; some are of several drivers; one has the
/// name of another.
pub(super) const CLAIMS: [(&str, &[&str]); 10] = [
    ("one", &["gpu/0"]),
    ("both", &["gpu/0", "nic/0"]),
    ("share-a", &["gpu/part#a", "nic/0"]),
    ("share-b", &["gpu/part#b"]),
    ("whole", &["gpu/part"]),
    ("one@uid-one-again", &["gpu/2"]),
    ("three", &["gpu/1", "nic/1", "net/1"]),
    ("monitor", &["!gpu/0", "!gpu/part#c"]),
    ("many-a", &["net/many", "nic/2"]),
    ("many-b", &["net/many", "net/twin"]),
];
/// The first claims, which are of the drivers `gpu` and `nic`.
pub(crate) const CLAIMS_OF_TWO_DRIVERS: usize = 6;

pub(crate) fn pods() -> Vec<ObjectRef> {
    PODS.iter().map(|name| pod(name)).collect()
}

pub(crate) fn claims() -> Vec<Claim> {
    let pods = pods();
    let pods: Vec<_> = pods.iter().collect();
    CLAIMS
        .iter()
        .map(|(name, devices)| claim(name, devices, &pods))
        .collect()
}

/// One of the drivers of a claim.
pub(crate) fn driver_of(claim: &Claim, part: usize) -> DriverName {
    let devices = &claim.allocation.as_ref().unwrap().devices;
    devices[part % devices.len()].driver.clone()
}

pub(super) type Facts = BTreeMap<(DriverName, String), DeviceFacts>;

/// Amount of the counter that `gpu/0`, `gpu/1` and `gpu/2` share.
const COUNTER: u32 = 10;

/// `net/many` may be in several claims, and `net/twin` is the same hardware as `nic/2`. Of `gpu/0`, `gpu/1` and `gpu/2`, which share a
/// counter, some do not fit beside others.
pub(super) fn facts() -> Facts {
    let shared = DeviceFacts {
        allow_multiple_allocations: true,
        ..DeviceFacts::default()
    };
    let same = DeviceFacts {
        identity: vec!["pci:0000:3b:00.0".to_owned()],
        ..DeviceFacts::default()
    };
    let takes = |amount: u32| {
        let (set, counter) = ("set".to_owned(), "memory".to_owned());
        let counter = CounterFacts {
            set,
            counter,
            amount: amount.to_string(),
            whole: COUNTER.to_string(),
        };
        DeviceFacts {
            counters: vec![counter],
            ..DeviceFacts::default()
        }
    };
    BTreeMap::from([
        ((driver("gpu"), "0".to_owned()), takes(6)),
        ((driver("gpu"), "1".to_owned()), takes(5)),
        ((driver("gpu"), "2".to_owned()), takes(4)),
        ((driver("net"), "many".to_owned()), shared),
        ((driver("net"), "twin".to_owned()), same.clone()),
        ((driver("nic"), "2".to_owned()), same),
    ])
}

/// A request for some of the first `claims`.
pub(crate) fn request(claims: usize) -> impl Strategy<Value = Request> {
    let some = prop::collection::btree_set(0..claims, 1..4);
    prop_oneof![
        8 => (0..PODS.len(), some).prop_map(|(pod, claims)| Request::Prepare { pod, claims }),
        5 => (0..PODS.len()).prop_map(|pod| Request::Unprepare { pod }),
        2 => (0..claims).prop_map(|claim| Request::Release { claim }),
        8 => (0..claims, 0..3usize).prop_map(|(claim, part)| Request::KubeletPrepare { claim, part }),
        7 => (0..claims, prop::option::weighted(0.7, 0..3usize))
            .prop_map(|(claim, part)| Request::KubeletUnprepare { claim, part }),
        4 => (0..claims, 0..3usize).prop_map(|(claim, part)| Request::EarlyPrepare { claim, part }),
        3 => (0..claims).prop_map(|claim| Request::EarlyUnprepare { claim }),
    ]
}

/// No device, and no identity, is in two claims unless both share it, and no counter is exceeded: by the allocations, not by the holds of
/// the records.
pub(crate) fn assert_devices_are_exclusive<'a>(records: impl Iterator<Item = &'a ClaimRecord>) {
    let (facts, mut users) = (facts(), BTreeMap::<String, Vec<(&Uid, bool)>>::new());
    let mut taken = BTreeMap::new();
    for record in records {
        let has_part = |device: &&AllocatedDevice| record.drivers.contains_key(&device.driver);
        let devices = record.allocation.devices.iter().filter(has_part);
        for device in devices.filter(|device| !device.admin_access) {
            let key = (device.driver.clone(), device.device.to_string());
            let facts = facts.get(&key).cloned().unwrap_or_default();
            let amounts = facts
                .counters
                .iter()
                .map(|counter| counter.amount.parse::<u32>().expect("a number"));
            taken.insert(key.clone(), amounts.sum::<u32>());
            let shared = device.share_id.is_some() || facts.allow_multiple_allocations;
            let keys = facts
                .identity
                .into_iter()
                .chain([format!("{}/{}", key.0, key.1)]);
            keys.for_each(|key| users.entry(key).or_default().push((&record.id.uid, shared)));
        }
    }
    assert!(
        taken.values().sum::<u32>() <= COUNTER,
        "more than {COUNTER}: {taken:?}"
    );
    for (key, users) in users {
        let several = users.iter().any(|(uid, _)| *uid != users[0].0);
        assert!(
            !several || users.iter().all(|(_, shared)| *shared),
            "{key} is in two claims: {users:?}"
        );
    }
}
