use serde_json::{Value, json};

use super::*;

fn slice() -> Value {
    json!({
        "kind": "ResourceSlice", "metadata": { "name": "s" },
        "spec": {
            "driver": "gpu.example.com", "nodeName": "node-1",
            "pool": { "name": "node-1/a", "generation": 0, "resourceSliceCount": 1 },
            "devices": [{
                "name": "gpu-0",
                "attributes": { "index": { "int": 0 }, "example.com/model": { "string": "m" } },
                "capacity": { "memory": { "value": "80Gi" } },
            }],
        },
    })
}

fn device(value: Value) -> Value {
    with(&slice(), "/spec/devices/0", value)
}

#[test]
fn slice_needs_driver_pool_and_nodes() {
    assert_each(
        &slice(),
        &[
            ("/spec/driver", json!("GPU.example.com"), &[]),
            ("/spec/driver", Value::Null, &["spec.driver: Required"]),
            ("/spec/driver", json!("a_b"), &["spec.driver: Invalid"]),
            ("/spec/pool/name", json!(""), &["spec.pool.name: Required"]),
            (
                "/spec/pool/name",
                json!("a//b"),
                &["spec.pool.name: Invalid"],
            ),
            (
                "/spec/pool/name",
                json!("a/B"),
                &["spec.pool.name: Invalid"],
            ),
            (
                "/spec/pool/resourceSliceCount",
                json!(0),
                &["spec.pool.resourceSliceCount: Invalid"],
            ),
            (
                "/spec/pool/generation",
                json!(-1),
                &["spec.pool.generation: Invalid"],
            ),
            ("/spec/nodeName", Value::Null, &["spec: Required"]),
            (
                "/spec/nodeName",
                json!(""),
                &["spec.nodeName: Invalid", "spec: Required"],
            ),
            ("/spec/nodeName", json!("Node"), &["spec.nodeName: Invalid"]),
            ("/spec/allNodes", json!(true), &["spec: Invalid"]),
            ("/spec/allNodes", json!(false), &["spec.allNodes: Invalid"]),
            ("/spec/sharedCounters", json!([]), &["spec: Invalid"]),
        ],
    );
}

#[test]
fn node_selector_has_one_valid_term() {
    let selector = |terms: Value| {
        let slice = with(&slice(), "/spec/nodeName", Value::Null);
        wrong(
            &with(
                &slice,
                "/spec/nodeSelector",
                json!({ "nodeSelectorTerms": terms }),
            ),
            None,
        )
    };
    let field = "spec.nodeSelector.nodeSelectorTerms";
    let term = |operator: &str, values: &[&str]| {
        selector(
            json!([{ "matchExpressions": [{ "key": "a", "operator": operator, "values": values }] }]),
        )
    };
    assert_eq!(term("In", &["b"]), [""; 0]);
    assert_eq!(term("Exists", &[]), [""; 0]);
    assert_eq!(term("Gt", &["5"]), [""; 0]);
    let at = format!("{field}[0].matchExpressions[0]");
    assert_eq!(term("In", &[]), [format!("{at}.values: Required")]);
    assert_eq!(term("Exists", &["b"]), [format!("{at}.values: Forbidden")]);
    assert_eq!(term("Lt", &["1", "2"]), [format!("{at}.values: Required")]);
    assert_eq!(term("Is", &["b"]), [format!("{at}.operator: Invalid")]);
    assert_eq!(term("In", &["b c"]), [format!("{at}.values[0]: Invalid")]);
    let by_name = |key: &str, operator: &str, values: &[&str]| {
        selector(
            json!([{ "matchFields": [{ "key": key, "operator": operator, "values": values }] }]),
        )
    };
    let at = format!("{field}[0].matchFields[0]");
    assert_eq!(by_name("metadata.name", "In", &["node-1"]), [""; 0]);
    assert_eq!(
        by_name("metadata.uid", "In", &["x"]),
        [format!("{at}.key: Invalid")]
    );
    assert_eq!(
        by_name("metadata.name", "Exists", &[]),
        [format!("{at}.operator: Invalid")]
    );
    assert_eq!(
        by_name("metadata.name", "In", &[]),
        [format!("{at}.values: Required")]
    );
    assert_eq!(
        by_name("metadata.name", "In", &["N"]),
        [format!("{at}.values[0]: Invalid")]
    );
    assert_eq!(selector(json!([])), [format!("{field}: Required")]);
    assert_eq!(selector(json!([{}, {}])), [format!("{field}: Invalid")]);
}

