//! Reads PCI functions and IOMMU groups from sysfs.

use std::collections::BTreeMap;

use nodedock_sdk::{Host, Problem};

use nodedock_sdk::last_segment;
use nodedock_sdk::pci::{Address, root};

const DEVICES: &str = "bus/pci/devices";
/// Bridges of every kind, host bridges (`0x0600`) among them: they have no interface for a guest and are not bound.
const BRIDGE_CLASS: &str = "0x06";
/// PCI-to-PCI bridges, whose kernel driver leaves the DMA of a group to its owner.
const PCI_BRIDGE_CLASS: &str = "0x0604";

/// Files that the driver reads in a function's directory.
pub(crate) const FILES: [&str; 5] = ["vendor", "device", "class", "numa_node", "sriov_numvfs"];

/// Links and directories that the driver reads in a function's directory.
pub(crate) const LINKS: [&str; 3] = ["driver", "iommu_group", "iommu_group/devices"];

/// Kernel drivers that functions had before this driver bound them.
pub(crate) type OwnDrivers = BTreeMap<Address, Option<String>>;

#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) address: Address,
    /// Root port's bus, such as `pci0000:00`.
    pub(crate) root: Option<String>,
    /// Vendor ID, as the next two fields: `0x` and hex digits.
    pub(crate) vendor: String,
    pub(crate) device: String,
    pub(crate) class: String,
    /// Kernel driver while no claim uses the function.
    pub(crate) driver: Option<String>,
    /// Kernel driver now.
    pub(crate) bound: Option<String>,
    pub(crate) numa_node: Option<u32>,
    pub(crate) iommu_group: Option<u32>,
    /// Number of virtual functions that it has.
    pub(crate) virtual_functions: u32,
}

impl Function {
    /// Returns `None` if the function does not exist, or disappears during the read.
    pub(crate) fn read(
        host: &Host,
        address: Address,
        own: &OwnDrivers,
    ) -> Result<Option<Self>, Problem> {
        let sysfs = host.sysfs();
        let directory = format!("{DEVICES}/{address}");
        let file = |name: &str| sysfs.find(&format!("{directory}/{name}"));
        let number = |name: &str| sysfs.find_parsed::<u32>(&format!("{directory}/{name}"));
        let link = |name: &str| {
            Ok(sysfs
                .find_link(&format!("{directory}/{name}"))?
                .as_deref()
                .map(last_segment))
        };
        let (Some(path), Some(vendor), Some(device), Some(class)) = (
            sysfs.find_link(&directory)?,
            file("vendor")?,
            file("device")?,
            file("class")?,
        ) else {
            return Ok(None);
        };
        let bound = link("driver")?;
        Ok(Some(Function {
            root: root(&path),
            vendor,
            device,
            class,
            driver: own.get(&address).cloned().unwrap_or_else(|| bound.clone()),
            bound,
            // -1, for a function without a local NUMA node, is not a u32.
            numa_node: number("numa_node")?,
            iommu_group: link("iommu_group")?.and_then(|group| group.parse().ok()),
            virtual_functions: number("sriov_numvfs")?.unwrap_or(0),
            address,
        }))
    }

    fn is_bridge(&self) -> bool {
        self.class.starts_with(BRIDGE_CLASS)
    }

    /// Returns the kernel driver of a bridge that keeps its IOMMU group from `vfio`: the group is a guest's only if every other function
    /// in it has no kernel driver.
    fn blocking_driver(self) -> Option<(Address, String)> {
        let driver = self
            .bound
            .filter(|_| !self.class.starts_with(PCI_BRIDGE_CLASS))?;
        Some((self.address, driver))
    }
}

/// An IOMMU group: the functions that the kernel can isolate only together, sorted by address, without bridges.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) number: u32,
    pub(crate) functions: Vec<Function>,
    /// A bridge of the group whose kernel driver keeps the group from `vfio`, and this driver.
    pub(crate) blocked_by: Option<(Address, String)>,
}

impl Group {
    /// Returns the group of a function; `None` if it is in no group, or if a function of the group disappears during the read.
    pub(crate) fn of(
        host: &Host,
        function: &Function,
        own: &OwnDrivers,
    ) -> Result<Option<Self>, Problem> {
        let Some(number) = function.iommu_group else {
            return Ok(None);
        };
        let path = format!("{DEVICES}/{}/iommu_group/devices", function.address);
        let mut addresses: Vec<_> = host
            .sysfs()
            .read_dir(&path)?
            .iter()
            .filter_map(|name| Address::parse(name))
            .collect();
        addresses.sort();
        let mut functions = Vec::with_capacity(addresses.len());
        for address in addresses {
            let Some(function) = Function::read(host, address, own)? else {
                return Ok(None);
            };
            functions.push(function);
        }
        let (bridges, functions): (Vec<_>, Vec<_>) =
            functions.into_iter().partition(Function::is_bridge);
        let blocked_by = bridges.into_iter().find_map(Function::blocking_driver);
        Ok((!functions.is_empty()).then_some(Group {
            number,
            functions,
            blocked_by,
        }))
    }

    /// Returns the function that names the group's device.
    pub(crate) fn first(&self) -> &Function {
        &self.functions[0]
    }

    pub(crate) fn addresses(&self) -> Vec<&str> {
        self.functions
            .iter()
            .map(|function| function.address.as_str())
            .collect()
    }
}

/// Returns all functions of the node, sorted by address, without bridges.
pub(crate) fn functions(host: &Host, own: &OwnDrivers) -> Result<Vec<Function>, Problem> {
    let mut functions = Vec::new();
    for path in host.sysfs().glob(&format!("{DEVICES}/*"))? {
        let Some(address) = Address::parse(&last_segment(&path)) else {
            continue;
        };
        functions
            .extend(Function::read(host, address, own)?.filter(|function| !function.is_bridge()));
    }
    Ok(functions)
}
