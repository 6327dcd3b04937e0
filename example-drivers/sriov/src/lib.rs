//! Offers SR-IOV virtual functions. The driver creates them when the first claim needs one, and removes them after the last.

mod access;
mod config;
mod counts;
mod journal;
mod offer;
mod physical;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use nodedock_sdk::{
    AllocatedDevice, Claim, ClaimRecord, Configuration, ContainerEdits, Context, Driver,
    DriverInfo, Host, Inventory, Outcomes, Pool, Prepared, Problem, ProblemKind, Trigger,
    parse_json,
};

use config::{Config, Mode, Parameters, PoolConfig};
use counts::Creator;
use journal::{Journal, made_for_others};
use nodedock_sdk::pci::Address;
use physical::{FILES, PhysicalFunction, VirtualFunction, kernel_driver, physical_functions};

struct Sriov;

nodedock_sdk::export_driver!(Sriov: Configuration);

impl Driver for Sriov {
    fn describe() -> DriverInfo {
        DriverInfo::new("sriov.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("SR-IOV virtual functions of network cards and accelerators")
            .sysfs_read(["bus/pci/devices/*"])
            .sysfs_read(FILES.map(file_of_functions))
            .sysfs_write(file_of_functions("sriov_numvfs"), "[0-9]{1,5}")
            .sysfs_write(file_of_functions("sriov_drivers_autoprobe"), "[01]")
            .pci_driver("*", "([a-z0-9_-]+[_-])?vfio[_-]pci")
            .device_nodes([
                "/dev/accel/*",
                "/dev/dri/*",
                "/dev/infiniband/*",
                "/dev/vfio/*",
            ])
            .net_devices(["*"])
            .env(["PCIDEVICE_*"])
            .events(["pci", "net", "infiniband_verbs", "accel", "drm", "vfio"])
            // Prepare and unprepare of different claims both decide about the virtual functions of a physical function.
            .one_call_at_a_time()
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let config = Config::read(&ctx.config)?;
        let mut pools: Vec<_> = config.pools().iter().map(empty_pool).collect();
        for physical in physical_functions(host)? {
            if let Some(chosen) = config.pool_of(&physical) {
                pools[chosen].devices.extend(offer::devices(
                    host,
                    &config.pools()[chosen],
                    &physical,
                )?);
            }
        }
        Ok(pools.into_iter().collect())
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        prepare_claim(host, ctx, claim)
    }

    fn unprepare(host: &Host, ctx: &Context, record: &ClaimRecord) -> Result<(), Problem> {
        unprepare_claim(host, ctx, record, &BTreeSet::new())
    }

    /// The host's records still have the other claims of the batch.
    fn unprepare_batch(host: &Host, ctx: &Context, claims: &[ClaimRecord]) -> Outcomes<()> {
        let mut released = BTreeSet::new();
        let mut outcomes = Outcomes::with_capacity(claims.len());
        for record in claims {
            let outcome = unprepare_claim(host, ctx, record, &released);
            if outcome.is_ok() {
                released.insert(record.claim.id.uid.as_str());
            }
            outcomes.push((record.claim.id.uid.clone(), outcome));
        }
        outcomes
    }
}

fn file_of_functions(name: &str) -> String {
    format!("bus/pci/devices/*/{name}")
}

impl Configuration for Sriov {
    fn config_schema() -> Option<String> {
        Some(include_str!("config.schema.json").to_owned())
    }

    fn parameters_schema() -> Option<String> {
        Some(include_str!("parameters.schema.json").to_owned())
    }

    fn validate_config(config: &str) -> Result<(), Problem> {
        Config::read(config).map(drop)
    }

    fn validate_parameters(parameters: &str) -> Result<(), Problem> {
        let parameters: Parameters =
            parse_json("bad-parameters", "parameters of sriov", parameters)?;
        parameters.check()
    }
}

/// A device of a claim, with what the node and the config have for it.
struct Allocation<'a> {
    device: &'a AllocatedDevice,
    pool: &'a PoolConfig,
    physical: &'a PhysicalFunction,
    function: VirtualFunction,
    parameters: Parameters,
}

