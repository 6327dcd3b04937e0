//! Reads physical functions and their virtual functions from sysfs.

use nodedock_sdk::{Host, Problem, ProblemKind};

use nodedock_sdk::last_segment;
use nodedock_sdk::pci::{Address, root};

pub(crate) const DEVICES: &str = "bus/pci/devices";

/// Files and links that the driver reads in a function's directory.
pub(crate) const FILES: [&str; 19] = [
    "vendor",
    "device",
    "numa_node",
    "driver",
    "iommu_group",
    "sriov_totalvfs",
    "sriov_numvfs",
    "sriov_offset",
    "sriov_stride",
    "sriov_vf_device",
    "sriov_drivers_autoprobe",
    "virtfn*",
    "net/*",
    "net/*/speed",
    "infiniband/*",
    "infiniband_mad/*",
    "infiniband_verbs/*",
    "accel/*/uevent",
    "drm/*/uevent",
];

/// A function with the SR-IOV capability.
#[derive(Clone, Debug)]
pub(crate) struct PhysicalFunction {
    pub(crate) address: Address,
    /// Root port's bus, such as `pci0000:00`.
    pub(crate) root: Option<String>,
    pub(crate) vendor: String,
    pub(crate) device: String,
    /// Device ID of its virtual functions, in the notation of `device`.
    pub(crate) vf_device: Option<String>,
    pub(crate) driver: Option<String>,
    /// Its first network interface.
    pub(crate) interface: Option<String>,
    pub(crate) speed_mbps: Option<u32>,
    pub(crate) numa_node: Option<u32>,
    /// Virtual functions that it can have.
    pub(crate) total: u32,
    /// Virtual functions that it has.
    pub(crate) count: u32,
    /// The setting by which the kernel binds a new virtual function to a driver or not: `1` or `0`.
    pub(crate) autoprobe: Option<String>,
    /// Distance of the first virtual function, and from each to the next.
    offset: u32,
    stride: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VirtualFunction {
    pub(crate) index: u32,
    pub(crate) address: Address,
    pub(crate) exists: bool,
}

impl PhysicalFunction {
    /// Returns `None` if the function does not exist, has no SR-IOV capability, or disappears during the read.
    pub(crate) fn read(host: &Host, address: Address) -> Result<Option<Self>, Problem> {
        let sysfs = host.sysfs();
        let directory = format!("{DEVICES}/{address}");
        let file = |name: &str| sysfs.find(&format!("{directory}/{name}"));
        let number = |name: &str| sysfs.find_parsed::<u32>(&format!("{directory}/{name}"));
        let (Some(total), Some(count)) = (number("sriov_totalvfs")?, number("sriov_numvfs")?)
        else {
            return Ok(None);
        };
        let (Some(path), Some(vendor), Some(device)) = (
            sysfs.find_link(&directory)?,
            file("vendor")?,
            file("device")?,
        ) else {
            return Ok(None);
        };
        let interface = first_of(host, &address, "net")?;
        let speed_mbps = match &interface {
            Some(name) => number(&format!("net/{name}/speed"))?,
            None => None,
        };
        Ok(Some(PhysicalFunction {
            root: root(&path),
            vendor,
            device,
            // Hex digits without 0x.
            vf_device: file("sriov_vf_device")?.map(|digits| format!("0x{digits:0>4}")),
            driver: kernel_driver(host, &address)?,
            interface,
            // -1 and 0 are unknown.
            speed_mbps: speed_mbps.filter(|speed| *speed > 0),
            numa_node: number("numa_node")?,
            total,
            count,
            autoprobe: file("sriov_drivers_autoprobe")?,
            offset: number("sriov_offset")?.unwrap_or(0),
            stride: number("sriov_stride")?.unwrap_or(0),
            address,
        }))
    }

    /// Reads a physical function as [`read`](Self::read) does, but returns `None` only for a function that does not exist.
    ///
    /// # Errors
    ///
    /// Also `unavailable` if the kernel does not answer now.
    pub(crate) fn read_existing(host: &Host, address: &Address) -> Result<Option<Self>, Problem> {
        match host
            .sysfs()
            .read(&format!("{DEVICES}/{address}/sriov_numvfs"))
        {
            Ok(_) => Self::read(host, address.clone()),
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(None),
            Err(problem) => Err(problem),
        }
    }

    /// Returns the virtual functions up to `vfs`: those that exist, and the others with the addresses that they will have, as far as
    /// the function knows them.
    pub(crate) fn virtual_functions(
        &self,
        host: &Host,
        vfs: u32,
    ) -> Result<Vec<VirtualFunction>, Problem> {
        let mut functions = Vec::new();
        for index in 0..vfs.min(self.total) {
            let existing = if index < self.count {
                self.existing(host, index)?
            } else {
                None
            };
            let exists = existing.is_some();
            let address = existing.or_else(|| self.predicted(index));
            functions.extend(address.map(|address| VirtualFunction {
                index,
                address,
                exists,
            }));
        }
        Ok(functions)
    }

    pub(crate) fn existing(&self, host: &Host, index: u32) -> Result<Option<Address>, Problem> {
        let link = host
            .sysfs()
            .find_link(&format!("{DEVICES}/{}/virtfn{index}", self.address))?;
        Ok(link.and_then(|path| Address::parse(&last_segment(&path))))
    }

    /// Returns the predicted address of a virtual function. Without an offset, or without a stride for the second and later ones, the
    /// address is unknown until the function exists.
    fn predicted(&self, index: u32) -> Option<Address> {
        let is_known = self.offset > 0 && (self.stride > 0 || index == 0);
        let distance = self.stride.checked_mul(index)?.checked_add(self.offset)?;
        is_known.then(|| self.address.plus(distance)).flatten()
    }

    pub(crate) fn file(&self, name: &str) -> String {
        format!("{DEVICES}/{}/{name}", self.address)
    }
}

/// Returns all physical functions of the node, sorted by address.
pub(crate) fn physical_functions(host: &Host) -> Result<Vec<PhysicalFunction>, Problem> {
    let mut functions = Vec::new();
    for path in host.sysfs().glob(&format!("{DEVICES}/*/sriov_totalvfs"))? {
        let Some(address) = path.rsplit('/').nth(1).and_then(Address::parse) else {
            continue;
        };
        functions.extend(PhysicalFunction::read(host, address)?);
    }
    Ok(functions)
}

pub(crate) fn kernel_driver(host: &Host, address: &Address) -> Result<Option<String>, Problem> {
    let link = host
        .sysfs()
        .find_link(&format!("{DEVICES}/{address}/driver"))?;
    Ok(link.as_deref().map(last_segment))
}

/// Returns the names in a function's directory for a class, such as `net` or `infiniband`.
pub(crate) fn names_of(
    host: &Host,
    address: &Address,
    class: &str,
) -> Result<Vec<String>, Problem> {
    let paths = host
        .sysfs()
        .glob(&format!("{DEVICES}/{address}/{class}/*"))?;
    Ok(paths.iter().map(|path| last_segment(path)).collect())
}

pub(crate) fn first_of(
    host: &Host,
    address: &Address,
    class: &str,
) -> Result<Option<String>, Problem> {
    Ok(names_of(host, address, class)?.into_iter().next())
}
