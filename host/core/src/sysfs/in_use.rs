//! Devices that the node uses: disks, network interfaces, virtual functions, the console. Blocking functions, not for async threads.
//!
//! A device of which it is unknown counts as used, or is an error.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::blocking::LOOK_WALL;
use super::pci::PciAddress;
use super::{Reader, SysfsRoot};
use nodedock_model::{Problem, ProblemCode};

/// Files by which the host knows what the node uses: `/sys`, `/proc` and `/dev`, or those of a test.
pub struct NodeUse<'a> {
    pub sysfs: &'a SysfsRoot,
    pub proc: &'a Path,
    pub dev: &'a Path,
}

impl SysfsRoot {
    /// Names in a directory; none if it does not exist. A directory that cannot be read is an error: what is unknown is no permission.
    fn entries(&self, path: &str) -> Result<Vec<String>, Problem> {
        match self.names(path, Instant::now() + LOOK_WALL, Reader::Host) {
            Ok(names) => Ok(names.into_iter().map(|(name, _)| name).collect()),
            Err(problem) if problem.code == ProblemCode::NoSuchPath => Ok(Vec::new()),
            Err(problem) => Err(problem),
        }
    }

    /// The bond, bridge or other interface that an interface is part of.
    pub fn interface_above(&self, name: &str) -> Result<Option<String>, Problem> {
        let entries = self.entries(&format!("class/net/{name}"))?;
        Ok(entries
            .into_iter()
            .find(|entry| entry == "master" || entry.starts_with("upper_")))
    }
}