impl<'a> Allocation<'a> {
    fn read(
        host: &Host,
        config: &'a Config,
        physical: &'a [PhysicalFunction],
        claim: &Claim,
        device: &'a AllocatedDevice,
    ) -> Result<Self, Problem> {
        let parameters: Parameters = claim.merge_parameters(&device.request)?.unwrap_or_default();
        parameters.check()?;
        let address = Address::from_label(&device.device)
            .ok_or_else(|| missing(device, "no name of a virtual function"))?;
        for physical in physical {
            let Some(pool) = config.pool_of(physical).map(|index| &config.pools()[index]) else {
                continue;
            };
            let mut functions = physical.virtual_functions(host, pool.vfs)?.into_iter();
            let Some(function) = functions.find(|function| function.address == address) else {
                continue;
            };
            if pool.name != device.pool {
                return Err(missing(device, "the config offers it in another pool"));
            }
            let allocation = Allocation {
                device,
                pool,
                physical,
                function,
                parameters,
            };
            return allocation.check().map(|()| allocation);
        }
        Err(missing(device, "no physical function of the config has it"))
    }

    fn check(&self) -> Result<(), Problem> {
        let address = &self.function.address;
        let takes_interface = matches!(self.pool.mode, Mode::Netdevice | Mode::Rdma);
        if self.parameters.vf_driver.is_some() && self.pool.mode != Mode::Vfio {
            let mode = self.pool.mode.as_str();
            let message = format!("vfDriver is for mode vfio, and {address} has mode {mode}");
            return Err(Problem::invalid("bad-parameters", message));
        }
        if self.parameters.interface_name.is_some() && !takes_interface {
            let message =
                format!("interfaceName is for network interfaces, and {address} has none");
            return Err(Problem::invalid("bad-parameters", message));
        }
        if self.device.admin_access && self.pool.mode == Mode::Netdevice {
            let message =
                format!("admin access to {address} would move the interface of another claim");
            return Err(Problem::denied("no-admin-access", message));
        }
        if self.device.admin_access && !self.function.exists {
            let message = format!("{address} does not exist, and admin access does not create it");
            return Err(Problem::unavailable("no-such-function", message));
        }
        Ok(())
    }

    /// Kernel driver to bind to, in mode `vfio`.
    fn bind(&self) -> Option<&str> {
        let configured = self.pool.bind()?;
        Some(self.parameters.vf_driver.as_deref().unwrap_or(configured))
    }

    /// Fails if the virtual function has another address than it showed before it existed.
    fn check_address(&self, host: &Host) -> Result<(), Problem> {
        let (expected, index, physical) = (
            &self.function.address,
            self.function.index,
            &self.physical.address,
        );
        match self.physical.existing(host, index)? {
            Some(address) if address == *expected => Ok(()),
            found => {
                let found = found.map_or("missing".to_owned(), |address| address.to_string());
                let message = format!(
                    "virtual function {index} of {physical} is {found}, and not at {expected}"
                );
                Err(Problem::unavailable("other-vf-address", message))
            }
        }
    }

    fn bind_driver(&self, host: &Host) -> Result<(), Problem> {
        let Some(driver) = self.bind() else {
            return Ok(());
        };
        let address = &self.function.address;
        if !self.device.admin_access {
            return host.pci_driver().bind(address.as_str(), driver).map(drop);
        }
        if kernel_driver(host, address)?.as_deref() == Some(driver) {
            return Ok(());
        }
        let message =
            format!("{address} is not bound to {driver}, and admin access does not bind it");
        Err(Problem::unavailable("not-bound", message))
    }
}

fn missing(device: &AllocatedDevice, reason: &str) -> Problem {
    let message = format!("device {}/{}: {reason}", device.pool, device.device);
    Problem::not_found("no-such-device", message)
}

