//! Slices as they are read and written in each version of the API.

use std::collections::BTreeSet;
use std::sync::Arc;

use nodedock_stand_ins::api_server::ApiServer;
use serde_json::{Value, json};

use super::super::api::SliceApi;
use super::super::convert::{PoolAdditions, PoolTaints};
use super::super::diff::CounterPlacement;
use super::super::entry::Entry;
use super::super::health::UnhealthyTaint;
use super::super::slice::{self, SlicePool, SliceSpec};
use super::*;
use crate::client::ErrorKind;
use crate::client::tests::over;
use nodedock_model::{
    AllocatableMapping, AttributeValue, BindingConditions, Capacity, CapacityChoice,
    CapacityPolicy, CounterSet, DeviceScheduling, NodeAllocatable, PoolScheduling, QualifiedName,
    SkippedOperations,
};

fn name(text: &str) -> QualifiedName {
    QualifiedName::new(text).unwrap()
}

/// A pool with a device that has everything.
fn full() -> Pool {
    let range = CapacityChoice::Range {
        min: "10Gi".to_owned(),
        max: None,
        step: Some("10Gi".to_owned()),
    };
    let policy = CapacityPolicy {
        default_amount: Some("10Gi".to_owned()),
        choice: range,
    };
    let counters = [("memory".to_owned(), "40Gi".to_owned())];
    let set = CounterSet {
        name: "gpu-0".to_owned(),
        counters: counters.into(),
    };
    let device = Device {
        attributes: [
            (name("index"), AttributeValue::Int(0)),
            (name("ecc"), AttributeValue::Bool(false)),
            (name("model"), AttributeValue::Text(String::new())),
            (
                name("driverVersion"),
                AttributeValue::Version(semver::Version::new(1, 2, 3)),
            ),
            (
                name("resource.kubernetes.io/links"),
                AttributeValue::Texts(vec!["a".to_owned()]),
            ),
        ]
        .into(),
        capacities: [(
            name("memory"),
            Capacity {
                value: "80Gi".to_owned(),
                policy: Some(policy),
            },
        )]
        .into(),
        taints: vec![taint(""), taint("b")],
        consumes: vec![set.clone()],
        allow_multiple_allocations: true,
        ..Device::default()
    };
    Pool {
        devices: [(device_name(0), device)].into(),
        shared_counters: vec![set],
        ..Pool::default()
    }
}

fn spec(content: Content) -> SliceSpec {
    let key = key(GPU, "node-1/p");
    let pool = SlicePool {
        name: key.pool,
        generation: 3,
        resource_slice_count: 2,
    };
    SliceSpec {
        driver: key.driver,
        node_name: NODE.to_owned(),
        pool,
        content,
        sent: None,
    }
}

/// The devices of [`full`], whose counters are in another slice.
fn full_devices() -> Content {
    Content {
        devices: content(&full()).devices,
        ..Content::default()
    }
}

fn read(object: &Value) -> Result<Slice, serde_json::Error> {
    serde_json::from_value(object.clone())
}

#[test]
fn device_matches_the_api() {
    let unhealthy = BTreeMap::from([(
        device_name(0),
        UnhealthyTaint {
            value: "too-hot".to_owned(),
            evicts: false,
        },
    )]);
    let taints = PoolTaints {
        unhealthy,
        ..PoolTaints::default()
    };
    let content = super::super::convert::content(&full(), &taints, &PoolAdditions::default());
    let expected = json!({
        "name": "d0000",
        "attributes": {
            "driverVersion": { "version": "1.2.3" },
            "ecc": { "bool": false },
            "index": { "int": 0 },
            "model": { "string": "" },
            "resource.kubernetes.io/links": { "strings": ["a"] },
        },
        "capacity": {
            "memory": {
                "value": "80Gi",
                "requestPolicy": { "default": "10Gi", "validRange": { "min": "10Gi", "step": "10Gi" } },
            },
        },
        "consumesCounters": [{ "counterSet": "gpu-0", "counters": { "memory": { "value": "40Gi" } } }],
        "allowMultipleAllocations": true,
        "taints": [
            { "key": "example.com/worn", "effect": "NoSchedule" },
            { "key": "example.com/worn", "value": "b", "effect": "NoSchedule" },
            { "key": "nodedock.dev/unhealthy", "value": "too-hot", "effect": "NoSchedule" },
        ],
    });
    let spec = serde_json::to_value(spec(content)).unwrap();
    assert_eq!(spec["devices"], json!([expected]));
    let set = json!({ "name": "gpu-0", "counters": { "memory": { "value": "40Gi" } } });
    assert_eq!(spec["sharedCounters"], json!([set]));
    assert_eq!(
        spec["pool"],
        json!({ "name": "node-1/p", "generation": 3, "resourceSliceCount": 2 })
    );
    assert_eq!(
        (&spec["nodeName"], &spec["driver"]),
        (&json!(NODE), &json!(GPU))
    );
}

