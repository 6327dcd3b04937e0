mod addresses;
pub(crate) mod tree;

use std::collections::BTreeMap;

use nodedock_sdk::testing::{Grant, Harness};
use nodedock_sdk::{
    AttributeValue, Claim, Configuration, ContainerEdits, Device, Driver, HealthState, Inventory,
    LeftOutDevice, NodeAccess, ParametersSource, Prepared, Problem, ProblemKind, Trigger,
    dns_label,
};
use serde_json::{Value, json};

use crate::Udev;
use tree::{CONTROLLER, Usb, add_board_port, add_class_node, add_root_hub, board_port};

const FTDI: Usb = Usb {
    vendor: "0403",
    product: "6001",
    manufacturer: "FTDI",
    model: "FT232R USB UART",
    serial: "A50285BI",
    ..Usb::at("1-2.3", 5)
};
const CP210X: Usb = Usb {
    vendor: "10c4",
    product: "ea60",
    manufacturer: "Silicon Labs",
    model: "CP2102 USB to UART Bridge Controller",
    serial: "0001",
    ..Usb::at("1-1", 6)
};
/// Has no serial number, as most of them.
const CH341: Usb = Usb {
    vendor: "1a86",
    product: "7523",
    model: "USB Serial",
    ..Usb::at("1-4.1", 7)
};
const WEBCAM: Usb = Usb {
    vendor: "046d",
    product: "0825",
    model: "Webcam C270",
    serial: "2F3A4B10",
    ..Usb::at("1-5", 8)
};
const MODEM: Usb = Usb {
    vendor: "1e0e",
    product: "9001",
    manufacturer: "SimTech, Incorporated",
    model: "SimTech, Incorporated",
    serial: "0123456789ABCDEF",
    ..Usb::at("1-6", 9)
};
const KEYBOARD: Usb = Usb {
    vendor: "046d",
    product: "c31c",
    manufacturer: "Logitech",
    model: "USB Keyboard",
    ..Usb::at("1-7", 10)
};

const KEYBOARD_NAME: &str = "usb-046d-c31c-pci-0000-00-14-0-usbv2-0-7-1-0";
const FTDI_NAME: &str = "usb-ftdi-ft232r-usb-uart-a50285bi-if00-port0";

fn pool(kind: &str) -> Value {
    json!({"name": kind, "kind": kind})
}

fn with_pools<const N: usize>(pools: [Value; N]) -> Harness<Udev> {
    let node = Harness::new();
    node.config(json!({"pools": pools.as_slice()}));
    add_root_hub(node.fake(), CONTROLLER, 1, "2.00");
    node
}

/// Every kind of device, and a pool for each kind.
fn full_node() -> Harness<Udev> {
    let node = with_pools(["serial", "video", "usb", "hidraw", "input", "sound"].map(pool));
    let fake = node.fake();
    Usb {
        class: "09",
        ..Usb::at("1-2", 2)
    }
    .plug(fake);
    FTDI.plug(fake)
        .serial_port(fake, 0, 0, "ftdi_sio", "ttyUSB0");
    CP210X
        .plug(fake)
        .serial_port(fake, 0, 0, "cp210x", "ttyUSB1");
    CH341
        .plug(fake)
        .serial_port(fake, 0, 0, "ch341-uart", "ttyUSB2");
    for number in 0..4 {
        MODEM
            .plug(fake)
            .serial_port(fake, number, 0, "option", &format!("ttyUSB{}", 3 + number));
    }
    let camera = WEBCAM.plug(fake).interface(fake, 0, "uvcvideo");
    WEBCAM.interface(fake, 1, "uvcvideo");
    for index in 0..4 {
        let directory = format!("{camera}/video4linux/video{index}");
        fake.file(&format!("{directory}/index"), format!("{index}\n"));
        add_class_node(
            fake,
            "video4linux",
            &directory,
            &format!("/dev/video{index}"),
            (81, index),
        );
    }
    let microphone = WEBCAM.interface(fake, 2, "snd-usb-audio");
    for (minor, entry) in [(5, "pcmC1D0c"), (6, "controlC1")] {
        let directory = format!("{microphone}/sound/card1/{entry}");
        add_class_node(
            fake,
            "sound",
            &directory,
            &format!("/dev/snd/{entry}"),
            (116, minor),
        );
    }
    let keys = KEYBOARD.plug(fake).interface(fake, 0, "usbhid");
    let hid = format!("{keys}/0003:046D:C31C.0001");
    add_class_node(
        fake,
        "hidraw",
        &format!("{hid}/hidraw/hidraw0"),
        "/dev/hidraw0",
        (244, 0),
    );
    add_class_node(
        fake,
        "input",
        &format!("{hid}/input/input12/event12"),
        "/dev/input/event12",
        (13, 76),
    );
    add_class_node(
        fake,
        "input",
        &format!("{hid}/input/input13/event3"),
        "/dev/input/event3",
        (13, 67),
    );
    add_board_port(
        fake,
        "devices/pnp0/00:04/00:04:0/00:04:0.0/tty/ttyS0",
        64,
        "4",
    );
    add_board_port(
        fake,
        "devices/platform/serial8250/serial8250:0/serial8250:0.1/tty/ttyS1",
        65,
        "0",
    );
    add_board_port(
        fake,
        "devices/platform/soc/3f201000.serial/tty/ttyAMA0",
        204,
        "32",
    );
    fake.link(
        "devices/pnp0/00:04/driver",
        "../../../bus/pnp/drivers/serial",
    )
    .dir("bus/pnp/drivers/serial");
    node
}

fn names<'a>(inventory: &'a Inventory, pool: &str) -> Vec<&'a str> {
    let pool = inventory
        .pools
        .iter()
        .find(|candidate| candidate.name == pool)
        .unwrap();
    pool.devices
        .iter()
        .map(|device| device.name.as_str())
        .collect()
}

fn claim(pool: &str, device: &str) -> Claim {
    Claim::new("default", "demo", "uid").device("r", pool, device)
}

