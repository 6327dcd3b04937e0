use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn parsed(path: &str) -> Value {
    serde_json::from_str(document_of(path).unwrap()).unwrap()
}

const PATHS: [&str; 3] = ["api/v1", "apis/events.k8s.io/v1", "apis/resource.k8s.io/v1"];

#[test]
fn index_lists_documents_with_hashes() {
    let index: Value = serde_json::from_str(index()).unwrap();
    let paths = index["paths"].as_object().unwrap();
    assert_eq!(
        paths.keys().collect::<BTreeSet<_>>(),
        PATHS.map(str::to_owned).iter().collect()
    );
    let url = paths["apis/resource.k8s.io/v1"]["serverRelativeURL"]
        .as_str()
        .unwrap();
    let hash = url
        .strip_prefix("/openapi/v3/apis/resource.k8s.io/v1?hash=")
        .unwrap();
    assert_eq!(hash.len(), 32);
    assert_eq!(document_of("apis/none/v1"), None);
}

fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn document_references_resolve() {
    for path in PATHS {
        let document = parsed(path);
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(!found.is_empty());
        for reference in found {
            let name = reference
                .strip_prefix("#/components/schemas/io.k8s.")
                .unwrap();
            assert!(
                document["components"]["schemas"][format!("io.k8s.{name}")].is_object(),
                "{path}: {reference}"
            );
        }
    }
}

