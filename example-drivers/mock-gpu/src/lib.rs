//! Simulated GPUs for experiments and tests: needs no hardware and uses all facets of the contract.

mod config;
mod sharing;
#[cfg(test)]
mod tests;

use nodedock_sdk::{
    AllocatedDevice, AttributeValue, Capacity, CapacityChoice, CapacityPolicy, Claim, ClaimRecord,
    Configuration, ContainerEdits, Context, CounterSet, Device, DeviceHealth, Driver, DriverInfo,
    Health, Host, Inventory, LeftOut, LeftOutDevice, Pool, Prepared, Problem, Trigger,
};
use serde::{Deserialize, Serialize};

use config::{Config, Gpu, PoolConfig};
use sharing::{Parameters, Sharing};

struct MockGpu;

nodedock_sdk::export_driver!(MockGpu: Configuration, Health, LeftOut);

/// Memo of a claim: the settings of its devices.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Memo {
    devices: Vec<Holding>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Holding {
    pool: String,
    device: String,
    sharing: Sharing,
}

impl Driver for MockGpu {
    fn describe() -> DriverInfo {
        DriverInfo::new("mock-gpu.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Simulated GPUs, for trying things out and for tests")
            .env(["MOCK_GPU_*"])
    }

    fn discover(_: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let config = Config::read(&ctx.config)?;
        Ok(config
            .pools
            .iter()
            .map(|pool| publish(ctx, &config, pool))
            .collect())
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let config = Config::read(&ctx.config)?;
        let used = uses_of_others(host, &config, claim)?;
        prepare(&config, ctx, claim, &used)
    }

    fn unprepare(host: &Host, _: &Context, live: &ClaimRecord) -> Result<(), Problem> {
        match live.memo::<Memo>() {
            Ok(memo) => log_reset(host, &memo.unwrap_or_default()),
            // A later unprepare could not parse the memo either, and the claim must not stay forever.
            Err(problem) => host.log().warn(
                "memo cannot be read",
                &[("reason", problem.message.as_str())],
            ),
        }
        Ok(())
    }
}

impl Configuration for MockGpu {
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
        Parameters::read(parameters)?.sharing().map(drop)
    }
}

impl Health for MockGpu {
    fn check(_: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let config = Config::read(&ctx.config)?;
        let gpus = config
            .pools
            .iter()
            .flat_map(|pool| pool.gpus().map(move |gpu| (pool, gpu)));
        Ok(gpus.map(|(pool, gpu)| health(pool, gpu)).collect())
    }
}

impl LeftOut for MockGpu {
    fn list_devices(_: &Host, ctx: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
        let config = Config::read(&ctx.config)?;
        let devices = config.left_out.iter();
        Ok(devices
            .map(|device| LeftOutDevice::new(&device.name, &device.reason))
            .collect())
    }
}

fn publish(ctx: &Context, config: &Config, pool: &PoolConfig) -> Pool {
    let counters = (0..pool.count)
        .filter(|_| pool.partitions > 0)
        .map(|offset| {
            CounterSet::new(pool.counter_set(offset)).counter("memory", gibibytes(pool.memory_gib))
        });
    let mut published = Pool::new(&pool.name).extended_resource(pool.extended_resource.clone());
    published.shared_counters = counters.collect();
    published.devices(pool.gpus().map(|gpu| publish_gpu(ctx, config, pool, gpu)))
}

fn publish_gpu(ctx: &Context, config: &Config, pool: &PoolConfig, gpu: Gpu) -> Device {
    let memory = gibibytes(pool.memory_of(gpu));
    let device = Device::new(pool.name_of(gpu))
        .attribute("uuid", pool.uuid(&ctx.node_name, gpu))
        .attribute("index", pool.index_of(gpu))
        .attribute("model", pool.model.as_str())
        .attribute("partition", gpu.partition.is_some())
        .attribute(
            "driverVersion",
            AttributeValue::version(&config.driver_version),
        )
        .allow_multiple_allocations(pool.shared);
    let device = device.identity(format!("mock-gpu:{}", pool.uuid(&ctx.node_name, gpu)));
    let device = pool
        .numa_node_of(gpu)
        .into_iter()
        .fold(device, Device::numa_node);
    let device = if pool.partitions == 0 {
        device
    } else {
        device.consumes(
            CounterSet::new(pool.counter_set(gpu.offset)).counter("memory", memory.as_str()),
        )
    };
    let capacity = Capacity::new("memory", memory.as_str());
    device.with_capacity(if pool.shared {
        capacity.policy(whole_gibibytes(memory))
    } else {
        capacity
    })
}

fn gibibytes(amount: u32) -> String {
    format!("{amount}Gi")
}

