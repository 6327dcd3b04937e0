//! A fake node for tests.

mod admission;
mod machine;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodedock_hardware::{Entry as Recorded, Snapshot};
use nodedock_model::grant::ceiling::{self, NodeFacts};
use nodedock_model::grant::pattern::GlobMatcher;
use nodedock_model::grant::{Effective, Naming};
use nodedock_model::rule::is_plain_path;

use machine::{PCI_DEVICES, plain_node};

use super::Grant;
use super::tree::{Entry, Tree, matcher};
use crate::host::Page;
use crate::{
    Capabilities, ClaimRecord, FileInfo, FileKind, Host, Level, NetInterface, NodeInfo, NodeKind,
    OperationalState, Problem,
};

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

/// A fake node: files below `/sys` and elsewhere, device nodes, prepared claims. It refuses operations without a grant, as the host does,
/// and records what a driver logs and writes.
///
/// All methods take `&self`, also those that change the node, so that a test can remove a device between two calls. Clones
/// refer to the same node.
///
/// ```
/// use nodedock_sdk::testing::FakeHost;
///
/// let fake = FakeHost::new();
/// fake.file("devices/virtual/misc/fuse/dev", "10:229\n")
///     .link("class/misc/fuse", "../../devices/virtual/misc/fuse")
///     .character_node("/dev/fuse", 10, 229);
///
/// let host = fake.host();
/// assert_eq!(host.sysfs().read("class/misc/fuse/dev")?, "10:229");
/// assert_eq!(host.device_nodes().stat("/dev/fuse")?.major, 10);
///
/// fake.remove("/dev/fuse");
/// assert_eq!(host.device_nodes().glob("/dev/*")?, []);
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct FakeHost {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    sysfs: Tree,
    /// Files outside `/sys` and `/dev`.
    files: Tree,
    nodes: BTreeMap<String, NodeInfo>,
    claims: BTreeMap<String, ClaimRecord>,
    /// Of claims that no prepare has succeeded for, by UID.
    progress: BTreeMap<String, Vec<u8>>,
    /// Links `driver` before the first bind, by the function's directory; `None` for an unbound function.
    bound_before: BTreeMap<String, Option<String>>,
    /// `None` grants everything.
    granted: Option<Arc<Effective>>,
    /// The grant is an operator's, and not just what the driver requests.
    has_grant_file: bool,
    writes_refused: bool,
    failures: BTreeMap<String, Problem>,
    log: Vec<LogLine>,
    writes: Vec<SysfsWrite>,
    write_hooks: Vec<WriteHook>,
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

/// Methods that set up the node.
impl FakeHost {
    /// Creates an empty node on which everything is granted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the handle for a driver.
    pub fn host(&self) -> Host {
        Host::new(self.clone())
    }

    /// Creates or replaces a file below `/sys`, with its parent directories.
    pub fn file(&self, path: &str, content: impl Into<Vec<u8>>) -> &Self {
        self.state().sysfs.insert(path, Entry::File(content.into()));
        self
    }

    /// Creates an empty directory below `/sys`, with its parent directories.
    pub fn dir(&self, path: &str) -> &Self {
        self.state().sysfs.insert(path, Entry::Dir);
        self
    }

    /// Creates a link below `/sys`. As in sysfs its target is relative to its directory: `../../devices/virtual/misc/fuse`.
    pub fn link(&self, path: &str, target: &str) -> &Self {
        self.state()
            .sysfs
            .insert(path, Entry::Link(target.to_owned()));
        self
    }

    /// Creates or replaces a file outside `/sys` and `/dev` that everyone may read, with its parent directories: `/proc/devices`.
    pub fn host_file(&self, path: &str, content: impl Into<Vec<u8>>) -> &Self {
        self.state().files.insert(path, Entry::File(content.into()));
        self
    }

    /// Creates a link outside `/sys` and `/dev`; its target is absolute or relative to its directory.
    pub fn host_link(&self, path: &str, target: &str) -> &Self {
        self.state()
            .files
            .insert(path, Entry::Link(target.to_owned()));
        self
    }

    /// Creates a character device of root with mode 0600.
    pub fn character_node(&self, path: &str, major: u32, minor: u32) -> &Self {
        self.node(plain_node(path, NodeKind::Character, major, minor))
    }

    /// Creates a block device of root with mode 0600.
    pub fn block_node(&self, path: &str, major: u32, minor: u32) -> &Self {
        self.node(plain_node(path, NodeKind::Block, major, minor))
    }

    /// Creates a device node from its metadata. If it names its directory in `/sys`, `dev/char` or `dev/block` gets a link to it.
    pub fn node(&self, node: NodeInfo) -> &Self {
        let mut state = self.state();
        if let Some(directory) = &node.sysfs_path {
            let class = if node.kind == NodeKind::Block {
                "block"
            } else {
                "char"
            };
            let link = format!("dev/{class}/{}:{}", node.major, node.minor);
            state
                .sysfs
                .insert(&link, Entry::Link(format!("../../{directory}")));
        }
        state.nodes.insert(node.path.clone(), node);
        drop(state);
        self
    }

    /// Removes a device node (a path that begins with `/dev/`), a file, link or whole directory elsewhere (any other absolute path), or
    /// one below `/sys` (a relative path).
    pub fn remove(&self, path: &str) -> &Self {
        let mut state = self.state();
        if path.starts_with("/dev/") {
            state.nodes.remove(path);
        } else if path.starts_with('/') {
            state.files.remove(path);
        } else {
            state.sysfs.remove(path);
        }
        drop(state);
        self
    }

    /// Adds everything in a snapshot of a machine: the tree below `/sys`, device nodes of root with mode 0600, and all other files. Links
    /// below `/dev` are left out, as the host shows none.
    ///
    /// ```no_run
    /// use nodedock_sdk::testing::{FakeHost, Snapshot, SnapshotError};
    ///
    /// let fake = FakeHost::new();
    /// fake.snapshot(&Snapshot::open("machine.tar.gz".as_ref())?).nodes_from_sysfs();
    /// # Ok::<(), SnapshotError>(())
    /// ```
    pub fn snapshot(&self, snapshot: &Snapshot) -> &Self {
        let mut state = self.state();
        for (path, entry) in snapshot.entries() {
            state.add_recorded(path, entry);
        }
        drop(state);
        self
    }

    /// Creates the device nodes that the `uevent` files below `/sys` describe (`MAJOR=`, `MINOR=`, `DEVNAME=`), as the kernel does: for a
    /// snapshot without `/dev`. Nodes that exist stay as they are.
    pub fn nodes_from_sysfs(&self) -> &Self {
        let state = self.state();
        let directories = state.sysfs.paths_of("uevent");
        let nodes = directories
            .iter()
            .filter_map(|path| state.described_node(path.strip_suffix("/uevent")?));
        let nodes: Vec<_> = nodes
            .filter(|node| !state.nodes.contains_key(&node.path))
            .collect();
        drop(state);
        for node in nodes {
            self.node(node);
        }
        self
    }

    /// Adds a claim that the driver has prepared, or may have begun to prepare; it replaces one of the same UID.
    pub fn claim(&self, record: ClaimRecord) -> &Self {
        self.state()
            .claims
            .insert(record.claim.id.uid.clone(), record);
        self
    }

    /// Removes such a claim.
    pub fn forget_claim(&self, uid: &str) -> &Self {
        self.state().claims.remove(uid);
        self
    }

    /// Grants exactly these capabilities.
    ///
    /// # Panics
    ///
    /// If a glob or a pattern is invalid.
    #[track_caller]
    pub fn grant(&self, capabilities: &Capabilities) -> &Self {
        self.grant_of(capabilities, &Grant::of(capabilities));
        self.state().has_grant_file = false;
        self
    }

    /// Grants what is both requested and in the operator's grant.
    #[track_caller]
    pub(super) fn grant_of(&self, requested: &Capabilities, grant: &Grant) -> &Self {
        let effective = grant
            .effective(requested)
            .expect("globs and patterns must be valid");
        let mut state = self.state();
        state.granted = Some(Arc::new(effective));
        state.has_grant_file = true;
        drop(state);
        self
    }

    /// Returns how a grant has to name a device node; a node that is not there by any glob.
    pub(super) fn node_naming(&self, path: &str) -> Option<Naming> {
        let state = self.state();
        state
            .nodes
            .get(path)
            .map_or(Some(Naming::Glob), |node| state.node_naming(node))
    }

    /// Returns whether the grant is an operator's: it has to name some things by their exact paths, and has what a driver does not request.
    pub(super) fn has_grant_file(&self) -> bool {
        self.state().has_grant_file
    }

    /// Effective capabilities; `None` if everything is granted.
    pub(super) fn granted(&self) -> Option<Arc<Effective>> {
        self.state().granted.clone()
    }

    /// Sets whether a driver may write below `/sys`; the host allows it during prepare and unprepare only.
    pub fn allow_writes(&self, allow: bool) -> &Self {
        self.state().writes_refused = !allow;
        self
    }

    /// Makes every use of this path (below `/sys`, a device node, or a glob as the driver gives it) fail with this problem.
    ///
    /// ```
    /// use nodedock_sdk::{Problem, testing::FakeHost};
    ///
    /// let fake = FakeHost::new();
    /// fake.character_node("/dev/fuse", 10, 229).fail("/dev/fuse", Problem::unavailable("resetting", "it is resetting"));
    /// assert!(fake.host().device_nodes().stat("/dev/fuse").is_err());
    /// fake.heal("/dev/fuse");
    /// assert!(fake.host().device_nodes().stat("/dev/fuse").is_ok());
    /// ```
    pub fn fail(&self, path: &str, problem: Problem) -> &Self {
        self.state().failures.insert(path.to_owned(), problem);
        self
    }

    /// Makes the path usable again after [`fail`](Self::fail), which has an example.
    pub fn heal(&self, path: &str) -> &Self {
        self.state().failures.remove(path);
        self
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `effect` after each write to a file below `/sys` that matches the glob, for what the kernel does then: create functions,
    /// change the value that later reads return, refuse the value. The glob matches the path as the driver gives it. If `effect` returns
    /// a problem, the file has its previous content again, the write is not recorded, and the driver gets the problem.
    ///
    /// ```
    /// use nodedock_sdk::{Problem, testing::FakeHost};
    ///
    /// let fake = FakeHost::new();
    /// fake.file("class/leds/a/brightness", "0").on_write("class/leds/*/brightness", |fake, write| {
    ///     if write.value == "300" {
    ///         return Err(Problem::unavailable("io-error", "EINVAL"));
    ///     }
    ///     fake.file("class/leds/a/is_on", if write.value == "0" { "0" } else { "1" });
    ///     Ok(())
    /// });
    /// let host = fake.host();
    /// host.sysfs().write("class/leds/a/brightness", "20")?;
    /// assert_eq!(host.sysfs().read("class/leds/a/is_on")?, "1");
    /// assert!(host.sysfs().write("class/leds/a/brightness", "300").is_err());
    /// assert_eq!(host.sysfs().read("class/leds/a/brightness")?, "20");
    /// # Ok::<(), Problem>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If the glob is invalid.
    #[track_caller]
    pub fn on_write(
        &self,
        glob: &str,
        effect: impl Fn(&FakeHost, &SysfsWrite) -> Result<(), Problem> + Send + Sync + 'static,
    ) -> &Self {
        let glob = matcher(glob).expect("the glob must be valid");
        self.state().write_hooks.push(WriteHook {
            glob,
            effect: Arc::new(effect),
        });
        self
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
}

type WriteEffect = dyn Fn(&FakeHost, &SysfsWrite) -> Result<(), Problem> + Send + Sync;

/// What happens after a write to a matching path.
#[derive(Clone)]
struct WriteHook {
    glob: GlobMatcher,
    effect: Arc<WriteEffect>,
}

impl fmt::Debug for WriteHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteHook")
            .field("glob", &self.glob)
            .finish_non_exhaustive()
    }
}

/// Methods that inspect what happened.
impl FakeHost {
    /// Returns the logged lines, in order.
    pub fn log_lines(&self) -> Vec<LogLine> {
        self.state().log.clone()
    }

    /// Returns the writes below `/sys`, in order.
    pub fn writes(&self) -> Vec<SysfsWrite> {
        self.state().writes.clone()
    }

    /// Returns the progress that the driver saved for a claim, which no prepare or end of the claim has dropped.
    pub fn progress(&self, uid: &str) -> Option<Vec<u8>> {
        self.state().progress.get(uid).cloned()
    }

    /// Drops the progress of a claim, as the host does when a prepare succeeds or the claim ends.
    pub(super) fn drop_progress(&self, uid: &str) {
        self.state().progress.remove(uid);
    }

    /// Returns the kernel driver of a PCI function; `None` if it is unbound.
    pub fn kernel_driver(&self, address: &str) -> Option<String> {
        self.state()
            .kernel_driver(&format!("{PCI_DEVICES}/{address}"))
    }

    /// Returns whether there is a device node at this path, granted or not.
    pub fn has_node(&self, path: &str) -> bool {
        self.state().nodes.contains_key(path)
    }
}

/// The host's functions for a driver.
impl FakeHost {
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

#[cfg(test)]
mod tests;
