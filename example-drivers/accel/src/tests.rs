use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{
    AttributeValue, Claim, Configuration, Device, DeviceHealth, Problem, ProblemKind,
};
use serde_json::{Value, json};

use crate::Accel;

/// Adds an entry of a class below a device, with its node.
fn add_entry(fake: &FakeHost, class: &str, parent: &str, node: &str, numbers: (u32, u32)) {
    let entry = node.rsplit('/').next().unwrap();
    let directory = format!("{parent}/{class}/{entry}");
    fake.file(
        &format!("{directory}/dev"),
        format!("{}:{}\n", numbers.0, numbers.1),
    )
    .link(
        &format!("class/{class}/{entry}"),
        &format!("../../{directory}"),
    )
    .character_node(node, numbers.0, numbers.1);
}

/// Adds a PCI function, and returns its directory.
fn add_function(fake: &FakeHost, address: &str, ids: (&str, &str), driver: &str) -> String {
    let directory = format!("devices/pci0000:00/{address}");
    fake.file(&format!("{directory}/vendor"), format!("{}\n", ids.0))
        .file(&format!("{directory}/device"), format!("{}\n", ids.1))
        .link(
            &format!("bus/pci/devices/{address}"),
            &format!("../../../{directory}"),
        )
        .dir(&format!("bus/pci/drivers/{driver}"))
        .link(
            &format!("{directory}/driver"),
            &format!("../../../bus/pci/drivers/{driver}"),
        );
    directory
}

/// An NPU, the two chips of a Coral card, a Hailo module, an accelerator of two nodes, and an NPU of a board.
fn node() -> Harness<Accel> {
    let node = Harness::new();
    let fake = node.fake();
    let npu = add_function(fake, "0000:00:0b.0", ("0x8086", "0x7d1d"), "intel_vpu");
    add_entry(fake, "accel", &npu, "/dev/accel/accel0", (261, 0));
    for (number, address) in ["0000:02:00.0", "0000:03:00.0"].into_iter().enumerate() {
        let coral = add_function(fake, address, ("0x1ac1", "0x089a"), "apex");
        let minor = u32::try_from(number).unwrap();
        add_entry(
            fake,
            "apex",
            &coral,
            &format!("/dev/apex_{number}"),
            (120, minor),
        );
    }
    let hailo = add_function(fake, "0000:04:00.0", ("0x1e60", "0x2864"), "hailo");
    add_entry(fake, "hailo_chardev", &hailo, "/dev/hailo0", (510, 0));
    let gaudi = add_function(fake, "0000:05:00.0", ("0x1da3", "0x1020"), "habanalabs");
    add_entry(fake, "accel", &gaudi, "/dev/accel/accel1", (261, 1));
    add_entry(
        fake,
        "accel",
        &gaudi,
        "/dev/accel/accel_controlD1",
        (261, 2),
    );
    let board = "devices/platform/soc/fdab0000.npu";
    let tree = "firmware/devicetree/base/soc/npu@fdab0000";
    fake.dir(tree)
        .link(&format!("{board}/of_node"), &format!("/sys/{tree}"));
    add_entry(fake, "accel", board, "/dev/accel/accel2", (261, 3));
    node.config(json!({"pools": [{"name": "all"}]}));
    node
}

fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    match device.attribute_value(name) {
        Some(AttributeValue::Text(text)) => Some(text),
        _ => None,
    }
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../accel.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../accel.config.yaml")).unwrap();
    Accel::validate_config(&config.to_string()).unwrap();
    let node = node();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    let counts = inventory.pools.iter().map(|pool| pool.devices.len());
    assert_eq!(counts.collect::<Vec<_>>(), [2, 1, 3]);
    node.prepare(&Claim::new("n", "c", "u").device("r", "coral", "0000-02-00-0"))
        .unwrap();
}

#[test]
fn accelerators_are_named_by_address() {
    let inventory = node().discover().unwrap();
    let names = inventory.pools[0].devices.iter();
    assert_eq!(
        names.map(|device| device.name.as_str()).collect::<Vec<_>>(),
        [
            "0000-00-0b-0",
            "0000-02-00-0",
            "0000-03-00-0",
            "0000-04-00-0",
            "0000-05-00-0",
            "platform-fdab0000-npu"
        ]
    );
    let coral = inventory.device("all", "0000-02-00-0").unwrap();
    for (name, value) in [
        ("class", "apex"),
        ("driver", "apex"),
        ("vendor", "0x1ac1"),
        ("device", "0x089a"),
        ("path", "pci-0000:02:00.0"),
    ] {
        assert_eq!(text(coral, name), Some(value), "{name}");
    }
    assert_eq!(coral.identity, ["pci:0000:02:00.0"]);
    let board = inventory.device("all", "platform-fdab0000-npu").unwrap();
    assert_eq!(board.identity, ["dev:/dev/accel/accel2"]);
    assert_eq!(text(board, "vendor"), None);
}

