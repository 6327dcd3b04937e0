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
    fn no_value_in_a_good_object_makes_a_rule_panic(value in any_value(), place in 0..6usize) {
        let places = ["/spec/devices/requests", "/spec/devices/requests/0", "/spec/devices/requests/0/exactly", "/spec/devices/constraints/0", "/spec/devices/config/0/opaque", "/metadata"];
        let mut claim = claim();
        *claim.pointer_mut(places[place]).unwrap() = value;
        object(resource("ResourceClaim").unwrap(), &claim, None);
        let slice = json!({ "metadata": {}, "spec": claim["spec"] });
        object(resource("ResourceSlice").unwrap(), &slice, Some(&claim));
    }
}
