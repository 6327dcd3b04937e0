//! Addresses of hardware that are the same after every boot, for names of devices: those of PCI functions, those that the firmware gives
//! (ACPI, device tree), and the ports of a USB controller.
//!
//! The kernel also counts devices in the order in which it finds them: `xhci-hcd.1`, `serio1`, `PNP0501:00`. After a boot such a number may be
//! that of other hardware, so that it names nothing here, except for hardware that has no address at all.
//!
//! ```
//! use nodedock_sdk::address::Hardware;
//! use nodedock_sdk::testing::FakeHost;
//!
//! let fake = FakeHost::new();
//! let directory = "devices/pci0000:00/0000:00:1f.3/sound/card0";
//! let hardware = Hardware::of(&fake.host(), directory)?;
//! assert_eq!(hardware.place(&fake.host())?, "pci0000:00/0000:00:1f.3/sound/card");
//! # Ok::<(), nodedock_sdk::Problem>(())
//! ```

use crate::pci::Address as PciAddress;
use crate::{Host, Problem, ProblemKind, last_segment, present};

/// What these functions read below `/sys`, for a driver's `sysfs_read`: links to the device tree, and paths in the ACPI namespace.
pub const FIRMWARE_FILES: [&str; 3] = [
    "devices/**/of_node",
    "devices/**/firmware_node/path",
    "devices/LNXSYSTM:00/**/path",
];

/// What [`UsbBuses`] reads below `/sys` in addition.
pub const USB_FILES: [&str; 2] = ["bus/usb/devices/*", "bus/usb/devices/*/version"];

/// Directory of the devices that the kernel creates from ACPI tables.
const ACPI_DEVICES: &str = "devices/LNXSYSTM:00";

/// Node of the firmware that a device has.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FirmwareNode {
    /// Path in the ACPI namespace: `_SB_.COM1`.
    Acpi(String),
    /// Path in the device tree: `soc/usb@7e980000`.
    DeviceTree(String),
}

impl FirmwareNode {
    fn of(host: &Host, directory: &str) -> Result<Option<Self>, Problem> {
        let sysfs = host.sysfs();
        let link = sysfs.find_link(&format!("{directory}/of_node"))?;
        if let Some((_, path)) = link
            .as_deref()
            .and_then(|link| link.split_once("devicetree/base/"))
        {
            return Ok(Some(FirmwareNode::DeviceTree(path.to_owned())));
        }
        let is_acpi = directory
            .strip_prefix(ACPI_DEVICES)
            .is_some_and(|below| below.starts_with('/'));
        let file = if is_acpi {
            "path"
        } else {
            "firmware_node/path"
        };
        let path = optional(sysfs.read(&format!("{directory}/{file}")))?;
        Ok(path.map(|path| FirmwareNode::Acpi(path.trim().trim_start_matches('\\').to_owned())))
    }

    /// Returns whether the kernel made this name from the node of the device tree alone: `3f980000.usb`, `soc:sound`, `soc@0`.
    fn made(&self, segment: &str) -> bool {
        let FirmwareNode::DeviceTree(path) = self else {
            return false;
        };
        let node = last_segment(path);
        let name = node.split('@').next().unwrap_or(&node);
        let by_address = segment
            .split_once('.')
            .is_some_and(|(at, rest)| is_hex(at) && rest == name);
        by_address || segment.rsplit(':').next() == Some(&node)
    }

    fn text(&self) -> String {
        match self {
            FirmwareNode::Acpi(path) => format!("acpi-{path}"),
            FirmwareNode::DeviceTree(path) => format!("of-{path}"),
        }
    }
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The hardware that a directory below `/sys/devices` belongs to: the closest device that has a fixed address.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// Its directory; the whole one that was looked for, for hardware without an address.
    directory: String,
    /// The kernel's path below it, down to the requested directory.
    below: String,
    /// `None` for a PCI function, and for hardware without an address.
    node: Option<FirmwareNode>,
}

impl Hardware {
    /// Finds the closest device with an address, from a directory (`devices/pci0000:00/0000:00:1f.3/sound/card0`) upwards.
    ///
    /// # Errors
    ///
    /// Those of reads below `/sys`, except for files that do not exist.
    pub fn of(host: &Host, directory: &str) -> Result<Self, Problem> {
        for candidate in ancestors(directory) {
            if is_pci(candidate) {
                return Ok(Self::at(directory, candidate, None));
            }
            if let Some(node) = FirmwareNode::of(host, candidate)? {
                let owner = owner(host, candidate, &node)?;
                return Ok(Self::at(
                    directory,
                    owner,
                    Some(node).filter(|_| !is_pci(owner)),
                ));
            }
        }
        Ok(Self::at(directory, directory, None))
    }