fn edits_of(prepared: Result<Prepared, Problem>) -> ContainerEdits {
    prepared.unwrap().devices.remove(0).edits
}

fn paths(edits: &ContainerEdits) -> Vec<&str> {
    edits
        .device_nodes
        .iter()
        .map(|node| node.path.as_str())
        .collect()
}

fn health(node: &Harness<Udev>, pool: &str, device: &str) -> (HealthState, String) {
    let health = node.check().unwrap();
    let found = health
        .into_iter()
        .find(|health| (health.pool.as_str(), health.device.as_str()) == (pool, device));
    let found = found.unwrap_or_else(|| panic!("no health of {pool}/{device}"));
    (found.state, found.message)
}

fn exclude_each_other(one: &Device, other: &Device) -> bool {
    one.identity
        .iter()
        .any(|identity| other.identity.contains(identity))
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../udev.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../udev.config.yaml")).unwrap();
    Udev::validate_config(&config.to_string()).unwrap();
    let node = full_node();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert_eq!(
        names(&inventory, "serial").len(),
        3,
        "the modem is of none of these vendors"
    );
    assert_eq!(
        names(&inventory, "cameras"),
        ["usb-046d-webcam-c270-2f3a4b10-if00"]
    );
}

#[test]
fn schemas_refuse_unknown_keys() {
    let config: Value = serde_json::from_str(&Udev::config_schema().unwrap()).unwrap();
    assert_eq!(config["additionalProperties"], false);
    let pools = &config["properties"]["pools"]["items"];
    assert_eq!(pools["additionalProperties"], false);
    assert_eq!(
        pools["properties"]["select"]["items"]["additionalProperties"],
        false
    );
    let parameters: Value = serde_json::from_str(&Udev::parameters_schema().unwrap()).unwrap();
    assert_eq!(parameters["additionalProperties"], false);
}

#[test]
fn no_config_is_no_devices() {
    assert_eq!(Harness::<Udev>::new().discover().unwrap().pools, []);
}

#[test]
fn devices_are_named_like_udev_links() {
    let inventory = full_node().discover().unwrap();
    assert_eq!(
        names(&inventory, "serial"),
        [
            "platform-soc-3f201000-serial-port0",
            "pnp0-00-04-port0",
            "usb-10c4-ea60-0001-if00-port0",
            "usb-1a86-7523-pci-0000-00-14-0-usbv2-0-4-1-1-0-port0",
            "usb-1e0e-9001-0123456789abcdef-if00-port0",
            "usb-1e0e-9001-0123456789abcdef-if01-port0",
            "usb-1e0e-9001-0123456789abcdef-if02-port0",
            "usb-1e0e-9001-0123456789abcdef-if03-port0",
            FTDI_NAME,
        ]
    );
    assert_eq!(
        names(&inventory, "video"),
        ["usb-046d-webcam-c270-2f3a4b10-if00"]
    );
    assert_eq!(
        names(&inventory, "sound"),
        ["usb-046d-webcam-c270-2f3a4b10-if02"]
    );
    assert_eq!(names(&inventory, "hidraw"), [KEYBOARD_NAME]);
    assert_eq!(names(&inventory, "input"), [KEYBOARD_NAME]);
    assert_eq!(names(&inventory, "usb").len(), 6, "hubs are not offered");
}

#[test]
fn pool_decides_how_devices_are_named() {
    let node = full_node();
    node.config(json!({"pools": [{"name": "serial", "kind": "serial", "nameBy": "port", "select": [{"vendor": "0403"}]}]}));
    assert_eq!(
        names(&node.discover().unwrap(), "serial"),
        ["pci-0000-00-14-0-usbv2-0-2-3-1-0-port0"]
    );
    node.config(json!({"pools": [{"name": "serial", "kind": "serial", "nameBy": "node", "select": [{"driver": "serial"}]}]}));
    assert_eq!(names(&node.discover().unwrap(), "serial"), ["ttys0"]);
}

#[test]
fn device_has_its_attributes_and_location() {
    let inventory = full_node().discover().unwrap();
    let text = |text: &str| AttributeValue::Text(text.into());
    let ftdi = inventory.device("serial", FTDI_NAME).unwrap();
    for (name, value) in [
        ("subsystem", text("tty")),
        ("vendor", text("0403")),
        ("product", text("6001")),
        ("serial", text("A50285BI")),
        ("manufacturer", text("FTDI")),
        ("model", text("FT232R USB UART")),
        ("port", text("1-2.3")),
        ("path", text("pci-0000:00:14.0-usbv2-0:2.3:1.0-port0")),
        ("driver", text("ftdi_sio")),
        ("interface", AttributeValue::Int(0)),
        ("speedKbps", AttributeValue::Int(12_000)),
    ] {
        assert_eq!(ftdi.attribute_value(name), Some(&value), "{name}");
    }
    let board = inventory.device("serial", "pnp0-00-04-port0").unwrap();
    assert_eq!(board.attribute_value("driver"), Some(&text("serial")));
    assert_eq!(board.attribute_value("vendor"), None);
    assert_eq!(board.identity, ["sys:pnp0/00:04/ttyS0", "dev:/dev/ttyS0"]);
}

#[test]
fn ungranted_serial_number_is_not_published() {
    let node = full_node();
    node.fake().fail(
        "bus/usb/devices/1-2.3/serial",
        Problem::denied("not-granted", "no"),
    );
    let inventory = node.discover().unwrap();
    let ftdi = inventory
        .device(
            "serial",
            "usb-0403-6001-pci-0000-00-14-0-usbv2-0-2-3-1-0-port0",
        )
        .unwrap();
    assert_eq!(ftdi.attribute_value("serial"), None);
    assert_eq!(ftdi.attribute_value("vendor"), Some(&"0403".into()));
}

