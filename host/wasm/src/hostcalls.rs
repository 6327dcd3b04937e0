//! What a driver may call: the capabilities of the contract, each checked against its grant and counted.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::bindings::nodedock::driver::{device_nodes, ledger, log, sysfs, sysfs_write, types};
use super::convert;
use super::limiter::{Reached, stuck};
use super::log::{Level, Line};
use super::meter::Meter;
use super::nodes::{DevRoot, below_dev};
use super::sandbox::{Scope, State};
use super::stats::{Limit, Usage};
use nodedock_core::sysfs::blocking::blocking;
use nodedock_core::sysfs::{SysfsRoot, bad_glob, check_path};
use nodedock_model::grant::{Limits, pattern};
use nodedock_model::limit::HOST_LOOK_WALL;
use nodedock_model::{LiveClaim, Problem};

/// What one call has seen and done.
pub(super) struct CallView {
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

/// Something read, kept so that a driver sees one state of the node within a call.
#[derive(Clone)]
enum Seen {
    Bytes(Arc<[u8]>),
    Names(Arc<[String]>),
    Path(String),
}

impl Seen {
    fn size(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Names(names) => names.iter().map(|name| name.len() + size_of::<String>()).sum(),
            Self::Path(path) => path.len(),
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

    /// What the call asked of the host, and at which limits it was refused something.
    pub(super) fn tell(&self, usage: &mut Usage) {
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

    /// Notes a limit that the call reached: it counts once.
    pub(super) fn refuse(&mut self, limit: Limit, max: usize) -> Reached {
        self.reached.insert(limit);
        Reached { limit, max }
    }
}

pub(super) fn not_granted(list: &str, what: &str) -> Problem {
    Problem::denied("not-granted", format!("{what} is not granted ({list})")).with("grant", list)
}

impl Scope {
    /// Runs what only looks off the async threads, with its time limit.
    pub(super) async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let stuck = || {
            self.counters.refuse(Limit::HostLook);
            Problem::from(stuck())
        };
        blocking(&self.blocking, HOST_LOOK_WALL, stuck, work).await
    }

    /// Looks off the async threads, with a time limit. A thread that hangs in the kernel keeps its place among those of this driver;
    /// what one computes is the call's.
    async fn blocking<T: Send + 'static>(
        self: Arc<Self>,
        meter: Arc<Meter>,
        work: impl FnOnce(&SysfsRoot, &DevRoot) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let (sysfs, dev) = (Arc::clone(&self.node.sysfs), Arc::clone(&self.node.dev));
        self.look(move || meter.charge(|| work(&sysfs, &dev))).await
    }
}

impl State {
    /// Reads below `/sys` once per call.
    async fn look(
        &mut self,
        kind: Kind,
        path: String,
        read: fn(&SysfsRoot, &str) -> Result<Seen, Problem>,
    ) -> Result<Seen, Problem> {
        self.view.count_operation()?;
        let key = (kind, path);
        let seen = match self.view.seen.get(&key) {
            Some(seen) => seen.clone()?,
            None => {
                let seen = match kind {
                    // Names and links are the kernel's own tables. An attribute's content comes from the driver of its
                    // device, which may hang; a glob may look into many folders.
                    Kind::Dir | Kind::Link => read(&self.scope.node.sysfs, &key.1),
                    Kind::Read | Kind::Glob => {
                        let path = key.1.clone();
                        let (scope, meter) = (Arc::clone(&self.scope), Arc::clone(&self.meter));
                        scope.blocking(meter, move |sysfs, _| read(sysfs, &path)).await
                    }
                };
                // What is kept counts as well: else the cache would grow beyond what the driver reads.
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
        if self.scope.effective.allows_sysfs_read(path) {
            Ok(())
        } else {
            Err(not_granted("sysfsRead", path))
        }
    }

    async fn content(&mut self, path: String) -> Result<Arc<[u8]>, Problem> {
        self.admit_read(&path)?;
        let read = |sysfs: &SysfsRoot, path: &str| sysfs.read(path).map(|bytes| Seen::Bytes(bytes.into()));
        match self.look(Kind::Read, path, read).await? {
            Seen::Bytes(bytes) => Ok(bytes),
            _ => unreachable!("a read gives bytes"),
        }
    }

    async fn names(
        &mut self,
        kind: Kind,
        path: String,
        read: fn(&SysfsRoot, &str) -> Result<Seen, Problem>,
    ) -> Result<Vec<String>, Problem> {
        match self.look(kind, path, read).await? {
            Seen::Names(names) => Ok(names.to_vec()),
            _ => unreachable!("a list gives names"),
        }
    }

    fn live_claims(&mut self, claims: Vec<LiveClaim>) -> wasmtime::Result<Vec<types::LiveClaim>> {
        for claim in &claims {
            let configs: usize = claim.claim.configs.iter().map(|config| config.parameters.len()).sum();
            self.view.count_bytes(claim.memo.len() + configs + 1024)?;
        }
        Ok(claims.iter().map(convert::live_claim_to_guest).collect())
    }
}

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
        let level = match level {
            log::Level::Trace => Level::Trace,
            log::Level::Debug => Level::Debug,
            log::Level::Info => Level::Info,
            log::Level::Warn => Level::Warn,
            log::Level::Error => Level::Error,
        };
        self.log.write(Line { level, message: &message, fields: &fields });
        Ok(())
    }
}

impl sysfs::Host for State {
    async fn read(&mut self, path: String) -> wasmtime::Result<Result<String, types::Problem>> {
        let not_text = Problem::invalid("not-text", format!("/sys/{path} is not UTF-8"));
        let text = self.content(path).await.and_then(|bytes| {
            let text = str::from_utf8(&bytes).map_err(|_| not_text)?;
            Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
        });
        answer(text)
    }