    fn at(whole: &str, directory: &str, node: Option<FirmwareNode>) -> Self {
        let below = whole
            .strip_prefix(directory)
            .unwrap_or_default()
            .trim_start_matches('/');
        Hardware {
            directory: directory.to_owned(),
            below: below.to_owned(),
            node,
        }
    }

    /// Returns the address of a USB controller in the manner of `/dev/serial/by-path`: `pci-0000:00:14.0`, `platform-3f980000.usb`.
    pub fn of_controller(&self) -> String {
        let name = last_segment(&self.directory);
        match &self.node {
            Some(node) if !node.made(&name) => node.text(),
            None if is_pci(&name) => format!("pci-{name}"),
            _ => format!("platform-{name}"),
        }
    }

    /// Returns the kernel's names below the address, with their numbers: what distinguishes two controllers of one address.
    pub fn below(&self) -> &str {
        &self.below
    }

    /// Returns the place of a device that is not on USB: its directory without `devices/`, if each name in it is an address, and otherwise the
    /// address alone. What the kernel has below the address follows without numbers.
    ///
    /// # Errors
    ///
    /// Those of reads below `/sys`, except for files that do not exist.
    pub fn place(&self, host: &Host) -> Result<String, Problem> {
        let directory = self
            .directory
            .strip_prefix("devices/")
            .unwrap_or(&self.directory);
        let address = match &self.node {
            Some(node) if !self.is_of_addresses(host)? => node.text(),
            None if is_pci(directory) && !self.is_of_addresses(host)? => {
                format!("pci-{}", last_segment(directory))
            }
            _ => directory.to_owned(),
        };
        let names = self.below.split('/').filter_map(uncounted);
        Ok(names.fold(address, |place, name| format!("{place}/{name}")))
    }

    fn is_of_addresses(&self, host: &Host) -> Result<bool, Problem> {
        for directory in ancestors(&self.directory) {
            if !is_fixed(host, directory)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the directory and those above it, the closest first, without `devices` itself.
fn ancestors(directory: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(directory), |path| {
        path.rsplit_once('/')
            .map(|(parent, _)| parent)
            .filter(|parent| parent.contains('/'))
    })
}

/// A device that the kernel creates for a part of another has the firmware's node of that other: returns the directory of the device itself.
fn owner<'a>(host: &Host, directory: &'a str, node: &FirmwareNode) -> Result<&'a str, Problem> {
    let mut owner = directory;
    for above in ancestors(directory).skip(1) {
        if FirmwareNode::of(host, above)?.as_ref() != Some(node) {
            break;
        }
        owner = above;
    }
    Ok(owner)
}

/// Returns whether the name of a directory is an address, and no number that the kernel counts.
fn is_fixed(host: &Host, directory: &str) -> Result<bool, Problem> {
    let name = last_segment(directory);
    if directory == "devices/platform" || is_pci(&name) || crate::pci::root(&name).is_some() {
        return Ok(true);
    }
    Ok(FirmwareNode::of(host, directory)?.is_some_and(|node| node.made(&name)))
}

/// Returns whether the directory is that of a PCI function: `0000:00:14.0`.
fn is_pci(directory: &str) -> bool {
    PciAddress::parse(&last_segment(directory)).is_some()
}

/// Returns what the kernel's name of a device says without its number: `rk805-pwrkey` of `rk805-pwrkey.2.auto`; `None` if it is only numbers.
fn uncounted(name: &str) -> Option<&str> {
    if is_guid(name) {
        return Some(name);
    }
    let name = name.strip_suffix(".auto").unwrap_or(name);
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | ':'));
    text.starts_with(|c: char| !c.is_ascii_digit())
        .then_some(text)
}

/// Returns whether this is the name of a device of a Hyper-V machine, which does not change.
fn is_guid(name: &str) -> bool {
    let lengths: Vec<usize> = name.split('-').map(str::len).collect();
    lengths == [8, 4, 4, 4, 12]
        && name
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

/// A file or link that does not exist is a fact about the device; a value that the kernel does not have now is not.
fn optional<T>(read: Result<T, Problem>) -> Result<Option<T>, Problem> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}

const USB_DEVICES: &str = "bus/usb/devices";

