//! Places of hardware that is not on USB: its fixed address, and for a serial port the number among the ports of that hardware.
//!
//! The kernel counts ttys, cards and input devices in the order in which it finds them, so that these numbers are in no place.

use std::collections::BTreeMap;

use nodedock_sdk::address::Hardware;
use nodedock_sdk::{Host, Problem, last_segment, present};

use crate::kind::Kind;
use crate::usb::Interface;

/// Directory of the legacy ports, whose addresses and numbers the kernel has in a table: `ttyS1` is always that at 0x2f8.
const LEGACY_PORTS: &str = "devices/platform/serial8250";

#[derive(Clone, Debug)]
pub(crate) struct Board {
    /// Address of the hardware, and the number of a serial port: `platform/soc/3f201000.serial-port0`.
    pub(crate) path: String,
    /// Directory in `/sys` of the hardware as the kernel names it.
    pub(crate) directory: String,
    /// Name of a serial port's tty.
    tty: Option<String>,
}

impl Board {
    /// Reads the place of an entry of a class other than that of ttys.
    pub(crate) fn read(host: &Host, kind: Kind, entry: &str) -> Result<Self, Problem> {
        let directory = hardware_directory(entry, kind);
        let path = Hardware::of(host, &directory)?.place(host)?;
        Ok(Board {
            path,
            directory,
            tty: None,
        })
    }

    /// Returns a text that no other device of the kind has now. Entries of one path are nodes of one device, except for ports.
    pub(crate) fn key(&self) -> String {
        if self.tty.is_some() {
            self.kernel_path()
        } else {
            self.path.clone()
        }
    }

    /// Returns the directory without `devices/`, and the tty.
    pub(crate) fn kernel_path(&self) -> String {
        let directory = self
            .directory
            .strip_prefix("devices/")
            .unwrap_or(&self.directory);
        self.tty
            .iter()
            .fold(directory.to_owned(), |path, tty| format!("{path}/{tty}"))
    }
}

/// The serial ports of the node that are not on USB, also those that the driver does not offer, by name of the tty.
#[derive(Debug, Default)]
pub(crate) struct BoardPorts(BTreeMap<String, Board>);

/// Sort key for the ports of one piece of hardware: its directories, the number at the controller, and the number of the tty.
type PortOrder = (usize, String, u32, u32);

impl BoardPorts {
    /// Reads the ports among the entries of `class/tty`.
    pub(crate) fn read(host: &Host, entries: &[String]) -> Result<Self, Problem> {
        let mut places = BTreeMap::new();
        let mut ports: BTreeMap<String, Vec<(PortOrder, Board)>> = BTreeMap::new();
        for entry in entries {
            let tty = last_segment(entry);
            if Kind::Serial.node_path(&tty).is_none() {
                continue;
            }
            let Some(directory) = present(host.sysfs().read_link(entry))? else {
                continue;
            };
            if !is_port(&directory)
                || directory
                    .split('/')
                    .any(|name| Interface::parse(name).is_some())
            {
                continue;
            }
            let hardware = hardware_directory(&directory, Kind::Serial);
            let place = match places.get(&hardware) {
                Some(place) => String::clone(place),
                None => {
                    let place = Hardware::of(host, &hardware).and_then(|found| found.place(host));
                    let Some(place) = present(place)? else {
                        continue;
                    };
                    places.insert(hardware.clone(), place.clone());
                    place
                }
            };
            let port = directory.strip_prefix(&hardware).map_or(0, port_id);
            let order = (hardware.len(), hardware.clone(), port, number_of(&tty));
            let board = Board {
                path: place.clone(),
                directory: hardware,
                tty: Some(tty),
            };
            ports.entry(place).or_default().push((order, board));
        }
        Ok(BoardPorts(ports.into_values().flat_map(numbered).collect()))
    }

    pub(crate) fn get(&self, tty: &str) -> Option<&Board> {
        self.0.get(tty)
    }
}

/// Returns whether the tty with this directory is a port of hardware: its parent is a device on a bus, whatever the tty is called. The
/// kernel has virtual consoles, pseudo terminals and ports of USB gadgets below `devices/virtual`, and channels of Bluetooth
/// (`hci0:11/rfcomm0`) below a device that is on no bus, without a directory `tty` in between.
pub(crate) fn is_port(directory: &str) -> bool {
    !directory.starts_with("devices/virtual/") && directory.rsplit('/').nth(1) == Some("tty")
}

/// Numbers the ports of one piece of hardware.
fn numbered(mut ports: Vec<(PortOrder, Board)>) -> impl Iterator<Item = (String, Board)> {
    ports.sort_by(|(one, _), (other, _)| one.cmp(other));
    (0_u32..)
        .zip(ports)
        .filter_map(|(index, ((.., tty_number), board))| {
            let number = if board.directory == LEGACY_PORTS {
                tty_number
            } else {
                index
            };
            let tty = board.tty.clone()?;
            Some((
                tty,
                Board {
                    path: format!("{}-port{number}", board.path),
                    ..board
                },
            ))
        })
}

