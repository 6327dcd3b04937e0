//! Recorded owners of a real API server, laws of patches, and scenarios of server-side apply.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::apply::Cause;
use super::*;

const NOW: &str = "2026-11-20T08:15:56Z";
const LATER: &str = "2026-11-20T08:15:57Z";

fn writer(manager: &str) -> Writer<'_> {
    Writer {
        manager,
        api_version: "resource.k8s.io/v1",
        subresource: "",
        now: NOW,
    }
}

fn status(manager: &str) -> Writer<'_> {
    Writer {
        subresource: "status",
        now: LATER,
        ..writer(manager)
    }
}

/// An object as a real API server (1.36.2) returned it.
fn recorded(name: &str) -> Value {
    let all: Value =
        serde_json::from_str(include_str!("fixtures/kubernetes-1.36.json")).expect("it is JSON");
    all.get(name)
        .unwrap_or_else(|| panic!("no object {name}"))
        .clone()
}

/// Owners by manager, operation and subresource, with their paths.
fn owners(object: &Value) -> Vec<(String, Value)> {
    let entries = object["metadata"]["managedFields"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let owner = |entry: &Value| {
        let subresource = entry["subresource"]
            .as_str()
            .map_or(String::new(), |name| format!("/{name}"));
        let text = |field: &str| entry[field].as_str().expect("it is text").to_owned();
        (
            format!("{} {}{subresource}", text("manager"), text("operation")),
            entry["fieldsV1"].clone(),
        )
    };
    entries.iter().map(owner).collect()
}

#[test]
fn create_ownership_matches_real_server() {
    for name in [
        "04-deviceclass-create-gpu",
        "06-slice-create",
        "16-slice-create-consumable-capacity",
        "17-claim-create-one-gpu",
        "19-claim-create-first-available",
        "24-claimtemplate-create",
        "45-event-create",
    ] {
        let stored = recorded(name);
        let kind = stored["kind"].as_str().expect("it has a kind");
        let entry = &stored["metadata"]["managedFields"][0];
        let writer = Writer {
            manager: entry["manager"].as_str().expect("it is text"),
            api_version: entry["apiVersion"].as_str().expect("it is text"),
            subresource: "",
            now: entry["time"].as_str().expect("it is text"),
        };
        let mut sent = stored.clone();
        let metadata = sent["metadata"].as_object_mut().expect("it is an object");
        metadata.remove("managedFields");
        if metadata.contains_key("generateName") {
            metadata.remove("name");
        }
        let owned = managed_after_update(kind, None, sent, &writer);
        assert_eq!(
            owned["metadata"]["managedFields"], stored["metadata"]["managedFields"],
            "{name}"
        );
    }
}

#[test]
fn status_allocation_ownership_matches_real_server() {
    let created = recorded("17-claim-create-one-gpu");
    let stored = recorded("34-claim-allocated-one-gpu");
    let scheduler = status("kube-scheduler");
    let mut finalized = created.clone();
    finalized["metadata"]["finalizers"] = stored["metadata"]["finalizers"].clone();
    let finalized = managed_after_update(
        "ResourceClaim",
        Some(&created),
        finalized,
        &Writer {
            subresource: "",
            ..scheduler
        },
    );
    let mut allocated = finalized.clone();
    allocated["status"] = stored["status"].clone();
    let allocated = managed_after_update("ResourceClaim", Some(&finalized), allocated, &scheduler);
    let (mut found, mut expected) = (owners(&allocated), owners(&stored));
    found.sort_by(|a, b| a.0.cmp(&b.0));
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, expected);
}

#[test]
fn recorded_managed_fields_round_trip() {
    for name in [
        "03-node-get",
        "25-pod-scheduled-pod-one-gpu",
        "34-claim-allocated-one-gpu",
        "49-claim-after-pod-force-deleted",
    ] {
        let object = recorded(name);
        let entries = managed::read(&object).expect("a real server wrote it");
        assert!(!entries.is_empty(), "{name}");
        assert_eq!(managed::with_entries(object.clone(), entries), object);
    }
}

/// A claim with an allocation, made by `unknown` and allocated by `kube-scheduler`.
fn allocated() -> Value {
    recorded("34-claim-allocated-one-gpu")
}

fn device(ready: &str) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "one-gpu", "namespace": "default"},
        "status": {"devices": [{"driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0",
            "conditions": [{"type": "Ready", "status": ready}], "data": {"numaNode": 0}}]}})
}

