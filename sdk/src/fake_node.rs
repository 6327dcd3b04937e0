//! A fake node behind the handle of the host, for tests.
//!
//! Refuses operations without a grant, as the host does, and records what a driver logs and writes. [`FakeHost`](crate::testing::FakeHost) sets it up.

mod admission;
mod machine;
mod tree;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodedock_model::grant::pattern::GlobMatcher;
use nodedock_model::grant::{Effective, Naming};

pub(crate) use machine::{PCI_DEVICES, plain_node};
pub(crate) use tree::{Entry, Tree, matcher};

use crate::facts::{FileInfo, Level, NetInterface, NodeInfo, Page};
use crate::{ClaimRecord, Problem};

const FILE_BYTES_MAX: usize = 64 << 10;
const ENTRIES_MAX: usize = 4096;
const HOST_FILE_BYTES_MAX: usize = 1 << 20;
const PROGRESS_BYTES_MAX: usize = 64 << 10;
/// Claims of a page: few, so that tests meet more than one.
const PAGE_CLAIMS: usize = 4;

/// A line that the driver logged.
///
/// ```
/// use nodedock_sdk::{Level, testing::FakeHost};
///
/// let fake = FakeHost::new();
/// fake.host().log().warn("no device", &[("path", "/dev/fuse")]);
/// let lines = fake.log_lines();
/// assert_eq!((lines[0].level, lines[0].message.as_str()), (Level::Warn, "no device"));
/// assert_eq!(lines[0].fields, [("path".to_owned(), "/dev/fuse".to_owned())]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Level of the line.
    pub level: Level,
    /// Message of the line.
    pub message: String,
    /// Fields of the line.
    pub fields: Vec<(String, String)>,
}

/// A value that the driver wrote below `/sys`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysfsWrite {
    /// Path of the file, relative to `/sys`.
    pub path: String,
    /// Previous value.
    pub before: String,
    /// Written value.
    pub value: String,
}

/// The node, with the functions of the host. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct FakeNode {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) sysfs: Tree,
    /// Files outside `/sys` and `/dev`.
    pub(crate) files: Tree,
    pub(crate) nodes: BTreeMap<String, NodeInfo>,
    pub(crate) claims: BTreeMap<String, ClaimRecord>,
    /// Progress of claims that no prepare has succeeded for, by UID.
    pub(crate) progress: BTreeMap<String, Vec<u8>>,
    /// Links `driver` before the first bind, by the function's directory; `None` for an unbound function.
    pub(crate) bound_before: BTreeMap<String, Option<String>>,
    /// `None` grants everything.
    pub(crate) granted: Option<Arc<Effective>>,
    /// The grant is an operator's, and not just what the driver requests.
    pub(crate) has_grant_file: bool,
    pub(crate) writes_refused: bool,
    pub(crate) failures: BTreeMap<String, Problem>,
    pub(crate) log: Vec<LogLine>,
    pub(crate) writes: Vec<SysfsWrite>,
    pub(crate) write_hooks: Vec<WriteHook>,
}

impl Default for State {
    fn default() -> Self {
        State {
            sysfs: Tree::new("/sys/"),
            files: Tree::new("/"),
            nodes: BTreeMap::new(),
            claims: BTreeMap::new(),
            progress: BTreeMap::new(),
            bound_before: BTreeMap::new(),
            granted: None,
            has_grant_file: false,
            writes_refused: false,
            failures: BTreeMap::new(),
            log: Vec::new(),
            writes: Vec::new(),
            write_hooks: Vec::new(),
        }
    }
}

pub(crate) type WriteEffect = dyn Fn(&FakeNode, &SysfsWrite) -> Result<(), Problem> + Send + Sync;

/// An effect after a write to a matching path.
#[derive(Clone)]
pub(crate) struct WriteHook {
    pub(crate) glob: GlobMatcher,
    pub(crate) effect: Arc<WriteEffect>,
}

impl fmt::Debug for WriteHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteHook")
            .field("glob", &self.glob)
            .finish_non_exhaustive()
    }
}

impl FakeNode {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The effects of a write, each called without the lock of the state.
    fn run_write_hooks(&self, write: &SysfsWrite) -> Result<(), Problem> {
        let matching = |hook: &&WriteHook| hook.glob.is_match(&write.path);
        let hooks: Vec<_> = self
            .state()
            .write_hooks
            .iter()
            .filter(matching)
            .cloned()
            .collect();
        hooks.iter().try_for_each(|hook| (hook.effect)(self, write))
    }

    pub(crate) fn log(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        let fields = fields
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        self.state().log.push(LogLine {
            level,
            message: message.to_owned(),
            fields,
        });
    }