/// Returns the number of a port at its controller, which Linux shows since 6.5, from the path below the hardware: 1 of
/// `/00:04:0/00:04:0.1/tty/ttyS5`.
fn port_id(below: &str) -> u32 {
    let number = below
        .rsplit('/')
        .nth(2)
        .and_then(|port| port.rsplit_once('.')?.1.parse().ok());
    number.unwrap_or(0)
}

/// Returns the number at the end of a tty's name.
fn number_of(tty: &str) -> u32 {
    let name = tty.trim_end_matches(|c: char| c.is_ascii_digit());
    tty[name.len()..].parse().unwrap_or(u32::MAX)
}

/// Returns the directory of the hardware: without that of the class, and without those in between whose names change.
fn hardware_directory(entry: &str, kind: Kind) -> String {
    let class = format!("/{}/", kind.subsystem());
    let directory = match entry.find(&class) {
        Some(end) => entry[..end].to_owned(),
        // Below another class there is no directory of the class: `sound/card0/input9/event9`, `rc/rc0/input5/event5`.
        None if kind == Kind::Input => parent(&parent(entry)),
        None => parent(entry),
    };
    let mut segments: Vec<&str> = directory
        .split('/')
        .filter(|segment| !is_hid(segment))
        .collect();
    // Since Linux 6.5 a serial port is below its controller and port: `00:04/00:04:0/00:04:0.0`.
    if let [.., hardware, controller, port] = segments[..]
        && is_below(controller, hardware, ':')
        && is_below(port, controller, '.')
    {
        segments.truncate(segments.len() - 2);
    }
    segments.join("/")
}

fn is_below(name: &str, parent: &str, mark: char) -> bool {
    name.strip_prefix(parent)
        .and_then(|rest| rest.strip_prefix(mark))
        .is_some()
}

fn parent(path: &str) -> String {
    path.rsplit_once('/')
        .map(|(above, _)| above.to_owned())
        .unwrap_or_default()
}

/// Returns whether this is the directory of a HID device, which ends in a running number: `0018:04F3:3140.0001`.
fn is_hid(segment: &str) -> bool {
    let parts: Vec<&str> = segment.split([':', '.']).collect();
    parts.len() == 4
        && parts
            .iter()
            .all(|part| part.len() >= 4 && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_directory_is_independent_of_kernel() {
        for directory in [
            "devices/pnp0/00:04/tty/ttyS0",
            "devices/pnp0/00:04/00:04:0/00:04:0.0/tty/ttyS0",
        ] {
            assert_eq!(
                hardware_directory(directory, Kind::Serial),
                "devices/pnp0/00:04"
            );
        }
        let touchpad = "devices/pci0000:00/0000:00:15.0/i2c-1/i2c-ELAN/0018:04F3:3140.0001/input/input7/event5";
        let directory = hardware_directory(touchpad, Kind::Input);
        assert_eq!(directory, "devices/pci0000:00/0000:00:15.0/i2c-1/i2c-ELAN");
        let jack = "devices/pci0000:00/0000:00:1f.3/sound/card0/input9/event9";
        assert_eq!(
            hardware_directory(jack, Kind::Input),
            "devices/pci0000:00/0000:00:1f.3/sound/card0"
        );
        let card = "devices/pci0000:00/0000:00:05.0/tty/ttyS4";
        assert_eq!(
            hardware_directory(card, Kind::Serial),
            "devices/pci0000:00/0000:00:05.0"
        );
    }

    #[test]
    fn parent_decides_what_is_a_port() {
        for directory in [
            "devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0/tty/ttyXRUSB0",
            "devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0/ttyMXUSB0/tty/ttyMXUSB0",
            "devices/platform/soc/40010000.serial/40010000.serial:0/40010000.serial:0.0/tty/ttySTM0",
            "devices/pnp0/00:04/tty/ttyS0",
        ] {
            assert!(is_port(directory), "{directory}");
        }
        for directory in [
            "devices/virtual/tty/tty1",
            "devices/virtual/tty/ttyGS0",
            "devices/pci0000:00/0000:00:14.0/usb1/1-7/1-7:1.0/bluetooth/hci0/hci0:11/rfcomm0",
            "ttyS0",
        ] {
            assert!(!is_port(directory), "{directory}");
        }
    }

    #[test]
    fn port_has_the_kernel_number() {
        for (below, number) in [
            ("/00:04:0/00:04:0.12/tty/ttyS5", 12),
            ("/tty/ttyS4", 0),
            ("", 0),
        ] {
            assert_eq!(port_id(below), number, "{below}");
        }
        assert_eq!((number_of("ttyS10"), number_of("tty")), (10, u32::MAX));
    }
}
