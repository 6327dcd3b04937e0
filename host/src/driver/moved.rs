//! Whether device nodes are still what they were when a claim was prepared: a device that was plugged in again has other numbers,
//! and the old ones may be another device's.

use std::os::unix::fs::{FileTypeExt, MetadataExt};

use crate::model::{DeviceAccess, DeviceNode, NodeKind, PreparedClaim};

/// Whether a node is gone, or of another kind or number. One `stat` for each node of the edits; nothing is opened, and no link
/// is followed.
pub fn have_moved(prepared: &PreparedClaim) -> bool {
    let of_devices = prepared.devices.iter().filter_map(|device| match &device.access {
        DeviceAccess::Edits(edits) => Some(edits),
        DeviceAccess::CdiDevices(_) => None,
    });
    let mut nodes = of_devices.chain([&prepared.edits]).flat_map(|edits| &edits.device_nodes);
    nodes.any(has_moved)
}

/// A node of which nothing is known is what it is.
fn has_moved(node: &DeviceNode) -> bool {
    let Some(kind) = node.kind else { return false };
    let Ok(found) = std::fs::symlink_metadata(node.node_path()) else { return true };
    let is_kind = match kind {
        NodeKind::Character => found.file_type().is_char_device(),
        NodeKind::Block => found.file_type().is_block_device(),
        NodeKind::Fifo => found.file_type().is_fifo(),
    };
    let is = |number: Option<u32>, now: u32| number.is_none_or(|number| number == now);
    let same =
        is(node.major, rustix::fs::major(found.rdev())) && is(node.minor, rustix::fs::minor(found.rdev()));
    !is_kind || !(kind == NodeKind::Fifo || same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Edits;

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
        let edits = Edits { device_nodes: vec![node], ..Edits::default() };
        PreparedClaim { edits, ..PreparedClaim::default() }
    }

    #[test]
    fn a_node_of_the_same_kind_and_number_is_where_it_was() {
        let character = Some(NodeKind::Character);
        assert!(!have_moved(&PreparedClaim::default()));
        assert!(!have_moved(&node("/dev/null", character, Some((1, 3)))));
        assert!(!have_moved(&node("/dev/null", None, None)));
        assert!(have_moved(&node("/dev/null", character, Some((1, 5)))));
        assert!(have_moved(&node("/dev/null", character, Some((2, 3)))));
        assert!(have_moved(&node("/dev/null", Some(NodeKind::Block), Some((1, 3)))));
        assert!(have_moved(&node("/dev/null", Some(NodeKind::Fifo), None)));
        assert!(have_moved(&node("/dev/there-is-none", character, Some((1, 3)))));
        // A link to a node is none.
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(have_moved(&node(link.to_str().unwrap(), character, Some((1, 3)))));
    }
}
