//! Kernel drivers of PCI functions: which one a function is bound to, whether the node uses the function, and binding it to another one.
//! Blocking functions, not for async threads.
//!
//! A binding is treated like a value below `/sys`: its path is `driver` in the function's directory, so that it is locked, recorded,
//! audited and restored as values are (`docs/decisions/0005-restored-values.md`). The steps of a bind are those of the kernel's
//! documentation (Documentation/ABI/testing/sysfs-bus-pci): `driver_override`, `unbind`, `drivers_probe`.

use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::str::FromStr;
use std::time::Instant;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{Reader, SysfsRoot, stat};
use crate::sysfs::attribute::{Attribute, Written, replaced};
use crate::sysfs::blocking::LOOK_WALL;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{KeptValue, Problem, ProblemCode};

const DEVICES: &str = "bus/pci/devices";
const DRIVERS: &str = "bus/pci/drivers";
/// Bytes of a kernel driver's name (`driver_override` takes a page; names of modules have fewer than 64).
const NAME_BYTES_MAX: usize = 63;
/// PCI-to-PCI bridges: the kernel keeps them usable in a group that a guest owns (`vfio_pci`, `pci_dev_driver_allowed`).
const BRIDGE_CLASS: &str = "0x0604";

/// A PCI address with its domain: `0000:3b:00.0`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress(String);

impl PciAddress {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The address in the path of a binding: `devices/pci0000:00/0000:00:04.0/driver`.
    fn of_binding(path: &str) -> Option<Self> {
        let directory = path.strip_suffix("/driver")?;
        directory.rsplit('/').next()?.parse().ok()
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PciAddress {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let is_hex = |part: &str| {
            part.bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let parts = || {
            let (rest, function) = text.split_once('.')?;
            let (domain, rest) = rest.split_once(':')?;
            let (bus, device) = rest.split_once(':')?;
            Some([domain, bus, device, function])
        };
        // Domains of more than 16 bits have more digits (Intel VMD, Hyper-V).
        let is_one = parts().is_some_and(|parts @ [domain, bus, device, function]| {
            (4..=8).contains(&domain.len())
                && [bus.len(), device.len(), function.len()] == [2, 2, 1]
                && parts.iter().all(|part| is_hex(part))
        });
        is_one.then(|| Self(text.to_owned())).ok_or_else(|| {
            let shown: String = text.chars().take(64).collect();
            let message = format!("{shown:?} is not a PCI address such as 0000:3b:00.0");
            Problem::invalid(ProblemCode::BadValue, message)
        })
    }
}

/// The kernel driver that a function has, and the one that `driver_override` forces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Binding {
    pub driver: Option<String>,
    pub forced: Option<String>,
}

impl Binding {
    /// Bound to a kernel driver, which is forced.
    pub fn forced_to(driver: &str) -> Self {
        Self {
            driver: Some(driver.to_owned()),
            forced: Some(driver.to_owned()),
        }
    }
}

/// `nvme`, `vfio-pci override=vfio-pci`, or nothing.
impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.driver.as_deref().unwrap_or("-"))?;
        self.forced
            .as_ref()
            .map_or(Ok(()), |forced| write!(f, " override={forced}"))
    }
}

impl From<&str> for Binding {
    fn from(text: &str) -> Self {
        let (driver, forced) = text
            .split_once(" override=")
            .map_or((text, None), |(d, f)| (d, Some(f)));
        let driver = Some(driver)
            .filter(|driver| *driver != "-")
            .map(str::to_owned);
        Self {
            driver,
            forced: forced.map(str::to_owned),
        }
    }
}

/// Files by which the host knows what the node uses: `/proc` and `/dev`, or those of a test.
#[derive(Debug, Clone, Copy)]
pub struct NodeUse<'a> {
    pub proc: &'a Path,
    pub dev: &'a Path,
}

