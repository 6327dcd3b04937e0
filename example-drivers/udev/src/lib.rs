//! Offers USB devices, serial ports and cameras by what they are and where they are plugged in, with names that stay the same
//! when a device is plugged in again.

mod board;
mod config;
mod device;
mod kind;
mod name;
mod read;
#[cfg(test)]
mod tests;
mod text;
mod usb;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nodedock_sdk::address::FIRMWARE_FILES;
use nodedock_sdk::{
    AllocatedDevice, Claim, ClaimRecord, Configuration, ContainerEdits, Context, DeviceHealth,
    DeviceNode, Driver, DriverInfo, Health, Host, Inventory, LeftOut, LeftOutDevice, NodeKind,
    Pool, Prepared, PreparedDevice, Problem, ProblemKind, Trigger,
};
use serde::{Deserialize, Serialize};

use config::{Config, NameBy, Parameters, PoolConfig};
use device::{Candidate, Node};
use kind::{Kind, SERIAL_NODES};
use usb::UsbDevices;

/// Files and links of USB devices that the driver reads.
const USB_FILES: [&str; 12] = [
    "bDeviceClass",
    "busnum",
    "dev",
    "devnum",
    "driver",
    "idProduct",
    "idVendor",
    "manufacturer",
    "product",
    "serial",
    "speed",
    "version",
];

/// Time after which the host retries a prepare of a device that is just being plugged in or out.
const RETRY: Duration = Duration::from_millis(500);

/// Health of devices in one result.
const HEALTH_MAX: usize = 4096;

struct Udev;

nodedock_sdk::export_driver!(Udev: Configuration, Health, LeftOut);

/// Memo of a claim: what its containers got.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Memo {
    devices: Vec<MemoDevice>,
}

/// A device in a compact form: a claim may have 32 devices of 32 nodes each, and a memo has at most 64 KiB.
#[derive(Debug, Deserialize, Serialize)]
struct MemoDevice {
    pool: String,
    device: String,
    fingerprint: String,
    /// Paths and numbers: `/dev/ttyUSB0 188:0`.
    nodes: Vec<String>,
}

