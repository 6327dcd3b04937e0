//! The functions that a driver may call: the capabilities of the contract, each checked against the grant and counted.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::bindings::nodedock::driver::{device_nodes, ledger, log, sysfs, sysfs_write, types};
use super::convert;
use super::limiter::{Reached, stuck};
use super::nodes::{DevRoot, FoundNode, below_dev};
use super::sandbox::{Scope, State};
use super::stats::{Limit, Usage};
use nodedock_core::sysfs::blocking::{LOOK_WALL, blocking};
use nodedock_core::sysfs::{SysfsRoot, bad_glob, check_path};
use nodedock_model::grant::{Limits, pattern};
use nodedock_model::{LiveClaim, Problem, ProblemCode};

/// What one call has read, and how much it asked of the host.
pub(super) struct CallView {
    /// A driver sees one state of the node within a call.
    seen: HashMap<(Kind, String), Result<Seen, Problem>>,
    operations: usize,
    operations_max: usize,
    bytes: usize,
    bytes_max: usize,
    reached: BTreeSet<Limit>,
    pub(super) writes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Read,
    Dir,
    Link,
    Glob,
}

impl Kind {
    fn read(self, sysfs: &SysfsRoot, path: &str) -> Result<Seen, Problem> {
        Ok(match self {
            Self::Read => Seen::Bytes(sysfs.read(path)?.into()),
            Self::Dir => Seen::Names(sysfs.read_dir(path)?.into()),
            Self::Link => Seen::Names([sysfs.read_link(path)?].into()),
            Self::Glob => Seen::Names(sysfs.glob(path)?.into()),
        })
    }

    /// Names and links are the kernel's own tables. The content of an attribute comes from the driver of its device, which may hang; a
    /// glob may read many directories.
    fn may_hang(self) -> bool {
        matches!(self, Self::Read | Self::Glob)
    }
}

#[derive(Clone)]
enum Seen {
    Bytes(Arc<[u8]>),
    Names(Arc<[String]>),
}

impl Seen {
    fn size(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Names(names) => names.iter().map(|name| name.len() + size_of::<String>()).sum(),
        }
    }
}

impl CallView {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            seen: HashMap::new(),
            operations: 0,
            operations_max: limits.host_operations,
            bytes: 0,
            bytes_max: limits.host_bytes,
            reached: BTreeSet::new(),
            writes: 0,
        }
    }

    /// Adds the call's host operations, and the limits at which it was refused something.
    pub(super) fn report(&self, usage: &mut Usage) {
        (usage.host_operations, usage.host_bytes) = (self.operations, self.bytes);
        usage.reached.clone_from(&self.reached);
    }

    pub(super) fn forget_what_was_seen(&mut self) {
        self.seen.clear();
    }

    pub(super) fn count_operation(&mut self) -> Result<(), Reached> {
        if self.operations >= self.operations_max {
            return Err(self.refuse(Limit::HostOperations, self.operations_max));
        }
        self.operations += 1;
        Ok(())
    }

    fn count_bytes(&mut self, bytes: usize) -> Result<(), Reached> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes <= self.bytes_max {
            return Ok(());
        }
        Err(self.refuse(Limit::HostBytes, self.bytes_max))
    }

    /// Records a limit that the call reached: it counts once.
    pub(super) fn refuse(&mut self, limit: Limit, max: usize) -> Reached {
        self.reached.insert(limit);
        Reached { limit, max }
    }
}

fn granted(is_granted: bool, list: &str, what: &str) -> Result<(), Problem> {
    if is_granted { Ok(()) } else { Err(not_granted(list, what)) }
}

pub(super) fn not_granted(list: &str, what: &str) -> Problem {
    Problem::denied(ProblemCode::NotGranted, format!("{what} is not granted ({list})")).with("grant", list)
}

impl Scope {
    /// Reads from the node in a thread of its own, with a time limit.
    pub(super) async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let stuck = || {
            self.counters.refuse(Limit::HostLook);
            Problem::from(stuck())
        };
        blocking(&self.blocking, LOOK_WALL, stuck, work).await
    }
}