/// A bus, which is one of a controller: a controller with ports of USB 2 and USB 3 has a bus for each, and only the version distinguishes
/// them.
#[derive(Debug)]
struct UsbBus {
    number: String,
    /// Controller and version, in the manner of `/dev/serial/by-path`: `pci-0000:00:14.0`, `2`.
    address: (String, String),
    /// The kernel's names below the address, which it counts: `xhci-hcd.1.auto`.
    below: String,
}

impl UsbBus {
    fn read(host: &Host, number: &str) -> Result<Self, Problem> {
        let root = format!("usb{number}");
        let directory = host.sysfs().read_link(&format!("{USB_DEVICES}/{root}"))?;
        let controller = directory
            .strip_suffix(&root)
            .unwrap_or(&directory)
            .trim_end_matches('/');
        let hardware = Hardware::of(host, controller)?;
        // no error: a bus without the file has no version
        let version = optional(host.sysfs().read(&format!("{USB_DEVICES}/{root}/version")))?
            .unwrap_or_default();
        let version = version.trim().split('.').next().unwrap_or_default();
        Ok(UsbBus {
            number: number.to_owned(),
            address: (hardware.of_controller(), version.to_owned()),
            below: hardware.below().replace('/', "-"),
        })
    }
}

/// The USB buses of the node, for names of devices by their ports. The numbers of buses may be others after a boot.
///
/// ```
/// use nodedock_sdk::address::UsbBuses;
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// let controller = "devices/pci0000:00/0000:00:14.0";
/// fake.file(&format!("{controller}/usb1/version"), " 2.00\n")
///     .link("bus/usb/devices/usb1", &format!("../../../{controller}/usb1"));
/// let buses = UsbBuses::read(&fake.host())?;
/// assert_eq!(buses.path_of("1-2.3").as_deref(), Some("pci-0000:00:14.0-usbv2-0:2.3"));
/// assert_eq!(buses.path_of("2-1"), None);
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Debug)]
pub struct UsbBuses(Vec<UsbBus>);

impl UsbBuses {
    /// Reads the buses. One that disappears while it is read is left out.
    ///
    /// # Errors
    ///
    /// Those of reads below `/sys`.
    pub fn read(host: &Host) -> Result<Self, Problem> {
        let mut buses = Vec::new();
        for path in host.sysfs().glob(&format!("{USB_DEVICES}/usb*"))? {
            let root = last_segment(&path);
            buses.extend(present(UsbBus::read(host, root.trim_start_matches("usb")))?);
        }
        Ok(UsbBuses(buses))
    }

    /// Returns controller, version and ports of a device (`1-2.3`), in the manner of `/dev/serial/by-path`: `pci-0000:00:14.0-usbv2-0:2.3`;
    /// `None` if its bus is not there.
    pub fn path_of(&self, device: &str) -> Option<String> {
        let (number, ports) = device.split_once('-')?;
        let bus = self.0.iter().find(|bus| bus.number == number)?;
        let (controller, version) = &bus.address;
        let is_alone = self
            .0
            .iter()
            .all(|other| other.number == number || other.address != bus.address);
        // Hardware with one address has several controllers, and only the kernel's number distinguishes them.
        let below = if is_alone {
            String::new()
        } else {
            format!("-{}", bus.below)
        };
        Some(format!("{controller}{below}-usbv{version}-0:{ports}"))
    }
}

/// The hardware of a device node or another entry of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// `usb`, `pci`, or `platform` for everything else.
    pub bus: &'static str,
    /// The kernel's name on the bus, such as `1-2.3` or `0000:3b:00.0`: the name in `bus/usb/devices`, `bus/pci/devices`. Empty for `platform`.
    pub name: String,
    /// Fixed address: `pci-0000:00:14.0-usbv2-0:2.3`, `pci-0000:3b:00.0`, `platform-3f801000.csi`, `acpi-_SB_.COM1`, `of-soc/i2c@7e205000/imx219@10`.
    pub path: String,
}