#[test]
fn device_count_per_slice_is_bounded() {
    let devices = |count: usize, extra: Value| {
        let devices = (0..count).map(|index| {
            let mut device = json!({ "name": format!("d-{index}") });
            device
                .as_object_mut()
                .unwrap()
                .extend(extra.as_object().cloned().unwrap_or_default());
            device
        });
        wrong(&with(&slice(), "/spec/devices", devices.collect()), None)
    };
    let too_many = ["spec.devices: TooMany"];
    assert_eq!(devices(128, json!({})), [""; 0]);
    assert_eq!(devices(129, json!({})), too_many);
    for extra in [
        json!({ "taints": [{ "key": "k", "effect": "None" }] }),
        json!({ "consumesCounters": [{ "counterSet": "c", "counters": { "n": { "value": "1" } } }] }),
        json!({ "attributes": { "a": { "strings": ["x"] } } }),
    ] {
        assert_eq!(devices(64, extra.clone()), [""; 0]);
        assert_eq!(devices(65, extra), too_many);
    }
}

#[test]
fn device_names_and_attributes_are_validated() {
    let at = "spec.devices[0]";
    let one = |value: Value| device(json!({ "name": "d", "attributes": { "a": value } }));
    let attribute = |value: Value| wrong(&one(value), None);
    assert_each(
        &slice(),
        &[
            (
                "/spec/devices/0/name",
                Value::Null,
                &[&format!("{at}.name: Invalid")],
            ),
            (
                "/spec/devices/0/name",
                json!("n".repeat(64)),
                &[&format!("{at}.name: Invalid")],
            ),
            (
                "/spec/devices/-",
                json!({ "name": "gpu-0" }),
                &["spec.devices[1]: Duplicate"],
            ),
            (
                "/spec/devices/0/attributes/9",
                json!({ "int": 1 }),
                &[&format!("{at}.attributes: Invalid")],
            ),
            (
                "/spec/devices/0/attributes/~1a",
                json!({ "int": 1 }),
                &[&format!("{at}.attributes: Invalid")],
            ),
            (
                "/spec/devices/0/capacity/a-b",
                json!({ "value": "1" }),
                &[&format!("{at}.capacity: Invalid")],
            ),
        ],
    );
    assert_eq!(
        attribute(json!({})),
        [format!("{at}.attributes[a]: Invalid")]
    );
    assert_eq!(
        attribute(json!({ "int": 1, "bool": true })),
        [format!("{at}.attributes[a]: Invalid")]
    );
    assert_eq!(attribute(json!({ "string": "x".repeat(64) })), [""; 0]);
    assert_eq!(
        attribute(json!({ "string": "x".repeat(65) })),
        [format!("{at}.attributes[a].string: TooLong")]
    );
    for version in ["1.2.3", "0.0.0-rc.1+build.7"] {
        assert_eq!(attribute(json!({ "version": version })), [""; 0]);
    }
    for version in ["1.2", "v1.2.3", "01.2.3", ""] {
        let expected = format!("{at}.attributes[a].version: Invalid");
        assert_eq!(attribute(json!({ "version": version })), [expected]);
    }
    assert_eq!(
        attribute(json!({ "strings": [] })),
        [format!("{at}.attributes[a].strings: Invalid")]
    );
    assert_eq!(
        attribute(json!({ "versions": ["1.0.0", "1"] })),
        [format!("{at}.attributes[a].versions[1]: Invalid")]
    );
    let long = "k".repeat(97);
    let mut fields = json!({});
    fields[&long] = json!({});
    let shortened = format!("{}...{}", "k".repeat(47), "k".repeat(46));
    assert_eq!(
        wrong(&device(json!({ "name": "d", "attributes": fields })), None)[1],
        format!("{at}.attributes[{shortened}]: Invalid")
    );
}

#[test]
fn attributes_and_capacities_share_one_bound() {
    let attributes = |count: usize| {
        (0..count)
            .map(|index| (format!("a{index}"), json!({ "int": 1 })))
            .collect::<Value>()
    };
    let full =
        json!({ "name": "d", "attributes": attributes(31), "capacity": { "c": { "value": "1" } } });
    assert_eq!(wrong(&device(full), None), [""; 0]);
    let over =
        json!({ "name": "d", "attributes": attributes(32), "capacity": { "c": { "value": "1" } } });
    assert_eq!(wrong(&device(over), None), ["spec.devices[0]: Invalid"]);
    let values =
        json!({ "name": "d", "attributes": { "a": { "ints": vec![1; 48] }, "b": { "int": 1 } } });
    assert_eq!(wrong(&device(values), None), ["spec.devices[0]: Invalid"]);
}

