//! What the host provides, as handles that a driver is given.
//!
//! A method that a driver does not call leaves no import in its binary, so that a driver's import list says what it uses. That is
//! why [`Host`] is a plain type with direct calls and not a trait object.

use std::str::FromStr;

#[cfg(not(target_family = "wasm"))]
use crate::testing::FakeHost as Backend;
#[cfg(target_family = "wasm")]
use crate::wasm::Imports as Backend;
use crate::{LiveClaim, NodeKind, Problem, ProblemKind};

/// What the host provides. On the node its methods are calls of the host; elsewhere those of a
/// [`FakeHost`](crate::testing::FakeHost), which makes one by `fake.host()`.
#[derive(Debug)]
pub struct Host {
    backend: Backend,
}

impl Host {
    pub(crate) fn new(backend: Backend) -> Self {
        Host { backend }
    }

    /// The host's log.
    pub fn log(&self) -> Log<'_> {
        Log(&self.backend)
    }

    /// Files below `/sys`.
    pub fn sysfs(&self) -> Sysfs<'_> {
        Sysfs(&self.backend)
    }

    /// Device nodes below `/dev`.
    pub fn device_nodes(&self) -> DeviceNodes<'_> {
        DeviceNodes(&self.backend)
    }

    /// The claims that this driver holds prepared.
    pub fn ledger(&self) -> Ledger<'_> {
        Ledger(&self.backend)
    }
}

/// How much a line of the log matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Every step.
    Trace,
    /// For whoever looks for a mistake.
    Debug,
    /// What an operator asked for.
    Info,
    /// What heals itself.
    Warn,
    /// What needs a person.
    Error,
}

/// Lines to the host's log, under the driver's name. A line is cut at 4 KiB; a driver that floods is muted for a while.
#[derive(Clone, Copy, Debug)]
pub struct Log<'a>(&'a Backend);

impl Log<'_> {
    /// A line with facts beside it.
    pub fn write(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        self.0.log(level, message, fields);
    }

    /// A line for whoever looks for a mistake.
    pub fn debug(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Debug, message, fields);
    }

    /// A line about what an operator asked for.
    pub fn info(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Info, message, fields);
    }

    /// A line about what heals itself.
    pub fn warn(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Warn, message, fields);
    }

    /// A line about what needs a person.
    pub fn error(&self, message: &str, fields: &[(&str, &str)]) {
        self.write(Level::Error, message, fields);
    }
}

/// Files below `/sys`. Paths are relative to `/sys` and must match what the driver asked for and the operator granted. Links are
/// followed; it is the path as given that must be granted.
///
/// All methods fail with `denied` for a path that is not granted, with `not-found` where there is nothing, and with `unavailable`
/// where the kernel has no value now.
#[derive(Clone, Copy, Debug)]
pub struct Sysfs<'a>(&'a Backend);

impl Sysfs<'_> {
    /// A regular file's content, at most 64 KiB, without the line end at its end. The view is stable within one call.
    ///
    /// # Errors
    ///
    /// As for all methods, and `invalid` for what is not UTF-8.
    pub fn read(&self, path: &str) -> Result<String, Problem> {
        self.0.sysfs_read(path)
    }

    /// A regular file's bytes, at most 64 KiB.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn read_bytes(&self, path: &str) -> Result<Vec<u8>, Problem> {
        self.0.sysfs_read_bytes(path)
    }

    /// Names in a folder, sorted, at most 4,096.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        self.0.sysfs_read_dir(path)
    }

    /// Where a link points, relative to `/sys`, resolved: `bus/pci/drivers/vfio-pci`. Its target need not be granted.
    ///
    /// # Errors
    ///
    /// As for all methods.
    pub fn read_link(&self, path: &str) -> Result<String, Problem> {
        self.0.sysfs_read_link(path)
    }

    /// Paths that match a glob, sorted, at most 4,096. Nothing that matches is no failure.
    ///
    /// # Errors
    ///
    /// As for all methods; `invalid` for a glob that is none.
    pub fn glob(&self, pattern: &str) -> Result<Vec<String>, Problem> {
        self.0.sysfs_glob(pattern)
    }

    /// Like [`read`](Sysfs::read), with none for what is not there or has no value now.
    ///
    /// # Errors
    ///
    /// As for `read`, besides `not-found` and `unavailable`.
    pub fn find(&self, path: &str) -> Result<Option<String>, Problem> {
        present(self.read(path))
    }

    /// Like [`read_link`](Sysfs::read_link), with none for what is not there.
    ///
    /// # Errors
    ///
    /// As for `read_link`, besides `not-found` and `unavailable`.
    pub fn find_link(&self, path: &str) -> Result<Option<String>, Problem> {
        present(self.read_link(path))
    }

    /// Like [`find`](Sysfs::find), read as a number or whatever `T` is; none as well for what cannot be read as such.
    ///
    /// # Errors
    ///
    /// As for `find`.
    pub fn find_parsed<T: FromStr>(&self, path: &str) -> Result<Option<T>, Problem> {
        Ok(self.find(path)?.and_then(|text| text.trim().parse().ok()))
    }

    /// Writes a file, during prepare and unprepare only; path and value must match a grant. The host keeps the value before with
    /// the claim and can put it back without the driver.
    ///
    /// # Errors
    ///
    /// As for all methods; `denied` for a value that is not granted and outside of prepare and unprepare.
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

/// What the host tells about a device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Below `/dev`; absolute.
    pub path: String,
    /// Character or block device.
    pub kind: NodeKind,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Access bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Its folder below `/sys`, relative to it, if it has one.
    pub sysfs_path: Option<String>,
}

/// Device nodes below `/dev`, granted by globs. They are looked at, never opened.
#[derive(Clone, Copy, Debug)]
pub struct DeviceNodes<'a>(&'a Backend);

impl DeviceNodes<'_> {
    /// Nodes that match a glob such as `/dev/ttyUSB*`, sorted by path. Nothing that matches is no failure; folders, links and
    /// regular files do not count.
    ///
    /// # Errors
    ///
    /// `denied` for a glob that is not granted, `invalid` for one that is none.
    pub fn glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        self.0.device_nodes_glob(pattern)
    }

    /// One node.
    ///
    /// # Errors
    ///
    /// `denied` for a path that is not granted, `not-found` where there is no device node.
    pub fn stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        self.0.device_nodes_stat(path)
    }
}

/// The claims that this driver holds prepared on this node, as the host's checkpoint knows them.
#[derive(Clone, Copy, Debug)]
pub struct Ledger<'a>(&'a Backend);

impl Ledger<'_> {
    /// All of them.
    pub fn claims(&self) -> Vec<LiveClaim> {
        self.0.ledger_claims()
    }

    /// The one of this UID.
    pub fn get(&self, uid: &str) -> Option<LiveClaim> {
        self.0.ledger_get(uid)
    }

    /// Those that hold this device, by UID; claims with admin access to it among them. Costs as much as there are holders,
    /// where `claims` costs as much as there are claims.
    pub fn holders(&self, pool: &str, device: &str) -> Vec<LiveClaim> {
        self.0.ledger_holders(pool, device)
    }
}
