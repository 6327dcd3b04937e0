//! The table and its indexes.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::fixtures::{allocation, claim, driver, name, pod, uid};
use crate::manager::claims::machine::{DeviceFacts, holds, pod_record};
use crate::records::table::{ClaimTable, Undo};
use nodedock_model::{ClaimRecord, ClaimState, ContainerClaim, ObjectRef, PodContainer, SmallMap};

fn record(text: &str, devices: &[&str], pods: &[&str]) -> Arc<ClaimRecord> {
    Arc::new(ClaimRecord {
        pods: pods.iter().map(|name| (pod(name).uid, pod(name))).collect(),
        allocation: allocation(devices),
        holds: holds(&allocation(devices), |_, _, _| DeviceFacts::default()),
        ..ClaimRecord::new(claim(text, &[], &[]).id, ClaimState::Prepared, "boot")
    })
}

#[test]
fn same_named_claims_do_not_collide() {
    let mut table = ClaimTable::default();
    table.put(record("one", &[], &[]));
    table.put(record("one@newer", &[], &[]));
    table.remove(&uid("uid-one"));
    let named = table
        .claim_named(&name("default"), &name("one"))
        .map(|found| found.id.uid.clone());
    assert_eq!(named, Some(uid("newer")));
}

#[test]
fn pod_keeps_claims_of_earlier_requests() {
    let mut table = ClaimTable::default();
    let used = ContainerClaim {
        pod_claim_name: "gpu".to_owned(),
        request: None,
    };
    let container = |claims| {
        [PodContainer {
            name: "main".to_owned(),
            claims,
            ..PodContainer::default()
        }]
    };
    let (a, containers) = (pod("a"), container(vec![used]));
    let ids = |names: &[&str]| -> SmallMap<String, ObjectRef> {
        names
            .iter()
            .map(|name| ((*name).to_owned(), claim(name, &[], &[]).id))
            .collect()
    };
    table.put(record("one", &[], &["a"]));
    table.put(record("two", &[], &["a"]));
    let mut first = pod_record(&table, &a, &container(vec![]), ids(&["one", "two", "gone"]));
    first.unknown.insert("newer".to_owned(), true.into());
    table.put_pod(Arc::new(first.clone()));
    let second = pod_record(&table, &a, &containers, ids(&["one"]));
    assert_eq!(
        (second.claims, second.containers),
        (ids(&["one", "two"]), containers.to_vec())
    );
    assert_eq!(
        second.unknown, first.unknown,
        "what a newer release wrote stays"
    );
}

#[derive(Debug, Clone)]
enum Op {
    Put {
        claim: usize,
        devices: Vec<usize>,
        pods: Vec<usize>,
    },
    Remove {
        claim: usize,
    },
}

const CLAIMS: [&str; 4] = ["one", "two", "three", "one@newer"];
const DEVICES: [&str; 4] = ["gpu/0", "gpu/0#a", "nic/0", "!gpu/0"];
const PODS: [&str; 3] = ["a", "b", "c"];

fn op() -> impl Strategy<Value = Op> {
    let some = |count: usize| prop::collection::vec(0..count, 0..3);
    prop_oneof![
        3 => (0..CLAIMS.len(), some(DEVICES.len()), some(PODS.len()))
            .prop_map(|(claim, devices, pods)| Op::Put { claim, devices, pods }),
        1 => (0..CLAIMS.len()).prop_map(|claim| Op::Remove { claim }),
    ]
}

fn make(claim: usize, devices: &[usize], pods: &[usize]) -> Arc<ClaimRecord> {
    let devices: Vec<_> = devices.iter().map(|index| DEVICES[*index]).collect();
    let pods: Vec<_> = pods.iter().map(|index| PODS[*index]).collect();
    record(CLAIMS[claim], &devices, &pods)
}

/// Returns the results of the indexes, in a form that can be compared.
fn answers(table: &ClaimTable) -> Vec<BTreeSet<String>> {
    let names =
        |records: Vec<Arc<ClaimRecord>>| records.iter().map(|r| r.id.uid.to_string()).collect();
    let of_pods = PODS
        .iter()
        .map(|name| names(table.claims_of_pod(pod(name).uid.as_str())));
    let of_device = |short: &str| {
        names(
            table
                .users_of(&driver(short), "pool", "0")
                .cloned()
                .collect(),
        )
    };
    let of_driver = |short: &str| names(table.claims_of_driver(&driver(short)).cloned().collect());
    let refs = PODS.iter().map(|name| {
        table
            .pod_ref(&pod(name).uid)
            .iter()
            .map(|pod| pod.uid.to_string())
            .collect()
    });
    let named = PODS.iter().map(|name| {
        let pod = pod(name);
        table
            .pods_named(&pod.namespace, &pod.name)
            .iter()
            .map(|pod| pod.uid.to_string())
            .collect()
    });
    let all = names(table.claims().cloned().collect());
    let devices = ["gpu", "nic"]
        .map(of_device)
        .into_iter()
        .chain(["gpu", "nic"].map(of_driver));
    of_pods
        .chain(devices)
        .chain(refs)
        .chain(named)
        .chain([all])
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn updated_indexes_match_rebuilt_table(ops in prop::collection::vec(op(), 0..30)) {
        let mut table = ClaimTable::default();
        for op in &ops {
            match op {
                Op::Put { claim, devices, pods } => drop(table.put(make(*claim, devices, pods))),
                Op::Remove { claim } => drop(table.remove(&make(*claim, &[], &[]).id.uid)),
            }
            let claims = table.claims().map(|record| ClaimRecord::clone(record)).collect();
            prop_assert_eq!(answers(&table), answers(&ClaimTable::new(claims, vec![])));
        }
    }

    #[test]
    fn uncommitted_change_is_undone(
        before in prop::collection::vec(op(), 0..10),
        changes in prop::collection::vec((0..CLAIMS.len(), prop::collection::vec(0..DEVICES.len(), 0..3)), 0..10),
    ) {
        let mut table = ClaimTable::default();
        for op in &before {
            if let Op::Put { claim, devices, pods } = op {
                table.put(make(*claim, devices, pods));
            }
        }
        let (claims, indexed): (Vec<_>, _) = (table.claims().cloned().collect(), answers(&table));
        let mut undo = Undo::default();
        for (claim, devices) in &changes {
            undo.put(&mut table, &make(*claim, devices, &[0]));
        }
        undo.restore(&mut table);
        prop_assert_eq!(table.claims().cloned().collect::<Vec<_>>(), claims);
        prop_assert_eq!(answers(&table), indexed);
    }
}
