use nodedock_sdk::testing::{Grant, Harness};
use nodedock_sdk::{
    AttributeValue, Claim, Configuration, Driver, NodeAccess, NodeInfo, NodeKind, ProblemKind,
};
use serde_json::{Value, json};

use crate::DeviceNodesDriver;

fn shipped_config() -> Value {
    serde_saphyr::from_str(include_str!("../device-nodes.config.yaml")).unwrap()
}

fn add_node(
    node: &Harness<DeviceNodesDriver>,
    path: &str,
    kind: NodeKind,
    numbers: (u32, u32),
    sysfs: &str,
) {
    let (major, minor) = numbers;
    let subsystem = sysfs.split('/').nth(2).unwrap();
    node.fake()
        .link(
            &format!("{sysfs}/subsystem"),
            &format!("../../../../class/{subsystem}"),
        )
        .dir(&format!("class/{subsystem}"))
        .node(NodeInfo {
            path: path.into(),
            kind,
            major,
            minor,
            mode: 0o600,
            uid: 0,
            gid: 0,
            sysfs_path: Some(sysfs.into()),
        });
}

fn node() -> Harness<DeviceNodesDriver> {
    let node = Harness::new();
    node.config(shipped_config());
    let character = NodeKind::Character;
    add_node(
        &node,
        "/dev/fuse",
        character,
        (10, 229),
        "devices/virtual/misc/fuse",
    );
    add_node(
        &node,
        "/dev/kvm",
        character,
        (10, 232),
        "devices/virtual/misc/kvm",
    );
    add_node(
        &node,
        "/dev/net/tun",
        character,
        (10, 200),
        "devices/virtual/misc/tun",
    );
    add_node(
        &node,
        "/dev/loop-control",
        character,
        (10, 237),
        "devices/virtual/misc/loop-control",
    );
    add_node(
        &node,
        "/dev/loop0",
        NodeKind::Block,
        (7, 0),
        "devices/virtual/block/loop0",
    );
    add_node(
        &node,
        "/dev/loop1",
        NodeKind::Block,
        (7, 1),
        "devices/virtual/block/loop1",
    );
    node.fake()
        .file("devices/virtual/block/loop0/size", "2048\n");
    node
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../device-nodes.grant.yaml")).unwrap();
    let node = node();
    node.grant(&grant);
    DeviceNodesDriver::validate_config(&shipped_config().to_string()).unwrap();
    let inventory = node.discover().unwrap();
    for device in ["fuse", "kvm", "net-tun"] {
        assert!(inventory.device("misc", device).is_some(), "{device}");
    }
    assert_eq!(
        inventory.pools[1].devices.len(),
        2,
        "loop0 and loop1, but not loop-control"
    );
}

#[test]
fn schema_names_every_shipped_config_key() {
    let schema: Value = serde_json::from_str(&DeviceNodesDriver::config_schema().unwrap()).unwrap();
    let known = &schema["properties"]["pools"]["items"]["properties"];
    for pool in shipped_config()["pools"].as_array().unwrap() {
        for key in pool.as_object().unwrap().keys() {
            assert!(known.get(key).is_some(), "{key}");
        }
    }
}

#[test]
fn device_attributes_describe_its_node() {
    let inventory = node().discover().unwrap();
    let tun = inventory.device("misc", "net-tun").unwrap();
    assert_eq!(tun.attribute_value("path"), Some(&"/dev/net/tun".into()));
    assert_eq!(tun.attribute_value("major"), Some(&AttributeValue::Int(10)));
    assert_eq!(
        tun.attribute_value("minor"),
        Some(&AttributeValue::Int(200))
    );
    assert_eq!(tun.attribute_value("kind"), Some(&"character".into()));
    assert_eq!(tun.attribute_value("subsystem"), Some(&"misc".into()));
    assert_eq!(tun.identity, ["dev:/dev/net/tun"]);
    assert!(tun.allow_multiple_allocations);
}

#[test]
fn block_device_reports_its_known_size() {
    let inventory = node().discover().unwrap();
    assert_eq!(
        inventory.device("loop", "loop0").unwrap().capacities[0].value,
        "1048576"
    );
    assert_eq!(inventory.device("loop", "loop1").unwrap().capacities, []);
}

#[test]
fn node_without_sysfs_directory_is_published() {
    let node = Harness::<DeviceNodesDriver>::new();
    node.fake().character_node("/dev/ttyUSB0", 188, 0);
    node.config(json!({"pools": [{"name": "serial", "paths": ["/dev/ttyUSB*"]}]}));
    let inventory = node.discover().unwrap();
    assert_eq!(
        inventory
            .device("serial", "ttyusb0")
            .unwrap()
            .attribute_value("subsystem"),
        None
    );
}

