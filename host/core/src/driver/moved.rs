//! Checks whether device nodes are unchanged since a claim was prepared: a device that was plugged in again has other numbers,
//! and the old ones may belong to another device.

use crate::hardware::{Hardware, NodeNumbers};
use nodedock_model::{DeviceNode, NodeKind, PreparedClaim};

/// A node that has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// Its path on the node.
    pub path: String,
    /// Text of the previous type and number.
    pub then: String,
    /// Text of the current type and number.
    pub now: String,
}

/// Returns whether a node is gone, or has another type or number.
pub fn have_moved(prepared: &PreparedClaim, hardware: &Hardware) -> bool {
    first_moved(prepared, hardware).is_some()
}

/// Returns the first node that is gone, or has another type or number. Needs one `stat` for each node of the edits; opens nothing, and
/// follows no link.
pub fn first_moved(prepared: &PreparedClaim, hardware: &Hardware) -> Option<Moved> {
    let of_devices = prepared
        .devices
        .iter()
        .filter_map(|device| device.access.edits());
    let mut nodes = of_devices
        .chain([&prepared.edits])
        .flat_map(|edits| &edits.device_nodes);
    nodes.find_map(|node| moved(node, hardware))
}

/// A node without recorded numbers counts as unchanged.
fn moved(node: &DeviceNode, hardware: &Hardware) -> Option<Moved> {
    let kind = node.kind?;
    let found = hardware.node(node.node_path());
    if found
        .as_ref()
        .is_ok_and(|found| found.is_some_and(|found| is_same(node, kind, found)))
    {
        return None;
    }
    let now = found.map_or_else(|error| format!("not to be had ({error})"), words_of);
    Some(Moved {
        path: node.node_path().to_owned(),
        then: words(Some(kind), node.major, node.minor),
        now,
    })
}

fn is_same(node: &DeviceNode, kind: NodeKind, found: NodeNumbers) -> bool {
    let same = is_number(node.major, found.major) && is_number(node.minor, found.minor);
    found.kind == kind && (kind == NodeKind::Fifo || same)
}

fn is_number(number: Option<u32>, now: u32) -> bool {
    number.is_none_or(|number| number == now)
}

fn words_of(found: Option<NodeNumbers>) -> String {
    match found {
        Some(NodeNumbers { kind, major, minor }) => words(Some(kind), Some(major), Some(minor)),
        None => words(None, None, None),
    }
}

fn words(kind: Option<NodeKind>, major: Option<u32>, minor: Option<u32>) -> String {
    let numbers = format!("{}:{}", shown(major), shown(minor));
    match kind {
        Some(NodeKind::Character) => format!("character device {numbers}"),
        Some(NodeKind::Block) => format!("block device {numbers}"),
        Some(NodeKind::Fifo) => "a pipe".to_owned(),
        None => "no device node".to_owned(),
    }
}

fn shown(number: Option<u32>) -> String {
    number.map_or_else(|| "?".to_owned(), |number| number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn have_moved(prepared: &PreparedClaim) -> bool {
        super::have_moved(prepared, &Hardware::of_node())
    }

    use nodedock_model::Edits;

    fn node(path: &str, kind: Option<NodeKind>, numbers: Option<(u32, u32)>) -> PreparedClaim {
        let node = DeviceNode {
            path: "/dev/inside".to_owned(),
            host_path: Some(path.to_owned()),
            kind,
            major: numbers.map(|(major, _)| major),
            minor: numbers.map(|(_, minor)| minor),
            permissions: "rw".to_owned(),
            file_mode: None,
            uid: None,
            gid: None,
        };
        let edits = Edits {
            device_nodes: vec![node],
            ..Edits::default()
        };
        PreparedClaim {
            edits,
            ..PreparedClaim::default()
        }
    }

    #[test]
    fn only_changed_nodes_count_as_moved() {
        let character = Some(NodeKind::Character);
        assert!(!have_moved(&PreparedClaim::default()));
        assert!(!have_moved(&node("/dev/null", character, Some((1, 3)))));
        assert!(!have_moved(&node("/dev/null", None, None)));
        assert!(have_moved(&node("/dev/null", character, Some((1, 5)))));
        assert!(have_moved(&node("/dev/null", character, Some((2, 3)))));
        assert!(have_moved(&node(
            "/dev/null",
            Some(NodeKind::Block),
            Some((1, 3))
        )));
        assert!(have_moved(&node("/dev/null", Some(NodeKind::Fifo), None)));
        assert!(have_moved(&node(
            "/dev/there-is-none",
            character,
            Some((1, 3))
        )));
        let words = |prepared| {
            first_moved(&prepared, &Hardware::of_node())
                .map(|moved| (moved.path, moved.then, moved.now))
        };
        let expected = |path: &str, then: &str, now: &str| {
            Some((path.to_owned(), then.to_owned(), now.to_owned()))
        };
        assert_eq!(
            words(node("/dev/null", Some(NodeKind::Block), Some((1, 5)))),
            expected("/dev/null", "block device 1:5", "character device 1:3")
        );
        assert_eq!(
            words(node("/", Some(NodeKind::Fifo), None)),
            expected("/", "a pipe", "no device node")
        );
        let gone = first_moved(
            &node("/dev/there-is-none", character, Some((1, 3))),
            &Hardware::of_node(),
        )
        .unwrap()
        .now;
        assert!(
            gone.starts_with("not to be had") && gone.contains("No such file"),
            "{gone}"
        );
        // A link to a node is not a node.
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(have_moved(&node(
            link.to_str().unwrap(),
            character,
            Some((1, 3))
        )));
    }
}
