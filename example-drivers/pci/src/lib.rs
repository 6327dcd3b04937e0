//! Offers PCI functions as devices, selected by vendor, device, class and driver in the operator's config.

mod config;
mod function;
#[cfg(test)]
mod tests;

use nodedock_sdk::{
    AllocatedDevice, Claim, Configuration, ContainerEdits, Context, Device, Driver, DriverInfo,
    Host, Inventory, Pool, Prepared, Problem, Trigger, dns_label,
};

use config::Config;
use function::{FILES, Function, LINKS, NODE_CLASSES};
use nodedock_sdk::pci::Address;

struct Pci;

nodedock_sdk::export_driver!(Pci: Configuration);

impl Driver for Pci {
    fn describe() -> DriverInfo {
        DriverInfo::new("pci.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("PCI functions, with the device nodes that belong to them")
            .sysfs_read(["bus/pci/devices/*"])
            .sysfs_read(FILES.into_iter().chain(LINKS).map(file_of_functions))
            .sysfs_read(NODE_CLASSES.map(|class| file_of_functions(&format!("{class}/*/uevent"))))
            .device_nodes([
                "/dev/accel/*",
                "/dev/dri/*",
                "/dev/infiniband/*",
                "/dev/mei*",
                "/dev/ptp*",
                "/dev/vfio/*",
                "/dev/video*",
            ])
            .env(["PCIDEVICE_*"])
            .events(["pci", "accel", "drm", "infiniband_verbs", "vfio"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let config = Config::read(&ctx.config)?;
        let mut pools: Vec<_> = config.pools().iter().map(empty_pool).collect();
        for address in function::addresses(host)? {
            let Some(function) = Function::read(host, address)? else {
                continue;
            };
            if let Some(chosen) = config.pool_of(&function) {
                pools[chosen].devices.push(publish(&function));
            }
        }
        Ok(pools.into_iter().collect())
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let config = Config::read(&ctx.config)?;
        Prepared::each(claim, |device| hand_out(host, &config, device))
    }
}

fn file_of_functions(name: &str) -> String {
    format!("bus/pci/devices/*/{name}")
}

impl Configuration for Pci {
    fn config_schema() -> Option<String> {
        Some(include_str!("config.schema.json").to_owned())
    }

    fn validate_config(config: &str) -> Result<(), Problem> {
        Config::read(config).map(drop)
    }

    fn validate_parameters(_: &str) -> Result<(), Problem> {
        Err(Problem::invalid(
            "no-parameters",
            "the pci driver takes no parameters in claims or classes",
        ))
    }
}

fn empty_pool(config: &config::PoolConfig) -> Pool {
    Pool::new(&config.name).extended_resource(config.extended_resource.clone())
}

fn publish(function: &Function) -> Device {
    // The host adds address, PCIe root and NUMA node as Kubernetes names them.
    Device::new(dns_label(function.address.as_str()))
        .attribute("vendor", function.vendor.as_str())
        .attribute("device", function.device.as_str())
        .attribute("class", function.class.as_str())
        .attribute_opt("subsystemVendor", function.subsystem_vendor.clone())
        .attribute_opt("subsystemDevice", function.subsystem_device.clone())
        .attribute_opt("driver", function.driver.clone())
        .attribute_opt("iommuGroup", function.iommu_group)
        .attribute_opt("currentLinkSpeed", function.link_speed.clone())
        .attribute_opt("currentLinkWidth", function.link_width)
        .identity(format!("pci:{}", function.address.as_str()))
}

fn hand_out(
    host: &Host,
    config: &Config,
    allocated: &AllocatedDevice,
) -> Result<ContainerEdits, Problem> {
    let function = allocated_function(host, config, allocated)?;
    let address = function.address.as_str();
    let name = format!(
        "PCIDEVICE_{}",
        dns_label(address).replace('-', "_").to_ascii_uppercase()
    );
    let mut edits = ContainerEdits::new().env(name, address);
    for node in function.nodes(host)? {
        edits = edits.device_node(node);
    }
    Ok(edits)
}

/// Returns the allocated function, if it exists and the config still offers it in that pool.
fn allocated_function(
    host: &Host,
    config: &Config,
    allocated: &AllocatedDevice,
) -> Result<Function, Problem> {
    let AllocatedDevice { pool, device, .. } = allocated;
    let Some(address) = Address::from_label(device) else {
        return missing(allocated, "no name of a PCI function");
    };
    let Some(function) = Function::read(host, address)? else {
        return missing(allocated, "the function is not there");
    };
    match config
        .pool_of(&function)
        .map(|index| &config.pools()[index])
    {
        Some(offered) if offered.name == *pool => Ok(function),
        _ => missing(
            allocated,
            "the config does not offer the function in this pool",
        ),
    }
}

fn missing<T>(allocated: &AllocatedDevice, reason: &str) -> Result<T, Problem> {
    Err(Problem::not_found(
        "no-such-device",
        format!("device {}/{}: {reason}", allocated.pool, allocated.device),
    ))
}