impl UsbBuses {
    /// Returns the hardware that a directory below `/sys/devices` belongs to. `None` for what is virtual, and for a USB device whose bus is
    /// not there.
    ///
    /// ```
    /// use nodedock_sdk::address::UsbBuses;
    /// use nodedock_sdk::testing::FakeHost;
    ///
    /// let host = FakeHost::new().host();
    /// let location = UsbBuses::read(&host)?.locate(&host, "devices/pci0000:00/0000:00:0b.0/accel/accel0")?;
    /// let location = location.expect("it is hardware");
    /// assert_eq!((location.bus, location.path.as_str()), ("pci", "pci-0000:00:0b.0"));
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of reads below `/sys`, except for files that do not exist.
    pub fn locate(&self, host: &Host, directory: &str) -> Result<Option<Location>, Problem> {
        if directory.starts_with("devices/virtual/") {
            return Ok(None);
        }
        if let Some(name) = usb_device(directory) {
            return Ok(self.path_of(name).map(|path| Location {
                bus: "usb",
                name: name.to_owned(),
                path,
            }));
        }
        let path = Hardware::of(host, directory)?.of_controller();
        let (bus, name) = match path.strip_prefix("pci-") {
            Some(name) => ("pci", name.to_owned()),
            None => ("platform", String::new()),
        };
        Ok(Some(Location { bus, name, path }))
    }
}

