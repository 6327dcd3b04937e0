//! Trees of devices as the kernel shows them below `/sys`.

use nodedock_sdk::testing::FakeHost;
use nodedock_sdk::{NodeInfo, NodeKind};

const CONTROLLER: &str = "devices/pci0000:00/0000:00:14.0";

/// A USB device; an empty text is a descriptor that it does not have.
#[derive(Clone, Copy)]
pub(super) struct Usb {
    /// Bus and ports: `1-2.3`.
    pub(super) name: &'static str,
    /// Number on the bus, which differs after every plug.
    pub(super) number: u32,
    pub(super) class: &'static str,
    pub(super) vendor: &'static str,
    pub(super) product: &'static str,
    pub(super) manufacturer: &'static str,
    pub(super) model: &'static str,
    pub(super) serial: &'static str,
}

impl Usb {
    pub(super) const fn at(name: &'static str, number: u32) -> Self {
        let (vendor, product) = ("1d6b", "0104");
        Usb { name, number, class: "00", vendor, product, manufacturer: "", model: "", serial: "" }
    }

    /// Returns its directory, below those of the hubs in between.
    pub(super) fn directory(&self) -> String {
        let (bus, ports) = self.name.split_once('-').unwrap();
        let mut directory = format!("{CONTROLLER}/usb{bus}");
        for (index, _) in ports.match_indices('.').chain([(ports.len(), "")]) {
            directory = format!("{directory}/{bus}-{}", &ports[..index]);
        }
        directory
    }

    pub(super) fn plug(self, fake: &FakeHost) -> Self {
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
        text("busnum", "1");
        text("devnum", &self.number.to_string());
        text("dev", &format!("189:{}", self.number - 1));
        fake.link(&format!("bus/usb/devices/{}", self.name), &format!("../../../{directory}"));
        add_node(fake, &self.node(), (189, self.number - 1), &directory);
        self
    }

    pub(super) fn unplug(self, fake: &FakeHost) {
        fake.remove(&self.directory()).remove(&self.node());
        for name in [self.name.to_owned(), format!("{}:1.0", self.name)] {
            fake.remove(&format!("bus/usb/devices/{name}"));
        }
    }

    pub(super) fn interface_directory(self, number: u32) -> String {
        format!("{}/{}:1.{number}", self.directory(), self.name)
    }

    /// Adds an interface and returns its directory.
    pub(super) fn interface(self, fake: &FakeHost, number: u32, driver: &str) -> String {
        let directory = self.interface_directory(number);
        let up = "../".repeat(directory.split('/').count());
        fake.link(&format!("bus/usb/devices/{}:1.{number}", self.name), &format!("../../../{directory}"))
            .dir(&format!("bus/usb/drivers/{driver}"))
            .link(&format!("{directory}/driver"), &format!("{up}bus/usb/drivers/{driver}"));
        directory
    }

    /// Adds a port of a serial adapter on an interface.
    pub(super) fn serial_port(self, fake: &FakeHost, number: u32, port: u32, driver: &str, tty: &str) {
        let directory = format!("{}/{tty}", self.interface(fake, number, driver));
        fake.file(&format!("{directory}/port_number"), format!("{port}\n"));
        let minor = tty.trim_start_matches("ttyUSB").parse().unwrap();
        add_class_node(fake, "tty", &format!("{directory}/tty/{tty}"), &format!("/dev/{tty}"), (188, minor));
    }

    fn node(&self) -> String {
        format!("/dev/bus/usb/001/{:03}", self.number)
    }
}

pub(super) fn add_root_hub(fake: &FakeHost) {
    let directory = format!("{CONTROLLER}/usb1");
    fake.file(&format!("{directory}/version"), " 2.00\n")
        .file(&format!("{directory}/idVendor"), "1d6b\n")
        .file(&format!("{directory}/bDeviceClass"), "09\n")
        .link("bus/usb/devices/usb1", &format!("../../../{directory}"))
        .link("bus/usb/devices/1-0:1.0", &format!("../../../{directory}/1-0:1.0"))
        .dir(&format!("{directory}/1-0:1.0"));
}

/// Adds an entry of a class, in its directory below `devices`, and its node.
pub(super) fn add_class_node(fake: &FakeHost, class: &str, directory: &str, path: &str, numbers: (u32, u32)) {
    let entry = directory.rsplit('/').next().unwrap();
    fake.file(&format!("{directory}/dev"), format!("{}:{}\n", numbers.0, numbers.1))
        .link(&format!("class/{class}/{entry}"), &format!("../../{directory}"));
    add_node(fake, path, numbers, directory);
}

/// Adds a serial port of the board; type 0 is a port without hardware.
pub(super) fn add_board_port(fake: &FakeHost, directory: &str, minor: u32, kind: &str) {
    fake.file(&format!("{directory}/type"), format!("{kind}\n"));
    add_class_node(fake, "tty", directory, &board_port(directory), (4, minor));
}

pub(super) fn board_port(directory: &str) -> String {
    format!("/dev/{}", directory.rsplit('/').next().unwrap())
}

pub(super) fn add_node(fake: &FakeHost, path: &str, (major, minor): (u32, u32), directory: &str) {
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
