//! Describes the virtual functions that the driver offers.

use nodedock_sdk::{Device, Host, Problem};

use crate::config::PoolConfig;
use crate::physical::{PhysicalFunction, VirtualFunction, first_of, kernel_driver};

/// Returns the devices of a physical function. Logs why it has fewer than the config asks for.
pub(crate) fn devices(
    host: &Host,
    pool: &PoolConfig,
    physical: &PhysicalFunction,
) -> Result<Vec<Device>, Problem> {
    if physical
        .driver
        .as_deref()
        .is_none_or(|driver| driver.contains("vfio"))
    {
        warn(
            host,
            physical,
            pool.vfs,
            0,
            "it has no kernel driver, or one for passthrough",
        );
        return Ok(Vec::new());
    }
    let mut functions = physical.virtual_functions(host, pool.vfs)?;
    // A count other than 0 does not change while any virtual function is in use: the missing ones are not available.
    functions.retain(|function| physical.count == 0 || function.exists);
    if functions.len() < usize::try_from(pool.vfs).unwrap_or(usize::MAX) {
        let reason = match physical.count {
            _ if pool.vfs > physical.total => "it supports fewer",
            0 => "it does not show their addresses before they exist: create them on the node",
            _ => "it has another number already",
        };
        warn(host, physical, pool.vfs, functions.len(), reason);
    }
    functions
        .iter()
        .map(|function| publish(host, pool, physical, function))
        .collect()
}

fn warn(host: &Host, physical: &PhysicalFunction, wanted: u32, offered: usize, reason: &str) {
    let (wanted, offered) = (wanted.to_string(), offered.to_string());
    let fields = [
        ("function", physical.address.as_str()),
        ("configured", &wanted),
        ("offered", &offered),
        ("reason", reason),
    ];
    host.log()
        .warn("fewer virtual functions than configured", &fields);
}

fn publish(
    host: &Host,
    pool: &PoolConfig,
    physical: &PhysicalFunction,
    function: &VirtualFunction,
) -> Result<Device, Problem> {
    let address = &function.address;
    let (driver, rdma) = if function.exists {
        (
            kernel_driver(host, address)?,
            first_of(host, address, "infiniband")?,
        )
    } else {
        (None, None)
    };
    let device = Device::new(address.label())
        .attribute("resource.kubernetes.io/pciBusID", address.as_str())
        .attribute_opt("resource.kubernetes.io/pcieRoot", physical.root.clone())
        .attribute("vendor", physical.vendor.as_str())
        .attribute_opt("device", physical.vf_device.clone())
        .attribute("mode", pool.mode.as_str())
        .attribute("vfIndex", function.index)
        .attribute("pfAddress", physical.address.as_str())
        .attribute_opt("pfInterface", physical.interface.clone())
        .attribute_opt("pfSpeedMbps", physical.speed_mbps)
        .attribute_opt("numaNode", physical.numa_node)
        .attribute_opt("driver", driver)
        .attribute_opt("rdmaDevice", rdma)
        .identity(format!("pci:{address}"));
    Ok(match physical.numa_node {
        Some(node) => device.numa_node(node),
        None => device,
    })
}
