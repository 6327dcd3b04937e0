use serde_json::{Value, json};

use super::*;

const REQUESTS: &str = "/spec/devices/requests";

#[test]
fn device_requests_are_validated() {
    let exactly = "/spec/devices/requests/0/exactly";
    let at = |field: &str| format!("{exactly}/{field}");
    let name = "spec.devices.requests[0].name: Invalid";
    let class = "spec.devices.requests[0].exactly.deviceClassName: Invalid";
    let lost = "spec.devices.constraints[0].requests[0]: Invalid";
    assert_each(
        &claim(),
        &[
            ("/spec/devices/requests/0/name", json!("GPU"), &[name, lost]),
            ("/spec/devices/requests/0/name", json!("a.b"), &[name, lost]),
            (
                "/spec/devices/requests/1/name",
                json!("gpu"),
                &[
                    "spec.devices.requests[1]: Duplicate",
                    "spec.devices.constraints[0].requests[1]: Invalid",
                    "spec.devices.config[0].requests[0]: Invalid",
                ],
            ),
            (
                exactly,
                Value::Null,
                &["spec.devices.requests[0]: Required"],
            ),
            (
                "/spec/devices/requests/1/exactly",
                json!({}),
                &["spec.devices.requests[1]: Invalid"],
            ),
            (
                &at("deviceClassName"),
                Value::Null,
                &["spec.devices.requests[0].exactly.deviceClassName: Required"],
            ),
            (&at("deviceClassName"), json!("a_b"), &[class]),
            (
                &at("count"),
                json!(0),
                &["spec.devices.requests[0].exactly.count: Invalid"],
            ),
            (
                &at("count"),
                json!(-1),
                &["spec.devices.requests[0].exactly.count: Invalid"],
            ),
            (
                &at("allocationMode"),
                json!("All"),
                &["spec.devices.requests[0].exactly.count: Invalid"],
            ),
            (
                &at("allocationMode"),
                json!("Some"),
                &["spec.devices.requests[0].exactly.allocationMode: NotSupported"],
            ),
            (
                "/spec/devices/requests/1/firstAvailable/1/name",
                json!("fast"),
                &["spec.devices.requests[1].firstAvailable[1]: Duplicate"],
            ),
            (
                "/spec/devices/requests/1/firstAvailable/1/deviceClassName",
                json!(""),
                &["spec.devices.requests[1].firstAvailable[1].deviceClassName: Required"],
            ),
            (
                "/spec/devices/requests/1/firstAvailable",
                Value::Array(vec![json!({}); 9]),
                &[
                    "spec.devices.requests[1].firstAvailable: TooMany",
                    "spec.devices.constraints[0].requests[1]: Invalid",
                ],
            ),
        ],
    );
    let many = with(&claim(), REQUESTS, Value::Array(vec![json!({}); 33]));
    assert_eq!(wrong(&many, None)[0], "spec.devices.requests: TooMany");
}

#[test]
fn selector_needs_a_compiling_expression() {
    let selectors = "/spec/devices/requests/0/exactly/selectors";
    let first = "/spec/devices/requests/0/exactly/selectors/0/cel/expression";
    let at = "spec.devices.requests[0].exactly.selectors";
    let many = vec![json!({ "cel": { "expression": "true" } }); 33];
    let good = claim();
    assert_each(
        &good,
        &[
            (selectors, json!([{}]), &[&format!("{at}[0].cel: Required")]),
            (selectors, json!(many), &[&format!("{at}: TooMany")]),
            (
                first,
                json!("x".repeat(10 * 1024 + 1)),
                &[&format!("{at}[0].cel.expression: TooLong")],
            ),
        ],
    );
    let broken = wrong(&with(&good, first, json!("device.driver ==!!")), None);
    assert!(
        broken[0].starts_with(&format!("{at}[0].cel.expression: Invalid")),
        "{broken:?}"
    );
}

#[test]
fn a_toleration_fits_its_operator() {
    let at = "spec.devices.requests[0].exactly.tolerations[0]";
    let good = claim();
    let first = "/spec/devices/requests/0/exactly/tolerations/0";
    let field = |name: &str| format!("{first}/{name}");
    assert_each(
        &good,
        &[
            (
                &field("key"),
                json!("a b"),
                &[&format!("{at}.key: Invalid")],
            ),
            (
                &field("value"),
                json!("v"),
                &[&format!("{at}.value: Invalid")],
            ),
            (
                &field("operator"),
                Value::Null,
                &[&format!("{at}.operator: Required")],
            ),
            (
                &field("operator"),
                json!("Is"),
                &[&format!("{at}.operator: NotSupported")],
            ),
            (
                &field("effect"),
                json!("Never"),
                &[&format!("{at}.effect: NotSupported")],
            ),
            (
                first,
                json!({ "operator": "Equal", "value": "a b" }),
                &[&format!("{at}.value: Invalid")],
            ),
        ],
    );
}

