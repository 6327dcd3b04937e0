//! The host's functions, as handles that a driver receives.
//!
//! A method that a driver does not call leaves no import in its binary, so that the import list shows what a driver uses.
//! [`Host`] is therefore a plain type with direct calls and not a trait object.

use std::str::FromStr;

use crate::facts::{FileInfo, Level, NetInterface, NodeInfo, Page};
#[cfg(not(target_family = "wasm"))]
use crate::fake_node::FakeNode as Backend;
#[cfg(target_family = "wasm")]
use crate::wasm::Imports as Backend;
use crate::{ClaimRecord, Problem, ProblemKind, present};

/// Files that [`Sysfs::power_fault`] reads, as globs for [`DriverInfo::sysfs_read`](crate::DriverInfo::sysfs_read).
pub const POWER_FILES: [&str; 1] = ["devices/**/power/runtime_status"];

/// Handle to the host. On the node its methods call the host; in tests they call a [`FakeHost`](crate::testing::FakeHost), whose
/// `fake.host()` creates the handle.
#[derive(Debug)]
pub struct Host {
    backend: Backend,
}

impl Host {
    pub(crate) fn new(backend: Backend) -> Self {
        Host { backend }
    }

    /// Returns the host's log.
    pub fn log(&self) -> Log<'_> {
        Log(&self.backend)
    }

    /// Returns access to files below `/sys`.
    pub fn sysfs(&self) -> Sysfs<'_> {
        Sysfs(&self.backend)
    }

    /// Returns access to device nodes below `/dev`.
    pub fn device_nodes(&self) -> DeviceNodes<'_> {
        DeviceNodes(&self.backend)
    }

    /// Returns access to files of the node outside `/sys` and `/dev`.
    pub fn host_files(&self) -> HostFiles<'_> {
        HostFiles(&self.backend)
    }

    /// Returns the binding of PCI functions to kernel drivers.
    pub fn pci_driver(&self) -> PciDriver<'_> {
        PciDriver(&self.backend)
    }

    /// Returns the network interfaces of the node.
    pub fn net_interfaces(&self) -> NetInterfaces<'_> {
        NetInterfaces(&self.backend)
    }

    /// Returns access to the prepared claims of this driver.
    pub fn prepared_claims(&self) -> PreparedClaims<'_> {
        PreparedClaims(&self.backend)
    }

    /// Returns the saving of progress in the middle of a prepare.
    pub fn progress(&self) -> Progress<'_> {
        Progress(&self.backend)
    }
}

/// Writes lines to the host's log, under the driver's name. The host shortens a line of more than 4 KiB in its middle, and drops lines beyond the driver's rate.
///
/// ```
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// fake.host().log().info("reset the device", &[("device", "gpu-0")]);
/// assert_eq!(fake.log_lines()[0].message, "reset the device");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Log<'a>(&'a Backend);

impl Log<'_> {
    /// Writes a line with fields.
    pub fn write(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        self.0.log(level, message, fields);
    }

    /// Writes a line at level debug.
    pub fn debug(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Debug, message, fields);
    }

    /// Writes a line at level info.
    pub fn info(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Info, message, fields);
    }

    /// Writes a line at level warn.
    pub fn warn(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Warn, message, fields);
    }

    /// Writes a line at level error.
    pub fn error(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Error, message, fields);
    }
}

/// Files below `/sys`. Paths are relative to `/sys`. They must match what the driver requested and the operator granted. The host
/// follows links; the grant must cover the path as given.
///
/// All methods fail with `denied` for a path without a grant, with `not-found` if nothing exists there, and with `unavailable` if the
/// kernel has no value now (code `no-value`: a link that is down, a device that is being removed) or the read failed (any other code). A
/// read that failed says nothing about the node: a discovery returns the problem, and the host keeps the last inventory.
///
/// ```
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// fake.file("devices/pci0000:00/0000:00:02.0/numa_node", "1\n")
///     .link("bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0");
/// let host = fake.host();
/// let sysfs = host.sysfs();
/// for function in sysfs.glob("bus/pci/devices/*")? {
///     assert_eq!(sysfs.find_parsed::<i32>(&format!("{function}/numa_node"))?, Some(1));
///     assert_eq!(sysfs.find_link(&format!("{function}/driver"))?, None);
/// }
/// assert!(sysfs.read("bus/pci/devices/0000:00:03.0/vendor").is_err());
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Sysfs<'a>(&'a Backend);

