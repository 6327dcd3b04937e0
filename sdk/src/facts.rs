//! Facts of the node that the host gives to a driver, and the levels of its log.

use crate::{ClaimRecord, NodeKind};

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

/// Kind of a file of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// Regular file.
    Regular,
    /// Directory.
    Directory,
}

/// Metadata of a file or directory of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Path as given.
    pub path: String,
    /// Path without links.
    pub real_path: String,
    /// Kind of the file.
    pub kind: FileKind,
    /// Size in bytes; 0 for files of `/proc`.
    pub size: u64,
}

/// Operational state of a network interface (RFC 2863).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperationalState {
    /// The interface does not report its state.
    #[default]
    Unknown,
    /// A component is missing.
    NotPresent,
    /// Down.
    Down,
    /// An interface below it is down.
    LowerLayerDown,
    /// The interface is in a test mode.
    Testing,
    /// Waits for an event, such as authentication.
    Dormant,
    /// Up.
    Up,
}

/// A network interface of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetInterface {
    /// Name of the interface.
    pub name: String,
    /// Index in the node's network namespace.
    pub index: u32,
    /// Hardware address; empty if it has none.
    pub hardware_address: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// True if it is set up.
    pub admin_up: bool,
    /// Operational state.
    pub state: OperationalState,
    /// Directory of its device in `/sys`, relative to `/sys`; `None` for a virtual interface.
    pub device_path: Option<String>,
}

/// A page of claims, and the UID after which the next page begins.
pub(crate) type Page = (Vec<ClaimRecord>, Option<String>);
