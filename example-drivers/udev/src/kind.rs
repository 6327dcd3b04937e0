//! Kinds of devices: the subsystem of each, and the nodes that the driver offers.

use serde::Deserialize;

/// Beginnings of the names of serial ports, for the grant alone: the parent of a tty decides whether it is a port.
pub(crate) const SERIAL_NODES: [&str; 3] = ["ipoctal", "noz", "tty"];

/// Beginnings of the names of a sound card's nodes. Others, such as `timer`, belong to no card.
const SOUND_NODES: [&str; 4] = ["controlC", "hwC", "midiC", "pcmC"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Serial,
    Video,
    Usb,
    Hidraw,
    Input,
    Sound,
}

impl Kind {
    /// Returns the kernel's name of the subsystem, which is also that of the class.
    pub(crate) fn subsystem(self) -> &'static str {
        match self {
            Kind::Serial => "tty",
            Kind::Video => "video4linux",
            Kind::Usb => "usb",
            Kind::Hidraw => "hidraw",
            Kind::Input => "input",
            Kind::Sound => "sound",
        }
    }

    /// Returns the path of the node of an entry of the class; `None` if the driver offers no such node.
    pub(crate) fn node_path(self, entry: &str) -> Option<String> {
        let name = entry.trim_end_matches(|c: char| c.is_ascii_digit());
        let is_numbered = name.len() < entry.len();
        let (is_offered, directory) = match self {
            Kind::Serial => (is_numbered, "/dev"),
            Kind::Video => (is_numbered && name == "video", "/dev"),
            Kind::Hidraw => (is_numbered && name == "hidraw", "/dev"),
            Kind::Input => (is_numbered && matches!(name, "event" | "js"), "/dev/input"),
            Kind::Sound => {
                let is_node = SOUND_NODES.iter().any(|prefix| entry.starts_with(prefix));
                (is_node, "/dev/snd")
            }
            Kind::Usb => (false, ""),
        };
        is_offered.then(|| format!("{directory}/{entry}"))
    }
}
