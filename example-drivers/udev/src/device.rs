//! Finds what the rules can offer: serial ports, cameras, raw USB devices, HID, input and sound devices, each with its nodes.

use std::collections::BTreeMap;

use nodedock_sdk::{Device, Host, NodeInfo, Problem, dns_label_hashed, last_segment, present};

use crate::board::{Board, BoardPorts, is_port};
use crate::kind::{Kind, SERIAL_NODES};
use crate::read::optional;
use crate::text::{shortened, whole};
use crate::usb::{Interface, UsbDevice, UsbDevices};

/// The bounds of an inventory's device.
const IDENTITIES_MAX: usize = 16;
const IDENTITY_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// Nodes of a device, fewer than container edits may have. Cameras and sound cards have less than ten; what an input device claims to be
/// decides how many it has.
const NODES_MAX: usize = 32;

/// A device node, as sysfs shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) path: String,
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// Directory in `/sys`.
    directory: String,
    /// The nodes of a device are sorted by it.
    order: (u32, String),
}

impl Node {
    /// Returns whether this is still the node that sysfs showed.
    pub(crate) fn is_same(&self, info: &NodeInfo) -> bool {
        (self.major, self.minor) == (info.major, info.minor)
            && info
                .sysfs_path
                .as_ref()
                .is_none_or(|directory| *directory == self.directory)
    }
}

/// The location of a device.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// A USB device as a whole.
    Usb(UsbDevice),
    /// An interface of a USB device, or a port of a serial adapter's interface.
    Function {
        device: UsbDevice,
        interface: Interface,
        port: Option<u32>,
    },
    /// Hardware that is not on USB: a serial port of the board, for example.
    Board(Board),
}

/// A device that a rule can offer.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) kind: Kind,
    pub(crate) place: Place,
    pub(crate) driver: Option<String>,
    /// Device nodes: at least one; the first is the main one.
    pub(crate) nodes: Vec<Node>,
    /// Why the driver does not offer it.
    pub(crate) refusal: Option<&'static str>,
}

impl Candidate {
    /// Returns every device of a kind that the node has now, also those that the driver does not offer.
    pub(crate) fn all(host: &Host, usb: &UsbDevices, kind: Kind) -> Result<Vec<Self>, Problem> {
        if kind == Kind::Usb {
            return Ok(usb.all().filter_map(raw).collect());
        }
        let mut found: BTreeMap<String, Candidate> = BTreeMap::new();
        let paths = host
            .sysfs()
            .glob(&format!("class/{}/*", kind.subsystem()))?;
        let ports = if kind == Kind::Serial {
            BoardPorts::read(host, &paths)?
        } else {
            BoardPorts::default()
        };
        for path in paths {
            let Some(candidate) = present(read_entry(host, usb, &ports, kind, &path))?.flatten()
            else {
                continue;
            };
            match found.get_mut(&candidate.key()) {
                // A port that has come since the ports of its interface were counted: an event of the kernel says so.
                Some(_) if kind == Kind::Serial => {}
                Some(known) => known.nodes.extend(candidate.nodes),
                None => drop(found.insert(candidate.key(), candidate)),
            }
        }
        Ok(found.into_values().map(with_sorted_nodes).collect())
    }

    pub(crate) fn usb(&self) -> Option<&UsbDevice> {
        match &self.place {
            Place::Usb(device) | Place::Function { device, .. } => Some(device),
            Place::Board(_) => None,
        }
    }

    /// Returns a text that no other device of the kind has now.
    pub(crate) fn key(&self) -> String {
        match &self.place {
            Place::Usb(device) => device.name.clone(),
            Place::Function {
                interface, port, ..
            } => format!("{}{}", interface.name(), port_suffix(*port)),
            Place::Board(board) => board.key(),
        }
    }

    /// Returns a short text that another device at the same place does not have, as far as devices have serial numbers.
    pub(crate) fn fingerprint(&self) -> String {
        let device = self.usb().map(|usb| {
            let serial = usb.serial.as_deref().unwrap_or_default();
            format!("{}:{}:{serial}", usb.vendor, usb.product)
        });
        dns_label_hashed(&format!("{}@{}", device.unwrap_or_default(), self.key()))
    }

