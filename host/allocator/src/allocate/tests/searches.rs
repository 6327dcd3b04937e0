//! Backtracking, what it skips, and its bounds.

use serde_json::{Value, json};

use super::super::NotAllocatedKind;
use super::fixtures::*;

fn numbered(count: usize, attribute: impl Fn(usize) -> Value) -> Vec<Value> {
    let device = |number| {
        with(
            device(&format!("gpu-{number}")),
            "/attributes",
            attribute(number),
        )
    };
    (0..count).map(device).collect()
}

fn singles(count: usize, constraints: &Value) -> Value {
    let requests: Vec<Value> = (0..count)
        .map(|number| request(&format!("r{number}"), json!({})))
        .collect();
    claim(json!({"requests": requests, "constraints": constraints}))
}

#[test]
fn search_backtracks_for_a_needed_device() {
    let devices = numbered(3, |number| json!({"fast": {"bool": number == 0}}));
    let fast = selectors(&["device.attributes[\"gpu.example.com\"].fast == true"]);
    let claim = requests(&[
        request("any", json!({"count": 2})),
        request("fast", json!({"selectors": fast})),
    ]);
    let machine = Machine::of_devices(&devices);
    assert_eq!(
        machine.chosen(&claim).as_deref(),
        Ok("any=gpu-1, any=gpu-2, fast=gpu-0")
    );
}

#[test]
fn shortage_is_found_without_a_search() {
    let devices = numbered(31, |number| json!({"index": {"int": number}}));
    let machine = Machine::of_devices(&devices);
    let error = machine.chosen(&singles(
        32,
        &json!([{"distinctAttribute": "gpu.example.com/index"}]),
    ));
    let error = error.expect_err("31 devices");
    assert!(
        error.ends_with("need 32 devices, and 31 can be used by them"),
        "{error}"
    );
}

#[test]
fn equivalent_devices_are_not_tried_again() {
    // Ten match in each half, and eleven are needed: there are millions of combinations, and two kinds of devices.
    let devices = numbered(
        20,
        |number| json!({"half": {"int": number / 10}, "index": {"int": number}}),
    );
    let mut machine = Machine::of_devices(&devices);
    machine.bounds.steps = 2_000;
    let constraints = json!([{"matchAttribute": "gpu.example.com/half"}]);
    let error = machine
        .allocate(&singles(11, &constraints))
        .expect_err("no half is large enough");
    assert_eq!(error.kind, NotAllocatedKind::Unsatisfiable);
    assert!(machine.chosen(&singles(10, &constraints)).is_ok());
}

#[test]
fn too_complex_search_ends_with_reason() {
    // 40 devices with 30 values for 32 requests, and no two devices alike.
    let devices = numbered(
        40,
        |number| json!({"value": {"ints": [number % 30, 100 + number]}}),
    );
    let mut machine = Machine::of_devices(&devices);
    machine.bounds.steps = 100_000;
    let claim = singles(32, &json!([{"distinctAttribute": "gpu.example.com/value"}]));
    let error = machine.allocate(&claim).expect_err("too complex");
    assert_eq!(error.kind, NotAllocatedKind::TooComplex);
    let start = "the claim has too many combinations: no result after 100000 steps, in which the search came to request \"r30\"; \
        distinctAttribute gpu.example.com/value refused a device ";
    assert!(error.message.starts_with(start), "{error}");
    assert_eq!(machine.allocate(&claim), Err(error));
}

#[test]
fn selector_steps_end_the_search() {
    let mut machine = Machine::of_devices(&devices(4));
    machine.bounds.selector_steps = 1;
    let driver = "device.driver == \"gpu.example.com\"";
    for fields in [json!({"count": 4}), json!({"allocationMode": "All"})] {
        let claim = one(with(fields, "/selectors", selectors(&[driver])));
        let error = machine.allocate(&claim).expect_err("too complex");
        let expected = "the selectors of the claim took more than 1 steps";
        assert_eq!(
            (error.kind, error.message.as_str()),
            (NotAllocatedKind::TooComplex, expected)
        );
    }
}

#[test]
fn explanation_is_bounded_and_covers_requests() {
    let mut machine = Machine::of_devices(&devices(10));
    machine.bounds.excluded = 6;
    let none = json!({"selectors": selectors(&["false"])});
    let error = machine.allocate(&requests(&[request("a", none.clone()), request("b", none)]));
    let error = error.expect_err("none matches");
    let requests: Vec<&str> = error
        .devices
        .iter()
        .map(|left| left.request.as_str())
        .collect();
    assert_eq!(
        (requests, error.more),
        (vec!["a", "a", "a", "b", "b", "b"], true)
    );
}