impl State {
    /// Reads from the node in a thread of its own, whose CPU time is the call's.
    fn look<T, W>(&self, work: W) -> impl Future<Output = Result<T, Problem>> + Send + use<T, W>
    where
        T: Send + 'static,
        W: FnOnce(&SysfsRoot, &DevRoot) -> Result<T, Problem> + Send + 'static,
    {
        let (scope, meter) = (Arc::clone(&self.scope), Arc::clone(&self.meter));
        async move {
            let node = Arc::clone(&scope.node);
            scope.look(move || meter.charge(|| work(&node.sysfs, &node.dev))).await
        }
    }

    /// Reads below `/sys` once per call.
    async fn seen(&mut self, kind: Kind, path: String) -> Result<Seen, Problem> {
        self.view.count_operation()?;
        let key = (kind, path);
        let seen = match self.view.seen.get(&key) {
            Some(seen) => seen.clone()?,
            None => {
                let path = key.1.clone();
                let seen = if kind.may_hang() {
                    self.look(move |sysfs, _| kind.read(sysfs, &path)).await
                } else {
                    kind.read(&self.scope.node.sysfs, &path)
                };
                // Cached results count as well: else the cache would grow beyond what the driver reads.
                self.view.count_bytes(key.1.len() + seen.as_ref().map_or(0, Seen::size))?;
                self.view.seen.insert(key, seen.clone());
                seen?
            }
        };
        self.view.count_bytes(seen.size())?;
        Ok(seen)
    }

    fn admit_read(&self, path: &str) -> Result<(), Problem> {
        check_path(path)?;
        granted(self.scope.effective.allows_sysfs_read(path), "sysfsRead", path)
    }

    async fn content(&mut self, path: String) -> Result<Arc<[u8]>, Problem> {
        self.admit_read(&path)?;
        match self.seen(Kind::Read, path).await? {
            Seen::Bytes(bytes) => Ok(bytes),
            Seen::Names(_) => unreachable!("a read returns bytes"),
        }
    }

    async fn text(&mut self, path: String) -> Result<String, Problem> {
        let not_text = Problem::invalid(ProblemCode::NotText, format!("/sys/{path} is not UTF-8"));
        let bytes = self.content(path).await?;
        let text = str::from_utf8(&bytes).map_err(|_| not_text)?;
        Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
    }

    async fn names(&mut self, kind: Kind, path: String) -> Result<Vec<String>, Problem> {
        match self.seen(kind, path).await? {
            Seen::Names(names) => Ok(names.to_vec()),
            Seen::Bytes(_) => unreachable!("a list returns names"),
        }
    }

    async fn directory(&mut self, path: String) -> Result<Vec<String>, Problem> {
        self.admit_read(&path)?;
        self.names(Kind::Dir, path).await
    }

    async fn link(&mut self, path: String) -> Result<String, Problem> {
        self.admit_read(&path)?;
        Ok(self.names(Kind::Link, path).await?.swap_remove(0))
    }

    async fn paths(&mut self, glob: String) -> Result<Vec<String>, Problem> {
        check_path(&glob)?;
        pattern::compile(&glob).map_err(|error| bad_glob(&glob, &error))?;
        granted(self.scope.effective.allows_sysfs_glob(&glob), "sysfsRead", &glob)?;
        let mut paths = self.names(Kind::Glob, glob).await?;
        paths.retain(|path| self.scope.effective.allows_sysfs_read(path));
        Ok(paths)
    }

