//! Slices in each version, and what stands in them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::super::content::{Content, Entry, of_pool};
use super::super::planner::{Draft, Held};
use super::super::wire::{created, held, updated};
use super::*;
use crate::api::Version;
use nodedock_model::{AttributeValue, Capacity, CapacityChoice, CapacityPolicy, CounterSet, QualifiedName};

fn name(text: &str) -> QualifiedName {
    QualifiedName::new(text).unwrap()
}

/// A device that has everything.
fn full() -> Pool {
    let range = CapacityChoice::Range { min: "10Gi".to_owned(), max: None, step: Some("10Gi".to_owned()) };
    let policy = CapacityPolicy { default_amount: Some("10Gi".to_owned()), choice: range };
    let counters = [("memory".to_owned(), "40Gi".to_owned())];
    let set = CounterSet { name: "gpu-0".to_owned(), counters: counters.into() };
    let device = Device {
        attributes: [
            (name("index"), AttributeValue::Int(0)),
            (name("ecc"), AttributeValue::Bool(false)),
            (name("model"), AttributeValue::Text(String::new())),
            (name("driverVersion"), AttributeValue::Version(semver::Version::new(1, 2, 3))),
            (name("resource.kubernetes.io/links"), AttributeValue::Texts(vec!["a".to_owned()])),
        ]
        .into(),
        capacities: [(name("memory"), Capacity { value: "80Gi".to_owned(), policy: Some(policy) })].into(),
        taints: vec![taint(""), taint("b")],
        consumes: vec![set.clone()],
        allow_multiple_allocations: true,
        ..Device::default()
    };
    Pool { devices: [(device_name(0), device)].into(), shared_counters: vec![set], ..Pool::default() }
}

fn draft(pool: &Pool, sick: &[usize]) -> Draft {
    let sick: BTreeSet<_> = sick.iter().map(|index| device_name(*index)).collect();
    let content = of_pool(pool, &sick, TaintEffect::NoSchedule);
    Draft {
        key: key("gpu.example.com", "node-1/p"),
        owner: owner(),
        generation: 3,
        count: 2,
        devices: content.devices.values().map(|device| device.json().clone()).collect(),
        counters: content.counters.values().map(|set| set.json().clone()).collect(),
        content,
    }
}

fn answered(version: Version, mut object: Value) -> Held {
    let metadata = object["metadata"].as_object_mut().unwrap();
    metadata.entry("name").or_insert_with(|| "00000-a".into());
    metadata.entry("uid").or_insert_with(|| "u".into());
    metadata.entry("resourceVersion").or_insert_with(|| "7".into());
    held(version, object).unwrap()
}

#[test]
fn a_device_is_written_as_the_api_has_it() {
    let draft = draft(&full(), &[0]);
    let object = created(Version::V1, "00000-a-", &draft);
    assert_eq!(
        object["spec"]["devices"][0],
        json!({
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
                { "key": "nodedock.dev/unhealthy", "effect": "NoSchedule" },
            ],
        })
    );
    assert_eq!(object["apiVersion"], "resource.k8s.io/v1");
    assert_eq!(
        object["spec"]["pool"],
        json!({ "name": "node-1/p", "generation": 3, "resourceSliceCount": 2 })
    );
    assert_eq!(object["metadata"]["ownerReferences"][0]["controller"], true);
}

#[test]
fn every_version_is_read_as_it_was_written() {
    for version in [Version::V1, Version::V1beta2, Version::V1beta1] {
        let draft = draft(&full(), &[]);
        let object = created(version, "00000-a-", &draft);
        assert_eq!(object["spec"]["devices"][0]["basic"].is_null(), version != Version::V1beta1);
        let held = answered(version, object);
        assert_eq!((held.content, held.key, held.count), (draft.content, draft.key, 2));
    }
}