#[tokio::test]
async fn slices_use_the_served_version() {
    for version in ["v1", "v1beta2", "v1beta1"] {
        let server = Arc::new(ApiServer::start().await);
        server.serve_versions(&[version]);
        server.report_minor_version("34+");
        let api = SliceApi(over(&server));
        assert_eq!(
            api.counter_placement().await,
            Some(CounterPlacement::WithDevices)
        );
        let spec = spec(full_devices());
        let metadata = slice::new_metadata("00000-a-".to_owned(), &node());
        let new = Slice {
            types: None,
            metadata,
            spec: spec.clone(),
            status: None,
        };
        let created = api.create(&new).await.unwrap();
        assert_eq!(
            (created.spec.key(), &created.spec.content),
            (spec.key(), &spec.content)
        );
        let sent = server
            .requests()
            .into_iter()
            .find(|seen| seen.verb == "create")
            .unwrap();
        let body = sent.body.unwrap();
        assert_eq!(
            sent.path,
            format!("/apis/resource.k8s.io/{version}/resourceslices")
        );
        assert_eq!(body["apiVersion"], format!("resource.k8s.io/{version}"));
        assert_eq!(body["metadata"]["ownerReferences"][0]["controller"], true);
        assert_eq!(
            body["spec"]["devices"][0]["basic"].is_object(),
            version == "v1beta1"
        );

        server.edit("resourceslices", "", slice::name(&created), |object| {
            object["metadata"]["annotations"] = json!({ "a": "b" });
        });
        let outdated = api.update(&created).await.unwrap_err();
        assert_eq!(outdated.kind, ErrorKind::Conflict);
        assert_eq!(
            api.delete(&created).await.unwrap_err().kind,
            ErrorKind::Conflict
        );
        let deleted = server
            .requests()
            .into_iter()
            .find(|seen| seen.verb == "delete")
            .unwrap();
        let conditions = json!({
            "uid": created.metadata.uid, "resourceVersion": created.metadata.resource_version,
        });
        assert_eq!(deleted.body.unwrap()["preconditions"], conditions);
        server.delete("resourceslices", "", slice::name(&created));
        assert_eq!(
            api.delete(&created).await.unwrap_err().kind,
            ErrorKind::NotFound
        );
        server.report_minor_version("36");
        assert_eq!(
            api.counter_placement().await,
            Some(CounterPlacement::OwnSlice)
        );
    }
}

#[test]
fn recorded_slice_equals_ours() {
    let recorded = json!({
        "kind": "ResourceSlice",
        "apiVersion": "resource.k8s.io/v1",
        "metadata": {
            "name": "node-1-shared-4jttw", "generateName": "node-1-shared-",
            "uid": "5759c884-3b68-4c4f-a845-af0ad5bffd61", "resourceVersion": "108", "generation": 1,
            "managedFields": [{ "manager": "unknown", "operation": "Update", "fieldsV1": { "f:spec": {} } }]
        },
        "spec": {
            "driver": GPU, "nodeName": NODE,
            "pool": { "name": "shared", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{
                "name": "d0000",
                "attributes": { "kind": { "string": "shared" } },
                "capacity": { "memory": {
                    "value": "80Gi",
                    "requestPolicy": { "default": "10Gi", "validRange": { "min": "10Gi", "step": "10Gi" } }
                } },
                "allowMultipleAllocations": true,
                "taints": [{ "key": "example.com/worn", "effect": "NoSchedule", "timeAdded": "2026-11-20T08:15:56Z" }]
            }]
        }
    });
    let mut pool = full();
    let device = pool.devices.get_mut(&device_name(0)).unwrap();
    device.attributes = [(name("kind"), AttributeValue::Text("shared".to_owned()))].into();
    (device.taints, device.consumes) = (vec![taint("")], Vec::new());
    device.capacities.get_mut(&name("memory")).unwrap().value = "81920Mi".to_owned();
    let slice = read(&recorded).unwrap();
    assert_eq!(slice.spec.content.devices, content(&pool).devices);
}

