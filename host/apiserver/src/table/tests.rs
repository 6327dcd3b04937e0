use serde_json::{Value, json};

use super::*;

fn now() -> Timestamp {
    "2026-01-01T00:05:03Z".parse().unwrap()
}

/// The cells of an object that was created five minutes ago.
fn cells(kind: &str, mut object: Value) -> Value {
    object["metadata"]["name"] = "n".into();
    object["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
    let table = table(
        "v1",
        kind,
        [&object],
        &json!({}),
        IncludeObject::None,
        now(),
    );
    let (columns, cells) = (&table["columnDefinitions"], &table["rows"][0]["cells"]);
    assert_eq!(
        columns.as_array().unwrap().len(),
        cells.as_array().unwrap().len(),
        "{kind}"
    );
    cells.clone()
}

fn headers(kind: &str, priority: i64) -> Vec<String> {
    let table = table("v1", kind, [], &json!({}), IncludeObject::None, now());
    let columns = table["columnDefinitions"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|column| column["priority"] == priority);
    columns
        .map(|column| column["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn table_has_list_metadata_and_objects() {
    let claim = json!({ "kind": "ResourceClaim", "metadata": { "name": "c", "creationTimestamp": "2026-01-01T00:00:00Z" }, "spec": {} });
    let metadata = json!({ "resourceVersion": "7" });
    let of = |include: IncludeObject| {
        table(
            "resource.k8s.io/v1",
            "ResourceClaim",
            [&claim],
            &metadata,
            include,
            now(),
        )
    };
    let column = |name: &str, format: &str, description: &str| json!({ "name": name, "type": "string", "format": format, "description": description, "priority": 0 });
    assert_eq!(
        of(IncludeObject::Metadata),
        json!({
            "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": { "resourceVersion": "7" },
            "columnDefinitions": [
                column("Name", "name", "Name of the object, unique in its namespace."),
                column("State", "", "Whether the claim is allocated, reserved or deleted."),
                column("Age", "", "Time since the object was created."),
            ],
            "rows": [{
                "cells": ["c", "pending", "5m3s"],
                "object": { "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": claim["metadata"] },
            }],
        })
    );
    let mut whole = claim.clone();
    whole["apiVersion"] = "resource.k8s.io/v1".into();
    assert_eq!(of(IncludeObject::Object)["rows"][0]["object"], whole);
    assert_eq!(of(IncludeObject::None)["rows"][0]["object"], Value::Null);
}

#[test]
fn include_object_has_three_values() {
    let expected = [
        ("", IncludeObject::Metadata),
        ("Metadata", IncludeObject::Metadata),
        ("None", IncludeObject::None),
        ("Object", IncludeObject::Object),
    ];
    for (text, include) in expected {
        assert_eq!(IncludeObject::parse(text), Ok(include));
    }
    let refused = "Unable to convert to Table as requested: includeObject: Invalid value: \"All\": must be 'Metadata', 'Object', 'None', or empty";
    assert_eq!(IncludeObject::parse("All"), Err(refused.to_owned()));
}

#[test]
fn claim_state_shows_allocation_and_consumers() {
    let state = |claim: Value| cells("ResourceClaim", claim)[1].clone();
    let (allocation, consumers) = (json!({ "devices": {} }), json!([{ "name": "p" }]));
    let deleted = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
    assert_eq!(state(json!({})), "pending");
    assert_eq!(
        state(json!({ "status": { "allocation": allocation } })),
        "allocated"
    );
    assert_eq!(
        state(json!({ "status": { "allocation": allocation, "reservedFor": consumers } })),
        "allocated,reserved"
    );
    assert_eq!(state(json!({ "metadata": deleted })), "deleted");
    assert_eq!(
        state(
            json!({ "metadata": deleted, "status": { "allocation": allocation, "reservedFor": consumers } })
        ),
        "deleted,allocated,reserved"
    );
}

#[test]
fn resource_columns_match_real_server() {
    assert_eq!(
        headers("ResourceSlice", 0),
        ["Name", "Node", "Driver", "Pool", "Age"]
    );
    let slice = json!({ "spec": { "driver": "d", "nodeName": "node-1", "pool": { "name": "p" } } });
    assert_eq!(
        cells("ResourceSlice", slice),
        json!(["n", "node-1", "d", "p", "5m3s"])
    );
    assert_eq!(
        cells(
            "ResourceSlice",
            json!({ "spec": { "driver": "d", "allNodes": true } })
        ),
        json!(["n", "", "d", "", "5m3s"])
    );
    for kind in ["DeviceClass", "ResourceClaimTemplate"] {
        assert_eq!(headers(kind, 0), ["Name", "Age"]);
        assert_eq!(cells(kind, json!({})), json!(["n", "5m3s"]));
    }
    let taint = json!({ "key": "k", "value": "v", "effect": "NoExecute", "timeAdded": "2026-01-01T00:05:00Z" });
    assert_eq!(
        cells("DeviceTaintRule", json!({ "spec": { "taint": taint } })),
        json!(["n", "k", "v", "NoExecute", "3s", "5m3s"])
    );
    assert_eq!(
        cells(
            "DeviceTaintRule",
            json!({ "spec": { "taint": { "key": "k" } } })
        ),
        json!(["n", "k", "", "", "", "5m3s"])
    );
}

#[test]
fn wide_node_output_includes_system() {
    assert_eq!(
        headers("Node", 0),
        ["Name", "Status", "Roles", "Age", "Version"]
    );
    assert_eq!(
        headers("Node", 1),
        [
            "Internal-IP",
            "External-IP",
            "OS-Image",
            "Kernel-Version",
            "Container-Runtime"
        ]
    );
    let node = json!({
        "metadata": { "labels": { "node-role.kubernetes.io/worker": "", "kubernetes.io/role": "edge" } },
        "spec": { "unschedulable": true },
        "status": {
            "conditions": [{ "type": "Ready", "status": "True" }], "addresses": [{ "type": "InternalIP", "address": "10.0.0.1" }],
            "nodeInfo": { "kubeletVersion": "v1.36.2", "osImage": "Linux", "kernelVersion": "6.1", "architecture": "amd64", "containerRuntimeVersion": "c://2" },
        },
    });
    assert_eq!(
        cells("Node", node),
        json!([
            "n",
            "Ready,SchedulingDisabled",
            "edge,worker",
            "5m3s",
            "v1.36.2",
            "10.0.0.1",
            "<none>",
            "Linux",
            "6.1 (amd64)",
            "c://2"
        ])
    );
    assert_eq!(
        cells("Node", json!({})),
        json!([
            "n",
            "Unknown",
            "<none>",
            "5m3s",
            "",
            "<none>",
            "<none>",
            "<unknown>",
            "<unknown>",
            "<unknown>"
        ])
    );
    assert_eq!(
        cells(
            "Node",
            json!({ "status": { "conditions": [{ "type": "Ready", "status": "False" }] } })
        )[1],
        "NotReady"
    );
    assert_eq!(
        cells("Namespace", json!({ "status": { "phase": "Active" } })),
        json!(["n", "Active", "5m3s"])
    );
}

#[test]
fn event_shows_time_and_object() {
    assert_eq!(
        headers("Event", 0),
        ["Last Seen", "Type", "Reason", "Object", "Message"]
    );
    assert_eq!(
        headers("Event", 1),
        ["Subobject", "Source", "First Seen", "Count", "Name"]
    );
    let old = json!({
        "firstTimestamp": "2026-01-01T00:00:03Z", "lastTimestamp": "2026-01-01T00:05:00Z", "count": 4, "type": "Warning", "reason": "R",
        "involvedObject": { "kind": "Pod", "name": "p", "fieldPath": "spec" }, "source": { "component": "kubelet", "host": "h" }, "message": " m\n",
    });
    assert_eq!(
        cells("Event", old),
        json!([
            "3s",
            "Warning",
            "R",
            "pod/p",
            "spec",
            "kubelet, h",
            "m",
            "5m",
            4,
            "n"
        ])
    );
    let new = json!({
        "eventTime": "2026-01-01T00:05:00.000000Z", "type": "Normal", "reason": "R", "involvedObject": { "kind": "Node" },
        "reportingComponent": "c", "message": "m",
    });
    assert_eq!(
        cells("Event", new),
        json!(["3s", "Normal", "R", "node", "", "c", "m", "3s", 1, "n"])
    );
    let series = json!({ "eventTime": "2026-01-01T00:00:03Z", "series": { "lastObservedTime": "2026-01-01T00:05:02Z", "count": 9 } });
    assert_eq!(
        cells("Event", series),
        json!(["1s", "", "", "", "", "", "", "5m", 9, "n"])
    );
}

#[test]
fn pod_status_shows_the_failure_reason() {
    assert_eq!(
        headers("Pod", 0),
        ["Name", "Ready", "Status", "Restarts", "Age"]
    );
    assert_eq!(
        headers("Pod", 1),
        ["IP", "Node", "Nominated Node", "Readiness Gates"]
    );
    let containers = json!([{ "name": "a" }, { "name": "b" }]);
    let running = json!({
        "spec": { "containers": containers, "nodeName": "node-1", "readinessGates": [{ "conditionType": "g" }] },
        "status": {
            "phase": "Running", "podIPs": [{ "ip": "10.0.0.9" }], "conditions": [{ "type": "g", "status": "True" }],
            "containerStatuses": [
                { "ready": true, "restartCount": 2, "state": { "running": {} }, "lastState": { "terminated": { "finishedAt": "2026-01-01T00:05:00Z" } } },
                { "ready": false, "restartCount": 0, "state": { "running": {} } },
            ],
        },
    });
    assert_eq!(
        cells("Pod", running),
        json!([
            "n",
            "1/2",
            "Running",
            "2 (3s ago)",
            "5m3s",
            "10.0.0.9",
            "node-1",
            "<none>",
            "1/1"
        ])
    );
    assert_eq!(
        cells("Pod", json!({ "status": { "phase": "Pending" } })),
        json!([
            "n", "0/0", "Pending", "0", "5m3s", "<none>", "<none>", "<none>", "<none>"
        ])
    );
    let status = |status: Value| cells("Pod", json!({ "status": status }))[2].clone();
    assert_eq!(
        status(json!({ "phase": "Failed", "reason": "Evicted" })),
        "Evicted"
    );
    assert_eq!(
        status(json!({ "conditions": [{ "type": "PodScheduled", "reason": "SchedulingGated" }] })),
        "SchedulingGated"
    );
    let one = |state: Value| {
        status(json!({ "phase": "Running", "containerStatuses": [{ "state": state }] }))
    };
    assert_eq!(
        one(json!({ "waiting": { "reason": "ContainerCreating" } })),
        "ContainerCreating"
    );
    assert_eq!(
        one(json!({ "terminated": { "exitCode": 1 } })),
        "ExitCode:1"
    );
    assert_eq!(
        one(json!({ "terminated": { "exitCode": 1, "signal": 9 } })),
        "Signal:9"
    );
    assert_eq!(
        one(json!({ "terminated": { "exitCode": 0, "reason": "Completed" } })),
        "Completed"
    );
    let deleted = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" }, "status": { "phase": "Running" } });
    assert_eq!(cells("Pod", deleted)[2], "Terminating");
}

#[test]
fn ended_pod_is_marked() {
    let mark = |kind: &str, phase: &str| {
        let object = json!({ "status": { "phase": phase } });
        table(
            "v1",
            kind,
            [&object],
            &json!({}),
            IncludeObject::None,
            now(),
        )["rows"][0]["conditions"]
            .clone()
    };
    let completed = json!([{ "type": "Completed", "status": "True", "reason": "Succeeded", "message": "The pod has completed successfully." }]);
    assert_eq!(mark("Pod", "Succeeded"), completed);
    assert_eq!(mark("Pod", "Running"), Value::Null);
    assert_eq!(mark("Namespace", "Failed"), Value::Null);
}