/// Returns the USB device (`1-2.3`) that a directory is part of: the one above its interface (`1-2.3:1.0`).
fn usb_device(directory: &str) -> Option<&str> {
    ancestors(directory).find_map(|path| {
        let mut segments = path.rsplit('/');
        let (name, _) = segments.next()?.split_once(':')?;
        segments.next().filter(|device| *device == name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeHost;

    fn add_tree_node(fake: &FakeHost, directory: &str, node: &str) {
        let node = format!("firmware/devicetree/base/{node}");
        fake.dir(&node)
            .link(&format!("{directory}/of_node"), &format!("/sys/{node}"));
    }

    fn add_acpi_node(fake: &FakeHost, directory: &str, path: &str) {
        let device = format!("devices/LNXSYSTM:00/LNXSYBUS:00/{}", path.replace('\\', ""));
        fake.file(&format!("{device}/path"), format!("{path}\n"))
            .link(
                &format!("{directory}/firmware_node"),
                &format!("/sys/{device}"),
            );
    }

    fn both(fake: &FakeHost, directory: &str) -> (String, String) {
        let host = fake.host();
        let hardware = Hardware::of(&host, directory).unwrap();
        (hardware.of_controller(), hardware.place(&host).unwrap())
    }

    #[test]
    fn a_pci_function_is_its_address() {
        let fake = FakeHost::new();
        let function = "devices/pci0000:00/0000:00:14.0";
        add_acpi_node(&fake, function, "\\_SB_.PCI0.XHC_");
        let expected = (
            "pci-0000:00:14.0".to_owned(),
            "pci0000:00/0000:00:14.0".to_owned(),
        );
        assert_eq!(both(&fake, function), expected);
        // A controller of two roles has the node of its function.
        let role = format!("{function}/dwc3.0.auto");
        add_acpi_node(&fake, &role, "\\_SB_.PCI0.XHC_");
        assert_eq!(
            both(&fake, &format!("{role}/xhci-hcd.1.auto")).0,
            expected.0
        );
    }

    #[test]
    fn pci_function_uses_address_as_name() {
        let fake = FakeHost::new();
        let bus = "devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00";
        fake.file(&format!("{bus}/path"), "\\_SB_.VMOD.VMBS\n");
        let function =
            format!("{bus}/47505500-0001-0000-3130-444532333430/pci0001:00/0001:00:00.0");
        assert_eq!(both(&fake, &function).1, "pci-0001:00:00.0");
        let keyboard = format!("{bus}/d34b2567-b9b6-42b9-8778-0a4ec0b955bf/serio0");
        assert_eq!(
            both(&fake, &keyboard).1,
            "acpi-_SB_.VMOD.VMBS/d34b2567-b9b6-42b9-8778-0a4ec0b955bf/serio"
        );
    }

    #[test]
    fn device_tree_kernel_names_are_kept() {
        let fake = FakeHost::new();
        for (segment, node) in [
            ("soc@0", "soc@0"),
            ("soc@0/3f980000.usb", "soc@0/usb@7e980000"),
            ("soc@0/soc@0:sound", "soc@0/sound"),
        ] {
            add_tree_node(&fake, &format!("devices/platform/{segment}"), node);
        }
        let usb = (
            "platform-3f980000.usb".to_owned(),
            "platform/soc@0/3f980000.usb".to_owned(),
        );
        assert_eq!(both(&fake, "devices/platform/soc@0/3f980000.usb"), usb);
        assert_eq!(
            both(&fake, "devices/platform/soc@0/soc@0:sound").1,
            "platform/soc@0/soc@0:sound"
        );
        // In later kernels the controller has the node of the device above it.
        add_tree_node(
            &fake,
            "devices/platform/soc@0/3f980000.usb/xhci-hcd.3.auto",
            "soc@0/usb@7e980000",
        );
        let controller = both(&fake, "devices/platform/soc@0/3f980000.usb/xhci-hcd.3.auto");
        assert_eq!(controller, (usb.0, format!("{}/xhci-hcd", usb.1)));
    }

    #[test]
    fn counted_names_become_firmware_names() {
        let fake = FakeHost::new();
        add_tree_node(
            &fake,
            "devices/platform/soc/fe804000.i2c/i2c-1/1-005d",
            "soc/i2c@7e804000/touch@5d",
        );
        add_acpi_node(&fake, "devices/platform/PNP0D10:01", "\\_SB_.USB1");
        fake.file("devices/LNXSYSTM:00/LNXPWRBN:00/path", "\\PWRF\n");
        for (directory, address) in [
            (
                "devices/platform/soc/fe804000.i2c/i2c-1/1-005d",
                "of-soc/i2c@7e804000/touch@5d",
            ),
            ("devices/platform/PNP0D10:01", "acpi-_SB_.USB1"),
            ("devices/LNXSYSTM:00/LNXPWRBN:00", "acpi-PWRF"),
        ] {
            assert_eq!(
                both(&fake, directory),
                (address.to_owned(), address.to_owned())
            );
        }
    }

    #[test]
    fn hardware_without_address_keeps_kernel_names() {
        let fake = FakeHost::new();
        let expected = (
            "platform-xhci-hcd.0.auto".to_owned(),
            "platform/xhci-hcd.0.auto".to_owned(),
        );
        assert_eq!(both(&fake, "devices/platform/xhci-hcd.0.auto"), expected);
    }

    #[test]
    fn location_names_bus_and_address() {
        let fake = FakeHost::new();
        let controller = "devices/pci0000:00/0000:00:14.0";
        fake.file(&format!("{controller}/usb1/version"), " 2.00\n")
            .link(
                "bus/usb/devices/usb1",
                &format!("../../../{controller}/usb1"),
            );
        let sensor = "devices/platform/soc/fe804000.i2c/i2c-10/10-0010";
        add_tree_node(&fake, sensor, "soc/i2c@7e804000/imx219@10");
        let host = fake.host();
        let buses = UsbBuses::read(&host).unwrap();
        let camera = format!("{controller}/usb1/1-5/1-5.1/1-5.1:1.0");
        for (directory, bus, name, path) in [
            (
                format!("{camera}/video4linux/video0"),
                "usb",
                "1-5.1",
                "pci-0000:00:14.0-usbv2-0:5.1",
            ),
            (
                format!("{controller}/video4linux/video0"),
                "pci",
                "0000:00:14.0",
                "pci-0000:00:14.0",
            ),
            (
                format!("{sensor}/video4linux/v4l-subdev0"),
                "platform",
                "",
                "of-soc/i2c@7e804000/imx219@10",
            ),
        ] {
            let location = buses.locate(&host, &directory).unwrap().unwrap();
            let found = (location.bus, &*location.name, &*location.path);
            assert_eq!(found, (bus, name, path), "{directory}");
        }
        for none in [
            "devices/virtual/video4linux/video9",
            "devices/platform/usb2/2-1/2-1:1.0/video4linux/video0",
        ] {
            assert_eq!(buses.locate(&host, none).unwrap(), None, "{none}");
        }
    }

    #[test]
    fn names_lose_their_numbers() {
        for (name, text) in [
            ("rk805-pwrkey.2.auto", Some("rk805-pwrkey")),
            ("serio1", Some("serio")),
            ("spi0.0", Some("spi")),
            ("skl_hda_dsp_generic", Some("skl_hda_dsp_generic")),
            ("1-005d", None),
            ("00:04:0.0", None),
            ("", None),
        ] {
            assert_eq!(uncounted(name), text, "{name}");
        }
    }

    #[test]
    fn unreadable_node_is_an_error() {
        let fake = FakeHost::new();
        add_acpi_node(&fake, "devices/platform/PNP0D10:01", "\\_SB_.USB1");
        for path in ["of_node", "firmware_node/path"] {
            let path = format!("devices/platform/PNP0D10:01/{path}");
            let failed = Problem::unavailable("io-error", "no memory");
            fake.fail(&path, failed.clone());
            assert_eq!(
                Hardware::of(&fake.host(), "devices/platform/PNP0D10:01").unwrap_err(),
                failed
            );
            fake.heal(&path);
        }
    }
}
