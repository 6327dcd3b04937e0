//! A fake node for tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodedock_model::grant::Effective;
use nodedock_model::rule::is_plain_path;

use super::Grant;
use super::tree::{Entry, Tree, matcher};
use crate::{Capabilities, Host, Level, LiveClaim, NodeInfo, NodeKind, Problem};

const FILE_BYTES_MAX: usize = 64 << 10;
const ENTRIES_MAX: usize = 4096;

/// A line that the driver logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Level of the line.
    pub level: Level,
    /// Value of the attribute.
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

/// A fake node: files below `/sys`, device nodes, live claims. It refuses operations without a grant, as the host does, and records
/// what a driver logs and writes.
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

#[derive(Debug, Default)]
struct State {
    sysfs: Tree,
    nodes: BTreeMap<String, NodeInfo>,
    ledger: BTreeMap<String, LiveClaim>,
    /// `None` grants everything.
    granted: Option<Arc<Effective>>,
    writes_refused: bool,
    failures: BTreeMap<String, Problem>,
    log: Vec<LogLine>,
    writes: Vec<SysfsWrite>,
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
        self.state().sysfs.insert(path, Entry::Link(target.to_owned()));
        self
    }

    /// Creates a character device of root with mode 0600.
    pub fn character_node(&self, path: &str, major: u32, minor: u32) -> &Self {
        self.plain_node(path, NodeKind::Character, major, minor)
    }

    /// Creates a block device of root with mode 0600.
    pub fn block_node(&self, path: &str, major: u32, minor: u32) -> &Self {
        self.plain_node(path, NodeKind::Block, major, minor)
    }

    /// Creates a device node from its metadata. If it names its directory in `/sys`, `dev/char` or `dev/block` gets a link to it.
    pub fn node(&self, node: NodeInfo) -> &Self {
        let mut state = self.state();
        if let Some(directory) = &node.sysfs_path {
            let class = if node.kind == NodeKind::Block { "block" } else { "char" };
            let link = format!("dev/{class}/{}:{}", node.major, node.minor);
            state.sysfs.insert(&link, Entry::Link(format!("../../{directory}")));
        }
        state.nodes.insert(node.path.clone(), node);
        drop(state);
        self
    }

    /// Removes a device node (a path that begins with `/dev/`) or a file, link or whole directory below `/sys`.
    pub fn remove(&self, path: &str) -> &Self {
        let mut state = self.state();
        if path.starts_with("/dev/") {
            state.nodes.remove(path);
        } else {
            state.sysfs.remove(path);
        }
        drop(state);
        self
    }

    /// Adds a claim to the ledger; it replaces one of the same UID.
    pub fn claim(&self, live: LiveClaim) -> &Self {
        self.state().ledger.insert(live.claim.id.uid.clone(), live);
        self
    }

    /// Removes a claim from the ledger.
    pub fn forget_claim(&self, uid: &str) -> &Self {
        self.state().ledger.remove(uid);
        self
    }

    /// Grants exactly these capabilities.
    ///
    /// # Panics
    ///
    /// If a glob or a pattern is invalid.
    #[track_caller]
    pub fn grant(&self, capabilities: &Capabilities) -> &Self {
        self.grant_of(capabilities, &Grant::of(capabilities))
    }

    /// Grants what is both requested and in the operator's grant.
    #[track_caller]
    pub(super) fn grant_of(&self, requested: &Capabilities, grant: &Grant) -> &Self {
        let effective = grant.effective(requested).expect("globs and patterns must be valid");
        self.state().granted = Some(Arc::new(effective));
        self
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
    pub fn fail(&self, path: &str, problem: Problem) -> &Self {
        self.state().failures.insert(path.to_owned(), problem);
        self
    }

    /// Makes the path usable again.
    pub fn heal(&self, path: &str) -> &Self {
        self.state().failures.remove(path);
        self
    }

    fn plain_node(&self, path: &str, kind: NodeKind, major: u32, minor: u32) -> &Self {
        let path = path.to_owned();
        self.node(NodeInfo { path, kind, major, minor, mode: 0o600, uid: 0, gid: 0, sysfs_path: None })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Returns whether there is a device node at this path, granted or not.
    pub fn has_node(&self, path: &str) -> bool {
        self.state().nodes.contains_key(path)
    }
}

/// The host's functions for a driver.
impl FakeHost {
    pub(crate) fn log(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        let fields = fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.state().log.push(LogLine { level, message: message.to_owned(), fields });
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
        Ok(content[..content.len().min(FILE_BYTES_MAX)].to_vec())
    }

    pub(crate) fn sysfs_read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        let state = self.state();
        state.admit_read(path)?;
        let mut names = state.sysfs.read_dir(path)?;
        names.truncate(ENTRIES_MAX);
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
        state.demand(|granted| granted.allows_sysfs_glob(pattern), "sysfsRead", pattern)?;
        let mut paths = state.sysfs.glob(pattern)?;
        paths.retain(|path| state.allows(|granted| granted.allows_sysfs_read(path)));
        paths.truncate(ENTRIES_MAX);
        Ok(paths)
    }

    pub(crate) fn sysfs_write(&self, path: &str, value: &str) -> Result<(), Problem> {
        let mut state = self.state();
        state.admit_write(path, value)?;
        let before = String::from_utf8_lossy(state.sysfs.read(path)?).trim_end().to_owned();
        let resolved = state.sysfs.resolve(path, true)?;
        state.sysfs.insert(&resolved, Entry::File(value.into()));
        state.writes.push(SysfsWrite { path: path.to_owned(), before, value: value.to_owned() });
        Ok(())
    }

    pub(crate) fn device_nodes_glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        let state = self.state();
        state.check_node(pattern)?;
        let glob = matcher(pattern)?;
        state.demand(|granted| granted.allows_device_nodes_glob(pattern), "deviceNodes", pattern)?;
        let is_allowed = |path: &str| state.allows(|granted| granted.allows_device_node(path));
        let nodes = state.nodes.values().filter(|node| glob.is_match(&node.path) && is_allowed(&node.path));
        Ok(nodes.cloned().collect())
    }

    pub(crate) fn device_nodes_stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        let state = self.state();
        state.check_node(path)?;
        state.demand(|granted| granted.allows_device_node(path), "deviceNodes", path)?;
        let missing = || Problem::not_found("no-such-node", format!("{path} does not exist"));
        state.nodes.get(path).cloned().ok_or_else(missing)
    }

    pub(crate) fn ledger_claims(&self) -> Vec<LiveClaim> {
        self.state().ledger.values().cloned().collect()
    }

    pub(crate) fn ledger_get(&self, uid: &str) -> Option<LiveClaim> {
        self.state().ledger.get(uid).cloned()
    }

    pub(crate) fn ledger_holders(&self, pool: &str, device: &str) -> Vec<LiveClaim> {
        let holds =
            |live: &&LiveClaim| live.claim.devices.iter().any(|d| d.pool == pool && d.device == device);
        self.state().ledger.values().filter(holds).cloned().collect()
    }
}

