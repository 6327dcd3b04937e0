//! Container edits for a virtual function, by mode.

use std::time::Duration;

use nodedock_sdk::{
    Claim, ContainerEdits, DeviceStatus, Host, NetworkData, PreparedDevice, Problem, ProblemKind,
    dns_label_hashed,
};

use crate::Allocation;
use crate::config::Mode;
use crate::journal::{Interface, Journal};
use crate::physical::{DEVICES, first_of, kernel_driver, names_of};
use nodedock_sdk::last_segment;
use nodedock_sdk::pci::Address;

/// The kernel creates interfaces and nodes of a virtual function asynchronously.
const RETRY: Duration = Duration::from_millis(250);
const VFIO_NODE: &str = "/dev/vfio/vfio";
const RDMA_CM_NODE: &str = "/dev/infiniband/rdma_cm";
const ACCELERATOR_CLASSES: [&str; 2] = ["accel", "drm"];
const INTERFACE_NAME_BYTES_MAX: usize = 15;
const HASH_BYTES: usize = 8;

/// Returns the edits and the status of an allocated virtual function, which exists. Adds its interface to the journal, which has the
/// interfaces of an earlier prepare.
pub(crate) fn prepare(
    host: &Host,
    claim: &Claim,
    allocation: &Allocation<'_>,
    journal: &mut Journal,
) -> Result<PreparedDevice, Problem> {
    let address = &allocation.function.address;
    let mut edits = ContainerEdits::new().env(address.variable("PCIDEVICE"), address.as_str());
    for path in nodes(host, allocation)? {
        edits = edits.device_node(path);
    }
    if !needs_interface(allocation) {
        return Ok(PreparedDevice::new(allocation.device, edits));
    }
    let interface = interface(host, address, journal)?;
    journal
        .interfaces
        .insert(address.clone(), interface.clone());
    let name = container_interface(claim, allocation);
    let edits = edits.net_device(&interface.name, &name);
    let network = NetworkData {
        interface_name: name,
        ips: Vec::new(),
        hardware_address: interface.hardware_address,
    };
    let status = DeviceStatus {
        network: Some(network),
        ..DeviceStatus::default()
    };
    Ok(PreparedDevice::new(allocation.device, edits).status(status))
}

/// An RDMA device without a network interface has virtual functions without one.
fn needs_interface(allocation: &Allocation<'_>) -> bool {
    match allocation.pool.mode {
        Mode::Netdevice => true,
        Mode::Rdma => allocation.physical.interface.is_some() && !allocation.device.admin_access,
        Mode::Vfio | Mode::Nodes => false,
    }
}

/// Returns the interface as the kernel shows it, or as it was when an earlier prepare moved it into a container.
fn interface(host: &Host, address: &Address, journal: &Journal) -> Result<Interface, Problem> {
    let Some(name) = first_of(host, address, "net")? else {
        return journal
            .interfaces
            .get(address)
            .cloned()
            .map_or_else(|| Err(no_interface(host, address)), Ok);
    };
    match host.net_interfaces().get(&name) {
        Ok(found) => Ok(Interface {
            name,
            hardware_address: found.hardware_address,
        }),
        // Renamed since, as udev does with new interfaces.
        Err(problem) if problem.kind == ProblemKind::NotFound => Err(no_interface(host, address)),
        Err(problem) => Err(problem),
    }
}

fn no_interface(host: &Host, address: &Address) -> Problem {
    let driver = match kernel_driver(host, address) {
        Ok(driver) => driver,
        Err(problem) => return problem,
    };
    let driver = driver.map_or("no kernel driver".to_owned(), |driver| {
        format!("kernel driver {driver}")
    });
    let message = format!("virtual function {address} has {driver} and no network interface yet");
    Problem::unavailable("no-interface", message).retry_after(RETRY)
}

/// Returns the name from the parameters, the claim's name if it fits, or a prefix of it with a hash.
fn container_interface(claim: &Claim, allocation: &Allocation<'_>) -> String {
    let name = &claim.id.name;
    match &allocation.parameters.interface_name {
        Some(chosen) => chosen.clone(),
        None if claim.devices.len() == 1 && name.len() <= INTERFACE_NAME_BYTES_MAX => name.clone(),
        None => {
            let hashed = dns_label_hashed(&format!("{name}/{}", allocation.device.device));
            let hash = &hashed[hashed.len() - HASH_BYTES..];
            let prefix: String = name
                .chars()
                .take(INTERFACE_NAME_BYTES_MAX - HASH_BYTES - 1)
                .collect();
            format!("{}-{hash}", prefix.trim_end_matches(['-', '.']))
        }
    }
}

fn nodes(host: &Host, allocation: &Allocation<'_>) -> Result<Vec<String>, Problem> {
    let address = &allocation.function.address;
    let nodes = match allocation.pool.mode {
        Mode::Netdevice => return Ok(Vec::new()),
        Mode::Rdma => rdma_nodes(host, address)?,
        Mode::Vfio => vfio_nodes(host, address)?,
        Mode::Nodes => accelerator_nodes(host, address)?,
    };
    if nodes.is_empty() {
        return Err(no_node(address, "no device node"));
    }
    for path in &nodes {
        match host.device_nodes().stat(path) {
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                return Err(no_node(address, &format!("no node {path}")));
            }
            found => drop(found?),
        }
    }
    Ok(nodes)
}

fn no_node(address: &Address, lacks: &str) -> Problem {
    let message = format!("virtual function {address} has {lacks} yet");
    Problem::unavailable("no-device-node", message).retry_after(RETRY)
}

/// Returns the RDMA device nodes; none if the function has no verbs.
fn rdma_nodes(host: &Host, address: &Address) -> Result<Vec<String>, Problem> {
    let verbs = names_of(host, address, "infiniband_verbs")?;
    if verbs.is_empty() {
        return Ok(Vec::new());
    }
    let mads = names_of(host, address, "infiniband_mad")?;
    let mads = mads.into_iter().filter(|name| name.starts_with("umad"));
    let mut nodes: Vec<_> = verbs
        .into_iter()
        .chain(mads)
        .map(|name| format!("/dev/infiniband/{name}"))
        .collect();
    match host.device_nodes().stat(RDMA_CM_NODE) {
        Ok(_) => nodes.push(RDMA_CM_NODE.to_owned()),
        // The module rdma_ucm is not loaded.
        Err(problem) if problem.kind == ProblemKind::NotFound => {}
        Err(problem) => return Err(problem),
    }
    Ok(nodes)
}

fn vfio_nodes(host: &Host, address: &Address) -> Result<Vec<String>, Problem> {
    let Some(group) = host
        .sysfs()
        .find_link(&format!("{DEVICES}/{address}/iommu_group"))?
    else {
        let message = format!("{address} is in no IOMMU group: enable the IOMMU of the node");
        return Err(Problem::unavailable("no-iommu", message));
    };
    Ok(vec![
        VFIO_NODE.to_owned(),
        format!("/dev/vfio/{}", last_segment(&group)),
    ])
}

fn accelerator_nodes(host: &Host, address: &Address) -> Result<Vec<String>, Problem> {
    let mut nodes = Vec::new();
    for class in ACCELERATOR_CLASSES {
        for path in host
            .sysfs()
            .glob(&format!("{DEVICES}/{address}/{class}/*/uevent"))?
        {
            let uevent = host.sysfs().find(&path)?.unwrap_or_default();
            let name = uevent
                .lines()
                .find_map(|line| line.strip_prefix("DEVNAME="));
            nodes.extend(name.map(|name| format!("/dev/{name}")));
        }
    }
    Ok(nodes)
}