    async fn read_bytes(&mut self, path: String) -> wasmtime::Result<Result<Vec<u8>, types::Problem>> {
        answer(self.content(path).await.map(|bytes| bytes.to_vec()))
    }

    async fn read_dir(&mut self, path: String) -> wasmtime::Result<Result<Vec<String>, types::Problem>> {
        let read =
            |sysfs: &SysfsRoot, path: &str| sysfs.read_dir(path).map(|names| Seen::Names(names.into()));
        let names = match self.admit_read(&path) {
            Ok(()) => self.names(Kind::Dir, path, read).await,
            Err(problem) => Err(problem),
        };
        answer(names)
    }

    async fn read_link(&mut self, path: String) -> wasmtime::Result<Result<String, types::Problem>> {
        let read = |sysfs: &SysfsRoot, path: &str| sysfs.read_link(path).map(Seen::Path);
        let seen = match self.admit_read(&path) {
            Ok(()) => self.look(Kind::Link, path, read).await,
            Err(problem) => Err(problem),
        };
        answer(seen.map(|seen| match seen {
            Seen::Path(path) => path,
            _ => unreachable!("a link gives a path"),
        }))
    }

    async fn glob(&mut self, pattern: String) -> wasmtime::Result<Result<Vec<String>, types::Problem>> {
        let read = |sysfs: &SysfsRoot, glob: &str| sysfs.glob(glob).map(|paths| Seen::Names(paths.into()));
        let admitted = check_path(&pattern).and_then(|()| {
            pattern::compile(&pattern).map_err(|error| bad_glob(&pattern, &error))?;
            let allowed = self.scope.effective.allows_sysfs_glob(&pattern);
            if allowed { Ok(()) } else { Err(not_granted("sysfsRead", &pattern)) }
        });
        let paths = match admitted {
            Ok(()) => self.names(Kind::Glob, pattern, read).await,
            Err(problem) => Err(problem),
        };
        let scope = &self.scope;
        answer(paths.map(|mut paths| {
            paths.retain(|path| scope.effective.allows_sysfs_read(path));
            paths
        }))
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
        let counted = self.view.count_operation().map_err(Problem::from);
        let admitted = counted.and_then(|()| below_dev(&pattern).map(drop)).and_then(|()| {
            let allowed = self.scope.effective.allows_device_nodes_glob(&pattern);
            if allowed { Ok(()) } else { Err(not_granted("deviceNodes", &pattern)) }
        });
        let nodes = match admitted {
            Ok(()) => {
                let (scope, meter) = (Arc::clone(&self.scope), Arc::clone(&self.meter));
                scope.blocking(meter, move |sysfs, dev| dev.glob(&pattern, sysfs)).await
            }
            Err(problem) => Err(problem),
        };
        let effective = &self.scope.effective;
        let nodes = nodes.map(|mut nodes| {
            nodes.retain(|node| effective.allows_device_node(&node.path));
            nodes
        });
        let nodes = nodes.and_then(|nodes| {
            let size = |node: &super::nodes::FoundNode| node.path.len() + size_of::<device_nodes::NodeInfo>();
            self.view.count_bytes(nodes.iter().map(size).sum())?;
            Ok(nodes.into_iter().map(convert::node_to_guest).collect())
        });
        answer(nodes)
    }

    async fn stat(
        &mut self,
        path: String,
    ) -> wasmtime::Result<Result<device_nodes::NodeInfo, types::Problem>> {
        let counted = self.view.count_operation().map_err(Problem::from);
        let admitted = counted.and_then(|()| below_dev(&path).map(drop)).and_then(|()| {
            let allowed = self.scope.effective.allows_device_node(&path);
            if allowed { Ok(()) } else { Err(not_granted("deviceNodes", &path)) }
        });
        let node = match admitted {
            Ok(()) => self.scope.node.dev.stat(&path, &self.scope.node.sysfs),
            Err(problem) => Err(problem),
        };
        answer(node.map(convert::node_to_guest))
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
        let mut claims = self.live_claims(claim.into_iter().collect())?;
        Ok(claims.pop())
    }

    async fn holders(&mut self, pool: String, device: String) -> wasmtime::Result<Vec<types::LiveClaim>> {
        self.view.count_operation()?;
        let ledger = &self.scope.node.ledger;
        let claims = self.scope.driver.as_ref().map(|driver| ledger.holders(driver, &pool, &device));
        self.live_claims(claims.unwrap_or_default())
    }
}