#[test]
fn raw_device_excludes_its_functions() {
    let inventory = full_node().discover().unwrap();
    let raw = inventory
        .device("usb", "usb-1e0e-9001-0123456789abcdef")
        .unwrap();
    let ports: Vec<_> = inventory.pools[0]
        .devices
        .iter()
        .filter(|device| device.name.contains("1e0e"))
        .collect();
    assert_eq!(ports.len(), 4);
    for (index, port) in ports.iter().enumerate() {
        assert!(exclude_each_other(raw, port), "{}", port.name);
        assert!(
            ports[..index]
                .iter()
                .all(|other| !exclude_each_other(port, other)),
            "{}",
            port.name
        );
    }
    let ftdi = inventory.device("serial", FTDI_NAME).unwrap();
    assert!(!exclude_each_other(raw, ftdi));
    assert_eq!(ftdi.identity, ["usb:1-2.3:1.0", "dev:/dev/ttyUSB0"]);
    let keyboard = KEYBOARD_NAME;
    let (hidraw, input) = (
        inventory.device("hidraw", keyboard),
        inventory.device("input", keyboard),
    );
    assert!(
        exclude_each_other(hidraw.unwrap(), input.unwrap()),
        "one function, two subsystems"
    );
}

#[test]
fn ports_of_interface_have_own_identities() {
    let node = with_pools([pool("serial"), pool("usb")]);
    let adapter = Usb {
        vendor: "110a",
        product: "1410",
        serial: "X",
        ..Usb::at("1-1", 4)
    };
    for port in 0..4 {
        adapter.plug(node.fake()).serial_port(
            node.fake(),
            0,
            port,
            "mxuport",
            &format!("ttyUSB{port}"),
        );
    }
    let inventory = node.discover().unwrap();
    let (ports, raw) = (&inventory.pools[0].devices, &inventory.pools[1].devices[0]);
    let identities: Vec<_> = ports.iter().map(|port| port.identity[0].as_str()).collect();
    assert_eq!(
        identities,
        [
            "usb:1-1:1.0",
            "usb:1-1:1.0-port1",
            "usb:1-1:1.0-port2",
            "usb:1-1:1.0-port3"
        ]
    );
    assert!(ports.iter().all(|port| exclude_each_other(raw, port)));
}

#[test]
fn device_of_many_functions_is_whole() {
    let node = with_pools([pool("serial"), pool("usb")]);
    let many = Usb {
        serial: "many",
        ..Usb::at("1-1", 4)
    };
    for number in 0..20 {
        many.plug(node.fake()).serial_port(
            node.fake(),
            number,
            0,
            "option",
            &format!("ttyUSB{number}"),
        );
    }
    let inventory = node.discover().unwrap();
    assert_eq!(inventory.pools[0].devices.len(), 20);
    assert!(
        inventory.pools[0]
            .devices
            .iter()
            .all(|device| device.identity[0] == "usb:1-1")
    );
    assert_eq!(inventory.pools[1].devices[0].identity[0], "usb:1-1");
}

#[test]
fn first_matching_pool_gets_the_device() {
    let node = full_node();
    node.config(json!({"pools": [
        {"name": "modem", "kind": "serial", "select": [{"vendor": "1E0E", "product": "9001"}], "extendedResource": "example.com/modem"},
        {"name": "by-serial", "kind": "serial", "select": [{"serial": "A5*"}], "shared": true},
        {"name": "by-port", "kind": "serial", "select": [{"port": "*-4.?"}]},
        {"name": "by-path", "kind": "usb", "select": [{"port": "pci-0000:00:14.0-usbv2-0:5"}]},
        {"name": "by-text", "kind": "serial", "select": [{"manufacturer": "Silicon*", "model": "CP2102*", "driver": "cp210x"}]},
        {"name": "board", "kind": "serial", "select": [{"port": "pnp0/*"}]},
        {"name": "rest", "kind": "serial"},
    ]}));
    let inventory = node.discover().unwrap();
    let counts: Vec<_> = inventory
        .pools
        .iter()
        .map(|pool| pool.devices.len())
        .collect();
    assert_eq!(counts, [4, 1, 1, 1, 1, 1, 1]);
    assert_eq!(
        inventory.pools[0].extended_resource.as_deref(),
        Some("example.com/modem")
    );
    assert!(inventory.pools[1].devices[0].allow_multiple_allocations);
    assert!(!inventory.pools[2].devices[0].allow_multiple_allocations);
}

#[test]
fn terminals_phantoms_and_consoles_are_excluded() {
    let node = with_pools(["serial", "video", "sound", "input"].map(pool));
    let fake = node.fake();
    add_board_port(fake, "devices/platform/serial8250/tty/ttyS2", 66, "0");
    add_board_port(fake, "devices/virtual/tty/ttyS9", 67, "4");
    add_board_port(fake, "devices/pnp0/00:04/tty/ttyS0", 64, "4");
    fake.file("class/tty/console/active", "tty0 ttyS0\n");
    add_class_node(fake, "tty", "devices/virtual/tty/tty1", "/dev/tty1", (4, 1));
    add_class_node(
        fake,
        "video4linux",
        "devices/virtual/video4linux/video9",
        "/dev/video9",
        (81, 9),
    );
    add_class_node(
        fake,
        "sound",
        "devices/virtual/sound/timer",
        "/dev/snd/timer",
        (116, 33),
    );
    add_class_node(
        fake,
        "input",
        "devices/platform/i8042/serio1/input/input2/mouse0",
        "/dev/input/mouse0",
        (13, 32),
    );
    let inventory = node.discover().unwrap();
    assert!(
        inventory.pools.iter().all(|pool| pool.devices.is_empty()),
        "{inventory:?}"
    );
    let left_out = node.left_out().unwrap();
    assert_eq!(left_out.len(), 1, "the others are no ports: {left_out:?}");
    assert_eq!(left_out[0].name, "/dev/ttyS0");
    assert!(left_out[0].reason.contains("its console"), "{left_out:?}");
    node.config(json!({"pools": [{"name": "a", "kind": "serial", "select": [{"port": "usb-*"}]}]}));
    assert_eq!(node.left_out().unwrap(), [], "no pool is for it");
}

