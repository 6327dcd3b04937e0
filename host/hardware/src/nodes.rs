//! The device nodes of a recorded machine, and the links by which its kernel shows the device of a number.

use std::collections::BTreeMap;

use crate::{Entry, NodeKind, Snapshot};

/// Type and numbers of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Type.
    pub kind: NodeKind,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl Snapshot {
    /// Returns the recorded device nodes, and those that the kernel names in `uevent` files, by path.
    pub fn nodes(&self) -> BTreeMap<String, Node> {
        let recorded = self.entries().filter_map(|(path, entry)| match entry {
            Entry::Node { kind, major, minor } => Some((
                path.to_owned(),
                Node {
                    kind: *kind,
                    major: *major,
                    minor: *minor,
                },
            )),
            _ => None,
        });
        let described = self.described().map(|(_, path, node)| (path, node));
        described.chain(recorded).collect()
    }

    /// Returns the links below `/sys/dev` (`char/226:0`) with the directories that they lead to, relative to `/sys`, as `uevent` files tell.
    pub fn numbers(&self) -> BTreeMap<String, String> {
        let links = self.described().map(|(directory, _, node)| {
            let class = if node.kind == NodeKind::Block {
                "block"
            } else {
                "char"
            };
            (format!("{class}/{}:{}", node.major, node.minor), directory)
        });
        links.collect()
    }

    /// Directories of devices that have a node, with its path.
    fn described(&self) -> impl Iterator<Item = (String, String, Node)> {
        self.entries().filter_map(|(path, entry)| {
            let Entry::File(uevent) = entry else {
                return None;
            };
            let directory = path.strip_prefix("/sys/")?.strip_suffix("/uevent")?;
            directory.starts_with("devices/").then_some(())?;
            let subsystem = self.get(&format!("/sys/{directory}/subsystem"));
            let is_block =
                matches!(subsystem, Some(Entry::Link(target)) if target.ends_with("/block"));
            let (name, node) = named(&String::from_utf8_lossy(uevent), is_block)?;
            Some((directory.to_owned(), format!("/dev/{name}"), node))
        })
    }
}

/// The node of a `uevent` file (`MAJOR`, `MINOR`, `DEVNAME`).
fn named(uevent: &str, is_block: bool) -> Option<(String, Node)> {
    let name = value(uevent, "DEVNAME")?;
    let is_plain = name
        .split('/')
        .all(|segment| !matches!(segment, "" | "." | ".."));
    let (major, minor) = (
        value(uevent, "MAJOR")?.parse().ok()?,
        value(uevent, "MINOR")?.parse().ok()?,
    );
    let kind = if is_block {
        NodeKind::Block
    } else {
        NodeKind::Character
    };
    is_plain.then(|| (name.to_owned(), Node { kind, major, minor }))
}

fn value<'a>(uevent: &'a str, key: &str) -> Option<&'a str> {
    uevent
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaping_device_name_is_no_node() {
        let node = |name: &str| {
            named(&format!("MAJOR=1\nMINOR=2\nDEVNAME={name}\n"), false).map(|(name, _)| name)
        };
        assert_eq!(node("dri/card0").as_deref(), Some("dri/card0"));
        for name in ["../etc/x", "/dev/x", "a//b", "", "a/./b"] {
            assert_eq!(node(name), None, "{name}");
        }
        assert_eq!(named("MAJOR=8\nDEVNAME=sda\n", true), None);
    }
}