#[test]
fn constraint_names_requests_and_qualified_attribute() {
    let at = "spec.devices.constraints[0]";
    assert_each(
        &claim(),
        &[
            (
                "/spec/devices/constraints/0/requests/0",
                json!("tpu"),
                &[&format!("{at}.requests[0]: Invalid")],
            ),
            (
                "/spec/devices/constraints/0/requests/0",
                json!("a/b/c"),
                &[&format!("{at}.requests[0]: Invalid")],
            ),
            (
                "/spec/devices/constraints/0/requests/0",
                json!("gpu/fast"),
                &[&format!("{at}.requests[0]: Invalid")],
            ),
            (
                "/spec/devices/constraints/0/requests/0",
                json!("nic/fast"),
                &[&format!("{at}.requests[1]: Duplicate")],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                Value::Null,
                &[&format!("{at}: Required")],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("numa"),
                &[&format!("{at}.matchAttribute: Invalid")],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("/numa"),
                &[&format!("{at}.matchAttribute: Invalid")],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("a/"),
                &[&format!("{at}.matchAttribute: Invalid")],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("a/1"),
                &[&format!("{at}.matchAttribute: Invalid")],
            ),
            (
                "/spec/devices/constraints",
                Value::Array(vec![json!({}); 33]),
                &["spec.devices.constraints: TooMany"],
            ),
        ],
    );
}

#[test]
fn opaque_parameters_are_limited_to_10kib() {
    let (at, first) = (
        "spec.devices.config[0].opaque",
        "/spec/devices/config/0/opaque",
    );
    let parameters = format!("{first}/parameters");
    assert_each(
        &claim(),
        &[
            (first, Value::Null, &[&format!("{at}: Required")]),
            (
                &format!("{first}/driver"),
                json!(""),
                &[&format!("{at}.driver: Required")],
            ),
            (
                &format!("{first}/driver"),
                json!("d".repeat(64)),
                &[&format!("{at}.driver: TooLong")],
            ),
            (
                &parameters,
                Value::Null,
                &[&format!("{at}.parameters: Required")],
            ),
            (
                &parameters,
                json!(5),
                &[&format!("{at}.parameters: Invalid")],
            ),
            (
                &parameters,
                json!({ "a": "x".repeat(10 * 1024) }),
                &[&format!("{at}.parameters: TooLong")],
            ),
        ],
    );
}

#[test]
fn claim_spec_is_immutable() {
    let mut changed = claim();
    changed["spec"] = json!({ "devices": {} });
    assert_eq!(wrong(&changed, Some(&claim())), ["spec: Invalid"]);
    // To an API server, an empty list is none.
    assert_eq!(
        wrong(
            &with(&claim(), "/spec/devices/requests/1/exactly", Value::Null),
            Some(&claim())
        ),
        [""; 0]
    );
    let old = with(&claim(), "/spec/devices/constraints", json!([]));
    assert_eq!(
        wrong(
            &with(&old, "/spec/devices/constraints", Value::Null),
            Some(&old)
        ),
        [""; 0]
    );
}

#[test]
fn template_follows_claim_rules() {
    let template = json!({
        "kind": "ResourceClaimTemplate", "metadata": { "name": "t", "namespace": "default" },
        "spec": { "metadata": { "labels": { "a": "b" } }, "spec": claim()["spec"] },
    });
    assert_each(
        &template,
        &[
            (
                "/spec/metadata/name",
                json!("n"),
                &["spec.metadata.name: Forbidden"],
            ),
            (
                "/spec/metadata/uid",
                json!("n"),
                &["spec.metadata.uid: Forbidden"],
            ),
            (
                "/spec/metadata/labels/a",
                json!("b c"),
                &["spec.metadata.labels: Invalid"],
            ),
            (
                "/spec/spec/devices/requests/0/exactly/count",
                json!(0),
                &["spec.spec.devices.requests[0].exactly.count: Invalid"],
            ),
        ],
    );
    let changed = with(&template, "/spec/spec", json!({}));
    let refused = wrong(&changed, Some(&template));
    assert_eq!(refused, ["spec: Invalid"]);
}

#[test]
fn class_fields_are_validated() {
    let class = json!({
        "kind": "DeviceClass", "metadata": { "name": "gpu.example.com" },
        "spec": {
            "selectors": [{ "cel": { "expression": "true" } }],
            "config": [{ "opaque": { "driver": "gpu.example.com", "parameters": {} } }],
            "extendedResourceName": "example.com/gpu",
        },
    });
    let name = "spec.extendedResourceName: Invalid";
    let key = "/spec/extendedResourceName";
    assert_each(
        &class,
        &[
            (
                "/spec/selectors/0/cel",
                Value::Null,
                &["spec.selectors[0].cel: Required"],
            ),
            (
                "/spec/config/0/opaque",
                Value::Null,
                &["spec.config[0].opaque: Required"],
            ),
            (
                "/spec/config",
                Value::Array(vec![json!({}); 33]),
                &["spec.config: TooMany"],
            ),
            (key, json!(""), &[name]),
            (key, json!("gpu"), &[name]),
            (key, json!("kubernetes.io/gpu"), &[name]),
            (key, json!("requests.example.com/gpu"), &[name]),
            (key, json!("example.com/g p u"), &[name]),
            (
                "/metadata/namespace",
                json!("default"),
                &["metadata.namespace: Forbidden"],
            ),
        ],
    );
    let large = with(
        &class,
        "/spec/config/0/opaque/parameters",
        json!({ "a": "x".repeat(10 * 1024) }),
    );
    assert_eq!(
        wrong(&large, Some(&class)),
        ["spec.config[0].opaque.parameters: TooLong"]
    );
    let renamed = with(&large, key, Value::Null);
    assert_eq!(
        wrong(&renamed, Some(&large)),
        [""; 0],
        "what is stored already may be too large"
    );
}
