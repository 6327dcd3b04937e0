//! Reads PCI functions that are GPUs, and what their kernel drivers say about them in sysfs.

use nodedock_sdk::last_segment;
use nodedock_sdk::pci::{Address, root};
use nodedock_sdk::{Host, Problem};

const DEVICES: &str = "bus/pci/devices";

/// Display controllers and processing accelerators.
const GPU_CLASSES: [&str; 2] = ["0x03", "0x12"];

pub(crate) const AMD: &str = "0x1002";
pub(crate) const INTEL: &str = "0x8086";
pub(crate) const NVIDIA: &str = "0x10de";

/// Files that the driver reads in a function's directory.
pub(crate) const FILES: [&str; 14] = [
    "vendor",
    "device",
    "class",
    "numa_node",
    "product_name",
    "unique_id",
    "sriov_totalvfs",
    "sriov_numvfs",
    "mem_info_vram_total",
    "current_compute_partition",
    "current_memory_partition",
    // xe: memory of each tile.
    "tile*/physical_vram_size_bytes",
    // i915 with local memory, in the builds of Intel: on the DRM device.
    "drm/*/lmem_total_bytes",
    "drm/*/uevent",
];

/// Links that the driver reads in a function's directory.
pub(crate) const LINKS: [&str; 2] = ["driver", "physfn"];

/// A DRM device of a function, as its `uevent` file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DrmNode {
    /// `/dev/dri/card0`.
    pub(crate) path: String,
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// A PCI function that is a GPU, or a virtual function of one.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) address: Address,
    /// Root port's bus, such as `pci0000:00`.
    pub(crate) root: Option<String>,
    /// Vendor ID, as the next two fields: `0x` and hex digits.
    pub(crate) vendor: String,
    pub(crate) device: String,
    pub(crate) class: String,
    pub(crate) driver: Option<String>,
    pub(crate) numa_node: Option<u32>,
    pub(crate) product_name: Option<String>,
    pub(crate) unique_id: Option<String>,
    /// Virtual functions that it can have, and has.
    pub(crate) sriov: Option<(u32, u32)>,
    /// Physical function of a virtual function.
    pub(crate) physfn: Option<String>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) compute_partition: Option<String>,
    pub(crate) memory_partition: Option<String>,
    /// Cards and render nodes, sorted by path.
    pub(crate) drm: Vec<DrmNode>,
}

/// Returns all GPUs of the node, sorted by address.
pub(crate) fn all(host: &Host) -> Result<Vec<Function>, Problem> {
    let paths = host.sysfs().glob(&format!("{DEVICES}/*"))?;
    let mut functions = Vec::new();
    for address in paths
        .iter()
        .filter_map(|path| Address::parse(path.rsplit('/').next()?))
    {
        functions.extend(Function::read(host, address)?);
    }
    Ok(functions)
}

impl Function {
    /// Returns `None` if the function does not exist, is no GPU, or disappears during the read.
    pub(crate) fn read(host: &Host, address: Address) -> Result<Option<Self>, Problem> {
        let sysfs = host.sysfs();
        let directory = format!("{DEVICES}/{}", address.as_str());
        let below = |name: &str| format!("{directory}/{name}");
        let Some(class) = sysfs.find(&below("class"))? else {
            return Ok(None);
        };
        if !GPU_CLASSES.iter().any(|gpu| class.starts_with(gpu)) {
            return Ok(None);
        }
        let text = |name: &str| {
            Ok(sysfs
                .find(&below(name))?
                .filter(|text| !text.trim().is_empty()))
        };
        let number = |name: &str| sysfs.find_parsed::<u32>(&below(name));
        let link = |name: &str| Ok(sysfs.find_link(&below(name))?.as_deref().map(last_segment));
        let (Some(vendor), Some(device)) = (text("vendor")?, text("device")?) else {
            return Ok(None);
        };
        let Some(path) = sysfs.find_link(&directory)? else {
            return Ok(None);
        };
        Ok(Some(Function {
            root: root(&path),
            driver: link("driver")?,
            // -1, for a function without a local NUMA node, is not a u32.
            numa_node: number("numa_node")?,
            product_name: text("product_name")?,
            unique_id: text("unique_id")?,
            sriov: number("sriov_totalvfs")?.zip(number("sriov_numvfs")?),
            physfn: link("physfn")?,
            memory_bytes: memory_bytes(host, &directory, &vendor)?,
            compute_partition: text("current_compute_partition")?,
            memory_partition: text("current_memory_partition")?,
            drm: drm(host, &directory)?,
            vendor,
            device,
            class,
            address,
        }))
    }