#[test]
fn foreign_metadata_is_kept() {
    let other = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y" });
    let old = json!({ "apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "old", "controller": true });
    let metadata = json!({
        "name": "00000-a", "uid": "u", "resourceVersion": "7", "annotations": { "a": "b" },
        "labels": { "c": "d" }, "ownerReferences": [old, other],
    });
    let spec = serde_json::to_value(spec(full_devices())).unwrap();
    let slice = read(&json!({ "metadata": metadata, "spec": spec })).unwrap();
    let written = serde_json::to_value(slice::updated_metadata(&slice, &node())).unwrap();
    assert_eq!(written["annotations"], json!({ "a": "b" }));
    assert_eq!(
        written["labels"],
        json!({ "c": "d", "app.kubernetes.io/managed-by": "nodedock" })
    );
    let owners: Vec<_> = written["ownerReferences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| &o["uid"])
        .collect();
    assert_eq!(owners, ["y", "uid-of-node-1"]);
    assert_eq!(
        (&written["uid"], &written["resourceVersion"]),
        (&json!("u"), &json!("7"))
    );
    assert!(!slice::is_owned_by(&slice, &node()));
}

#[test]
fn malformed_slices_are_errors() {
    let whole = json!({ "metadata": { "name": "a" }, "spec": spec(full_devices()) });
    assert!(read(&whole).is_ok());
    for odd in [
        Value::Null,
        json!(1),
        json!([]),
        json!("x"),
        json!({ "metadata": 1, "spec": [] }),
    ] {
        assert!(read(&odd).is_err());
    }
    for (path, value) in [
        ("/spec/driver", json!("NOT A NAME")),
        ("/spec/pool/name", json!(7)),
        ("/spec/pool", json!("x")),
        ("/spec/devices", json!(1)),
        ("/metadata", json!([])),
    ] {
        let mut odd = whole.clone();
        *odd.pointer_mut(path).unwrap() = value;
        assert!(read(&odd).is_err(), "{path}");
    }
    for devices in [
        json!(null),
        json!([1, null, {}, { "name": 1 }, { "basic": {} }, { "name": [], "basic": 1 }]),
    ] {
        let mut odd = whole.clone();
        odd["spec"]["devices"] = devices;
        assert!(read(&odd).unwrap().spec.content.devices.is_empty());
    }
    for device in [
        json!({ "name": "a", "capacity": 1, "taints": { "x": 1 }, "consumesCounters": [1], "attributes": [] }),
        json!({ "name": "a", "capacity": { "m": 1, "n": { "value": 1.5, "requestPolicy": [] } }, "taints": ["x"] }),
    ] {
        assert!(Entry::from(device).taints().count() < 2);
    }
}

#[test]
fn dropped_fields_are_named() {
    let desired = content(&full());
    let dropped = |change: fn(&mut Value)| {
        let mut device = desired.devices["d0000"].json().clone();
        change(&mut device);
        let devices = BTreeMap::from([("d0000".to_owned(), Entry::from(device))]);
        let stored = Content {
            devices,
            shared_counters: desired.shared_counters.clone(),
            ..Content::default()
        };
        let slice = SliceSpec {
            sent: Some(desired.clone()),
            ..spec(stored)
        };
        slice.dropped(&desired).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(dropped(|_| ()), Vec::<String>::new());
    assert_eq!(
        dropped(|device| device["taints"] = json!([])),
        ["devices[].taints"]
    );
    assert_eq!(
        dropped(|device| device["allowMultipleAllocations"] = false.into()),
        ["devices[].allowMultipleAllocations"]
    );
    assert_eq!(
        dropped(|device| device["capacity"]["memory"] = json!({ "value": "80Gi" })),
        ["devices[].capacity.memory.requestPolicy"]
    );
    assert_eq!(
        dropped(|device| device["attributes"]["resource.kubernetes.io/links"] = json!({})),
        ["devices[].attributes.resource.kubernetes.io/links.strings"]
    );
    let stored = Content {
        devices: desired.devices.clone(),
        ..Content::default()
    };
    let slice = SliceSpec {
        sent: Some(desired.clone()),
        ..spec(stored)
    };
    assert_eq!(
        slice.dropped(&desired),
        BTreeSet::from(["sharedCounters[]".to_owned()])
    );
}

#[test]
fn newer_fields_match_the_api() {
    let mut pool = full();
    let device = pool.devices.values_mut().next().unwrap();
    device.scheduling = Some(Box::new(DeviceScheduling {
        binds_to_node: true,
        binding_conditions: vec!["Attached".to_owned()],
        binding_failure_conditions: vec!["Failed".to_owned()],
        node_allocatable: [
            (
                "cpu".to_owned(),
                NodeAllocatable {
                    mapping: Some(AllocatableMapping::PerDevice("2".to_owned())),
                    ..NodeAllocatable::default()
                },
            ),
            (
                "memory".to_owned(),
                NodeAllocatable {
                    mapping: Some(AllocatableMapping::PerCapacity {
                        capacity: name("memory"),
                        multiplier: "1".to_owned(),
                    }),
                    per_pod: Some("1Gi".to_owned()),
                    per_container: Some("100Mi".to_owned()),
                },
            ),
        ]
        .into(),
        compatibility: [("gpu-0".to_owned(), vec!["mig".to_owned()])].into(),
    }));
    pool.scheduling = PoolScheduling {
        partition_type_attribute: Some("gpu.example.com/model".to_owned()),
        skip_node_operations: Some(SkippedOperations::PrepareAndUnprepare),
    };
    let desired = content(&pool);
    let device = desired.devices["d0000"].json();
    assert_eq!(device["bindsToNode"], true);
    assert_eq!(device["bindingConditions"], json!(["Attached"]));
    assert_eq!(device["bindingFailureConditions"], json!(["Failed"]));
    assert_eq!(
        device["consumesCounters"][0]["compatibilityGroups"],
        json!(["mig"])
    );
    assert_eq!(
        device["nodeAllocatableResources"],
        json!({
            "cpu": { "mapping": { "deviceMultiplier": "2" } },
            "memory": {
                "mapping": { "capacityKey": "memory", "capacityMultiplier": "1" },
                "overhead": { "perPod": "1Gi", "perContainer": "100Mi" },
            },
        })
    );
    let slice = serde_json::to_value(spec(desired.clone())).unwrap();
    assert_eq!(slice["partitionTypeAttribute"], "gpu.example.com/model");
    assert_eq!(
        slice["skipNodeOperations"],
        json!(["NodePrepareResources", "NodeUnprepareResources"])
    );

    // A server that does not know them: they are named, and the slice is not written again.
    let stored = Content {
        pool_fields: Default::default(),
        ..content(&full())
    };
    let found = SliceSpec {
        sent: Some(desired.clone()),
        ..spec(stored)
    };
    let dropped: Vec<_> = found.dropped(&desired).into_iter().collect();
    assert!(
        dropped.contains(&"partitionTypeAttribute".to_owned()),
        "{dropped:?}"
    );
    assert!(
        dropped.contains(&"devices[].nodeAllocatableResources".to_owned()),
        "{dropped:?}"
    );
    assert!(found.holds(&desired));
    // Another notation of a quantity is the same device.
    let mut other = device.clone();
    other["nodeAllocatableResources"]["memory"]["overhead"]["perPod"] = "1024Mi".into();
    assert_eq!(Entry::from(other), desired.devices["d0000"]);
}

#[test]
fn operator_overhead_is_the_default() {
    let own = NodeAllocatable {
        per_pod: Some("3".to_owned()),
        ..NodeAllocatable::default()
    };
    let scheduling = DeviceScheduling {
        node_allocatable: [("cpu".to_owned(), own)].into(),
        ..DeviceScheduling::default()
    };
    let with = Device {
        scheduling: Some(Box::new(scheduling)),
        ..Device::default()
    };
    let devices = [(device_name(0), Device::default()), (device_name(1), with)].into();
    let pool = Pool {
        devices,
        ..Pool::default()
    };
    let overhead = BTreeMap::from([
        (
            "cpu".to_owned(),
            NodeAllocatable {
                per_pod: Some("2".to_owned()),
                ..NodeAllocatable::default()
            },
        ),
        (
            "memory".to_owned(),
            NodeAllocatable {
                per_container: Some("1Gi".to_owned()),
                ..NodeAllocatable::default()
            },
        ),
    ]);
    let additions = PoolAdditions {
        overhead,
        ..PoolAdditions::default()
    };
    let content = super::super::convert::content(&pool, &PoolTaints::default(), &additions);
    let spec = serde_json::to_value(spec(content)).unwrap();
    let resources = |index: usize| spec["devices"][index]["nodeAllocatableResources"].clone();
    let memory = json!({ "overhead": { "perContainer": "1Gi" } });
    assert_eq!(
        resources(0),
        json!({ "cpu": { "overhead": { "perPod": "2" } }, "memory": memory })
    );
    assert_eq!(
        resources(1),
        json!({ "cpu": { "overhead": { "perPod": "3" } }, "memory": memory })
    );
}

#[test]
fn operator_binding_conditions_are_the_default() {
    let list = |types: &[&str]| {
        types
            .iter()
            .map(|kind| (*kind).to_owned())
            .collect::<Vec<_>>()
    };
    let scheduling = DeviceScheduling {
        binding_conditions: list(&["example.com/attached"]),
        binding_failure_conditions: list(&["example.com/failed"]),
        ..DeviceScheduling::default()
    };
    let with = Device {
        scheduling: Some(Box::new(scheduling)),
        ..Device::default()
    };
    let devices = [(device_name(0), Device::default()), (device_name(1), with)].into();
    let pool = Pool {
        devices,
        ..Pool::default()
    };
    let binding = BindingConditions {
        conditions: list(&[BindingConditions::PREPARED]),
        failures: list(&[BindingConditions::PREPARE_FAILED]),
    };
    let additions = PoolAdditions {
        binding,
        ..PoolAdditions::default()
    };
    let content = super::super::convert::content(&pool, &PoolTaints::default(), &additions);
    let spec = serde_json::to_value(spec(content)).unwrap();
    let conditions = |index: usize| {
        let device = &spec["devices"][index];
        (
            device["bindingConditions"].clone(),
            device["bindingFailureConditions"].clone(),
        )
    };
    assert_eq!(
        conditions(0),
        (
            json!(["nodedock.dev/prepared"]),
            json!(["nodedock.dev/prepare-failed"])
        )
    );
    assert_eq!(
        conditions(1),
        (
            json!(["example.com/attached"]),
            json!(["example.com/failed"])
        )
    );
}

#[test]
fn prepare_failure_taint_joins_others() {
    let taint = |key: &str| Taint {
        key: key.to_owned(),
        value: String::new(),
        effect: TaintEffect::None,
    };
    let many = (0..16).map(|index| taint(&format!("t{index}"))).collect();
    let devices = [
        (
            device_name(0),
            Device {
                taints: vec![taint("t")],
                ..Device::default()
            },
        ),
        (
            device_name(1),
            Device {
                taints: many,
                ..Device::default()
            },
        ),
        (
            device_name(2),
            Device {
                taints: vec![taint("nodedock.dev/prepare-failed")],
                ..Device::default()
            },
        ),
        (device_name(3), Device::default()),
    ];
    let pool = Pool {
        devices: devices.into(),
        ..Pool::default()
    };
    let unhealthy = UnhealthyTaint {
        value: String::new(),
        evicts: false,
    };
    let taints = PoolTaints {
        unhealthy: [(device_name(0), unhealthy)].into(),
        failed: (0..3).map(device_name).collect(),
    };
    let content = super::super::convert::content(&pool, &taints, &PoolAdditions::default());
    let spec = serde_json::to_value(spec(content)).unwrap();
    let keys = |index: usize| {
        let taints = spec["devices"][index]["taints"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        taints
            .iter()
            .map(|taint| taint["key"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        keys(0),
        ["t", "nodedock.dev/unhealthy", "nodedock.dev/prepare-failed"]
    );
    assert_eq!(keys(1).len(), 16, "there is no room for one more");
    assert_eq!(keys(2), ["nodedock.dev/prepare-failed"]);
    assert!(keys(3).is_empty());
}