impl NodeUse<'_> {
    /// Returns why the node uses a PCI function: a disk, an interface that is up, VFs, the console. `None`: it does not.
    pub fn function(&self, address: &PciAddress) -> Result<Option<String>, Problem> {
        let directory = self.sysfs.pci().directory(address)?;
        let checks = [Self::disk, Self::interface, Self::vfs, Self::console];
        for check in checks {
            if let Some(reason) = check(self, &directory)? {
                return Ok(Some(reason));
            }
        }
        Ok(None)
    }

    /// Entries of a class whose directories are below a device.
    fn class_below(&self, class: &str, directory: &str) -> Result<Vec<String>, Problem> {
        let below = format!("{directory}/");
        let mut names = Vec::new();
        for name in self.sysfs.entries(&format!("class/{class}"))? {
            let path = self.sysfs.find(&format!("class/{class}/{name}"))?;
            if path.is_some_and(|path| path.starts_with(&below)) {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn disk(&self, directory: &str) -> Result<Option<String>, Problem> {
        let mut disks = self.class_below("block", directory)?;
        // With native multipathing the disk of an NVMe controller belongs to its subsystem, which is a virtual device.
        for controller in self.class_below("nvme", directory)? {
            for subsystem in self.sysfs.entries("class/nvme-subsystem")? {
                let subsystem = format!("class/nvme-subsystem/{subsystem}");
                if self.sysfs.exists(&format!("{subsystem}/{controller}"))? {
                    disks.extend(self.class_below("block", &self.sysfs.resolve(&subsystem)?)?);
                }
            }
        }
        self.any_block_device(disks)
    }

    /// Why the node uses a block device, or a partition of it; `directory` is the device's, without links. A device that the daemon may not open
    /// counts as used.
    pub fn block_device(&self, directory: &str) -> Result<Option<String>, Problem> {
        let mut disks = self.class_below("block", directory)?;
        disks.extend(directory.rsplit('/').next().map(str::to_owned));
        self.any_block_device(disks)
    }

    fn any_block_device(&self, disks: Vec<String>) -> Result<Option<String>, Problem> {
        if disks.is_empty() {
            return Ok(None);
        }
        let unknown = |name: &str, error: &std::io::Error| {
            let path = self.proc.join(name);
            let message = format!(
                "whether a disk is mounted is unknown: {}: {error}",
                path.display()
            );
            Problem::unavailable(ProblemCode::IoError, message)
        };
        let read = |name: &str| std::fs::read_to_string(self.proc.join(name));
        let mounts = read("self/mountinfo").map_err(|error| unknown("self/mountinfo", &error))?;
        let swaps = match read("swaps") {
            // A kernel without swap.
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            swaps => swaps.map_err(|error| unknown("swaps", &error))?,
        };
        for name in disks {
            let holders = self.sysfs.entries(&format!("class/block/{name}/holders"))?;
            // In `/dev` the exclamation mark of a name is a slash (`cciss!c0d0`).
            let disk = name.replace('!', "/");
            if let Some(holder) = holders.first() {
                return Ok(Some(format!("disk {disk} is part of {holder}")));
            }
            let number = self
                .sysfs
                .find_text(&format!("class/block/{name}/dev"))?
                .unwrap_or_default();
            if is_mounted(&mounts, &number, &disk) {
                return Ok(Some(format!("disk {disk} is mounted")));
            }
            if swaps
                .lines()
                .any(|line| line.split_whitespace().next() == Some(&format!("/dev/{disk}")))
            {
                return Ok(Some(format!("the node swaps to disk {disk}")));
            }
            // Finds what the others do not: volumes of ZFS, and mounts in other mount namespaces.
            if let Some(reason) =
                why_not_opened(&disk, open_exclusively(&self.dev.join(&disk), &number))?
            {
                return Ok(Some(reason));
            }
        }
        Ok(None)
    }

    fn interface(&self, directory: &str) -> Result<Option<String>, Problem> {
        for name in self.class_below("net", directory)? {
            let interface = format!("class/net/{name}");
            let flags = self
                .sysfs
                .find_text(&format!("{interface}/flags"))?
                .unwrap_or_default();
            let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or(0);
            // IFF_UP. Routes and addresses are in the node's network namespace, which the daemon may not be in.
            if flags & 1 == 1 {
                return Ok(Some(format!("interface {name} is up: set it down first")));
            }
            if self.sysfs.interface_above(&name)?.is_some() {
                return Ok(Some(format!(
                    "interface {name} is part of a bond, bridge or VLAN"
                )));
            }
        }
        Ok(None)
    }

    fn vfs(&self, directory: &str) -> Result<Option<String>, Problem> {
        let vfs = self
            .sysfs
            .find_text(&format!("{directory}/sriov_numvfs"))?
            .unwrap_or_default();
        Ok((!matches!(vfs.as_str(), "" | "0")).then(|| format!("it has {vfs} virtual functions")))
    }

    fn console(&self, directory: &str) -> Result<Option<String>, Problem> {
        if self
            .sysfs
            .find_text(&format!("{directory}/boot_vga"))?
            .as_deref()
            == Some("1")
        {
            return Ok(Some(
                "it is the display of the console (boot_vga)".to_owned(),
            ));
        }
        let consoles = self
            .sysfs
            .find_text("class/tty/console/active")?
            .unwrap_or_default();
        let terminals = self.class_below("tty", directory)?;
        let console = terminals
            .into_iter()
            .find(|name| consoles.split_whitespace().any(|active| active == name));
        Ok(console.map(|name| format!("terminal {name} is the console")))
    }
}

/// Returns whether a line of `mountinfo` (proc(5)) has the number of a device, or names it as its source (btrfs has numbers of its own).
fn is_mounted(mounts: &str, number: &str, disk: &str) -> bool {
    mounts.lines().any(|line| {
        let source = line
            .split(" - ")
            .nth(1)
            .and_then(|rest| rest.split_whitespace().nth(1));
        let is_number = !number.is_empty() && line.split_whitespace().nth(2) == Some(number);
        is_number || source == Some(&format!("/dev/{disk}"))
    })
}

/// Opens a disk exclusively (`O_EXCL`, open(2)), and closes it: `EBUSY` if a file system, a volume or a program has it. A device cgroup,
/// such as that of a pod, forbids it (`EPERM`). A node that is missing or another device's says nothing.
fn open_exclusively(node: &Path, number: &str) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let found = match rustix::fs::stat(node) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    let numbers = format!(
        "{}:{}",
        rustix::fs::major(found.st_rdev),
        rustix::fs::minor(found.st_rdev)
    );
    match numbers == number {
        true => rustix::fs::open(node, flags, Mode::empty()).map(drop),
        false => Ok(()),
    }
}

/// Returns why a disk is used, by the outcome of an exclusive open; `None` if it is not used. A disk that the daemon may not open counts as
/// used.
pub(super) fn why_not_opened(
    disk: &str,
    opened: rustix::io::Result<()>,
) -> Result<Option<String>, Problem> {
    match opened {
        // Without a medium, or being removed, it is in no use.
        Ok(()) | Err(Errno::NOMEDIUM | Errno::NXIO | Errno::NODEV) => Ok(None),
        Err(Errno::BUSY) => Ok(Some(format!(
            "a program or a volume of the node has disk {disk} for itself"
        ))),
        Err(Errno::PERM | Errno::ACCESS) => Ok(Some(format!(
            "the node may use disk {disk}, and the daemon is not permitted to open it to find out"
        ))),
        Err(errno) => {
            let message = format!("whether the node uses disk {disk} is unknown: {errno}");
            Err(Problem::unavailable(ProblemCode::IoError, message))
        }
    }
}
