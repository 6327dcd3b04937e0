//! The functions that a driver may call: the capabilities of the contract, each checked against the grant and counted.

use std::sync::Arc;

use super::bindings::nodedock::driver::{device_nodes, ledger, log, sysfs, types};
use super::convert;
use super::limiter::Reached;
use super::nodes::{DevRoot, below_dev};
use super::sandbox::{Scope, State};
use super::stats::Limit;
use nodedock_core::driver::Ledger;
use nodedock_core::sysfs::blocking::{LOOK_WALL, blocking};
use nodedock_core::sysfs::{SysfsRoot, bad_glob, check_path, read_stuck};
use nodedock_model::grant::pattern;
use nodedock_model::{DriverName, LiveClaim, Problem, ProblemCode};

/// A kind of read below `/sys`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Read,
    Dir,
    Link,
    Glob,
}

impl Kind {
    fn read(self, sysfs: &SysfsRoot, path: &str) -> Result<Seen, Problem> {
        let (content, names) = match self {
            Self::Read => (sysfs.read(path)?, Vec::new()),
            Self::Dir => (Vec::new(), sysfs.read_dir(path)?),
            Self::Link => (Vec::new(), vec![sysfs.read_link(path)?]),
            Self::Glob => (Vec::new(), sysfs.glob(path)?),
        };
        Ok(Seen { content: content.into(), names: names.into() })
    }

    /// Names and links are the kernel's own tables. The content of an attribute comes from the driver of its device, which may hang; a
    /// glob may read many directories.
    fn may_hang(self) -> bool {
        matches!(self, Self::Read | Self::Glob)
    }
}

/// The content of a file, or names: of a directory's entries, or one that is a link's target. The other field is empty.
#[derive(Clone)]
pub(super) struct Seen {
    content: Arc<[u8]>,
    names: Arc<[String]>,
}

impl Seen {
    fn size(&self) -> usize {
        self.content.len() + self.names.iter().map(|name| name.len() + size_of::<String>()).sum::<usize>()
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
            read_stuck()
        };
        blocking(&self.blocking, LOOK_WALL, stuck, work).await
    }
}

impl State {
    /// Records a limit that the call reached: it counts once.
    pub(super) fn refuse(&mut self, limit: Limit, max: usize) -> Reached {
        self.usage.reached.insert(limit);
        Reached { limit, max }
    }

    pub(super) fn count_operation(&mut self) -> Result<(), Reached> {
        let max = self.scope.limits.host_operations;
        if self.usage.host_operations >= max {
            return Err(self.refuse(Limit::HostOperations, max));
        }
        self.usage.host_operations += 1;
        Ok(())
    }

    fn count_bytes(&mut self, bytes: usize) -> Result<(), Reached> {
        let max = self.scope.limits.host_bytes;
        self.usage.host_bytes = self.usage.host_bytes.saturating_add(bytes);
        if self.usage.host_bytes <= max { Ok(()) } else { Err(self.refuse(Limit::HostBytes, max)) }
    }

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

    /// Reads below `/sys` once per call: a driver sees one state of the node within a call.
    async fn seen(&mut self, kind: Kind, path: String) -> Result<Seen, Problem> {
        self.count_operation()?;
        let key = (kind, path);
        let seen = match self.seen.get(&key) {
            Some(seen) => seen.clone()?,
            None => {
                let path = key.1.clone();
                let seen = if kind.may_hang() {
                    self.look(move |sysfs, _| kind.read(sysfs, &path)).await
                } else {
                    kind.read(&self.scope.node.sysfs, &path)
                };
                // Cached results count as well: else the cache would grow beyond what the driver reads.
                self.count_bytes(key.1.len() + seen.as_ref().map_or(0, Seen::size))?;
                self.seen.insert(key, seen.clone());
                seen?
            }
        };
        self.count_bytes(seen.size())?;
        Ok(seen)
    }

    /// Reads what the grant names itself, and not by a glob.
    async fn named(&mut self, kind: Kind, path: String) -> Result<Seen, Problem> {
        check_path(&path)?;
        granted(self.scope.effective.allows_sysfs_read(&path), "sysfsRead", &path)?;
        self.seen(kind, path).await
    }