#[test]
fn a_recorded_slice_is_read_and_is_the_same_as_ours() {
    let recorded = json!({
        "kind": "ResourceSlice",
        "apiVersion": "resource.k8s.io/v1",
        "metadata": {
            "name": "node-1-shared-4jttw", "generateName": "node-1-shared-",
            "uid": "5759c884-3b68-4c4f-a845-af0ad5bffd61", "resourceVersion": "108", "generation": 1,
            "managedFields": [{ "manager": "unknown", "operation": "Update", "fieldsV1": { "f:spec": {} } }]
        },
        "spec": {
            "driver": "gpu.example.com", "nodeName": "node-1",
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
    let held = held(Version::V1, recorded).unwrap();
    let ours = of_pool(&pool, &BTreeSet::new(), TaintEffect::NoSchedule);
    assert_eq!(held.content.devices, ours.devices);
    assert_eq!(held.content.lost_in(&ours), BTreeSet::new());
    assert_eq!(held.metadata["managedFields"], json!([{ "manager": "unknown" }]));
}

#[test]
fn what_others_put_into_the_metadata_stays_when_a_slice_is_written() {
    let draft = draft(&full(), &[]);
    let mut object = created(Version::V1, "00000-a-", &draft);
    object["metadata"]["annotations"] = json!({ "a": "b" });
    object["metadata"]["labels"] = json!({ "c": "d" });
    let other = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y" });
    let old =
        json!({ "apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "old", "controller": true });
    object["metadata"]["ownerReferences"] = json!([old, other]);
    let was = answered(Version::V1, object);
    let written = updated(Version::V1, &was, &draft);
    let metadata = &written["metadata"];
    assert_eq!(metadata["annotations"], json!({ "a": "b" }));
    assert_eq!(metadata["labels"], json!({ "c": "d", "app.kubernetes.io/managed-by": "nodedock" }));
    let owners: Vec<_> = metadata["ownerReferences"].as_array().unwrap().iter().map(|o| &o["uid"]).collect();
    assert_eq!(owners, ["y", "uid-of-node-1"]);
    assert_eq!((&metadata["uid"], &metadata["resourceVersion"]), (&json!("u"), &json!("7")));
}

#[test]
fn what_is_no_slice_is_an_error_and_no_panic() {
    let whole = created(Version::V1, "00000-a-", &draft(&full(), &[]));
    for odd in [Value::Null, json!(1), json!([]), json!("x"), json!({ "metadata": 1, "spec": [] })] {
        assert!(held(Version::V1, odd).is_err());
    }
    for (path, value) in [
        ("/spec/driver", json!("NOT A NAME")),
        ("/spec/pool/name", json!(7)),
        ("/spec/pool", json!("x")),
        ("/metadata", json!([])),
    ] {
        let mut odd = whole.clone();
        *odd.pointer_mut(path).unwrap() = value;
        assert!(held(Version::V1beta1, odd).is_err(), "{path}");
    }
    for devices in [json!(1), json!([1, null, {}, { "name": 1 }]), json!({ "a": 1 })] {
        let mut odd = whole.clone();
        odd["spec"]["devices"] = devices;
        assert!(answered(Version::V1beta1, odd).content.devices.is_empty());
    }
    for device in [
        json!({ "name": "a", "capacity": 1, "taints": { "x": 1 }, "consumesCounters": [1], "attributes": [] }),
        json!({ "name": "a", "capacity": { "m": 1, "n": { "value": 1.5, "requestPolicy": [] } }, "taints": ["x"] }),
    ] {
        let entry = Entry::new(device);
        assert!(entry.taints().count() < 2);
    }
}

#[test]
fn what_a_server_leaves_out_is_named() {
    let sent = of_pool(&full(), &BTreeSet::new(), TaintEffect::NoSchedule);
    let without = |change: fn(&mut Value)| {
        let mut device = sent.devices["d0000"].json().clone();
        change(&mut device);
        let devices = BTreeMap::from([("d0000".to_owned(), Entry::new(device))]);
        let lost = sent.lost_in(&Content { devices, counters: sent.counters.clone() });
        lost.into_iter().collect::<Vec<_>>()
    };
    let remove = |device: &mut Value, field: &str| drop(device.as_object_mut().unwrap().remove(field));
    assert_eq!(without(|_| ()), Vec::<String>::new());
    assert_eq!(without(|device| device["taints"] = json!([])), ["devices[].taints"]);
    assert_eq!(
        without(|device| device["allowMultipleAllocations"] = false.into()),
        ["devices[].allowMultipleAllocations"]
    );
    assert_eq!(
        without(|device| device["capacity"]["memory"] = json!({ "value": "80Gi" })),
        ["devices[].capacity[].requestPolicy"]
    );
    assert_eq!(
        without(|device| device["attributes"]["resource.kubernetes.io/links"] = json!({})),
        ["devices[].attributes[].strings"]
    );
    let mut bare = sent.devices["d0000"].json().clone();
    remove(&mut bare, "consumesCounters");
    let devices = BTreeMap::from([("d0000".to_owned(), Entry::new(bare))]);
    let back = Content { devices, counters: BTreeMap::new() };
    let lost: Vec<_> = sent.lost_in(&back).into_iter().collect();
    assert_eq!(lost, ["devices[].consumesCounters", "sharedCounters"]);
}
