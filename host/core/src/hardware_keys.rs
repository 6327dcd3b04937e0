//! Keys of the hardware behind devices. They keep two drivers from giving out the same hardware. A key is a directory below `/sys/devices`,
//! or the numbers of a device node. Keys are found from the identity strings of a device, and from the device nodes and interfaces that a
//! container gets. Blocking functions; each reads a few links below `/sys`.
//!
//! | given | keys |
//! | --- | --- |
//! | identity `pci:ADDRESS`, `usb:DEVICE` | the directory of the function, of the USB device |
//! | identity `dev:PATH` | those of the device node |
//! | a device node | its numbers, and its directory, or those of the kernel devices that it represents: the functions of a VFIO group, the disks below a mapped one |
//! | a network interface | its directory |
//!
//! A node without hardware (`/dev/fuse`, `/dev/vfio/vfio`, `/dev/nvidiactl`) has no directory of a device: the kernel has it below
//! `/sys/devices/virtual`, or nowhere.

use crate::hardware::{Hardware, NodeNumbers, leads_nowhere};
use crate::sysfs::{Reader, SysfsRoot, present};
use nodedock_model::rule::{is_plain_path, is_unprintable};
use nodedock_model::{DeviceNode, Inventory, NODE_KEY, NetDevice, NodeKind, Problem, ProblemCode};

const PCI: &str = "pci:";
const USB: &str = "usb:";
const NODE: &str = "dev:";
const VFIO: &str = "/dev/vfio/";
/// Kernel devices without hardware, relative to `/sys`.
const VIRTUAL: &str = "devices/virtual/";

/// The keys of one device node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeKeys {
    pub keys: Vec<String>,
    /// True if the kernel has a hardware device behind the node.
    pub has_hardware: bool,
}

/// Sets the keys of every device of an inventory. Fails if the node could not be read.
pub fn add(
    hardware: &Hardware,
    sysfs: &SysfsRoot,
    inventory: &mut Inventory,
) -> Result<(), Problem> {
    for device in inventory
        .pools
        .values_mut()
        .flat_map(|pool| pool.devices.values_mut())
    {
        let mut keys = Vec::new();
        for identity in &device.identity {
            keys.extend(of_identity(hardware, sysfs, identity)?);
        }
        keys.sort();
        keys.dedup();
        device.keys = keys;
    }
    Ok(())
}

/// Returns the keys of an identity string; none for a string of another form, or for hardware that does not exist.
fn of_identity(
    hardware: &Hardware,
    sysfs: &SysfsRoot,
    identity: &str,
) -> Result<Vec<String>, Problem> {
    if let Some(address) = identity.strip_prefix(PCI) {
        directory(sysfs, "bus/pci/devices", address)
    } else if let Some(device) = identity.strip_prefix(USB) {
        // A function of a USB device has several ports, which its driver tells apart by name.
        if device.contains(':') {
            Ok(Vec::new())
        } else {
            directory(sysfs, "bus/usb/devices", device)
        }
    } else if let Some(path) = identity.strip_prefix(NODE) {
        match look(hardware, path)? {
            Some(numbers) => Ok(of_node(sysfs, path, numbers)?.keys),
            None => Ok(Vec::new()),
        }
    } else {
        Ok(Vec::new())
    }
}

/// The device node at a path, or that a link there leads to; `None` if there is nothing, or no device node.
fn look(hardware: &Hardware, path: &str) -> Result<Option<NodeNumbers>, Problem> {
    if !is_plain_path(path) {
        return Ok(None);
    }
    match hardware.resolve(path).and_then(|path| hardware.node(&path)) {
        Err(error) if leads_nowhere(&error) => Ok(None),
        found => found.map_err(|error| {
            Problem::unavailable(ProblemCode::IoError, format!("{path}: {error}"))
        }),
    }
}

fn directory(sysfs: &SysfsRoot, of: &str, name: &str) -> Result<Vec<String>, Problem> {
    // Others are no names of the kernel.
    let is_name =
        !matches!(name, "" | "." | "..") && !name.contains('/') && !name.contains(is_unprintable);
    let found = if is_name {
        sysfs.find(&format!("{of}/{name}"))?
    } else {
        None
    };
    Ok(found
        .filter(|path| path.starts_with("devices/"))
        .map(key)
        .into_iter()
        .collect())
}

/// The key of a directory relative to `/sys`.
fn key(directory: String) -> String {
    format!("/sys/{directory}")
}

