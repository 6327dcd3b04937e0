//! Offers GPUs of AMD, Intel and NVIDIA as devices, with their nodes, and MIG instances of NVIDIA beside their GPU.

mod config;
mod device;
mod files;
mod function;
mod machine;
mod nvidia;
mod telemetry;
#[cfg(test)]
mod tests;

use nodedock_sdk::{
    AllocatedDevice, Claim, Configuration, ContainerEdits, Context, DeviceHealth, DeviceNode,
    DeviceReadings, Driver, DriverInfo, Health, Host, Inventory, Pool, Prepared, PreparedDevice,
    Problem, Telemetry, Trigger,
};

use config::{Config, PoolConfig};
use device::{MigCounters, Part};
use files::Files;
use function::Function;
use machine::Machine;

/// MIG instances come and go without an event of the kernel.
const DISCOVERY_PERIOD_SECONDS: u32 = 60;

struct Gpu;

nodedock_sdk::export_driver!(Gpu: Configuration, Health, Telemetry);

impl Driver for Gpu {
    fn describe() -> DriverInfo {
        DriverInfo::new("gpu.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("GPUs of AMD, Intel and NVIDIA, and MIG instances, with their device nodes")
            .sysfs_read(["bus/pci/devices/*"])
            .sysfs_read(
                function::FILES
                    .into_iter()
                    .chain(function::LINKS)
                    .chain(telemetry::files())
                    .map(|name| format!("bus/pci/devices/*/{name}")),
            )
            .host_files(nvidia::FILES.into_iter().chain(files::LIBRARIES))
            .device_nodes(machine::NODE_GLOBS)
            .mounts(files::LIBRARIES.into_iter().chain(files::BINARIES))
            .env(["NVIDIA_VISIBLE_DEVICES"])
            .events(["pci", "drm", "kfd"])
            .discovery_period_seconds(DISCOVERY_PERIOD_SECONDS)
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let config = Config::read(&ctx.config)?;
        let machine = Machine::read(host)?;
        let functions = function::all(host)?;
        Ok(config
            .pools()
            .iter()
            .enumerate()
            .map(|(index, pool)| {
                let chosen = functions
                    .iter()
                    .filter(|function| config.pool_of(function) == Some(index));
                publish(&machine, pool, chosen)
            })
            .collect())
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let config = Config::read(&ctx.config)?;
        let machine = Machine::read(host)?;
        let mut prepared = Prepared::new();
        let mut files = Files::default();
        let mut is_nvidia = false;
        for allocated in &claim.devices {
            let (pool, function, nodes) = allocated_device(host, &config, &machine, allocated)?;
            files.add(host, pool)?;
            is_nvidia |= function.has_nvidia_driver();
            let edits = nodes
                .into_iter()
                .fold(ContainerEdits::new(), ContainerEdits::device_node);
            prepared = prepared.device(PreparedDevice::new(allocated, edits));
        }
        let edits = files.into_edits()?;
        // Keeps NVIDIA's own hook for containers, where it is installed, from adding every GPU.
        Ok(prepared.edits(if is_nvidia {
            edits.env("NVIDIA_VISIBLE_DEVICES", "void")
        } else {
            edits
        }))
    }
}

impl Health for Gpu {
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let config = Config::read(&ctx.config)?;
        let machine = Machine::read(host)?;
        let mut health = Vec::new();
        for function in function::all(host)? {
            let Some(pool) = config
                .pool_of(&function)
                .map(|index| &config.pools()[index].name)
            else {
                continue;
            };
            let label = function.address.label();
            health.push(healthy_with(
                pool,
                label.clone(),
                machine.gpu_nodes(&function),
            ));
            for mig in machine.nvidia.migs(&function.address) {
                let name = format!("{label}-{}", mig.label());
                health.push(healthy_with(pool, name, machine.mig_nodes(&function, mig)));
            }
        }
        Ok(health)
    }
}

impl Telemetry for Gpu {
    fn read(host: &Host, ctx: &Context) -> Result<Vec<DeviceReadings>, Problem> {
        let config = Config::read(&ctx.config)?;
        let pools = config.pools();
        function::all(host)?
            .iter()
            .filter_map(|function| Some((&pools[config.pool_of(function)?].name, function)))
            .map(|(pool, function)| telemetry::read(host, pool, function))
            .collect()
    }
}

impl Configuration for Gpu {
    fn config_schema() -> Option<String> {
        Some(include_str!("config.schema.json").to_owned())
    }

    fn validate_config(config: &str) -> Result<(), Problem> {
        Config::read(config).map(drop)
    }

    fn validate_parameters(_: &str) -> Result<(), Problem> {
        Err(Problem::invalid(
            "no-parameters",
            "the gpu driver takes no parameters in claims or classes",
        ))
    }
}

fn publish<'a>(
    machine: &Machine,
    config: &PoolConfig,
    gpus: impl Iterator<Item = &'a Function>,
) -> Pool {
    let mut counters = MigCounters::default();
    let devices: Vec<_> = gpus
        .flat_map(|gpu| device::devices(machine, gpu, &mut counters))
        .collect();
    let pool = Pool::new(&config.name).extended_resource(config.extended_resource.clone());
    let pool = pool.control_nodes(machine::CONTROL_NODES).devices(devices);
    counters
        .into_sets()
        .into_iter()
        .fold(pool, Pool::shared_counters)
}

fn healthy_with(
    pool: &str,
    device: String,
    nodes: Result<Vec<DeviceNode>, Problem>,
) -> DeviceHealth {
    match nodes {
        Ok(_) => DeviceHealth::healthy(pool, device),
        Err(problem) => DeviceHealth::unhealthy(pool, device, problem.message),
    }
}

/// Returns the allocated device, if it exists and the config still offers it in that pool.
fn allocated_device<'a>(
    host: &Host,
    config: &'a Config,
    machine: &Machine,
    allocated: &AllocatedDevice,
) -> Result<(&'a PoolConfig, Function, Vec<DeviceNode>), Problem> {
    let AllocatedDevice { pool, device, .. } = allocated;
    let Some((address, part)) = device::parse_name(device) else {
        return missing(allocated, "no name of a GPU");
    };
    let Some(function) = Function::read(host, address)? else {
        return missing(allocated, "the GPU is not there");
    };
    let offered = match config
        .pool_of(&function)
        .map(|index| &config.pools()[index])
    {
        Some(offered) if offered.name == *pool => offered,
        _ => return missing(allocated, "the config does not offer the GPU in this pool"),
    };
    let nodes = match part {
        Part::Whole => machine.gpu_nodes(&function)?,
        Part::Mig(gpu_instance, compute_instance) => {
            let migs = machine.nvidia.migs(&function.address);
            let wanted = (gpu_instance, compute_instance);
            match migs
                .iter()
                .find(|mig| (mig.gpu_instance, mig.compute_instance) == wanted)
            {
                Some(mig) => machine.mig_nodes(&function, mig)?,
                None => return missing(allocated, "the GPU has no such MIG instance"),
            }
        }
    };
    Ok((offered, function, nodes))
}

fn missing<T>(allocated: &AllocatedDevice, reason: &str) -> Result<T, Problem> {
    Err(Problem::not_found(
        "no-such-device",
        format!("device {}/{}: {reason}", allocated.pool, allocated.device),
    ))
}