#[test]
fn serial_ports_need_no_known_name() {
    let node = with_pools([pool("serial")]);
    let fake = node.fake();
    let exar = Usb {
        vendor: "04e2",
        product: "1411",
        serial: "X1",
        ..Usb::at("1-1", 4)
    };
    let directory = exar.plug(fake).interface(fake, 0, "cdc_xr_usb_serial");
    add_class_node(
        fake,
        "tty",
        &format!("{directory}/tty/ttyXRUSB0"),
        "/dev/ttyXRUSB0",
        (266, 0),
    );
    // Four ports of one interface, which its kernel driver does not count.
    let wch = Usb {
        vendor: "1a86",
        product: "55d5",
        serial: "W1",
        ..Usb::at("1-2", 5)
    };
    let directory = wch.plug(fake).interface(fake, 0, "usb_ch343");
    for number in 8..12 {
        add_class_node(
            fake,
            "tty",
            &format!("{directory}/tty/ttyCH343USB{number}"),
            &format!("/dev/ttyCH343USB{number}"),
            (170, number),
        );
    }
    let moxa = Usb {
        vendor: "110a",
        product: "1150",
        serial: "M1",
        ..Usb::at("1-3", 6)
    };
    moxa.plug(fake)
        .serial_port(fake, 0, 0, "mxu11x0", "ttyMXUSB0");
    let port = "devices/platform/soc/40010000.serial";
    add_board_port(
        fake,
        &format!("{port}/40010000.serial:0/40010000.serial:0.0/tty/ttySTM0"),
        0,
        "32",
    );
    add_board_port(
        fake,
        "devices/platform/soc/c81004c0.serial/tty/ttyAML0",
        1,
        "32",
    );
    let other = "devices/pci0000:00/0000:00:1c.0/tty/acme0";
    add_class_node(fake, "tty", other, "/dev/acme0", (240, 0));
    let inventory = node.discover().unwrap();
    assert_eq!(
        names(&inventory, "serial"),
        [
            "platform-soc-40010000-serial-port0",
            "platform-soc-c81004c0-serial-port0",
            "usb-04e2-1411-x1-if00",
            "usb-110a-1150-m1-if00-port0",
            "usb-1a86-55d5-w1-if00-port0",
            "usb-1a86-55d5-w1-if00-port1",
            "usb-1a86-55d5-w1-if00-port2",
            "usb-1a86-55d5-w1-if00-port3",
        ]
    );
    let edits = edits_of(node.prepare(&claim("serial", "usb-1a86-55d5-w1-if00-port3")));
    assert_eq!(paths(&edits), ["/dev/ttyCH343USB11"]);
    let reason = "the driver requests no nodes of this name";
    assert_eq!(
        node.left_out().unwrap(),
        [LeftOutDevice::new("/dev/acme0", reason)]
    );
}

#[test]
fn terminal_without_bus_is_no_port() {
    let node = with_pools([pool("serial")]);
    let adapter = Usb::at("1-7", 4);
    let directory = adapter.plug(node.fake()).interface(node.fake(), 0, "btusb");
    let channel = format!("{directory}/bluetooth/hci0/hci0:11/rfcomm0");
    add_class_node(node.fake(), "tty", &channel, "/dev/rfcomm0", (216, 0));
    let gadget = "devices/virtual/tty/ttyGS0";
    add_class_node(node.fake(), "tty", gadget, "/dev/ttyGS0", (236, 0));
    assert_eq!(names(&node.discover().unwrap(), "serial"), [""; 0]);
}

#[test]
fn equal_devices_are_named_by_port() {
    let node = with_pools([pool("serial")]);
    let fake = node.fake();
    CP210X
        .plug(fake)
        .serial_port(fake, 0, 0, "cp210x", "ttyUSB0");
    let alone = "usb-10c4-ea60-0001-if00-port0";
    assert_eq!(names(&node.discover().unwrap(), "serial"), [alone]);
    let twin = Usb {
        name: "1-3",
        number: 20,
        ..CP210X
    };
    twin.plug(fake).serial_port(fake, 0, 0, "cp210x", "ttyUSB1");
    assert_eq!(
        names(&node.discover().unwrap(), "serial"),
        [
            "usb-10c4-ea60-pci-0000-00-14-0-usbv2-0-1-1-0-port0",
            "usb-10c4-ea60-pci-0000-00-14-0-usbv2-0-3-1-0-port0"
        ]
    );
    assert_eq!(
        node.prepare(&claim("serial", alone)).unwrap_err().code,
        "no-such-device"
    );
}

#[test]
fn serials_differing_in_case_are_twins() {
    let node = with_pools([pool("serial")]);
    for (index, serial) in ["ab-1", "AB_1", "ab.1", "ab1"].into_iter().enumerate() {
        let name = ["1-1", "1-2", "1-3", "1-4"][index];
        let device = Usb {
            serial,
            name,
            number: 10,
            ..FTDI
        };
        device.plug(node.fake()).serial_port(
            node.fake(),
            0,
            0,
            "ftdi_sio",
            &format!("ttyUSB{index}"),
        );
    }
    let inventory = node.discover().unwrap();
    let by_id = names(&inventory, "serial")
        .into_iter()
        .filter(|name| name.starts_with("usb-ftdi"))
        .count();
    assert_eq!((names(&inventory, "serial").len(), by_id), (4, 1));
}

#[test]
fn devices_with_equal_labels_stay_distinct() {
    let node = with_pools([pool("video")]);
    for (index, place) in [(0, "a.b"), (1, "a-b"), (2, "c")] {
        let directory = format!("devices/platform/{place}/video4linux/video{index}");
        add_class_node(
            node.fake(),
            "video4linux",
            &directory,
            &format!("/dev/video{index}"),
            (81, index),
        );
    }
    let inventory = node.discover().unwrap();
    let names = names(&inventory, "video");
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(names[2], "platform-c");
    for name in &names[..2] {
        assert!(name.starts_with("platform-a-b-"), "{name}");
        node.prepare(&claim("video", name)).unwrap();
    }
}

