//! Which drivers there are, in which state, and who serves under which name.
//!
//! Owns the list of sources (a file or a socket each) and the map from driver name to the serving instance. Is given facts by
//! discovery; gives the managers a driver to call and the north a view. Never prepares anything.

mod instances;
mod quarantine;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tokio::sync::{mpsc, oneshot, watch};

use instances::Instances;
pub use instances::{Native, Taken};
use quarantine::{Conduct, gone};

use crate::driver::{Driver, DriverStats, Predecessors};
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_model::{
    ChangedKind, Device, DeviceName, DriverKind, DriverName, HealthReport, PoolName, Problem, Transition,
    limit,
};

/// Where a driver is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverState {
    Seen,
    Verified,
    Compiled,
    Described,
    /// It asks for more than it was granted.
    Blocked,
    Serving,
    /// A native plugin whose connection is gone; its registration stands.
    Lost,
    Draining,
    Failed,
    /// A WASM driver whose calls failed again and again: it is called no more until a probe succeeds.
    Quarantined,
}

impl DriverState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Seen => "seen",
            Self::Verified => "verified",
            Self::Compiled => "compiled",
            Self::Described => "described",
            Self::Blocked => "blocked",
            Self::Serving => "serving",
            Self::Lost => "lost",
            Self::Draining => "draining",
            Self::Failed => "failed",
            Self::Quarantined => "quarantined",
        }
    }
}

impl DriverState {
    /// Whether something is still to come of itself: it is on its way to serve or to fail.
    pub fn is_under_way(self) -> bool {
        match self {
            Self::Seen | Self::Verified | Self::Compiled | Self::Described => true,
            Self::Blocked
            | Self::Serving
            | Self::Lost
            | Self::Draining
            | Self::Failed
            | Self::Quarantined => false,
        }
    }
}

/// A source of a driver and what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverView {
    /// None while it is not known.
    pub name: Option<DriverName>,
    pub kind: DriverKind,
    /// Name of the file, or path of the socket.
    pub source: String,
    pub version: String,
    pub state: DriverState,
    /// Why it does not serve, or what is wrong although it does.
    pub reason: String,
    pub digest: String,
    pub summary: String,
    pub devices: usize,
    pub missing_grants: Vec<String>,
    /// When its devices were last looked at; Unix milliseconds.
    pub discovered_ms: Option<u64>,
    pub problem: Option<Problem>,
    /// The newest last.
    pub timeline: VecDeque<Transition>,
    /// Of a registered native plugin.
    pub native: Option<NativeView>,
    /// Of a file: whether it is trusted.
    pub trust: Option<TrustView>,
}

/// What the trust policy says of a driver's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustView {
    /// off, warn or enforce.
    pub mode: &'static str,
    /// trusted, distrusted, or unchecked where the policy asks nothing of files.
    pub verdict: &'static str,
    /// Name of the key that signed the file, as the config calls it.
    pub key: Option<String>,
    /// The driver name or file stem under which the file's digest is pinned.
    pub pin: Option<String>,
    /// Why it is not trusted.
    pub reason: Option<String>,
}

/// What is known of a native plugin beside what every driver has.
#[derive(Debug, Clone, PartialEq)]
pub struct NativeView {
    pub endpoint: String,
    /// As the plugin listed them.
    pub services: Vec<String>,
    /// connecting, connected, lost or closed.
    pub connection: &'static str,
    /// Health as it counts now.
    pub health: HealthReport,
}

impl DriverView {
    fn new(kind: DriverKind, source: &str) -> Self {
        Self {
            name: None,
            kind,
            source: source.to_owned(),
            version: String::new(),
            state: DriverState::Seen,
            reason: String::new(),
            digest: String::new(),
            summary: String::new(),
            devices: 0,
            missing_grants: Vec::new(),
            discovered_ms: None,
            problem: None,
            timeline: VecDeque::new(),
            native: None,
            trust: None,
        }
    }

    pub fn note(&mut self, what: &str, cause: &str, duration_us: u64, problem: Option<Problem>) {
        while self.timeline.len() >= limit::TIMELINE_MAX {
            self.timeline.pop_front();
        }
        let (what, cause) = (what.to_owned(), cause.to_owned());
        self.timeline.push_back(Transition {
            at_ms: now_ms(),
            what,
            cause,
            duration_us,
            problem,
            again: None,
        });
    }
}