#[test]
fn container_gets_all_nodes() {
    let node = node();
    for (device, paths) in [
        ("0000-00-0b-0", "/dev/accel/accel0"),
        ("0000-03-00-0", "/dev/apex_1"),
        ("0000-04-00-0", "/dev/hailo0"),
        (
            "0000-05-00-0",
            "/dev/accel/accel1,/dev/accel/accel_controlD1",
        ),
    ] {
        let claim = Claim::new("n", "c", "u").device("r", "all", device);
        let edits = node.prepare(&claim).unwrap().devices.remove(0).edits;
        let variable = format!("ACCEL_ALL_{}", device.replace('-', "_").to_uppercase());
        assert_eq!(edits.env, [(variable, paths.to_owned())]);
        let nodes = edits.device_nodes.iter().map(|node| node.path.as_str());
        assert_eq!(nodes.collect::<Vec<_>>().join(","), paths);
    }
}

/// The kernel counts accelerators in the order in which it finds them.
#[test]
fn numbers_are_in_no_name() {
    let node = node();
    let before = node.discover().unwrap();
    let fake = node.fake();
    for (number, address) in [(1, "0000:02:00.0"), (0, "0000:03:00.0")] {
        let parent = format!("devices/pci0000:00/{address}");
        fake.remove(&format!("{parent}/apex"));
        add_entry(
            fake,
            "apex",
            &parent,
            &format!("/dev/apex_{number}"),
            (120, number),
        );
    }
    assert_eq!(node.discover().unwrap(), before);
    let claim = Claim::new("n", "c", "u").device("r", "all", "0000-02-00-0");
    let edits = node.prepare(&claim).unwrap().devices.remove(0).edits;
    assert_eq!(edits.device_nodes[0].path, "/dev/apex_1");
}

#[test]
fn what_is_not_offered_is_not_found() {
    let node = node();
    node.config(
        json!({"pools": [{"name": "all", "select": [{"vendor": "0x8086"}, {"driver": "hailo*"}]}]}),
    );
    assert_eq!(node.discover().unwrap().pools[0].devices.len(), 2);
    let claim = Claim::new("n", "c", "u").device("r", "all", "0000-02-00-0");
    let problem = node.prepare(&claim).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::NotFound, "no-such-device")
    );
    let config = json!({"pools": [{"name": "p", "select": [{"serial": "1"}]}]});
    let problem = Accel::validate_config(&config.to_string()).unwrap_err();
    assert!(
        problem.message.contains("none of class, device"),
        "{problem}"
    );
    assert_eq!(Harness::<Accel>::new().discover().unwrap().pools, []);
}

#[test]
fn accelerators_report_their_health() {
    let node = node();
    let devices = node.discover().unwrap().pools.remove(0).devices;
    let devices: Vec<_> = devices.into_iter().map(|device| device.name).collect();
    let check = |name: &str, fault: &str| {
        let expected = devices.iter().map(|device| match device == name {
            true => DeviceHealth::unhealthy("all", device, fault),
            false => DeviceHealth::healthy("all", device),
        });
        assert_eq!(node.check().unwrap(), expected.collect::<Vec<_>>());
    };
    let (fake, pci) = (node.fake(), "devices/pci0000:00");
    let coral = format!("{pci}/0000:02:00.0/apex/apex_0/status");
    let gaudi = format!("{pci}/0000:05:00.0");
    for entry in ["accel1", "accel_controlD1"] {
        fake.link(&format!("{gaudi}/accel/{entry}/device"), "../..");
    }
    fake.file(&coral, "ALIVE\n")
        .file(&format!("{gaudi}/status"), "in reset\n");
    check("none", "");
    fake.file(&coral, "LAMED\n");
    check("0000-02-00-0", "its kernel driver says: LAMED");
    fake.file(&coral, "ALIVE\n")
        .file(&format!("{gaudi}/status"), "needs reset\n");
    check("0000-05-00-0", "its kernel driver says: needs reset");
    fake.file(&format!("{gaudi}/status"), "operational\n");
    let power = format!("{pci}/0000:00:0b.0/power/runtime_status");
    fake.file(&power, "error\n");
    check(
        "0000-00-0b-0",
        "the kernel failed to change the power state of 0000:00:0b.0 (power/runtime_status is error)",
    );
    fake.file(&power, "suspended\n")
        .character_node("/dev/hailo0", 510, 9);
    check(
        "0000-04-00-0",
        "/dev/hailo0 has the numbers 510:9, and the device has 510:0",
    );
    let failed = Problem::unavailable("io-error", "no memory");
    fake.fail("class/apex/apex_0/status", failed.clone());
    assert_eq!(node.check(), Err(failed));
}

#[test]
fn failed_read_is_an_error() {
    let node = node();
    for path in [
        "class/apex/apex_0/dev",
        "class/hailo_chardev/hailo0",
        "bus/pci/devices/0000:00:0b.0/vendor",
    ] {
        let failed = Problem::unavailable("io-error", "no memory");
        node.fake().fail(path, failed.clone());
        assert_eq!(node.discover(), Err(failed), "{path}");
        node.fake().heal(path);
    }
    let gone = Problem::not_found("no-such-path", "it is gone");
    node.fake().fail("class/apex/apex_0", gone);
    assert_eq!(node.discover().unwrap().pools[0].devices.len(), 5);
}