    pub(crate) fn sysfs_read(&self, path: &str) -> Result<String, Problem> {
        let bytes = self.sysfs_read_bytes(path)?;
        let text = String::from_utf8(bytes)
            .map_err(|_| Problem::invalid("not-text", format!("/sys/{path} is not UTF-8")))?;
        Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
    }

    pub(crate) fn sysfs_read_bytes(&self, path: &str) -> Result<Vec<u8>, Problem> {
        let state = self.state();
        state.admit_read(path)?;
        let content = state.sysfs.read(path)?;
        if content.len() > FILE_BYTES_MAX {
            let message = format!("/sys/{path} has more than {FILE_BYTES_MAX} bytes");
            return Err(Problem::invalid("file-too-large", message));
        }
        Ok(content.to_vec())
    }

    pub(crate) fn sysfs_read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        let state = self.state();
        state.admit_read(path)?;
        let names = state.sysfs.read_dir(path)?;
        if names.len() > ENTRIES_MAX {
            let message = format!("/sys/{path} has more than {ENTRIES_MAX} entries");
            return Err(Problem::invalid("too-many-entries", message));
        }
        Ok(names)
    }

    pub(crate) fn sysfs_read_link(&self, path: &str) -> Result<String, Problem> {
        let state = self.state();
        state.admit_read(path)?;
        state.sysfs.read_link(path)
    }

    pub(crate) fn sysfs_glob(&self, pattern: &str) -> Result<Vec<String>, Problem> {
        let state = self.state();
        state.check_path(pattern)?;
        state.demand(
            |granted| granted.allows_sysfs_glob(pattern),
            "sysfsRead",
            pattern,
        )?;
        let mut paths = state.sysfs.glob(pattern)?;
        if paths.len() > ENTRIES_MAX {
            let message = format!("the glob matches more than {ENTRIES_MAX} paths");
            return Err(Problem::invalid("glob-too-wide", message));
        }
        paths.retain(|path| state.allows(|granted| granted.allows_sysfs_read(path)));
        Ok(paths)
    }

    /// Nothing appears while a test waits: hooks of writes have made by now what a kernel would.
    pub(crate) fn sysfs_wait_for(&self, pattern: &str, _: u32) -> Result<Vec<String>, Problem> {
        self.sysfs_glob(pattern)
    }

    pub(crate) fn device_nodes_wait_for(
        &self,
        pattern: &str,
        _: u32,
    ) -> Result<Vec<NodeInfo>, Problem> {
        self.device_nodes_glob(pattern)
    }

    pub(crate) fn sysfs_write(&self, path: &str, value: &str) -> Result<(), Problem> {
        let mut state = self.state();
        state.admit_write(path, value)?;
        let content = state.sysfs.read(path)?.to_vec();
        let before = String::from_utf8_lossy(&content).trim_end().to_owned();
        let resolved = state.sysfs.resolve(path, true)?;
        state.sysfs.insert(&resolved, Entry::File(value.into()));
        drop(state);
        let write = SysfsWrite {
            path: path.to_owned(),
            before,
            value: value.to_owned(),
        };
        let taken = self.run_write_hooks(&write);
        let mut state = self.state();
        match taken {
            Ok(()) => state.writes.push(write),
            Err(_) => state.sysfs.insert(&resolved, Entry::File(content)),
        }
        taken
    }

    pub(crate) fn device_nodes_glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        let state = self.state();
        state.check_node(pattern)?;
        let glob = matcher(pattern)?;
        state.demand(
            |granted| granted.allows_device_nodes_glob(pattern),
            "deviceNodes",
            pattern,
        )?;
        let is_allowed = |node: &NodeInfo| {
            let naming = state.node_naming(node);
            naming.is_some_and(|naming| {
                state.allows(|granted| granted.allows_device_node(&node.path, naming))
            })
        };
        let nodes = state
            .nodes
            .values()
            .filter(|node| glob.is_match(&node.path) && is_allowed(node));
        Ok(nodes.cloned().collect())
    }

    pub(crate) fn device_nodes_stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        let state = self.state();
        state.check_node(path)?;
        state.demand(
            |granted| granted.allows_device_node(path, Naming::Glob),
            "deviceNodes",
            path,
        )?;
        let missing = || Problem::not_found("no-such-node", format!("{path} does not exist"));
        let node = state.nodes.get(path).cloned().ok_or_else(missing)?;
        let never = || {
            Problem::denied(
                "never-allowed",
                format!("no driver may have {path}, whatever is granted"),
            )
        };
        let naming = state.node_naming(&node).ok_or_else(never)?;
        state.demand(
            |granted| granted.allows_device_node(path, naming),
            "deviceNodes",
            path,
        )?;
        Ok(node)
    }

    pub(crate) fn host_files_read(&self, path: &str) -> Result<String, Problem> {
        let state = self.state();
        let info = state.host_file(path)?;
        let content = state.files.read(info.real_path.trim_start_matches('/'))?;
        if content.len() > HOST_FILE_BYTES_MAX {
            let message = format!("{path} has more than {HOST_FILE_BYTES_MAX} bytes");
            return Err(Problem::invalid("file-too-large", message));
        }
        let text = String::from_utf8(content.to_vec());
        text.map_err(|_| Problem::invalid("not-text", format!("{path} is not UTF-8")))
    }

    pub(crate) fn host_files_stat(&self, path: &str) -> Result<FileInfo, Problem> {
        self.state().host_file(path)
    }

    pub(crate) fn host_files_glob(&self, pattern: &str) -> Result<Vec<FileInfo>, Problem> {
        let state = self.state();
        state.check_host_path(pattern)?;
        state.demand(
            |granted| granted.allows_host_files_glob(pattern),
            "hostFiles",
            pattern,
        )?;
        let paths = state.files.glob(pattern.trim_start_matches('/'))?;
        let infos = paths
            .into_iter()
            .filter_map(|path| state.host_file(&format!("/{path}")).ok());
        Ok(infos.take(ENTRIES_MAX).collect())
    }

    pub(crate) fn pci_driver_bind(
        &self,
        address: &str,
        driver: &str,
    ) -> Result<Vec<String>, Problem> {
        let mut state = self.state();
        state.check_writes(address)?;
        state.check_failure(address)?;
        let functions = state.functions_with(address, driver)?;
        for function in &functions {
            state.demand(
                |granted| granted.allows_bind(function, driver),
                "pciDriver",
                function,
            )?;
        }
        if state
            .sysfs
            .read_dir(&format!("bus/pci/drivers/{driver}"))
            .is_err()
        {
            let message = format!("the kernel has no driver {driver}");
            return Err(Problem::not_found("no-such-kernel-driver", message));
        }
        for function in &functions {
            let directory = state
                .sysfs
                .resolve(&format!("{PCI_DEVICES}/{function}"), true)?;
            let before = state.kernel_driver(&directory);
            state
                .bound_before
                .entry(directory.clone())
                .or_insert(before);
            state.set_kernel_driver(&directory, Some(driver));
        }
        Ok(functions)
    }

    pub(crate) fn pci_driver_restore(&self, address: &str) -> Result<Vec<String>, Problem> {
        let mut state = self.state();
        state.check_writes(address)?;
        state.check_failure(address)?;
        let mut restored = Vec::new();
        for function in state.group_of(address)? {
            let directory = state
                .sysfs
                .resolve(&format!("{PCI_DEVICES}/{function}"), true)?;
            if let Some(before) = state.bound_before.remove(&directory) {
                state.set_kernel_driver(&directory, before.as_deref());
                restored.push(function);
            }
        }
        Ok(restored)
    }

    pub(crate) fn net_interfaces_all(&self) -> Result<Vec<NetInterface>, Problem> {
        let state = self.state();
        let names = state.sysfs.read_dir("class/net").unwrap_or_default();
        let names = names
            .into_iter()
            .filter(|name| state.allows(|granted| granted.allows_net_device(name)));
        Ok(names.map(|name| state.net_interface(&name)).collect())
    }

    pub(crate) fn net_interfaces_get(&self, name: &str) -> Result<NetInterface, Problem> {
        let state = self.state();
        state.check_failure(name)?;
        state.demand(
            |granted| granted.allows_net_device(name),
            "netDevices",
            name,
        )?;
        state.sysfs.resolve(&format!("class/net/{name}"), true)?;
        Ok(state.net_interface(name))
    }

    pub(crate) fn prepared_claims_all(&self, after: Option<&str>) -> Page {
        self.state().page(after, |_| true)
    }

    pub(crate) fn prepared_claims_get(&self, uid: &str) -> Option<ClaimRecord> {
        let state = self.state();
        state
            .claims
            .get(uid)
            .map(|record| state.with_progress(record))
    }

    pub(crate) fn prepared_claims_using_device(
        &self,
        pool: &str,
        device: &str,
        after: Option<&str>,
    ) -> Page {
        let uses = |record: &ClaimRecord| {
            record
                .claim
                .devices
                .iter()
                .any(|used| used.pool == pool && used.device == device)
        };
        self.state().page(after, uses)
    }

    pub(crate) fn progress_save(&self, uid: &str, progress: &[u8]) -> Result<(), Problem> {
        let mut state = self.state();
        state.check_writes(uid)?;
        if progress.len() > PROGRESS_BYTES_MAX {
            let message = format!("progress has at most {PROGRESS_BYTES_MAX} bytes");
            return Err(Problem::invalid("value-too-large", message));
        }
        state.progress.insert(uid.to_owned(), progress.to_vec());
        Ok(())
    }
}
