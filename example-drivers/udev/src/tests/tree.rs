//! Trees of devices as the kernel shows them below `/sys`.

use nodedock_sdk::testing::FakeHost;
use nodedock_sdk::{NodeInfo, NodeKind};

/// Directory of the controller of bus 1.
pub(crate) const CONTROLLER: &str = "devices/pci0000:00/0000:00:14.0";

/// A USB device; an empty text is a descriptor that it does not have.
#[derive(Clone, Copy)]
pub(crate) struct Usb {
    /// Bus and ports: `1-2.3`.
    pub(crate) name: &'static str,
    /// Directory of its controller.
    pub(crate) controller: &'static str,
    /// Number on the bus, which differs after every plug.
    pub(crate) number: u32,
    pub(crate) class: &'static str,
    pub(crate) vendor: &'static str,
    pub(crate) product: &'static str,
    pub(crate) manufacturer: &'static str,
    pub(crate) model: &'static str,
    pub(crate) serial: &'static str,
}

impl Usb {
    pub(crate) const fn at(name: &'static str, number: u32) -> Self {
        let (vendor, product) = ("1d6b", "0104");
        let (class, controller) = ("00", CONTROLLER);
        Usb {
            name,
            controller,
            number,
            class,
            vendor,
            product,
            manufacturer: "",
            model: "",
            serial: "",
        }
    }

    /// Returns its directory, below those of the hubs in between.
    pub(crate) fn directory(&self) -> String {
        let (bus, ports) = self.name.split_once('-').unwrap();
        let mut directory = format!("{}/usb{bus}", self.controller);
        for (index, _) in ports.match_indices('.').chain([(ports.len(), "")]) {
            directory = format!("{directory}/{bus}-{}", &ports[..index]);
        }
        directory
    }

    pub(crate) fn plug(self, fake: &FakeHost) -> Self {
        let directory = self.directory();
        let text = |name: &str, value: &str| {
            if !value.is_empty() {
                fake.file(&format!("{directory}/{name}"), format!("{value}\n"));
            }
        };
        text("bDeviceClass", self.class);
        text("idVendor", self.vendor);
        text("idProduct", self.product);
        text("manufacturer", self.manufacturer);
        text("product", self.model);
        text("serial", self.serial);
        text("speed", "12");
        text("busnum", self.name.split_once('-').unwrap().0);
        text("devnum", &self.number.to_string());
        text("dev", &format!("189:{}", self.number - 1));
        fake.link(
            &format!("bus/usb/devices/{}", self.name),
            &format!("../../../{directory}"),
        );
        add_node(fake, &self.node(), (189, self.number - 1), &directory);
        self
    }

    pub(crate) fn unplug(self, fake: &FakeHost) {
        fake.remove(&self.directory()).remove(&self.node());
        for name in [self.name.to_owned(), format!("{}:1.0", self.name)] {
            fake.remove(&format!("bus/usb/devices/{name}"));
        }
    }

    pub(crate) fn interface_directory(self, number: u32) -> String {
        format!("{}/{}:1.{number}", self.directory(), self.name)
    }

    /// Adds an interface and returns its directory.
    pub(crate) fn interface(self, fake: &FakeHost, number: u32, driver: &str) -> String {
        let directory = self.interface_directory(number);
        let up = "../".repeat(directory.split('/').count());
        fake.link(
            &format!("bus/usb/devices/{}:1.{number}", self.name),
            &format!("../../../{directory}"),
        )
        .dir(&format!("bus/usb/drivers/{driver}"))
        .link(
            &format!("{directory}/driver"),
            &format!("{up}bus/usb/drivers/{driver}"),
        );
        directory
    }

    /// Adds a port of a serial adapter on an interface.
    pub(crate) fn serial_port(
        self,
        fake: &FakeHost,
        number: u32,
        port: u32,
        driver: &str,
        tty: &str,
    ) {
        let directory = format!("{}/{tty}", self.interface(fake, number, driver));
        fake.file(&format!("{directory}/port_number"), format!("{port}\n"));
        let minor = tty
            .trim_start_matches(|c: char| !c.is_ascii_digit())
            .parse()
            .unwrap();
        add_class_node(
            fake,
            "tty",
            &format!("{directory}/tty/{tty}"),
            &format!("/dev/{tty}"),
            (188, minor),
        );
    }

    fn node(&self) -> String {
        let bus: u32 = self.name.split_once('-').unwrap().0.parse().unwrap();
        format!("/dev/bus/usb/{bus:03}/{:03}", self.number)
    }
}

/// Adds the bus of a controller.
pub(crate) fn add_root_hub(fake: &FakeHost, controller: &str, bus: u32, version: &str) {
    let directory = format!("{controller}/usb{bus}");
    fake.file(&format!("{directory}/version"), format!(" {version}\n"))
        .file(&format!("{directory}/idVendor"), "1d6b\n")
        .file(&format!("{directory}/bDeviceClass"), "09\n")
        .link(
            &format!("bus/usb/devices/usb{bus}"),
            &format!("../../../{directory}"),
        )
        .link(
            &format!("bus/usb/devices/{bus}-0:1.0"),
            &format!("../../../{directory}/{bus}-0:1.0"),
        )
        .dir(&format!("{directory}/{bus}-0:1.0"));
}

/// Gives a device a node of the device tree.
pub(crate) fn add_tree_node(fake: &FakeHost, directory: &str, node: &str) {
    let node = format!("firmware/devicetree/base/{node}");
    fake.dir(&node)
        .link(&format!("{directory}/of_node"), &format!("/sys/{node}"));
}

/// Gives a device a path in the ACPI namespace.
pub(crate) fn add_acpi_node(fake: &FakeHost, directory: &str, path: &str) {
    let device = format!("devices/LNXSYSTM:00/LNXSYBUS:00/{}", path.replace('\\', ""));
    fake.file(&format!("{device}/path"), format!("{path}\n"))
        .link(
            &format!("{directory}/firmware_node"),
            &format!("/sys/{device}"),
        );
}

/// Adds an entry of a class, in its directory below `devices`, and its node.
pub(crate) fn add_class_node(
    fake: &FakeHost,
    class: &str,
    directory: &str,
    path: &str,
    numbers: (u32, u32),
) {
    let entry = directory.rsplit('/').next().unwrap();
    fake.file(
        &format!("{directory}/dev"),
        format!("{}:{}\n", numbers.0, numbers.1),
    )
    .link(
        &format!("class/{class}/{entry}"),
        &format!("../../{directory}"),
    );
    add_node(fake, path, numbers, directory);
}

/// Adds a serial port of the board; type 0 is a port without hardware.
pub(crate) fn add_board_port(fake: &FakeHost, directory: &str, minor: u32, kind: &str) {
    fake.file(&format!("{directory}/type"), format!("{kind}\n"));
    add_class_node(fake, "tty", directory, &board_port(directory), (4, minor));
}

pub(crate) fn board_port(directory: &str) -> String {
    format!("/dev/{}", directory.rsplit('/').next().unwrap())
}

pub(crate) fn add_node(fake: &FakeHost, path: &str, (major, minor): (u32, u32), directory: &str) {
    fake.node(NodeInfo {
        path: path.to_owned(),
        kind: NodeKind::Character,
        major,
        minor,
        mode: 0o660,
        uid: 0,
        gid: 20,
        sysfs_path: Some(directory.to_owned()),
    });
}
