use nodedock_model::answer;
use nodedock_model::{Capacity, CapacityChoice, CapacityPolicy, Taint, TaintEffect, UnparsedValue};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::validate::{admin_access, defaults, drop_deallocated_devices};

const KINDS: [&str; 9] = [
    "Namespace",
    "Node",
    "Pod",
    "Event",
    "DeviceClass",
    "ResourceClaim",
    "DeviceTaintRule",
    "ResourceClaimTemplate",
    "ResourceSlice",
];
/// Fields that the rules look at.
const FIELDS: [&str; 30] = [
    "metadata",
    "name",
    "generateName",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "spec",
    "status",
    "devices",
    "requests",
    "exactly",
    "firstAvailable",
    "selectors",
    "cel",
    "expression",
    "tolerations",
    "config",
    "opaque",
    "parameters",
    "allocation",
    "results",
    "pool",
    "attributes",
    "capacity",
    "requestPolicy",
    "validRange",
    "taints",
    "containers",
    "resourceClaims",
];

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        "[0-9a-zA-Z/.:-]{0,70}".prop_map(Value::from),
    ];
    leaf.prop_recursive(7, 60, 5, |inner| {
        let key = prop_oneof![4 => proptest::sample::select(&FIELDS[..]).prop_map(str::to_owned), 1 => "\\PC{0,99}"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5).prop_map(|fields| Value::Object(fields.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

proptest! {
    #[test]
    fn no_json_makes_a_rule_panic(new in any_value(), old in any_value()) {
        for kind in KINDS {
            let resource = resource(kind).unwrap();
            let mut defaulted = new.clone();
            defaults(kind, &mut defaulted, "2026-01-01T00:00:00Z".parse().unwrap());
            drop_deallocated_devices(&mut defaulted, &old);
            for old in [None, Some(&old)] {
                object(resource, &new, old);
                object(resource, &defaulted, old);
                admin_access(resource, &new, old, Some(&new));
            }
        }
        crate::validate::event(&new, true);
    }

    #[test]
    fn arbitrary_values_cause_no_panic(value in any_value(), place in 0..6usize) {
        let places = ["/spec/devices/requests", "/spec/devices/requests/0", "/spec/devices/requests/0/exactly", "/spec/devices/constraints/0", "/spec/devices/config/0/opaque", "/metadata"];
        let mut claim = claim();
        *claim.pointer_mut(places[place]).unwrap() = value;
        object(resource("ResourceClaim").unwrap(), &claim, None);
        let slice = json!({ "metadata": {}, "spec": claim["spec"] });
        object(resource("ResourceSlice").unwrap(), &slice, Some(&claim));
    }

    #[test]
    fn accepted_devices_of_drivers_are_valid(device in any_device()) {
        let slice = slice_of(&device);
        let pool = answer::Pool { name: "p".to_owned(), devices: vec![device], ..answer::Pool::default() };
        if answer::inventory(None, answer::Inventory { pools: vec![pool] }).is_ok() {
            prop_assert_eq!(wrong(&slice, None), [""; 0], "{}", slice);
        }
    }
}

fn any_amount() -> impl Strategy<Value = String> {
    "[0-9]{1,2}(Gi|m|\\.5)?"
}

fn any_capacity() -> impl Strategy<Value = Capacity> {
    let amount = || prop::option::of(any_amount());
    let choice = prop_oneof![
        Just(CapacityChoice::Any),
        prop::collection::vec(any_amount(), 0..4).prop_map(CapacityChoice::Values),
        (any_amount(), amount(), amount()).prop_map(|(min, max, step)| CapacityChoice::Range {
            min,
            max,
            step
        }),
    ];
    let policy = (amount(), choice).prop_map(|(default_amount, choice)| CapacityPolicy {
        default_amount,
        choice,
    });
    (any_amount(), prop::option::of(policy)).prop_map(|(value, policy)| Capacity { value, policy })
}

fn any_attribute() -> impl Strategy<Value = UnparsedValue> {
    let text = || "\\PC{0,70}";
    let version = || "[0-9]{1,2}\\.[0-9]\\.[0-9](-[a-z0-9.]{1,3})?(\\+[0-9a-z]{1,70})?";
    prop_oneof![
        any::<i64>().prop_map(UnparsedValue::Int),
        any::<bool>().prop_map(UnparsedValue::Bool),
        text().prop_map(UnparsedValue::Text),
        version().prop_map(UnparsedValue::Version),
        prop::collection::vec(any::<i64>(), 0..50).prop_map(UnparsedValue::Ints),
        prop::collection::vec(text(), 0..3).prop_map(UnparsedValue::Texts),
        prop::collection::vec(version(), 0..3).prop_map(UnparsedValue::Versions),
    ]
}

fn any_device() -> impl Strategy<Value = answer::Device> {
    let name = || "([a-zA-Z.]{0,3}/)?[a-z_0-9]{1,4}";
    let taint = ("[a-z./]{0,4}", "[a-z.-]{0,3}").prop_map(|(key, value)| Taint {
        key,
        value,
        effect: TaintEffect::NoSchedule,
    });
    (
        "[a-zA-Z0-9-]{1,4}",
        prop::collection::vec((name(), any_attribute()), 0..4),
        prop::collection::vec((name(), any_capacity()), 0..3),
        prop::collection::vec(taint, 0..3),
        any::<bool>(),
    )
        .prop_map(
            |(name, attributes, capacities, taints, shared)| answer::Device {
                name,
                attributes,
                capacities,
                taints,
                allow_multiple_allocations: shared,
                ..answer::Device::default()
            },
        )
}

/// A slice with the device as the host publishes it.
fn slice_of(device: &answer::Device) -> Value {
    let attribute = |value: &UnparsedValue| match value {
        UnparsedValue::Int(value) => json!({ "int": value }),
        UnparsedValue::Bool(value) => json!({ "bool": value }),
        UnparsedValue::Text(text) => json!({ "string": text }),
        UnparsedValue::Version(text) => json!({ "version": text }),
        UnparsedValue::Ints(list) => json!({ "ints": list }),
        UnparsedValue::Bools(list) => json!({ "bools": list }),
        UnparsedValue::Texts(list) => json!({ "strings": list }),
        UnparsedValue::Versions(list) => json!({ "versions": list }),
    };
    let policy = |policy: &CapacityPolicy| {
        let mut json = json!({ "default": policy.default_amount });
        match &policy.choice {
            CapacityChoice::Any => {}
            CapacityChoice::Values(values) => json["validValues"] = json!(values),
            CapacityChoice::Range { min, max, step } => {
                json["validRange"] = json!({ "min": min, "max": max, "step": step });
            }
        }
        json
    };
    let capacity = |capacity: &Capacity| {
        let policy = capacity.policy.as_ref().map(policy);
        json!({ "value": capacity.value, "requestPolicy": policy })
    };
    let attributes = device.attributes.iter();
    let capacities = device.capacities.iter();
    let taints = device.taints.iter();
    json!({
        "kind": "ResourceSlice", "metadata": { "name": "s" },
        "spec": {
            "driver": "gpu.example.com", "nodeName": "node-1",
            "pool": { "name": "node-1/a", "generation": 0, "resourceSliceCount": 1 },
            "devices": [{
                "name": device.name,
                "attributes": attributes.map(|(name, value)| (name.clone(), attribute(value))).collect::<Map<_, _>>(),
                "capacity": capacities.map(|(name, value)| (name.clone(), capacity(value))).collect::<Map<_, _>>(),
                "taints": taints.map(|taint| json!({ "key": taint.key, "value": taint.value, "effect": "NoSchedule" })).collect::<Value>(),
                "allowMultipleAllocations": device.allow_multiple_allocations,
            }],
        },
    })
}
