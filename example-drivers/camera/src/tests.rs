use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{
    AttributeValue, Claim, Configuration, Device, DeviceHealth, Inventory, Problem, ProblemKind,
};
use serde_json::{Value, json};

use crate::CameraDriver;

const CONTROLLER: &str = "devices/pci0000:00/0000:00:14.0";
const NAME: &str = "pci-0000-00-14-0-usbv2-0-5";

/// Adds an entry of a class or bus with its node, and returns its directory.
fn add_node(fake: &FakeHost, list: &str, directory: &str, numbers: (u32, u32)) {
    let entry = directory.rsplit('/').next().unwrap();
    let up = "../".repeat(list.split('/').count());
    fake.file(
        &format!("{directory}/dev"),
        format!("{}:{}\n", numbers.0, numbers.1),
    )
    .link(&format!("{list}/{entry}"), &format!("{up}{directory}"))
    .character_node(&format!("/dev/{entry}"), numbers.0, numbers.1);
}

fn add_video(fake: &FakeHost, parent: &str, entry: &str, minor: u32, index: u32, card: &str) {
    let directory = format!("{parent}/video4linux/{entry}");
    add_node(fake, "class/video4linux", &directory, (81, minor));
    fake.file(&format!("{directory}/index"), format!("{index}\n"))
        .file(&format!("{directory}/name"), format!("{card}\n"));
}

fn add_driver(fake: &FakeHost, bus: &str, directory: &str, driver: &str) {
    let target = format!("bus/{bus}/drivers/{driver}");
    let up = "../".repeat(directory.split('/').count());
    fake.dir(&target)
        .link(&format!("{directory}/driver"), &format!("{up}{target}"));
}

/// Plugs a UVC camera into a port of bus 1: a function with a node for frames, one for metadata and a media device.
fn plug(fake: &FakeHost, port: &str, serial: &str, first: u32) {
    let device = format!("{CONTROLLER}/usb1/1-{port}");
    for (file, text) in [
        ("idVendor", "046d"),
        ("idProduct", "085e"),
        ("product", "Logitech BRIO"),
        ("serial", serial),
    ] {
        fake.file(&format!("{device}/{file}"), format!("{text}\n"));
    }
    fake.link(
        &format!("bus/usb/devices/1-{port}"),
        &format!("../../../{device}"),
    );
    let function = format!("{device}/1-{port}:1.0");
    add_driver(fake, "usb", &function, "uvcvideo");
    for index in 0..2 {
        let minor = first + index;
        add_video(
            fake,
            &function,
            &format!("video{minor}"),
            minor,
            index,
            "Logitech BRIO",
        );
    }
    let media = format!("{function}/media{}", first / 2);
    add_node(fake, "bus/media/devices", &media, (237, first / 2));
}

fn unplug(fake: &FakeHost, port: &str, first: u32) {
    fake.remove(&format!("{CONTROLLER}/usb1/1-{port}"))
        .remove(&format!("bus/usb/devices/1-{port}"))
        .remove(&format!("bus/media/devices/media{}", first / 2));
    for minor in first..first + 2 {
        fake.remove(&format!("class/video4linux/video{minor}"))
            .remove(&format!("/dev/video{minor}"));
    }
    fake.remove(&format!("/dev/media{}", first / 2));
}

fn node() -> Harness<CameraDriver> {
    let node = Harness::new();
    node.fake()
        .file(&format!("{CONTROLLER}/usb1/version"), " 2.00\n")
        .link(
            "bus/usb/devices/usb1",
            &format!("../../../{CONTROLLER}/usb1"),
        );
    node.config(json!({"pools": [{"name": "cameras"}]}));
    node
}

fn names(inventory: &Inventory) -> Vec<&str> {
    inventory.pools[0]
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect()
}

fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    match device.attribute_value(name) {
        Some(AttributeValue::Text(text)) => Some(text),
        _ => None,
    }
}

fn claim(device: &str) -> Claim {
    Claim::new("default", "demo", "uid").device("r", "cameras", device)
}

fn paths(node: &Harness<CameraDriver>, device: &str) -> Vec<String> {
    let edits = node
        .prepare(&claim(device))
        .unwrap()
        .devices
        .remove(0)
        .edits;
    edits
        .device_nodes
        .into_iter()
        .map(|node| node.path)
        .collect()
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../camera.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../camera.config.yaml")).unwrap();
    CameraDriver::validate_config(&config.to_string()).unwrap();
    let node = node();
    plug(node.fake(), "5", "A1", 0);
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert_eq!(names(&inventory), [NAME]);
    node.prepare(&Claim::new("n", "c", "u").device("r", "usb", NAME))
        .unwrap();
}

