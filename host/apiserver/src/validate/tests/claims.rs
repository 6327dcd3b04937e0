use serde_json::{Value, json};

use super::*;

const REQUESTS: &str = "/spec/devices/requests";

#[test]
fn a_request_asks_for_devices_of_a_class_in_one_way() {
    let exactly = "/spec/devices/requests/0/exactly";
    let at = |field: &str| format!("{exactly}/{field}");
    let capital = format!("spec.devices.requests[0].name: Invalid value: \"GPU\": {NOT_A_LABEL}");
    let dotted = "spec.devices.requests[0].name: Invalid value: \"a.b\": must not contain dots";
    let class = format!(
        "spec.devices.requests[0].exactly.deviceClassName: Invalid value: \"a_b\": {NOT_A_SUBDOMAIN}"
    );
    let no_reference = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
    let lost =
        format!("spec.devices.constraints[0].requests[0]: Invalid value: \"gpu\": {no_reference}");
    assert_each(
        &claim(),
        &[
            (
                "/spec/devices/requests/0/name",
                json!("GPU"),
                &[&capital, &lost],
            ),
            (
                "/spec/devices/requests/0/name",
                json!("a.b"),
                &[dotted, &lost],
            ),
            (
                "/spec/devices/requests/1/name",
                json!("gpu"),
                &[
                    "spec.devices.requests[1]: Duplicate value: \"gpu\"",
                    &format!(
                        "spec.devices.constraints[0].requests[1]: Invalid value: \"nic/fast\": {no_reference}"
                    ),
                    &format!(
                        "spec.devices.config[0].requests[0]: Invalid value: \"nic\": {no_reference}"
                    ),
                ],
            ),
            (
                exactly,
                Value::Null,
                &[
                    "spec.devices.requests[0]: Required value: exactly one of `exactly` or `firstAvailable` is required",
                ],
            ),
            (
                "/spec/devices/requests/1/exactly",
                json!({}),
                &[
                    "spec.devices.requests[1]: Invalid value: null: exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
                ],
            ),
            (
                &at("deviceClassName"),
                Value::Null,
                &["spec.devices.requests[0].exactly.deviceClassName: Required value"],
            ),
            (&at("deviceClassName"), json!("a_b"), &[&class]),
            (
                &at("count"),
                json!(0),
                &[
                    "spec.devices.requests[0].exactly.count: Invalid value: 0: must be greater than zero",
                ],
            ),
            (
                &at("count"),
                json!(-1),
                &[
                    "spec.devices.requests[0].exactly.count: Invalid value: -1: must be greater than zero",
                ],
            ),
            (
                &at("allocationMode"),
                json!("All"),
                &[
                    "spec.devices.requests[0].exactly.count: Invalid value: 1: must not be specified when allocationMode is 'All'",
                ],
            ),
            (
                &at("allocationMode"),
                json!("Some"),
                &[
                    "spec.devices.requests[0].exactly.allocationMode: Unsupported value: \"Some\": supported values: \"All\", \"ExactCount\"",
                ],
            ),
            (
                "/spec/devices/requests/1/firstAvailable/1/name",
                json!("fast"),
                &["spec.devices.requests[1].firstAvailable[1]: Duplicate value: \"fast\""],
            ),
            (
                "/spec/devices/requests/1/firstAvailable/1/deviceClassName",
                json!(""),
                &["spec.devices.requests[1].firstAvailable[1].deviceClassName: Required value"],
            ),
            (
                "/spec/devices/requests/1/firstAvailable",
                Value::Array(vec![json!({}); 9]),
                &[
                    "spec.devices.requests[1].firstAvailable: Too many: 9: must have at most 8 items",
                    &format!(
                        "spec.devices.constraints[0].requests[1]: Invalid value: \"nic/fast\": {no_reference}"
                    ),
                ],
            ),
        ],
    );
    let many = with(&claim(), REQUESTS, Value::Array(vec![json!({}); 33]));
    assert_eq!(
        wrong(&many, None)[0],
        "spec.devices.requests: Too many: 33: must have at most 32 items"
    );
}

