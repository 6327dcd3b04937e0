use nodedock_sdk::testing::{Grant, Harness};
use nodedock_sdk::{Claim, ProblemKind};
use serde_json::{Value, json};

use crate::{Command, POOL, Scripted, WRITABLE};

fn claim(name: &str) -> Claim {
    Claim::new("default", name, format!("claim-{name}")).device("device-0", POOL, name)
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../scripted.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../scripted.config.yaml")).unwrap();
    let node = Harness::<Scripted>::new();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert!(inventory.device(POOL, "generation-0").is_some());
    assert!(
        Command::ALL
            .iter()
            .all(|(name, _)| inventory.device(POOL, name).is_some())
    );
}

#[test]
fn config_overrides_claim_name() {
    let node = Harness::<Scripted>::new();
    assert!(node.prepare(&claim("anything")).is_ok());
    assert_eq!(
        node.prepare(&claim("refuse-permanent-2")).unwrap_err().kind,
        ProblemKind::Invalid
    );
    node.config(json!({"prepare": {"ok": "refuse-transient", "refuse-permanent": "ok"}}));
    assert_eq!(
        node.prepare(&claim("ok")).unwrap_err().kind,
        ProblemKind::Unavailable
    );
    assert!(node.prepare(&claim("refuse-permanent")).is_ok());
}

#[test]
fn successful_prepare_writes_the_configured_value() {
    let node = Harness::<Scripted>::new();
    node.fake().file(WRITABLE, "0");
    node.config(json!({"write": {"path": WRITABLE, "value": "1"}}));
    assert!(node.prepare(&claim("refuse-permanent")).is_err());
    assert!(node.prepare(&claim("anything")).is_ok());
    let written: Vec<_> = node
        .fake()
        .writes()
        .into_iter()
        .map(|write| (write.before, write.value))
        .collect();
    assert_eq!(written, [("0".to_owned(), "1".to_owned())]);
}

#[test]
fn devices_have_a_status_if_configured() {
    let node = Harness::<Scripted>::new();
    let reported = |prepared: nodedock_sdk::Prepared| prepared.devices[0].status.clone();
    assert_eq!(reported(node.prepare(&claim("anything")).unwrap()), None);
    node.config(json!({"report": true}));
    let status = reported(node.prepare(&claim("anything")).unwrap()).unwrap();
    assert!(status.conditions.len() == 1 && status.data.is_some() && status.network.is_some());
}

#[test]
fn commands_are_read_as_written() {
    for (name, command) in Command::ALL {
        assert_eq!(
            serde_json::from_value::<Command>(json!(name)).unwrap(),
            command
        );
        assert_eq!(Command::named(name), command);
    }
}
