//! Disks and partitions as `/sys` shows them: their names, what uses them, and whether they work.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_sdk::{Device, Host, Problem, dns_label, last_segment, present};

/// Files that identify a disk (NVMe; SCSI and SATA; SD and eMMC; virtio): the first that it has names it.
const IDS: [&str; 4] = ["wwid", "device/wwid", "device/cid", "serial"];

/// Further files that the driver reads, of a disk and of a partition.
const FILES: [&str; 5] = ["dev", "hidden", "partition", "size", "uevent"];
const DEVICE_FILES: [&str; 3] = ["device/model", "device/serial", "device/state"];

/// Where file systems list the devices that are mounted anywhere: ext4, xfs and f2fs by name, btrfs below each file system.
const MOUNTED: [&str; 2] = ["fs/*/*", "fs/btrfs/*/devices/*"];

/// States of a disk that does not answer (SCSI; NVMe). From others, such as `resetting`, the kernel brings it back.
const OFFLINE: [&str; 3] = ["offline", "transport-offline", "dead"];

pub(crate) const TWIN: &str = "another disk, or another path to it, has this name";
const NO_MEDIUM: &str = "it has no medium";

/// A disk or partition.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) device: Device,
    /// Path and numbers of its node.
    pub(crate) path: String,
    pub(crate) numbers: (u32, u32),
    /// Why it is not free.
    pub(crate) refusal: Option<String>,
    /// The kernel's name, and that of the disk of a partition.
    kernel: String,
    disk: Option<String>,
}

/// Returns what the driver reads below `/sys`.
pub(crate) fn files() -> Vec<String> {
    let of_devices = IDS.iter().chain(&FILES).chain(&DEVICE_FILES);
    let of_devices = of_devices.map(|file| format!("class/block/*/{file}"));
    let others = ["class/block/*", "class/block/*/holders/*"];
    let others = others.iter().chain(&MOUNTED).map(ToString::to_string);
    others.chain(of_devices).collect()
}

impl Volume {
    /// Returns why a container cannot use it now.
    pub(crate) fn fault(&self, host: &Host) -> Result<Option<String>, Problem> {
        let (sysfs, disk) = (host.sysfs(), self.disk.as_ref().unwrap_or(&self.kernel));
        let state = sysfs.find_printable(&format!("class/block/{disk}/device/state"))?;
        let state = state.filter(|state| OFFLINE.contains(&state.as_str()));
        let fault = state.map(|state| format!("its state is {state}"));
        let medium = self.refusal.clone().filter(|reason| reason == NO_MEDIUM);
        let node = host.device_nodes().fault(&self.path, self.numbers)?;
        Ok(fault.or(medium).or(node))
    }
}

/// Returns the disks and partitions of the node that have an identifier.
pub(crate) fn all(host: &Host) -> Result<Vec<Volume>, Problem> {
    let (sysfs, mut in_use, mut volumes) = (host.sysfs(), BTreeMap::new(), Vec::new());
    for path in sysfs.glob("class/block/*/holders/*")? {
        let reason = format!("it is part of {}", last_segment(&path));
        in_use.extend(path.split('/').nth(2).map(|name| (name.to_owned(), reason)));
    }
    for glob in MOUNTED {
        let paths = sysfs.glob(glob)?.into_iter();
        in_use.extend(paths.map(|path| (last_segment(&path), "it is mounted".to_owned())));
    }
    for path in sysfs.glob("class/block/*")? {
        volumes.extend(present(read(host, &path))?.flatten());
    }
    // An empty slot of a reader, or a path that is not in use now, does not take the name of a disk.
    let with_medium: BTreeSet<_> = volumes
        .iter()
        .filter(|one| one.refusal.is_none())
        .map(|one| one.device.name.clone())
        .collect();
    volumes.retain(|one| one.refusal.is_none() || !with_medium.contains(&one.device.name));
    let names: Vec<_> = volumes.iter().map(|one| one.device.name.clone()).collect();
    let disks: Vec<_> = volumes.iter().filter_map(|one| one.disk.clone()).collect();
    for volume in &mut volumes {
        let twins = names.iter().filter(|name| **name == volume.device.name);
        let twin = (twins.count() > 1).then_some(TWIN);
        let parts = disks
            .contains(&volume.kernel)
            .then_some("it has partitions");
        let mut names = volume.disk.iter().chain([&volume.kernel]);
        let used = names.find_map(|name| in_use.get(name).map(String::as_str));
        let refusal = twin.or(parts).or(used).map(str::to_owned);
        volume.refusal = refusal.or(volume.refusal.take());
    }
    Ok(volumes)
}

/// Reads a disk or partition. Returns `None` for what is virtual or hidden, and for what has no identifier.
fn read(host: &Host, path: &str) -> Result<Option<Volume>, Problem> {
    let (sysfs, kernel) = (host.sysfs(), last_segment(path));
    let directory = sysfs.read_link(path)?;
    let partition: Option<u32> = sysfs.find_parsed(&format!("{path}/partition"))?;
    let disk = partition.and_then(|_| directory.rsplit('/').nth(1).map(str::to_owned));
    let of_disk = format!("class/block/{}", disk.as_ref().unwrap_or(&kernel));
    let text = |file: &str| sysfs.find_printable(&format!("{of_disk}/{file}"));
    let mut id = None;
    for file in IDS {
        id = id.or(text(file)?);
    }
    let is_hidden = text("hidden")?.is_some_and(|hidden| hidden == "1");
    let is_real = !is_hidden && !directory.starts_with("devices/virtual/block/");
    let sectors: Option<u64> = sysfs.find_parsed(&format!("{path}/size"))?;
    let numbers = sysfs.find_numbers(path)?;
    let (Some(id), Some(sectors), Some(numbers), true) = (id, sectors, numbers, is_real) else {
        return Ok(None);
    };
    let suffix = partition.map_or_else(String::new, |number| format!("-part{number}"));
    let name = dns_label(&format!("{id}{suffix}"));
    // What selects a disk does not select its partitions.
    let key = disk.as_ref().map_or("wwid", |_| "disk");
    let mut texts = BTreeMap::from([("name", name.clone()), (key, id)]);
    for file in ["model", "serial"].into_iter().filter(|_| disk.is_none()) {
        texts.extend(text(&format!("device/{file}"))?.map(|text| (file, text)));
    }
    let uevent = sysfs.find(&format!("{path}/uevent"))?.unwrap_or_default();
    let mut lines = uevent.lines();
    let uuid = lines.find_map(|line| line.strip_prefix("PARTUUID="));
    texts.extend(uuid.map(|uuid| ("partuuid", uuid.to_owned())));
    // The kernel has no slash in a name below `/sys`.
    let path = format!("/dev/{}", kernel.replace('!', "/"));
    // The kernel counts in units of 512 bytes, whatever sectors the device has.
    let device = Device::new(name)
        .texts(texts)
        .capacity("size", sectors.saturating_mul(512).to_string())
        .identity(format!("dev:{path}"));
    Ok(Some(Volume {
        device,
        kernel,
        disk,
        path,
        numbers,
        refusal: (sectors == 0).then(|| NO_MEDIUM.to_owned()),
    }))
}