#[test]
fn a_selector_is_an_expression_that_compiles() {
    let selectors = "/spec/devices/requests/0/exactly/selectors";
    let first = "/spec/devices/requests/0/exactly/selectors/0/cel/expression";
    let at = "spec.devices.requests[0].exactly.selectors";
    let many = vec![json!({ "cel": { "expression": "true" } }); 33];
    let good = claim();
    assert_each(
        &good,
        &[
            (
                selectors,
                json!([{}]),
                &[&format!("{at}[0].cel: Required value")],
            ),
            (
                selectors,
                json!(many),
                &[&format!("{at}: Too many: 33: must have at most 32 items")],
            ),
            (
                first,
                json!("x".repeat(10 * 1024 + 1)),
                &[&format!(
                    "{at}[0].cel.expression: Too long: may not be more than 10240 bytes"
                )],
            ),
        ],
    );
    let broken = wrong(&with(&good, first, json!("device.driver ==!!")), None);
    assert!(
        broken[0].starts_with(&format!(
            "{at}[0].cel.expression: Invalid value: \"device.driver ==!!\": "
        )),
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
                &[&format!(
                    "{at}.key: Invalid value: \"a b\": {NOT_A_LABEL_KEY}"
                )],
            ),
            (
                &field("value"),
                json!("v"),
                &[&format!(
                    "{at}.value: Invalid value: \"v\": must be empty for operator `Exists`"
                )],
            ),
            (
                &field("operator"),
                Value::Null,
                &[&format!("{at}.operator: Required value")],
            ),
            (
                &field("operator"),
                json!("Is"),
                &[&format!(
                    "{at}.operator: Unsupported value: \"Is\": supported values: \"Equal\", \"Exists\""
                )],
            ),
            (
                &field("effect"),
                json!("Never"),
                &[&format!(
                    "{at}.effect: Unsupported value: \"Never\": supported values: \"NoExecute\", \"NoSchedule\", \"None\""
                )],
            ),
            (
                first,
                json!({ "operator": "Equal", "value": "a b" }),
                &[&format!(
                    "{at}.value: Invalid value: \"a b\": {NOT_A_LABEL_VALUE}"
                )],
            ),
        ],
    );
}

#[test]
fn a_constraint_names_requests_and_an_attribute_with_a_domain() {
    let at = "spec.devices.constraints[0]";
    let reference = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
    assert_each(
        &claim(),
        &[
            (
                "/spec/devices/constraints/0/requests/0",
                json!("tpu"),
                &[&format!(
                    "{at}.requests[0]: Invalid value: \"tpu\": {reference}"
                )],
            ),
            (
                "/spec/devices/constraints/0/requests/0",
                json!("a/b/c"),
                &[&format!(
                    "{at}.requests[0]: Invalid value: \"a/b/c\": {reference}"
                )],
            ),
            (
                "/spec/devices/constraints/0/requests/0",
                json!("gpu/fast"),
                &[&format!(
                    "{at}.requests[0]: Invalid value: \"gpu/fast\": {reference}"
                )],
            ),
            (
                "/spec/devices/constraints/0/requests/0",
                json!("nic/fast"),
                &[&format!("{at}.requests[1]: Duplicate value: \"nic/fast\"")],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                Value::Null,
                &[&format!(
                    "{at}: Required value: exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set"
                )],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("numa"),
                &[&format!(
                    "{at}.matchAttribute: Invalid value: \"numa\": a fully qualified name must be a domain and a name separated by a slash"
                )],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("/numa"),
                &[&format!(
                    "{at}.matchAttribute: Invalid value: \"\": the domain must not be empty"
                )],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("a/"),
                &[&format!(
                    "{at}.matchAttribute: Invalid value: \"\": the name must not be empty"
                )],
            ),
            (
                "/spec/devices/constraints/0/matchAttribute",
                json!("a/1"),
                &[&format!(
                    "{at}.matchAttribute: Invalid value: \"1\": {NOT_AN_IDENTIFIER}"
                )],
            ),
            (
                "/spec/devices/constraints",
                Value::Array(vec![json!({}); 33]),
                &["spec.devices.constraints: Too many: 33: must have at most 32 items"],
            ),
        ],
    );
}