/// Names of drivers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverNames {
    /// Those that are called for claims, connected or not.
    pub serving: BTreeSet<DriverName>,
    /// Those of every source that has told its name, whatever became of it.
    pub known: BTreeSet<DriverName>,
}

/// An operator's wish to have a driver's files read again.
pub struct ReloadRequest {
    pub source: String,
    pub done: oneshot::Sender<Reloaded>,
}

/// An error: it was not carried out.
pub type Reloaded = Result<(), Problem>;

impl ReloadRequest {
    /// Gives it to its worker as an order. Where too many wait for that already, the operator is told to come again.
    pub fn hand_to<T>(self, worker: &mpsc::Sender<T>, order: impl FnOnce(oneshot::Sender<Reloaded>) -> T) {
        if let Some(place) = spare_place(worker) {
            place.send(order(self.done));
        } else if !worker.is_closed() {
            // The operator may have gone away.
            let _ = self.done.send(Err(too_many_reloads()));
        }
    }
}

/// A place in a worker's inbox for an order that it can do without. Half of the places stay free for what changed, because whoever
/// brings that waits for a place and brings it to all: one that is slow is not to keep the others.
pub fn spare_place<T>(worker: &mpsc::Sender<T>) -> Option<mpsc::Permit<'_, T>> {
    let has_spare = worker.capacity() > worker.max_capacity() / 2;
    has_spare.then(|| worker.try_reserve().ok()).flatten()
}

fn too_many_reloads() -> Problem {
    Problem::unavailable("too-many-reloads", "too many reloads wait already")
}

/// Reloads that may wait; more are told to come again.
const RELOADS_WAITING_MAX: usize = 64;

/// Handle to the registry.
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

struct Inner {
    state: RwLock<State>,
    changes: Changes,
    conditions: Conditions,
    /// Counts the times that a driver began to serve, or serves again after a quarantine.
    serving: watch::Sender<u64>,
    /// Counts the times that a name or an endpoint became free.
    freed: watch::Sender<u64>,
    wasm_reloads: Reloads,
    grpc_reloads: Reloads,
    predecessors: OnceLock<Arc<dyn Predecessors>>,
}

/// Reload requests on their way to the task that carries them out.
struct Reloads {
    sender: mpsc::Sender<ReloadRequest>,
    inbox: std::sync::Mutex<Option<mpsc::Receiver<ReloadRequest>>>,
}

impl Reloads {
    fn new() -> Self {
        let (sender, inbox) = mpsc::channel(RELOADS_WAITING_MAX);
        Self { sender, inbox: std::sync::Mutex::new(Some(inbox)) }
    }
}

#[derive(Default)]
struct State {
    sources: BTreeMap<String, DriverView>,
    serving: BTreeMap<DriverName, Instances>,
    /// Of serving WASM drivers, by source.
    conducts: BTreeMap<String, Conduct>,
}

impl Registry {
    pub fn new(changes: Changes) -> Self {
        Self::with_conditions(changes, Conditions::default())
    }

    /// The same, that tells what is wrong with the node.
    pub fn with_conditions(changes: Changes, conditions: Conditions) -> Self {
        Self(Arc::new(Inner {
            state: RwLock::default(),
            changes,
            conditions,
            serving: watch::Sender::new(0),
            freed: watch::Sender::new(0),
            wasm_reloads: Reloads::new(),
            grpc_reloads: Reloads::new(),
            predecessors: OnceLock::new(),
        }))
    }

    /// The channel on which changes of drivers are published.
    pub fn changes(&self) -> &Changes {
        &self.0.changes
    }

    /// The driver that serves under a name; the problem says what is known of it otherwise.
    pub fn serving(&self, name: &DriverName) -> Result<Driver, Problem> {
        let state = self.read();
        if let Some(instances) = state.serving.get(name) {
            return Ok(instances.picked().driver.clone());
        }
        let known = state.sources.values().find(|view| view.name.as_ref() == Some(name));
        Err(match known {
            None => Problem::unavailable("driver-unknown", format!("driver {name} is not here")),
            Some(view) => {
                let why = if view.reason.is_empty() { String::new() } else { format!(": {}", view.reason) };
                let message = format!("driver {name} ({}) is {}{why}", view.source, view.state.as_str());
                Problem::unavailable("driver-not-serving", message)
            }
        })
    }