#[test]
fn taint_needs_key_and_known_effect() {
    let taint = |taint: Value| wrong(&device(json!({ "name": "d", "taints": [taint] })), None);
    let at = "spec.devices[0].taints[0]";
    assert_eq!(
        taint(json!({ "key": "example.com/k", "value": "v", "effect": "NoSchedule" })),
        [""; 0]
    );
    assert_eq!(
        taint(json!({ "key": "", "effect": "None" })),
        [format!("{at}.key: Invalid")]
    );
    assert_eq!(
        taint(json!({ "key": "k", "value": "a b", "effect": "None" })),
        [format!("{at}.value: Invalid")]
    );
    assert_eq!(
        taint(json!({ "key": "k" })),
        [format!("{at}.effect: Required")]
    );
    assert_eq!(
        taint(json!({ "key": "k", "effect": "Never" })),
        [format!("{at}.effect: NotSupported")]
    );
    let many = device(
        json!({ "name": "d", "taints": vec![json!({ "key": "k", "effect": "Later" }); 17] }),
    );
    assert_eq!(wrong(&many, None), ["spec.devices[0].taints: TooMany"]);
    assert_eq!(
        wrong(&many, Some(&many)),
        [""; 0],
        "taints that stay are not checked again"
    );
}

#[test]
fn device_consumes_at_most_two_sets() {
    let consumed = |sets: Value| {
        wrong(
            &device(json!({ "name": "d", "consumesCounters": sets })),
            None,
        )
    };
    let at = "spec.devices[0].consumesCounters";
    let good = json!({ "counterSet": "a", "counters": { "memory": { "value": "1Gi" } } });
    assert_eq!(consumed(json!([good])), [""; 0]);
    assert_eq!(
        consumed(json!([good, good])),
        [format!("{at}[1]: Duplicate")]
    );
    assert_eq!(
        consumed(json!([good, good, good])),
        [format!("{at}: TooMany")]
    );
    assert_eq!(
        consumed(json!([{}])),
        [
            format!("{at}[0].counterSet: Required"),
            format!("{at}[0].counters: Required")
        ]
    );
    let shared = |sets: Value| {
        let slice = with(&slice(), "/spec/devices", Value::Null);
        wrong(&with(&slice, "/spec/sharedCounters", sets), None)
    };
    let good = json!({ "name": "a", "counters": { "memory": { "value": "1Gi" } } });
    assert_eq!(shared(json!([good])), [""; 0]);
    assert_eq!(
        shared(json!([good, good])),
        ["spec.sharedCounters[1]: Duplicate"]
    );
    assert_eq!(
        shared(json!([{ "name": "A", "counters": { "M": { "value": "1" } } }])),
        [
            "spec.sharedCounters[0].name: Invalid",
            "spec.sharedCounters[0].counters: Invalid",
        ]
    );
    let many: Value = (0..33)
        .map(|index| (format!("c{index}"), json!({ "value": "1" })))
        .collect();
    assert_eq!(
        shared(json!([{ "name": "a", "counters": many }])),
        ["spec.sharedCounters[0].counters: TooMany"]
    );
    assert_eq!(
        shared(json!(vec![good; 9])),
        ["spec.sharedCounters: TooMany"]
    );
}

#[test]
fn devices_select_nodes_if_slice_allows() {
    let alone = device(json!({ "name": "d", "nodeName": "n" }));
    assert_eq!(wrong(&alone, None), ["spec.devices[0]: Invalid"]);
    let left = |value: Value| {
        let slice = with(&device(value), "/spec/nodeName", Value::Null);
        wrong(
            &with(&slice, "/spec/perDeviceNodeSelection", json!(true)),
            None,
        )
    };
    assert_eq!(left(json!({ "name": "d", "nodeName": "n" })), [""; 0]);
    assert_eq!(left(json!({ "name": "d" })), ["spec.devices[0]: Required"]);
    assert_eq!(
        left(json!({ "name": "d", "nodeName": "n", "allNodes": true })),
        ["spec.devices[0]: Invalid"]
    );
    assert_eq!(
        left(json!({ "name": "d", "nodeName": "", "allNodes": true })),
        ["spec.devices[0].nodeName: Invalid"]
    );
    assert_eq!(
        left(json!({ "name": "d", "nodeName": "n", "allNodes": false })),
        ["spec.devices[0].allNodes: Invalid"]
    );
}