impl Sysfs<'_> {
    /// Returns the content of a regular file, at most 64 KiB, without the trailing line end. Within one call the content is stable.
    ///
    /// # Errors
    ///
    /// As for all methods, and `invalid` for content that is not UTF-8.
    pub fn read(&self, path: &str) -> Result<String, Problem> {
        self.0.sysfs_read(path)
    }

    /// Returns the bytes of a regular file, at most 64 KiB.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn read_bytes(&self, path: &str) -> Result<Vec<u8>, Problem> {
        self.0.sysfs_read_bytes(path)
    }

    /// Returns the names in a directory, sorted, at most 4,096.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        self.0.sysfs_read_dir(path)
    }

    /// Returns the resolved target of a link, relative to `/sys`: `bus/pci/drivers/vfio-pci`. The target needs no grant.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn read_link(&self, path: &str) -> Result<String, Problem> {
        self.0.sysfs_read_link(path)
    }

    /// Returns the paths that match a glob, sorted, at most 4,096; an empty list if no path matches.
    ///
    /// # Errors
    ///
    /// As for all methods; `invalid` for an invalid glob. A directory that does not exist has no paths; one that cannot be read is an
    /// error.
    pub fn glob(&self, pattern: &str) -> Result<Vec<String>, Problem> {
        self.0.sysfs_glob(pattern)
    }

    /// Waits until a path matches a glob: for what the kernel makes a moment after a write or a bind. An empty list: there is none after
    /// that time, which is elapsed time of the call. In tests it looks once; what a write makes is added by
    /// [`FakeHost::on_write`](crate::testing::FakeHost::on_write).
    ///
    /// # Errors
    ///
    /// Those of [`glob`](Sysfs::glob).
    pub fn wait_for(&self, pattern: &str, milliseconds: u32) -> Result<Vec<String>, Problem> {
        self.0.sysfs_wait_for(pattern, milliseconds)
    }

    /// Reads a file as [`read`](Sysfs::read) does, with `None` for a file that does not exist or has no value now.
    ///
    /// # Errors
    ///
    /// Those of `read`, except for `not-found` and `no-value`: a read that failed is an error.
    pub fn find(&self, path: &str) -> Result<Option<String>, Problem> {
        present(self.read(path))
    }

    /// Reads a link as [`read_link`](Sysfs::read_link) does, with `None` for a link that does not exist, for what is no link, and for a
    /// link that leads out of `/sys`: recorded machines have such, kernels do not.
    ///
    /// # Errors
    ///
    /// Those of `read_link`, except for these, `not-found` and `no-value`.
    pub fn find_link(&self, path: &str) -> Result<Option<String>, Problem> {
        match self.read_link(path) {
            Err(problem) if matches!(problem.code.as_str(), "not-a-link" | "outside-sysfs") => {
                Ok(None)
            }
            found => present(found),
        }
    }

    /// Reads a file as [`find`](Sysfs::find) does, parsed as `T`, such as a number; also `None` for content that does not parse.
    ///
    /// # Errors
    ///
    /// Those of `find`.
    pub fn find_parsed<T: FromStr>(&self, path: &str) -> Result<Option<T>, Problem> {
        Ok(self.find(path)?.and_then(|text| text.trim().parse().ok()))
    }

    /// Reads the numbers (major, minor) of a device node from the file `dev` in the device's directory; `None` if it has none.
    ///
    /// ```
    /// use nodedock_sdk::testing::FakeHost;
    ///
    /// let fake = FakeHost::new();
    /// fake.file("class/accel/accel0/dev", "261:0\n").dir("class/accel/accel1");
    /// let host = fake.host();
    /// assert_eq!(host.sysfs().find_numbers("class/accel/accel0")?, Some((261, 0)));
    /// assert_eq!(host.sysfs().find_numbers("class/accel/accel1")?, None);
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of `find`.
    pub fn find_numbers(&self, directory: &str) -> Result<Option<(u32, u32)>, Problem> {
        let text = self.find(&format!("{directory}/dev"))?;
        Ok(text.and_then(|text| {
            let (major, minor) = text.trim().split_once(':')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        }))
    }

    /// Reads what a device calls itself, as [`find`](Sysfs::find) does, in printable characters: see [`printable`](crate::printable). Also
    /// `None` for a file that is blank.
    ///
    /// # Errors
    ///
    /// Those of `find`.
    pub fn find_printable(&self, path: &str) -> Result<Option<String>, Problem> {
        let bytes = present(self.read_bytes(path))?;
        Ok(bytes.and_then(|bytes| crate::printable(&bytes)))
    }

    /// Returns why a device does not work, for its health, if the kernel failed to suspend or to resume it, or what it is connected to: a bridge, or
    /// the USB device of a function. `directory` is the device's own below `devices`, as [`read_link`](Sysfs::read_link) returns it. Reads
    /// [`POWER_FILES`](crate::POWER_FILES).
    ///
    /// ```
    /// use nodedock_sdk::testing::FakeHost;
    ///
    /// let fake = FakeHost::new();
    /// fake.file("devices/pci0000:00/0000:00:0b.0/power/runtime_status", "error\n");
    /// let host = fake.host();
    /// assert!(host.sysfs().power_fault("devices/pci0000:00/0000:00:0b.0/accel/accel0")?.is_some());
    /// assert_eq!(host.sysfs().power_fault("devices/pci0000:00/0000:00:02.0")?, None);
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of `find`.
    pub fn power_fault(&self, directory: &str) -> Result<Option<String>, Problem> {
        let mut below = directory;
        while let Some((above, name)) = below.rsplit_once('/') {
            let status = self.find(&format!("{below}/power/runtime_status"))?;
            if status.is_some_and(|status| status.trim() == "error") {
                return Ok(Some(format!(
                    "the kernel failed to change the power state of {name} (power/runtime_status is error)"
                )));
            }
            below = above;
        }
        Ok(None)
    }

    /// Writes a file, during prepare and unprepare only; path and value must match a grant. The host stores the previous value with
    /// the claim and can restore it without the driver.
    ///
    /// # Errors
    ///
    /// As for all methods; `denied` for a value without a grant, and outside of prepare and unprepare.
    pub fn write(&self, path: &str, value: &str) -> Result<(), Problem> {
        self.0.sysfs_write(path, value)
    }
}