impl State {
    fn admit_read(&self, path: &str) -> Result<(), Problem> {
        self.check_path(path)?;
        self.demand(|granted| granted.allows_sysfs_read(path), "sysfsRead", path)
    }

    fn admit_write(&self, path: &str, value: &str) -> Result<(), Problem> {
        self.check_path(path)?;
        if self.writes_refused {
            let message = format!("{path} may be written during prepare and unprepare only");
            return Err(Problem::denied("not-now", message));
        }
        let granted = self.demand(|granted| granted.allows_sysfs_write(path, value), "sysfsWrite", path);
        granted.map_err(|problem| problem.with_detail("value", value))
    }

    fn check_path(&self, path: &str) -> Result<(), Problem> {
        let is_plain = is_plain_path(&format!("/{path}")) && !path.is_empty();
        if !is_plain || path.contains(char::is_control) {
            let message = format!("{path:?} is not a plain path relative to /sys");
            return Err(Problem::invalid("bad-path", message));
        }
        self.check_failure(path)
    }

    fn check_node(&self, path: &str) -> Result<(), Problem> {
        if !is_plain_path(path) || !path.starts_with("/dev/") || path.contains(char::is_control) {
            return Err(Problem::invalid("bad-path", format!("{path:?} is not a plain path below /dev")));
        }
        self.check_failure(path)
    }

