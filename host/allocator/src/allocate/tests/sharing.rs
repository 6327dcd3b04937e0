//! Capacities of shared devices and counters of partitions.

use serde_json::{Value, json};

use super::fixtures::*;

/// A device of 40Gi that several claims can have, by default 10Gi each.
fn shared(name: &str) -> Value {
    let policy = json!({"default": "10Gi", "validValues": ["10Gi", "20Gi"]});
    json!({
        "name": name,
        "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "40Gi", "requestPolicy": policy}},
    })
}

fn memory(amount: &str) -> Value {
    one(json!({"capacity": {"requests": {"memory": amount}}}))
}

#[test]
fn shares_consume_capacity_until_exhausted() {
    let mut machine = Machine::of_devices(&[shared("gpu-0")]);
    assert_eq!(
        machine.occupy("a", &one(json!({}))),
        "gpu=gpu-0 memory=10Gi"
    );
    assert_eq!(
        machine.occupy("b", &memory("12Gi")),
        "gpu=gpu-0 memory=20Gi"
    );
    let excluded = machine.excluded(&memory("20Gi"));
    assert_eq!(
        excluded,
        ["gpu gpu-0: capacity memory: needs 20Gi, 10Gi left"]
    );
    assert_eq!(machine.occupy("c", &memory("1Gi")), "gpu=gpu-0 memory=10Gi");
    machine.in_use.remove("b");
    assert!(machine.chosen(&memory("20Gi")).is_ok());
}

#[test]
fn unavailable_capacity_excludes_the_device() {
    let machine = Machine::of_devices(&[shared("gpu-0"), device("gpu-1")]);
    assert_eq!(
        machine.excluded(&memory("30Gi")),
        [
            "gpu gpu-0: capacity memory: its request policy does not allow 30Gi",
            "gpu gpu-1: capacity memory: the device does not have it",
        ]
    );
    let broken = with(
        device("gpu-0"),
        "/capacity",
        json!({"memory": {"value": "much"}}),
    );
    let excluded = Machine::of_devices(&[broken]).excluded(&one(json!({})));
    assert_eq!(
        excluded,
        ["gpu gpu-0: capacity memory: \"much\" is no quantity"]
    );
}

#[test]
fn capacity_is_minimum_for_unshared_device() {
    let sized = |name: &str, size: &str| {
        with(
            device(name),
            "/capacity",
            json!({"memory": {"value": size}}),
        )
    };
    let machine = Machine::of_devices(&[sized("gpu-0", "8Gi"), sized("gpu-1", "16Gi")]);
    assert_eq!(machine.chosen(&memory("10Gi")).as_deref(), Ok("gpu=gpu-1"));
    let all = one(json!({"allocationMode": "All", "capacity": {"requests": {"memory": "10Gi"}}}));
    assert_eq!(machine.chosen(&all).as_deref(), Ok("gpu=gpu-1"));
}

#[test]
fn unroundable_amount_fails_the_allocation() {
    let policy = json!({"default": "1", "validRange": {"min": "1", "max": "4", "step": "1"}});
    let device = with(
        device("gpu-0"),
        "/capacity",
        json!({"memory": {"value": "4", "requestPolicy": policy}}),
    );
    let expected = "request \"gpu\", device gpu.example.com/pool/gpu-0: capacity memory: 1000001u cannot be rounded to steps of 1 in 64 bits";
    assert_eq!(
        Machine::of_devices(&[device]).chosen(&memory("1000001u")),
        Err(expected.into())
    );
}

#[test]
fn only_different_requests_share_a_device() {
    let machine = Machine::of_devices(&[shared("gpu-0")]);
    let both = requests(&[request("a", json!({})), request("b", json!({}))]);
    assert_eq!(
        machine.chosen(&both).as_deref(),
        Ok("a=gpu-0 memory=10Gi, b=gpu-0 memory=10Gi")
    );
    assert!(machine.chosen(&one(json!({"count": 2}))).is_err());
    let five: Vec<Value> = (0..5)
        .map(|number| request(&format!("r{number}"), json!({})))
        .collect();
    let excluded = machine.excluded(&requests(&five));
    assert_eq!(
        excluded,
        ["r4 gpu-0: capacity memory: other requests of the claim need what is left"]
    );
}

#[test]
fn wholly_allocated_device_has_no_shares() {
    let mut machine = Machine::of_devices(&[device("gpu-0")]);
    machine.occupy("whole", &one(json!({})));
    machine.slices = vec![slice(&[shared("gpu-0")])];
    assert_eq!(
        machine.excluded(&one(json!({}))),
        ["gpu gpu-0: in use by claim whole"]
    );
    // And the other way round: the driver took sharing back while a claim has a share.
    machine.in_use.remove("whole");
    machine.occupy("share", &one(json!({})));
    machine.slices = vec![slice(&[device("gpu-0")])];
    assert_eq!(
        machine.excluded(&one(json!({}))),
        ["gpu gpu-0: in use by claim share"]
    );
}