/// The keys of a device node of a container's edits. `None`: its numbers are not known.
pub fn of_edit(
    hardware: &Hardware,
    sysfs: &SysfsRoot,
    node: &DeviceNode,
) -> Result<Option<NodeKeys>, Problem> {
    let numbers = match (node.kind, node.major, node.minor) {
        (Some(kind), Some(major), Some(minor)) => Some(NodeNumbers { kind, major, minor }),
        _ => look(hardware, node.node_path())?,
    };
    numbers
        .map(|numbers| of_node(sysfs, node.node_path(), numbers))
        .transpose()
}

/// The keys of a network interface that a container gets.
pub fn of_interface(sysfs: &SysfsRoot, interface: &NetDevice) -> Result<Vec<String>, Problem> {
    directory(sysfs, "class/net", &interface.host_interface)
}

fn of_node(sysfs: &SysfsRoot, path: &str, numbers: NodeNumbers) -> Result<NodeKeys, Problem> {
    let NodeNumbers { kind, major, minor } = numbers;
    let (class, word) = match kind {
        NodeKind::Character => ("char", "character"),
        NodeKind::Block => ("block", "block"),
        // A pipe has no numbers.
        NodeKind::Fifo => return Ok(NodeKeys::default()),
    };
    let mut keys = vec![format!("{NODE_KEY}{word}:{major}:{minor}")];
    let own = sysfs.find(&format!("dev/{class}/{major}:{minor}"))?;
    let directories = match (vfio_group(path, own.as_deref()), &own) {
        (Some(group), _) => links(sysfs, &format!("kernel/iommu_groups/{group}/devices"))?,
        (None, Some(own)) if own.starts_with(VIRTUAL) => links(sysfs, &format!("{own}/slaves"))?,
        (None, Some(own)) => vec![own.clone()],
        (None, None) => Vec::new(),
    };
    let has_hardware = directories
        .iter()
        .any(|directory| !directory.starts_with(VIRTUAL));
    keys.extend(
        directories
            .into_iter()
            .chain(own.filter(|own| own.starts_with("devices/")))
            .map(key),
    );
    keys.dedup();
    Ok(NodeKeys { keys, has_hardware })
}

/// The IOMMU group of a node by which a program has all of its functions (the kernel's vfio.rst).
fn vfio_group<'a>(path: &'a str, directory: Option<&'a str>) -> Option<&'a str> {
    let of_kernel = directory.and_then(|directory| directory.strip_prefix("devices/virtual/vfio/"));
    let name = of_kernel.or_else(|| path.strip_prefix(VFIO))?;
    let group = name.strip_prefix("noiommu-").unwrap_or(name);
    (!group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit())).then_some(group)
}

