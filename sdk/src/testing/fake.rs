//! A fake node for tests.

use std::sync::Arc;

use nodedock_hardware::Snapshot;
use nodedock_model::grant::{Effective, Naming};

use super::Grant;
use crate::fake_node::{Entry, FakeNode, PCI_DEVICES, WriteHook, matcher, plain_node};
pub use crate::fake_node::{LogLine, SysfsWrite};
use crate::{Capabilities, ClaimRecord, Host, NodeInfo, NodeKind, Problem};

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
    node: FakeNode,
}

/// Methods that set up the node.
impl FakeHost {
    /// Creates an empty node on which everything is granted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the handle for a driver.
    pub fn host(&self) -> Host {
        Host::new(self.node.clone())
    }

    /// Creates or replaces a file below `/sys`, with its parent directories.
    pub fn file(&self, path: &str, content: impl Into<Vec<u8>>) -> &Self {
        self.node
            .state()
            .sysfs
            .insert(path, Entry::File(content.into()));
        self
    }

    /// Creates an empty directory below `/sys`, with its parent directories.
    pub fn dir(&self, path: &str) -> &Self {
        self.node.state().sysfs.insert(path, Entry::Dir);
        self
    }

    /// Creates a link below `/sys`. As in sysfs its target is relative to its directory: `../../devices/virtual/misc/fuse`.
    pub fn link(&self, path: &str, target: &str) -> &Self {
        self.node
            .state()
            .sysfs
            .insert(path, Entry::Link(target.to_owned()));
        self
    }

    /// Creates or replaces a file outside `/sys` and `/dev` that everyone may read, with its parent directories: `/proc/devices`.
    pub fn host_file(&self, path: &str, content: impl Into<Vec<u8>>) -> &Self {
        self.node
            .state()
            .files
            .insert(path, Entry::File(content.into()));
        self
    }

    /// Creates a link outside `/sys` and `/dev`; its target is absolute or relative to its directory.
    pub fn host_link(&self, path: &str, target: &str) -> &Self {
        self.node
            .state()
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
        let mut state = self.node.state();
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
        let mut state = self.node.state();
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
        let mut state = self.node.state();
        for (path, entry) in snapshot.entries() {
            state.add_recorded(path, entry);
        }
        drop(state);
        self
    }

    /// Creates the device nodes that the `uevent` files below `/sys` describe (`MAJOR=`, `MINOR=`, `DEVNAME=`), as the kernel does: for a
    /// snapshot without `/dev`. Nodes that exist stay as they are.
    pub fn nodes_from_sysfs(&self) -> &Self {
        let state = self.node.state();
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
        self.node
            .state()
            .claims
            .insert(record.claim.id.uid.clone(), record);
        self
    }

    /// Removes such a claim.
    pub fn forget_claim(&self, uid: &str) -> &Self {
        self.node.state().claims.remove(uid);
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
        self.node.state().has_grant_file = false;
        self
    }

    /// Grants what is both requested and in the operator's grant.
    #[track_caller]
    pub(super) fn grant_of(&self, requested: &Capabilities, grant: &Grant) -> &Self {
        let effective = grant
            .effective(requested)
            .expect("globs and patterns must be valid");
        let mut state = self.node.state();
        state.granted = Some(Arc::new(effective));
        state.has_grant_file = true;
        drop(state);
        self
    }

    /// Returns how a grant has to name a device node; a node that is not there by any glob.
    pub(super) fn node_naming(&self, path: &str) -> Option<Naming> {
        let state = self.node.state();
        state
            .nodes
            .get(path)
            .map_or(Some(Naming::Glob), |node| state.node_naming(node))
    }

    /// Returns whether the grant is an operator's: it has to name some things by their exact paths, and has what a driver does not request.
    pub(super) fn has_grant_file(&self) -> bool {
        self.node.state().has_grant_file
    }

    /// Effective capabilities; `None` if everything is granted.
    pub(super) fn granted(&self) -> Option<Arc<Effective>> {
        self.node.state().granted.clone()
    }

    /// Sets whether a driver may write below `/sys`; the host allows it during prepare and unprepare only.
    pub fn allow_writes(&self, allow: bool) -> &Self {
        self.node.state().writes_refused = !allow;
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
        self.node.state().failures.insert(path.to_owned(), problem);
        self
    }

    /// Makes the path usable again after [`fail`](Self::fail), which has an example.
    pub fn heal(&self, path: &str) -> &Self {
        self.node.state().failures.remove(path);
        self
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
        let effect = move |node: &FakeNode, write: &SysfsWrite| {
            let fake = FakeHost { node: node.clone() };
            effect(&fake, write)
        };
        self.node.state().write_hooks.push(WriteHook {
            glob,
            effect: Arc::new(effect),
        });
        self
    }
}

/// Methods that inspect what happened.
impl FakeHost {
    /// Returns the logged lines, in order.
    pub fn log_lines(&self) -> Vec<LogLine> {
        self.node.state().log.clone()
    }

    /// Returns the writes below `/sys`, in order.
    pub fn writes(&self) -> Vec<SysfsWrite> {
        self.node.state().writes.clone()
    }

    /// Returns the text of a file as it is now, whether or not the driver may read it: below `/sys` (a relative path), or elsewhere (an absolute
    /// path). It follows links, and leaves out a line end.
    ///
    /// ```
    /// use nodedock_sdk::{Capabilities, testing::FakeHost};
    ///
    /// let fake = FakeHost::new();
    /// fake.file("class/leds/a/brightness", "20\n").grant(&Capabilities::default());
    /// assert!(fake.host().sysfs().read("class/leds/a/brightness").is_err());
    /// assert_eq!(fake.read("class/leds/a/brightness")?, "20");
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As the host's reads without a grant have them: `not-found`, `no-such-path`; `invalid`, `not-a-file` or `not-text`.
    pub fn read(&self, path: &str) -> Result<String, Problem> {
        let state = self.node.state();
        let content = match path.starts_with('/') {
            true => state.files.read(path.trim_start_matches('/'))?,
            false => state.sysfs.read(path)?,
        };
        let text = std::str::from_utf8(content)
            .map_err(|_| Problem::invalid("not-text", format!("{path} is not UTF-8")))?;
        Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
    }

    /// Returns the progress that the driver saved for a claim, which no prepare or end of the claim has dropped.
    pub fn progress(&self, uid: &str) -> Option<Vec<u8>> {
        self.node.state().progress.get(uid).cloned()
    }

    /// Drops the progress of a claim, as the host does when a prepare succeeds or the claim ends.
    pub(super) fn drop_progress(&self, uid: &str) {
        self.node.state().progress.remove(uid);
    }

    /// Returns the kernel driver of a PCI function; `None` if it is unbound.
    pub fn kernel_driver(&self, address: &str) -> Option<String> {
        self.node
            .state()
            .kernel_driver(&format!("{PCI_DEVICES}/{address}"))
    }

    /// Returns whether there is a device node at this path, granted or not.
    pub fn has_node(&self, path: &str) -> bool {
        self.node.state().nodes.contains_key(path)
    }
}

#[cfg(test)]
mod tests;
