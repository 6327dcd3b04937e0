use serde_json::{Value, json};

use super::*;
use crate::validate::{admin_access, defaults};

#[test]
fn pod_containers_and_claims_are_validated() {
    let pod = json!({
        "kind": "Pod", "metadata": { "name": "p", "namespace": "default" },
        "spec": {
            "containers": [{ "name": "main", "image": "i", "resources": { "claims": [{ "name": "gpu", "request": "a" }, { "name": "gpu", "request": "b" }] } }],
            "resourceClaims": [{ "name": "gpu", "resourceClaimName": "c" }, { "name": "nic", "resourceClaimTemplateName": "t" }],
        },
    });
    let claims = "spec.containers[0].resources.claims";
    assert_each(
        &pod,
        &[
            (
                "/spec/containers",
                json!([]),
                &["spec.containers: Required"],
            ),
            (
                "/spec/containers/0/name",
                Value::Null,
                &["spec.containers[0].name: Required"],
            ),
            (
                "/spec/containers/0/name",
                json!("M"),
                &["spec.containers[0].name: Invalid"],
            ),
            (
                "/spec/containers/0/image",
                json!(""),
                &["spec.containers[0].image: Required"],
            ),
            (
                "/spec/containers/-",
                json!({ "name": "main", "image": "i" }),
                &["spec.containers[1].name: Duplicate"],
            ),
            (
                "/spec/initContainers",
                json!([{ "name": "main", "image": "i" }]),
                &["spec.initContainers[0].name: Duplicate"],
            ),
            ("/spec/nodeName", json!("N"), &["spec.nodeName: Invalid"]),
            (
                "/spec/resourceClaims/1/name",
                json!("gpu"),
                &["spec.resourceClaims[1].name: Duplicate"],
            ),
            (
                "/spec/resourceClaims/1/name",
                json!(""),
                &["spec.resourceClaims[1].name: Required"],
            ),
            (
                "/spec/resourceClaims/1/resourceClaimName",
                json!("c"),
                &["spec.resourceClaims[1]: Invalid"],
            ),
            (
                "/spec/resourceClaims/1/resourceClaimTemplateName",
                Value::Null,
                &["spec.resourceClaims[1]: Invalid"],
            ),
            (
                "/spec/resourceClaims/1/resourceClaimTemplateName",
                json!("T"),
                &["spec.resourceClaims[1].resourceClaimTemplateName: Invalid"],
            ),
            (
                "/spec/containers/0/resources/claims/0",
                json!({}),
                &[&format!("{claims}[0]: Required")],
            ),
            (
                "/spec/containers/0/resources/claims/0/name",
                json!("tpu"),
                &[&format!("{claims}[0]: NotFound")],
            ),
            (
                "/spec/containers/0/resources/claims/1/request",
                json!("a"),
                &[&format!("{claims}[1]: Duplicate")],
            ),
            (
                "/spec/containers/0/resources/claims/1/request",
                Value::Null,
                &[&format!("{claims}[1]: Duplicate")],
            ),
        ],
    );
    let none = with(&pod, "/spec/resourceClaims", Value::Null);
    assert_eq!(wrong(&none, None)[0], format!("{claims}[0]: NotFound"));
}

#[test]
fn taint_rule_needs_selector_and_taint() {
    let rule = json!({
        "kind": "DeviceTaintRule", "metadata": { "name": "r" },
        "spec": { "deviceSelector": { "driver": "d" }, "taint": { "key": "k", "effect": "NoExecute" } },
    });
    assert_each(
        &rule,
        &[
            (
                "/spec/deviceSelector/driver",
                json!(""),
                &["spec.deviceSelector.driver: Required"],
            ),
            (
                "/spec/deviceSelector/pool",
                json!(""),
                &["spec.deviceSelector.pool: Required"],
            ),
            (
                "/spec/deviceSelector/device",
                json!("D"),
                &["spec.deviceSelector.device: Invalid"],
            ),
            (
                "/spec/taint/effect",
                Value::Null,
                &["spec.taint.effect: Required"],
            ),
        ],
    );
}