/// Returns the targets of the links in a directory; none if there is no such directory.
fn links(sysfs: &SysfsRoot, directory: &str) -> Result<Vec<String>, Problem> {
    let names = present(sysfs.read_dir_for(directory, Reader::Host))?.unwrap_or_default();
    let found = names
        .iter()
        .map(|name| sysfs.find(&format!("{directory}/{name}")));
    Ok(found
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .flatten()
        .collect())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    const FUNCTION: &str = "devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0";

    fn directory(root: &Path, path: &str) {
        fs::create_dir_all(root.join("sys").join(path)).unwrap();
    }

    fn link(root: &Path, path: &str, target: &str) {
        let path = root.join("sys").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let up = "../".repeat(
            path.strip_prefix(root.join("sys"))
                .unwrap()
                .components()
                .count()
                - 1,
        );
        symlink(format!("{up}{target}"), path).unwrap();
    }

    fn node(root: &Path, path: &str, content: &str) {
        let path = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn machine() -> (tempfile::TempDir, Hardware, SysfsRoot) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        directory(root, &format!("{FUNCTION}/drm/card0"));
        directory(
            root,
            "devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0/ttyUSB0/tty/ttyUSB0",
        );
        directory(root, "devices/virtual/misc/fuse");
        directory(root, "devices/virtual/vfio/6");
        directory(root, "devices/virtual/block/dm-0");
        directory(root, "devices/pci0000:00/0000:00:17.0/ata1/block/sda/sda1");
        for (from, to) in [
            ("bus/pci/devices/0000:3b:00.0", FUNCTION),
            ("kernel/iommu_groups/6/devices/0000:3b:00.0", FUNCTION),
            (
                "bus/usb/devices/1-2",
                "devices/pci0000:00/0000:00:14.0/usb1/1-2",
            ),
            ("class/net/eth0", "devices/virtual/misc/fuse"),
            ("dev/char/226:0", &format!("{FUNCTION}/drm/card0")),
            ("dev/char/10:229", "devices/virtual/misc/fuse"),
            ("dev/char/240:6", "devices/virtual/vfio/6"),
            ("dev/block/253:0", "devices/virtual/block/dm-0"),
            (
                "devices/virtual/block/dm-0/slaves/sda1",
                "devices/pci0000:00/0000:00:17.0/ata1/block/sda/sda1",
            ),
        ] {
            link(root, from, to);
        }
        for (path, content) in [
            ("/dev/dri/card0", "character 226:0"),
            ("/dev/fuse", "character 10:229"),
            ("/dev/nvidia0", "character 195:0"),
            ("/dev/vfio/6", "character 240:6"),
            ("/dev/mapper/data", "block 253:0"),
            ("/dev/text", "nothing"),
        ] {
            node(root, path, content);
        }
        fs::create_dir_all(root.join("dev/dri/by-path")).unwrap();
        symlink("../card0", root.join("dev/dri/by-path/pci-card")).unwrap();
        symlink("circle", root.join("dev/circle")).unwrap();
        let hardware = Hardware::simulated(root);
        let sysfs = hardware.open_sys().unwrap();
        (dir, hardware, sysfs)
    }

    #[test]
    fn identities_map_to_existing_hardware() {
        let (_dir, hardware, sysfs) = machine();
        let of = |identity: &str| of_identity(&hardware, &sysfs, identity).unwrap();
        let gpu = format!("/sys/{FUNCTION}");
        assert_eq!(of("pci:0000:3b:00.0"), [gpu.as_str()]);
        assert_eq!(
            of("usb:1-2"),
            ["/sys/devices/pci0000:00/0000:00:14.0/usb1/1-2"]
        );
        assert_eq!(
            of("dev:/dev/dri/card0"),
            ["node:character:226:0", &format!("{gpu}/drm/card0")]
        );
        assert_eq!(of("dev:/dev/nvidia0"), ["node:character:195:0"]);
        assert_eq!(
            of("dev:/dev/dri/by-path/pci-card"),
            of("dev:/dev/dri/card0"),
            "a link is what it leads to"
        );
        for none in [
            "usb:1-2:1.0",
            "pci:0000:99:00.0",
            "pci:../pci/devices/0000:3b:00.0",
            "pci:..",
            "usb:",
            "dev:/dev/absent",
            "dev:/dev/fuse/port1",
            "dev:/dev/../dev/fuse",
            "dev:/dev/circle",
            "dev:/dev/text",
            "uuid:x",
            "",
        ] {
            assert_eq!(of(none), Vec::<String>::new(), "{none}");
        }
    }

    #[test]
    fn node_has_keys_of_its_hardware() {
        let (_dir, hardware, sysfs) = machine();
        let of = |path: &str| {
            let node = DeviceNode::at(path);
            let found = of_edit(&hardware, &sysfs, &node).unwrap().unwrap();
            (found.keys, found.has_hardware)
        };
        let gpu = format!("/sys/{FUNCTION}");
        let strings = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            of("/dev/dri/card0"),
            (
                strings(&["node:character:226:0", &format!("{gpu}/drm/card0")]),
                true
            )
        );
        assert_eq!(
            of("/dev/fuse"),
            (
                strings(&["node:character:10:229", "/sys/devices/virtual/misc/fuse"]),
                false
            )
        );
        assert_eq!(
            of("/dev/nvidia0"),
            (strings(&["node:character:195:0"]), false)
        );
        assert_eq!(
            of("/dev/vfio/6"),
            (
                strings(&["node:character:240:6", &gpu, "/sys/devices/virtual/vfio/6"]),
                true
            )
        );
        let (keys, has_hardware) = of("/dev/mapper/data");
        assert!(
            has_hardware && keys.iter().any(|key| key.ends_with("/sda/sda1")),
            "{keys:?}"
        );
        let plain = DeviceNode::at("/dev/text");
        assert_eq!(of_edit(&hardware, &sysfs, &plain).unwrap(), None);
    }

    #[test]
    fn vfio_group_is_found_by_path() {
        assert_eq!(vfio_group("/dev/vfio/6", None), Some("6"));
        assert_eq!(vfio_group("/dev/vfio/noiommu-12", None), Some("12"));
        assert_eq!(
            vfio_group("/dev/other", Some("devices/virtual/vfio/7")),
            Some("7")
        );
        for none in [
            "/dev/vfio/vfio",
            "/dev/vfio/",
            "/dev/vfio/devices/vfio0",
            "/dev/fuse",
        ] {
            assert_eq!(vfio_group(none, None), None, "{none}");
        }
    }
}
