//! Objects that a real API server of Kubernetes 1.36 accepted and refused, from recorded exchanges.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::*;
use crate::validate::{admin_access, defaults};

/// Directories of the recordings: those with which the tests' stand-in answers, and beside this module those that it does not use.
const DIRECTORIES: [&str; 2] = [
    "../../conformance/stand-ins/fixtures/kubernetes-1.36",
    "src/validate/fixtures",
];

fn exchange(name: &str) -> Value {
    let paths = DIRECTORIES.map(|directory| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(directory)
            .join(name)
    });
    let found = paths.iter().find_map(|path| std::fs::read(path).ok());
    serde_json::from_slice(&found.unwrap_or_else(|| panic!("no recording {name}"))).unwrap()
}

/// The object of a recorded create or update, with the name that the server gave it and its defaults.
fn sent(exchange: &Value) -> Value {
    let mut object = exchange["request"]["body"].clone();
    let answer = &exchange["response"]["body"];
    if object["metadata"]["name"].is_null() {
        let name = [&answer["details"]["name"], &answer["metadata"]["name"]]
            .into_iter()
            .find(|name| !name.is_null());
        object["metadata"]["name"] = name.unwrap().clone();
    }
    let kind = object["kind"].as_str().unwrap().to_owned();
    defaults(&kind, &mut object, "2026-01-01T00:00:00Z".parse().unwrap());
    object
}

/// Reason and field of each cause.
type Causes = BTreeSet<(String, String)>;

fn causes(exchange: &Value, old: Option<&Value>) -> Causes {
    let new = sent(exchange);
    let resource = resource_of(&new);
    let namespace = json!({ "metadata": { "name": "default" } });
    let admin = admin_access(resource, &new, old, Some(&namespace));
    let causes = admin.into_iter().chain(object(resource, &new, old));
    causes
        .map(|cause| (cause.reason.to_owned(), cause.field))
        .collect()
}

#[test]
fn recorded_refusals_have_equal_causes() {
    let old = exchange("11-slice-update.json")["response"]["body"].clone();
    let refusals = [
        ("08-slice-create-129-devices-refused.json", None),
        ("09-slice-create-bad-device-name-refused.json", None),
        ("10-slice-create-duplicate-device-refused.json", None),
        ("13-slice-update-pool-renamed-refused.json", Some(&old)),
        ("23-claim-create-admin-access-refused.json", None),
    ];
    for (name, old) in refusals {
        let exchange = exchange(name);
        let recorded = exchange["response"]["body"]["details"]["causes"].as_array();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let recorded: Causes = recorded
            .unwrap()
            .iter()
            .map(|cause| (text(&cause["reason"]), text(&cause["field"])))
            .collect();
        assert_eq!(causes(&exchange, old), recorded, "{name}");
    }
}

#[test]
fn what_was_accepted_is_accepted_here() {
    let accepted = [
        "04-deviceclass-create-gpu.json",
        "05-deviceclass-create-nic.json",
        "06-slice-create.json",
        "07-slice-create-second-driver.json",
        "14-slice-update-taint.json",
        "16-slice-create-consumable-capacity.json",
        "17-claim-create-one-gpu.json",
        "18-claim-create-gpu-and-nic.json",
        "19-claim-create-first-available.json",
        "20-claim-create-share-a.json",
        "24-claimtemplate-create.json",
    ];
    for name in accepted {
        assert_eq!(causes(&exchange(name), None), Causes::new(), "{name}");
    }
}

#[test]
fn claim_defaults_match_recorded_ones() {
    for name in [
        "17-claim-create-one-gpu.json",
        "18-claim-create-gpu-and-nic.json",
        "19-claim-create-first-available.json",
    ] {
        let exchange = exchange(name);
        assert_eq!(
            sent(&exchange)["spec"],
            exchange["response"]["body"]["spec"],
            "{name}"
        );
    }
}

#[test]
fn real_scheduler_allocations_are_accepted() {
    for name in [
        "34-claim-allocated-one-gpu.json",
        "36-claim-allocated-first-available.json",
        "37-claim-allocated-share-a.json",
        "39-claim-allocated-monitor.json",
    ] {
        let claim = exchange(name)["response"]["body"].clone();
        let mut old = claim.clone();
        old["status"] = json!({});
        assert_eq!(wrong(&claim, Some(&old)), [""; 0], "{name}");
    }
}