    /// Its directory, relative to `/sys`.
    pub(crate) fn directory(&self) -> String {
        format!("{DEVICES}/{}", self.address.as_str())
    }

    /// Returns whether the kernel driver is NVIDIA's own, which has nodes beside those of DRM.
    pub(crate) fn has_nvidia_driver(&self) -> bool {
        self.vendor == NVIDIA && self.driver.as_deref() == Some("nvidia")
    }
}

/// Returns the memory of the device itself; `None` if the kernel driver does not show it.
fn memory_bytes(host: &Host, directory: &str, vendor: &str) -> Result<Option<u64>, Problem> {
    let patterns: &[&str] = match vendor {
        AMD => &["mem_info_vram_total"],
        INTEL => &[
            "tile*/physical_vram_size_bytes",
            "drm/card*/lmem_total_bytes",
        ],
        _ => &[],
    };
    for pattern in patterns {
        let mut bytes = 0_u64;
        for path in host.sysfs().glob(&format!("{directory}/{pattern}"))? {
            bytes = bytes.saturating_add(host.sysfs().find_parsed(&path)?.unwrap_or(0));
        }
        if bytes > 0 {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

fn drm(host: &Host, directory: &str) -> Result<Vec<DrmNode>, Problem> {
    let mut nodes = Vec::new();
    for path in host.sysfs().glob(&format!("{directory}/drm/*/uevent"))? {
        nodes.extend(host.sysfs().find(&path)?.as_deref().and_then(drm_node));
    }
    Ok(nodes)
}

/// Returns the card or render node that a `uevent` file describes. Control nodes, which old kernels have, give access to nothing.
fn drm_node(uevent: &str) -> Option<DrmNode> {
    let name = uevent_value(uevent, "DEVNAME")?.strip_prefix("dri/")?;
    let is_usable = ["card", "renderD"].iter().any(|kind| {
        let number = name.strip_prefix(kind).unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    is_usable.then_some(())?;
    let (major, minor) = (
        uevent_value(uevent, "MAJOR")?.parse().ok()?,
        uevent_value(uevent, "MINOR")?.parse().ok()?,
    );
    Some(DrmNode {
        path: format!("/dev/dri/{name}"),
        major,
        minor,
    })
}

fn uevent_value<'a>(uevent: &'a str, key: &str) -> Option<&'a str> {
    uevent
        .lines()
        .filter_map(|line| line.split_once('='))
        .find_map(|(name, value)| (name == key).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_and_render_nodes_are_recognized() {
        let uevent =
            |name: &str| format!("MAJOR=226\nMINOR=128\nDEVNAME={name}\nDEVTYPE=drm_minor");
        let node = DrmNode {
            path: "/dev/dri/renderD128".into(),
            major: 226,
            minor: 128,
        };
        assert_eq!(drm_node(&uevent("dri/renderD128")), Some(node));
        for name in [
            "dri/controlD64",
            "dri/card",
            "dri/card0/../../mem",
            "fb0",
            "mem",
        ] {
            assert_eq!(drm_node(&uevent(name)), None, "{name}");
        }
        assert_eq!(drm_node("DEVNAME=dri/card0"), None);
    }
}
