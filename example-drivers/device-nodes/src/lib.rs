//! Offers nodes below `/dev` as devices, selected by globs in the operator's config.

mod config;
mod nodes;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use nodedock_sdk::{
    AllocatedDevice, Claim, Configuration, ContainerEdits, Context, Device, DeviceNode, Driver,
    DriverInfo, Host, Inventory, NodeInfo, NodeKind, Pool, Prepared, Problem, Trigger, dns_label,
    dns_label_hashed,
};

use config::{Config, PoolConfig};
use nodes::{DEVICE_NODES, not_requested};

const EVENT_SUBSYSTEMS: [&str; 18] = [
    "accel",
    "block",
    "drm",
    "gpio",
    "hidraw",
    "i2c-dev",
    "infiniband",
    "input",
    "media",
    "misc",
    "ptp",
    "rtc",
    "sound",
    "spidev",
    "tty",
    "usb",
    "vfio",
    "video4linux",
];

/// The bound of text attributes.
const ATTRIBUTE_BYTES_MAX: usize = 64;

/// The unit of `size` files of block devices, independent of the device's own sector size.
const SECTOR_BYTES: u64 = 512;

struct DeviceNodesDriver;

nodedock_sdk::export_driver!(DeviceNodesDriver: Configuration);

impl Driver for DeviceNodesDriver {
    fn describe() -> DriverInfo {
        DriverInfo::new("device-nodes.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Nodes below /dev, chosen by globs")
            .device_nodes(DEVICE_NODES)
            .sysfs_read([
                "dev/char/*/subsystem",
                "dev/block/*/subsystem",
                "dev/block/*/size",
            ])
            .env(["NODEDOCK_DEVICE_*", "DEVICE_*"])
            .events(EVENT_SUBSYSTEMS)
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        Config::read(&ctx.config)?
            .pools
            .iter()
            .map(|pool| publish(host, pool))
            .collect::<Result<_, _>>()
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let config = Config::read(&ctx.config)?;
        Prepared::each(claim, |device| hand_out(host, &config, device))
    }
}

impl Configuration for DeviceNodesDriver {
    fn config_schema() -> Option<String> {
        Some(include_str!("config.schema.json").to_owned())
    }

    fn validate_config(config: &str) -> Result<(), Problem> {
        Config::read(config).map(drop)
    }

    fn validate_parameters(_: &str) -> Result<(), Problem> {
        Err(Problem::invalid(
            "no-parameters",
            "the device-nodes driver takes no parameters in claims or classes",
        ))
    }
}

fn publish(host: &Host, config: &PoolConfig) -> Result<Pool, Problem> {
    let mut pool = Pool::new(&config.name).extended_resource(config.extended_resource.clone());
    for (name, node) in named_nodes(host, config)? {
        pool = pool.device(describe_node(host, config, name, &node)?);
    }
    Ok(pool)
}

/// Returns the pool's nodes by path. If two paths map to the same name, the first keeps it and the other gets a hash as a suffix.
fn named_nodes(host: &Host, config: &PoolConfig) -> Result<Vec<(String, NodeInfo)>, Problem> {
    let mut nodes = Vec::new();
    for glob in &config.paths {
        let found = host.device_nodes().glob(glob).map_err(|problem| {
            if problem.code == "not-granted" {
                Problem::denied(problem.code, not_requested(glob))
            } else {
                problem
            }
        });
        nodes.extend(found?);
    }
    nodes.sort_by(|one, other| one.path.cmp(&other.path));
    nodes.dedup_by(|one, other| one.path == other.path);
    let mut taken = BTreeSet::new();
    Ok(nodes
        .into_iter()
        .map(|node| (free_name(&mut taken, &node.path), node))
        .collect())
}

fn free_name(taken: &mut BTreeSet<String>, path: &str) -> String {
    let short = path.strip_prefix("/dev/").unwrap_or(path);
    let label = dns_label(short);
    if taken.insert(label.clone()) {
        label
    } else {
        dns_label_hashed(short)
    }
}

fn describe_node(
    host: &Host,
    config: &PoolConfig,
    name: String,
    node: &NodeInfo,
) -> Result<Device, Problem> {
    let device = Device::new(name)
        .attribute_opt(
            "path",
            (node.path.len() <= ATTRIBUTE_BYTES_MAX).then(|| node.path.clone()),
        )
        .attribute("kind", node.kind.as_str())
        .attribute("major", node.major)
        .attribute("minor", node.minor)
        .attribute_opt("subsystem", subsystem(host, node)?)
        .allow_multiple_allocations(config.shared)
        .identity(format!("dev:{}", node.path));
    Ok(match size_bytes(host, node)? {
        Some(bytes) => device.capacity("size", bytes.to_string()),
        None => device,
    })
}

fn sysfs_directory(node: &NodeInfo) -> String {
    let kind = if node.kind == NodeKind::Block {
        "block"
    } else {
        "char"
    };
    format!("dev/{kind}/{}:{}", node.major, node.minor)
}

fn subsystem(host: &Host, node: &NodeInfo) -> Result<Option<String>, Problem> {
    let link = host
        .sysfs()
        .find_link(&format!("{}/subsystem", sysfs_directory(node)))?;
    Ok(link.and_then(|target| target.rsplit('/').next().map(str::to_owned)))
}

fn size_bytes(host: &Host, node: &NodeInfo) -> Result<Option<u64>, Problem> {
    if node.kind != NodeKind::Block {
        return Ok(None);
    }
    let sectors = host
        .sysfs()
        .find_parsed::<u64>(&format!("{}/size", sysfs_directory(node)))?;
    Ok(sectors.and_then(|sectors| sectors.checked_mul(SECTOR_BYTES)))
}

fn hand_out(
    host: &Host,
    config: &Config,
    allocated: &AllocatedDevice,
) -> Result<ContainerEdits, Problem> {
    let AllocatedDevice {
        pool: pool_name,
        device,
        ..
    } = allocated;
    let pool = config
        .pools
        .iter()
        .find(|pool| pool.name == *pool_name)
        .ok_or_else(|| {
            Problem::not_found(
                "no-such-pool",
                format!("the config of device-nodes has no pool {pool_name}"),
            )
        })?;
    let (name, node) = named_nodes(host, pool)?
        .into_iter()
        .find(|(name, _)| name == device)
        .ok_or_else(|| {
            Problem::not_found(
                "no-such-device",
                format!("the node of device {pool_name}/{device} is not there"),
            )
        })?;
    let mut edits = ContainerEdits::new()
        .env(format!("NODEDOCK_DEVICE_{}", env_name(&name)), &node.path)
        .device_node(DeviceNode::new(&node.path).access(pool.access()?));
    for (name, value) in &pool.env {
        edits = edits.env(name, value);
    }
    Ok(edits)
}

fn env_name(device: &str) -> String {
    device.replace('-', "_").to_ascii_uppercase()
}