    /// Says where the code of versions that served before is to be had. The first word counts.
    pub fn keep_predecessors(&self, predecessors: Arc<dyn Predecessors>) {
        let _ = self.0.predecessors.set(predecessors);
    }

    pub fn predecessors(&self) -> Option<&Arc<dyn Predecessors>> {
        self.0.predecessors.get()
    }

    /// A device as its driver last described it.
    pub fn device(&self, driver: &DriverName, pool: &str, device: &str) -> Option<Device> {
        let inventory = self.read().serving.get(driver)?.picked().driver.inventory.clone()?;
        let (pool, device) = (PoolName::new(pool).ok()?, DeviceName::new(device).ok()?);
        inventory.borrow().inventory.device(&pool, &device).cloned()
    }

    /// Every driver that serves, by name.
    pub fn all_serving(&self) -> Vec<Driver> {
        self.read().serving.values().map(|instances| instances.picked().driver.clone()).collect()
    }

    /// Of which kind the driver of a name is. None: nothing of it is here.
    pub fn kind(&self, name: &DriverName) -> Option<DriverKind> {
        let state = self.read();
        let serving = state.serving.get(name).map(|instances| instances.picked().driver.identity.kind);
        let known = || state.sources.values().find(|view| view.name.as_ref() == Some(name));
        serving.or_else(|| known().map(|view| view.kind))
    }

    /// The names of the drivers of which anything is here.
    pub fn names(&self) -> DriverNames {
        let state = self.read();
        let serving =
            state.serving.iter().filter(|(_, instances)| instances.picked().driver.claims.is_some());
        DriverNames {
            serving: serving.map(|(name, _)| name.clone()).collect(),
            known: state.sources.values().filter_map(|view| view.name.clone()).collect(),
        }
    }

    /// Whether a source is on its way that has this name, or may turn out to have it.
    pub fn is_under_way(&self, name: &DriverName) -> bool {
        let state = self.read();
        let of_name = |view: &&DriverView| view.name.as_ref() == Some(name);
        let mut known = state.sources.values().filter(of_name).peekable();
        match known.peek() {
            Some(_) => known.any(|view| view.state.is_under_way()),
            None => state.sources.values().any(|view| view.name.is_none() && view.state.is_under_way()),
        }
    }

    /// What the calls of the drivers that serve came to.
    pub fn stats(&self) -> Vec<(DriverName, DriverStats)> {
        let of = |driver: Driver| Some((driver.identity.name.clone(), driver.claims?.stats()?));
        self.all_serving().into_iter().filter_map(of).collect()
    }

    /// Changes whenever a driver begins to serve.
    pub fn serving_changes(&self) -> watch::Receiver<u64> {
        self.0.serving.subscribe()
    }

    /// Changes whenever a name or an endpoint becomes free.
    pub fn freed_changes(&self) -> watch::Receiver<u64> {
        self.0.freed.subscribe()
    }

    /// Every source, by its name.
    pub fn list(&self) -> Vec<DriverView> {
        let state = self.read();
        let mut natives = state.natives();
        let view = |view: &DriverView| DriverView { native: natives.remove(&view.source), ..view.clone() };
        state.sources.values().map(view).collect()
    }

    /// Reads a driver's files again, by driver name or file name, and asks it for its devices.
    pub async fn reload(&self, name: &str) -> Result<DriverView, Problem> {
        let source = self.known_source(name)?;
        let (done, finished) = oneshot::channel();
        let kind = self.read().sources.get(&source).map(|view| view.kind);
        let reloads = self.reloads(kind.unwrap_or(DriverKind::Wasm));
        let request = ReloadRequest { source: source.clone(), done };
        reloads.sender.try_send(request).map_err(|_| too_many_reloads())?;
        // Dropped, the source went away meanwhile; the look below tells.
        finished.await.unwrap_or(Ok(()))?;
        self.read().sources.get(&source).cloned().ok_or_else(|| gone(&source))
    }

