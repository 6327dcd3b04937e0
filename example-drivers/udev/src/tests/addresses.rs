//! Tests of names over boots: devices have the same names in any order in which the kernel finds and counts them.

use super::tree::{add_acpi_node, add_tree_node};
use super::*;

/// Two controllers of a board, which differ in their addresses.
const BOARD: [&str; 2] = [
    "devices/platform/soc/fe900000.usb",
    "devices/platform/soc/fea00000.usb",
];

/// A device of the same type, without a serial number, on the bus of each controller.
fn plug_everywhere(node: &Harness<Udev>, controllers: [&'static str; 2]) {
    for ((controller, bus), name) in controllers.into_iter().zip(1..).zip(["1-1", "2-1"]) {
        add_root_hub(node.fake(), controller, bus, "2.00");
        let device = Usb {
            name,
            controller,
            number: 2,
            vendor: "1a86",
            product: "7523",
            ..CH341
        };
        device.plug(node.fake()).serial_port(
            node.fake(),
            0,
            0,
            "ch341-uart",
            &format!("ttyUSB{bus}"),
        );
    }
}

/// Returns the names of all devices of the first pool, with the directory of the controller that each is on.
fn by_name(node: &Harness<Udev>, controllers: [&'static str; 2]) -> BTreeMap<String, &'static str> {
    let on_bus = |device: &Device| match device.attribute_value("port") {
        Some(AttributeValue::Text(port)) if port.starts_with("1-") => controllers[0],
        _ => controllers[1],
    };
    let inventory = node.discover().unwrap();
    inventory.pools[0]
        .devices
        .iter()
        .map(|device| (device.name.clone(), on_bus(device)))
        .collect()
}

/// Discovers the devices of two controllers, which the kernel finds in one order and in the other. The firmware describes what is above them.
fn in_both_orders(
    name_by: &str,
    first: [&'static str; 2],
    second: [&'static str; 2],
    firmware: impl Fn(&Harness<Udev>),
) -> [BTreeMap<String, &'static str>; 2] {
    [first, second].map(|controllers| {
        let node = Harness::new();
        node.config(json!({"pools": [{"name": "serial", "kind": "serial", "nameBy": name_by}]}));
        firmware(&node);
        plug_everywhere(&node, controllers);
        by_name(&node, controllers)
    })
}

/// Raspberry Pi and other boards: a controller has a number only, and the device above it a node of the device tree.
#[test]
fn controllers_are_named_by_device_tree() {
    let first = [
        "devices/platform/soc/fe900000.usb/xhci-hcd.0.auto",
        "devices/platform/soc/fea00000.usb/xhci-hcd.1.auto",
    ];
    let second = [
        "devices/platform/soc/fea00000.usb/xhci-hcd.0.auto",
        "devices/platform/soc/fe900000.usb/xhci-hcd.1.auto",
    ];
    for name_by in ["port", "serial"] {
        let [one, other] = in_both_orders(name_by, first, second, |node| {
            add_tree_node(node.fake(), BOARD[0], "soc/usb@7e900000");
            add_tree_node(node.fake(), BOARD[1], "soc/usb@7ea00000");
        });
        let prefix = if name_by == "port" {
            ""
        } else {
            "usb-1a86-7523-"
        };
        for (index, address) in ["fe900000", "fea00000"].into_iter().enumerate() {
            let name = format!("{prefix}platform-{address}-usb-usbv2-0-1-1-0-port0");
            assert!(one[&name].starts_with(BOARD[index]), "{one:?}");
            assert!(other[&name].starts_with(BOARD[index]), "{other:?}");
        }
        assert_eq!((one.len(), other.len()), (2, 2));
    }
}

#[test]
fn controllers_are_named_by_acpi() {
    let first = ["devices/platform/PNP0D10:00", "devices/platform/PNP0D10:01"];
    let [usb0, usb1] = [
        "acpi-sb-usb0-usbv2-0-1-1-0-port0",
        "acpi-sb-usb1-usbv2-0-1-1-0-port0",
    ];
    let [one, other] = in_both_orders("port", first, [first[1], first[0]], |node| {
        add_acpi_node(node.fake(), first[0], "\\_SB_.USB0");
        add_acpi_node(node.fake(), first[1], "\\_SB_.USB1");
    });
    assert_eq!((one[usb0], one[usb1]), (first[0], first[1]));
    assert_eq!(one, other);
}

/// The kernel's number is all that these have: the README says so.
#[test]
fn controllers_without_address_keep_kernel_numbers() {
    let first = [
        "devices/platform/xhci-hcd.0.auto",
        "devices/platform/xhci-hcd.1.auto",
    ];
    let [one, _] = in_both_orders("port", first, first, |_| {});
    assert_eq!(
        one["platform-xhci-hcd-0-auto-usbv2-0-1-1-0-port0"],
        first[0]
    );
    assert_eq!(
        one["platform-xhci-hcd-1-auto-usbv2-0-1-1-0-port0"],
        first[1]
    );
    // Two controllers below one address.
    let shared = [
        "devices/platform/soc/fe900000.usb/xhci-hcd.0.auto",
        "devices/platform/soc/fe900000.usb/xhci-hcd.1.auto",
    ];
    let [one, _] = in_both_orders("port", shared, shared, |node| {
        add_tree_node(node.fake(), BOARD[0], "soc/usb@7e900000");
    });
    assert_eq!(
        one["platform-fe900000-usb-xhci-hcd-0-auto-usbv2-0-1-1-0-port0"],
        shared[0]
    );
    assert_eq!(
        one["platform-fe900000-usb-xhci-hcd-1-auto-usbv2-0-1-1-0-port0"],
        shared[1]
    );
}

#[test]
fn pci_controller_name_ignores_bus_number() {
    let node = with_pools([json!({"name": "usb", "kind": "usb", "nameBy": "port"})]);
    add_root_hub(node.fake(), CONTROLLER, 7, "3.10");
    Usb {
        name: "7-2.4",
        number: 3,
        ..FTDI
    }
    .plug(node.fake());
    FTDI.plug(node.fake());
    let expected = [
        "pci-0000-00-14-0-usbv2-0-2-3",
        "pci-0000-00-14-0-usbv3-0-2-4",
    ];
    assert_eq!(names(&node.discover().unwrap(), "usb"), expected);
}

#[test]
fn device_on_removed_bus_is_skipped() {
    let node = with_pools([pool("usb")]);
    FTDI.plug(node.fake());
    node.fake().remove("bus/usb/devices/usb1");
    assert_eq!(names(&node.discover().unwrap(), "usb"), [""; 0]);
    add_root_hub(node.fake(), CONTROLLER, 1, "2.00");
    let failed = Problem::unavailable("io-error", "no memory");
    node.fake().fail("bus/usb/devices/usb1", failed.clone());
    assert_eq!(
        node.discover(),
        Err(failed),
        "a read that failed says nothing of the bus"
    );
}

const CARD: &str = "devices/pci0000:00/0000:00:1c.0/0000:02:00.0";

/// Returns the names of serial ports, and the ttys that they then are.
fn ttys(node: &Harness<Udev>) -> Vec<(String, String)> {
    let inventory = node.discover().unwrap();
    let names = names(&inventory, "serial");
    let tty = |name: &str| {
        edits_of(node.prepare(&claim("serial", name)))
            .device_nodes
            .remove(0)
            .path
    };
    names
        .into_iter()
        .map(|name| (name.to_owned(), tty(name)))
        .collect()
}

#[test]
fn card_ports_are_numbered_by_card() {
    for (console, lines) in [("tty0", [4, 5]), ("tty0", [6, 7]), ("ttyS4", [4, 5])] {
        let node = with_pools([pool("serial")]);
        node.fake()
            .file("class/tty/console/active", format!("{console}\n"));
        for line in lines {
            add_board_port(
                node.fake(),
                &format!("{CARD}/tty/ttyS{line}"),
                64 + line,
                "4",
            );
        }
        let name = |number| format!("pci0000-00-0000-00-1c-0-0000-02-00-0-port{number}");
        let mut expected = vec![
            (name(0), format!("/dev/ttyS{}", lines[0])),
            (name(1), format!("/dev/ttyS{}", lines[1])),
        ];
        expected.retain(|(_, tty)| *tty != format!("/dev/{console}"));
        assert_eq!(
            ttys(&node),
            expected,
            "the console of the kernel is a port of the card as well"
        );
    }
}

#[test]
fn ports_keep_the_kernel_order() {
    let node = with_pools([pool("serial")]);
    for (port, line) in [(0, 12), (1, 4), (2, 5)] {
        let hardware = "0000:02:00.0";
        let directory = format!("{CARD}/{hardware}:0/{hardware}:0.{port}/tty/ttyS{line}");
        add_board_port(node.fake(), &directory, 64 + line, "4");
    }
    let ttys: Vec<String> = ttys(&node).into_iter().map(|(_, tty)| tty).collect();
    assert_eq!(ttys, ["/dev/ttyS12", "/dev/ttyS4", "/dev/ttyS5"]);
}

#[test]
fn board_ports_are_named_by_firmware() {
    let node = with_pools([pool("serial")]);
    let fake = node.fake();
    add_acpi_node(fake, "devices/pnp0/00:04", "\\_SB_.PCI0.SBRG.UAR1");
    add_board_port(
        fake,
        "devices/pnp0/00:04/00:04:0/00:04:0.0/tty/ttyS1",
        65,
        "4",
    );
    // Since Linux 6.5 the port and its controller have the node as well.
    for below in ["00:04:0", "00:04:0/00:04:0.0"] {
        add_acpi_node(
            fake,
            &format!("devices/pnp0/00:04/{below}"),
            "\\_SB_.PCI0.SBRG.UAR1",
        );
    }
    add_tree_node(fake, "devices/platform/soc", "soc");
    add_tree_node(
        fake,
        "devices/platform/soc/3f201000.serial",
        "soc/serial@7e201000",
    );
    add_board_port(
        fake,
        "devices/platform/soc/3f201000.serial/tty/ttyAMA1",
        70,
        "32",
    );
    add_tree_node(
        fake,
        "devices/platform/soc/fe204000.spi/spi_master/spi0/spi0.0",
        "soc/spi@7e204000/uart@0",
    );
    for line in [2, 3] {
        let directory =
            format!("devices/platform/soc/fe204000.spi/spi_master/spi0/spi0.0/tty/ttySC{line}");
        add_board_port(fake, &directory, 80 + line, "98");
    }
    // The kernel's table of legacy ports fixes their numbers.
    add_board_port(
        fake,
        "devices/platform/serial8250/serial8250:0/serial8250:0.2/tty/ttyS2",
        66,
        "4",
    );
    let expected = [
        ("acpi-sb-pci0-sbrg-uar1-port0", "/dev/ttyS1"),
        ("of-soc-spi-7e204000-uart-0-port0", "/dev/ttySC2"),
        ("of-soc-spi-7e204000-uart-0-port1", "/dev/ttySC3"),
        ("platform-serial8250-port2", "/dev/ttyS2"),
        ("platform-soc-3f201000-serial-port0", "/dev/ttyAMA1"),
    ];
    assert_eq!(
        ttys(&node),
        expected.map(|(name, tty)| (name.to_owned(), tty.to_owned()))
    );
}

#[test]
fn port_is_selected_by_either_name() {
    for port in ["pnp0/00:04/*", "acpi-_SB_.COM1-port0"] {
        let node =
            with_pools([json!({"name": "serial", "kind": "serial", "select": [{"port": port}]})]);
        add_acpi_node(node.fake(), "devices/pnp0/00:04", "\\_SB_.COM1");
        add_board_port(node.fake(), "devices/pnp0/00:04/tty/ttyS0", 64, "4");
        add_board_port(node.fake(), "devices/pnp0/00:05/tty/ttyS1", 65, "4");
        assert_eq!(
            names(&node.discover().unwrap(), "serial"),
            ["acpi-sb-com1-port0"],
            "{port}"
        );
    }
}

#[test]
fn sound_card_jacks_are_one_device() {
    for card in [0, 3] {
        let node = with_pools([pool("input")]);
        for (number, minor) in [(9, 73), (10, 74)] {
            let sound = format!("devices/pci0000:00/0000:00:1f.3/sound/card{card}");
            let directory = format!("{sound}/input{}/event{number}", card + number);
            add_class_node(
                node.fake(),
                "input",
                &directory,
                &format!("/dev/input/event{number}"),
                (13, minor),
            );
        }
        let inventory = node.discover().unwrap();
        assert_eq!(
            names(&inventory, "input"),
            ["pci0000-00-0000-00-1f-3-sound-card"]
        );
        let edits = edits_of(node.prepare(&claim("input", "pci0000-00-0000-00-1f-3-sound-card")));
        assert_eq!(paths(&edits), ["/dev/input/event9", "/dev/input/event10"]);
    }
}

#[test]
fn failed_firmware_read_is_an_error() {
    for path in ["of_node", "firmware_node/path"] {
        let node = with_pools([pool("serial")]);
        add_acpi_node(node.fake(), "devices/pnp0/00:04", "\\_SB_.COM1");
        add_board_port(node.fake(), "devices/pnp0/00:04/tty/ttyS0", 64, "4");
        let failed = Problem::unavailable("io-error", "no memory");
        node.fake()
            .fail(&format!("devices/pnp0/00:04/{path}"), failed.clone());
        assert_eq!(node.discover(), Err(failed), "{path}");
    }
}

#[test]
fn vanished_port_is_skipped() {
    let node = with_pools([pool("serial")]);
    add_acpi_node(node.fake(), "devices/pnp0/00:04", "\\_SB_.COM1");
    add_board_port(node.fake(), "devices/pnp0/00:04/tty/ttyS0", 64, "4");
    add_board_port(node.fake(), "devices/pnp0/00:05/tty/ttyS1", 65, "4");
    let path = "devices/pnp0/00:04/firmware_node/path";
    node.fake()
        .fail(path, Problem::unavailable("no-value", "no such device"));
    assert_eq!(
        names(&node.discover().unwrap(), "serial"),
        ["pnp0-00-05-port0"]
    );
}

const ACCELERATOR: Usb = Usb {
    vendor: "1a6e",
    product: "089a",
    ..Usb::at("2-1", 2)
};
/// The accelerator after its first use, which loads its firmware.
const USED_ACCELERATOR: Usb = Usb {
    vendor: "18d1",
    product: "9302",
    number: 3,
    ..ACCELERATOR
};

fn with_accelerator(name_by: &str) -> Harness<Udev> {
    let ids = [ACCELERATOR, USED_ACCELERATOR]
        .map(|usb| json!({"vendor": usb.vendor, "product": usb.product}));
    let node =
        with_pools([json!({"name": "tpu", "kind": "usb", "nameBy": name_by, "select": ids})]);
    add_root_hub(node.fake(), CONTROLLER, 2, "3.00");
    ACCELERATOR.plug(node.fake());
    node
}

/// google-coral/edgetpu#536: the container that starts the accelerator has the node that it had before.
#[test]
fn accelerator_changing_ids_keeps_port_name() {
    let node = with_accelerator("port");
    let name = "pci-0000-00-14-0-usbv3-0-1";
    assert_eq!(
        paths(&edits_of(node.prepare(&claim("tpu", name)))),
        ["/dev/bus/usb/002/002"]
    );
    ACCELERATOR.unplug(node.fake());
    USED_ACCELERATOR.plug(node.fake());
    let inventory = node.discover().unwrap();
    assert_eq!(names(&inventory, "tpu"), [name]);
    assert!(
        inventory
            .device("tpu", name)
            .unwrap()
            .identity
            .contains(&"usb:2-1".to_owned())
    );
    let (state, message) = health(&node, "tpu", name);
    assert_eq!(
        (state, message.contains("/dev/bus/usb/002/003")),
        (HealthState::Unhealthy, true),
        "{message}"
    );
    assert_eq!(
        paths(&edits_of(node.prepare(&claim("tpu", name)))),
        ["/dev/bus/usb/002/003"]
    );
    assert_eq!(health(&node, "tpu", name).0, HealthState::Healthy);
}

#[test]
fn names_by_serial_include_the_ids() {
    let node = with_accelerator("serial");
    let before = "usb-1a6e-089a-pci-0000-00-14-0-usbv3-0-1";
    node.prepare(&claim("tpu", before)).unwrap();
    ACCELERATOR.unplug(node.fake());
    USED_ACCELERATOR.plug(node.fake());
    let inventory = node.discover().unwrap();
    assert_eq!(
        names(&inventory, "tpu"),
        ["usb-18d1-9302-pci-0000-00-14-0-usbv3-0-1"]
    );
    assert!(
        inventory.pools[0].devices[0]
            .identity
            .contains(&"usb:2-1".to_owned()),
        "the claim still holds it"
    );
    assert_eq!(health(&node, "tpu", before).0, HealthState::Unhealthy);
    let problem = node.prepare(&claim("tpu", before)).unwrap_err();
    assert_eq!(problem.code, "no-such-device");
    assert!(problem.message.contains("other IDs"), "{problem}");
}

#[test]
fn other_device_behind_node_is_unhealthy() {
    let node = with_pools([json!({"name": "serial", "kind": "serial", "nameBy": "node"})]);
    let plug = |usb: Usb| {
        usb.plug(node.fake())
            .serial_port(node.fake(), 0, 0, "ch341-uart", "ttyUSB0")
    };
    plug(CH341);
    node.prepare(&claim("serial", "ttyusb0")).unwrap();
    assert_eq!(health(&node, "serial", "ttyusb0").0, HealthState::Healthy);
    CH341.unplug(node.fake());
    let other = Usb {
        name: "1-3",
        number: 9,
        ..CH341
    };
    plug(other);
    let (state, message) = health(&node, "serial", "ttyusb0");
    assert_eq!(
        (state, message.contains("another device")),
        (HealthState::Unhealthy, true),
        "{message}"
    );
    other.unplug(node.fake());
    plug(CH341);
    assert_eq!(health(&node, "serial", "ttyusb0").0, HealthState::Healthy);
}

/// A machine with hardware of every kind of address, as the kernel counts it in one boot. Returns what is behind each tty.
fn boot(node: &Harness<Udev>, numbers: &mut Numbers) -> BTreeMap<String, String> {
    let fake = node.fake();
    let mut found = [
        "fe900000", "fea00000", "USB0", "USB1", "14.0", "COM1", "COM2", "1c.0", "1c.1", "1c.2",
    ];
    for last in (1..found.len()).rev() {
        found.swap(last, numbers.below(last + 1));
    }
    let mut behind = BTreeMap::new();
    // The kernel's counts: buses, controllers, instances of ACPI, PNP devices and ttys, some of which other hardware has.
    let (mut bus, mut instance, mut line) = (numbers.below(3), numbers.below(3), numbers.below(5));
    for hardware in found {
        instance += 1;
        let directory = match hardware {
            "fe900000" | "fea00000" => {
                let device = format!("devices/platform/soc/{hardware}.usb");
                add_tree_node(fake, &device, &format!("soc/usb@7{}", &hardware[1..]));
                format!("{device}/xhci-hcd.{instance}.auto")
            }
            "USB0" | "USB1" => format!("devices/platform/PNP0D10:{instance:02}"),
            "COM1" | "COM2" => format!("devices/pnp0/00:{instance:02}"),
            slot => format!("devices/pci0000:00/0000:00:{slot}"),
        };
        if hardware.starts_with(['U', 'C']) {
            add_acpi_node(fake, &directory, &format!("\\_SB_.{hardware}"));
        }
        if hardware.starts_with(['C', '1']) && hardware != "14.0" {
            for port in 0..if hardware.starts_with('1') { 2 } else { 1 } {
                add_board_port(
                    fake,
                    &format!("{directory}/tty/ttyS{line}"),
                    64 + u32::try_from(line).unwrap(),
                    "4",
                );
                behind.insert(
                    format!("/dev/ttyS{line}"),
                    format!("{hardware} port {port}"),
                );
                line += 1;
            }
            continue;
        }
        bus += 1;
        let controller: &str = Box::leak(directory.into_boxed_str());
        add_root_hub(fake, controller, u32::try_from(bus).unwrap(), "2.00");
        for port in [1, 2] {
            let name: &str = Box::leak(format!("{bus}-{port}").into_boxed_str());
            let number = 2 + u32::try_from(numbers.below(50) * 2 + port).unwrap();
            let tty = format!("ttyUSB{}", bus * 10 + port);
            Usb {
                name,
                controller,
                number,
                ..CH341
            }
            .plug(fake)
            .serial_port(fake, 0, 0, "ch341-uart", &tty);
            behind.insert(format!("/dev/{tty}"), format!("{hardware} port {port}"));
        }
    }
    behind
}

#[test]
fn names_follow_the_hardware_across_boots() {
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15);
    for name_by in ["port", "serial"] {
        let mut first: Option<BTreeMap<String, String>> = None;
        for _ in 0..8 {
            let node = Harness::new();
            node.config(
                json!({"pools": [{"name": "serial", "kind": "serial", "nameBy": name_by}]}),
            );
            let behind = boot(&node, &mut numbers);
            let hardware: BTreeMap<_, _> = ttys(&node)
                .into_iter()
                .map(|(name, tty)| (name, behind[&tty].clone()))
                .collect();
            assert_eq!(hardware.len(), 18, "{hardware:#?}");
            assert_eq!(first.get_or_insert_with(|| hardware.clone()), &hardware);
        }
    }
}
