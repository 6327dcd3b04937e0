//! Counts, classes, selectors, sub-requests, taints and admin access.

use serde_json::{Value, json};

use super::super::NotAllocatedKind;
use super::fixtures::*;

fn models(models: &[&str]) -> Vec<Value> {
    let device = |(number, model): (usize, &&str)| {
        with(
            device(&format!("gpu-{number}")),
            "/attributes/model",
            json!({"string": model}),
        )
    };
    models.iter().enumerate().map(device).collect()
}

fn model(model: &str) -> String {
    format!("device.attributes[\"gpu.example.com\"].model == {model:?}")
}

#[test]
fn request_gets_first_free_devices() {
    let mut machine = Machine::of_devices(&devices(4));
    assert_eq!(machine.occupy("a", &one(json!({}))), "gpu=gpu-0");
    assert_eq!(
        machine.occupy("b", &one(json!({"count": 2}))),
        "gpu=gpu-1, gpu=gpu-2"
    );
    machine.in_use.remove("a");
    assert_eq!(
        machine.chosen(&one(json!({"count": 2}))).as_deref(),
        Ok("gpu=gpu-0, gpu=gpu-3")
    );
    let error = machine.chosen(&one(json!({"count": 3})));
    assert_eq!(
        error,
        Err("request \"gpu\" needs 3 devices, and 2 of 4 devices can be used: 2 in use".into())
    );
    let excluded = machine.excluded(&one(json!({"count": 3})));
    assert_eq!(
        excluded,
        [
            "gpu gpu-1: in use by claim b",
            "gpu gpu-2: in use by claim b"
        ]
    );
}

#[test]
fn empty_claim_gets_empty_allocation() {
    assert_eq!(
        Machine::new(&[]).chosen(&claim(json!({}))).as_deref(),
        Ok("")
    );
}

#[test]
fn request_defaults_to_one_device() {
    let claim = requests(&[json!({"name": "gpu", "exactly": {"deviceClassName": "gpu"}})]);
    assert_eq!(
        Machine::of_devices(&devices(2)).chosen(&claim).as_deref(),
        Ok("gpu=gpu-0")
    );
}

#[test]
fn all_mode_needs_every_matching_device() {
    let mut machine = Machine::of_devices(&models(&["a", "b", "a"]));
    let all = one(json!({"allocationMode": "All", "selectors": selectors(&[&model("a")])}));
    assert_eq!(machine.chosen(&all).as_deref(), Ok("gpu=gpu-0, gpu=gpu-2"));
    machine.occupy("first", &one(json!({})));
    let expected = "request \"gpu\" asks for all devices, and device gpu.example.com/pool/gpu-0 cannot be used: in use by claim first";
    assert_eq!(machine.chosen(&all), Err(expected.into()));
    let none = one(json!({"allocationMode": "All", "selectors": selectors(&["false"])}));
    let expected = "request \"gpu\" asks for all devices, and 0 of 3 devices can be used: 1 in use, 2 not matched by selectors";
    assert_eq!(machine.chosen(&none), Err(expected.into()));
}

#[test]
fn class_and_request_selectors_both_apply() {
    let mut machine = Machine::of_devices(&models(&["a", "b"]));
    let claim = one(json!({"selectors": selectors(&[&model("b")])}));
    assert_eq!(machine.chosen(&claim).as_deref(), Ok("gpu=gpu-1"));
    machine.classes = vec![
        json!({"metadata": {"name": "gpu"}, "spec": {"selectors": selectors(&[&model("a")])}}),
    ];
    assert_eq!(
        machine.excluded(&claim),
        [
            format!("gpu gpu-0: selector {:?} is false", model("b")),
            format!(
                "gpu gpu-1: selector {:?} of class \"gpu\" is false",
                model("a")
            ),
        ]
    );
}

#[test]
fn failing_selector_fails_the_allocation() {
    let mut devices = models(&["a"]);
    devices.push(device("gpu-1"));
    let machine = Machine::of_devices(&devices);
    let claim = |count: usize| one(json!({"count": count, "selectors": selectors(&[&model("a")])}));
    assert_eq!(machine.chosen(&claim(1)).as_deref(), Ok("gpu=gpu-0"));
    let error = machine.allocate(&claim(2)).expect_err("an error");
    assert_eq!(error.kind, NotAllocatedKind::Invalid);
    let start = format!(
        "request \"gpu\", device gpu.example.com/pool/gpu-1: selector {:?} failed: no such key",
        model("a")
    );
    assert!(error.message.starts_with(&start), "{error}");
    let all = one(json!({"allocationMode": "All", "selectors": selectors(&[&model("a")])}));
    assert_eq!(
        machine.allocate(&all).expect_err("an error").kind,
        NotAllocatedKind::Invalid
    );
}

