use serde_json::{Value, json};

use super::*;

fn node() -> Value {
    json!({ "kind": "Node", "metadata": {
        "name": "node-1", "labels": { "example.com/a": "b" }, "annotations": { "A.B/c": "any text" },
        "finalizers": ["example.com/f", "orphan"],
        "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true }],
    } })
}

#[test]
fn name_format_depends_on_kind() {
    let named = |kind: &str, namespace: &str, name: &str| {
        let mut object = json!({ "kind": kind, "metadata": { "name": name }, "spec": { "containers": [{ "name": "c", "image": "i" }] } });
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        wrong(&object, None)
    };
    assert_eq!(named("Node", "", "a.b"), [""; 0]);
    assert_eq!(named("Node", "", "A"), ["metadata.name: Invalid"]);
    assert_eq!(named("Node", "", ""), ["metadata.name: Required"]);
    let long = "a".repeat(254);
    assert_eq!(named("Node", "", &long), ["metadata.name: Invalid"]);
    assert_eq!(named("Namespace", "", "a"), [""; 0]);
    assert_eq!(named("Namespace", "", "a.b"), ["metadata.name: Invalid"]);
    assert_eq!(named("Namespace", "", "a_b"), ["metadata.name: Invalid"]);
    assert_eq!(named("Event", "default", "A:b"), [""; 0]);
    assert_eq!(named("Event", "default", "a/b"), ["metadata.name: Invalid"]);
    assert_eq!(named("Event", "default", ".."), ["metadata.name: Invalid"]);
    assert_eq!(named("Pod", "default", "p"), [""; 0]);
    assert_eq!(named("Pod", "", "p"), ["metadata.namespace: Required"]);
    assert_eq!(named("Pod", "N", "p"), ["metadata.namespace: Invalid"]);
    assert_eq!(
        named("Node", "default", "n"),
        ["metadata.namespace: Forbidden"]
    );
}

#[test]
fn generate_name_may_end_in_dash() {
    assert_each(
        &node(),
        &[
            ("/metadata/generateName", json!("node-"), &[]),
            (
                "/metadata/generateName",
                json!("Node-"),
                &["metadata.generateName: Invalid"],
            ),
        ],
    );
}

#[test]
fn metadata_fields_are_validated() {
    let owner = "/metadata/ownerReferences/0";
    let of_owner = |field: &str| format!("{owner}/{field}");
    let large = "x".repeat(256 * 1024);
    assert_each(
        &node(),
        &[
            (
                "/metadata/labels/a b",
                json!("c"),
                &["metadata.labels: Invalid"],
            ),
            (
                "/metadata/labels/~1a",
                json!("c"),
                &["metadata.labels: Invalid"],
            ),
            (
                "/metadata/labels/A~1a",
                json!("c"),
                &["metadata.labels: Invalid"],
            ),
            (
                "/metadata/labels/a",
                json!("b c"),
                &["metadata.labels: Invalid"],
            ),
            (
                "/metadata/labels/a",
                json!("x".repeat(64)),
                &["metadata.labels: Invalid"],
            ),
            (
                "/metadata/annotations/a b",
                json!("c"),
                &["metadata.annotations: Invalid"],
            ),
            (
                "/metadata/annotations/a",
                json!(large),
                &["metadata.annotations: TooLong"],
            ),
            (
                &of_owner("apiVersion"),
                json!(""),
                &["metadata.ownerReferences.apiVersion: Invalid"],
            ),
            (
                &of_owner("kind"),
                json!(""),
                &["metadata.ownerReferences.kind: Invalid"],
            ),
            (
                &of_owner("uid"),
                Value::Null,
                &["metadata.ownerReferences.uid: Invalid"],
            ),
            (
                "/metadata/finalizers/0",
                json!("short"),
                &["metadata.finalizers[0]: Invalid"],
            ),
            (
                "/metadata/finalizers/0",
                json!("foregroundDeletion"),
                &["metadata.finalizers: Invalid"],
            ),
        ],
    );
    let slashes = wrong(&with(&node(), "/metadata/labels/a~1b~1c", json!("d")), None);
    assert_eq!(slashes, ["metadata.labels: Invalid"]);
    let second =
        json!({ "apiVersion": "v1", "kind": "Node", "name": "m", "uid": "v", "controller": true });
    let two = wrong(&with(&node(), "/metadata/ownerReferences/-", second), None);
    assert_eq!(two, ["metadata.ownerReferences: Invalid"]);
    let event = json!({ "apiVersion": "v1", "kind": "Event", "name": "e", "uid": "v" });
    let banned = wrong(&with(&node(), "/metadata/ownerReferences/0", event), None);
    assert_eq!(banned, ["metadata.ownerReferences: Invalid"]);
}

#[test]
fn deleted_object_accepts_no_new_finalizers() {
    let old = with(
        &node(),
        "/metadata/deletionTimestamp",
        json!("2026-01-01T00:00:00Z"),
    );
    assert_each_change(
        &old,
        &[
            ("/metadata/finalizers", json!([]), &[]),
            (
                "/metadata/finalizers/-",
                json!("example.com/g"),
                &["metadata.finalizers: Forbidden"],
            ),
        ],
    );
}
