//! A directory in place of `/sys`: what the kernel would do after a write, done to files and links. For tests, and for a daemon that runs
//! on a recorded machine.
//!
//! Knows the binding of PCI functions (`driver_override`, `bind`, `unbind`, `drivers_probe`) and the number of virtual functions
//! (`sriov_numvfs`). Any other write leaves its value in the file.
//!
//! no error: a file that cannot be read is one that the recording does not have; no device of the node depends on it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Virtual functions that one physical function may get.
const VFS_MAX: u32 = 256;

/// The simulated kernel of a directory.
#[derive(Debug)]
pub struct Simulation {
    root: PathBuf,
    /// Directory `dev` beside the root.
    dev: PathBuf,
    /// The kernel driver that each function had at first: the one that matches it.
    native: BTreeMap<String, String>,
}

impl Simulation {
    /// Adds the files by which the kernel takes commands, which no recording has.
    pub fn new(root: &Path) -> io::Result<Self> {
        let (functions, drivers) = (root.join("bus/pci/devices"), root.join("bus/pci/drivers"));
        let mut native = BTreeMap::new();
        for function in entries(&functions)? {
            let name = |path: &Path| {
                path.file_name()
                    .map(|name| name.to_string_lossy().into_owned())
            };
            if let (Some(address), Ok(driver)) =
                (name(&function), function.join("driver").canonicalize())
            {
                native.extend(name(&driver).map(|driver| (address, driver)));
            }
            add(&function.join("driver_override"), "(null)\n")?;
        }
        for driver in entries(&drivers)? {
            add(&driver.join("bind"), "")?;
            add(&driver.join("unbind"), "")?;
        }
        if functions.is_dir() {
            add(&root.join("bus/pci/drivers_probe"), "")?;
        }
        Ok(Self {
            root: root.to_owned(),
            dev: root.with_file_name("dev"),
            native,
        })
    }

    /// Does what the kernel does after a write to a path below the root. The value is in the file already.
    pub fn written(&self, path: &str, value: &str) -> io::Result<()> {
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        match name {
            "driver_override" => {
                let forced = value.trim();
                let text = if forced.is_empty() { "(null)" } else { forced };
                fs::write(self.root.join(path), format!("{text}\n"))
            }
            "unbind" => self.unbind(value.trim()),
            "bind" => {
                let driver = directory.rsplit('/').next().unwrap_or_default();
                self.bind(value.trim(), driver)
            }
            "drivers_probe" => self.probe(value.trim()),
            "sriov_numvfs" => self.set_vfs(&self.root.join(directory), value.trim()),
            _ => fs::write(self.root.join(path), format!("{}\n", value.trim_end())),
        }
    }

    fn function(&self, address: &str) -> io::Result<PathBuf> {
        let link = self.root.join("bus/pci/devices").join(address);
        link.canonicalize().map_err(|_| Errno::NODEV.into())
    }

    fn unbind(&self, address: &str) -> io::Result<()> {
        let function = self.function(address)?;
        fs::remove_file(function.join("driver")).map_err(|_| Errno::NODEV)?;
        self.set_vfio_node(&function, "")
    }

    fn bind(&self, address: &str, driver: &str) -> io::Result<()> {
        let function = self.function(address)?;
        let target = self.root.join("bus/pci/drivers").join(driver);
        if !target.is_dir() || function.join("driver").exists() {
            return Err(Errno::NODEV.into());
        }
        symlink(relative(&function, &target), function.join("driver"))?;
        self.set_vfio_node(&function, driver)
    }

    /// The node of a function's group is there while a `vfio` driver has one of its functions.
    fn set_vfio_node(&self, function: &Path, driver: &str) -> io::Result<()> {
        let Ok(group) = function.join("iommu_group").canonicalize() else {
            return Ok(());
        };
        let is_vfio = |name: &str| name.starts_with("vfio") || name.ends_with("_vfio_pci");
        let has_vfio = |member: &PathBuf| {
            let driver = member.join("driver").canonicalize().ok();
            driver.and_then(|driver| Some(is_vfio(driver.file_name()?.to_str()?))) == Some(true)
        };
        let number = group
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let nodes = self.dev.join("vfio");
        if is_vfio(driver) {
            fs::create_dir_all(&nodes)?;
            fs::write(nodes.join("vfio"), "character 10:196\n")?;
            self.make_vfio_device(&number)?;
            return fs::write(nodes.join(&number), format!("character 511:{number}\n"));
        }
        if entries(&group.join("devices"))?.iter().any(has_vfio) {
            return Ok(());
        }
        fs::remove_file(nodes.join(number)).or(Ok(()))
    }

