//! Offers disks and partitions that the config names, by names that stay the same, unless the node uses them.
//!
//! The sandbox shows use by the node only as far as `/sys` does. The host looks again, at mounts, swap and by an exclusive open, before a container gets a node.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use nodedock_sdk::{
    Claim, ContainerEdits, Context, Device, DeviceNode, Driver, DriverInfo, Host, Inventory,
    LeftOut, LeftOutDevice, PoolConfig, PoolDriver, Pools, Prepared, Problem, Trigger, dns_label,
    last_segment,
};

/// Files that identify a disk (NVMe; SCSI and SATA; SD and eMMC; virtio): the first that it has names it.
const IDS: [&str; 4] = ["wwid", "device/wwid", "device/cid", "serial"];

/// Further files that the driver reads, of a disk and of a partition.
const FILES: [&str; 5] = ["dev", "hidden", "partition", "size", "uevent"];
const TEXTS: [(&str, &str); 2] = [("model", "device/model"), ("serial", "device/serial")];

/// Where file systems list the devices that are mounted anywhere: ext4, xfs and f2fs by name, btrfs below each file system.
const MOUNTED: [&str; 2] = ["fs/*/*", "fs/btrfs/*/devices/*"];

struct Block;

nodedock_sdk::export_driver!(Block: Configuration, LeftOut);

#[derive(Debug)]
struct Volume {
    device: Device,
    /// The kernel's name, and that of the disk of a partition.
    kernel: String,
    disk: Option<String>,
    numbers: (u32, u32),
    /// Why it is not free, and whether another one has its name.
    refusal: Option<String>,
    has_twin: bool,
}