#[test]
fn container_gets_node_and_variable() {
    let node = full_node();
    let edits = edits_of(node.prepare(&claim("serial", FTDI_NAME)));
    let variable = "UDEV_SERIAL_USB_FTDI_FT232R_USB_UART_A50285BI_IF00_PORT0";
    assert_eq!(
        edits.env,
        [(variable.to_owned(), "/dev/ttyUSB0".to_owned())]
    );
    let [tty] = &edits.device_nodes[..] else {
        panic!("{edits:?}")
    };
    assert_eq!(
        (tty.path.as_str(), tty.host_path.as_deref(), tty.access),
        ("/dev/ttyUSB0", None, NodeAccess::READ_WRITE)
    );
    assert_eq!(
        (tty.major, tty.minor),
        (Some(188), Some(0)),
        "the host refuses another node"
    );
    assert_eq!(
        edits_of(node.prepare(&claim("serial", FTDI_NAME))),
        edits,
        "a repeated call has the same result"
    );
    node.unprepare("uid").unwrap();
    node.unprepare("uid").unwrap();
}

#[test]
fn camera_capture_node_comes_first() {
    let node = full_node();
    let device = "usb-046d-webcam-c270-2f3a4b10-if00";
    node.fake().file(
        &format!("{}/video4linux/video0/index", WEBCAM.interface_directory(0)),
        "3\n",
    );
    node.fake().file(
        &format!("{}/video4linux/video3/index", WEBCAM.interface_directory(0)),
        "0\n",
    );
    let edits = edits_of(node.prepare(&claim("video", device)));
    assert_eq!(
        paths(&edits),
        ["/dev/video3", "/dev/video1", "/dev/video2", "/dev/video0"]
    );
    assert_eq!(edits.env[0].1, "/dev/video3");
}

#[test]
fn devices_bring_all_of_their_nodes() {
    let node = full_node();
    let sound = edits_of(node.prepare(&claim("sound", "usb-046d-webcam-c270-2f3a4b10-if02")));
    assert_eq!(paths(&sound), ["/dev/snd/controlC1", "/dev/snd/pcmC1D0c"]);
    let keyboard = KEYBOARD_NAME;
    assert_eq!(
        paths(&edits_of(node.prepare(&claim("input", keyboard)))),
        ["/dev/input/event3", "/dev/input/event12"]
    );
    assert_eq!(
        paths(&edits_of(node.prepare(&claim("hidraw", keyboard)))),
        ["/dev/hidraw0"]
    );
    let raw = edits_of(node.prepare(&claim("usb", "usb-ftdi-ft232r-usb-uart-a50285bi")));
    assert_eq!(paths(&raw), ["/dev/bus/usb/001/005"]);
}

#[test]
fn pool_sets_container_path_and_variable() {
    let node = full_node();
    node.config(json!({"pools": [{
        "name": "modem", "kind": "serial", "select": [{"vendor": "0403"}],
        "containerPath": "/dev/ttyMODEM", "env": "UDEV_MODEM",
    }]}));
    let edits = edits_of(node.prepare(&claim("modem", FTDI_NAME)));
    assert_eq!(paths(&edits), ["/dev/ttyUSB0", "/dev/ttyMODEM"]);
    assert_eq!(
        edits.device_nodes[1].host_path.as_deref(),
        Some("/dev/ttyUSB0")
    );
    assert_eq!(
        edits.env[1],
        ("UDEV_MODEM".to_owned(), "/dev/ttyMODEM".to_owned())
    );
}

#[test]
fn claim_parameters_override_class_and_pool() {
    let node = full_node();
    node.config(
        json!({"pools": [{"name": "serial", "kind": "serial", "containerPath": "/dev/pool"}]}),
    );
    let class = claim("serial", FTDI_NAME).with_parameters(
        ParametersSource::DeviceClass,
        [],
        r#"{"containerPath": "/dev/class"}"#,
    );
    assert_eq!(
        paths(&edits_of(node.prepare(&class))),
        ["/dev/ttyUSB0", "/dev/class"]
    );
    let own = class.with_parameters(
        ParametersSource::Claim,
        ["r"],
        r#"{"containerPath": "/dev/ttyUSB0"}"#,
    );
    assert_eq!(
        paths(&edits_of(node.prepare(&own))),
        ["/dev/ttyUSB0"],
        "the node is there already"
    );
}

#[test]
fn devices_in_request_need_different_paths() {
    let node = full_node();
    node.config(
        json!({"pools": [{"name": "serial", "kind": "serial", "containerPath": "/dev/port"}]}),
    );
    let two = |other: &str| claim("serial", FTDI_NAME).device(other, "serial", "pnp0-00-04-port0");
    let problem = node.prepare(&two("r")).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Invalid, "container-path-twice")
    );
    node.prepare(&two("for-another-container")).unwrap();
    // The stable path of one device is the node of the other.
    let other = claim("serial", FTDI_NAME)
        .device("r", "serial", "pnp0-00-04-port0")
        .with_parameters(
            ParametersSource::Claim,
            [],
            r#"{"containerPath": "/dev/ttyS0"}"#,
        );
    assert_eq!(
        node.prepare(&other).unwrap_err().code,
        "container-path-twice"
    );
}

