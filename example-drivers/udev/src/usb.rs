//! Reads USB devices from `bus/usb/devices`.

use std::collections::BTreeMap;

use nodedock_sdk::address::UsbBuses;
use nodedock_sdk::{Host, Problem, last_segment, present};

use crate::read::optional;
use crate::text::descriptor;

const DEVICES: &str = "bus/usb/devices";

/// Class of hubs. The raw node of a hub gives control of every port, so that the driver never offers one.
const HUB_CLASS: &str = "09";

/// Functions of a device that have identities of their own. A device with more of them is used as a whole: an inventory's device has
/// at most 16 identities, and the raw node also has those of the device and of the node.
const FUNCTIONS_MAX: usize = 14;

/// An interface of a USB device, named as the kernel names it: `1-2.3:1.0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interface {
    /// Bus and ports, such as `1-2.3`.
    pub(crate) device: String,
    configuration: u8,
    pub(crate) number: u8,
}

impl Interface {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (device, numbers) = name.split_once(':')?;
        let (configuration, number) = numbers.split_once('.')?;
        is_device(device).then_some(())?;
        Some(Interface {
            device: device.to_owned(),
            configuration: configuration.parse().ok()?,
            number: number.parse().ok()?,
        })
    }

    pub(crate) fn name(&self) -> String {
        format!("{}:{}", self.device, self.numbers())
    }

    /// Returns configuration and number: `1.0`.
    pub(crate) fn numbers(&self) -> String {
        format!("{}.{}", self.configuration, self.number)
    }
}

/// Returns whether this is the kernel's name of a device behind a port: `1-2.3`.
fn is_device(name: &str) -> bool {
    name.split_once('-')
        .is_some_and(|(bus, ports)| is_number(bus) && ports.split('.').all(is_number))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[derive(Clone, Debug)]
pub(crate) struct UsbDevice {
    /// Bus and ports, such as `1-2.3`. The number of the bus may differ after a boot.
    pub(crate) name: String,
    /// Address of the controller, and ports: `pci-0000:00:14.0-usbv2-0:2.3`.
    pub(crate) path: String,
    /// Directory in `/sys`.
    pub(crate) directory: String,
    /// Vendor ID, as the next field: four hex digits.
    pub(crate) vendor: String,
    pub(crate) product: String,
    pub(crate) serial: Option<String>,
    pub(crate) manufacturer: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) speed_kbps: Option<u32>,
    /// Path and numbers of the raw node.
    pub(crate) node: Option<(String, u32, u32)>,
    pub(crate) driver: Option<String>,
    /// Identities of its functions; empty if the device is used as a whole.
    functions: Vec<String>,
}

impl UsbDevice {
    /// Returns the identity of the device as a whole.
    pub(crate) fn identity(&self) -> String {
        format!("usb:{}", self.name)
    }

    /// Returns the identities of the raw node: the device and each of its functions.
    pub(crate) fn all_identities(&self) -> Vec<String> {
        [self.identity()]
            .into_iter()
            .chain(self.functions.iter().cloned())
            .collect()
    }

    /// Returns the identity of one function, or of the device if it has too many of them.
    pub(crate) fn function_identity(&self, interface: &Interface, port: Option<u32>) -> String {
        let function = function_identity(interface, port);
        if self.functions.contains(&function) {
            function
        } else {
            self.identity()
        }
    }
}

/// Returns the identity of a function. The first port of an interface has the interface's identity, so that a serial port and another
/// function of the interface exclude each other.
fn function_identity(interface: &Interface, port: Option<u32>) -> String {
    match port {
        None | Some(0) => format!("usb:{}", interface.name()),
        Some(port) => format!("usb:{}-port{port}", interface.name()),
    }
}

/// The USB devices of the node, without hubs.
#[derive(Debug, Default)]
pub(crate) struct UsbDevices {
    by_name: BTreeMap<String, UsbDevice>,
    /// Numbers of the ports of USB serial adapters, by name of the tty.
    ports: BTreeMap<String, u32>,
}