#[test]
fn unsatisfiable_claim_is_invalid() {
    let machine = Machine::of_devices(&devices(40));
    let many: Vec<Value> = (0..33)
        .map(|number| request(&format!("r{number}"), json!({})))
        .collect();
    let sub_request = json!({"name": "s", "deviceClassName": "none"});
    for (claim, expected) in [
        (
            requests(&many),
            "the claim has 33 requests, and at most 32 are allowed",
        ),
        (
            one(json!({"count": 0})),
            "request \"gpu\": count is 0, and must be positive",
        ),
        (
            one(json!({"allocationMode": "Some"})),
            "request \"gpu\": allocation mode \"Some\" is neither `ExactCount` nor `All`",
        ),
        (
            one(json!({"deviceClassName": "none"})),
            "request \"gpu\": there is no DeviceClass \"none\"",
        ),
        (
            one(json!({"selectors": [{}]})),
            "request \"gpu\": a selector has no CEL expression",
        ),
        (
            one(json!({"capacity": {"requests": {"memory": "1x"}}})),
            "request \"gpu\": capacity memory: \"1x\" is no quantity",
        ),
        (
            requests(&[json!({"name": "gpu"})]),
            "request \"gpu\": it has neither `exactly` nor `firstAvailable`",
        ),
        (
            requests(&[json!({"name": "gpu", "firstAvailable": [sub_request]})]),
            "request \"gpu\": sub-request \"s\": there is no DeviceClass \"none\"",
        ),
        (
            claim(json!({"requests": [request("gpu", json!({}))], "constraints": [{}]})),
            "constraint 0 has neither `matchAttribute` nor `distinctAttribute`",
        ),
    ] {
        let error = machine.allocate(&claim).expect_err("invalid");
        assert_eq!(
            (error.kind, error.message.as_str()),
            (NotAllocatedKind::Invalid, expected)
        );
    }
}

#[test]
fn allocation_has_at_most_32_devices() {
    let machine = Machine::of_devices(&devices(40));
    assert!(machine.chosen(&one(json!({"count": 32}))).is_ok());
    for claim in [
        one(json!({"count": 33})),
        one(json!({"allocationMode": "All"})),
    ] {
        let error = machine.chosen(&claim).expect_err("too many");
        assert!(
            error.ends_with("devices, and at most 32 fit into an allocation"),
            "{error}"
        );
    }
    // The first sub-request does not fit beside the other request, and the second does.
    let sub_requests = [("large", 20), ("small", 1)]
        .map(|(name, count)| json!({"name": name, "deviceClassName": "gpu", "count": count}));
    let claim = requests(&[
        json!({"name": "any", "firstAvailable": sub_requests}),
        request("gpu", json!({"count": 20})),
    ]);
    let chosen = machine.chosen(&claim).expect("it fits");
    assert!(
        chosen.starts_with("any/small=gpu-0, gpu=gpu-1, "),
        "{chosen}"
    );
}

#[test]
fn first_available_sub_request_is_chosen() {
    let mut machine = Machine::of_devices(&models(&["a", "b", "b"]));
    let sub_requests = [("best", model("a")), ("good", model("b"))].map(
        |(name, model)| json!({"name": name, "deviceClassName": "gpu", "selectors": selectors(&[&model])}),
    );
    let claim = requests(&[json!({"name": "gpu", "firstAvailable": sub_requests})]);
    assert_eq!(machine.occupy("1", &claim), "gpu/best=gpu-0");
    assert_eq!(machine.occupy("2", &claim), "gpu/good=gpu-1");
    assert_eq!(machine.occupy("3", &claim), "gpu/good=gpu-2");
    let excluded = machine.excluded(&claim);
    let expected = [
        "gpu/best gpu-0: in use by claim 1",
        "gpu/good gpu-0: in use by claim 1",
    ];
    assert!(
        expected
            .iter()
            .all(|line| excluded.iter().any(|known| known == line)),
        "{excluded:?}"
    );
}

#[test]
fn untolerated_taint_excludes_the_device() {
    let taint =
        |effect: &str| json!([{"key": "example.com/broken", "value": "yes", "effect": effect}]);
    let machine =
        |effect: &str| Machine::of_devices(&[with(device("gpu-0"), "/taints", taint(effect))]);
    for effect in ["NoSchedule", "NoExecute"] {
        let excluded = machine(effect).excluded(&one(json!({})));
        assert_eq!(
            excluded,
            [format!(
                "gpu gpu-0: taint example.com/broken=yes:{effect} is not tolerated"
            )]
        );
    }
    assert!(machine("None").chosen(&one(json!({}))).is_ok());
    for (toleration, tolerated) in [
        (json!({"operator": "Exists"}), true),
        (
            json!({"operator": "Exists", "key": "example.com/broken"}),
            true,
        ),
        (json!({"key": "example.com/broken", "value": "yes"}), true),
        (
            json!({"operator": "Equal", "key": "example.com/broken", "value": "yes", "effect": "NoSchedule"}),
            true,
        ),
        (
            json!({"operator": "Equal", "key": "example.com/broken", "value": "no"}),
            false,
        ),
        (
            json!({"operator": "Exists", "key": "example.com/other"}),
            false,
        ),
        (json!({"operator": "Exists", "effect": "NoExecute"}), false),
        (
            json!({"operator": "Like", "key": "example.com/broken"}),
            false,
        ),
    ] {
        let chosen = machine("NoSchedule").chosen(&one(json!({"tolerations": [toleration]})));
        assert_eq!(chosen.is_ok(), tolerated, "{toleration}");
    }
}

#[test]
fn admin_access_consumes_no_device() {
    let mut machine = Machine::of_devices(&devices(1));
    assert_eq!(
        machine.occupy("monitor", &one(json!({"adminAccess": true}))),
        "gpu=gpu-0"
    );
    assert_eq!(machine.occupy("user", &one(json!({}))), "gpu=gpu-0");
    assert_eq!(
        machine.occupy("second monitor", &one(json!({"adminAccess": true}))),
        "gpu=gpu-0"
    );
    // Within one claim a device is for one request only.
    let both = requests(&[
        request("monitor", json!({"adminAccess": true})),
        request("user", json!({})),
    ]);
    machine.in_use.remove("user");
    let expected = "requests \"monitor\", \"user\" need 2 devices, and 1 can be used by them";
    assert_eq!(machine.chosen(&both), Err(expected.into()));
}