impl Driver for Block {
    fn describe() -> DriverInfo {
        DriverInfo::new("block.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Disks and partitions that the config names and the node does not use")
            .sysfs_read(["class/block/*", "class/block/*/holders/*"])
            .sysfs_read(IDS.map(|file| format!("class/block/*/{file}")))
            .sysfs_read(FILES.map(|file| format!("class/block/*/{file}")))
            .sysfs_read(TEXTS.map(|(_, file)| format!("class/block/*/{file}")))
            .sysfs_read(MOUNTED)
            .device_nodes(["/dev/{mmcblk,nvme,sd,vd,xvd}*"])
            .env(["BLOCK_*"])
            .events(["block"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let pools = Self::pools(&ctx.config)?;
        let (offered, _) = divided(host, &pools)?;
        Ok(pools.inventory(offered.into_iter().map(|volume| volume.device)))
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let (pools, volumes) = (Self::pools(&ctx.config)?, volumes(host)?);
        let record = host.prepared_claims().get(&claim.id.uid);
        let is_repeated = record.is_some_and(|record| record.prepared);
        Prepared::each(claim, |allocated| {
            let mut all = volumes.iter();
            let volume = all.find(|volume| pools.has(allocated, &volume.device));
            let volume = volume.ok_or_else(|| pools.no_such_device(allocated))?;
            let path = node_path(&volume.kernel);
            if let Some(reason) = volume.refusal.as_ref().filter(|_| !is_repeated) {
                let message = format!("{path}: {reason}");
                return Err(Problem::conflict("device-in-use", message));
            }
            let edits = ContainerEdits::new().env(allocated.variable("BLOCK"), &path);
            Ok(edits.device_node(DeviceNode::new(path).numbers(volume.numbers)))
        })
    }
}

impl LeftOut for Block {
    fn list_devices(host: &Host, ctx: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
        let (_, left_out) = divided(host, &Self::pools(&ctx.config)?)?;
        Ok(left_out)
    }
}

impl PoolDriver for Block {
    const ATTRIBUTES: &'static [&'static str] = &["name", "partuuid", "serial", "wwid"];

    /// A pattern might match a disk that the operator does not mean.
    fn check_pool(pool: &PoolConfig) -> Result<(), String> {
        let mut texts = pool.select.iter().flat_map(BTreeMap::values);
        let is_exact = texts.all(|text| !text.contains(['*', '?']));
        if is_exact && !pool.select.is_empty() && !pool.select.iter().any(BTreeMap::is_empty) {
            return Ok(());
        }
        Err("select has to name each disk or partition, without wildcards".to_owned())
    }
}

fn node_path(kernel: &str) -> String {
    format!("/dev/{}", kernel.replace('!', "/"))
}

/// Returns what the driver offers, and what a pool selects and is not offered because it is not free.
fn divided(host: &Host, pools: &Pools) -> Result<(Vec<Volume>, Vec<LeftOutDevice>), Problem> {
    let (mut offered, mut left_out) = (Vec::new(), Vec::new());
    for volume in volumes(host)? {
        let pool = pools.pool_of(&volume.device);
        let (Some(pool), Some(reason)) = (pool, volume.refusal.clone()) else {
            offered.push(volume);
            continue;
        };
        // What a container does with its device is no use by the node.
        let is_claimed = !volume.has_twin
            && host
                .prepared_claims()
                .using(&pool.name, &volume.device.name)
                .any(|record| record.prepared);
        if is_claimed {
            offered.push(volume);
        } else {
            left_out.push(LeftOutDevice::new(node_path(&volume.kernel), reason));
        }
    }
    Ok((offered, left_out))
}

/// Returns the disks and partitions of the node that have an identifier and a medium.
fn volumes(host: &Host) -> Result<Vec<Volume>, Problem> {
    let (sysfs, mut in_use, mut volumes) = (host.sysfs(), BTreeMap::new(), Vec::new());
    for path in sysfs.glob("class/block/*/holders/*")? {
        let reason = format!("it is part of {}", last_segment(&path));
        in_use.extend(path.split('/').nth(2).map(|name| (name.to_owned(), reason)));
    }
    for glob in MOUNTED {
        let names = sysfs
            .glob(glob)?
            .into_iter()
            .map(|path| last_segment(&path));
        in_use.extend(names.map(|name| (name, "it is mounted".to_owned())));
    }
    for path in sysfs.glob("class/block/*")? {
        match read(host, &path) {
            // The device disappears while it is read.
            Err(problem) if problem.is_absent() => {}
            volume => volumes.extend(volume?),
        }
    }
    let names: Vec<_> = volumes.iter().map(|one| one.device.name.clone()).collect();
    let disks: Vec<_> = volumes.iter().filter_map(|one| one.disk.clone()).collect();
    for volume in &mut volumes {
        let twins = names.iter().filter(|name| **name == volume.device.name);
        volume.has_twin = twins.count() > 1;
        let mut names = volume.disk.iter().chain([&volume.kernel]);
        volume.refusal = if volume.has_twin {
            Some("another disk, or another path to it, has this name".to_owned())
        } else if disks.contains(&volume.kernel) {
            Some("it has partitions".to_owned())
        } else {
            names.find_map(|name| in_use.get(name)).cloned()
        };
    }
    Ok(volumes)
}

/// Reads a disk or partition. Returns `None` for what is virtual or hidden, and for what has no identifier or no medium.
fn read(host: &Host, path: &str) -> Result<Option<Volume>, Problem> {
    let (sysfs, kernel) = (host.sysfs(), last_segment(path));
    let directory = sysfs.read_link(path)?;
    let partition: Option<u32> = sysfs.find_parsed(&format!("{path}/partition"))?;
    let disk = directory.rsplit('/').nth(1).filter(|_| partition.is_some());
    let disk = disk.map(str::to_owned);
    let of_disk = format!("class/block/{}", disk.as_ref().unwrap_or(&kernel));
    let text = |file: &str| sysfs.find_printable(&format!("{of_disk}/{file}"));
    let mut id = None;
    for file in IDS {
        id = id.or(text(file)?);
    }
    let is_hidden = text("hidden")?.is_some_and(|hidden| hidden == "1");
    let is_virtual = directory.starts_with("devices/virtual/block/");
    let sectors: Option<u64> = sysfs.find_parsed(&format!("{path}/size"))?;
    let (Some(id), Some(sectors @ 1..), Some(numbers), false) = (
        id,
        sectors,
        sysfs.find_numbers(path)?,
        is_hidden || is_virtual,
    ) else {
        return Ok(None);
    };
    let suffix = partition.map_or_else(String::new, |number| format!("-part{number}"));
    let name = dns_label(&format!("{id}{suffix}"));
    // What selects a disk does not select its partitions.
    let key = disk.as_ref().map_or("wwid", |_| "disk");
    let mut texts = BTreeMap::from([("name", name.clone()), (key, id)]);
    for (attribute, file) in TEXTS.iter().filter(|_| disk.is_none()) {
        texts.extend(text(file)?.map(|text| (*attribute, text)));
    }
    let uevent = sysfs.find(&format!("{path}/uevent"))?.unwrap_or_default();
    let mut lines = uevent.lines();
    let uuid = lines.find_map(|line| line.strip_prefix("PARTUUID="));
    texts.extend(uuid.map(|uuid| ("partuuid", uuid.to_owned())));
    // The kernel counts in units of 512 bytes, whatever sectors the device has.
    let device = Device::new(name)
        .texts(texts)
        .capacity("size", sectors.saturating_mul(512).to_string())
        .identity(format!("dev:{}", node_path(&kernel)));
    Ok(Some(Volume {
        device,
        kernel,
        disk,
        numbers,
        refusal: None,
        has_twin: false,
    }))
}