#[test]
fn admin_access_needs_a_namespace_label() {
    let claim = with(
        &claim(),
        "/spec/devices/requests/0/exactly/adminAccess",
        json!(true),
    );
    let template = json!({ "kind": "ResourceClaimTemplate", "metadata": { "namespace": "default" }, "spec": { "spec": claim["spec"] } });
    let mut granted = claim.clone();
    granted["status"] =
        json!({ "allocation": { "devices": { "results": [{ "adminAccess": true }] } } });
    let label = |value: &str| json!({ "metadata": { "labels": { "resource.kubernetes.io/admin-access": value } } });
    let ask = |object: &Value, old: Option<&Value>, namespace: Option<&Value>| {
        let cause = admin_access(resource_of(object), object, old, namespace);
        cause.as_ref().map(refusal)
    };
    for object in [&claim, &template] {
        assert_eq!(ask(object, None, Some(&label("true"))), None);
        assert_eq!(
            ask(object, None, Some(&label("yes"))),
            Some("spec.devices.requests[0].adminAccess: Forbidden".to_owned())
        );
        assert_eq!(
            ask(object, None, None),
            Some("spec.devices.requests[0].adminAccess: InternalError".to_owned())
        );
        assert_eq!(
            ask(object, Some(object), Some(&json!({}))),
            None,
            "the spec cannot change"
        );
    }
    assert_eq!(
        ask(&granted, Some(&claim), Some(&json!({}))),
        Some("status.allocation.devices.results[0].adminAccess: Forbidden".to_owned())
    );
    assert_eq!(ask(&granted, Some(&granted), Some(&json!({}))), None);
    assert_eq!(ask(&super::claim(), None, Some(&json!({}))), None);
}

#[test]
fn new_group_events_need_all_fields() {
    let event = json!({
        "metadata": { "namespace": "default" }, "involvedObject": { "namespace": "default" }, "type": "Normal",
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingComponent": "n", "reportingInstance": "n-1", "action": "A", "reason": "R",
    });
    let ask = |event: &Value, new_group: bool| {
        let causes = crate::validate::event(event, new_group);
        causes.iter().map(refusal).collect::<Vec<_>>()
    };
    assert_eq!(ask(&event, true), [""; 0]);
    assert_eq!(
        ask(&with(&event, "/reportingComponent", json!("")), true),
        ["reportingController: Required"]
    );
    assert_eq!(
        ask(&with(&event, "/type", json!("Loud")), true),
        ["type: Invalid"]
    );
    let long = "x".repeat(129);
    assert_eq!(
        ask(&with(&event, "/reason", json!(long)), true),
        ["reason: Invalid"]
    );
    let old = with(&event, "/eventTime", Value::Null);
    assert_eq!(ask(&old, false), [""; 0]);
    assert_eq!(
        ask(
            &with(&old, "/involvedObject/namespace", json!("other")),
            false
        ),
        ["involvedObject.namespace: Invalid"]
    );
}

#[test]
fn omitted_fields_get_their_defaults() {
    let now = "2026-01-01T00:00:00.7Z".parse().unwrap();
    let filled = |kind: &str, mut object: Value| {
        defaults(kind, &mut object, now);
        object
    };
    let requests = |exactly: Value| json!([{ "exactly": exactly }, { "firstAvailable": [{ "tolerations": [{}] }] }]);
    let given = json!({ "spec": { "devices": { "requests": requests(json!({ "allocationMode": "All" })) } } });
    let mut expected = given.clone();
    expected["spec"]["devices"]["requests"][1]["firstAvailable"][0] = json!({ "allocationMode": "ExactCount", "count": 1, "tolerations": [{ "operator": "Equal" }] });
    assert_eq!(filled("ResourceClaim", given.clone()), expected);
    assert_eq!(
        filled("ResourceClaimTemplate", json!({ "spec": given })),
        json!({ "spec": expected })
    );
    let counted = json!({ "spec": { "devices": { "requests": [{ "exactly": { "count": 3 } }] } } });
    let request = json!([{ "exactly": { "count": 3, "allocationMode": "ExactCount" } }]);
    assert_eq!(
        filled("ResourceClaim", counted)["spec"]["devices"]["requests"],
        request
    );
    let taints = json!({ "spec": { "devices": [{ "taints": [{}, { "timeAdded": "2025-01-01T00:00:00Z" }] }] } });
    let times =
        json!([{ "timeAdded": "2026-01-01T00:00:00Z" }, { "timeAdded": "2025-01-01T00:00:00Z" }]);
    assert_eq!(
        filled("ResourceSlice", taints)["spec"]["devices"][0]["taints"],
        times
    );
    assert_eq!(
        filled("Event", json!({ "reportingInstance": "n" })),
        json!({ "eventTime": null, "reportingComponent": "", "reportingInstance": "n" })
    );
    let pod = filled(
        "Pod",
        json!({ "spec": { "containers": [{ "image": "example.com:5000/i" }, { "image": "i:1" }] } }),
    );
    assert_eq!(pod["spec"]["restartPolicy"], "Always");
    let pull = [0, 1].map(|index| pod["spec"]["containers"][index]["imagePullPolicy"].clone());
    assert_eq!(pull, ["Always", "IfNotPresent"]);
    assert_eq!(filled("Namespace", json!({})), json!({}));
    assert_eq!(
        filled("ResourceClaim", json!({ "spec": 5 })),
        json!({ "spec": 5 })
    );
}