#[test]
fn opaque_parameters_are_an_object_of_at_most_ten_kibibytes() {
    let (at, first) = (
        "spec.devices.config[0].opaque",
        "/spec/devices/config/0/opaque",
    );
    let parameters = format!("{first}/parameters");
    assert_each(
        &claim(),
        &[
            (first, Value::Null, &[&format!("{at}: Required value")]),
            (
                &format!("{first}/driver"),
                json!(""),
                &[&format!("{at}.driver: Required value")],
            ),
            (
                &format!("{first}/driver"),
                json!("d".repeat(64)),
                &[&format!(
                    "{at}.driver: Too long: may not be more than 63 bytes"
                )],
            ),
            (
                &parameters,
                Value::Null,
                &[&format!("{at}.parameters: Required value")],
            ),
            (
                &parameters,
                json!(5),
                &[&format!(
                    "{at}.parameters: Invalid value: \"<value omitted>\": must be a valid JSON object"
                )],
            ),
            (
                &parameters,
                json!({ "a": "x".repeat(10 * 1024) }),
                &[&format!(
                    "{at}.parameters: Too long: may not be more than 10240 bytes"
                )],
            ),
        ],
    );
}

#[test]
fn the_spec_of_a_claim_cannot_change() {
    let mut changed = claim();
    changed["spec"] = json!({ "devices": {} });
    assert_eq!(
        wrong(&changed, Some(&claim())),
        ["spec: Invalid value: {\"Devices\":{}}: field is immutable"]
    );
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
fn a_template_has_the_rules_of_a_claim_and_gives_labels_and_annotations_alone() {
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
                &["spec.metadata.name: Forbidden: cannot be set"],
            ),
            (
                "/spec/metadata/uid",
                json!("n"),
                &["spec.metadata.uID: Forbidden: cannot be set"],
            ),
            (
                "/spec/metadata/labels/a",
                json!("b c"),
                &[&format!(
                    "spec.metadata.labels: Invalid value: \"b c\": {NOT_A_LABEL_VALUE}"
                )],
            ),
            (
                "/spec/spec/devices/requests/0/exactly/count",
                json!(0),
                &[
                    "spec.spec.devices.requests[0].exactly.count: Invalid value: 0: must be greater than zero",
                ],
            ),
        ],
    );
    let changed = with(&template, "/spec/spec", json!({}));
    let refused = wrong(&changed, Some(&template));
    assert_eq!(
        refused,
        [
            "spec: Invalid value: {\"Metadata\":{\"Labels\":{\"A\":\"b\"}},\"Spec\":{}}: field is immutable"
        ]
    );
}

#[test]
fn a_class_selects_configures_and_may_have_a_resource_with_a_domain() {
    let class = json!({
        "kind": "DeviceClass", "metadata": { "name": "gpu.example.com" },
        "spec": {
            "selectors": [{ "cel": { "expression": "true" } }],
            "config": [{ "opaque": { "driver": "gpu.example.com", "parameters": {} } }],
            "extendedResourceName": "example.com/gpu",
        },
    });
    let name = |name: &str| {
        format!(
            "spec.extendedResourceName: Invalid value: \"{name}\": must be a valid extended resource name"
        )
    };
    let key = "/spec/extendedResourceName";
    assert_each(
        &class,
        &[
            (
                "/spec/selectors/0/cel",
                Value::Null,
                &["spec.selectors[0].cel: Required value"],
            ),
            (
                "/spec/config/0/opaque",
                Value::Null,
                &["spec.config[0].opaque: Required value"],
            ),
            (
                "/spec/config",
                Value::Array(vec![json!({}); 33]),
                &["spec.config: Too many: 33: must have at most 32 items"],
            ),
            (key, json!(""), &[&name("")]),
            (key, json!("gpu"), &[&name("gpu")]),
            (
                key,
                json!("kubernetes.io/gpu"),
                &[&name("kubernetes.io/gpu")],
            ),
            (
                key,
                json!("requests.example.com/gpu"),
                &[&name("requests.example.com/gpu")],
            ),
            (
                key,
                json!("example.com/g p u"),
                &[&name("example.com/g p u")],
            ),
            (
                "/metadata/namespace",
                json!("default"),
                &["metadata.namespace: Forbidden: not allowed on this type"],
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
        ["spec.config[0].opaque.parameters: Too long: may not be more than 10240 bytes"]
    );
    let renamed = with(&large, key, Value::Null);
    assert_eq!(
        wrong(&renamed, Some(&large)),
        [""; 0],
        "what is stored already may be too large"
    );
}