#[test]
fn document_serves_kubectl() {
    let gvk = |kind: &str| json!({ "group": "resource.k8s.io", "kind": kind, "version": "v1" });
    let document = parsed("apis/resource.k8s.io/v1");
    let paths = &document["paths"];
    // To check fields on the server and for dry runs: the parameters of a patch.
    let one = &paths["/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"];
    let names = |operation: &Value| -> Vec<String> {
        operation["parameters"]
            .as_array()
            .unwrap()
            .iter()
            .map(|found| found["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(
        names(&one["patch"]),
        ["dryRun", "fieldManager", "fieldValidation", "force"]
    );
    assert_eq!(
        one["patch"]["x-kubernetes-group-version-kind"],
        gvk("ResourceClaim")
    );
    assert!(one["patch"]["requestBody"]["content"]["application/apply-patch+yaml"].is_object());
    // To explain a kind: any operation of its list, then the schema of the kind.
    for plural in [
        "deviceclasses",
        "resourceclaims",
        "resourceclaimtemplates",
        "resourceslices",
    ] {
        assert!(
            paths[format!("/apis/resource.k8s.io/v1/{plural}")]["get"].is_object(),
            "{plural}"
        );
    }
    let schema = &document["components"]["schemas"]["io.k8s.api.resource.v1.ResourceClaim"];
    assert_eq!(
        schema["x-kubernetes-group-version-kind"],
        json!([gvk("ResourceClaim")])
    );
    assert_eq!(schema["required"], json!(["spec"]));
    let reference =
        json!([{ "$ref": "#/components/schemas/io.k8s.api.resource.v1.ResourceClaimSpec" }]);
    assert_eq!(schema["properties"]["spec"]["allOf"], reference);
    assert!(
        paths["/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status"]["patch"]
            .is_object()
    );
    assert_eq!(
        paths["/apis/resource.k8s.io/v1/resourceslices/{name}/status"],
        Value::Null
    );
    assert!(parsed("api/v1")["paths"]["/api/v1/namespaces/{name}"]["patch"].is_object());
}

#[test]
fn unknown_fields_are_named_and_removed() {
    let claim = json!({
        "kind": "ResourceClaim", "apiVersion": "resource.k8s.io/v1", "metadata": { "name": "c", "labels": { "any": "label" }, "owner": 1 },
        "nosuch": 1,
        "spec": { "devices": {
            "requests": [{ "name": "gpu", "exactly": { "deviceClassName": "d", "derivedAttributes": [{}] } }, { "count": 1 }],
            "config": [{ "opaque": { "driver": "d", "parameters": { "any": { "field": 1 } } } }],
        } },
    });
    assert_eq!(
        unknown_fields("ResourceClaim", &claim),
        [
            "unknown field \"metadata.owner\"",
            "unknown field \"nosuch\"",
            "unknown field \"spec.devices.requests[1].count\""
        ]
    );
    let mut pruned = claim.clone();
    prune("ResourceClaim", &mut pruned);
    let mut expected = claim.clone();
    expected["metadata"]
        .as_object_mut()
        .unwrap()
        .remove("owner");
    expected.as_object_mut().unwrap().remove("nosuch");
    expected["spec"]["devices"]["requests"][1] = json!({});
    assert_eq!(pruned, expected);
    assert_eq!(unknown_fields("ResourceClaim", &pruned), [""; 0]);
    assert_eq!(
        strict_error(
            "ResourceClaim",
            "v1",
            &["unknown field \"nosuch\"".to_owned()]
        ),
        "ResourceClaim in version \"v1\" cannot be handled as a ResourceClaim: strict decoding error: unknown field \"nosuch\""
    );
}

#[test]
fn attribute_names_and_lists_are_known() {
    let attributes =
        json!({ "a.example.com/b": { "strings": ["x"] }, "c": { "int": 1, "other": 2 } });
    let slice = json!({ "spec": { "devices": [{ "attributes": attributes }], "skipNodeOperations": ["x"] } });
    assert_eq!(
        unknown_fields("ResourceSlice", &slice),
        ["unknown field \"spec.devices[0].attributes.c.other\""]
    );
    assert_eq!(unknown_fields("NoSuchKind", &slice), [""; 0]);
}

#[test]
fn real_server_objects_have_known_fields() {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../conformance/stand-ins/fixtures/kubernetes-1.36");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let exchange: Value =
            serde_json::from_slice(&std::fs::read(entry.unwrap().path()).unwrap()).unwrap();
        let object = &exchange["response"]["body"];
        let Some(kind) = object["kind"]
            .as_str()
            .filter(|kind| shapes::SHAPES.kinds.contains_key(kind))
        else {
            continue;
        };
        seen += 1;
        assert_eq!(unknown_fields(kind, object), [""; 0]);
        assert_eq!(decode_error(kind, "v1", object), None);
    }
    assert!(seen > 20, "{seen} objects");
}

#[test]
fn wrong_type_error_matches_go_decoder() {
    let refused = |kind: &str, object: Value| decode_error(kind, "v1", &object);
    let handled = |kind: &str, why: &str| {
        Some(format!(
            "{kind} in version \"v1\" cannot be handled as a {kind}: {why}"
        ))
    };
    let claim = |why: &str| handled("ResourceClaim", &format!("json: cannot unmarshal {why}"));
    assert_eq!(refused("ResourceClaim", json!({ "spec": null })), None);
    assert_eq!(
        refused("ResourceClaim", json!([])),
        claim("array into Go value of type v1.ResourceClaim")
    );
    assert_eq!(
        refused("ResourceClaim", json!({ "spec": { "devices": 5 } })),
        claim("number into Go struct field ResourceClaimSpec.spec.devices of type v1.DeviceClaim")
    );
    assert_eq!(
        refused(
            "ResourceClaim",
            json!({ "spec": { "devices": { "requests": [{ "name": true }] } } })
        ),
        claim("bool into Go struct field DeviceRequest.spec.devices.requests.name of type string")
    );
    assert_eq!(
        refused(
            "ResourceClaim",
            json!({ "spec": { "devices": { "requests": {} } } })
        ),
        claim(
            "object into Go struct field DeviceClaim.spec.devices.requests of type []v1.DeviceRequest"
        )
    );
    assert_eq!(
        refused(
            "ResourceClaim",
            json!({ "metadata": { "labels": { "a": 1 } } })
        ),
        claim("number into Go struct field ObjectMeta.metadata.labels.a of type string")
    );
    assert_eq!(
        refused(
            "ResourceSlice",
            json!({ "spec": { "pool": { "generation": 1.5 } } })
        ),
        handled(
            "ResourceSlice",
            "json: cannot unmarshal number 1.5 into Go struct field ResourcePool.spec.pool.generation of type int64"
        )
    );
    let capacity = |value: Value| json!({ "spec": { "devices": [{ "capacity": { "c": { "value": value } } }] } });
    assert_eq!(refused("ResourceSlice", capacity(json!("80Gi"))), None);
    assert_eq!(refused("ResourceSlice", capacity(json!(5))), None);
    assert_eq!(
        refused("ResourceSlice", capacity(json!("lots"))),
        handled(
            "ResourceSlice",
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        )
    );
    assert_eq!(
        refused(
            "Node",
            json!({ "metadata": { "creationTimestamp": "today" } })
        ),
        handled(
            "Node",
            "parsing time \"today\": it has not the form \"2006-01-02T15:04:05Z07:00\""
        )
    );
}

#[test]
fn only_null_elements_are_refused() {
    let handled = |kind: &str, why: &str| {
        Some(format!(
            "{kind} in version \"v1\" cannot be handled as a {kind}: json: cannot unmarshal null into Go struct field {why}"
        ))
    };
    let metadata = |metadata: Value| json!({ "metadata": metadata });
    for (kind, object, why) in [
        (
            "Node",
            metadata(json!({ "annotations": { "x": null } })),
            "ObjectMeta.metadata.annotations.x of type string",
        ),
        (
            "Node",
            metadata(json!({ "labels": { "a": null } })),
            "ObjectMeta.metadata.labels.a of type string",
        ),
        (
            "Node",
            metadata(json!({ "finalizers": [null] })),
            "ObjectMeta.metadata.finalizers of type string",
        ),
        (
            "Node",
            metadata(json!({ "ownerReferences": [null] })),
            "ObjectMeta.metadata.ownerReferences of type v1.OwnerReference",
        ),
        (
            "ResourceClaim",
            json!({ "spec": { "devices": { "requests": [null] } } }),
            "DeviceClaim.spec.devices.requests of type v1.DeviceRequest",
        ),
        (
            "ResourceSlice",
            json!({ "spec": { "devices": [{ "capacity": { "c": null } }] } }),
            "Device.spec.devices.capacity.c of type v1.DeviceCapacity",
        ),
    ] {
        assert_eq!(
            decode_error(kind, "v1", &object),
            handled(kind, why),
            "{object}"
        );
    }
    let parameters = json!({ "a": null, "b": [null] });
    let managed = json!([{ "manager": "m", "fieldsV1": { "f:a": null } }]);
    let claim = |spec: Value| {
        json!({
            "metadata": { "managedFields": managed },
            "spec": { "devices": { "config": [spec] } },
        })
    };
    let opaque = json!({ "driver": "d", "parameters": parameters });
    let mut stored = claim(json!({ "opaque": opaque, "requests": null }));
    stored["status"] = Value::Null;
    assert_eq!(decode_error("ResourceClaim", "v1", &stored), None);
    prune("ResourceClaim", &mut stored);
    assert_eq!(stored, claim(json!({ "opaque": opaque })));
}

proptest! {
    #[test]
    fn no_json_makes_a_decoder_panic(key in "\\PC{0,9}", number in any::<i64>()) {
        for kind in ["ResourceClaim", "ResourceSlice", "Pod", "Event", "DeviceTaintRule", ""] {
            for object in [json!({ "spec": { &key: number } }), json!({ &key: [{ &key: null }] }), json!(number), json!([key])] {
                let mut pruned = object.clone();
                prune(kind, &mut pruned);
                assert_eq!(unknown_fields(kind, &pruned), [""; 0]);
                decode_error(kind, "v1", &object);
            }
        }
    }
}
