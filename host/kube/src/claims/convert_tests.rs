//! Fixtures are claims as an API server of Kubernetes 1.36 and its scheduler wrote them.

use std::path::Path;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use nodedock_model::ProblemKind;

/// Reads a claim of a watch, and its text, which is the same.
pub(in crate::claims) fn claim(object: &Value) -> Result<Claim, Problem> {
    let of_value = of_value(object);
    let of_text = of_text(object.to_string().as_bytes()).unwrap();
    assert_eq!(of_value, of_text, "{object}");
    of_value.map(|read| read.state.claim)
}

const FIXTURES: [&str; 7] = [
    "claim-one-gpu.json",
    "claim-gpu-and-nic.json",
    "claim-first-available.json",
    "claim-monitor.json",
    "claim-share-a.json",
    "claim-deallocated.json",
    "claim-deleting.json",
];

fn path(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/kubernetes-1.36")
        .join(name)
}

pub(in crate::claims) fn fixture(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path(name)).unwrap()).unwrap()
}

#[test]
fn api_claim_equals_manifest_claim() {
    for name in FIXTURES {
        let by_file = manifest::read(&path(name)).unwrap().claims.remove(0);
        assert_eq!(claim(&fixture(name)), Ok(by_file), "{name}");
    }
}

/// The older versions have requests without `exactly`, and the same status.
#[test]
fn every_version_gives_the_same_claim() {
    for name in FIXTURES {
        let v1 = fixture(name);
        let wanted = claim(&v1).unwrap();
        for version in ["v1beta2", "v1beta1"] {
            let mut older = v1.clone();
            older["apiVersion"] = json!(format!("resource.k8s.io/{version}"));
            if version == "v1beta1" {
                for request in older["spec"]["devices"]["requests"].as_array_mut().unwrap() {
                    let exactly = request.as_object_mut().unwrap().remove("exactly");
                    request.as_object_mut().unwrap().extend(
                        exactly
                            .into_iter()
                            .flat_map(|e| e.as_object().unwrap().clone()),
                    );
                }
            }
            assert_eq!(claim(&older), Ok(wanted.clone()), "{name} {version}");
        }
        let mut item = v1.clone();
        item.as_object_mut()
            .unwrap()
            .retain(|key, _| key != "kind" && key != "apiVersion");
        assert_eq!(claim(&item), Ok(wanted), "{name} as an item of a list");
    }
}

#[test]
fn unknown_fields_are_ignored() {
    let mut object = fixture("claim-one-gpu.json");
    let wanted = claim(&object).unwrap();
    object["spec"] =
        json!({"devices": {"requests": [{"newer": [1, {"a": null}]}]}, "controller": 7});
    object["metadata"]["managedFields"] = json!("anything");
    object["metadata"]["creationTimestamp"] = json!("not a time");
    object["status"]["newer"] = json!([[]]);
    object["status"]["devices"] = json!("anything");
    object["status"]["allocation"]["allocationTimestamp"] = json!(7);
    object["status"]["allocation"]["newer"] = json!({});
    object["status"]["allocation"]["devices"]["results"][0]["newer"] = json!({"x": 1});
    object["status"]["allocation"]["devices"]["config"][0]["opaque"]["newer"] = json!(1);
    assert_eq!(claim(&object), Ok(wanted));
}

#[test]
fn parameters_that_are_no_object_fail() {
    let wrong = [
        (json!("text"), "a text"),
        (json!([1]), "a list"),
        (json!(7), "a number"),
        (json!(true), "a truth value"),
        (Value::Null, "missing"),
    ];
    for (parameters, what) in wrong {
        let mut object = fixture("claim-one-gpu.json");
        object["status"]["allocation"]["devices"]["config"][0]["opaque"]["parameters"] = parameters;
        let problem = claim(&object).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Invalid, "claim-parameters-malformed")
        );
        assert_eq!(
            problem.message,
            format!(
                "claim default/one-gpu: status.allocation.devices.config[0].opaque.parameters for driver gpu.example.com \
                 is {what}, and a JSON object is wanted"
            )
        );
    }
}

#[test]
fn malformed_claim_gives_one_line_error() {
    let with = |pointer: &str, value: Value| {
        let mut object = fixture("claim-one-gpu.json");
        *object.pointer_mut(pointer).unwrap() = value;
        claim(&object).unwrap_err().message
    };
    let result = "/status/allocation/devices/results/0";
    let cases = [
        (with("/kind", json!("Pod")), "kind \"Pod\""),
        (
            with("/metadata/uid", Value::Null),
            "metadata.uid is missing",
        ),
        (with("/metadata/uid", json!(7)), "not a valid ResourceClaim"),
        (with("/metadata/name", json!("A\nB")), "metadata.name"),
        (
            with(&format!("{result}/driver"), json!("no driver!")),
            "status.allocation.devices.results[].driver",
        ),
        (with(result, json!("x")), "not a valid ResourceClaim"),
        (
            with("/status/reservedFor", json!({"a": 1})),
            "not a valid ResourceClaim",
        ),
        (
            with(
                "/status/allocation/devices/config/0/source",
                json!("FromMars"),
            ),
            "config source",
        ),
    ];
    for (message, words) in cases {
        assert!(
            message.starts_with("claim default/") && message.contains(words),
            "{message}"
        );
        assert!(
            !message.contains('\n') && !message.contains("document"),
            "{message}"
        );
    }
    assert!(claim(&json!([])).is_err() && claim(&Value::Null).is_err());
}

/// Reads a claim as large as the API lets it be: every list full, and parameters of 10 KiB each.
#[test]
fn largest_claim_is_read() {
    let mut object = fixture("claim-one-gpu.json");
    let devices = &mut object["status"]["allocation"]["devices"];
    let result = devices["results"][0].clone();
    devices["results"] = json!(vec![result; limit::ALLOCATED_DEVICES_MAX]);
    let mut config = devices["config"][0].clone();
    config["opaque"]["parameters"] = json!({"text": "x".repeat(limit::PARAMETERS_BYTES_MAX - 16)});
    devices["config"] = json!(vec![config; limit::CONFIGS_MAX]);
    assert!(object.to_string().len() > 256 << 10);
    let read = claim(&object).unwrap();
    let allocation = read.allocation.clone().unwrap();
    assert_eq!(
        (allocation.devices.len(), allocation.configs.len()),
        (32, 64)
    );
    assert_eq!(
        nodedock_core::manager::claims::source::check_bounds(&read),
        Ok(())
    );
}

fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::hash_map("[a-zA-Z]{1,8}", inner, 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Checks that a claim with any value at any place is read, or refused in one line.
    #[test]
    fn arbitrary_claims_never_panic(value in anything(), place in 0usize..12) {
        let places = [
            "", "/metadata", "/metadata/name", "/metadata/uid", "/status", "/status/allocation", "/status/reservedFor",
            "/status/allocation/devices", "/status/allocation/devices/results", "/status/allocation/devices/results/0",
            "/status/allocation/devices/config/0", "/status/allocation/nodeSelector",
        ];
        let mut object = fixture("claim-one-gpu.json");
        *object.pointer_mut(places[place]).unwrap() = value;
        if let Err(problem) = claim(&object) {
            prop_assert!(!problem.message.contains('\n'), "{}", problem.message);
            prop_assert!(problem.message.len() <= limit::PROBLEM_MESSAGE_BYTES_MAX + 512);
        }
    }
}