#[test]
fn invalid_parameters_are_refused_with_reason() {
    for (parameters, reason) in [
        (
            r#"{"path": "/dev/a"}"#,
            "unknown field `path`, expected `containerPath` at line 1 column 7",
        ),
        (
            r#"{"containerPath": "/etc/passwd"}"#,
            "not a path below /dev",
        ),
        (
            r#"{"containerPath": "/dev/../etc/passwd"}"#,
            "not a path below /dev",
        ),
        (r#"{"containerPath": "/dev/a b"}"#, "not a path below /dev"),
        (
            r#"{"containerPath": "/dev/null"}"#,
            "the container's own /dev",
        ),
        (
            r#"{"containerPath": "/dev/pts/0"}"#,
            "the container's own /dev",
        ),
        (
            r#"{"containerPath": "/dev/stdin"}"#,
            "the container's own /dev",
        ),
    ] {
        let problem = Udev::validate_parameters(parameters).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
    Udev::validate_parameters("{}").unwrap();
    Udev::validate_parameters(r#"{"containerPath": "/dev/serial/modem-1"}"#).unwrap();
    let bad = claim("serial", FTDI_NAME).with_parameters(
        ParametersSource::Claim,
        [],
        r#"{"containerPath": "/x"}"#,
    );
    assert_eq!(
        full_node().prepare(&bad).unwrap_err().code,
        "bad-parameters"
    );
}

#[test]
fn replugged_device_keeps_its_name() {
    let node = full_node();
    node.prepare(&claim("serial", FTDI_NAME)).unwrap();
    FTDI.unplug(node.fake());
    node.fake()
        .remove("class/tty/ttyUSB0")
        .remove("/dev/ttyUSB0");
    let event = Trigger::Events(vec![FTDI.directory()]);
    assert!(
        node.discover_on(&event)
            .unwrap()
            .device("serial", FTDI_NAME)
            .is_none()
    );
    let problem = node.prepare(&claim("serial", FTDI_NAME)).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::NotFound, "no-such-device")
    );

    let again = Usb {
        name: "1-3",
        number: 30,
        ..FTDI
    };
    again
        .plug(node.fake())
        .serial_port(node.fake(), 0, 0, "ftdi_sio", "ttyUSB9");
    assert!(
        node.discover_on(&event)
            .unwrap()
            .device("serial", FTDI_NAME)
            .is_some()
    );
    assert_eq!(
        paths(&edits_of(node.prepare(&claim("serial", FTDI_NAME)))),
        ["/dev/ttyUSB9"]
    );
}

#[test]
fn unplugged_prepared_device_is_unhealthy() {
    let node = full_node();
    node.prepare(&claim("serial", FTDI_NAME)).unwrap();
    assert_eq!(
        health(&node, "serial", FTDI_NAME),
        (HealthState::Healthy, String::new())
    );
    FTDI.unplug(node.fake());
    node.fake()
        .remove("class/tty/ttyUSB0")
        .remove("/dev/ttyUSB0");
    assert_eq!(
        health(&node, "serial", FTDI_NAME),
        (HealthState::Unhealthy, "the device is unplugged".to_owned())
    );
    FTDI.plug(node.fake())
        .serial_port(node.fake(), 0, 0, "ftdi_sio", "ttyUSB0");
    assert_eq!(health(&node, "serial", FTDI_NAME).0, HealthState::Healthy);
    node.unprepare("uid").unwrap();
    FTDI.unplug(node.fake());
    assert!(
        node.check()
            .unwrap()
            .iter()
            .all(|health| health.device != FTDI_NAME),
        "no claim, no device"
    );
}

#[test]
fn device_with_changed_node_is_unhealthy() {
    let node = full_node();
    node.prepare(&claim("serial", FTDI_NAME)).unwrap();
    FTDI.unplug(node.fake());
    FTDI.plug(node.fake())
        .serial_port(node.fake(), 0, 0, "ftdi_sio", "ttyUSB9");
    let (state, message) = health(&node, "serial", FTDI_NAME);
    assert_eq!(state, HealthState::Unhealthy);
    assert!(
        message.contains("/dev/ttyUSB9") && message.contains("/dev/ttyUSB0"),
        "{message}"
    );
    node.prepare(&claim("serial", FTDI_NAME)).unwrap();
    assert_eq!(health(&node, "serial", FTDI_NAME).0, HealthState::Healthy);
}

#[test]
fn twin_changes_name_but_not_health() {
    let node = with_pools([pool("serial")]);
    CP210X
        .plug(node.fake())
        .serial_port(node.fake(), 0, 0, "cp210x", "ttyUSB0");
    let name = "usb-10c4-ea60-0001-if00-port0";
    node.prepare(&claim("serial", name)).unwrap();
    let twin = Usb {
        name: "1-3",
        number: 20,
        ..CP210X
    };
    twin.plug(node.fake())
        .serial_port(node.fake(), 0, 0, "cp210x", "ttyUSB1");
    let all = node.check().unwrap();
    assert!(
        all.iter()
            .all(|health| health.state == HealthState::Healthy),
        "{all:?}"
    );
    CP210X.unplug(node.fake());
    let (state, message) = health(&node, "serial", name);
    assert_eq!(
        (state, message.contains("/dev/ttyUSB1")),
        (HealthState::Unhealthy, true),
        "{message}"
    );
}

#[test]
fn unreadable_memo_hides_no_other_health() {
    let node = full_node();
    let claim = claim("serial", FTDI_NAME);
    node.fake().claim(nodedock_sdk::ClaimRecord {
        claim,
        memo: b"x".to_vec(),
        ..Default::default()
    });
    assert!(node.check().unwrap().len() > 9);
    assert_eq!(node.fake().log_lines().len(), 1);
}

#[test]
fn node_of_other_device_is_unavailable() {
    let node = full_node();
    let retried = |node: &Harness<Udev>, reason: &str| {
        let problem = node.prepare(&claim("serial", FTDI_NAME)).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Unavailable, "device-changed")
        );
        assert_eq!(problem.retry_after_ms, Some(500));
        assert!(problem.message.contains(reason), "{problem}");
    };
    node.fake().character_node("/dev/ttyUSB0", 188, 7);
    retried(&node, "belongs to another device");
    // The numbers are the same, and the device behind them is not.
    tree::add_node(node.fake(), "/dev/ttyUSB0", (188, 0), &CP210X.directory());
    retried(&node, "belongs to another device");
    node.fake().remove("/dev/ttyUSB0");
    retried(&node, "does not exist");
    let stuck = Problem::unavailable("sysfs-stuck", "no answer");
    node.fake().fail("/dev/ttyUSB0", stuck.clone());
    assert_eq!(node.prepare(&claim("serial", FTDI_NAME)), Err(stuck));
}