impl UsbDevices {
    pub(crate) fn read(host: &Host) -> Result<Self, Problem> {
        let paths = host.sysfs().glob(&format!("{DEVICES}/*"))?;
        let names: Vec<&str> = paths
            .iter()
            .filter_map(|path| path.rsplit('/').next())
            .collect();
        let mut functions: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for interface in names.iter().filter_map(|name| Interface::parse(name)) {
            functions
                .entry(interface.device.clone())
                .or_default()
                .push(function_identity(&interface, None));
        }
        let mut devices = UsbDevices::default();
        for (interface, tty, port) in ports(host)? {
            if port > 0 {
                let identity = function_identity(&interface, Some(port));
                functions
                    .entry(interface.device)
                    .or_default()
                    .push(identity);
            }
            devices.ports.insert(tty, port);
        }
        let buses = UsbBuses::read(host)?;
        for name in names.into_iter().filter(|name| is_device(name)) {
            let mut functions = functions.remove(name).unwrap_or_default();
            if functions.len() > FUNCTIONS_MAX {
                functions.clear();
            }
            if let Some(device) = present(read_device(host, &buses, name, functions))?.flatten() {
                devices.by_name.insert(name.to_owned(), device);
            }
        }
        Ok(devices)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&UsbDevice> {
        self.by_name.get(name)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &UsbDevice> {
        self.by_name.values()
    }

    /// Returns the number of a serial adapter's port; `None` for a tty that is not one, such as that of a modem (`ttyACM0`).
    pub(crate) fn port_of(&self, tty: &str) -> Option<u32> {
        self.ports.get(tty).copied()
    }
}

/// Returns the ports of serial adapters: interface, name of the tty, and number.
fn ports(host: &Host) -> Result<Vec<(Interface, String, u32)>, Problem> {
    let mut ports = Vec::new();
    for path in host
        .sysfs()
        .glob(&format!("{DEVICES}/*/tty*/port_number"))?
    {
        if let Some((interface, tty)) = port_at(&path)
            && let Some(number) = host.sysfs().find_parsed(&path)?
        {
            ports.push((interface, tty, number));
        }
    }
    // Drivers such as cdc-acm do not count the ports of an interface, which mostly has one.
    let mut uncounted: BTreeMap<Interface, Vec<String>> = BTreeMap::new();
    for path in host.sysfs().glob(&format!("{DEVICES}/*/tty/*"))? {
        if let Some(interface) = path.rsplit('/').nth(2).and_then(Interface::parse) {
            let ttys = uncounted.entry(interface).or_default();
            ttys.push(last_segment(&path));
        }
    }
    for (interface, mut ttys) in uncounted {
        if ttys.len() > 1 {
            ttys.sort_by_key(|tty| (tty.len(), tty.clone()));
            let numbered = (0_u32..).zip(ttys);
            ports.extend(numbered.map(|(number, tty)| (interface.clone(), tty, number)));
        }
    }
    Ok(ports)
}

/// Returns interface and tty of `…/1-2:1.0/ttyUSB0/port_number`.
fn port_at(path: &str) -> Option<(Interface, String)> {
    let mut segments = path.rsplit('/').skip(1);
    let tty = segments.next()?.to_owned();
    Some((Interface::parse(segments.next()?)?, tty))
}

/// Returns `None` for a hub.
fn read_device(
    host: &Host,
    buses: &UsbBuses,
    name: &str,
    functions: Vec<String>,
) -> Result<Option<UsbDevice>, Problem> {
    let sysfs = host.sysfs();
    let file = |file: &str| format!("{DEVICES}/{name}/{file}");
    let directory = sysfs.read_link(&format!("{DEVICES}/{name}"))?;
    if sysfs.read(&file("bDeviceClass"))? == HUB_CLASS {
        return Ok(None);
    }
    // The device has come, or its bus has gone, since the buses were read.
    let Some(path) = buses.path_of(name) else {
        return Ok(None);
    };
    Ok(Some(UsbDevice {
        path,
        vendor: sysfs.read(&file("idVendor"))?,
        product: sysfs.read(&file("idProduct"))?,
        serial: descriptor(host, &file("serial"))?,
        manufacturer: descriptor(host, &file("manufacturer"))?,
        model: descriptor(host, &file("product"))?,
        speed_kbps: optional(sysfs.read(&file("speed")))?
            .as_deref()
            .and_then(kbps),
        node: raw_node(host, &format!("{DEVICES}/{name}"))?,
        driver: optional(sysfs.read_link(&file("driver")))?
            .as_deref()
            .map(last_segment),
        name: name.to_owned(),
        directory,
        functions,
    }))
}

fn raw_node(host: &Host, directory: &str) -> Result<Option<(String, u32, u32)>, Problem> {
    let number = |name: &str| {
        host.sysfs()
            .read(&format!("{directory}/{name}"))
            .map(|text| text.parse::<u32>().ok())
    };
    let (Some(bus), Some(device), Some((major, minor))) = (
        number("busnum")?,
        number("devnum")?,
        host.sysfs().find_numbers(directory)?,
    ) else {
        return Ok(None);
    };
    Ok(Some((
        format!("/dev/bus/usb/{bus:03}/{device:03}"),
        major,
        minor,
    )))
}

/// Converts the file `speed`, in Mbit/s: `1.5`, `480`, `10000`.
fn kbps(speed: &str) -> Option<u32> {
    let (whole, tenths) = speed.trim().split_once('.').unwrap_or((speed.trim(), "0"));
    let (whole, tenths): (u32, u32) = (whole.parse().ok()?, tenths.parse().ok()?);
    whole
        .checked_mul(1000)?
        .checked_add(tenths.checked_mul(100)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_match_the_kernel() {
        let interface = Interface::parse("10-2.3.4:1.12").unwrap();
        assert_eq!(
            (interface.device.as_str(), interface.number),
            ("10-2.3.4", 12)
        );
        assert_eq!(interface.name(), "10-2.3.4:1.12");
        for name in [
            "1-2",
            "usb1",
            "1-0:1",
            "0000:00:14.0",
            "1-:1.0",
            "a-1:1.0",
            "1-2.:1.0",
            "1-2:1.256",
        ] {
            assert_eq!(Interface::parse(name), None, "{name}");
        }
    }

    #[test]
    fn speeds_are_thousands_of_bits() {
        assert_eq!(
            (kbps("1.5"), kbps("480"), kbps("20000")),
            (Some(1500), Some(480_000), Some(20_000_000))
        );
        assert_eq!((kbps("unknown"), kbps("")), (None, None));
    }
}
