//! Selection and order of the slices and devices that are offered.

use serde_json::{Value, json};

use super::super::NotAllocatedKind;
use super::fixtures::*;

/// A slice of a pool of `count` slices with one device of its name.
fn part(name: &str, pool: &str, generation: usize, count: usize) -> Value {
    let slice = with(
        slice(&[device(&format!("device-{name}"))]),
        "/metadata/name",
        json!(name),
    );
    let pool = json!({"name": pool, "generation": generation, "resourceSliceCount": count});
    with(slice, "/spec/pool", pool)
}

fn all() -> Value {
    one(json!({"allocationMode": "All"}))
}

#[test]
fn devices_with_binding_conditions_come_last() {
    let bound = with(
        device("device-b"),
        "/bindingConditions",
        json!(["attached"]),
    );
    let with_conditions = with(part("b", "pool-0", 1, 1), "/spec/devices", json!([bound]));
    let other_driver = with(
        part("z", "pool", 1, 1),
        "/spec/driver",
        json!("a.example.com"),
    );
    let mut slices = vec![
        part("d", "pool-1", 1, 2),
        part("c", "pool-1", 1, 2),
        with_conditions,
        other_driver,
    ];
    let expected = "gpu=device-z, gpu=device-c, gpu=device-d, gpu=device-b";
    for _ in 0..slices.len() {
        slices.rotate_left(1);
        assert_eq!(
            Machine::new(&slices).chosen(&all()).as_deref(),
            Ok(expected)
        );
    }
}

#[test]
fn only_newest_pool_generation_is_offered() {
    let machine = Machine::new(&[part("old", "pool", 1, 1), part("new", "pool", 2, 1)]);
    assert_eq!(machine.chosen(&all()).as_deref(), Ok("gpu=device-new"));
    let elsewhere = with(part("new", "pool", 2, 1), "/spec/nodeName", json!("node-2"));
    let machine = Machine::new(&[part("old", "pool", 1, 1), elsewhere]);
    assert!(machine.chosen(&one(json!({}))).is_err());
}

#[test]
fn incomplete_and_invalid_pools_are_excluded() {
    let twice = with(
        part("b", "bad", 1, 1),
        "/spec/devices",
        json!([device("x"), device("x")]),
    );
    let consumes = json!([{"counterSet": "set", "counters": {"slots": {"value": "1"}}}]);
    let consuming = with(device("x"), "/consumesCounters", consumes);
    let no_set = with(part("b", "bad", 1, 1), "/spec/devices", json!([consuming]));
    let selector =
        json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Like"}]}]});
    let no_selector = with(
        with(part("b", "bad", 1, 1), "/spec/nodeName", Value::Null),
        "/spec/nodeSelector",
        selector,
    );
    for (bad, reason) in [
        (
            part("b", "bad", 1, 2),
            "the pool is being updated: it has 1 of 2 slices",
        ),
        (twice, "device name \"x\" occurs twice"),
        (
            no_set,
            "device \"x\" consumes of counter set \"set\", which the pool does not have",
        ),
        (
            no_selector,
            "node selector has operator \"Like\" for label \"zone\"",
        ),
    ] {
        let machine = Machine::new(&[part("a", "good", 1, 1), bad]);
        assert_eq!(
            machine.chosen(&one(json!({}))).as_deref(),
            Ok("gpu=device-a"),
            "{reason}"
        );
        let pool = format!("; pool \"bad\" of driver \"gpu.example.com\" cannot be used: {reason}");
        let error = machine
            .chosen(&one(json!({"count": 2})))
            .expect_err("one device");
        assert!(error.ends_with(&pool), "{error}");
        let error = machine.allocate(&all()).expect_err("not all are known");
        assert_eq!(error.kind, NotAllocatedKind::PoolNotReady);
        assert_eq!(
            error.message,
            format!("request \"gpu\" asks for all devices{pool}")
        );
    }
}

#[test]
fn wrong_counters_make_pool_invalid() {
    let consumes = json!([{"counterSet": "set", "counters": {"slots": {"value": "1"}}}]);
    let devices = part("a", "pool", 1, 2);
    let devices = with(
        devices,
        "/spec/devices",
        json!([with(device("x"), "/consumesCounters", consumes)]),
    );
    let counters = |sets: Value| {
        with(
            with(part("b", "pool", 1, 2), "/spec/devices", json!([])),
            "/spec/sharedCounters",
            sets,
        )
    };
    for (sets, reason) in [
        (
            json!([{"name": "set", "counters": {"cores": {"value": "1"}}}]),
            "counter \"slots\", which counter set \"set\" does not have",
        ),
        (
            json!([{"name": "set", "counters": {"slots": {"value": "one"}}}]),
            "counter \"slots\" of set \"set\": \"one\" is no quantity",
        ),
        (
            json!([{"name": "set", "counters": {}}, {"name": "set", "counters": {}}]),
            "counter set \"set\" occurs twice",
        ),
    ] {
        let error = Machine::new(&[devices.clone(), counters(sets)])
            .chosen(&one(json!({})))
            .expect_err("invalid");
        assert!(error.ends_with(reason), "{error}");
    }
}

#[test]
fn devices_are_offered_to_their_nodes() {
    let anywhere = |fields: Value| {
        let mut slice = with(part("a", "pool", 1, 1), "/spec/nodeName", Value::Null);
        for (field, value) in fields.as_object().expect("fields") {
            slice["spec"][field] = value.clone();
        }
        Machine::new(&[slice]).chosen(&one(json!({}))).is_ok()
    };
    let zone = |zone: &str| {
        let requirement = json!({"key": "zone", "operator": "In", "values": [zone]});
        json!({"nodeSelectorTerms": [{"matchExpressions": [requirement]}]})
    };
    let own = |fields: Value| {
        let mut fields = fields;
        fields["name"] = json!("device-a");
        json!({"perDeviceNodeSelection": true, "devices": [fields, {"name": "x", "nodeName": "node-2"}]})
    };
    for (fields, offered) in [
        (json!({"nodeName": "node-1"}), true),
        (json!({"nodeName": "node-2"}), false),
        (json!({"allNodes": true}), true),
        (json!({"nodeSelector": zone("a")}), true),
        (json!({"nodeSelector": zone("b")}), false),
        (json!({}), false),
        (own(json!({"nodeName": "node-1"})), true),
        (own(json!({"allNodes": true})), true),
        (own(json!({"nodeSelector": zone("a")})), true),
        (own(json!({"nodeSelector": zone("b")})), false),
        (own(json!({})), false),
    ] {
        assert_eq!(anywhere(fields.clone()), offered, "{fields}");
    }
}

#[test]
fn devices_of_other_nodes_are_excluded() {
    let devices = json!([{"name": "x", "nodeName": "node-2"}, {"name": "y", "nodeName": "node-1"}]);
    let slice = with(part("a", "pool", 1, 1), "/spec/nodeName", Value::Null);
    let slice = with(
        with(slice, "/spec/perDeviceNodeSelection", json!(true)),
        "/spec/devices",
        devices,
    );
    let excluded = Machine::new(&[slice]).excluded(&one(json!({"count": 2})));
    assert_eq!(excluded, ["gpu x: not on node \"node-1\""]);
}
