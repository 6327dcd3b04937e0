use serde_json::{Value, json};

use super::*;
use crate::validate::drop_deallocated_devices;

fn allocated() -> Value {
    let mut claim = claim();
    claim["status"] = json!({
        "allocation": { "devices": { "results": [
            { "request": "gpu", "driver": "gpu.example.com", "pool": "p", "device": "d-0" },
            { "request": "nic/fast", "driver": "nic.example.com", "pool": "p", "device": "n-0", "shareID": "00000000-0000-4000-8000-000000000001" },
        ], "config": [{ "source": "FromClass", "opaque": { "driver": "gpu.example.com", "parameters": {} } }] } },
        "reservedFor": [{ "resource": "pods", "name": "p", "uid": "u" }],
    });
    claim
}

/// Returns the causes with which a new status is refused.
fn refused(pointer: &str, value: Value) -> Vec<String> {
    wrong(&with(&allocated(), pointer, value), Some(&claim()))
}

#[test]
fn allocation_names_known_requests_and_devices() {
    assert_eq!(wrong(&allocated(), Some(&claim())), [""; 0]);
    let at = "status.allocation.devices.results[0]";
    let first = |field: &str| format!("/status/allocation/devices/results/0/{field}");
    assert_eq!(
        refused(&first("request"), json!("tpu")),
        [format!("{at}.request: Invalid")]
    );
    assert_eq!(
        refused(&first("driver"), json!("")),
        [format!("{at}.driver: Required")]
    );
    assert_eq!(
        refused(&first("pool"), json!("")),
        [format!("{at}.pool: Required")]
    );
    assert_eq!(
        refused(&first("device"), json!("D")),
        [format!("{at}.device: Invalid")]
    );
    assert_eq!(
        refused(&first("shareID"), json!("x")),
        [format!("{at}.shareID: Invalid")]
    );
    assert_eq!(
        refused(&first("shareID"), json!("0000000000004000800000000000000A")),
        [format!("{at}.shareID: Invalid")]
    );
    let config = "/status/allocation/devices/config/0/source";
    let at = "status.allocation.devices";
    assert_eq!(
        refused(config, Value::Null),
        [format!("{at}.config[0].source: Required")]
    );
    assert_eq!(
        refused(config, json!("FromPod")),
        [format!("{at}.config[0].source: NotSupported")]
    );
    let many = Value::Array(vec![json!({}); 33]);
    assert_eq!(
        refused("/status/allocation/devices/results", many),
        [format!("{at}.results: TooMany")]
    );
    assert_eq!(
        refused("/status/allocation/nodeSelector", json!({})),
        ["status.allocation.nodeSelector.nodeSelectorTerms: Required"]
    );
}

#[test]
fn allocation_is_immutable_while_reserved() {
    let old = allocated();
    let moved = wrong(
        &with(
            &old,
            "/status/allocation/devices/results/0/device",
            json!("d-1"),
        ),
        Some(&old),
    );
    assert_eq!(moved, ["status.allocation: Invalid"]);
    let removed = with(&old, "/status/allocation", Value::Null);
    assert_eq!(
        wrong(&removed, Some(&old)),
        ["status.reservedFor: Forbidden"]
    );
    assert_eq!(
        wrong(
            &with(&removed, "/status/reservedFor", json!([])),
            Some(&old)
        ),
        [""; 0]
    );
}

#[test]
fn deleted_claim_accepts_no_new_consumer() {
    let consumer = json!({ "resource": "pods", "name": "p", "uid": "u" });
    assert_eq!(
        refused("/status/reservedFor", json!([{}])),
        [
            "status.reservedFor[0].resource: Required",
            "status.reservedFor[0].name: Required",
            "status.reservedFor[0].uid: Required",
        ]
    );
    assert_eq!(
        refused("/status/reservedFor/-", consumer.clone()),
        ["status.reservedFor[1]: Duplicate"]
    );
    let many = Value::Array(vec![consumer; 257]);
    assert_eq!(
        refused("/status/reservedFor", many),
        ["status.reservedFor: TooMany"]
    );
    let old = with(
        &allocated(),
        "/metadata/deletionTimestamp",
        json!("2026-01-01T00:00:00Z"),
    );
    let added = with(
        &old,
        "/status/reservedFor/-",
        json!({ "resource": "pods", "name": "q", "uid": "v" }),
    );
    assert_eq!(wrong(&added, Some(&old)), ["status.reservedFor: Forbidden"]);
    assert_eq!(
        wrong(&with(&old, "/status/reservedFor", json!([])), Some(&old)),
        [""; 0]
    );
}

#[test]
fn driver_reports_only_on_allocated_devices() {
    let report = |device: Value| {
        wrong(
            &with(&allocated(), "/status/devices", json!([device])),
            Some(&allocated()),
        )
    };
    let good = json!({
        "driver": "gpu.example.com", "pool": "p", "device": "d-0", "data": { "numa": 0 },
        "conditions": [{ "type": "Ready", "status": "True", "reason": "Prepared", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
        "networkData": { "interfaceName": "eth0", "ips": ["10.9.8.7/24", "2001:db8::1/64"] },
    });
    assert_eq!(report(good.clone()), [""; 0]);
    let with = |pointer: &str, value: Value| report(with(&good, pointer, value));
    assert_eq!(
        with("/device", json!("d-9")),
        ["status.devices[0]: Invalid"]
    );
    let at = "status.devices[0]";
    assert_eq!(with("/data", json!([])), [format!("{at}.data: Invalid")]);
    assert_eq!(
        with("/data", json!({ "a": "x".repeat(10 * 1024) })),
        [format!("{at}.data: TooLong")]
    );
    assert_eq!(
        with("/conditions/0/status", json!("Yes")),
        [format!("{at}.conditions[0].status: NotSupported")]
    );
    assert_eq!(
        with("/conditions/0/lastTransitionTime", Value::Null),
        [format!("{at}.conditions[0].lastTransitionTime: Required")]
    );
    assert_eq!(
        with("/conditions/0/reason", json!("")),
        [format!("{at}.conditions[0].reason: Required")]
    );
    assert_eq!(
        with("/conditions/0/reason", json!("1")),
        [format!("{at}.conditions[0].reason: Invalid")]
    );
    assert_eq!(
        with("/conditions/-", good["conditions"][0].clone()),
        [format!("{at}.conditions[1].type: Duplicate")]
    );
    assert_eq!(
        with("/networkData/interfaceName", json!("e".repeat(257))),
        [format!("{at}.networkData.interfaceName: TooLong")]
    );
    assert_eq!(
        with("/networkData/ips/0", json!("10.9.8.7")),
        [format!("{at}.networkData.ips[0]: Invalid")]
    );
    assert_eq!(
        with("/networkData/ips/1", json!("2001:DB8::1/64")),
        [format!("{at}.networkData.ips[1]: Invalid")]
    );
}

#[test]
fn deallocation_removes_device_status() {
    let old = with(
        &allocated(),
        "/status/devices",
        json!([{ "driver": "gpu.example.com", "pool": "p", "device": "d-0" }]),
    );
    let mut kept = old.clone();
    drop_deallocated_devices(&mut kept, &old);
    assert_eq!(kept, old);
    let mut removed = with(
        &with(&old, "/status/allocation", Value::Null),
        "/status/reservedFor",
        Value::Null,
    );
    drop_deallocated_devices(&mut removed, &old);
    assert_eq!(removed["status"], json!({}));
    assert_eq!(wrong(&removed, Some(&old)), [""; 0]);
}