/// Metadata of device nodes below `/dev`, granted by globs. The host never opens a node.
///
/// ```
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// fake.character_node("/dev/ttyUSB0", 188, 0).character_node("/dev/ttyUSB1", 188, 1);
/// let host = fake.host();
/// assert_eq!(host.device_nodes().glob("/dev/ttyUSB*")?.len(), 2);
/// assert_eq!(host.device_nodes().stat("/dev/ttyUSB1")?.minor, 1);
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DeviceNodes<'a>(&'a Backend);

impl DeviceNodes<'_> {
    /// Returns the nodes that match a glob such as `/dev/ttyUSB*`, sorted by path, without directories, links and regular files; an
    /// empty list if no node matches.
    ///
    /// # Errors
    ///
    /// `denied` for a glob without a grant, `invalid` for an invalid glob, `unavailable` if a directory or a node could not be read.
    pub fn glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        self.0.device_nodes_glob(pattern)
    }

    /// Waits until a node matches a glob, as [`Sysfs::wait_for`] does.
    ///
    /// # Errors
    ///
    /// Those of [`glob`](DeviceNodes::glob).
    pub fn wait_for(&self, pattern: &str, milliseconds: u32) -> Result<Vec<NodeInfo>, Problem> {
        self.0.device_nodes_wait_for(pattern, milliseconds)
    }

    /// Returns one node.
    ///
    /// # Errors
    ///
    /// `denied` for a path without a grant, `not-found` if there is no device node.
    pub fn stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        self.0.device_nodes_stat(path)
    }

    /// Returns why a container cannot get the node of a device with these numbers (major, minor), for the device's health: there is no node at
    /// the path, the node is that of another device, or the grant does not have it. `None`: it can.
    ///
    /// ```
    /// use nodedock_sdk::testing::FakeHost;
    ///
    /// let fake = FakeHost::new();
    /// fake.character_node("/dev/video0", 81, 0);
    /// let host = fake.host();
    /// assert_eq!(host.device_nodes().fault("/dev/video0", (81, 0))?, None);
    /// let fault = host.device_nodes().fault("/dev/video0", (81, 4))?;
    /// assert_eq!(fault.as_deref(), Some("/dev/video0 has the numbers 81:0, and the device has 81:4"));
    /// assert!(host.device_nodes().fault("/dev/video1", (81, 1))?.is_some());
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`stat`](DeviceNodes::stat), except for `denied` and `not-found`.
    pub fn fault(&self, path: &str, numbers: (u32, u32)) -> Result<Option<String>, Problem> {
        let (major, minor) = numbers;
        match self.stat(path) {
            Ok(node) if (node.major, node.minor) == numbers => Ok(None),
            Ok(node) => Ok(Some(format!(
                "{path} has the numbers {}:{}, and the device has {major}:{minor}",
                node.major, node.minor
            ))),
            Err(problem) if problem.is_absent() || problem.kind == ProblemKind::Denied => {
                Ok(Some(problem.message))
            }
            Err(problem) => Err(problem),
        }
    }
}