impl Driver for Udev {
    fn describe() -> DriverInfo {
        DriverInfo::new("udev.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("USB devices, serial ports and cameras, with names that stay the same when they are plugged in again")
            .sysfs_read(["bus/usb/devices/*", "bus/usb/devices/*/tty*/port_number", "bus/usb/devices/*/tty/*"])
            .sysfs_read(USB_FILES.map(|name| format!("bus/usb/devices/*/{name}")))
            .sysfs_read(["class/tty/*", "class/tty/*/dev", "class/tty/*/type", "class/tty/console/active"])
            .sysfs_read(["class/video4linux/*", "class/video4linux/*/dev", "class/video4linux/*/index"])
            .sysfs_read(["class/hidraw/*", "class/hidraw/*/dev", "class/input/*", "class/input/*/dev"])
            .sysfs_read(["class/sound/*", "class/sound/*/dev", "devices/**/driver"])
            .sysfs_read(FIRMWARE_FILES)
            .device_nodes(SERIAL_NODES.map(|name| format!("/dev/{name}*")))
            .device_nodes(["/dev/bus/usb/*/*", "/dev/hidraw*", "/dev/input/event*", "/dev/input/js*"])
            .device_nodes(["/dev/snd/*", "/dev/video*"])
            .env(["UDEV_*"])
            .events(["hidraw", "input", "sound", "tty", "usb", "video4linux"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let config = Config::read(&ctx.config)?;
        let offers = offers(host, &config, |_| true)?;
        Ok(config
            .pools
            .iter()
            .zip(&offers)
            .map(|(pool, offers)| publish(pool, offers))
            .collect())
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let config = Config::read(&ctx.config)?;
        let used: BTreeSet<Kind> = claim
            .devices
            .iter()
            .filter_map(|device| kind_of(&config, &device.pool))
            .collect();
        let offers = offers(host, &config, |kind| used.contains(&kind))?;
        prepare(host, &config, &offers, claim)
    }
}

impl Configuration for Udev {
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
        Parameters::read(parameters).map(drop)
    }
}

impl Health for Udev {
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let config = Config::read(&ctx.config)?;
        let offers = offers(host, &config, |_| true)?;
        let mut health = BTreeMap::new();
        for (pool, offers) in config.pools.iter().zip(&offers) {
            for name in offers.keys() {
                health.insert(
                    (pool.name.clone(), name.clone()),
                    DeviceHealth::healthy(&pool.name, name),
                );
            }
        }
        for device in host
            .prepared_claims()
            .all()
            .flat_map(|record| prepared_devices(host, &record))
        {
            if let Err(reason) = usable(&config, &offers, &device) {
                let unhealthy = DeviceHealth::unhealthy(&device.pool, &device.device, reason);
                health.insert((device.pool, device.device), unhealthy);
            }
        }
        Ok(health.into_values().take(HEALTH_MAX).collect())
    }
}

impl LeftOut for Udev {
    fn list_devices(host: &Host, ctx: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
        let config = Config::read(&ctx.config)?;
        // Of other kinds every device is offered.
        let chosen = candidates(host, &config, |kind| kind == Kind::Serial)?;
        let devices = chosen.iter().flatten().filter_map(|candidate| {
            let reason = candidate.refusal?;
            Some(LeftOutDevice::new(&candidate.nodes[0].path, reason))
        });
        Ok(devices.collect())
    }
}

/// Returns what the memo of a claim has; nothing for a memo that cannot be read, so that other claims still have a health.
fn prepared_devices(host: &Host, record: &ClaimRecord) -> Vec<MemoDevice> {
    match record.memo::<Memo>() {
        Ok(memo) => memo.unwrap_or_default().devices,
        Err(problem) => {
            host.log().warn(
                "memo cannot be read",
                &[("reason", problem.message.as_str())],
            );
            Vec::new()
        }
    }
}

/// Devices of a pool by name.
type Offers = BTreeMap<String, Candidate>;

/// Returns the devices of every pool of the chosen kinds, in the order of the config.
fn offers(
    host: &Host,
    config: &Config,
    is_chosen: impl Fn(Kind) -> bool,
) -> Result<Vec<Offers>, Problem> {
    let chosen = candidates(host, config, is_chosen)?;
    let pools = config.pools.iter().zip(chosen);
    Ok(pools
        .map(|(pool, mut candidates)| {
            candidates.retain(|candidate| candidate.refusal.is_none());
            name::named(candidates, pool.name_by)
        })
        .collect())
}

/// Returns the devices of the chosen kinds that each pool selects, also those that the driver does not offer.
fn candidates(
    host: &Host,
    config: &Config,
    is_chosen: impl Fn(Kind) -> bool,
) -> Result<Vec<Vec<Candidate>>, Problem> {
    let mut chosen: Vec<Vec<Candidate>> = config.pools.iter().map(|_| Vec::new()).collect();
    let kinds: BTreeSet<Kind> = config
        .pools
        .iter()
        .map(|pool| pool.kind)
        .filter(|kind| is_chosen(*kind))
        .collect();
    if !kinds.is_empty() {
        let usb = UsbDevices::read(host)?;
        for kind in kinds {
            for candidate in Candidate::all(host, &usb, kind)? {
                if let Some(pool) = config.pool_of(&candidate) {
                    chosen[pool].push(candidate);
                }
            }
        }
    }
    Ok(chosen)
}

fn publish(config: &PoolConfig, offers: &Offers) -> Pool {
    let devices = offers
        .iter()
        .map(|(name, candidate)| candidate.publish(name));
    let devices = devices.map(|device| device.allow_multiple_allocations(config.shared));
    Pool::new(&config.name)
        .extended_resource(config.extended_resource.clone())
        .devices(devices)
}

fn kind_of(config: &Config, pool: &str) -> Option<Kind> {
    config
        .pools
        .iter()
        .find(|candidate| candidate.name == pool)
        .map(|pool| pool.kind)
}

fn prepare(
    host: &Host,
    config: &Config,
    offers: &[Offers],
    claim: &Claim,
) -> Result<Prepared, Problem> {
    let (mut prepared, mut memo) = (Prepared::new(), Memo::default());
    let mut paths = BTreeMap::new();
    for allocated in &claim.devices {
        let (pool, candidate) = allocated_device(config, offers, allocated)?;
        check_nodes(host, allocated, &candidate.nodes)?;
        let parameters = Parameters::of(claim, &allocated.request)?;
        let stable = parameters
            .container_path
            .as_ref()
            .or(pool.container_path.as_ref());
        let edits = edits(
            pool,
            allocated,
            &candidate.nodes,
            stable.map(String::as_str),
        );
        take_paths(&mut paths, allocated.base_request(), &edits)?;
        prepared = prepared.device(PreparedDevice::new(allocated, edits));
        memo.devices.push(MemoDevice {
            pool: allocated.pool.clone(),
            device: allocated.device.clone(),
            fingerprint: candidate.fingerprint(),
            nodes: memo_nodes(candidate),
        });
    }
    prepared.with_memo(&memo)
}

/// Refuses two nodes at one path. Devices of different requests may be for different containers.
fn take_paths<'a>(
    paths: &mut BTreeMap<(&'a str, String), String>,
    request: &'a str,
    edits: &ContainerEdits,
) -> Result<(), Problem> {
    for node in &edits.device_nodes {
        let host_path = node.host_path.as_ref().unwrap_or(&node.path);
        let known = paths
            .entry((request, node.path.clone()))
            .or_insert_with(|| host_path.clone());
        if known != host_path {
            let message = format!(
                "request {request:?} has two devices at {}: {known} and {host_path}",
                node.path
            );
            return Err(Problem::invalid("container-path-twice", message));
        }
    }
    Ok(())
}

/// Returns the allocated device, as it is plugged in now.
fn allocated_device<'a>(
    config: &'a Config,
    offers: &'a [Offers],
    allocated: &AllocatedDevice,
) -> Result<(&'a PoolConfig, &'a Candidate), Problem> {
    let AllocatedDevice { pool, device, .. } = allocated;
    let Some(index) = config
        .pools
        .iter()
        .position(|candidate| candidate.name == *pool)
    else {
        return Err(Problem::not_found(
            "no-such-pool",
            format!("the config of udev has no pool {pool}"),
        ));
    };
    Ok((
        &config.pools[index],
        offers[index].get(device).ok_or_else(|| {
        let message = format!(
            "device {pool}/{device} is unplugged, has other IDs by now, or the config no longer offers it in this pool"
        );
        Problem::not_found("no-such-device", message)
    })?,
    ))
}

