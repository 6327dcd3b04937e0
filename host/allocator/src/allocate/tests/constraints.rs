//! `matchAttribute` and `distinctAttribute`.

use serde_json::{Value, json};

use super::fixtures::*;

/// Devices with the attribute `root`, of the driver's domain.
fn rooted(roots: &[Value]) -> Machine {
    let device = |(number, root): (usize, &Value)| match root {
        Value::Null => device(&format!("gpu-{number}")),
        root => with(
            device(&format!("gpu-{number}")),
            "/attributes/root",
            root.clone(),
        ),
    };
    Machine::of_devices(&roots.iter().enumerate().map(device).collect::<Vec<_>>())
}

fn strings(values: &[&[&str]]) -> Vec<Value> {
    values
        .iter()
        .map(|values| json!({"strings": values}))
        .collect()
}

fn ints(values: &[i64]) -> Vec<Value> {
    values.iter().map(|value| json!({"int": value})).collect()
}

fn constrained(count: usize, constraint: Value) -> Value {
    claim(
        json!({"requests": [request("gpu", json!({"count": count}))], "constraints": [constraint]}),
    )
}

fn matching(count: usize) -> Value {
    constrained(count, json!({"matchAttribute": "gpu.example.com/root"}))
}

fn distinct(count: usize) -> Value {
    constrained(count, json!({"distinctAttribute": "gpu.example.com/root"}))
}

#[test]
fn devices_match_in_an_attribute() {
    assert_eq!(
        rooted(&ints(&[0, 1, 1])).chosen(&matching(2)).as_deref(),
        Ok("gpu=gpu-1, gpu=gpu-2")
    );
    let machine = rooted(&[json!({"int": 0}), json!({"int": 1}), Value::Null]);
    let error = machine.chosen(&matching(2)).expect_err("no pair");
    let start = "no combination of devices satisfies request \"gpu\" and those before it; matchAttribute gpu.example.com/root refused";
    assert!(error.starts_with(start), "{error}");
    let excluded = machine.excluded(&matching(2));
    let expected = [
        "gpu gpu-1: matchAttribute gpu.example.com/root: the device has 1, and gpu.example.com/pool/gpu-0, which was chosen before, has 0",
        "gpu gpu-2: matchAttribute gpu.example.com/root: the device does not have it",
    ];
    assert_eq!(excluded, expected);
}

#[test]
fn devices_differ_in_an_attribute() {
    assert_eq!(
        rooted(&ints(&[0, 0, 1])).chosen(&distinct(2)).as_deref(),
        Ok("gpu=gpu-0, gpu=gpu-2")
    );
    assert!(rooted(&ints(&[0, 0, 0])).chosen(&distinct(2)).is_err());
    assert!(
        rooted(&[json!({"int": 0}), Value::Null])
            .chosen(&distinct(2))
            .is_err()
    );
}

/// The device that was chosen last was named, which differs.
#[test]
fn refusal_names_the_equal_device() {
    let excluded = rooted(&ints(&[0, 1, 0])).excluded(&distinct(3));
    let line = excluded.iter().find(|line| line.starts_with("gpu gpu-2: "));
    let line = line.expect("a device of the same root is refused");
    assert!(line.contains("the device has 0, and "), "{line}");
    assert!(line.ends_with("which was chosen before, has 0"), "{line}");
}

#[test]
fn values_of_different_types_are_different() {
    let roots = [json!({"string": "1.0.0"}), json!({"version": "1.0.0"})];
    assert!(rooted(&roots).chosen(&matching(2)).is_err());
    assert!(rooted(&roots).chosen(&distinct(2)).is_ok());
    assert!(
        rooted(&[json!({"bool": true}), json!({"bool": true})])
            .chosen(&matching(2))
            .is_ok()
    );
    assert!(
        rooted(&[json!({}), json!({})])
            .chosen(&matching(2))
            .is_err()
    );
}

#[test]
fn list_attributes_match_by_common_values() {
    let machine = rooted(&strings(&[&["a", "b"], &["b", "c"], &["c", "a"], &["d"]]));
    assert_eq!(
        machine.chosen(&matching(2)).as_deref(),
        Ok("gpu=gpu-0, gpu=gpu-1")
    );
    assert!(machine.chosen(&matching(3)).is_err());
    assert_eq!(
        machine.chosen(&distinct(2)).as_deref(),
        Ok("gpu=gpu-0, gpu=gpu-3")
    );
    assert!(machine.chosen(&distinct(3)).is_err());
    // A scalar is a list of one.
    let machine = rooted(&[json!({"string": "a"}), json!({"strings": ["b", "a"]})]);
    assert!(machine.chosen(&matching(2)).is_ok());
    let machine = rooted(&[
        json!({"ints": [1, 2]}),
        json!({"int": 2}),
        json!({"bools": [true]}),
    ]);
    assert!(machine.chosen(&matching(2)).is_ok());
    assert!(
        rooted(&[json!({"versions": ["1.0.0"]}), json!({"version": "1.0.1"})])
            .chosen(&matching(2))
            .is_err()
    );
}

#[test]
fn attribute_lookup_defaults_to_driver_domain() {
    let own = |name: &str| with(device("gpu-0"), "/attributes", json!({name: {"int": 1}}));
    let allocated = |name: &str, constraint: &str| {
        let claim = constrained(1, json!({"matchAttribute": constraint}));
        Machine::of_devices(&[own(name)]).chosen(&claim).is_ok()
    };
    assert!(allocated("numa", "gpu.example.com/numa"));
    assert!(allocated(
        "other.example.com/numa",
        "other.example.com/numa"
    ));
    assert!(!allocated("numa", "other.example.com/numa"));
    assert!(!allocated("other.example.com/numa", "gpu.example.com/numa"));
}

#[test]
fn constraint_applies_to_its_named_requests() {
    let sub_requests =
        ["s0", "s1"].map(|name| json!({"name": name, "deviceClassName": "gpu", "count": 1}));
    let allocated = |names: Value| {
        let constraint = json!({"matchAttribute": "gpu.example.com/root", "requests": names});
        let claim = claim(json!({
            "requests": [request("a", json!({})), {"name": "b", "firstAvailable": sub_requests}],
            "constraints": [constraint],
        }));
        rooted(&ints(&[0, 1])).chosen(&claim)
    };
    assert!(allocated(json!([])).is_err());
    assert!(allocated(json!(["a", "b"])).is_err());
    assert_eq!(
        allocated(json!(["a", "b/s0"])).as_deref(),
        Ok("a=gpu-0, b/s1=gpu-1")
    );
    assert_eq!(
        allocated(json!(["a"])).as_deref(),
        Ok("a=gpu-0, b/s0=gpu-1")
    );
}

#[test]
fn all_mode_fails_on_contradicted_constraint() {
    let claim = claim(json!({
        "requests": [request("gpu", json!({"allocationMode": "All"}))],
        "constraints": [{"matchAttribute": "gpu.example.com/root"}],
    }));
    assert!(rooted(&ints(&[1, 1])).chosen(&claim).is_ok());
    let expected = "request \"gpu\" asks for all devices, and device gpu.example.com/pool/gpu-1 cannot be added: \
        matchAttribute gpu.example.com/root: the device has 2, and gpu.example.com/pool/gpu-0, which was chosen before, has 1";
    assert_eq!(rooted(&ints(&[1, 2])).chosen(&claim), Err(expected.into()));
}