    fn check_failure(&self, path: &str) -> Result<(), Problem> {
        self.failures.get(path).map_or(Ok(()), |problem| Err(problem.clone()))
    }

    fn allows(&self, rule: impl FnOnce(&Effective) -> bool) -> bool {
        self.granted.as_ref().is_none_or(|granted| rule(granted))
    }

    fn demand(&self, rule: impl FnOnce(&Effective) -> bool, what: &str, path: &str) -> Result<(), Problem> {
        let refusal = || Problem::denied("not-granted", format!("{path} is not granted ({what})"));
        self.allows(rule).then_some(()).ok_or_else(refusal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DriverInfo, ProblemKind};

    fn fake() -> FakeHost {
        let fake = FakeHost::new();
        fake.file("class/leds/a/brightness", "0\n").file("class/leds/b/brightness", [0xff, 0xfe]);
        fake.character_node("/dev/fuse", 10, 229).block_node("/dev/loop0", 7, 0);
        fake
    }

    fn grant(info: DriverInfo) -> FakeHost {
        let fake = fake();
        fake.grant(&info.capabilities);
        fake
    }

    fn info() -> DriverInfo {
        DriverInfo::new("leds", "0.1.0")
    }

    #[test]
    fn a_text_loses_its_line_end_and_bytes_do_not() {
        let host = fake().host();
        assert_eq!(host.sysfs().read("class/leds/a/brightness").unwrap(), "0");
        assert_eq!(host.sysfs().read_bytes("class/leds/a/brightness").unwrap(), b"0\n");
        assert_eq!(host.sysfs().read("class/leds/b/brightness").unwrap_err().code, "not-text");
    }

    #[test]
    fn nothing_is_found_outside_of_sys() {
        for path in ["/class/leds", "class/../leds", "", "class//leds", "./class", "class/leds/", "a\0"] {
            assert_eq!(fake().host().sysfs().read(path).unwrap_err().code, "bad-path", "{path}");
        }
        for path in ["fuse", "/etc/passwd", "/dev/../etc/passwd", "/dev/"] {
            assert_eq!(fake().host().device_nodes().stat(path).unwrap_err().code, "bad-path", "{path}");
        }
    }

    #[test]
    fn what_is_not_granted_is_denied_even_where_there_is_nothing() {
        let host = grant(info().sysfs_read(["class/leds/*/brightness"]).device_nodes(["/dev/fuse"])).host();
        assert!(host.sysfs().read("class/leds/a/brightness").is_ok());
        assert_eq!(host.sysfs().glob("class/leds/*/brightness").unwrap().len(), 2);
        assert_eq!(host.sysfs().read("class/leds/a/other").unwrap_err().kind, ProblemKind::Denied);
        assert_eq!(host.sysfs().read_dir("class/leds").unwrap_err().kind, ProblemKind::Denied);
        assert_eq!(host.sysfs().find("class/net").unwrap_err().kind, ProblemKind::Denied);
        assert!(host.device_nodes().stat("/dev/fuse").is_ok());
        assert_eq!(host.device_nodes().stat("/dev/loop0").unwrap_err().kind, ProblemKind::Denied);
        assert_eq!(host.device_nodes().glob("/dev/*").unwrap_err().kind, ProblemKind::Denied);
    }

    #[test]
    fn what_is_absent_is_none_where_a_driver_says_it_may_be() {
        let fake = fake();
        let host = fake.host();
        assert_eq!(host.sysfs().find("class/leds/c/brightness"), Ok(None));
        assert_eq!(host.sysfs().find_link("class/leds/c"), Ok(None));
        assert_eq!(host.sysfs().find_parsed::<u32>("class/leds/a/brightness"), Ok(Some(0)));
        fake.file("class/leds/a/brightness", "bright");
        assert_eq!(host.sysfs().find_parsed::<u32>("class/leds/a/brightness"), Ok(None));
    }

    #[test]
    fn writes_are_remembered_with_the_value_before() {
        let fake = grant(
            info().sysfs_read(["class/leds/*/brightness"]).sysfs_write("class/leds/*/brightness", "[0-9]+"),
        );
        let sysfs_host = fake.host();
        sysfs_host.sysfs().write("class/leds/a/brightness", "255").unwrap();
        assert_eq!(sysfs_host.sysfs().read("class/leds/a/brightness").unwrap(), "255");
        let write =
            SysfsWrite { path: "class/leds/a/brightness".into(), before: "0".into(), value: "255".into() };
        assert_eq!(fake.writes(), [write]);
    }

    #[test]
    fn a_write_needs_a_matching_value_an_existing_file_and_the_right_time() {
        let fake = grant(info().sysfs_write("class/leds/*/brightness", "[0-9]+"));
        let host = fake.host();
        let write = |path, value| host.sysfs().write(path, value).unwrap_err();
        assert_eq!(write("class/leds/a/brightness", "255; rm").code, "not-granted");
        assert_eq!(write("class/leds/a/trigger", "1").code, "not-granted");
        assert_eq!(write("class/leds/c/brightness", "1").kind, ProblemKind::NotFound);
        fake.allow_writes(false);
        assert_eq!(write("class/leds/a/brightness", "1").code, "not-now");
        assert_eq!(fake.writes(), []);
    }

    #[test]
    fn a_node_with_a_directory_is_linked_by_its_number() {
        let fake = FakeHost::new();
        fake.file("devices/virtual/misc/fuse/uevent", "DEVNAME=fuse\n").node(NodeInfo {
            path: "/dev/fuse".into(),
            kind: NodeKind::Character,
            major: 10,
            minor: 229,
            mode: 0o666,
            uid: 0,
            gid: 0,
            sysfs_path: Some("devices/virtual/misc/fuse".into()),
        });
        assert_eq!(fake.host().sysfs().read("dev/char/10:229/uevent").unwrap(), "DEVNAME=fuse");
    }

    #[test]
    fn injected_failures_last_until_they_are_healed() {
        let fake = fake();
        let trouble = Problem::unavailable("io-error", "no");
        fake.fail("/dev/fuse", trouble.clone()).fail("class/leds/a/brightness", trouble.clone());
        let host = fake.host();
        assert_eq!(host.device_nodes().stat("/dev/fuse"), Err(trouble.clone()));
        assert_eq!(host.sysfs().read("class/leds/a/brightness"), Err(trouble));
        assert_eq!(host.sysfs().find("class/leds/a/brightness"), Ok(None));
        fake.heal("/dev/fuse");
        assert!(host.device_nodes().stat("/dev/fuse").is_ok());
    }

    #[test]
    fn the_ledger_and_the_log_are_what_was_put_into_them() {
        let fake = fake();
        let host = fake.host();
        let live = LiveClaim { claim: crate::Claim::new("n", "c", "u"), ..LiveClaim::default() };
        fake.claim(live.clone());
        assert_eq!((host.ledger().get("u"), host.ledger().claims().len()), (Some(live), 1));
        fake.forget_claim("u");
        assert_eq!(host.ledger().get("u"), None);
        host.log().warn("too hot", &[("device", "a")]);
        assert_eq!(
            fake.log_lines(),
            [LogLine {
                level: Level::Warn,
                message: "too hot".into(),
                fields: vec![("device".into(), "a".into())]
            }]
        );
    }
}