#[test]
fn colliding_names_differ_overlapping_globs_deduplicate() {
    let node = Harness::<DeviceNodesDriver>::new();
    node.fake()
        .character_node("/dev/snd/a-b", 116, 1)
        .character_node("/dev/snd/a_b", 116, 2);
    node.config(json!({"pools": [{"name": "p", "paths": ["/dev/snd/*", "/dev/snd/a*"]}]}));
    let inventory = node.discover().unwrap();
    let names: Vec<_> = inventory.pools[0]
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(names.len(), 2);
    assert_eq!(names[0], "snd-a-b");
    assert!(names[1].starts_with("snd-a-b-"), "{names:?}");
}

#[test]
fn claim_gets_nodes_permissions_and_environment() {
    let node = node();
    let claim = Claim::new("default", "demo", "uid")
        .device("fuse", "misc", "fuse")
        .device("tun", "misc", "net-tun");
    let prepared = node.prepare(&claim).unwrap();
    let tun = &prepared.devices[1].edits;
    assert_eq!(
        tun.env,
        [(
            "NODEDOCK_DEVICE_NET_TUN".to_owned(),
            "/dev/net/tun".to_owned()
        )]
    );
    assert_eq!(
        (
            tun.device_nodes[0].path.as_str(),
            tun.device_nodes[0].access
        ),
        ("/dev/net/tun", NodeAccess::READ_WRITE)
    );
    assert_eq!(
        node.prepare(&claim),
        Ok(prepared),
        "a repeated call comes to the same end"
    );
    node.unprepare("uid").unwrap();
    node.unprepare("uid").unwrap();
}

#[test]
fn pool_permissions_and_environment_reach_container() {
    let node = Harness::<DeviceNodesDriver>::new();
    node.fake().character_node("/dev/hwrng", 10, 183);
    node.config(json!({"pools": [{
        "name": "p", "paths": ["/dev/hwrng"], "permissions": "r", "env": {"DEVICE_ENTROPY": "hardware"}
    }]}));
    let prepared = node
        .prepare(&Claim::new("n", "c", "u").device("r", "p", "hwrng"))
        .unwrap();
    let edits = &prepared.devices[0].edits;
    assert_eq!(edits.device_nodes[0].access, NodeAccess::READ);
    assert_eq!(
        edits.env[1],
        ("DEVICE_ENTROPY".to_owned(), "hardware".to_owned())
    );
}

#[test]
fn what_is_gone_is_not_found() {
    let node = node();
    node.fake().remove("/dev/kvm");
    let gone = Claim::new("n", "c", "u").device("r", "misc", "kvm");
    let problem = node.prepare(&gone).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::NotFound, "no-such-device")
    );
    assert!(node.discover().unwrap().device("misc", "kvm").is_none());
    let nowhere = Claim::new("n", "c", "u").device("r", "nowhere", "kvm");
    assert_eq!(node.prepare(&nowhere).unwrap_err().code, "no-such-pool");
}

#[test]
fn glob_beyond_requested_capabilities_is_denied() {
    let node = node();
    node.config(json!({"pools": [{"name": "p", "paths": ["/dev/tty*"]}]}));
    let problem = node.discover().unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Denied);
    assert!(problem.message.contains("driver udev"), "{problem}");
}

#[test]
fn no_config_is_no_devices() {
    assert_eq!(
        Harness::<DeviceNodesDriver>::new()
            .discover()
            .unwrap()
            .pools,
        []
    );
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let pool = |pool: Value| json!({ "pools": [pool] });
    let cases = [
        (json!({"pool": []}), "unknown field `pool`"),
        (
            pool(json!({"name": "p", "paths": ["/etc/passwd"]})),
            "not below /dev",
        ),
        (
            pool(json!({"name": "p", "paths": ["/dev/../etc/passwd"]})),
            "not below /dev",
        ),
        (
            pool(json!({"name": "p", "paths": ["/dev/fuse", "/dev/sda"]})),
            "does not request /dev/sda (DEVICE_NODES in src/nodes.rs): the driver block offers such nodes",
        ),
        (pool(json!({"name": "P", "paths": []})), "DNS subdomain"),
        (
            pool(json!({"name": "p", "paths": [], "permissions": "x"})),
            "subset of rwm",
        ),
        (
            pool(json!({"name": "p", "paths": [], "env": {"LD_PRELOAD": "x"}})),
            "DEVICE_",
        ),
        (
            json!({"pools": [{"name": "p", "paths": []}, {"name": "p", "paths": []}]}),
            "twice",
        ),
    ];
    for (config, reason) in cases {
        let problem = DeviceNodesDriver::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
}

#[test]
fn parameters_in_claims_are_refused() {
    assert_eq!(
        DeviceNodesDriver::validate_parameters("{}")
            .unwrap_err()
            .code,
        "no-parameters"
    );
    assert_eq!(
        DeviceNodesDriver::describe().name,
        "device-nodes.nodedock.dev"
    );
}