fn applied(live: &Value, config: &Value, manager: &str) -> Value {
    apply("ResourceClaim", Some(live), config, &status(manager), false).expect("it applies")
}

#[test]
fn applied_device_status_preserves_other_fields() {
    let live = allocated();
    let result = applied(&live, &device("True"), "gpu.example.com");
    assert_eq!(result["status"]["allocation"], live["status"]["allocation"]);
    assert_eq!(
        result["status"]["devices"],
        device("True")["status"]["devices"]
    );
    let key = "k:{\"device\":\"gpu-0\",\"driver\":\"gpu.example.com\",\"pool\":\"node-1\"}";
    let fields = json!({"f:status": {"f:devices": {key: {
        ".": {}, "f:driver": {}, "f:pool": {}, "f:device": {}, "f:data": {},
        "f:conditions": {"k:{\"type\":\"Ready\"}": {".": {}, "f:type": {}, "f:status": {}}}}}}});
    assert_eq!(
        owners(&result)[0],
        ("gpu.example.com Apply/status".to_owned(), fields)
    );
    assert!(is_same_but_times(
        &applied(&result, &device("True"), "gpu.example.com"),
        &result
    ));
}

#[test]
fn fields_no_longer_applied_are_removed() {
    let live = applied(&allocated(), &device("True"), "gpu.example.com");
    let mut less = device("True");
    less["status"]["devices"][0]
        .as_object_mut()
        .expect("it is an object")
        .remove("data");
    let result = applied(&live, &less, "gpu.example.com");
    assert_eq!(result["status"]["devices"], less["status"]["devices"]);
    less["status"]["devices"] = json!([]);
    let result = applied(&result, &less, "gpu.example.com");
    assert_eq!(result["status"].get("devices"), None);
    assert_eq!(result["status"]["allocation"], live["status"]["allocation"]);
}

#[test]
fn shared_field_remains_until_last_owner() {
    let live = applied(&allocated(), &device("True"), "one");
    let live = applied(&live, &device("True"), "two");
    let nothing =
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "status": {}});
    let live = applied(&live, &nothing, "one");
    assert_eq!(
        live["status"]["devices"],
        device("True")["status"]["devices"]
    );
    let live = applied(&live, &nothing, "two");
    assert_eq!(live["status"].get("devices"), None);
}

#[test]
fn foreign_fields_conflict_unless_forced() {
    let live = applied(&allocated(), &device("True"), "one");
    let refused = apply(
        "ResourceClaim",
        Some(&live),
        &device("False"),
        &status("two"),
        false,
    );
    let field = ".status.devices[device=\"gpu-0\",driver=\"gpu.example.com\",pool=\"node-1\"].conditions[type=\"Ready\"].status";
    let message = "conflict with \"one\" with subresource \"status\"";
    let conflict = Conflict {
        message: format!("Apply failed with 1 conflict: {message}: {field}"),
        causes: vec![Cause {
            message: message.into(),
            field: field.into(),
        }],
    };
    assert_eq!(refused, Err(ApplyError::Conflict(conflict)));
    let forced = apply(
        "ResourceClaim",
        Some(&live),
        &device("False"),
        &status("two"),
        true,
    )
    .expect("it is forced");
    assert_eq!(
        forced["status"]["devices"],
        device("False")["status"]["devices"]
    );
    let refused = apply(
        "ResourceClaim",
        Some(&forced),
        &device("True"),
        &status("one"),
        false,
    );
    assert!(
        matches!(refused, Err(ApplyError::Conflict(conflict)) if conflict.message.contains("\"two\""))
    );
}

#[test]
fn several_conflicts_are_listed_by_manager() {
    let class = |selectors: Value, name: &str| {
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "gpu", "labels": {"a": name}},
            "spec": {"selectors": selectors, "extendedResourceName": name}})
    };
    let live = managed_after_update(
        "DeviceClass",
        None,
        class(json!([1]), "x"),
        &writer("kubectl-create"),
    );
    let refused = apply(
        "DeviceClass",
        Some(&live),
        &class(json!([2]), "y"),
        &writer("kubectl"),
        false,
    );
    let message = "Apply failed with 3 conflicts: conflicts with \"kubectl-create\" using resource.k8s.io/v1:\n- .metadata.labels.a\n\
        - .spec.extendedResourceName\n- .spec.selectors";
    assert!(
        matches!(refused, Err(ApplyError::Conflict(conflict)) if conflict.message == message && conflict.causes.len() == 3)
    );
}