/// Checks the name of a kernel driver.
pub fn check_driver_name(name: &str) -> Result<(), Problem> {
    let plain = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    if plain && (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    let shown: String = name.chars().take(64).collect();
    Err(Problem::invalid(
        ProblemCode::BadValue,
        format!("{shown:?} is not the name of a kernel driver"),
    ))
}

/// Whether a recorded path is that of a binding.
pub(super) fn is_binding(path: &str) -> bool {
    PciAddress::of_binding(path).is_some()
}

/// Whether a binding is the one that a driver left, or one between two steps: then the function has no kernel driver, or the override of
/// the driver's.
pub(super) fn may_have_left(kept: &KeptValue, now: &str) -> bool {
    let now = Binding::from(now);
    let left = [&kept.after, &kept.pending]
        .into_iter()
        .flatten()
        .chain(&kept.also_left);
    let is_left = |left: Binding| {
        left.driver == now.driver || (left.forced.is_some() && left.forced == now.forced)
    };
    now.driver.is_none()
        || left
            .into_iter()
            .any(|left| is_left(Binding::from(left.as_str())))
}

impl SysfsRoot {
    /// Returns the functions that a bind of this one concerns, sorted: for a `vfio` driver its IOMMU group without bridges.
    pub fn bound_together(
        &self,
        address: &PciAddress,
        driver: &str,
    ) -> Result<Vec<PciAddress>, Problem> {
        self.function_directory(address)?;
        if !driver.starts_with("vfio") && !driver.ends_with("_vfio_pci") {
            return Ok(vec![address.clone()]);
        }
        let group = self.iommu_group(address)?;
        group.ok_or_else(|| {
            let message =
                format!("{address} is in no IOMMU group, and {driver} needs one: enable the IOMMU");
            Problem::unavailable(ProblemCode::NoIommu, message)
        })
    }

    /// Returns the functions of the IOMMU group without bridges, sorted, or the function alone.
    pub fn group_of(&self, address: &PciAddress) -> Result<Vec<PciAddress>, Problem> {
        self.function_directory(address)?;
        Ok(self
            .iommu_group(address)?
            .unwrap_or_else(|| vec![address.clone()]))
    }

    /// Returns the binding of a function, as a value whose path is `driver` in its directory.
    pub fn binding(&self, address: &PciAddress) -> Result<Attribute, Problem> {
        let directory = self.function_directory(address)?;
        let open = self.open_beneath(
            &directory,
            OFlags::PATH | OFlags::CLOEXEC,
            ResolveFlags::NO_SYMLINKS,
        )?;
        let inode = stat(&directory, &open)?.st_ino;
        let value = self.binding_in(&directory)?.to_string();
        Ok(Attribute {
            path: format!("{directory}/driver"),
            inode,
            value: Some(value),
        })
    }

    /// The binding of a recorded path.
    pub(super) fn binding_at(&self, path: &str) -> Result<Attribute, Problem> {
        let address = PciAddress::of_binding(path).ok_or_else(|| replaced(path))?;
        self.binding(&address)
    }

    /// Returns whether the kernel has a driver for PCI functions.
    pub fn has_pci_driver(&self, driver: &str) -> Result<bool, Problem> {
        self.exists(&format!("{DRIVERS}/{driver}"))
    }

    /// Returns why the node uses a function: a disk, an interface that is up, VFs, the console. `None`: it does not.
    pub fn in_use(
        &self,
        address: &PciAddress,
        node: NodeUse<'_>,
    ) -> Result<Option<String>, Problem> {
        let directory = self.function_directory(address)?;
        let checks = [
            Self::disk_in_use,
            Self::interface_in_use,
            Self::vfs_in_use,
            Self::console_in_use,
        ];
        for check in checks {
            if let Some(reason) = check(self, &directory, node)? {
                return Ok(Some(reason));
            }
        }
        Ok(None)
    }

    /// Binds a function to what `value` says, and back to what it was if the kernel does otherwise. The function is still the one that
    /// was found.
    pub(super) fn bind(&self, found: &Attribute, value: &str) -> Result<Written, Problem> {
        let now = self.binding_at(&found.path)?;
        if (&now.path, now.inode) != (&found.path, found.inode) {
            return Err(replaced(&found.path));
        }
        let directory = found.path.trim_end_matches("/driver");
        let (before, target) = (self.binding_in(directory)?, Binding::from(value));
        let outcome = self.rebind(directory, &target).or_else(|problem| {
            self.rebind(directory, &before)?;
            Err(problem)
        });
        Ok(Written {
            outcome,
            value: self.binding_in(directory).map(|now| Some(now.to_string())),
        })
    }

    fn rebind(&self, directory: &str, target: &Binding) -> Result<(), Problem> {
        let address = directory.rsplit('/').next().unwrap_or_default();
        let bound = self.binding_in(directory)?;
        if bound.forced != target.forced {
            // An empty line clears it.
            let forced = target.forced.as_deref().unwrap_or("\n");
            self.write_once(&format!("{directory}/driver_override"), forced)?;
        }
        failpoint::pass(Point::BindOverridden);
        if bound.driver != target.driver {
            if bound.driver.is_some() {
                self.write_once(&format!("{directory}/driver/unbind"), address)?;
            }
            failpoint::pass(Point::BindUnbound);
            if let Some(driver) = &target.driver {
                self.write_once("bus/pci/drivers_probe", address)?;
                // Without an override the kernel takes the first driver that matches, which may be another one than before.
                let now = self.binding_in(directory)?.driver;
                if now.as_ref() != Some(driver) && target.forced.is_none() {
                    if now.is_some() {
                        self.write_once(&format!("{directory}/driver/unbind"), address)?;
                    }
                    self.write_once(&format!("{DRIVERS}/{driver}/bind"), address)?;
                }
            }
            failpoint::pass(Point::BindProbed);
        }
        let now = self.binding_in(directory)?;
        if now.driver == target.driver {
            return Ok(());
        }
        let name =
            |driver: &Option<String>| driver.clone().unwrap_or_else(|| "no driver".to_owned());
        let message = format!(
            "the kernel bound {address} to {}, and not to {}",
            name(&now.driver),
            name(&target.driver)
        );
        Err(Problem::unavailable(ProblemCode::BindFailed, message))
    }

    /// The directory of a function without links.
    fn function_directory(&self, address: &PciAddress) -> Result<String, Problem> {
        let directory = self.resolve(&format!("{DEVICES}/{address}"))?;
        if directory.starts_with("devices/") && directory.ends_with(&format!("/{address}")) {
            return Ok(directory);
        }
        let message = format!("/sys/{DEVICES}/{address} does not lead to a function");
        Err(Problem::denied(ProblemCode::OutsideSysfs, message))
    }

    fn iommu_group(&self, address: &PciAddress) -> Result<Option<Vec<PciAddress>>, Problem> {
        let devices = format!("{DEVICES}/{address}/iommu_group/devices");
        if !self.exists(&devices)? {
            return Ok(None);
        }
        let mut group = Vec::new();
        for name in self.read_dir(&devices)? {
            // A group may have devices of other buses, which no kernel driver for PCI functions takes.
            let Ok(member) = name.parse::<PciAddress>() else {
                continue;
            };
            let class = self.find_text(&format!("{DEVICES}/{member}/class"))?;
            if !class.is_some_and(|class| class.starts_with(BRIDGE_CLASS)) {
                group.push(member);
            }
        }
        Ok(Some(group))
    }

    fn binding_in(&self, directory: &str) -> Result<Binding, Problem> {
        let link = format!("{directory}/driver");
        let driver = match self.exists(&link)? {
            true => self.read_link(&link)?.rsplit('/').next().map(str::to_owned),
            false => None,
        };
        let forced = self.find_text(&format!("{directory}/driver_override"))?;
        Ok(Binding {
            driver,
            forced: forced.filter(|forced| !matches!(forced.as_str(), "" | "(null)")),
        })
    }

    /// One system call to a file of the host's own choice, which drivers may not write.
    fn write_once(&self, path: &str, value: &str) -> Result<(), Problem> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = self.open_beneath(path, flags, ResolveFlags::empty())?;
        std::fs::File::from(file)
            .write_all(value.as_bytes())
            .and_then(|()| self.written(path, value))
            .map_err(|error| {
                let message = format!(
                    "the kernel refused {:?} in /sys/{path}: {error}",
                    value.trim_end()
                );
                Problem::unavailable(ProblemCode::BindFailed, message)
            })
    }

    /// Names in a directory; none if it does not exist. A directory that cannot be read is an error: what is unknown is no permission.
    fn entries(&self, path: &str) -> Result<Vec<String>, Problem> {
        match self.names(path, Instant::now() + LOOK_WALL, Reader::Host) {
            Ok(names) => Ok(names.into_iter().map(|(name, _)| name).collect()),
            Err(problem) if problem.code == ProblemCode::NoSuchPath => Ok(Vec::new()),
            Err(problem) => Err(problem),
        }
    }

    /// Entries of a class whose directories are below a device.
    fn class_below(&self, class: &str, directory: &str) -> Result<Vec<String>, Problem> {
        let below = format!("{directory}/");
        let mut names = Vec::new();
        for name in self.entries(&format!("class/{class}"))? {
            let path = self.find(&format!("class/{class}/{name}"))?;
            if path.is_some_and(|path| path.starts_with(&below)) {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn disk_in_use(&self, directory: &str, node: NodeUse<'_>) -> Result<Option<String>, Problem> {
        let mut disks = self.class_below("block", directory)?;
        // With native multipathing the disk of an NVMe controller belongs to its subsystem, which is a virtual device.
        for controller in self.class_below("nvme", directory)? {
            for subsystem in self.entries("class/nvme-subsystem")? {
                let subsystem = format!("class/nvme-subsystem/{subsystem}");
                if self.exists(&format!("{subsystem}/{controller}"))? {
                    disks.extend(self.class_below("block", &self.resolve(&subsystem)?)?);
                }
            }
        }
        self.block_devices_in_use(disks, node)
    }

    /// Why the node uses a block device, or a partition of it; `directory` is the device's, without links. A device that the daemon may not open
    /// counts as used.
    pub fn block_device_in_use(
        &self,
        directory: &str,
        node: NodeUse<'_>,
    ) -> Result<Option<String>, Problem> {
        let mut disks = self.class_below("block", directory)?;
        disks.extend(directory.rsplit('/').next().map(str::to_owned));
        self.block_devices_in_use(disks, node)
    }

    fn block_devices_in_use(
        &self,
        disks: Vec<String>,
        node: NodeUse<'_>,
    ) -> Result<Option<String>, Problem> {
        if disks.is_empty() {
            return Ok(None);
        }
        let unknown = |name: &str, error: &std::io::Error| {
            let path = node.proc.join(name);
            let message = format!(
                "whether a disk is mounted is unknown: {}: {error}",
                path.display()
            );
            Problem::unavailable(ProblemCode::IoError, message)
        };
        let read = |name: &str| std::fs::read_to_string(node.proc.join(name));
        let mounts = read("self/mountinfo").map_err(|error| unknown("self/mountinfo", &error))?;
        let swaps = match read("swaps") {
            // A kernel without swap.
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            swaps => swaps.map_err(|error| unknown("swaps", &error))?,
        };
        for name in disks {
            let holders = self.entries(&format!("class/block/{name}/holders"))?;
            // In `/dev` the exclamation mark of a name is a slash (`cciss!c0d0`).
            let disk = name.replace('!', "/");
            if let Some(holder) = holders.first() {
                return Ok(Some(format!("disk {disk} is part of {holder}")));
            }
            let number = self
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
                why_not_opened(&disk, open_exclusively(&node.dev.join(&disk), &number))?
            {
                return Ok(Some(reason));
            }
        }
        Ok(None)
    }

    fn interface_in_use(&self, directory: &str, _: NodeUse<'_>) -> Result<Option<String>, Problem> {
        for name in self.class_below("net", directory)? {
            let interface = format!("class/net/{name}");
            let flags = self
                .find_text(&format!("{interface}/flags"))?
                .unwrap_or_default();
            let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or(0);
            // IFF_UP. Routes and addresses are in the node's network namespace, which the daemon may not be in.
            if flags & 1 == 1 {
                return Ok(Some(format!("interface {name} is up: set it down first")));
            }
            if self.interface_above(&name)?.is_some() {
                return Ok(Some(format!(
                    "interface {name} is part of a bond, bridge or VLAN"
                )));
            }
        }
        Ok(None)
    }

    /// The bond, bridge or other interface that an interface is part of.
    pub fn interface_above(&self, name: &str) -> Result<Option<String>, Problem> {
        let entries = self.entries(&format!("class/net/{name}"))?;
        Ok(entries
            .into_iter()
            .find(|entry| entry == "master" || entry.starts_with("upper_")))
    }

    fn vfs_in_use(&self, directory: &str, _: NodeUse<'_>) -> Result<Option<String>, Problem> {
        let vfs = self
            .find_text(&format!("{directory}/sriov_numvfs"))?
            .unwrap_or_default();
        Ok((!matches!(vfs.as_str(), "" | "0")).then(|| format!("it has {vfs} virtual functions")))
    }

    fn console_in_use(&self, directory: &str, _: NodeUse<'_>) -> Result<Option<String>, Problem> {
        if self.find_text(&format!("{directory}/boot_vga"))?.as_deref() == Some("1") {
            return Ok(Some(
                "it is the display of the console (boot_vga)".to_owned(),
            ));
        }
        let consoles = self
            .find_text("class/tty/console/active")?
            .unwrap_or_default();
        let terminals = self.class_below("tty", directory)?;
        let console = terminals
            .into_iter()
            .find(|name| consoles.split_whitespace().any(|active| active == name));
        Ok(console.map(|name| format!("terminal {name} is the console")))
    }
}

/// Whether a line of `mountinfo` (proc(5)) has the number of a device, or names it as its source (btrfs has numbers of its own).
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

/// What the outcome of an exclusive open says of the use of a disk. A disk that the daemon may not open counts as used.
fn why_not_opened(disk: &str, opened: rustix::io::Result<()>) -> Result<Option<String>, Problem> {
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

/// The problem of a function that the node uses.
pub fn function_in_use(address: &PciAddress, reason: &str) -> Problem {
    let message = format!("{address} keeps its kernel driver, because the node uses it: {reason}");
    Problem::denied(ProblemCode::FunctionInUse, message).with("function", address.as_str())
}

/// The problem of a kernel driver that is not loaded.
pub fn no_such_driver(driver: &str) -> Problem {
    let message = format!("the kernel has no driver {driver} for PCI functions: load its module");
    Problem::not_found(ProblemCode::NoSuchKernelDriver, message)
}

#[cfg(test)]
#[path = "pci_tests.rs"]
mod tests;
