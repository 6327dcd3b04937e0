use nodedock_sdk::testing::{Grant, Harness};
use nodedock_sdk::{AttributeValue, Claim, ParametersSource, ProblemKind};

use crate::{CPUS, Golden};

fn node() -> Harness<Golden> {
    let node = Harness::new();
    node.fake().file(CPUS, "0-3\n");
    node
}

fn claim() -> Claim {
    Claim::new("default", "pair", "uid-1")
        .device("left", "slots", "slot-0")
        .device("right", "slots", "slot-1")
}

#[test]
fn shipped_grant_covers_all_operations() {
    let grant = Grant::parse(include_str!("../golden.grant.yaml")).unwrap();
    let node = node();
    let inventory = node.grant(&grant).discover().unwrap();
    let slot = inventory.device("slots", "slot-1").unwrap();
    assert_eq!(slot.attribute_value("index"), Some(&AttributeValue::Int(1)));
    assert_eq!(
        slot.attribute_value("cpus"),
        Some(&AttributeValue::Text("0-3".to_owned()))
    );
    node.prepare(&claim()).unwrap();
    node.unprepare("uid-1").unwrap();
}

#[test]
fn each_device_gets_its_requested_mode() {
    let claim = claim()
        .with_parameters(ParametersSource::DeviceClass, [], r#"{"mode": "quiet"}"#)
        .with_parameters(ParametersSource::Claim, ["right"], "{}");
    let prepared = node().prepare(&claim).unwrap();
    assert_eq!(prepared.memo, b"slot-0 quiet\nslot-1 normal\n");
}

#[test]
fn unknown_mode_is_refused_permanently() {
    for (parameters, code) in [
        (r#"{"mode": "loud"}"#, "no-such-mode"),
        (r#"{"made": 1}"#, "bad-parameters"),
    ] {
        let problem = node()
            .prepare(&claim().with_parameters(ParametersSource::Claim, [], parameters))
            .unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Invalid, code)
        );
    }
}
