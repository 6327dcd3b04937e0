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
fn a_name_has_the_form_of_its_kind() {
    let named = |kind: &str, namespace: &str, name: &str| {
        let mut object = json!({ "kind": kind, "metadata": { "name": name }, "spec": { "containers": [{ "name": "c", "image": "i" }] } });
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        wrong(&object, None)
    };
    assert_eq!(named("Node", "", "a.b"), [""; 0]);
    assert_eq!(
        named("Node", "", "A"),
        [format!(
            "metadata.name: Invalid value: \"A\": {NOT_A_SUBDOMAIN}"
        )]
    );
    assert_eq!(
        named("Node", "", ""),
        ["metadata.name: Required value: name or generateName is required"]
    );
    let long = "a".repeat(254);
    assert_eq!(
        named("Node", "", &long),
        [format!(
            "metadata.name: Invalid value: \"{long}\": must be no more than 253 bytes"
        )]
    );
    assert_eq!(named("Namespace", "", "a"), [""; 0]);
    assert_eq!(
        named("Namespace", "", "a.b"),
        ["metadata.name: Invalid value: \"a.b\": must not contain dots"]
    );
    assert_eq!(
        named("Namespace", "", "a_b"),
        [format!(
            "metadata.name: Invalid value: \"a_b\": {NOT_A_LABEL}"
        )]
    );
    assert_eq!(named("Event", "default", "A:b"), [""; 0]);
    assert_eq!(
        named("Event", "default", "a/b"),
        ["metadata.name: Invalid value: \"a/b\": may not contain '/'"]
    );
    assert_eq!(
        named("Event", "default", ".."),
        ["metadata.name: Invalid value: \"..\": may not be '..'"]
    );
    assert_eq!(named("Pod", "default", "p"), [""; 0]);
    assert_eq!(
        named("Pod", "", "p"),
        ["metadata.namespace: Required value"]
    );
    assert_eq!(
        named("Pod", "N", "p"),
        [format!(
            "metadata.namespace: Invalid value: \"N\": {NOT_A_LABEL}"
        )]
    );
    assert_eq!(
        named("Node", "default", "n"),
        ["metadata.namespace: Forbidden: not allowed on this type"]
    );
}

#[test]
fn a_prefix_of_names_may_end_in_a_dash() {
    assert_each(
        &node(),
        &[
            ("/metadata/generateName", json!("node-"), &[]),
            (
                "/metadata/generateName",
                json!("Node-"),
                &[&format!(
                    "metadata.generateName: Invalid value: \"Node-\": {NOT_A_SUBDOMAIN}"
                )],
            ),
        ],
    );
}

#[test]
fn labels_annotations_owners_and_finalizers_have_their_forms() {
    let owner = "/metadata/ownerReferences/0";
    let of_owner = |field: &str| format!("{owner}/{field}");
    let large = "x".repeat(256 * 1024);
    assert_each(
        &node(),
        &[
            (
                "/metadata/labels/a b",
                json!("c"),
                &[&format!(
                    "metadata.labels: Invalid value: \"a b\": {NOT_A_LABEL_KEY}"
                )],
            ),
            (
                "/metadata/labels/~1a",
                json!("c"),
                &["metadata.labels: Invalid value: \"/a\": prefix part must be non-empty"],
            ),
            (
                "/metadata/labels/A~1a",
                json!("c"),
                &[&format!(
                    "metadata.labels: Invalid value: \"A/a\": prefix part {NOT_A_SUBDOMAIN}"
                )],
            ),
            (
                "/metadata/labels/a",
                json!("b c"),
                &[&format!(
                    "metadata.labels: Invalid value: \"b c\": {NOT_A_LABEL_VALUE}"
                )],
            ),
            (
                "/metadata/labels/a",
                json!("x".repeat(64)),
                &[&format!(
                    "metadata.labels: Invalid value: \"{}\": must be no more than 63 bytes",
                    "x".repeat(64)
                )],
            ),
            (
                "/metadata/annotations/a b",
                json!("c"),
                &[&format!(
                    "metadata.annotations: Invalid value: \"a b\": {NOT_A_LABEL_KEY}"
                )],
            ),
            (
                "/metadata/annotations/a",
                json!(large),
                &["metadata.annotations: Too long: may not be more than 262144 bytes"],
            ),
            (
                &of_owner("apiVersion"),
                json!(""),
                &[
                    "metadata.ownerReferences.apiVersion: Invalid value: \"\": version must not be empty",
                ],
            ),
            (
                &of_owner("kind"),
                json!(""),
                &["metadata.ownerReferences.kind: Invalid value: \"\": must not be empty"],
            ),
            (
                &of_owner("uid"),
                Value::Null,
                &["metadata.ownerReferences.uid: Invalid value: \"\": must not be empty"],
            ),
            (
                "/metadata/finalizers/0",
                json!("short"),
                &[
                    "metadata.finalizers[0]: Invalid value: \"short\": name is neither a standard finalizer name nor is it fully qualified",
                ],
            ),
            (
                "/metadata/finalizers/0",
                json!("foregroundDeletion"),
                &[
                    "metadata.finalizers: Invalid value: [\"foregroundDeletion\",\"orphan\"]: finalizer orphan and foregroundDeletion cannot be both set",
                ],
            ),
        ],
    );
    let slashes = wrong(&with(&node(), "/metadata/labels/a~1b~1c", json!("d")), None);
    assert!(
        slashes[0].starts_with(
            "metadata.labels: Invalid value: \"a/b/c\": a valid label key must consist of"
        ),
        "{slashes:?}"
    );
    let second =
        json!({ "apiVersion": "v1", "kind": "Node", "name": "m", "uid": "v", "controller": true });
    let two = wrong(&with(&node(), "/metadata/ownerReferences/-", second), None);
    assert!(two[0].ends_with("Only one reference can have Controller set to true. Found \"true\" in references for Node/n and Node/m"), "{two:?}");
    let event = json!({ "apiVersion": "v1", "kind": "Event", "name": "e", "uid": "v" });
    let banned = wrong(&with(&node(), "/metadata/ownerReferences/0", event), None);
    assert!(
        banned[0].ends_with("/v1, Kind=Event is disallowed from being an owner"),
        "{banned:?}"
    );
}

#[test]
fn an_object_that_is_being_deleted_gets_no_new_finalizers() {
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
                &[
                    "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers []string{\"example.com/g\"}",
                ],
            ),
        ],
    );
}