    fn known_source(&self, name: &str) -> Result<String, Problem> {
        self.source_of(name).ok_or_else(|| {
            Problem::not_found("driver-unknown", format!("there is no driver or driver file {name:?}"))
        })
    }

    /// Returns when the task that carries out what discovery and operators ask of drivers of a kind has taken a request. False: it
    /// ended.
    pub async fn answers(&self, kind: DriverKind) -> bool {
        let (done, taken) = oneshot::channel();
        // No source has this name, so the request is dropped as soon as it is received.
        let request = ReloadRequest { source: String::new(), done };
        let sender = &self.reloads(kind).sender;
        if sender.send(request).await.is_err() {
            return false;
        }
        taken.await.ok();
        // A task that ends drops what waits for it as well.
        !sender.is_closed()
    }

    fn source_of(&self, name: &str) -> Option<String> {
        let state = self.read();
        if state.sources.contains_key(name) {
            return Some(name.to_owned());
        }
        let of_name = |view: &&DriverView| view.name.as_ref().is_some_and(|known| known.as_str() == name);
        let serving = state.serving.get(name).map(|instances| instances.picked().source.clone());
        serving.or_else(|| state.sources.values().find(of_name).map(|view| view.source.clone()))
    }

    /// Reload requests, for the one task that carries them out. None when it was taken already.
    pub fn take_reloads(&self, kind: DriverKind) -> Option<mpsc::Receiver<ReloadRequest>> {
        self.reloads(kind).inbox.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn reloads(&self, kind: DriverKind) -> &Reloads {
        match kind {
            DriverKind::Wasm => &self.0.wasm_reloads,
            DriverKind::Grpc => &self.0.grpc_reloads,
        }
    }

    /// Changes what is shown of a source, making it if it is new.
    pub fn update(&self, kind: DriverKind, source: &str, change: impl FnOnce(&mut DriverView)) {
        let mut state = self.write();
        let view = state.sources.entry(source.to_owned()).or_insert_with(|| DriverView::new(kind, source));
        let before = (view.state, view.reason.clone(), view.trust.clone());
        change(view);
        let (now, name) = (view.state, view.name.as_ref().map_or(source, DriverName::as_str).to_owned());
        let changed = before != (now, view.reason.clone(), view.trust.clone());
        drop(state);
        if changed {
            self.0.changes.tell(ChangedKind::Driver, name, now.as_str());
        }
    }

    /// Another source that has a name already.
    pub fn taken_by_other(&self, name: &DriverName, source: &str) -> Option<String> {
        self.read().serving.get(name)?.other_than(source).map(str::to_owned)
    }

    /// Makes `driver` the one that serves under its name, with what it published. The error names the source that has the name
    /// already.
    pub fn serve(&self, source: &str, driver: Driver) -> Result<(), String> {
        let name = driver.identity.name.clone();
        let left = {
            let mut state = self.write();
            if let Some(other) = state.serving.get(&name).and_then(|known| known.other_than(source)) {
                return Err(other.to_owned());
            }
            // A file that named itself otherwise before gives its old name up.
            let left = state.drop_source(source).filter(|left| *left != name);
            state.serving.insert(name, Instances::one(source, driver));
            left
        };
        self.0.serving.send_modify(|count| *count += 1);
        if left.is_some() {
            self.0.freed.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    /// Takes a source's driver from the managers. Calls in flight go on.
    pub fn retire(&self, source: &str) {
        let left = {
            let mut state = self.write();
            self.forget_conduct(state.conducts.remove(source));
            state.drop_source(source)
        };
        if let Some(name) = left {
            self.0.freed.send_modify(|count| *count += 1);
            self.settle(&name);
        }
    }

    /// Forgets a source, and its driver where it still serves.
    pub fn remove(&self, source: &str) {
        self.retire(source);
        let view = self.write().sources.remove(source);
        if let Some(view) = view {
            let name = view.name.as_ref().map_or(source, DriverName::as_str);
            self.0.changes.tell(ChangedKind::Driver, name, "gone");
        }
    }

    pub fn tell_devices(&self, driver: &DriverName) {
        self.0.changes.tell(ChangedKind::Device, driver, "changed");
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.0.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.0.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}