#[test]
fn kubectl_apply_migrates_client_side_fields() {
    let config = |value: &str| {
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "gpu", "annotations": {}},
            "spec": {"extendedResourceName": value}})
    };
    let annotation = "kubectl.kubernetes.io/last-applied-configuration";
    let mut live = config("x");
    live["metadata"]["annotations"][annotation] = config("x").to_string().into();
    let live = managed_after_update(
        "DeviceClass",
        None,
        live,
        &writer("kubectl-client-side-apply"),
    );
    let taken = apply(
        "DeviceClass",
        Some(&live),
        &config("y"),
        &writer("kubectl"),
        false,
    )
    .expect("it is its own");
    assert_eq!(taken["spec"]["extendedResourceName"], "y");
    assert_eq!(
        taken["metadata"]["annotations"][annotation],
        format!("{}\n", config("y"))
    );
    assert!(
        apply(
            "DeviceClass",
            Some(&live),
            &config("y"),
            &writer("other"),
            false
        )
        .is_err()
    );
}

#[test]
fn first_apply_adds_managed_fields() {
    let live = json!({"metadata": {"name": "gpu"}, "spec": {"extendedResourceName": "x"}});
    let config = json!({"metadata": {"name": "gpu", "labels": {"a": "b"}}});
    let result =
        apply("DeviceClass", Some(&live), &config, &writer("me"), false).expect("it applies");
    let expected = [
        (
            "me Apply".to_owned(),
            json!({"f:metadata": {"f:labels": {"f:a": {}}}}),
        ),
        (
            "before-first-apply Update".to_owned(),
            json!({"f:spec": {"f:extendedResourceName": {}}}),
        ),
    ];
    assert_eq!(owners(&result), expected);
    let untracked = managed_after_update("DeviceClass", Some(&live), config, &writer("me"));
    assert_eq!(untracked["metadata"].get("managedFields"), None);
}

#[test]
fn malformed_configurations_are_refused() {
    let claim = |devices: Value| json!({"metadata": {"name": "c", "namespace": "n"}, "status": {"devices": devices}});
    let item = json!({"driver": "d", "pool": "p", "device": "x"});
    let typed = "failed to create typed patch object (n/c; resource.k8s.io/v1, Kind=ResourceClaim): .status.devices: ";
    for (config, message) in [
        (
            claim(json!([item, item])),
            format!("{typed}duplicate entries for key [device=\"x\",driver=\"d\",pool=\"p\"]"),
        ),
        (
            claim(json!([1])),
            format!("{typed}element 0: associative list with keys may not have non-map elements"),
        ),
        (claim(json!("x")), format!("{typed}expected list, got string")),
        (
            claim(json!([{"data": 1}])),
            format!(
                "{typed}element 0: associative list with keys has an element that omits all key fields \
                 [\"driver\" \"device\" \"pool\" \"shareID\"] (and doesn't have default values for any key fields)"
            ),
        ),
        (json!({"metadata": {"managedFields": []}}), "metadata.managedFields must be nil".into()),
        (
            json!({"apiVersion": "v1"}),
            "Incorrect version specified in apply patch. Specified patch version: v1, expected: resource.k8s.io/v1".into(),
        ),
        (json!([]), "error decoding YAML: expected an object of at most 100 levels".into()),
    ] {
        let refused = apply("ResourceClaim", None, &config, &status("m"), true);
        assert_eq!(refused, Err(ApplyError::Invalid(message)), "{config}");
    }
    let live = json!({"metadata": {"managedFields": [{"manager": "m", "operation": "Delete"}]}});
    let refused = apply("ResourceClaim", Some(&live), &json!({}), &status("m"), true);
    let message = "failed to decode managed fields: managed fields entry 0: operation must be `Apply` or `Update`";
    assert_eq!(refused, Err(ApplyError::Invalid(message.into())));
}

#[test]
fn port_protocol_defaults_to_tcp() {
    let pod = |port: Value| json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "ports": [port]}]}});
    let live = pod(json!({"containerPort": 80, "protocol": "TCP"}));
    let writer = Writer {
        api_version: "v1",
        ..writer("me")
    };
    let config = pod(json!({"containerPort": 80, "name": "http"}));
    let result = apply("Pod", Some(&live), &config, &writer, false).expect("it applies");
    let ports = json!([{"containerPort": 80, "protocol": "TCP", "name": "http"}]);
    assert_eq!(result["spec"]["containers"][0]["ports"], ports);
    let port = json!({".": {}, "f:containerPort": {}, "f:name": {}});
    let ports = json!({"k:{\"containerPort\":80,\"protocol\":\"TCP\"}": port});
    let fields = json!({"f:spec": {"f:containers": {"k:{\"name\":\"c\"}": {".": {}, "f:name": {}, "f:ports": ports}}}});
    assert_eq!(owners(&result)[0], ("me Apply".to_owned(), fields));
}