#[test]
fn usb_camera_has_all_of_its_nodes() {
    let node = node();
    plug(node.fake(), "5", "A1", 2);
    let inventory = node.discover().unwrap();
    let camera = inventory.device("cameras", NAME).unwrap();
    for (name, value) in [
        ("bus", "usb"),
        ("driver", "uvcvideo"),
        ("card", "Logitech BRIO"),
        ("model", "Logitech BRIO"),
        ("vendor", "046d"),
        ("product", "085e"),
        ("serial", "A1"),
        ("path", "pci-0000:00:14.0-usbv2-0:5"),
    ] {
        assert_eq!(text(camera, name), Some(value), "{name}");
    }
    for name in ["frameNodes", "metadataNodes"] {
        assert_eq!(camera.attribute_value(name), Some(&AttributeValue::Int(1)));
    }
    let nodes = ["/dev/video2", "/dev/video3", "/dev/media1"];
    assert_eq!(camera.identity, nodes.map(|path| format!("dev:{path}")));
    let edits = node.prepare(&claim(NAME)).unwrap().devices.remove(0).edits;
    let variable = "CAMERA_CAMERAS_PCI_0000_00_14_0_USBV2_0_5".to_owned();
    assert_eq!(edits.env, [(variable, "/dev/video2".to_owned())]);
    assert_eq!(paths(&node, NAME), nodes);
    assert_eq!(edits.device_nodes[2].minor, Some(1));
}

/// A depth camera has several functions, each with a media device of its own.
#[test]
fn functions_of_camera_are_one_device() {
    let node = node();
    plug(node.fake(), "5", "A1", 0);
    let function = format!("{CONTROLLER}/usb1/1-5/1-5:1.3");
    add_driver(node.fake(), "usb", &function, "uvcvideo");
    for index in 0..2 {
        let entry = format!("video{}", 2 + index);
        add_video(node.fake(), &function, &entry, 2 + index, index, "RGB");
    }
    add_node(
        node.fake(),
        "bus/media/devices",
        &format!("{function}/media9"),
        (237, 9),
    );
    let inventory = node.discover().unwrap();
    assert_eq!(names(&inventory), [NAME]);
    let card = text(&inventory.pools[0].devices[0], "card");
    assert_eq!(card, Some("Logitech BRIO"), "that of the first function");
    let expected = [
        "/dev/video0",
        "/dev/video2",
        "/dev/video1",
        "/dev/video3",
        "/dev/media0",
        "/dev/media9",
    ];
    assert_eq!(paths(&node, NAME), expected);
}

#[test]
fn twin_of_serial_renames_no_camera() {
    let node = node();
    plug(node.fake(), "5", "0001", 0);
    let alone = node.discover().unwrap().pools[0].devices[0].clone();
    plug(node.fake(), "1", "0001", 2);
    let both = node.discover().unwrap();
    assert_eq!(names(&both), ["pci-0000-00-14-0-usbv2-0-1", NAME]);
    assert_eq!(both.device("cameras", NAME), Some(&alone));
    unplug(node.fake(), "5", 0);
    let other = node.discover().unwrap();
    assert_eq!(names(&other), ["pci-0000-00-14-0-usbv2-0-1"]);
    // It is plugged in again, and the kernel counts on.
    plug(node.fake(), "5", "0001", 4);
    assert_eq!(paths(&node, NAME)[0], "/dev/video4");
}

#[test]
fn pci_capture_card_is_its_function() {
    let node = node();
    let function = "devices/pci0000:00/0000:00:1c.0/0000:04:00.0";
    node.fake()
        .file(&format!("{function}/vendor"), "0x1131\n")
        .file(&format!("{function}/device"), "0x7160\n")
        .link(
            "bus/pci/devices/0000:04:00.0",
            &format!("../../../{function}"),
        );
    add_driver(node.fake(), "pci", function, "saa7160");
    for index in 0..4 {
        add_video(
            node.fake(),
            function,
            &format!("video{index}"),
            index,
            index,
            "Card",
        );
    }
    let inventory = node.discover().unwrap();
    let card = inventory.device("cameras", "pci-0000-04-00-0").unwrap();
    assert_eq!(text(card, "vendor"), Some("0x1131"));
    assert_eq!(text(card, "product"), Some("0x7160"));
    assert_eq!(
        card.attribute_value("frameNodes"),
        Some(&AttributeValue::Int(4))
    );
}

/// A Raspberry Pi: the receiver has the video nodes, and the sensor on I2C is hardware of its own.
#[test]
fn csi_camera_is_its_receiver() {
    let node = node();
    let fake = node.fake();
    let receiver = "devices/platform/soc/3f801000.csi";
    for (directory, tree) in [
        (receiver, "soc/csi@7e801000"),
        (
            "devices/platform/soc/3f805000.i2c/i2c-10/10-0010",
            "soc/i2c0mux/i2c@1/imx219@10",
        ),
    ] {
        let tree = format!("firmware/devicetree/base/{tree}");
        fake.dir(&tree)
            .link(&format!("{directory}/of_node"), &format!("/sys/{tree}"));
    }
    add_driver(fake, "platform", receiver, "unicam");
    add_video(fake, receiver, "video0", 0, 0, "unicam-image");
    add_video(fake, receiver, "video1", 1, 1, "unicam-embedded");
    add_video(fake, receiver, "v4l-subdev1", 131, 2, "unicam");
    add_node(
        fake,
        "bus/media/devices",
        &format!("{receiver}/media3"),
        (237, 3),
    );
    let sensor = "devices/platform/soc/3f805000.i2c/i2c-10/10-0010";
    add_video(fake, sensor, "v4l-subdev0", 130, 0, "imx219 10-0010");
    let inventory = node.discover().unwrap();
    assert_eq!(names(&inventory), ["platform-3f801000-csi"]);
    let camera = &inventory.pools[0].devices[0];
    assert_eq!(
        (text(camera, "bus"), text(camera, "driver")),
        (Some("platform"), Some("unicam"))
    );
    let expected = [
        "/dev/video0",
        "/dev/video1",
        "/dev/media3",
        "/dev/v4l-subdev1",
    ];
    assert_eq!(paths(&node, "platform-3f801000-csi"), expected);
}

