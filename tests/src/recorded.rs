//! Machines for a daemon that runs with `--hardware`: made of files, with PCI functions in IOMMU groups.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A snapshot in a directory.
pub struct Recorded {
    root: PathBuf,
}

impl Recorded {
    /// An empty machine with these kernel drivers for PCI functions.
    pub fn new(root: &Path, drivers: &[&str]) -> Self {
        for driver in drivers {
            fs::create_dir_all(root.join("sys/bus/pci/drivers").join(driver))
                .expect("a new directory");
        }
        fs::create_dir_all(root.join("sys/bus/pci/devices")).expect("a new directory");
        Self {
            root: root.to_owned(),
        }
    }

    /// Adds a function of a class, with its kernel driver and IOMMU group.
    pub fn function(&self, address: &str, class: &str, driver: &str, group: Option<u32>) -> &Self {
        let function = self.directory(address);
        fs::create_dir_all(&function).expect("a new directory");
        for (file, value) in [
            ("class", class),
            ("vendor", "0x1002"),
            ("device", "0x73bf"),
            ("numa_node", "0"),
        ] {
            self.write(&function.join(file), value);
        }
        link(
            &format!("../../../bus/pci/drivers/{driver}"),
            &function.join("driver"),
        );
        let devices = self.root.join("sys/bus/pci/devices");
        link(
            &format!("../../../devices/pci0000:00/{address}"),
            &devices.join(address),
        );
        if let Some(group) = group {
            let members = self
                .root
                .join(format!("sys/kernel/iommu_groups/{group}/devices"));
            fs::create_dir_all(&members).expect("a new directory");
            link(
                &format!("../../../../devices/pci0000:00/{address}"),
                &members.join(address),
            );
            link(
                &format!("../../../kernel/iommu_groups/{group}"),
                &function.join("iommu_group"),
            );
        }
        self
    }

    /// Writes a file of a function, such as `boot_vga`.
    pub fn value(&self, address: &str, file: &str, value: &str) -> &Self {
        self.write(&self.directory(address).join(file), value);
        self
    }

    /// Writes a file of the machine, such as `sys/devices/system/cpu/online`, with the directories above it.
    pub fn file(&self, path: &str, value: &str) -> &Self {
        self.write(&self.prepared(path), value);
        self
    }

    /// Makes a symbolic link of the machine.
    pub fn link(&self, path: &str, target: &str) -> &Self {
        link(target, &self.prepared(path));
        self
    }

    /// A device below `/sys` that has a character device, by its name below `/dev`. Its subsystem is the directory that it is in.
    pub fn device_node(&self, path: &str, major: u32, minor: u32, name: &str) -> &Self {
        let subsystem = Path::new(path)
            .parent()
            .and_then(Path::file_name)
            .expect("a directory of devices");
        let class = Path::new("class").join(subsystem);
        fs::create_dir_all(self.root.join("sys").join(&class)).expect("a new directory");
        let up = "../".repeat(path.split('/').count() - 1);
        let uevent = format!("MAJOR={major}\nMINOR={minor}\nDEVNAME={name}");
        self.file(&format!("{path}/uevent"), &uevent).link(
            &format!("{path}/subsystem"),
            &format!("{up}{}", class.display()),
        )
    }

    /// A path whose directory exists.
    fn prepared(&self, path: &str) -> PathBuf {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().expect("a path in the machine")).expect("new directories");
        path
    }

    /// A card that can make eight virtual functions.
    pub fn card(&self, address: &str) -> &Self {
        self.function(address, "0x020000", "mlx5_core", Some(9));
        for (file, value) in [
            ("sriov_totalvfs", "8"),
            ("sriov_numvfs", "0"),
            ("sriov_offset", "1"),
            ("sriov_stride", "1"),
            ("sriov_vf_device", "101e"),
            ("sriov_drivers_autoprobe", "1"),
        ] {
            self.value(address, file, value);
        }
        self
    }

    pub fn path(&self) -> &Path {
        &self.root
    }

    fn directory(&self, address: &str) -> PathBuf {
        self.root.join("sys/devices/pci0000:00").join(address)
    }

    fn write(&self, path: &Path, value: &str) {
        fs::write(path, format!("{value}\n")).expect("a new file");
    }
}

fn link(target: &str, path: &Path) {
    symlink(target, path).expect("a new link");
}

/// The kernel driver of a function below a `sys`; empty if it has none.
pub fn kernel_driver(sys: &Path, address: &str) -> String {
    let link = fs::read_link(sys.join("devices/pci0000:00").join(address).join("driver"));
    let name = link
        .ok()
        .and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_default()
}

/// Machines of others' test suites, beside the project where they are.
pub fn archives() -> Result<Vec<PathBuf>, String> {
    let directory = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../shared/hardware"
    ));
    let entries =
        fs::read_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut archives: Vec<_> = paths
        .filter(|path| path.to_string_lossy().contains(".tar."))
        .collect();
    archives.sort();
    Ok(archives)
}
