//! Invariants after any history of allocations and releases.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use nodedock_model::quantity;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::fixtures::*;

const GIB: i128 = 1 << 30;

/// Four plain devices, two shared ones of 8Gi, and four partitions over a set of three slots.
fn machine() -> Machine {
    let plain = (0..4).map(|number| {
        with(
            device(&format!("plain-{number}")),
            "/attributes/kind",
            json!({"int": number % 2}),
        )
    });
    let shared = (0..2).map(|number| {
        let policy = json!({"default": "2Gi", "validRange": {"min": "1Gi", "step": "1Gi"}});
        json!({
            "name": format!("shared-{number}"),
            "attributes": {"kind": {"int": 2}},
            "allowMultipleAllocations": true,
            "capacity": {"memory": {"value": "8Gi", "requestPolicy": policy}},
        })
    });
    let part = (0..4).map(|number| {
        let slots = json!({"slots": {"value": (1 + number % 2).to_string()}});
        json!({
            "name": format!("part-{number}"),
            "attributes": {"kind": {"int": 3}},
            "consumesCounters": [{"counterSet": "set", "counters": slots}],
        })
    });
    let devices: Vec<Value> = plain.chain(shared).chain(part).collect();
    let whole = with(slice(&devices), "/spec/pool/resourceSliceCount", json!(2));
    let sets = with(
        with(whole.clone(), "/metadata/name", json!("sets")),
        "/spec/devices",
        json!([]),
    );
    let counters = json!([{"name": "set", "counters": {"slots": {"value": "3"}}}]);
    Machine::new(&[whole, with(sets, "/spec/sharedCounters", counters)])
}

#[derive(Debug, Clone)]
enum Step {
    Claim(Value),
    Release(usize),
}

fn asked() -> impl Strategy<Value = Value> {
    let kind = proptest::option::of(0..4);
    (
        1..4usize,
        kind,
        proptest::option::of(1..6usize),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(count, kind, memory, admin)| {
            let mut fields = json!({"count": count, "adminAccess": admin});
            if let Some(kind) = kind {
                let kind = format!("device.attributes[\"gpu.example.com\"].kind == {kind}");
                fields["selectors"] = selectors(&[&kind]);
            }
            if let Some(memory) = memory {
                fields["capacity"] = json!({"requests": {"memory": format!("{memory}Gi")}});
            }
            fields
        })
}

fn step() -> impl Strategy<Value = Step> {
    let claim =
        (prop::collection::vec(asked(), 1..4), any::<bool>()).prop_map(|(asked, matching)| {
            let requests: Vec<Value> = asked
                .into_iter()
                .enumerate()
                .map(|(number, fields)| request(&format!("r{number}"), fields))
                .collect();
            let constraints = if matching {
                json!([{"matchAttribute": "gpu.example.com/kind"}])
            } else {
                json!([])
            };
            Step::Claim(claim(
                json!({"requests": requests, "constraints": constraints}),
            ))
        });
    prop_oneof![3 => claim, 2 => (0..8usize).prop_map(Step::Release)]
}

fn results(
    allocations: &BTreeMap<String, AllocationResult>,
) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let results = allocations
        .values()
        .filter_map(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results
        .flatten()
        .filter(|result| result.admin_access != Some(true))
}

fn check(allocations: &BTreeMap<String, AllocationResult>) {
    let mut exclusive: BTreeMap<&str, usize> = BTreeMap::new();
    let mut memory: BTreeMap<&str, i128> = BTreeMap::new();
    for result in results(allocations) {
        match &result.consumed_capacity {
            Some(consumed) => {
                let amount = quantity::nanos(&consumed["memory"].0).expect("a quantity");
                *memory.entry(&result.device).or_default() += amount;
            }
            None => *exclusive.entry(&result.device).or_default() += 1,
        }
    }
    assert!(
        exclusive.values().all(|claims| *claims == 1),
        "a device is given twice: {exclusive:?}"
    );
    assert!(
        memory.values().all(|sum| *sum <= 8 * GIB * 1_000_000_000),
        "over the capacity: {memory:?}"
    );
    let parts = exclusive
        .keys()
        .filter_map(|name| name.strip_prefix("part-"));
    let slots = parts.map(|number| 1 + number.parse::<usize>().expect("a number") % 2);
    assert!(slots.sum::<usize>() <= 3, "over the counter: {exclusive:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_device_is_allocated_twice(
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let (mut machine, mut turned) = (machine(), machine());
        turned.slices.reverse();
        let mut allocations = BTreeMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Claim(claim) => {
                    let found = machine.allocate(&claim);
                    prop_assert_eq!(&found, &turned.allocate(&claim));
                    let Ok(allocation) = found else { continue };
                    let uid = format!("claim-{number}");
                    machine.in_use.add(&uid, &allocation);
                    turned.in_use.add(&uid, &allocation);
                    allocations.insert(uid, allocation);
                    check(&allocations);
                }
                Step::Release(place) => {
                    let Some(uid) = allocations.keys().nth(place).cloned() else { continue };
                    allocations.remove(&uid);
                    machine.in_use.remove(&uid);
                    turned.in_use.remove(&uid);
                }
            }
        }
        // After the release of every claim nothing is in use.
        allocations.keys().for_each(|uid| machine.in_use.remove(uid));
        let whole = one(json!({"count": 4, "selectors": selectors(&["true"])}));
        prop_assert_eq!(machine.chosen(&whole), self::machine().chosen(&whole));
    }
}
