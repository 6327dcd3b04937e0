//! Decides which IOMMU groups the driver offers, in which pools, and describes them.

use std::collections::BTreeSet;
use std::fmt;

use nodedock_sdk::{Device, Host, LeftOutDevice, Problem};

use crate::config::Config;
use crate::function::{Group, OwnDrivers, functions};
use nodedock_sdk::pci::Address;

/// Identities that a device may have, one for each function.
const FUNCTIONS_MAX: usize = 16;

/// Why a group is not offered.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The config does not select this function of the group.
    NotSelected(Address),
    SeveralPools,
    /// A physical function whose virtual functions exist: the kernel removes them when it unbinds the physical function.
    VirtualFunctions {
        function: Address,
        count: u32,
    },
    TooManyFunctions,
    /// A bridge of the group has a kernel driver that keeps the group from `vfio`.
    Bridge {
        bridge: Address,
        driver: String,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NotSelected(address) => {
                write!(f, "the config does not select its function {address}")
            }
            Refusal::SeveralPools => f.write_str("the config has its functions in several pools"),
            Refusal::VirtualFunctions { function, count } => {
                write!(f, "its function {function} has {count} virtual functions")
            }
            Refusal::TooManyFunctions => write!(f, "it has more than {FUNCTIONS_MAX} functions"),
            Refusal::Bridge { bridge, driver } => {
                write!(f, "its bridge {bridge} has the kernel driver {driver}")
            }
        }
    }
}

/// The IOMMU groups with functions that the config selects.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// Each with the index of its pool.
    pub(crate) offered: Vec<(usize, Group)>,
    /// Groups that are not offered, by the address of their first function that the config selects. A function without a group is one by itself.
    pub(crate) left_out: Vec<LeftOutDevice>,
}

/// Finds the groups with functions that the config selects.
pub(crate) fn groups(host: &Host, config: &Config, own: &OwnDrivers) -> Result<Groups, Problem> {
    let mut groups = Groups::default();
    let mut seen = BTreeSet::new();
    for function in functions(host, own)? {
        if config.pool_of(&function).is_none() {
            continue;
        }
        let address = function.address.as_str();
        let Some(number) = function.iommu_group else {
            let reason = "it is in no IOMMU group: enable the IOMMU of the node";
            groups.left_out.push(LeftOutDevice::new(address, reason));
            continue;
        };
        if !seen.insert(number) {
            continue;
        }
        let Some(group) = Group::of(host, &function, own)? else {
            continue;
        };
        match pool_of(config, &group) {
            Ok(pool) => groups.offered.push((pool, group)),
            Err(refusal) => {
                let reason = format!("IOMMU group {number}: {refusal}");
                groups.left_out.push(LeftOutDevice::new(address, reason));
            }
        }
    }
    Ok(groups)
}

/// Returns the index of the pool that has all functions of the group.
pub(crate) fn pool_of(config: &Config, group: &Group) -> Result<usize, Refusal> {
    if group.functions.len() > FUNCTIONS_MAX {
        return Err(Refusal::TooManyFunctions);
    }
    if let Some((bridge, driver)) = group.blocked_by.clone() {
        return Err(Refusal::Bridge { bridge, driver });
    }
    let mut chosen = None;
    for function in &group.functions {
        let pool = config
            .pool_of(function)
            .ok_or_else(|| Refusal::NotSelected(function.address.clone()))?;
        if *chosen.get_or_insert(pool) != pool {
            return Err(Refusal::SeveralPools);
        }
        if function.virtual_functions > 0 {
            let count = function.virtual_functions;
            return Err(Refusal::VirtualFunctions {
                function: function.address.clone(),
                count,
            });
        }
    }
    chosen.ok_or_else(|| Refusal::NotSelected(group.first().address.clone()))
}

pub(crate) fn publish(group: &Group) -> Device {
    let first = group.first();
    let device = Device::new(first.address.label())
        .attribute("resource.kubernetes.io/pciBusID", first.address.as_str())
        .attribute_opt("resource.kubernetes.io/pcieRoot", first.root.clone())
        .attribute("vendor", first.vendor.as_str())
        .attribute("device", first.device.as_str())
        .attribute("class", first.class.as_str())
        .attribute_opt("numaNode", first.numa_node)
        .attribute("iommuGroup", group.number)
        .attribute(
            "functions",
            i64::try_from(group.functions.len()).unwrap_or(i64::MAX),
        );
    let device = match first.numa_node {
        Some(node) => device.numa_node(node),
        None => device,
    };
    group
        .addresses()
        .into_iter()
        .fold(device, |device, address| {
            device.identity(format!("pci:{address}"))
        })
}