/// Compares what sysfs showed with the nodes: a device that was replugged in between has other ones.
fn check_nodes(host: &Host, allocated: &AllocatedDevice, nodes: &[Node]) -> Result<(), Problem> {
    for node in nodes {
        let reason = match host.device_nodes().stat(&node.path) {
            Ok(info) if node.is_same(&info) => continue,
            Ok(_) => "belongs to another device",
            Err(problem) if problem.kind == ProblemKind::NotFound => "does not exist",
            Err(problem) => return Err(problem),
        };
        let AllocatedDevice { pool, device, .. } = allocated;
        let message = format!(
            "device {pool}/{device} is being plugged in or out: its node {} {reason}",
            node.path
        );
        return Err(Problem::unavailable("device-changed", message).retry_after(RETRY));
    }
    Ok(())
}

fn edits(
    pool: &PoolConfig,
    allocated: &AllocatedDevice,
    nodes: &[Node],
    stable: Option<&str>,
) -> ContainerEdits {
    let mut edits = nodes.iter().fold(ContainerEdits::new(), |edits, node| {
        edits.device_node(at(&node.path, node))
    });
    let mut path = nodes[0].path.as_str();
    if let Some(stable) = stable {
        path = stable;
        if nodes.iter().all(|node| node.path != stable) {
            edits = edits.device_node(at(stable, &nodes[0]));
        }
    }
    let variable = format!(
        "UDEV_{}_{}",
        env_name(&allocated.pool),
        env_name(&allocated.device)
    );
    let more = pool.env.iter().filter(|name| **name != variable);
    more.fold(edits.env(&variable, path), |edits, name| {
        edits.env(name, path)
    })
}

fn env_name(name: &str) -> String {
    name.replace(['-', '.'], "_").to_ascii_uppercase()
}

/// Creates a node of a container. With the numbers, the host refuses the node if it has become another one.
fn at(path: &str, node: &Node) -> DeviceNode {
    let mut edit = DeviceNode::new(path);
    edit.host_path = (path != node.path).then(|| node.path.clone());
    edit.kind = Some(NodeKind::Character);
    (edit.major, edit.minor) = (Some(node.major), Some(node.minor));
    edit
}

fn memo_nodes(candidate: &Candidate) -> Vec<String> {
    candidate
        .nodes
        .iter()
        .map(|node| format!("{} {}:{}", node.path, node.major, node.minor))
        .collect()
}

/// Checks that the containers of a claim can still use a device; the error is the reason why not.
fn usable(config: &Config, offers: &[Offers], device: &MemoDevice) -> Result<(), String> {
    let Some(index) = config
        .pools
        .iter()
        .position(|pool| pool.name == device.pool)
    else {
        return Err("the config no longer has the pool".to_owned());
    };
    let pool = &offers[index];
    let Some(candidate) = pool
        .get(&device.device)
        .or_else(|| pool.values().find(|candidate| is_same(device, candidate)))
    else {
        return Err("the device is unplugged".to_owned());
    };
    // The name is that of the node, regardless of the device behind it.
    if config.pools[index].name_by == NameBy::Node && !is_same(device, candidate) {
        return Err(format!(
            "another device is {} now: create the pod again",
            candidate.nodes[0].path
        ));
    }
    if memo_nodes(candidate) == device.nodes {
        return Ok(());
    }
    let before = device
        .nodes
        .first()
        .and_then(|node| node.split(' ').next())
        .unwrap_or_default();
    let now = &candidate.nodes[0].path;
    Err(format!(
        "the device was replugged and is {now} now, and the pod has {before}: create the pod again"
    ))
}

/// A twin with the same serial number changes the name, and nothing else.
fn is_same(device: &MemoDevice, candidate: &Candidate) -> bool {
    candidate.fingerprint() == device.fingerprint
}