fn prepare_claim(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
    let uid = claim.id.uid.as_str();
    let config = Config::read(&ctx.config)?;
    let physical = physical_functions(host)?;
    let allocations = claim
        .devices
        .iter()
        .map(|device| Allocation::read(host, &config, &physical, claim, device))
        .collect::<Result<Vec<_>, _>>()?;
    check_interface_names(&allocations)?;
    let record = host.prepared_claims().get(uid).unwrap_or_default();
    let memo = Journal::of_this_boot(ctx, record.memo()?);
    let progress = Journal::of_this_boot(ctx, claim.progress()?);
    let mut journal = Journal::new(ctx);
    journal.interfaces = memo.interfaces;
    let mut shared = made_for_others(host, ctx, &BTreeSet::from([uid]))?;
    // Containers of this claim may use what an earlier, successful prepare of it created.
    shared.extend(memo.made);
    for allocation in allocations
        .iter()
        .filter(|allocation| !allocation.device.admin_access)
    {
        let address = &allocation.physical.address;
        let creator = match (shared.get(address), progress.made.get(address)) {
            (Some(made), _) => Creator::Shared(made),
            (None, Some(made)) => Creator::SamePrepare(made),
            (None, None) => Creator::Other,
        };
        let made = counts::plan(
            allocation.physical,
            allocation.pool,
            allocation.function.index,
            creator,
        )?;
        journal
            .made
            .extend(made.map(|made| (address.clone(), made)));
        journal.bound.extend(
            allocation
                .bind()
                .map(|_| allocation.function.address.clone()),
        );
    }
    if !journal.changes_nothing() {
        host.progress().save_json(uid, &journal)?;
    }
    create_functions(host, &allocations, &journal)?;
    let mut prepared = Prepared::new();
    for allocation in &allocations {
        allocation.check_address(host)?;
        allocation.bind_driver(host)?;
        prepared = prepared.device(access::prepare(host, claim, allocation, &mut journal)?);
    }
    prepared.edits(resources(&allocations)).with_memo(&journal)
}

fn create_functions(
    host: &Host,
    allocations: &[Allocation<'_>],
    journal: &Journal,
) -> Result<(), Problem> {
    let mut done = BTreeSet::new();
    for allocation in allocations
        .iter()
        .filter(|allocation| !allocation.device.admin_access)
    {
        let address = &allocation.physical.address;
        if let Some(made) = journal.made.get(address).filter(|_| done.insert(address)) {
            counts::create(host, allocation.physical, allocation.pool, made)?;
        }
    }
    Ok(())
}

/// `released` has the claims that were unprepared earlier in the same call.
fn unprepare_claim(
    host: &Host,
    ctx: &Context,
    record: &ClaimRecord,
    released: &BTreeSet<&str>,
) -> Result<(), Problem> {
    let journal = Journal::of(ctx, record)?;
    for address in &journal.bound {
        match host.pci_driver().restore(address.as_str()) {
            // A function that is gone has no kernel driver to restore.
            Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
            Ok(_) | Err(_) => {}
        }
    }
    let mut except = released.clone();
    except.insert(&record.claim.id.uid);
    let used = made_for_others(host, ctx, &except)?;
    for (address, made) in journal
        .made
        .iter()
        .filter(|(address, _)| !used.contains_key(*address))
    {
        if let Some(physical) = PhysicalFunction::read_existing(host, address)? {
            counts::remove(host, &physical, made, record.prepared)?;
        }
    }
    Ok(())
}

fn empty_pool(config: &PoolConfig) -> Pool {
    Pool::new(&config.name).extended_resource(config.extended_resource.clone())
}

fn check_interface_names(allocations: &[Allocation<'_>]) -> Result<(), Problem> {
    let mut names = BTreeSet::new();
    for name in allocations
        .iter()
        .filter_map(|allocation| allocation.parameters.interface_name.as_ref())
    {
        if !names.insert(name) {
            let message = format!("interfaceName {name:?} is for two devices of the claim");
            return Err(Problem::invalid("bad-parameters", message));
        }
    }
    Ok(())
}

/// Returns the variables that list the addresses by extended resource, as the SR-IOV network device plugin does.
fn resources(allocations: &[Allocation<'_>]) -> ContainerEdits {
    let mut resources: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for allocation in allocations {
        let Some(resource) = &allocation.pool.extended_resource else {
            continue;
        };
        let name = resource
            .to_ascii_uppercase()
            .replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
        let addresses = resources.entry(format!("PCIDEVICE_{name}")).or_default();
        addresses.push(allocation.function.address.as_str());
    }
    resources
        .into_iter()
        .fold(ContainerEdits::new(), |edits, (name, addresses)| {
            edits.env(name, addresses.join(","))
        })
}