/// Files of the node outside `/sys` and `/dev`, granted by globs, within the host's ceiling: `/proc/driver`, `/usr/lib*`, `/opt` and a
/// few more. Paths are absolute. Only files that root owns and everyone may read.
///
/// All methods fail with `denied` for a path without a grant or beyond the ceiling, with `not-found` if nothing exists there, and with
/// `unavailable` if the read failed.
///
/// ```
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// fake.host_file("/proc/driver/nvidia/version", "NVRM version: 570.86\n");
/// let host = fake.host();
/// let version = host.host_files().find("/proc/driver/nvidia/version")?;
/// assert!(version.is_some_and(|text| text.contains("570.86")));
/// assert_eq!(host.host_files().glob("/usr/lib64/libcuda.so.*")?, []);
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct HostFiles<'a>(&'a Backend);

impl HostFiles<'_> {
    /// Returns the content of a regular file as text, at most 1 MiB, unchanged.
    ///
    /// # Errors
    ///
    /// As for all methods, and `invalid` for content that is not UTF-8.
    pub fn read(&self, path: &str) -> Result<String, Problem> {
        self.0.host_files_read(path)
    }

    /// Reads a file as [`read`](HostFiles::read) does, with `None` for a file that does not exist.
    ///
    /// # Errors
    ///
    /// Those of `read`, except for `not-found`.
    pub fn find(&self, path: &str) -> Result<Option<String>, Problem> {
        present(self.read(path))
    }

    /// Returns one file or directory.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn stat(&self, path: &str) -> Result<FileInfo, Problem> {
        self.0.host_files_stat(path)
    }

    /// Returns the files and directories that match a glob, sorted by path, at most 4,096.
    ///
    /// # Errors
    ///
    /// `denied` for a glob without a grant, `invalid` for an invalid glob, `unavailable` if a directory or a file could not be read.
    pub fn glob(&self, pattern: &str) -> Result<Vec<FileInfo>, Problem> {
        self.0.host_files_glob(pattern)
    }
}

/// Binds PCI functions to kernel drivers, during prepare and unprepare only. For a `vfio` driver the whole IOMMU group is bound or
/// nothing. The host stores the previous kernel drivers with the claim and can restore them without the driver.
///
/// ```
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// fake.file("devices/pci0000:00/0000:00:02.0/vendor", "0x8086\n")
///     .link("devices/pci0000:00/0000:00:02.0/driver", "../../../bus/pci/drivers/igb")
///     .link("bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0")
///     .dir("bus/pci/drivers/igb")
///     .dir("bus/pci/drivers/uio_pci_generic");
/// let host = fake.host();
/// host.pci_driver().bind("0000:00:02.0", "uio_pci_generic")?;
/// assert_eq!(fake.kernel_driver("0000:00:02.0").as_deref(), Some("uio_pci_generic"));
/// host.pci_driver().restore("0000:00:02.0")?;
/// assert_eq!(fake.kernel_driver("0000:00:02.0").as_deref(), Some("igb"));
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PciDriver<'a>(&'a Backend);

impl PciDriver<'_> {
    /// Binds a function (`0000:3b:00.0`) to a kernel driver (`vfio-pci`) and returns the functions that are now bound to it, sorted.
    ///
    /// # Errors
    ///
    /// `denied` without a grant, outside of prepare and unprepare, and for a function in use (`function-in-use`); `not-found` for a
    /// function or a kernel driver that does not exist; `unavailable` without an IOMMU group (`no-iommu`) and if the kernel does not bind
    /// it (`bind-failed`; the host has undone it).
    pub fn bind(&self, address: &str, driver: &str) -> Result<Vec<String>, Problem> {
        self.0.pci_driver_bind(address, driver)
    }

    /// Binds the function, and what [`bind`](PciDriver::bind) bound with it, to the previous kernel drivers, and returns these functions.
    ///
    /// # Errors
    ///
    /// As for `bind`, except for grants.
    pub fn restore(&self, address: &str) -> Result<Vec<String>, Problem> {
        self.0.pci_driver_restore(address)
    }
}

/// Network interfaces of the node, granted by globs on their names.
///
/// ```
/// use nodedock_sdk::{OperationalState, testing::FakeHost};
///
/// let fake = FakeHost::new();
/// fake.file("class/net/eth0/address", "02:00:00:00:00:01\n").file("class/net/eth0/operstate", "up\n");
/// let eth0 = fake.host().net_interfaces().get("eth0")?;
/// assert_eq!((eth0.hardware_address.as_str(), eth0.state), ("02:00:00:00:00:01", OperationalState::Up));
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct NetInterfaces<'a>(&'a Backend);