#[test]
fn only_vanished_devices_are_skipped() {
    for path in [
        "bus/usb/devices/1-2.3",
        "bus/usb/devices/1-2.3/idVendor",
        "bus/usb/devices/1-2.3/serial",
        "bus/usb/devices/1-2.3:1.0/ttyUSB0/port_number",
        "bus/usb/devices/1-2.3:1.0/driver",
        "class/tty/ttyUSB0",
        "class/tty/ttyUSB0/dev",
        "class/tty/ttyUSB0/type",
    ] {
        let node = full_node();
        let failed = Problem::unavailable("io-error", "no memory");
        node.fake().fail(path, failed.clone());
        assert_eq!(node.discover(), Err(failed), "{path}");
        node.fake()
            .fail(path, Problem::unavailable("no-value", "no such device"));
        let inventory = node.discover().unwrap();
        let serial = names(&inventory, "serial");
        assert_eq!(serial.len(), 8, "{path}: {serial:?}");
        assert!(
            !serial
                .iter()
                .any(|name| name.contains("ftdi") || name.contains("0403")),
            "{path}: {serial:?}"
        );
    }
}

#[test]
fn unoffered_devices_are_not_found() {
    let node = full_node();
    for (pool, device, code) in [
        ("other", FTDI_NAME, "no-such-pool"),
        ("usb", FTDI_NAME, "no-such-device"),
        ("serial", "ttyusb0", "no-such-device"),
    ] {
        let problem = node.prepare(&claim(pool, device)).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::NotFound, code)
        );
    }
}

#[test]
fn prepare_reads_only_its_device_kinds() {
    let node = full_node();
    node.fake().fail(
        "class/sound/*",
        Problem::unavailable("sysfs-stuck", "no answer"),
    );
    node.prepare(&claim("serial", FTDI_NAME)).unwrap();
    assert_eq!(node.discover().unwrap_err().code, "sysfs-stuck");
}

#[test]
fn hostile_descriptors_are_sanitized() {
    let long = "x".repeat(255);
    let hostile: [&[u8]; 9] = [
        b"../../etc/passwd\n",
        b"\x00\x01\x1b[31m\x7f\n",
        b"\xff\xfe\xc3\x28\n",
        "\u{202e}\u{200b}\u{feff}\n".as_bytes(),
        "äöü€😀".as_bytes(),
        b"-----",
        b"a\nb\r\nc\td",
        b"$(reboot);'\"`{}[]*?",
        long.as_bytes(),
    ];
    for bytes in hostile {
        let node = with_pools(["serial", "usb"].map(pool));
        let fake = node.fake();
        for (index, name) in ["1-1", "1-2"].into_iter().enumerate() {
            let device = Usb {
                name,
                number: 10 + u32::try_from(index).unwrap(),
                ..FTDI
            };
            device
                .plug(fake)
                .serial_port(fake, 0, 0, "ftdi_sio", &format!("ttyUSB{index}"));
            for file in ["serial", "manufacturer", "product"] {
                fake.file(&format!("{}/{file}", device.directory()), bytes);
            }
        }
        // The harness checks names and attributes against the bounds.
        let inventory = node.discover().unwrap();
        assert_eq!(
            (
                names(&inventory, "serial").len(),
                names(&inventory, "usb").len()
            ),
            (2, 2),
            "{bytes:?}"
        );
        for device in inventory.pools.iter().flat_map(|pool| &pool.devices) {
            for attribute in &device.attributes {
                let AttributeValue::Text(text) = &attribute.value else {
                    continue;
                };
                assert!(
                    !text.is_empty() && !text.contains(char::is_control),
                    "{}: {text:?}",
                    attribute.name
                );
            }
        }
        for name in names(&inventory, "serial") {
            node.prepare(&claim("serial", name)).unwrap();
        }
        assert!(
            node.check()
                .unwrap()
                .iter()
                .all(|health| health.state == HealthState::Healthy)
        );
    }
}

#[test]
fn overlong_serial_number_is_not_published() {
    let node = with_pools([pool("serial")]);
    FTDI.plug(node.fake())
        .serial_port(node.fake(), 0, 0, "ftdi_sio", "ttyUSB0");
    node.fake()
        .file(&format!("{}/serial", FTDI.directory()), "x".repeat(255));
    let inventory = node.discover().unwrap();
    let device = &inventory.pools[0].devices[0];
    assert_eq!(
        (device.attribute_value("serial"), device.name.len()),
        (None, 63)
    );
}

#[test]
fn many_nodes_fit_container_edits() {
    let node = with_pools([pool("input")]);
    let keys = KEYBOARD
        .plug(node.fake())
        .interface(node.fake(), 0, "usbhid");
    for number in 0..100 {
        let directory = format!("{keys}/input/input{number}/event{number}");
        add_class_node(
            node.fake(),
            "input",
            &directory,
            &format!("/dev/input/event{number}"),
            (13, 64 + number),
        );
    }
    let device = KEYBOARD_NAME;
    assert_eq!(
        node.discover()
            .unwrap()
            .device("input", device)
            .unwrap()
            .identity
            .len(),
        16
    );
    assert_eq!(
        edits_of(node.prepare(&claim("input", device)))
            .device_nodes
            .len(),
        32
    );
}

