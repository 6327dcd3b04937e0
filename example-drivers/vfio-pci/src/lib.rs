//! Offers IOMMU groups of PCI functions for passthrough, and binds them to `vfio-pci` while a claim uses them.

mod config;
mod function;
mod offer;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use nodedock_sdk::{
    AllocatedDevice, Claim, ClaimRecord, Configuration, ContainerEdits, Context, Driver,
    DriverInfo, Host, Inventory, LeftOut, LeftOutDevice, Pool, Prepared, PreparedDevice, Problem,
    ProblemKind, Trigger,
};
use serde::{Deserialize, Serialize};

use config::Config;
use function::{FILES, Function, Group, LINKS, OwnDrivers};
use nodedock_sdk::pci::Address;
use offer::Refusal;

/// The kernel creates the node of a group asynchronously, within milliseconds of the bind.
const NODE_RETRY: Duration = Duration::from_millis(250);
const VFIO_NODE: &str = "/dev/vfio/vfio";

struct VfioPci;

nodedock_sdk::export_driver!(VfioPci: Configuration, LeftOut);

/// The memo of a claim and the progress of its prepare: the functions that the claim has bound, with the kernel drivers that they had.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Journal {
    boot_id: String,
    functions: OwnDrivers,
}

impl Driver for VfioPci {
    fn describe() -> DriverInfo {
        DriverInfo::new("vfio-pci.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Passthrough of PCI functions with vfio-pci, one device for each IOMMU group")
            .sysfs_read(["bus/pci/devices/*"])
            .sysfs_read(
                FILES
                    .into_iter()
                    .chain(LINKS)
                    .map(|name| format!("bus/pci/devices/*/{name}")),
            )
            .pci_driver("*", "([a-z0-9_-]+[_-])?vfio[_-]pci")
            .device_nodes(["/dev/vfio/*"])
            .env(["PCIDEVICE_*", "PCI_RESOURCE_*"])
            .events(["pci", "vfio"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let config = Config::read(&ctx.config)?;
        let mut pools: Vec<_> = config.pools().iter().map(empty_pool).collect();
        let groups = offer::groups(host, &config, &own_drivers(host, ctx, warn)?)?;
        for (pool, group) in groups.offered {
            pools[pool].devices.push(offer::publish(&group));
        }
        Ok(pools.into_iter().collect())
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let config = Config::read(&ctx.config)?;
        let own = own_drivers(host, ctx, |_, problem| Err(problem))?;
        let mut allocations = Vec::with_capacity(claim.devices.len());
        for device in &claim.devices {
            allocations.push(Allocation::read(host, &config, &own, device)?);
        }
        let journal = journal_of(ctx, &allocations);
        if !journal.functions.is_empty() {
            host.progress().save_json(&claim.id.uid, &journal)?;
        }
        let mut prepared = Prepared::new();
        for allocation in &allocations {
            let edits = allocation.prepare(host)?;
            prepared = prepared.device(PreparedDevice::new(allocation.device, edits));
        }
        prepared.edits(resources(&allocations)).with_memo(&journal)
    }

    fn unprepare(host: &Host, ctx: &Context, record: &ClaimRecord) -> Result<(), Problem> {
        for address in functions_of_claim(ctx, record)?.into_keys() {
            match host.pci_driver().restore(address.as_str()) {
                // A function that is gone has no kernel driver to restore.
                Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}

impl Configuration for VfioPci {
    fn config_schema() -> Option<String> {
        Some(include_str!("config.schema.json").to_owned())
    }

    fn validate_config(config: &str) -> Result<(), Problem> {
        Config::read(config).map(drop)
    }

    fn validate_parameters(_: &str) -> Result<(), Problem> {
        Err(Problem::invalid(
            "no-parameters",
            "the vfio-pci driver takes no parameters in claims or classes",
        ))
    }
}

impl LeftOut for VfioPci {
    fn list_devices(host: &Host, ctx: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
        let config = Config::read(&ctx.config)?;
        // The discovery before has logged what cannot be read.
        let own = own_drivers(host, ctx, |_, _| Ok(()))?;
        Ok(offer::groups(host, &config, &own)?.left_out)
    }
}

/// A device of a claim, with what the node and the config have for it.
struct Allocation<'a> {
    device: &'a AllocatedDevice,
    group: Group,
    /// Kernel driver to bind to.
    bind: String,
    extended_resource: Option<String>,
}

impl<'a> Allocation<'a> {
    fn read(
        host: &Host,
        config: &Config,
        own: &OwnDrivers,
        device: &'a AllocatedDevice,
    ) -> Result<Self, Problem> {
        let address = Address::from_label(&device.device)
            .ok_or_else(|| missing(device, "no name of a PCI function"))?;
        let function = Function::read(host, address, own)?
            .ok_or_else(|| missing(device, "the function does not exist"))?;
        if function.iommu_group.is_none() {
            let message = format!(
                "{} is in no IOMMU group: enable the IOMMU of the node",
                function.address
            );
            return Err(Problem::unavailable("no-iommu", message));
        }
        let group = Group::of(host, &function, own)?
            .ok_or_else(|| missing(device, "a function of the IOMMU group does not exist"))?;
        if group.first().address != function.address {
            return Err(missing(
                device,
                "another function names the device of its IOMMU group",
            ));
        }
        let pool = offer::pool_of(config, &group).map_err(|refusal| refused(&group, &refusal))?;
        let pool = &config.pools()[pool];
        if pool.name != device.pool {
            return Err(missing(
                device,
                "the config does not offer the group in this pool",
            ));
        }
        let (bind, extended_resource) = (pool.bind.clone(), pool.extended_resource.clone());
        Ok(Allocation {
            device,
            group,
            bind,
            extended_resource,
        })
    }

    fn prepare(&self, host: &Host) -> Result<ContainerEdits, Problem> {
        let first = &self.group.first().address;
        if self.device.admin_access {
            self.check_bound()?;
        } else {
            host.pci_driver().bind(first.as_str(), &self.bind)?;
        }
        let group_node = format!("/dev/vfio/{}", self.group.number);
        for path in [VFIO_NODE, &group_node] {
            host.device_nodes()
                .stat(path)
                .map_err(|problem| not_there_yet(problem, path, first))?;
        }
        let variable = first.variable("PCIDEVICE");
        let addresses = self.group.addresses().join(",");
        Ok(ContainerEdits::new()
            .env(variable, addresses)
            .device_node(VFIO_NODE)
            .device_node(group_node))
    }

    /// Admin access changes no kernel driver: the group's node exists only while another claim has it bound.
    fn check_bound(&self) -> Result<(), Problem> {
        let unbound = self
            .group
            .functions
            .iter()
            .find(|one| one.bound.as_ref() != Some(&self.bind));
        let Some(function) = unbound else {
            return Ok(());
        };
        let (address, driver) = (&function.address, &self.bind);
        let message =
            format!("{address} is not bound to {driver}, and admin access does not bind it");
        Err(Problem::unavailable("not-bound", message))
    }
}

fn missing(device: &AllocatedDevice, reason: &str) -> Problem {
    let message = format!("device {}/{}: {reason}", device.pool, device.device);
    Problem::not_found("no-such-device", message)
}

fn empty_pool(config: &config::PoolConfig) -> Pool {
    Pool::new(&config.name)
        .extended_resource(config.extended_resource.clone())
        .control_nodes([VFIO_NODE])
}

fn refused(group: &Group, refusal: &Refusal) -> Problem {
    let message = format!(
        "IOMMU group {} of {}: {refusal}",
        group.number,
        group.first().address
    );
    match refusal {
        Refusal::NotSelected(_) | Refusal::SeveralPools => {
            Problem::not_found("not-offered", message)
        }
        Refusal::VirtualFunctions { .. } => Problem::conflict("has-virtual-functions", message),
        Refusal::TooManyFunctions => Problem::denied("too-many-functions", message),
        Refusal::Bridge { .. } => Problem::conflict("bridge-in-use", message),
    }
}

fn not_there_yet(problem: Problem, path: &str, first: &Address) -> Problem {
    if problem.kind != ProblemKind::NotFound {
        return problem;
    }
    let message = format!("{path} does not exist yet after the bind of {first}");
    Problem::unavailable("no-vfio-node", message).retry_after(NODE_RETRY)
}

/// Returns the functions that the claim binds. Devices with admin access are not among them.
fn journal_of(ctx: &Context, allocations: &[Allocation<'_>]) -> Journal {
    let bound = allocations
        .iter()
        .filter(|allocation| !allocation.device.admin_access);
    let functions = bound.flat_map(|allocation| &allocation.group.functions);
    Journal {
        boot_id: ctx.boot_id.clone(),
        functions: functions
            .map(|one| (one.address.clone(), one.driver.clone()))
            .collect(),
    }
}

/// Returns the variables that list the first function of every device, by extended resource, as KubeVirt reads them.
fn resources(allocations: &[Allocation<'_>]) -> ContainerEdits {
    let mut resources: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for allocation in allocations {
        let Some(resource) = &allocation.extended_resource else {
            continue;
        };
        let name = resource
            .to_ascii_uppercase()
            .replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
        let addresses = resources.entry(format!("PCI_RESOURCE_{name}")).or_default();
        addresses.push(allocation.group.first().address.as_str());
    }
    resources
        .into_iter()
        .fold(ContainerEdits::new(), |edits, (name, addresses)| {
            edits.env(name, addresses.join(","))
        })
}

/// Returns the kernel drivers of functions that claims have bound: a config that selects by kernel driver selects by these.
/// `unreadable` decides about a claim whose memo or progress cannot be read.
fn own_drivers(
    host: &Host,
    ctx: &Context,
    unreadable: impl Fn(&Host, Problem) -> Result<(), Problem>,
) -> Result<OwnDrivers, Problem> {
    let mut own = OwnDrivers::new();
    for record in host.prepared_claims().all() {
        match functions_of_claim(ctx, &record) {
            Ok(functions) => own.extend(functions),
            Err(problem) => unreadable(host, problem)?,
        }
    }
    Ok(own)
}

/// Logs a problem and lets discovery continue without the claim: the devices of other claims do not depend on it.
fn warn(host: &Host, problem: Problem) -> Result<(), Problem> {
    host.log().warn(
        "memo cannot be read",
        &[("reason", problem.message.as_str())],
    );
    Ok(())
}

/// Returns what a claim has bound; nothing for a claim of another boot, which has reset all kernel drivers.
fn functions_of_claim(ctx: &Context, record: &ClaimRecord) -> Result<OwnDrivers, Problem> {
    let journals = [
        record.claim.progress::<Journal>()?,
        record.memo::<Journal>()?,
    ];
    let of_this_boot = journals
        .into_iter()
        .flatten()
        .filter(|journal| journal.boot_id == ctx.boot_id);
    Ok(of_this_boot.flat_map(|journal| journal.functions).collect())
}