#[test]
fn binding_conditions_go_with_failure_conditions() {
    let binding = |conditions: Value, failures: Value| {
        wrong(
            &device(
                json!({ "name": "d", "bindingConditions": conditions, "bindingFailureConditions": failures }),
            ),
            None,
        )
    };
    let at = "spec.devices[0]";
    assert_eq!(
        binding(json!(["example.com/Ready"]), json!(["Failed"])),
        [""; 0]
    );
    assert_eq!(
        binding(json!(["a"]), Value::Null),
        [format!("{at}.bindingFailureConditions: Invalid")]
    );
    assert_eq!(
        binding(json!([]), json!(["a"])),
        [format!("{at}.bindingConditions: Invalid")]
    );
    assert_eq!(
        binding(json!(["a", "a"]), json!(["a"])),
        [
            format!("{at}.bindingConditions[1]: Duplicate"),
            format!("{at}.bindingFailureConditions[0]: Invalid"),
        ]
    );
    assert_eq!(
        binding(json!(["a", "b", "c", "d", "e"]), json!(["f"])),
        [format!("{at}.bindingConditions: TooMany")]
    );
}

#[test]
fn request_policy_needs_a_shared_device() {
    let policy = |policy: Value| {
        let capacity = json!({ "memory": { "value": "8Gi", "requestPolicy": policy } });
        wrong(
            &device(json!({ "name": "d", "allowMultipleAllocations": true, "capacity": capacity })),
            None,
        )
    };
    let at = "spec.devices[0].capacity[memory].requestPolicy";
    let values = |values: &[&str]| policy(json!({ "default": "1Gi", "validValues": values }));
    let range = |range: Value| policy(json!({ "default": "2Gi", "validRange": range }));
    assert_eq!(policy(json!({})), [""; 0]);
    assert_eq!(values(&["1Gi", "8Gi"]), [""; 0]);
    assert_eq!(
        range(json!({ "min": "1Gi", "max": "8Gi", "step": "1Gi" })),
        [""; 0]
    );
    let alone = json!({ "memory": { "value": "8Gi", "requestPolicy": {} } });
    assert_eq!(
        wrong(&device(json!({ "name": "d", "capacity": alone })), None),
        [format!("{at}: Forbidden")]
    );
    assert_eq!(
        policy(json!({ "validValues": ["1Gi"], "validRange": {} })),
        [format!("{at}: Forbidden")]
    );
    assert_eq!(
        policy(json!({ "validValues": ["1Gi"] })),
        [format!("{at}.default: Required")]
    );
    assert_eq!(
        policy(json!({ "validRange": { "min": "1" } })),
        [format!("{at}.default: Required")]
    );
    assert_eq!(
        values(&["2Gi", "1Gi"]),
        [format!("{at}.validValues[1]: Invalid")]
    );
    assert_eq!(
        values(&["1Gi", "9Gi"]),
        [format!("{at}.validValues[1]: Invalid")]
    );
    assert_eq!(
        values(&["1Gi", "1024Mi"]),
        [format!("{at}.validValues[1]: Duplicate")]
    );
    assert_eq!(values(&["2Gi"]), [format!("{at}.validValues: Invalid")]);
    assert_eq!(range(json!({})), [format!("{at}.validRange.min: Required")]);
    assert_eq!(
        range(json!({ "min": "9Gi" })),
        [
            format!("{at}.validRange.min: Invalid"),
            format!("{at}.validRange.min: Invalid"),
        ]
    );
    assert_eq!(
        range(json!({ "min": "2Gi", "max": "1Gi" })),
        [
            format!("{at}.validRange.max: Invalid"),
            format!("{at}.validRange.max: Invalid"),
        ]
    );
    assert_eq!(
        range(json!({ "min": "1Gi", "max": "9Gi" })),
        [format!("{at}.validRange.max: Invalid")]
    );
    assert_eq!(
        range(json!({ "min": "1Gi", "step": "8Gi" })),
        [
            format!("{at}.validRange.step: Invalid"),
            format!("{at}.validRange.step: Invalid"),
        ]
    );
    assert_eq!(
        range(json!({ "min": "1Gi", "step": "0" })),
        [format!("{at}.validRange.step: Invalid")]
    );
}

#[test]
fn a_slice_stays_in_its_pool() {
    assert_each_change(
        &slice(),
        &[
            ("/spec/pool/generation", json!(5), &[]),
            (
                "/spec/pool/name",
                json!("other"),
                &["spec.pool.name: Invalid"],
            ),
            ("/spec/driver", json!("other"), &["spec.driver: Invalid"]),
            (
                "/spec/nodeName",
                json!("other"),
                &["spec.nodeName: Invalid"],
            ),
        ],
    );
}
