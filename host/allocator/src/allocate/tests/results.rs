//! The fields of an AllocationResult.

use serde_json::{Value, json};

use super::fixtures::*;

fn allocated(machine: &Machine, claim: &Value) -> Value {
    serde_json::to_value(machine.allocate(claim).expect("an allocation")).expect("JSON")
}

#[test]
fn result_repeats_device_and_request_fields() {
    let device = json!({
        "name": "gpu-0",
        "allowMultipleAllocations": true,
        "bindingConditions": ["attached"],
        "bindingFailureConditions": ["failed"],
        "capacity": {"memory": {"value": "4Gi"}},
    });
    let tolerations =
        json!([{"operator": "Exists", "key": "example.com/broken", "tolerationSeconds": 30}]);
    let claim =
        one(json!({"tolerations": tolerations, "capacity": {"requests": {"memory": "1024Mi"}}}));
    let local = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}]);
    let expected = json!({
        "allocationTimestamp": "1970-01-01T00:00:00Z",
        "devices": {"results": [{
            "request": "gpu",
            "driver": "gpu.example.com",
            "pool": "pool",
            "device": "gpu-0",
            "shareID": "share-1",
            "consumedCapacity": {"memory": "1024Mi"},
            "bindingConditions": ["attached"],
            "bindingFailureConditions": ["failed"],
            "tolerations": tolerations,
        }]},
        "nodeSelector": {"nodeSelectorTerms": local},
    });
    assert_eq!(allocated(&Machine::of_devices(&[device]), &claim), expected);
    let admin = allocated(
        &Machine::of_devices(&devices(1)),
        &one(json!({"adminAccess": true})),
    );
    assert_eq!(admin["devices"]["results"][0]["adminAccess"], true);
}

#[test]
fn class_configs_precede_claim_configs() {
    let config = |driver: &str, requests: &[&str]| {
        let config = json!({"opaque": {"driver": driver, "parameters": {}}});
        if requests.is_empty() {
            config
        } else {
            with(config, "/requests", json!(requests))
        }
    };
    let class =
        |name: &str| json!({"metadata": {"name": name}, "spec": {"config": [config(name, &[])]}});
    let mut machine = Machine::of_devices(&devices(3));
    machine.classes = vec![class("gpu"), class("nic")];
    let sub_requests = [("many", 9), ("few", 1)]
        .map(|(name, count)| json!({"name": name, "deviceClassName": "nic", "count": count}));
    let claim = claim(json!({
        "requests": [
            request("a", json!({})),
            {"name": "b", "firstAvailable": sub_requests},
            request("c", json!({})),
        ],
        "config": [
            config("for-all", &[]),
            config("also-for-all", &["a", "b", "c"]),
            config("for-few", &["b/few"]),
            config("for-many", &["b/many"]),
            config("for-c", &["c", "b/many"]),
        ],
    }));
    let shown = |config: &Value| {
        let requests = config
            .get("requests")
            .map_or_else(|| "all".to_owned(), ToString::to_string);
        format!(
            "{} {} {requests}",
            config["source"], config["opaque"]["driver"]
        )
        .replace('"', "")
    };
    let allocation = allocated(&machine, &claim);
    let configs = allocation["devices"]["config"]
        .as_array()
        .expect("configs")
        .iter()
        .map(shown);
    let expected = [
        "FromClass gpu [a,c]",
        "FromClass nic [b/few]",
        "FromClaim for-all all",
        "FromClaim also-for-all all",
        "FromClaim for-few [b/few]",
        "FromClaim for-c [c,b/many]",
    ];
    assert_eq!(configs.collect::<Vec<_>>(), expected);
}

#[test]
fn allocation_selects_nodes_of_all_devices() {
    let zone = |values: Value| json!({"key": "zone", "operator": "In", "values": values});
    let selecting =
        |requirements: Value| json!({"nodeSelectorTerms": [{"matchExpressions": requirements}]});
    let slice = |number: usize, field: &str, value: Value| {
        let slice = slice(&[device(&format!("gpu-{number}"))]);
        let slice = with(
            with(slice, "/spec/pool/name", json!(format!("pool-{number}"))),
            "/spec/nodeName",
            Value::Null,
        );
        with(slice, &format!("/spec/{field}"), value)
    };
    let exists = json!({"key": "zone", "operator": "Exists"});
    let mut machine = Machine::new(&[
        slice(0, "allNodes", json!(true)),
        slice(
            1,
            "nodeSelector",
            selecting(json!([zone(json!(["a", "b"]))])),
        ),
        slice(
            2,
            "nodeSelector",
            selecting(json!([zone(json!(["b", "a"])), exists])),
        ),
    ]);
    let selector = |machine: &Machine, count: usize| {
        allocated(machine, &one(json!({"count": count})))["nodeSelector"].clone()
    };
    assert_eq!(selector(&machine, 1), Value::Null);
    assert_eq!(
        selector(&machine, 3),
        selecting(json!([zone(json!(["a", "b"])), exists]))
    );
    let local = json!({"nodeSelectorTerms": [{"matchFields": [
        {"key": "metadata.name", "operator": "In", "values": ["node-1"]},
    ]}]});
    machine.slices[0]["spec"]["devices"][0]["bindsToNode"] = json!(true);
    assert_eq!(selector(&machine, 3), local);
    let own = json!([{"name": "gpu-0", "nodeName": "node-1"}]);
    machine.slices[0] = with(
        slice(0, "perDeviceNodeSelection", json!(true)),
        "/spec/devices",
        own,
    );
    assert_eq!(selector(&machine, 1), local);
    let two = json!({"nodeSelectorTerms": [{"matchExpressions": [exists]}, {"matchExpressions": [exists]}]});
    machine.slices[0] = slice(0, "nodeSelector", two);
    let expected =
        "the node selector of device gpu.example.com/pool-0/gpu-0 has 2 terms, and one is allowed";
    assert_eq!(machine.chosen(&one(json!({}))), Err(expected.into()));
}
