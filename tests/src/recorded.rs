//! Machines for a daemon that runs with `--hardware`: made of files, with PCI functions in IOMMU groups.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Identifiers of the disks of [`Recorded::disks`], whose nodes the grant of the driver `block` has.
pub const DISKS: [&str; 2] = ["eui.0025385b21b0c7e1", "eui.0025385b21b0c7e2"];

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

    /// A device (`devices/platform/3f801000.csi/media0`) with a node, its numbers and the class or bus that lists it (`class/video4linux`,
    /// `bus/media`, `class/block`). The node is a block device in `class/block`.
    pub fn listed_node(
        &self,
        device: &str,
        list: &str,
        (major, minor): (u32, u32),
        name: &str,
    ) -> &Self {
        let entry = device.rsplit('/').next().expect("a path has an end");
        let entries = match list.starts_with("bus/") {
            true => format!("{list}/devices"),
            false => list.to_owned(),
        };
        let up = |directory: &str| "../".repeat(directory.split('/').count());
        let (to_list, to_device) = (up(device), up(&entries));
        fs::create_dir_all(self.root.join("sys").join(&entries)).expect("a new directory");
        self.file(
            &format!("sys/{device}/uevent"),
            &format!("MAJOR={major}\nMINOR={minor}\nDEVNAME={name}"),
        )
        .file(&format!("sys/{device}/dev"), &format!("{major}:{minor}"))
        .link(
            &format!("sys/{device}/subsystem"),
            &format!("{to_list}{list}"),
        )
        .link(
            &format!("sys/{entries}/{entry}"),
            &format!("{to_device}{device}"),
        )
    }

    /// Two cameras of one model and serial number, on a USB controller.
    pub fn cameras(&self) -> &Self {
        let controller = "devices/pci0000:00/0000:00:14.0/usb1";
        self.file(&format!("sys/{controller}/version"), " 2.00")
            .link(
                "sys/bus/usb/devices/usb1",
                &format!("../../../{controller}"),
            );
        for (number, port) in [(0, "1-2"), (1, "1-5")] {
            let device = format!("{controller}/{port}");
            let function = format!("{device}/{port}:1.0");
            for (file, value) in [
                ("idVendor", "046d"),
                ("idProduct", "085e"),
                ("serial", "0001"),
            ] {
                self.file(&format!("sys/{device}/{file}"), value);
            }
            self.link(
                &format!("sys/bus/usb/devices/{port}"),
                &format!("../../../{device}"),
            );
            for index in 0..2 {
                let minor = 2 * number + index;
                let name = format!("video{minor}");
                let video = format!("{function}/video4linux/{name}");
                self.listed_node(&video, "class/video4linux", (81, minor), &name)
                    .file(&format!("sys/{video}/index"), &index.to_string())
                    .file(&format!("sys/{video}/name"), "Camera");
            }
            let media = format!("{function}/media{number}");
            self.listed_node(
                &media,
                "bus/media",
                (237, number),
                &format!("media{number}"),
            );
        }
        self
    }

    /// An NPU of the kernel's class and a Coral accelerator.
    pub fn accelerators(&self) -> &Self {
        for (address, driver, class, entry, numbers, name) in [
            (
                "0000:00:0b.0",
                "intel_vpu",
                "accel",
                "accel0",
                (261, 0),
                "accel/accel0",
            ),
            ("0000:06:00.0", "apex", "apex", "apex_0", (120, 0), "apex_0"),
        ] {
            self.function(address, "0x120000", driver, None);
            let device = format!("devices/pci0000:00/{address}/{class}/{entry}");
            self.listed_node(&device, &format!("class/{class}"), numbers, name);
        }
        self
    }

    /// Two NVMe disks, none of which the node uses: [`DISKS`] names them.
    pub fn disks(&self) -> &Self {
        for (minor, wwid) in (1..).zip(DISKS) {
            let name = format!("nvme{minor}n1");
            let disk = format!("devices/pci0000:00/0000:07:00.{minor}/nvme/nvme{minor}/{name}");
            self.listed_node(&disk, "class/block", (259, minor), &name)
                .file(&format!("sys/{disk}/wwid"), wwid)
                .file(&format!("sys/{disk}/size"), "1953525168");
        }
        self.file("proc/self/mountinfo", "")
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