#[test]
fn largest_memo_fits_its_bound() {
    const PORTS: [&str; 8] = ["1-1", "1-2", "1-3", "1-4", "1-5", "1-6", "1-7", "1-8"];
    let pool_name = "p".repeat(128);
    let node = with_pools([json!({"name": pool_name.as_str(), "kind": "input"})]);
    let mut minor = 0;
    for (name, number) in PORTS.into_iter().zip(10..) {
        let device = Usb {
            name,
            number,
            ..KEYBOARD
        }
        .plug(node.fake());
        node.fake()
            .file(&format!("{}/serial", device.directory()), "€".repeat(126));
        for interface in 0..4 {
            let keys = device.interface(node.fake(), interface, "usbhid");
            for _ in 0..32 {
                minor += 1;
                let directory = format!("{keys}/input/input{minor}/event{minor}");
                add_class_node(
                    node.fake(),
                    "input",
                    &directory,
                    &format!("/dev/input/event{minor}"),
                    (13, minor),
                );
            }
        }
    }
    let inventory = node.discover().unwrap();
    let all = names(&inventory, &pool_name);
    assert_eq!(all.len(), 32);
    let claim = all.iter().fold(Claim::new("n", "c", "u"), |claim, name| {
        claim.device("r", pool_name.as_str(), *name)
    });
    assert!(node.prepare(&claim).unwrap().memo.len() < 60 << 10);
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let one = |extra: Value| {
        let mut pool = pool("serial");
        pool.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        json!({"pools": [pool]})
    };
    let select = |selector: Value| one(json!({"select": [selector]}));
    let cases = [
        (json!({"pool": []}), "unknown field `pool`"),
        (
            json!({"pools": [{"name": "p"}]}),
            "missing field `kind` at line 1 column",
        ),
        (
            one(json!({"kind": "seriall"})),
            "unknown variant `seriall`, expected one of `serial`, `video`",
        ),
        (json!({"pools": [pool("usb"), pool("usb")]}), "twice"),
        (one(json!({"name": "P"})), "DNS subdomain"),
        (
            one(json!({"name": "p".repeat(129)})),
            "at most 128 are allowed",
        ),
        (one(json!({"nameBy": "colour"})), "unknown variant `colour`"),
        (
            one(json!({"kind": "usb", "nameBy": "node"})),
            "another number after every plug",
        ),
        (one(json!({"env": "LD_PRELOAD"})), "not UDEV_"),
        (one(json!({"env": "UDEV_a=b"})), "not UDEV_"),
        (
            one(json!({"containerPath": "/etc/passwd"})),
            "not a path below /dev",
        ),
        (
            one(json!({"containerPath": "/dev/full"})),
            "the container's own /dev",
        ),
        (select(json!({"vendor": "0x0403"})), "not 4 hex digits"),
        (
            select(json!({"vendor": 403})),
            "invalid type: integer `403`, expected a string",
        ),
        (select(json!({"product": "60g1"})), "not 4 hex digits"),
        (select(json!({"serial": ""})), "use * or leave the key out"),
        (select(json!({"vender": "0403"})), "unknown field `vender`"),
        (
            select(json!({"ä".repeat(2000): "0403"})),
            "unknown field `ä",
        ),
        (
            one(json!({"containerPath": "x".repeat(2000)})),
            "containerPath",
        ),
    ];
    for (config, reason) in cases {
        let problem = Udev::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Invalid, "bad-config")
        );
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
        assert_eq!(
            nodedock_sdk::testing::bounds::problem(&problem),
            Vec::<String>::new()
        );
    }
}

/// A generator of numbers below a bound: xorshift, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(bound).unwrap()).unwrap()
    }
}

/// Checks each name against the port and the serial number of the device that had it last.
fn check_owners(owners: &mut BTreeMap<String, (String, String)>, devices: &[Device]) {
    let attribute = |device: &Device, name| match device.attribute_value(name) {
        Some(AttributeValue::Text(text)) => text.clone(),
        _ => String::new(),
    };
    let ports: Vec<String> = devices
        .iter()
        .map(|device| attribute(device, "port"))
        .collect();
    for (device, port) in devices.iter().zip(&ports) {
        let serial = dns_label(&format!("x{}", attribute(device, "serial")));
        if let Some((port_before, serial_before)) =
            owners.insert(device.name.clone(), (port.clone(), serial.clone()))
        {
            assert_eq!(serial, serial_before, "{}", device.name);
            assert!(
                *port == port_before || !ports.contains(&port_before),
                "{}",
                device.name
            );
        }
    }
}

/// Devices are plugged in and out in any order. A name may pass to another device only while its own is unplugged, and only to a twin.
#[test]
fn names_pass_only_between_twins() {
    const PORTS: [&str; 8] = [
        "1-1", "1-2", "1-2.1", "1-2.2", "1-2.2.4", "1-3", "1-10", "2-1",
    ];
    const SERIALS: [&str; 8] = ["", "", "0001", "0001", "a b", "A_B", "ä", "7"];
    let mut numbers = Numbers(0x2545_F491_4F6C_DD1D);
    for _ in 0..10 {
        let node = with_pools([pool("serial"), pool("usb")]);
        add_root_hub(node.fake(), CONTROLLER, 2, "3.00");
        let serials = PORTS.map(|_| SERIALS[numbers.below(SERIALS.len())]);
        let mut plugged = [false; PORTS.len()];
        let mut owners = BTreeMap::new();
        for step in 0..30 {
            let index = numbers.below(PORTS.len());
            let number = 10 + step;
            let device = Usb {
                name: PORTS[index],
                serial: serials[index],
                number,
                ..FTDI
            };
            let tty = format!("ttyUSB{}", numbers.below(100));
            if plugged[index] {
                device.unplug(node.fake());
            } else if node.fake().has_node(&format!("/dev/{tty}")) {
                continue;
            } else {
                device
                    .plug(node.fake())
                    .serial_port(node.fake(), 0, 0, "ftdi_sio", &tty);
            }
            plugged[index] = !plugged[index];
            check_owners(&mut owners, &node.discover().unwrap().pools[0].devices);
        }
        for device in &node.discover().unwrap().pools[0].devices {
            node.prepare(&claim("serial", &device.name)).unwrap();
        }
    }
}

#[test]
fn driver_watches_every_kind_without_writing() {
    let info = Udev::describe();
    for subsystem in ["usb", "tty", "video4linux", "hidraw", "input", "sound"] {
        assert!(
            info.event_subsystems.iter().any(|known| known == subsystem),
            "{subsystem}"
        );
    }
    assert_eq!(
        (info.capabilities.sysfs_write, info.capabilities.mounts),
        (Vec::new(), Vec::new())
    );
    let node = full_node();
    node.discover().unwrap();
    assert_eq!(node.fake().writes(), []);
    assert_eq!(board_port("devices/pnp0/00:04/tty/ttyS0"), "/dev/ttyS0");
}
