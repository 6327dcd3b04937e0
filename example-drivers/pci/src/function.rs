//! Reads PCI functions from sysfs.

use nodedock_sdk::{Host, Problem};

const DEVICES: &str = "bus/pci/devices";

/// Files that the driver reads in a function's directory.
pub(crate) const FILES: [&str; 8] = [
    "vendor",
    "device",
    "class",
    "subsystem_vendor",
    "subsystem_device",
    "numa_node",
    "current_link_speed",
    "current_link_width",
];

/// Links that the driver reads in a function's directory.
pub(crate) const LINKS: [&str; 2] = ["driver", "iommu_group"];

/// Directories of a function that describe its device nodes. Disks (`nvme`, `block`) are not among them: the host gives none to
/// containers.
pub(crate) const NODE_CLASSES: [&str; 7] =
    ["accel", "drm", "infiniband_mad", "infiniband_verbs", "mei", "ptp", "video4linux"];

/// `0000:3b:00.0`: domain, bus, device, function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address(String);

impl Address {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.split_once('.')?;
        let mut parts = rest.split(':');
        let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
        let fits = parts.next().is_none()
            && (4..=8).contains(&domain.len())
            && [bus.len(), device.len(), function.len()] == [2, 2, 1]
            && [domain, bus, device, function].iter().all(|part| is_lower_hex(part));
        fits.then(|| Address(text.to_owned()))
    }

    /// Parses a device's name: `0000-3b-00-0`.
    pub(crate) fn from_label(label: &str) -> Option<Self> {
        let (rest, function) = label.rsplit_once('-')?;
        Self::parse(&format!("{}.{function}", rest.replace('-', ":")))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_lower_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns all functions of the node, sorted by address.
pub(crate) fn addresses(host: &Host) -> Result<Vec<Address>, Problem> {
    let paths = host.sysfs().glob(&format!("{DEVICES}/*"))?;
    Ok(paths.iter().filter_map(|path| Address::parse(path.rsplit('/').next()?)).collect())
}

#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) address: Address,
    /// Root port's bus, such as `pci0000:00`.
    pub(crate) root: Option<String>,
    /// As the next three fields: `0x` and hex digits.
    pub(crate) vendor: String,
    pub(crate) device: String,
    pub(crate) class: String,
    pub(crate) subsystem_vendor: Option<String>,
    pub(crate) subsystem_device: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) numa_node: Option<u32>,
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
        let number = |name: &str| sysfs.find_parsed::<u32>(&format!("{directory}/{name}"));
        let link =
            |name: &str| Ok(sysfs.find_link(&format!("{directory}/{name}"))?.as_deref().map(last_segment));
        let (Some(path), Some(vendor), Some(device), Some(class)) =
            (sysfs.find_link(&directory)?, file("vendor")?, file("device")?, file("class")?)
        else {
            return Ok(None);
        };
        Ok(Some(Function {
            root: root(&path),
            vendor,
            device,
            class,
            subsystem_vendor: file("subsystem_vendor")?,
            subsystem_device: file("subsystem_device")?,
            driver: link("driver")?,
            // -1, for a function without a local NUMA node, is not a u32.
            numa_node: number("numa_node")?,
            iommu_group: link("iommu_group")?.and_then(|group| group.parse().ok()),
            link_speed: file("current_link_speed")?.filter(|speed| !speed.starts_with("Unknown")),
            // 0 is the width of a link that is down, 255 that of a missing link.
            link_width: number("current_link_width")?.filter(|width| !matches!(width, 0 | 255)),
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
            let message = format!("{} is bound to vfio-pci but in no IOMMU group", self.address.as_str());
            return Err(Problem::unavailable("no-iommu-group", message));
        };
        Ok(vec!["/dev/vfio/vfio".to_owned(), format!("/dev/vfio/{group}")])
    }
}

fn last_segment(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// Returns the first segment such as `pci0000:00`; on some machines it is below other buses.
fn root(path: &str) -> Option<String> {
    let is_root = |segment: &&str| {
        let numbers = segment.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
        numbers.is_some_and(|(domain, bus)| is_lower_hex(domain) && bus.len() == 2 && is_lower_hex(bus))
    };
    path.split('/').find(is_root).map(str::to_owned)
}

/// Returns the node that a `uevent` file names: `DEVNAME=dri/card0`.
fn node_of(uevent: &str) -> Option<String> {
    uevent.lines().find_map(|line| line.strip_prefix("DEVNAME=")).map(|name| format!("/dev/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_sysfs_and_from_names_of_devices() {
        let address = Address::parse("0000:3b:00.0").unwrap();
        assert_eq!(Address::from_label("0000-3b-00-0"), Some(address));
        assert_eq!(Address::from_label("10000-e1-00-7").unwrap().as_str(), "10000:e1:00.7");
    }

    #[test]
    fn what_is_no_address_is_not_read() {
        for text in
            ["", "0000:3b:00", "3b:00.0", "0000:3b:00.0.1", "0000:3B:00.0", "0000:3b:0g.0", "0:0:0:0:3b:00.0"]
        {
            assert_eq!(Address::parse(text), None, "{text}");
        }
        assert_eq!(Address::from_label("0000-3b-..-0"), None);
    }

    #[test]
    fn the_root_is_the_first_bus_that_is_one() {
        let below_platform = "devices/platform/soc/1.pcie/pci0001:00/0001:00:00.0";
        assert_eq!(root("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0").as_deref(), Some("pci0000:3a"));
        assert_eq!(root(below_platform).as_deref(), Some("pci0001:00"));
        assert_eq!(root("devices/platform/pcie/x"), None);
    }
}
