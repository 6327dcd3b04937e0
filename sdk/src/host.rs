//! The host's functions, as handles that a driver receives.
//!
//! A method that a driver does not call leaves no import in its binary, so that the import list shows what a driver uses.
//! [`Host`] is therefore a plain type with direct calls and not a trait object.

use std::str::FromStr;

#[cfg(not(target_family = "wasm"))]
use crate::testing::FakeHost as Backend;
#[cfg(target_family = "wasm")]
use crate::wasm::Imports as Backend;
use crate::{LiveClaim, NodeKind, Problem, ProblemKind};

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

    /// Returns access to the prepared claims of this driver.
    pub fn ledger(&self) -> Ledger<'_> {
        Ledger(&self.backend)
    }
}

/// Level of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Every step, for detailed analysis.
    Trace,
    /// Details for debugging.
    Debug,
    /// The effect of an operator's request.
    Info,
    /// A condition that resolves without an operator.
    Warn,
    /// A condition that needs an operator.
    Error,
}

/// Writes lines to the host's log, under the driver's name. The host truncates a line at 4 KiB, and drops lines beyond the driver's rate.
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
/// All methods fail with `denied` for a path without a grant, with `not-found` if nothing exists there, and with `unavailable` if
/// the kernel has no value now.
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
    /// As for all methods; `invalid` for an invalid glob.
    pub fn glob(&self, pattern: &str) -> Result<Vec<String>, Problem> {
        self.0.sysfs_glob(pattern)
    }

    /// Like [`read`](Sysfs::read), with `None` for a file that does not exist or has no value now.
    ///
    /// # Errors
    ///
    /// As for `read`, except for `not-found` and `unavailable`.
    pub fn find(&self, path: &str) -> Result<Option<String>, Problem> {
        present(self.read(path))
    }

    /// Like [`read_link`](Sysfs::read_link), with `None` for a link that does not exist.
    ///
    /// # Errors
    ///
    /// As for `read_link`, except for `not-found` and `unavailable`.
    pub fn find_link(&self, path: &str) -> Result<Option<String>, Problem> {
        present(self.read_link(path))
    }

    /// Like [`find`](Sysfs::find), parsed as `T`, such as a number; also `None` for content that does not parse.
    ///
    /// # Errors
    ///
    /// As for `find`.
    pub fn find_parsed<T: FromStr>(&self, path: &str) -> Result<Option<T>, Problem> {
        Ok(self.find(path)?.and_then(|text| text.trim().parse().ok()))
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

fn present<T>(result: Result<T, Problem>) -> Result<Option<T>, Problem> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(problem) if matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Unavailable) => Ok(None),
        Err(problem) => Err(problem),
    }
}

/// Metadata of a device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Absolute path below `/dev`.
    pub path: String,
    /// Character or block device.
    pub kind: NodeKind,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// File mode.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Its directory in `/sys`, relative to `/sys`, if it has one.
    pub sysfs_path: Option<String>,
}

/// Metadata of device nodes below `/dev`, granted by globs. The host never opens a node.
#[derive(Clone, Copy, Debug)]
pub struct DeviceNodes<'a>(&'a Backend);

impl DeviceNodes<'_> {
    /// Returns the nodes that match a glob such as `/dev/ttyUSB*`, sorted by path, without directories, links and regular files; an
    /// empty list if no node matches.
    ///
    /// # Errors
    ///
    /// `denied` for a glob without a grant, `invalid` for an invalid glob.
    pub fn glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        self.0.device_nodes_glob(pattern)
    }

    /// Returns one node.
    ///
    /// # Errors
    ///
    /// `denied` for a path without a grant, `not-found` if there is no device node.
    pub fn stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        self.0.device_nodes_stat(path)
    }
}

/// The prepared claims of this driver on this node, from the host's checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Ledger<'a>(&'a Backend);

impl Ledger<'_> {
    /// Returns all of them; a result of more than 4 MiB ends the call.
    pub fn claims(&self) -> Vec<LiveClaim> {
        self.0.ledger_claims()
    }

    /// Returns the claim with this UID.
    pub fn get(&self, uid: &str) -> Option<LiveClaim> {
        self.0.ledger_get(uid)
    }

    /// Returns the claims that use this device, sorted by UID, including claims with admin access to it. The cost is proportional to
    /// the claims of the device; the cost of `claims` is proportional to all claims.
    pub fn holders(&self, pool: &str, device: &str) -> Vec<LiveClaim> {
        self.0.ledger_holders(pool, device)
    }
}