    /// Returns the name of `/dev/serial/by-id`: `usb-FTDI_FT232R_USB_UART_A50285BI-if00-port0`; with the IDs in place of the texts if that is
    /// too long for a label. `None` without a serial number.
    pub(crate) fn id(&self) -> Option<String> {
        let usb = self.usb()?;
        let serial = usb.serial.as_ref()?;
        let suffix = match &self.place {
            Place::Function {
                interface, port, ..
            } => {
                format!("-if{:02x}{}", interface.number, port_suffix(*port))
            }
            _ => String::new(),
        };
        let vendor = usb.manufacturer.as_ref().unwrap_or(&usb.vendor);
        let model = usb.model.as_ref().unwrap_or(&usb.product);
        let id = format!("usb-{vendor}_{model}_{serial}{suffix}");
        let is_label = id.len() <= LABEL_BYTES_MAX;
        Some(if is_label {
            id
        } else {
            format!("usb-{}_{}_{serial}{suffix}", usb.vendor, usb.product)
        })
    }

    /// Returns where the device is by fixed addresses, as `/dev/serial/by-path` does: `pci-0000:00:14.0-usbv2-0:2.3:1.0-port0`.
    pub(crate) fn path(&self) -> String {
        match &self.place {
            Place::Usb(device) => device.path.clone(),
            Place::Function {
                device,
                interface,
                port,
            } => {
                format!(
                    "{}:{}{}",
                    device.path,
                    interface.numbers(),
                    port_suffix(*port)
                )
            }
            Place::Board(board) => board.path.clone(),
        }
    }

    /// Returns where the device is as the kernel names it, with numbers that may be others after a boot: `1-2.3`, `pnp0/00:04/ttyS0`.
    pub(crate) fn kernel_path(&self) -> String {
        match &self.place {
            Place::Usb(device) | Place::Function { device, .. } => device.name.clone(),
            Place::Board(board) => board.kernel_path(),
        }
    }

    /// Returns the device for the inventory.
    pub(crate) fn publish(&self, name: &str) -> Device {
        let device = Device::new(name)
            .attribute("subsystem", self.kind.subsystem())
            .attribute_opt("path", whole(&self.path()))
            .attribute_opt("driver", self.driver.as_deref().map(shortened));
        let device = match &self.place {
            Place::Function { interface, .. } => device.attribute("interface", interface.number),
            _ => device,
        };
        let device = self.identities().into_iter().fold(device, Device::identity);
        let Some(usb) = self.usb() else { return device };
        device
            .attribute("vendor", shortened(&usb.vendor))
            .attribute("product", shortened(&usb.product))
            .attribute_opt("serial", usb.serial.as_deref().and_then(whole))
            .attribute_opt("manufacturer", usb.manufacturer.as_deref().map(shortened))
            .attribute_opt("model", usb.model.as_deref().map(shortened))
            .attribute_opt("port", whole(&usb.name))
            .attribute_opt("speedKbps", usb.speed_kbps)
    }

    /// Returns the identities: the place, and the nodes, which the driver device-nodes may offer as well.
    fn identities(&self) -> Vec<String> {
        let mut identities = match &self.place {
            Place::Usb(device) => device.all_identities(),
            Place::Function {
                device,
                interface,
                port,
            } => vec![device.function_identity(interface, *port)],
            Place::Board(board) => vec![format!("sys:{}", board.key())],
        };
        identities.extend(self.nodes.iter().map(|node| format!("dev:{}", node.path)));
        identities.retain(|identity| identity.len() <= IDENTITY_BYTES_MAX);
        identities.truncate(IDENTITIES_MAX);
        identities
    }
}

fn with_sorted_nodes(mut candidate: Candidate) -> Candidate {
    candidate
        .nodes
        .sort_by(|one, other| (&one.order, one.minor).cmp(&(&other.order, other.minor)));
    candidate.nodes.truncate(NODES_MAX);
    candidate
}

fn port_suffix(port: Option<u32>) -> String {
    port.map(|port| format!("-port{port}")).unwrap_or_default()
}

fn raw(device: &UsbDevice) -> Option<Candidate> {
    let (path, major, minor) = device.node.clone()?;
    let node = Node {
        path,
        major,
        minor,
        directory: device.directory.clone(),
        order: (0, String::new()),
    };
    Some(Candidate {
        kind: Kind::Usb,
        place: Place::Usb(device.clone()),
        driver: device.driver.clone(),
        nodes: vec![node],
        refusal: None,
    })
}

