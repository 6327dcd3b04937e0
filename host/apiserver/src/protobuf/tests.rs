use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::messages::{Kind, MESSAGES};
use super::to_json;

/// Random objects of every kind, as the official library encodes them: `protobuf-oracle objects 7 1` of the interop tests.
const RECORDED: &str = include_str!("fixtures/kubernetes-1.37.jsonl");

/// Removes the fields that are not set.
fn set(value: &Value) -> Value {
    let is_set = |value: &Value| !value.is_null() && *value != json!({});
    match value {
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(name, value)| (name.clone(), set(value)));
            fields.filter(|(_, value)| is_set(value)).collect()
        }
        Value::Array(items) => items.iter().map(set).collect(),
        other => other.clone(),
    }
}

fn field(number: u8, content: &[u8]) -> Vec<u8> {
    [
        &[number << 3 | 2, u8::try_from(content.len()).unwrap()],
        content,
    ]
    .concat()
}

fn encoded(version: &str, kind: &str, object: &[u8]) -> Vec<u8> {
    let type_meta = [field(1, version.as_bytes()), field(2, kind.as_bytes())].concat();
    [b"k8s\0".to_vec(), field(1, &type_meta), field(2, object)].concat()
}

#[test]
fn protobuf_decodes_like_official_library() {
    let mut kinds = 0;
    for line in RECORDED.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let body = STANDARD.decode(line["protobuf"].as_str().unwrap()).unwrap();
        let json = to_json(&body).unwrap_or_else(|| panic!("{} is not read", line["json"]));
        assert_eq!(set(&json), set(&line["json"]));
        for length in (0..body.len()).step_by(97) {
            let torn = to_json(&body[..length]);
            assert!(
                torn.is_none_or(|torn| set(&torn) != set(&json)),
                "{length} bytes of {json}"
            );
        }
        kinds += 1;
    }
    assert_eq!(kinds, 10);
}

#[test]
fn unset_fields_are_omitted() {
    // `generation` is sent even if it is not set; `controller` and `allNodes` were set to false.
    let attribute = [field(1, b"t"), field(2, &field(4, b""))].concat();
    let reference = [field(1, b"Pod"), vec![6 << 3, 0]].concat();
    let metadata = [
        field(1, b"s"),
        field(2, b""),
        field(8, b""),
        field(13, &reference),
        vec![7 << 3, 0],
    ];
    let device = [field(1, b"d"), field(2, &attribute), vec![7 << 3, 0]].concat();
    let slice = [field(1, &metadata.concat()), field(2, &field(6, &device))].concat();
    let json = to_json(&encoded("resource.k8s.io/v1", "ResourceSlice", &slice)).unwrap();
    let reference = json!({ "kind": "Pod", "controller": false });
    let device = json!({ "name": "d", "attributes": { "t": { "string": "" } }, "allNodes": false });
    let expected = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": { "name": "s", "ownerReferences": [reference] }, "spec": { "devices": [device] },
    });
    assert_eq!(json, expected);
}

#[test]
fn delete_options_are_decoded() {
    let options = [
        vec![1 << 3, 0],
        vec![3 << 3, 1],
        field(4, b"Orphan"),
        field(5, b"All"),
    ]
    .concat();
    let expected = json!({
        "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0, "orphanDependents": true,
        "propagationPolicy": "Orphan", "dryRun": ["All"],
    });
    assert_eq!(
        to_json(&encoded("v1", "DeleteOptions", &options)),
        Some(expected)
    );
}

#[test]
fn unknown_protobuf_objects_decode_to_none() {
    let pod = encoded("v1", "Pod", &field(1, &field(1, b"p")));
    assert_eq!(to_json(&pod).unwrap()["metadata"], json!({ "name": "p" }));
    for wrong in [
        pod[1..].to_vec(),
        pod[..pod.len() - 1].to_vec(),
        b"{}".to_vec(),
        encoded("v1", "PodSpec", b""),
        encoded("v1", "ResourceClaim", b""),
        encoded("resource.k8s.io/v1beta1", "ResourceClaim", b""),
        // A name that is a number, or no text.
        encoded("v1", "Pod", &field(1, &[1 << 3, 7])),
        encoded("v1", "Pod", &field(1, &field(1, b"\xff"))),
        // Lengths and numbers without an end, and groups.
        encoded(
            "v1",
            "Pod",
            &[
                2 | 1 << 3,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0x7f,
            ],
        ),
        encoded("v1", "Pod", &[0x80; 12]),
        encoded("v1", "Pod", &[3 | 1 << 3]),
        // A moment that there is not.
        encoded(
            "v1",
            "Pod",
            &field(
                1,
                &field(8, &[1 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
            ),
        ),
    ] {
        assert_eq!(to_json(&wrong), None, "{wrong:?}");
    }
    // Fields that are not known are dropped.
    let newer = [
        vec![15 << 3, 7],
        field(14, b"x"),
        vec![13 << 3 | 5, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(
        to_json(&encoded("v1", "Pod", &newer)),
        Some(json!({ "apiVersion": "v1", "kind": "Pod" }))
    );
}

#[test]
fn nested_messages_are_in_the_table() {
    for (name, fields) in MESSAGES.iter() {
        assert!(name.contains('.') && !name.contains(':'), "{name}");
        for field in fields.values() {
            if let Kind::Message(message) = field.kind {
                assert!(
                    MESSAGES.contains_key(message),
                    "{name}.{} has {message}",
                    field.name
                );
            }
        }
    }
}