#[test]
fn loopbacks_and_radios_are_no_cameras() {
    let node = node();
    add_video(node.fake(), "devices/virtual", "video9", 9, 0, "Dummy");
    let tuner = "devices/pci0000:00/0000:00:1c.0/0000:05:00.0";
    add_video(node.fake(), tuner, "radio0", 64, 0, "FM");
    add_video(node.fake(), tuner, "vbi0", 224, 1, "VBI");
    assert_eq!(names(&node.discover().unwrap()), [""; 0]);
}

#[test]
fn config_selects_by_attributes() {
    let node = node();
    plug(node.fake(), "5", "A1", 0);
    plug(node.fake(), "1", "B2", 2);
    node.config(
        json!({"pools": [{"name": "cameras", "select": [{"serial": "B*", "bus": "usb"}]}]}),
    );
    let inventory = node.discover().unwrap();
    assert_eq!(names(&inventory), ["pci-0000-00-14-0-usbv2-0-1"]);
    let problem = node.prepare(&claim(NAME)).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::NotFound, "no-such-device")
    );
    let config = json!({"pools": [{"name": "p", "select": [{"colour": "red"}]}]});
    let problem = CameraDriver::validate_config(&config.to_string()).unwrap_err();
    assert!(
        problem
            .message
            .contains("config of camera.nodedock.dev: pool \"p\""),
        "{problem}"
    );
    let problem = CameraDriver::validate_parameters("{}").unwrap_err();
    assert_eq!(problem.code, "no-parameters");
}

#[test]
fn hostile_texts_are_cleaned() {
    let node = node();
    plug(node.fake(), "5", "A1", 0);
    let serial = format!("{CONTROLLER}/usb1/1-5/serial");
    node.fake().file(&serial, b"\xff\x1b[2J\n".to_vec());
    let inventory = node.discover().unwrap();
    assert_eq!(
        text(&inventory.pools[0].devices[0], "serial"),
        Some("__[2J")
    );
    node.fake().file(&serial, "x".repeat(126));
    let inventory = node.discover().unwrap();
    assert_eq!(text(&inventory.pools[0].devices[0], "serial"), None);
}

#[test]
fn only_vanished_cameras_are_skipped() {
    let node = node();
    plug(node.fake(), "5", "A1", 0);
    for path in ["bus/usb/devices/1-5/serial", "class/video4linux/video0/dev"] {
        let failed = Problem::unavailable("io-error", "no memory");
        node.fake().fail(path, failed.clone());
        assert_eq!(node.discover(), Err(failed), "{path}");
        node.fake().heal(path);
    }
    node.fake().remove("bus/usb/devices/usb1");
    assert_eq!(names(&node.discover().unwrap()), [""; 0]);
}

#[test]
fn cameras_report_their_health() {
    const OTHER: &str = "pci-0000-00-14-0-usbv2-0-6";
    let node = node();
    let fake = node.fake();
    plug(fake, "5", "A1", 0);
    plug(fake, "6", "A2", 2);
    let check = |fault: Option<&str>| {
        let camera = match fault {
            Some(fault) => DeviceHealth::unhealthy("cameras", NAME, fault),
            None => DeviceHealth::healthy("cameras", NAME),
        };
        let other = DeviceHealth::healthy("cameras", OTHER);
        assert_eq!(node.check().unwrap(), [camera, other]);
    };
    let power = format!("{CONTROLLER}/usb1/1-5/power/runtime_status");
    fake.file(&power, "active\n");
    check(None);
    // The kernel suspends the USB device, and the nodes belong to a function of it.
    fake.file(&power, "error\n");
    check(Some(
        "the kernel failed to change the power state of 1-5 (power/runtime_status is error)",
    ));
    fake.file(&power, "suspended\n")
        .character_node("/dev/video1", 81, 7);
    check(Some(
        "/dev/video1 has the numbers 81:7, and the device has 81:1",
    ));
    fake.remove("/dev/video1");
    assert!(!node.check().unwrap()[0].message.is_empty());
    let failed = Problem::unavailable("io-error", "no memory");
    fake.fail("/dev/media0", failed.clone());
    assert_eq!(node.check(), Err(failed));
    fake.heal("/dev/media0");
    unplug(fake, "5", 0);
    assert_eq!(
        node.check().unwrap(),
        [DeviceHealth::healthy("cameras", OTHER)]
    );
}