#[test]
fn deep_or_nonobject_patches_are_refused() {
    let deep = (0..DEPTH_MAX).fold(json!({}), |inner, _| json!({"a": inner}));
    for (patch, message) in [
        (
            json!([]),
            "error decoding patch: json: cannot unmarshal array into an object",
        ),
        (deep, "error decoding patch: exceeded max depth of 100"),
    ] {
        for refused in [
            merge_patch(&json!({}), &patch),
            strategic_merge_patch("Pod", &json!({}), &patch),
        ] {
            assert_eq!(refused, Err(PatchError::BadRequest(message.into())));
        }
    }
}

#[test]
fn only_empty_managed_fields_end_tracking() {
    let live = recorded("17-claim-create-one-gpu");
    for (sent, is_tracked) in [
        (json!([]), false),
        (json!([{}]), false),
        (Value::Null, true),
        (json!([{"x": 1}]), true),
    ] {
        let mut new = live.clone();
        new["metadata"]["managedFields"] = sent.clone();
        let result = managed_after_update("ResourceClaim", Some(&live), new, &writer("me"));
        assert_eq!(
            result["metadata"]["managedFields"].is_array(),
            is_tracked,
            "{sent}"
        );
    }
}

#[test]
fn the_oldest_updaters_are_merged() {
    let mut live = json!({"metadata": {"name": "gpu"}});
    for n in 0..15 {
        let mut new = live.clone();
        new["metadata"]["labels"][format!("l{n:02}")] = "x".into();
        let (manager, now) = (format!("m{n:02}"), format!("2026-01-01T00:00:{n:02}Z"));
        let writer = Writer {
            manager: &manager,
            now: &now,
            ..writer("")
        };
        let old = Some(&live).filter(|_| n > 0);
        live = managed_after_update("DeviceClass", old, new, &writer);
    }
    let owners = owners(&live);
    assert_eq!(owners.len(), 10);
    let labels: Vec<_> = ["."]
        .into_iter()
        .map(str::to_owned)
        .chain((0..6).map(|n| format!("f:l{n:02}")))
        .collect();
    let fields: Map<String, Value> = labels.into_iter().map(|label| (label, json!({}))).collect();
    assert_eq!(
        owners[0],
        (
            "ancient-changes Update".to_owned(),
            json!({"f:metadata": {"f:labels": fields}})
        )
    );
}

#[test]
fn an_unchanged_object_keeps_its_times() {
    let live = recorded("17-claim-create-one-gpu");
    let result = managed_after_update("ResourceClaim", Some(&live), live.clone(), &status("me"));
    assert_eq!(result, live);
}

/// Any JSON, with the names and directives that the functions look for.
fn anything() -> impl Strategy<Value = Value> {
    let names = [
        "metadata",
        "spec",
        "status",
        "finalizers",
        "ownerReferences",
        "uid",
        "name",
        "containers",
        "conditions",
        "type",
        "devices",
        "driver",
        "labels",
        "managedFields",
        "$patch",
        "$retainKeys",
        "$setElementOrder/containers",
        "$deleteFromPrimitiveList/finalizers",
        "op",
        "path",
        "value",
        "fieldsV1",
        "operation",
        "f:spec",
        "k:{",
        "v:1",
        ".",
    ];
    let texts = [
        "", "a", "delete", "replace", "merge", "add", "/spec/-", "/spec", "Apply", "Update",
        "FieldsV1",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0..3i64).prop_map(Value::from),
        prop::sample::select(texts.to_vec()).prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 5, move |inner| {
        let name = prop::sample::select(names.to_vec()).prop_map(str::to_owned);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name, inner), 0..5)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Claims as their users and drivers apply them: every part may be absent.