impl NetInterfaces<'_> {
    /// Returns the granted interfaces, sorted by name, at most 4,096.
    ///
    /// # Errors
    ///
    /// `unavailable` if the kernel does not answer.
    pub fn all(&self) -> Result<Vec<NetInterface>, Problem> {
        self.0.net_interfaces_all()
    }

    /// Returns one interface.
    ///
    /// # Errors
    ///
    /// `denied` for a name without a grant, `not-found` if there is no such interface.
    pub fn get(&self, name: &str) -> Result<NetInterface, Problem> {
        self.0.net_interfaces_get(name)
    }
}

/// The claims that this driver has prepared on this node, or may have begun to prepare, from the host's checkpoint. Those of the running call are
/// among them.
///
/// ```
/// use nodedock_sdk::{Claim, ClaimRecord, testing::FakeHost};
///
/// let fake = FakeHost::new();
/// let claim = Claim::new("default", "train", "uid-1").device("r", "gpus", "gpu-0");
/// let record = ClaimRecord {
///     claim,
///     prepared: true,
///     memo: Vec::new(),
///     driver_version: "0.1.0".into(),
///     boot_id: "boot".into(),
/// };
/// fake.claim(record);
/// let host = fake.host();
/// let mut claims = host.prepared_claims().all();
/// assert!(claims.all(|record| record.prepared));
/// assert!(host.prepared_claims().using("gpus", "gpu-0").all(|record| record.prepared));
/// assert!(host.prepared_claims().get("uid-2").is_none());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PreparedClaims<'a>(&'a Backend);

impl<'a> PreparedClaims<'a> {
    /// Returns all of them, sorted by UID, page by page.
    pub fn all(self) -> impl Iterator<Item = ClaimRecord> + use<'a> {
        pages(move |after| self.0.prepared_claims_all(after))
    }

    /// Returns the claim with this UID.
    pub fn get(&self, uid: &str) -> Option<ClaimRecord> {
        self.0.prepared_claims_get(uid)
    }

    /// Returns the claims that use this device, sorted by UID, including claims with admin access to it. The cost is proportional to
    /// the claims of the device; the cost of `all` is proportional to all claims.
    pub fn using<'b>(
        self,
        pool: &'b str,
        device: &'b str,
    ) -> impl Iterator<Item = ClaimRecord> + use<'a, 'b> {
        pages(move |after| self.0.prepared_claims_using_device(pool, device, after))
    }
}

fn pages(read: impl Fn(Option<&str>) -> Page) -> impl Iterator<Item = ClaimRecord> {
    let mut next = Some(None);
    std::iter::from_fn(move || {
        let (claims, after) = read(next.take()?.as_deref());
        next = after.map(Some);
        Some(claims)
    })
    .flatten()
}

/// Progress in the middle of a prepare, for work that a crash would leave half done.
///
/// ```
/// use nodedock_sdk::{Claim, ClaimRecord, testing::FakeHost};
///
/// let fake = FakeHost::new();
/// let claim = Claim::new("default", "train", "uid-1").device("r", "gpus", "gpu-0");
/// let record = ClaimRecord {
///     claim,
///     prepared: false,
///     memo: Vec::new(),
///     driver_version: "0.1.0".into(),
///     boot_id: "boot".into(),
/// };
/// fake.claim(record);
/// fake.host().progress().save_json("uid-1", &"partition 3 created")?;
/// assert_eq!(fake.progress("uid-1").as_deref(), Some(&b"\"partition 3 created\""[..]));
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a>(&'a Backend);

impl Progress<'_> {
    /// Saves bytes, at most 64 KiB, for a claim of the running call. They are durable when it returns, and later calls have them as
    /// [`Claim::progress`](crate::Claim::progress), until a prepare succeeds or the claim ends.
    ///
    /// # Errors
    ///
    /// `denied` outside of prepare and unprepare and for another claim; `invalid` for more than 64 KiB; `unavailable` if the bytes are
    /// not durable.
    pub fn save(&self, uid: &str, progress: &[u8]) -> Result<(), Problem> {
        self.0.progress_save(uid, progress)
    }

    /// Saves a value as JSON, for [`Claim::progress`](crate::Claim::progress()).
    ///
    /// # Errors
    ///
    /// As for `save`.
    pub fn save_json(&self, uid: &str, progress: &impl serde::Serialize) -> Result<(), Problem> {
        let bytes = serde_json::to_vec(progress)
            .map_err(|error| Problem::internal("bad-progress", format!("progress: {error}")))?;
        self.save(uid, &bytes)
    }
}
