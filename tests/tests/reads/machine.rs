//! A machine with devices for each example driver, whose directories are reached by links with `..` as in a kernel's sysfs.

use std::path::Path;

use nodedock_tests::recorded::Recorded;
use tempfile::TempDir;

const AMD: &str = "0000:01:00.0";
const NVIDIA: &str = "0000:02:00.0";
const NIC: &str = "0000:03:00.0";
const CARD: &str = "0000:04:00.0";

/// Drivers with a machine of their own, whose devices are those of the conformance cases.
const SIMPLE: [&str; 3] = ["accel", "block", "camera"];

pub(super) struct Machines {
    full: TempDir,
    simple: TempDir,
}

impl Machines {
    pub(super) fn make() -> Self {
        let [full, simple] = [(); 2].map(|()| tempfile::tempdir().expect("a new directory"));
        make(full.path());
        Recorded::new(simple.path(), &["intel_vpu", "apex"])
            .cameras()
            .accelerators()
            .disks();
        add_nodes(simple.path(), &simple.path().join("sys/devices"));
        Self { full, simple }
    }

    /// Returns the directory of the machine with devices for a driver.
    pub(super) fn of(&self, driver: &str) -> &Path {
        let machine = if SIMPLE.contains(&driver) {
            &self.simple
        } else {
            &self.full
        };
        machine.path()
    }
}

/// Adds the nodes below `/dev` of the devices in a directory and below it.
fn add_nodes(root: &Path, directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            add_nodes(root, &path);
        }
        if !path.ends_with("uevent") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let value = |key: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            lines.find_map(|(name, value)| (name == key).then_some(value))
        };
        let (Some(name), Some(major), Some(minor)) =
            (value("DEVNAME"), value("MAJOR"), value("MINOR"))
        else {
            continue;
        };
        let subsystem = std::fs::read_link(directory.join("subsystem")).unwrap();
        let kind = if subsystem.ends_with("block") {
            "block"
        } else {
            "character"
        };
        let node = root.join("dev").join(name);
        std::fs::create_dir_all(node.parent().unwrap()).unwrap();
        std::fs::write(node, format!("{kind} {major}:{minor}\n")).unwrap();
    }
}

fn make(root: &Path) {
    let machine = Recorded::new(root, &["amdgpu", "nvidia", "igb", "mlx5_core", "vfio-pci"]);
    machine
        .function(AMD, "0x030000", "amdgpu", Some(1))
        .function(NVIDIA, "0x030000", "nvidia", Some(2))
        .value(NVIDIA, "vendor", "0x10de")
        .function(NIC, "0x020000", "igb", Some(3))
        .card(CARD)
        .file("sys/devices/system/cpu/online", "0-3")
        .file("proc/self/mountinfo", "");
    let drm = format!("sys/devices/pci0000:00/{AMD}/drm/card0");
    machine
        .device_node(&drm, 226, 0, "dri/card0")
        .file("sys/class/drm/version", "drm 1.1.0")
        .link(
            "sys/dev/char/226:0",
            &format!("../../devices/pci0000:00/{AMD}/drm/card0"),
        )
        .file("dev/dri/card0", "character 226:0");
    machine
        .file(
            &format!("proc/driver/nvidia/gpus/{NVIDIA}/information"),
            "Model: A GPU\nGPU UUID: GPU-1\nDevice Minor: 0\nGPU Excluded: No",
        )
        .file(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15",
        )
        .file("proc/devices", "Character devices:\n195 nvidia-frontend")
        .file("dev/nvidia0", "character 195:0")
        .file("dev/nvidiactl", "character 195:255");
    usb_serial_adapter(&machine);
    serial_port_of_the_board(&machine);
}

/// A port that its path in the ACPI namespace names, and one that its node of the device tree does.
fn serial_port_of_the_board(machine: &Recorded) {
    let (acpi, tree) = ("devices/pnp0/00:04", "devices/platform/spi0.0");
    let (acpi_node, tree_node) = (
        "devices/LNXSYSTM:00/PNP0501:00",
        "firmware/devicetree/base/spi@7e204000/uart@0",
    );
    machine
        .file(&format!("sys/{acpi_node}/path"), "\\_SB_.COM1")
        .link(&format!("sys/{acpi}/firmware_node"), &up(acpi, acpi_node))
        .file(&format!("sys/{tree_node}/name"), "uart")
        .link(&format!("sys/{tree}/of_node"), &up(tree, tree_node));
    for (directory, tty, minor) in [(acpi, "ttyS0", 64), (tree, "ttySC1", 80)] {
        machine
            .file(
                &format!("sys/{directory}/tty/{tty}/dev"),
                &format!("4:{minor}"),
            )
            .file(&format!("sys/{directory}/tty/{tty}/type"), "4")
            .link(
                &format!("sys/class/tty/{tty}"),
                &format!("../../{directory}/tty/{tty}"),
            )
            .file(&format!("dev/{tty}"), &format!("character 4:{minor}"));
    }
}

fn usb_serial_adapter(machine: &Recorded) {
    let usb = format!("devices/pci0000:00/{NIC}/usb1");
    let (device, interface) = (format!("{usb}/1-2"), format!("{usb}/1-2/1-2:1.0"));
    for (file, value) in [
        ("bDeviceClass", "00"),
        ("idVendor", "0403"),
        ("idProduct", "6001"),
        ("serial", "A1"),
        ("busnum", "1"),
        ("devnum", "4"),
        ("dev", "189:3"),
        ("speed", "12"),
    ] {
        machine.file(&format!("sys/{device}/{file}"), value);
    }
    machine
        .file(&format!("sys/{usb}/version"), "2.00")
        .file(&format!("sys/{interface}/ttyUSB0/port_number"), "0")
        .file(&format!("sys/{interface}/ttyUSB0/tty/ttyUSB0/dev"), "188:0")
        .link("sys/bus/usb/devices/usb1", &format!("../../../{usb}"))
        .link("sys/bus/usb/devices/1-2", &format!("../../../{device}"))
        .link(
            "sys/bus/usb/devices/1-2:1.0",
            &format!("../../../{interface}"),
        )
        .link(
            "sys/class/tty/ttyUSB0",
            &format!("../../{interface}/ttyUSB0/tty/ttyUSB0"),
        )
        .file("sys/class/tty/console/active", "tty0")
        .link(
            &format!("sys/{interface}/ttyUSB0/tty/ttyUSB0/subsystem"),
            &up(&format!("{interface}/ttyUSB0/tty/ttyUSB0"), "class/tty"),
        )
        .link(&format!("sys/{device}/subsystem"), &up(&device, "bus/usb"))
        .link("sys/dev/char/189:3", &format!("../../{device}"))
        .link(
            "sys/dev/char/188:0",
            &format!("../../{interface}/ttyUSB0/tty/ttyUSB0"),
        )
        .file("dev/ttyUSB0", "character 188:0")
        .file("dev/bus/usb/001/004", "character 189:3");
}

/// A target of a link in a directory below `/sys`.
fn up(directory: &str, target: &str) -> String {
    format!("{}{target}", "../".repeat(directory.split('/').count()))
}