/// Reads an entry of a class. Returns `None` for what is no device of the kind.
fn read_entry(
    host: &Host,
    usb: &UsbDevices,
    ports: &BoardPorts,
    kind: Kind,
    path: &str,
) -> Result<Option<Candidate>, Problem> {
    let entry = last_segment(path);
    let Some(node_path) = kind.node_path(&entry) else {
        return Ok(None);
    };
    let directory = host.sysfs().read_link(path)?;
    // Loopback cameras, uinput and the like: they have no place that stays the same.
    if directory.starts_with("devices/virtual/") {
        return Ok(None);
    }
    let Some((major, minor)) = host.sysfs().find_numbers(path)? else {
        return Ok(None);
    };
    let mut refusal = None;
    if kind == Kind::Serial {
        if !is_port(&directory) || is_phantom(host, path)? {
            return Ok(None);
        }
        refusal = port_refusal(host, &entry)?;
    }
    let Some((place, driver)) = locate(host, usb, ports, kind, &directory)? else {
        return Ok(None);
    };
    let order = (
        order_of(host, kind, path)?,
        entry
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .to_owned(),
    );
    let node = Node {
        path: node_path,
        major,
        minor,
        directory,
        order,
    };
    Ok(Some(Candidate {
        kind,
        place,
        driver,
        nodes: vec![node],
        refusal,
    }))
}

/// Returns whether no hardware is behind a serial port.
fn is_phantom(host: &Host, path: &str) -> Result<bool, Problem> {
    // PORT_UNKNOWN of `linux/serial_core.h`: 8250 creates ports in advance.
    let kind = optional(host.sysfs().read(&format!("{path}/type")))?;
    Ok(kind.is_some_and(|kind| kind.trim() == "0"))
}

/// Returns why a serial port is not offered.
fn port_refusal(host: &Host, tty: &str) -> Result<Option<&'static str>, Problem> {
    if !SERIAL_NODES.iter().any(|name| tty.starts_with(name)) {
        return Ok(Some("the driver requests no nodes of this name"));
    }
    let consoles = optional(host.sysfs().read("class/tty/console/active"))?.unwrap_or_default();
    let is_console = consoles.split_whitespace().any(|console| tty == console);
    Ok(is_console
        .then_some("the kernel writes its console to it: class/tty/console/active names it"))
}

/// Returns the index of a camera's node: the kernel counts the nodes of one function, and the first is the one for capture.
fn order_of(host: &Host, kind: Kind, path: &str) -> Result<u32, Problem> {
    if kind != Kind::Video {
        return Ok(0);
    }
    let index = optional(host.sysfs().read(&format!("{path}/index")))?;
    Ok(index
        .and_then(|index| index.trim().parse().ok())
        .unwrap_or(u32::MAX))
}

/// Walks from the directory of a class's entry up to the device that it belongs to. Returns `None` if that was not read: it is gone, or has
/// come meanwhile.
fn locate(
    host: &Host,
    usb: &UsbDevices,
    ports: &BoardPorts,
    kind: Kind,
    directory: &str,
) -> Result<Option<(Place, Option<String>)>, Problem> {
    let entry = last_segment(directory);
    let Some(interface) = directory.rsplit('/').find_map(Interface::parse) else {
        let board = match kind {
            Kind::Serial => ports.get(&entry).cloned(),
            _ => Some(Board::read(host, kind, directory)?),
        };
        let Some(board) = board else { return Ok(None) };
        let driver = driver_in(host, &board.directory)?;
        return Ok(Some((Place::Board(board), driver)));
    };
    let port = if kind == Kind::Serial {
        usb.port_of(&entry)
    } else {
        None
    };
    // A port of an adapter has a directory of its own, with its number.
    let is_adapter = kind == Kind::Serial && directory.ends_with(&format!("/{entry}/tty/{entry}"));
    let Some(device) = usb
        .get(&interface.device)
        .filter(|_| port.is_some() || !is_adapter)
        .cloned()
    else {
        return Ok(None);
    };
    let driver = driver_in(host, &format!("bus/usb/devices/{}", interface.name()))?;
    Ok(Some((
        Place::Function {
            device,
            interface,
            port,
        },
        driver,
    )))
}

fn driver_in(host: &Host, directory: &str) -> Result<Option<String>, Problem> {
    let link = optional(host.sysfs().read_link(&format!("{directory}/driver")))?;
    Ok(link.as_deref().map(last_segment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nodes_of_devices_are_offered() {
        for (kind, entry, path) in [
            (Kind::Serial, "ttyUSB10", "/dev/ttyUSB10"),
            (Kind::Serial, "ttyCH343USB0", "/dev/ttyCH343USB0"),
            (Kind::Input, "event3", "/dev/input/event3"),
            (Kind::Sound, "pcmC1D0c", "/dev/snd/pcmC1D0c"),
        ] {
            assert_eq!(kind.node_path(entry).as_deref(), Some(path));
        }
        for (kind, entry) in [
            (Kind::Serial, "console"),
            (Kind::Serial, "ttyS"),
            (Kind::Video, "v4l-subdev0"),
            (Kind::Input, "mouse0"),
            (Kind::Sound, "card0"),
            (Kind::Sound, "timer"),
        ] {
            assert_eq!(kind.node_path(entry), None, "{entry}");
        }
    }
}
