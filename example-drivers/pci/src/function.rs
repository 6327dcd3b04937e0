//! Reads PCI functions from sysfs.

use nodedock_sdk::last_segment;
use nodedock_sdk::pci::Address;
use nodedock_sdk::{Host, Problem};

const DEVICES: &str = "bus/pci/devices";

/// Files that the driver reads in a function's directory.
pub(crate) const FILES: [&str; 7] = [
    "vendor",
    "device",
    "class",
    "subsystem_vendor",
    "subsystem_device",
    "current_link_speed",
    "current_link_width",
];

/// Links that the driver reads in a function's directory.
pub(crate) const LINKS: [&str; 2] = ["driver", "iommu_group"];

/// Directories of a function that describe its device nodes. Disks (`nvme`, `block`) are not among them: the host gives none to
/// containers.
pub(crate) const NODE_CLASSES: [&str; 7] = [
    "accel",
    "drm",
    "infiniband_mad",
    "infiniband_verbs",
    "mei",
    "ptp",
    "video4linux",
];

/// Returns all functions of the node, sorted by address.
pub(crate) fn addresses(host: &Host) -> Result<Vec<Address>, Problem> {
    let paths = host.sysfs().glob(&format!("{DEVICES}/*"))?;
    Ok(paths
        .iter()
        .filter_map(|path| Address::parse(path.rsplit('/').next()?))
        .collect())
}

#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) address: Address,
    /// Vendor ID, as the next three fields: `0x` and hex digits.
    pub(crate) vendor: String,
    pub(crate) device: String,
    pub(crate) class: String,
    pub(crate) subsystem_vendor: Option<String>,
    pub(crate) subsystem_device: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) iommu_group: Option<u32>,
    pub(crate) link_speed: Option<String>,
    pub(crate) link_width: Option<u32>,
}

impl Function {
    /// Returns `None` if the function does not exist, or disappears during the read.
    pub(crate) fn read(host: &Host, address: Address) -> Result<Option<Self>, Problem> {
        let sysfs = host.sysfs();
        let directory = format!("{DEVICES}/{}", address.as_str());
        let file = |name: &str| sysfs.find(&format!("{directory}/{name}"));

        let link = |name: &str| {
            Ok(sysfs
                .find_link(&format!("{directory}/{name}"))?
                .as_deref()
                .map(last_segment))
        };
        let (Some(vendor), Some(device), Some(class)) =
            (file("vendor")?, file("device")?, file("class")?)
        else {
            return Ok(None);
        };
        Ok(Some(Function {
            vendor,
            device,
            class,
            subsystem_vendor: file("subsystem_vendor")?,
            subsystem_device: file("subsystem_device")?,
            driver: link("driver")?,
            iommu_group: link("iommu_group")?.and_then(|group| group.parse().ok()),
            link_speed: file("current_link_speed")?.filter(|speed| !speed.starts_with("Unknown")),
            // 0 is the width of a link that is down, 255 that of a missing link.
            link_width: sysfs
                .find_parsed::<u32>(&format!("{directory}/current_link_width"))?
                .filter(|width| !matches!(width, 0 | 255)),
            address,
        }))
    }

    /// Returns the device nodes that give access to the function; empty if its kernel driver exposes none.
    pub(crate) fn nodes(&self, host: &Host) -> Result<Vec<String>, Problem> {
        if self.driver.as_deref() == Some("vfio-pci") {
            return self.vfio_nodes();
        }
        let mut nodes = Vec::new();
        for class in NODE_CLASSES {
            let uevents = format!("{DEVICES}/{}/{class}/*/uevent", self.address.as_str());
            for path in host.sysfs().glob(&uevents)? {
                nodes.extend(host.sysfs().find(&path)?.as_deref().and_then(node_of));
            }
        }
        Ok(nodes)
    }

    fn vfio_nodes(&self) -> Result<Vec<String>, Problem> {
        let Some(group) = self.iommu_group else {
            let message = format!(
                "{} is bound to vfio-pci but in no IOMMU group",
                self.address.as_str()
            );
            return Err(Problem::unavailable("no-iommu-group", message));
        };
        Ok(vec![
            "/dev/vfio/vfio".to_owned(),
            format!("/dev/vfio/{group}"),
        ])
    }
}

/// Returns the node that a `uevent` file names: `DEVNAME=dri/card0`.
fn node_of(uevent: &str) -> Option<String> {
    uevent
        .lines()
        .find_map(|line| line.strip_prefix("DEVNAME="))
        .map(|name| format!("/dev/{name}"))
}