    fn live_claims(
        &mut self,
        find: impl FnOnce(&dyn Ledger, &DriverName) -> Vec<LiveClaim>,
    ) -> wasmtime::Result<Vec<types::LiveClaim>> {
        self.count_operation()?;
        let driver = self.scope.driver.as_ref();
        let claims = driver.map(|driver| find(&*self.scope.node.ledger, driver)).unwrap_or_default();
        for claim in &claims {
            let configs: usize = claim.claim.configs.iter().map(|config| config.parameters.len()).sum();
            self.count_bytes(claim.memo.len() + configs + 1024)?;
        }
        Ok(claims.iter().map(convert::live_claim_to_guest).collect())
    }
}

impl types::Host for State {
    fn convert_problem(&mut self, problem: Problem) -> wasmtime::Result<types::Problem> {
        Ok(convert::problem_to_guest(&problem))
    }
}

impl log::Host for State {
    fn write(
        &mut self,
        level: log::Level,
        message: String,
        fields: Vec<types::Label>,
    ) -> wasmtime::Result<()> {
        self.count_operation()?;
        self.log.write(level, &message, &fields);
        Ok(())
    }
}

impl sysfs::Host for State {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        let not_text = Problem::invalid(ProblemCode::NotText, format!("/sys/{path} is not UTF-8"));
        let seen = self.named(Kind::Read, path).await?;
        let text = str::from_utf8(&seen.content).map_err(|_| not_text)?;
        Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
    }

    async fn read_bytes(&mut self, path: String) -> Result<Vec<u8>, Problem> {
        Ok(self.named(Kind::Read, path).await?.content.to_vec())
    }

    async fn read_dir(&mut self, path: String) -> Result<Vec<String>, Problem> {
        Ok(self.named(Kind::Dir, path).await?.names.to_vec())
    }

    async fn read_link(&mut self, path: String) -> Result<String, Problem> {
        Ok(self.named(Kind::Link, path).await?.names.concat())
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<String>, Problem> {
        check_path(&glob)?;
        pattern::compile(&glob).map_err(|error| bad_glob(&glob, &error))?;
        granted(self.scope.effective.allows_sysfs_glob(&glob), "sysfsRead", &glob)?;
        let mut paths = self.seen(Kind::Glob, glob).await?.names.to_vec();
        paths.retain(|path| self.scope.effective.allows_sysfs_read(path));
        Ok(paths)
    }
}

impl device_nodes::Host for State {
    async fn glob(&mut self, glob: String) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        self.count_operation()?;
        below_dev(&glob)?;
        granted(self.scope.effective.allows_device_nodes_glob(&glob), "deviceNodes", &glob)?;
        let mut nodes = self.look(move |sysfs, dev| dev.glob(&glob, sysfs)).await?;
        nodes.retain(|node| self.scope.effective.allows_device_node(&node.path));
        self.count_bytes(nodes.iter().map(|node| node.path.len() + size_of_val(node)).sum())?;
        Ok(nodes)
    }

    async fn stat(&mut self, path: String) -> Result<device_nodes::NodeInfo, Problem> {
        self.count_operation()?;
        below_dev(&path)?;
        granted(self.scope.effective.allows_device_node(&path), "deviceNodes", &path)?;
        self.scope.node.dev.stat(&path, &self.scope.node.sysfs)
    }
}

impl ledger::Host for State {
    async fn claims(&mut self) -> wasmtime::Result<Vec<types::LiveClaim>> {
        self.live_claims(|ledger, driver| ledger.claims(driver))
    }

    async fn get(&mut self, uid: String) -> wasmtime::Result<Option<types::LiveClaim>> {
        Ok(self.live_claims(|ledger, driver| Vec::from_iter(ledger.claim(driver, &uid)))?.pop())
    }

    async fn holders(&mut self, pool: String, device: String) -> wasmtime::Result<Vec<types::LiveClaim>> {
        self.live_claims(|ledger, driver| ledger.holders(driver, &pool, &device))
    }
}