fn claim() -> impl Strategy<Value = Value> {
    let names =
        |most| prop::collection::btree_set(prop::sample::select(vec!["a", "b", "c"]), 0..=most);
    let value = || prop::sample::select(vec!["x", "y"]);
    let device = (
        value(),
        prop::option::of(value()),
        prop::collection::btree_map(value(), value(), 0..3),
    )
        .prop_map(|(device, data, conditions)| {
            let conditions: Vec<_> = conditions
                .into_iter()
                .map(|(name, status)| json!({"type": name, "status": status}))
                .collect();
            let mut item = json!({"driver": "d", "pool": "p", "device": device});
            if let Some(data) = data {
                item["data"] = json!({"of": data});
            }
            if !conditions.is_empty() {
                item["conditions"] = conditions.into();
            }
            item
        });
    (prop::collection::btree_map(value(), value(), 0..3), names(3), prop::collection::vec(device, 0..3), prop::option::of(value()))
        .prop_map(|(labels, finalizers, devices, allocation)| {
            let mut claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}});
            if !labels.is_empty() {
                claim["metadata"]["labels"] = json!(labels);
            }
            if !finalizers.is_empty() {
                claim["metadata"]["finalizers"] = json!(finalizers);
            }
            let mut kept: Vec<Value> = Vec::new();
            for device in devices {
                if kept.iter().all(|other| other["device"] != device["device"]) {
                    kept.push(device);
                }
            }
            if !kept.is_empty() {
                claim["status"]["devices"] = kept.into();
            }
            if let Some(allocation) = allocation {
                claim["status"]["allocation"] = json!({"allocationTimestamp": allocation});
            }
            claim
        })
}

const ALL: Writer<'static> = Writer {
    manager: "me",
    api_version: "resource.k8s.io/v1",
    subresource: "all",
    now: NOW,
};

/// The claim without what is not a matter of apply.
fn content(object: &Value) -> Value {
    let mut content = managed::without_entries(object);
    for list in ["/status/devices", "/metadata/finalizers"] {
        if let Some(list) = content.pointer_mut(list).and_then(Value::as_array_mut) {
            list.sort_by_key(Value::to_string);
        }
    }
    content
}

proptest! {
    #[test]
    fn no_json_makes_a_function_panic(
        document in anything(),
        patch in anything(),
        kind in prop::sample::select(vec!["Pod", "ResourceClaim", "X"]),
    ) {
        let _ = merge_patch(&document, &patch);
        let _ = json_patch(&document, &patch);
        let _ = strategic_merge_patch(kind, &document, &patch);
        let _ = apply(kind, Some(&document), &patch, &ALL, true);
        let _ = apply(kind, None, &patch, &ALL, false);
        let _ = managed_after_update(kind, Some(&document), patch.clone(), &ALL);
        let _ = managed_after_update(kind, None, patch, &ALL);
    }

    #[test]
    fn merge_patch_is_idempotent(
        document in anything(),
        patch in anything().prop_filter("a patch is an object", Value::is_object),
    ) {
        let once = merge_patch(&document, &patch).expect("it is an object");
        prop_assert_eq!(&merge_patch(&once, &patch).expect("it is an object"), &once);
        let unchanged = if document.is_object() { document.clone() } else { json!({}) };
        prop_assert_eq!(merge_patch(&document, &json!({})).expect("it is an object"), unchanged);
    }

    #[test]
    fn apply_is_idempotent(live in claim(), config in claim()) {
        let live = managed_after_update("ResourceClaim", None, live, &Writer { manager: "creator", ..ALL });
        let once = apply("ResourceClaim", Some(&live), &config, &ALL, true).expect("it is forced");
        let twice = apply("ResourceClaim", Some(&once), &config, &ALL, false).expect("it owns its fields");
        prop_assert_eq!(&once, &twice);
    }

    /// Checks that with one manager the object is the one that it applied last.
    #[test]
    fn sole_manager_gets_last_applied_object(first in claim(), second in claim()) {
        let live = apply("ResourceClaim", None, &first, &ALL, false).expect("it is created");
        prop_assert_eq!(content(&live), content(&first));
        let live = apply("ResourceClaim", Some(&live), &second, &ALL, false).expect("it owns all");
        prop_assert_eq!(content(&live), content(&second));
    }

    /// A manager that drops all leaves to another what both applied, and its own values are gone.
    #[test]
    fn what_another_manager_applied_stays(mine in claim(), theirs in claim()) {
        let other = Writer { manager: "other", ..ALL };
        let nothing = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}});
        let live = apply("ResourceClaim", None, &mine, &ALL, false).expect("it is created");
        let live = apply("ResourceClaim", Some(&live), &theirs, &other, true).expect("it is forced");
        let live = apply("ResourceClaim", Some(&live), &nothing, &ALL, false).expect("it sets nothing");
        prop_assert_eq!(content(&live), content(&theirs));
    }
}