    async fn device_nodes(&mut self, glob: String) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        self.view.count_operation()?;
        below_dev(&glob)?;
        granted(self.scope.effective.allows_device_nodes_glob(&glob), "deviceNodes", &glob)?;
        let mut nodes = self.look(move |sysfs, dev| dev.glob(&glob, sysfs)).await?;
        nodes.retain(|node| self.scope.effective.allows_device_node(&node.path));
        let size = |node: &FoundNode| node.path.len() + size_of::<device_nodes::NodeInfo>();
        self.view.count_bytes(nodes.iter().map(size).sum())?;
        Ok(nodes.into_iter().map(convert::node_to_guest).collect())
    }

    fn device_node(&mut self, path: &str) -> Result<device_nodes::NodeInfo, Problem> {
        self.view.count_operation()?;
        below_dev(path)?;
        granted(self.scope.effective.allows_device_node(path), "deviceNodes", path)?;
        self.scope.node.dev.stat(path, &self.scope.node.sysfs).map(convert::node_to_guest)
    }

    fn live_claims(&mut self, claims: Vec<LiveClaim>) -> wasmtime::Result<Vec<types::LiveClaim>> {
        for claim in &claims {
            let configs: usize = claim.claim.configs.iter().map(|config| config.parameters.len()).sum();
            self.view.count_bytes(claim.memo.len() + configs + 1024)?;
        }
        Ok(claims.iter().map(convert::live_claim_to_guest).collect())
    }
}

/// A refusal is an answer; an error would be a trap.
fn answer<T>(result: Result<T, Problem>) -> wasmtime::Result<Result<T, types::Problem>> {
    Ok(result.map_err(|problem| convert::problem_to_guest(&problem)))
}

impl types::Host for State {}

impl log::Host for State {
    fn write(
        &mut self,
        level: log::Level,
        message: String,
        fields: Vec<types::Label>,
    ) -> wasmtime::Result<()> {
        self.view.count_operation()?;
        self.log.write(level, &message, &fields);
        Ok(())
    }
}

impl sysfs::Host for State {
    async fn read(&mut self, path: String) -> wasmtime::Result<Result<String, types::Problem>> {
        answer(self.text(path).await)
    }

    async fn read_bytes(&mut self, path: String) -> wasmtime::Result<Result<Vec<u8>, types::Problem>> {
        answer(self.content(path).await.map(|bytes| bytes.to_vec()))
    }

    async fn read_dir(&mut self, path: String) -> wasmtime::Result<Result<Vec<String>, types::Problem>> {
        answer(self.directory(path).await)
    }

    async fn read_link(&mut self, path: String) -> wasmtime::Result<Result<String, types::Problem>> {
        answer(self.link(path).await)
    }

    async fn glob(&mut self, pattern: String) -> wasmtime::Result<Result<Vec<String>, types::Problem>> {
        answer(self.paths(pattern).await)
    }
}

impl sysfs_write::Host for State {
    async fn write(&mut self, path: String, value: String) -> wasmtime::Result<Result<(), types::Problem>> {
        answer(self.write_value(path, value).await)
    }
}

impl device_nodes::Host for State {
    async fn glob(
        &mut self,
        pattern: String,
    ) -> wasmtime::Result<Result<Vec<device_nodes::NodeInfo>, types::Problem>> {
        answer(self.device_nodes(pattern).await)
    }

    async fn stat(
        &mut self,
        path: String,
    ) -> wasmtime::Result<Result<device_nodes::NodeInfo, types::Problem>> {
        answer(self.device_node(&path))
    }
}

impl ledger::Host for State {
    async fn claims(&mut self) -> wasmtime::Result<Vec<types::LiveClaim>> {
        self.view.count_operation()?;
        let claims = self.scope.driver.as_ref().map(|driver| self.scope.node.ledger.claims(driver));
        self.live_claims(claims.unwrap_or_default())
    }

    async fn get(&mut self, uid: String) -> wasmtime::Result<Option<types::LiveClaim>> {
        self.view.count_operation()?;
        let claim = self.scope.driver.as_ref().and_then(|driver| self.scope.node.ledger.claim(driver, &uid));
        Ok(self.live_claims(claim.into_iter().collect())?.pop())
    }

    async fn holders(&mut self, pool: String, device: String) -> wasmtime::Result<Vec<types::LiveClaim>> {
        self.view.count_operation()?;
        let ledger = &self.scope.node.ledger;
        let claims = self.scope.driver.as_ref().map(|driver| ledger.holders(driver, &pool, &device));
        self.live_claims(claims.unwrap_or_default())
    }
}
