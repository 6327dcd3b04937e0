//! Kernel drivers of PCI functions: which one a function is bound to, and binding it to another one.
//! Blocking functions, not for async threads.
//!
//! A binding is treated like a value below `/sys`: its path is `driver` in the function's directory, so that it is locked, recorded,
//! audited and restored as values are (`docs/decisions/0005-restored-values.md`). The steps of a bind are those of the kernel's
//! documentation (Documentation/ABI/testing/sysfs-bus-pci): `driver_override`, `unbind`, `drivers_probe`.

use std::fmt;
use std::io::Write;
use std::str::FromStr;

use rustix::fs::{OFlags, ResolveFlags};

use super::{SysfsRoot, stat};
use crate::sysfs::attribute::{Attribute, Written, replaced};
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{KeptValue, Problem, ProblemCode};

const DEVICES: &str = "bus/pci/devices";
const DRIVERS: &str = "bus/pci/drivers";
/// Bytes of a kernel driver's name (`driver_override` takes a page; names of modules have fewer than 64).
const NAME_BYTES_MAX: usize = 63;
/// Bridges of every kind (base class 06): a guest has no use for one, and the kernel gives a group to a guest beside a bridge between PCI buses and
/// beside any function without a kernel driver, such as a host bridge (`vfio_pci`, `pci_dev_driver_allowed`).
const BRIDGE_CLASS: &str = "0x06";

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

/// Returns whether a recorded path is that of a binding.
pub(super) fn is_binding(path: &str) -> bool {
    PciAddress::of_binding(path).is_some()
}

/// Returns whether a binding is the one that a driver left, or one between two steps: then the function has no kernel driver, or the
/// override of the driver's.
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

/// The PCI functions of a machine.
pub struct PciFunctions<'a>(&'a SysfsRoot);

impl SysfsRoot {
    pub fn pci(&self) -> PciFunctions<'_> {
        PciFunctions(self)
    }
}

impl PciFunctions<'_> {
    /// Returns the functions that a bind of this one concerns, sorted: for a `vfio` driver its IOMMU group without bridges.
    pub fn bound_together(
        &self,
        address: &PciAddress,
        driver: &str,
    ) -> Result<Vec<PciAddress>, Problem> {
        self.directory(address)?;
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
        self.directory(address)?;
        Ok(self
            .iommu_group(address)?
            .unwrap_or_else(|| vec![address.clone()]))
    }

    /// Returns the binding of a function, as a value whose path is `driver` in its directory.
    pub fn binding(&self, address: &PciAddress) -> Result<Attribute, Problem> {
        let directory = self.directory(address)?;
        let open = self.0.open_beneath(
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
    pub fn has_driver(&self, driver: &str) -> Result<bool, Problem> {
        self.0.exists(&format!("{DRIVERS}/{driver}"))
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
    pub(super) fn directory(&self, address: &PciAddress) -> Result<String, Problem> {
        let directory = self.0.resolve(&format!("{DEVICES}/{address}"))?;
        if directory.starts_with("devices/") && directory.ends_with(&format!("/{address}")) {
            return Ok(directory);
        }
        let message = format!("/sys/{DEVICES}/{address} does not lead to a function");
        Err(Problem::denied(ProblemCode::OutsideSysfs, message))
    }

    fn iommu_group(&self, address: &PciAddress) -> Result<Option<Vec<PciAddress>>, Problem> {
        let devices = format!("{DEVICES}/{address}/iommu_group/devices");
        if !self.0.exists(&devices)? {
            return Ok(None);
        }
        let mut group = Vec::new();
        for name in self.0.read_dir(&devices)? {
            // A group may have devices of other buses, which no kernel driver for PCI functions takes.
            let Ok(member) = name.parse::<PciAddress>() else {
                continue;
            };
            let class = self.0.find_text(&format!("{DEVICES}/{member}/class"))?;
            if !class.is_some_and(|class| class.starts_with(BRIDGE_CLASS)) {
                group.push(member);
            }
        }
        Ok(Some(group))
    }

    fn binding_in(&self, directory: &str) -> Result<Binding, Problem> {
        let link = format!("{directory}/driver");
        let driver = match self.0.exists(&link)? {
            true => self
                .0
                .read_link(&link)?
                .rsplit('/')
                .next()
                .map(str::to_owned),
            false => None,
        };
        let forced = self.0.find_text(&format!("{directory}/driver_override"))?;
        Ok(Binding {
            driver,
            forced: forced.filter(|forced| !matches!(forced.as_str(), "" | "(null)")),
        })
    }

    /// One system call to a file of the host's own choice, which drivers may not write.
    fn write_once(&self, path: &str, value: &str) -> Result<(), Problem> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = self.0.open_beneath(path, flags, ResolveFlags::empty())?;
        std::fs::File::from(file)
            .write_all(value.as_bytes())
            .and_then(|()| self.0.written(path, value))
            .map_err(|error| {
                let message = format!(
                    "the kernel refused {:?} in /sys/{path}: {error}",
                    value.trim_end()
                );
                Problem::unavailable(ProblemCode::BindFailed, message)
            })
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