fn whole_gibibytes(most: String) -> CapacityPolicy {
    let choice = CapacityChoice::Range {
        min: "1Gi".to_owned(),
        max: Some(most),
        step: Some("1Gi".to_owned()),
    };
    CapacityPolicy {
        default_amount: Some("1Gi".to_owned()),
        choice,
    }
}

/// Returns the settings of devices that other claims use or are about to use: two that do not go together are never both prepared.
fn uses_of_others(host: &Host, config: &Config, claim: &Claim) -> Result<Vec<Holding>, Problem> {
    let mut used = Vec::new();
    for AllocatedDevice { pool, device, .. } in &claim.devices {
        for other in host.prepared_claims().using(pool, device) {
            if other.claim.id.uid == claim.id.uid {
                continue;
            }
            if other.prepared {
                used.extend(other.memo::<Memo>()?.unwrap_or_default().devices);
            } else {
                // A claim with bad parameters is refused, and so uses nothing.
                used.extend(other.claim.devices.iter().filter_map(|allocated| {
                    holding(config, &other.claim, allocated).ok().flatten()
                }));
            }
        }
    }
    Ok(used)
}

/// Returns the settings of an allocated device; `None` with admin access, which uses nothing.
fn holding(
    config: &Config,
    claim: &Claim,
    allocated: &AllocatedDevice,
) -> Result<Option<Holding>, Problem> {
    let sharing = sharing(config, claim, allocated)?;
    let AllocatedDevice { pool, device, .. } = allocated.clone();
    Ok((!allocated.admin_access).then_some(Holding {
        pool,
        device,
        sharing,
    }))
}

fn sharing(
    config: &Config,
    claim: &Claim,
    allocated: &AllocatedDevice,
) -> Result<Sharing, Problem> {
    let (pool, _) = config.find(&allocated.pool, &allocated.device)?;
    match claim.parse_parameters::<Parameters>(&allocated.request)? {
        Some(parameters) => parameters.sharing(),
        None => Ok(Sharing::default_of(pool.shared)),
    }
}

fn prepare(
    config: &Config,
    ctx: &Context,
    claim: &Claim,
    used: &[Holding],
) -> Result<Prepared, Problem> {
    let mut memo = Memo::default();
    let prepared = Prepared::each(claim, |allocated| {
        let (pool, gpu) = config.find(&allocated.pool, &allocated.device)?;
        let sharing = sharing(config, claim, allocated)?;
        if let Some(holding) = holding(config, claim, allocated)? {
            refuse_mismatch(&holding, used)?;
            memo.devices.push(holding);
        }
        Ok(edits(ctx, pool, gpu, allocated, &sharing))
    })?;
    prepared.with_memo(&memo)
}

fn log_reset(host: &Host, memo: &Memo) {
    for Holding {
        device, sharing, ..
    } in &memo.devices
    {
        host.log().debug(
            "sharing reset",
            &[
                ("device", device.as_str()),
                ("strategy", sharing.strategy()),
            ],
        );
    }
}

/// Claims that share a device must have equal settings, and an exclusive claim must be the only one.
fn refuse_mismatch(wanted: &Holding, used: &[Holding]) -> Result<(), Problem> {
    let Holding {
        pool,
        device,
        sharing,
    } = wanted;
    let Some(other) = used
        .iter()
        .filter(|holding| holding.pool == *pool && holding.device == *device)
        .find(|other| !sharing.goes_with(&other.sharing))
    else {
        return Ok(());
    };
    let message = format!(
        "device {pool}/{device} is in use with {}, which does not go with {}",
        other.sharing.strategy(),
        sharing.strategy()
    );
    Err(Problem::conflict("sharing-mismatch", message).with_detail("device", device))
}

fn edits(
    ctx: &Context,
    pool: &PoolConfig,
    gpu: Gpu,
    allocated: &AllocatedDevice,
    sharing: &Sharing,
) -> ContainerEdits {
    let prefix = pool.env_prefix(gpu);
    let mut edits = ContainerEdits::new()
        .env(&prefix, pool.uuid(&ctx.node_name, gpu))
        .env(format!("{prefix}_SHARING"), sharing.strategy());
    if let Some(interval) = sharing.interval() {
        edits = edits.env(format!("{prefix}_INTERVAL"), interval);
    }
    match allocated.consumed("memory") {
        Some(amount) => edits.env(format!("{prefix}_MEMORY"), amount),
        None => edits,
    }
}

fn health(pool: &PoolConfig, gpu: Gpu) -> DeviceHealth {
    let name = pool.name_of(gpu);
    match pool
        .unhealthy
        .iter()
        .find(|unhealthy| unhealthy.index == pool.index_of(gpu))
    {
        Some(unhealthy) => DeviceHealth::unhealthy(&pool.name, name, &unhealthy.message),
        None => DeviceHealth::healthy(&pool.name, name),
    }
}