/// A pool of a whole device and two halves, over a set of two slots.
fn partitioned(fields: &Value) -> Machine {
    let part = |name: &str, slots: usize| {
        let consumes =
            json!([{"counterSet": "set", "counters": {"slots": {"value": slots.to_string()}}}]);
        let mut part = with(device(name), "/consumesCounters", consumes);
        for (field, value) in fields.as_object().expect("fields") {
            part[field] = value.clone();
        }
        part
    };
    let devices = slice(&[part("whole", 2), part("half-0", 1), part("half-1", 1)]);
    let devices = with(devices, "/spec/pool/resourceSliceCount", json!(2));
    let counters = json!([{"name": "set", "counters": {"slots": {"value": "2"}}}]);
    let sets = with(
        with(devices.clone(), "/metadata/name", json!("sets")),
        "/spec/sharedCounters",
        counters,
    );
    Machine::new(&[devices, with(sets, "/spec/devices", json!([]))])
}

#[test]
fn partitions_consume_counters_until_exhausted() {
    let mut machine = partitioned(&json!({}));
    assert_eq!(machine.occupy("a", &one(json!({}))), "gpu=whole");
    let short = |name: &str, needs: usize| {
        format!("gpu {name}: counter slots of set set: needs {needs}, 0 left")
    };
    let expected = [
        "gpu whole: in use by claim a".to_owned(),
        short("half-0", 1),
        short("half-1", 1),
    ];
    assert_eq!(machine.excluded(&one(json!({}))), expected);
    machine.in_use.remove("a");
    assert_eq!(
        machine.occupy("b", &one(json!({"count": 2}))),
        "gpu=half-0, gpu=half-1"
    );
    assert!(machine.chosen(&one(json!({}))).is_err());
    // Admin access needs no counters.
    assert_eq!(
        machine
            .chosen(&one(json!({"adminAccess": true})))
            .as_deref(),
        Ok("gpu=whole")
    );
    let expected =
        "gpu half-0: counter slots of set set: other devices of the claim need what is left";
    machine.in_use.remove("b");
    let claim = one(json!({"count": 3}));
    assert_eq!(machine.excluded(&claim), [expected]);
}

/// Matches the scheduler: an allocation names a device by its pool alone.
#[test]
fn duplicate_device_names_consume_all_counters() {
    let mut machine = partitioned(&json!({}));
    // The smaller one is offered first.
    machine.slices[0]["spec"]["devices"]
        .as_array_mut()
        .expect("devices")
        .rotate_left(1);
    let half = json!([machine.slices[0]["spec"]["devices"][0]]);
    for name in ["other-0", "other-1"] {
        let other = with(machine.slices[0].clone(), "/metadata/name", json!(name));
        let other = with(
            with(other, "/spec/nodeName", json!("node-2")),
            "/spec/devices",
            half.clone(),
        );
        machine.slices.push(other);
    }
    for slice in &mut machine.slices {
        slice["spec"]["pool"]["resourceSliceCount"] = json!(4);
    }
    machine.slices[1]["spec"]["sharedCounters"][0]["counters"]["slots"]["value"] = json!("4");
    assert_eq!(machine.occupy("a", &one(json!({}))), "gpu=half-0");
    let short = "gpu whole: counter slots of set set: needs 2, 1 left";
    assert!(
        machine
            .excluded(&one(json!({"count": 2})))
            .contains(&short.to_owned())
    );
    assert_eq!(machine.chosen(&one(json!({}))).as_deref(), Ok("gpu=half-1"));
}

#[test]
fn only_first_share_consumes_counters() {
    let mut machine = partitioned(&json!({"allowMultipleAllocations": true}));
    assert_eq!(machine.occupy("a", &one(json!({}))), "gpu=whole");
    assert_eq!(machine.occupy("b", &one(json!({}))), "gpu=whole");
    machine.in_use.remove("a");
    assert!(machine.chosen(&one(json!({"count": 2}))).is_err());
    machine.in_use.remove("b");
    assert_eq!(
        machine.chosen(&one(json!({"count": 2}))).as_deref(),
        Ok("gpu=half-0, gpu=half-1")
    );
    let both = requests(&[request("a", json!({})), request("b", json!({}))]);
    assert_eq!(machine.chosen(&both).as_deref(), Ok("a=whole, b=whole"));
}

#[test]
fn devices_of_other_nodes_consume_counters() {
    let mut machine = partitioned(&json!({}));
    let elsewhere = with(
        machine.slices[0].clone(),
        "/metadata/name",
        json!("elsewhere"),
    );
    let elsewhere = with(elsewhere, "/spec/nodeName", json!("node-2"));
    let far = with(
        machine.slices[0]["spec"]["devices"][0].clone(),
        "/name",
        json!("far"),
    );
    machine
        .slices
        .push(with(elsewhere, "/spec/devices", json!([far])));
    for slice in &mut machine.slices {
        slice["spec"]["pool"]["resourceSliceCount"] = json!(3);
    }
    let result = json!({"driver": DRIVER, "pool": "pool", "device": "far", "request": "gpu"});
    machine.in_use.add(
        "far claim",
        &parsed(json!({"devices": {"results": [result]}})),
    );
    let expected = "gpu half-0: counter slots of set set: needs 1, 0 left";
    assert!(
        machine
            .excluded(&one(json!({})))
            .iter()
            .any(|line| line == expected)
    );
}