    /// The device of a group, by which its node's kind is known.
    fn make_vfio_device(&self, number: &str) -> io::Result<()> {
        let device = self.root.join("devices/virtual/vfio").join(number);
        let class = self.root.join("class/vfio");
        let characters = self.root.join("dev/char");
        for directory in [&device, &class, &characters] {
            fs::create_dir_all(directory)?;
        }
        let links = [
            (relative(&device, &class), device.join("subsystem")),
            (
                relative(&characters, &device),
                characters.join(format!("511:{number}")),
            ),
        ];
        for (target, link) in links {
            match symlink(target, link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The forced driver, or the one that matches the function.
    fn probe(&self, address: &str) -> io::Result<()> {
        let function = self.function(address)?;
        if function.join("driver").exists() {
            return Ok(());
        }
        let forced = fs::read_to_string(function.join("driver_override")).unwrap_or_default();
        let driver = match forced.trim() {
            "" | "(null)" => self.native.get(address).map(String::as_str),
            forced => Some(forced),
        };
        // As in the kernel, a driver that is not there is no error.
        driver.map_or(Ok(()), |driver| self.bind(address, driver).or(Ok(())))
    }

    fn set_vfs(&self, function: &Path, value: &str) -> io::Result<()> {
        let number = |name: &str| -> Option<u32> {
            fs::read_to_string(function.join(name))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        let (Ok(wanted), Some(total)) = (value.parse::<u32>(), number("sriov_totalvfs")) else {
            return Err(Errno::INVAL.into());
        };
        if wanted > total.min(VFS_MAX) {
            return Err(Errno::RANGE.into());
        }
        let links = (0..VFS_MAX).map(|index| function.join(format!("virtfn{index}")));
        let present: Vec<_> = links
            .filter(|link| link.symlink_metadata().is_ok())
            .collect();
        let count = u32::try_from(present.len()).unwrap_or(VFS_MAX);
        fs::write(function.join("sriov_numvfs"), format!("{count}\n"))?;
        if wanted == count {
            return Ok(());
        }
        // As `sriov_numvfs_store` of the kernel: another number only by way of 0.
        if wanted != 0 && count != 0 {
            return Err(Errno::BUSY.into());
        }
        present.iter().try_for_each(|link| self.remove_vf(link))?;
        let (offset, stride) = (
            number("sriov_offset").unwrap_or(1),
            number("sriov_stride").unwrap_or(1),
        );
        fs::write(function.join("sriov_numvfs"), format!("{wanted}\n"))?;
        (0..wanted).try_for_each(|index| self.add_vf(function, index, offset + index * stride))
    }

    fn remove_vf(&self, link: &Path) -> io::Result<()> {
        let vf = link.canonicalize()?;
        if let Ok(group) = vf.join("iommu_group").canonicalize() {
            fs::remove_dir_all(group)?;
        }
        fs::remove_file(
            self.root
                .join("bus/pci/devices")
                .join(vf.file_name().unwrap_or_default()),
        )?;
        fs::remove_dir_all(&vf)?;
        fs::remove_file(link)
    }

    /// An IOMMU group for one function, as behind a port that isolates its functions.
    fn add_group(&self, function: &Path) -> io::Result<()> {
        let groups = self.root.join("kernel/iommu_groups");
        let number = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
        let last = entries(&groups)?
            .iter()
            .filter_map(number)
            .max()
            .unwrap_or(0);
        let group = groups.join((last + 1).to_string());
        let members = group.join("devices");
        fs::create_dir_all(&members)?;
        symlink(
            relative(&members, function),
            members.join(function.file_name().unwrap_or_default()),
        )?;
        symlink(relative(function, &group), function.join("iommu_group"))
    }

    /// A virtual function beside its physical function, `distance` routing IDs behind it (PCIe, 9.3.3.8).
    fn add_vf(&self, physical: &Path, index: u32, distance: u32) -> io::Result<()> {
        let invalid = || io::Error::from(Errno::INVAL);
        let name = physical
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(invalid)?;
        let (domain, rest) = name.split_once(':').ok_or_else(invalid)?;
        let (bus, rest) = rest.split_once(':').ok_or_else(invalid)?;
        let (device, function) = rest.split_once('.').ok_or_else(invalid)?;
        let hex = |text: &str| u32::from_str_radix(text, 16).map_err(|_| invalid());
        let id = (hex(bus)? << 8 | hex(device)? << 3 | hex(function)?) + distance;
        let address = format!(
            "{domain}:{:02x}:{:02x}.{}",
            (id >> 8) & 0xff,
            (id >> 3) & 0x1f,
            id & 7
        );
        let directory = physical.parent().ok_or_else(invalid)?.join(&address);
        fs::create_dir(&directory)?;
        for file in [
            "vendor",
            "class",
            "numa_node",
            "subsystem_vendor",
            "subsystem_device",
        ] {
            if let Ok(value) = fs::read(physical.join(file)) {
                fs::write(directory.join(file), value)?;
            }
        }
        let device = fs::read(physical.join("sriov_vf_device")).unwrap_or_default();
        let device = String::from_utf8_lossy(&device).trim().to_owned();
        fs::write(
            directory.join("device"),
            format!("0x{}\n", device.trim_start_matches("0x")),
        )?;
        fs::write(directory.join("driver_override"), "(null)\n")?;
        symlink(format!("../{name}"), directory.join("physfn"))?;
        symlink(
            format!("../{address}"),
            physical.join(format!("virtfn{index}")),
        )?;
        if physical.join("iommu_group").exists() {
            self.add_group(&directory)?;
        }
        let link = self.root.join("bus/pci/devices").join(&address);
        symlink(
            relative(link.parent().ok_or_else(invalid)?, &directory),
            &link,
        )
    }
}

fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn add(path: &Path, content: &str) -> io::Result<()> {
    if path.exists() {
        Ok(())
    } else {
        fs::write(path, content)
    }
}

/// A link's text from a directory to a path.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let common = from
        .components()
        .zip(to.components())
        .take_while(|(a, b)| a == b)
        .count();
    let up = from.components().skip(common).map(|_| Path::new(".."));
    let mut path: PathBuf = up.collect();
    path.extend(to.components().skip(common));
    path
}
