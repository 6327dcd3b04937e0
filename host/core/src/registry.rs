//! The registry: drivers with their states, the sources that names belong to, and the serving instance of each driver name.
//!
//! Owns the list of sources (each a file or a socket), the owners of names and the map from driver name to the serving instance. Given the states of
//! drivers, it returns the driver to call to the managers, and views to the APIs. Never prepares anything.

mod instances;
pub mod names;
mod quarantine;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use instances::Instances;
pub use instances::{Native, Taken};
use names::{NameStore, Names};
use quarantine::Conduct;

use crate::driver::{Driver, DriverStats, Published, StoredDrivers};
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::signal::{Listener, Signal};
use nodedock_base::worded;
use nodedock_model::{
    ChangedKind, CounterSet, Device, DeviceName, DriverKind, DriverName, HealthReport,
    PathPatterns, PoolName, Problem, ProblemCode, Transition, limit,
};

worded! {
    /// State of a driver.
    #[derive(Default)]
    DriverState {
        #[default]
        Seen = "seen",
        Verified = "verified",
        Compiled = "compiled",
        Described = "described",
        /// It requests more than its grant.
        Blocked = "blocked",
        Serving = "serving",
        /// A native plugin without a connection; its registration stays.
        Lost = "lost",
        Draining = "draining",
        Failed = "failed",
        /// A WASM driver whose calls failed repeatedly: it is not called until a probe succeeds.
        Quarantined = "quarantined",
    }
}

impl DriverState {
    /// Returns whether the state is transient: the driver is about to serve or to fail.
    pub fn is_under_way(self) -> bool {
        matches!(
            self,
            Self::Seen | Self::Verified | Self::Compiled | Self::Described
        )
    }
}

/// A source of a driver and its state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DriverView {
    /// `None` while it is unknown.
    pub name: Option<DriverName>,
    pub kind: DriverKind,
    /// Name of the file, or path of the socket.
    pub source: String,
    pub version: String,
    pub state: DriverState,
    /// Why it does not serve, or a defect although it serves.
    pub reason: String,
    pub digest: String,
    pub summary: String,
    pub devices: usize,
    pub missing_grants: Vec<String>,
    /// Time of the last discovery; Unix milliseconds.
    pub discovered_ms: Option<u64>,
    pub problem: Option<Problem>,
    /// The newest last.
    pub timeline: VecDeque<Transition>,
    /// Of a registered native plugin.
    pub native: Option<NativeView>,
    /// For a file: whether it is trusted.
    pub trust: Option<TrustView>,
}

/// Verdict of the trust policy on a driver's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustView {
    /// off, warn or enforce.
    pub mode: &'static str,
    /// trusted, distrusted, or unchecked if the policy is off.
    pub verdict: &'static str,
    /// Name of the key that signed the file, in the config.
    pub key: Option<String>,
    /// The driver name or file stem under which the file's digest is pinned.
    pub pin: Option<String>,
    /// Why it is not trusted.
    pub reason: Option<String>,
}

/// Data of a native plugin that other drivers do not have.
#[derive(Debug, Clone, PartialEq)]
pub struct NativeView {
    pub endpoint: String,
    /// Services in the plugin's registration.
    pub services: Vec<String>,
    /// connecting, connected, lost or closed.
    pub connection: &'static str,
    /// Current health.
    pub health: HealthReport,
}

impl DriverView {
    fn new(kind: DriverKind, source: &str) -> Self {
        Self {
            kind,
            source: source.to_owned(),
            ..Self::default()
        }
    }

    pub fn note(&mut self, what: &str, cause: &str, duration_us: u64, problem: Option<Problem>) {
        while self.timeline.len() >= limit::TIMELINE_MAX {
            self.timeline.pop_front();
        }
        let (what, cause) = (what.to_owned(), cause.to_owned());
        let transition = Transition {
            at_ms: now_ms(),
            what,
            cause,
            duration_us,
            problem,
            again: None,
        };
        self.timeline.push_back(transition);
    }
}

/// Names of drivers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverNames {
    /// Drivers that are called for claims, connected or not.
    pub serving: BTreeSet<DriverName>,
    /// Names of all sources with a known name, whatever their state.
    pub known: BTreeSet<DriverName>,
}

/// An operator's request to read a driver's files again.
pub struct ReloadRequest {
    pub source: String,
    pub done: oneshot::Sender<Reloaded>,
}

/// Outcome; an error if it was not executed.
pub type Reloaded = Result<(), Problem>;

impl ReloadRequest {
    /// Passes it to its worker as an order. With a full queue the operator gets an error to retry.
    pub fn hand_to<T>(
        self,
        worker: &mpsc::Sender<T>,
        order: impl FnOnce(oneshot::Sender<Reloaded>) -> T,
    ) {
        if let Some(place) = spare_place(worker) {
            place.send(order(self.done));
        } else if !worker.is_closed() {
            // The caller may have been cancelled.
            let _ = self.done.send(Err(too_many_reloads()));
        }
    }
}

/// Reserves a slot in a worker's queue for an optional order. Half of the slots stay free for changes, because the sender of changes
/// waits for slots of all workers in turn: a slow worker must not delay the others.
pub fn spare_place<T>(worker: &mpsc::Sender<T>) -> Option<mpsc::Permit<'_, T>> {
    let has_spare = worker.capacity() > worker.max_capacity() / 2;
    has_spare.then(|| worker.try_reserve().ok()).flatten()
}

fn too_many_reloads() -> Problem {
    Problem::unavailable(ProblemCode::TooManyReloads, "too many reloads wait already")
}

/// Queue of reloads; further ones get an error to retry.
const RELOADS_WAITING_MAX: usize = 64;

/// Between two checks whether a driver that is waited for may still come.
pub(crate) const DRIVER_POLL_PERIOD: Duration = Duration::from_millis(500);

/// Handle to the registry.
#[derive(Clone)]
pub struct Registry(Arc<Drivers>);

struct Drivers {
    state: RwLock<State>,
    changes: Changes,
    conditions: Conditions,
    /// Incremented when a driver begins to serve, or serves again after a quarantine.
    serving: Signal,
    /// Incremented when a name or an endpoint becomes free, or may belong to another source.
    freed: Signal,
    /// Whether every file that is there has a source.
    listed: AtomicBool,
    wasm_reloads: Reloads,
    grpc_reloads: Reloads,
    stored: Option<Arc<dyn StoredDrivers>>,
    /// Where names are durable. Without it they are in memory alone.
    store: OnceLock<NameStore>,
    /// Writes of names, one at a time.
    writing_names: tokio::sync::Mutex<()>,
}

/// Queue of reload requests for the task that executes them.
struct Reloads {
    sender: mpsc::Sender<ReloadRequest>,
    inbox: Mutex<Option<mpsc::Receiver<ReloadRequest>>>,
}

impl Reloads {
    fn new() -> Self {
        let (sender, inbox) = mpsc::channel(RELOADS_WAITING_MAX);
        Self {
            sender,
            inbox: Mutex::new(Some(inbox)),
        }
    }
}

#[derive(Default)]
struct State {
    sources: BTreeMap<String, DriverView>,
    serving: BTreeMap<DriverName, Instances>,
    /// Conduct of serving WASM drivers, by source.
    conducts: BTreeMap<String, Conduct>,
    names: Names,
}

impl State {
    /// A source that is being loaded, and may be of any name.
    fn nameless(&self) -> Option<&DriverView> {
        self.sources
            .values()
            .find(|view| view.name.is_none() && view.state.is_under_way())
    }
}

impl Registry {
    /// Creates a registry that sets conditions of the node, and finds previous versions of drivers in `stored`.
    pub fn new(
        changes: Changes,
        conditions: Conditions,
        stored: Option<Arc<dyn StoredDrivers>>,
    ) -> Self {
        Self(Arc::new(Drivers {
            state: RwLock::default(),
            changes,
            conditions,
            serving: Signal::new(),
            freed: Signal::new(),
            listed: AtomicBool::new(true),
            wasm_reloads: Reloads::new(),
            grpc_reloads: Reloads::new(),
            stored,
            store: OnceLock::new(),
            writing_names: tokio::sync::Mutex::new(()),
        }))
    }

    pub fn changes(&self) -> &Changes {
        &self.0.changes
    }

    /// Returns the serving driver of a name; otherwise a problem with its state.
    pub fn serving(&self, name: &DriverName) -> Result<Driver, Problem> {
        let state = self.0.state.read();
        if let Some(instances) = state.serving.get(name) {
            return Ok(instances.picked().driver.clone());
        }
        let known = state
            .sources
            .values()
            .find(|view| view.name.as_ref() == Some(name));
        let Some(view) = known else {
            let why = match state.nameless() {
                Some(view) => format!(" yet: {} is being loaded", view.source),
                None if !self.is_listed() => " yet: the drivers directory is being read".to_owned(),
                None => String::new(),
            };
            let message = format!("driver {name} is not here{why}");
            return Err(Problem::unavailable(ProblemCode::DriverUnknown, message));
        };
        let why = match view.reason.as_str() {
            "" if view.state.is_under_way() => ": it is being loaded".to_owned(),
            "" => String::new(),
            reason => format!(": {reason}"),
        };
        let message = format!(
            "driver {name} ({}) is {}{why}",
            view.source,
            view.state.as_str()
        );
        Err(Problem::unavailable(ProblemCode::DriverNotServing, message))
    }

    /// Says whether every file that is there has a source: not yet after a start.
    pub fn set_listed(&self, listed: bool) {
        self.0.listed.store(listed, Relaxed);
        self.0.freed.send();
    }

    fn is_listed(&self) -> bool {
        self.0.listed.load(Relaxed)
    }

    /// Returns the previous versions of drivers, if they are stored.
    pub fn stored_drivers(&self) -> Option<&Arc<dyn StoredDrivers>> {
        self.0.stored.as_ref()
    }

    /// Returns a device from its driver's last inventory.
    pub fn device(&self, driver: &DriverName, pool: &str, device: &str) -> Option<Device> {
        let inventory = self
            .0
            .state
            .read()
            .serving
            .get(driver)?
            .picked()
            .driver
            .inventory
            .clone()?;
        let (pool, device) = (PoolName::new(pool).ok()?, DeviceName::new(device).ok()?);
        inventory.borrow().inventory.device(&pool, &device).cloned()
    }

    /// Returns the control nodes of a pool, if its driver names any.
    pub fn control_nodes(&self, driver: &DriverName, pool: &PoolName) -> Option<PathPatterns> {
        let inventory = self
            .0
            .state
            .read()
            .serving
            .get(driver)?
            .picked()
            .driver
            .inventory
            .clone()?;
        inventory
            .borrow()
            .inventory
            .pools
            .get(pool)?
            .control_nodes
            .clone()
    }

    /// Returns a device with the counter sets of its pool that it consumes from.
    pub fn device_and_counters(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> Option<(Device, Vec<CounterSet>)> {
        let inventory = self
            .0
            .state
            .read()
            .serving
            .get(driver)?
            .picked()
            .driver
            .inventory
            .clone()?;
        let (pool, device) = (PoolName::new(pool).ok()?, DeviceName::new(device).ok()?);
        let published = inventory.borrow();
        let pool = published.inventory.pools.get(&pool)?;
        let device = pool.devices.get(&device)?.clone();
        let is_consumed = |set: &&CounterSet| {
            device
                .consumes
                .iter()
                .any(|consumed| consumed.name == set.name)
        };
        let sets = pool
            .shared_counters
            .iter()
            .filter(is_consumed)
            .cloned()
            .collect();
        Some((device, sets))
    }

    pub fn all_serving(&self) -> Vec<Driver> {
        self.0
            .state
            .read()
            .serving
            .values()
            .map(|instances| instances.picked().driver.clone())
            .collect()
    }

    /// Returns the last inventory and health of each driver that reports one.
    pub fn published(&self) -> Vec<(DriverName, Arc<Published>)> {
        let published = |driver: Driver| {
            Some((
                driver.identity.name.clone(),
                driver.inventory?.borrow().clone(),
            ))
        };
        self.all_serving()
            .into_iter()
            .filter_map(published)
            .collect()
    }

    /// Returns the drivers that serve, without native plugins that are not connected.
    pub fn connected(&self) -> BTreeSet<DriverName> {
        let state = self.0.state.read();
        let connected = state
            .serving
            .iter()
            .filter(|(_, instances)| instances.picked().is_connected());
        connected.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the kind of a driver; `None` if it has no source.
    pub fn kind(&self, name: &DriverName) -> Option<DriverKind> {
        let state = self.0.state.read();
        let serving = state
            .serving
            .get(name)
            .map(|instances| instances.picked().driver.identity.kind);
        let known = || {
            state
                .sources
                .values()
                .find(|view| view.name.as_ref() == Some(name))
        };
        serving.or_else(|| known().map(|view| view.kind))
    }

    /// Returns whether a driver publishes its own pools: a native plugin that does not list its devices here. One that does not serve yet is
    /// taken for such a plugin.
    pub fn publishes_itself(&self, name: &DriverName) -> bool {
        self.serving_publishes_itself(name).unwrap_or_else(|| {
            let state = self.0.state.read();
            let mut sources = state.sources.values();
            sources.any(|view| view.kind == DriverKind::Grpc && view.name.as_ref() == Some(name))
        })
    }

    /// The same of a driver that serves; `None` of any other.
    pub fn serving_publishes_itself(&self, name: &DriverName) -> Option<bool> {
        let state = self.0.state.read();
        let driver = &state.serving.get(name)?.picked().driver;
        Some(driver.identity.kind == DriverKind::Grpc && driver.inventory.is_none())
    }

    /// Returns the names of drivers with a source.
    pub fn names(&self) -> DriverNames {
        let state = self.0.state.read();
        let serving = state
            .serving
            .iter()
            .filter(|(_, instances)| instances.picked().driver.claims.is_some());
        DriverNames {
            serving: serving.map(|(name, _)| name.clone()).collect(),
            known: state
                .sources
                .values()
                .filter_map(|view| view.name.clone())
                .collect(),
        }
    }

    /// Returns whether a source in a transient state has this name, or may have it.
    pub fn is_under_way(&self, name: &DriverName) -> bool {
        let state = self.0.state.read();
        let of_name = |view: &&DriverView| view.name.as_ref() == Some(name);
        let mut known = state.sources.values().filter(of_name).peekable();
        match known.peek() {
            Some(_) => known.any(|view| view.state.is_under_way()),
            None => !self.is_listed() || state.nameless().is_some(),
        }
    }

    /// Waits until a driver serves. False: `may_come` says that it will not, or it is `until`.
    pub async fn serves_by(
        &self,
        driver: &DriverName,
        until: Instant,
        may_come: impl Fn() -> bool,
    ) -> bool {
        let mut changes = self.serving_changes();
        while self.serving(driver).is_err() {
            if !may_come() || Instant::now() >= until {
                return false;
            }
            // A driver that fails instead of serving is seen by polling alone.
            let next = (Instant::now() + DRIVER_POLL_PERIOD).min(until);
            tokio::select! {
                // A change that is missed here is seen in the next round.
                changed = changes.changed() => if changed.is_err() { return false },
                () = tokio::time::sleep_until(next) => {}
            }
        }
        true
    }

    /// Returns metrics of the calls of the serving drivers.
    pub fn stats(&self) -> Vec<(DriverName, DriverStats)> {
        let of = |driver: Driver| Some((driver.identity.name.clone(), driver.claims?.stats()?));
        self.all_serving().into_iter().filter_map(of).collect()
    }

    /// Returns a watch that changes whenever a driver begins to serve.
    pub fn serving_changes(&self) -> Listener {
        self.0.serving.subscribe()
    }

    /// Returns a watch that changes whenever a name or an endpoint becomes free, or may belong to another source.
    pub fn freed_changes(&self) -> Listener {
        self.0.freed.subscribe()
    }

    /// Returns every source, sorted by name.
    pub fn list(&self) -> Vec<DriverView> {
        let state = self.0.state.read();
        let mut natives = state.natives();
        let view = |view: &DriverView| DriverView {
            native: natives.remove(&view.source),
            ..view.clone()
        };
        state.sources.values().map(view).collect()
    }

    /// Reads a driver's files again, by driver name or file name, and calls it for its devices.
    pub async fn reload(&self, name: &str) -> Result<DriverView, Problem> {
        let source = self.known_source(name)?;
        if self.view(&source)?.kind == DriverKind::Adapter {
            let message = format!("{source} is read when the daemon starts: restart the daemon");
            return Err(Problem::invalid(ProblemCode::DriverNative, message));
        }
        let (done, finished) = oneshot::channel();
        let reloads = self.reloads(
            self.view(&source)
                .map_or(DriverKind::Wasm, |view| view.kind),
        );
        let request = ReloadRequest {
            source: source.clone(),
            done,
        };
        reloads
            .sender
            .try_send(request)
            .map_err(|_| too_many_reloads())?;
        // Dropped: the source was removed meanwhile; the lookup below reports that.
        finished.await.unwrap_or(Ok(()))?;
        self.view(&source)
    }

    fn view(&self, source: &str) -> Result<DriverView, Problem> {
        let gone = || Problem::not_found(ProblemCode::DriverUnknown, format!("{source} is gone"));
        self.0
            .state
            .read()
            .sources
            .get(source)
            .cloned()
            .ok_or_else(gone)
    }

    /// Waits until the task that executes requests for drivers of a kind has received one. Returns false if the task has ended.
    pub async fn answers(&self, kind: DriverKind) -> bool {
        let (done, taken) = oneshot::channel();
        // No source has this name, so the task drops the request as soon as it receives it.
        let request = ReloadRequest {
            source: String::new(),
            done,
        };
        let sender = &self.reloads(kind).sender;
        if sender.send(request).await.is_err() {
            return false;
        }
        taken.await.ok();
        // A task that ends also drops waiting requests.
        !sender.is_closed()
    }

    fn known_source(&self, name: &str) -> Result<String, Problem> {
        let state = self.0.state.read();
        if state.sources.contains_key(name) {
            return Ok(name.to_owned());
        }
        let of_name = |view: &&DriverView| {
            view.name
                .as_ref()
                .is_some_and(|known| known.as_str() == name)
        };
        let serving = state
            .serving
            .get(name)
            .map(|instances| instances.picked().source.clone());
        let found = serving.or_else(|| {
            state
                .sources
                .values()
                .find(of_name)
                .map(|view| view.source.clone())
        });
        found.ok_or_else(|| {
            let message = format!("there is no driver or driver file {name:?}");
            Problem::not_found(ProblemCode::DriverUnknown, message)
        })
    }

    /// Returns the reload requests, for the one task that executes them. `None` after the first call.
    pub fn take_reloads(&self, kind: DriverKind) -> Option<mpsc::Receiver<ReloadRequest>> {
        self.reloads(kind).inbox.lock().take()
    }

    fn reloads(&self, kind: DriverKind) -> &Reloads {
        match kind {
            DriverKind::Wasm => &self.0.wasm_reloads,
            DriverKind::Grpc | DriverKind::Adapter => &self.0.grpc_reloads,
        }
    }

    /// Changes the state of a source, and adds a new one.
    pub fn update(&self, kind: DriverKind, source: &str, change: impl FnOnce(&mut DriverView)) {
        let mut state = self.0.state.write();
        let view = state
            .sources
            .entry(source.to_owned())
            .or_insert_with(|| DriverView::new(kind, source));
        let before = (view.state, view.reason.clone(), view.trust.clone());
        change(view);
        let (now, name) = (
            view.state,
            view.name
                .as_ref()
                .map_or(source, DriverName::as_str)
                .to_owned(),
        );
        let changed = before != (now, view.reason.clone(), view.trust.clone());
        drop(state);
        if changed {
            self.0
                .changes
                .report(ChangedKind::Driver, name, now.as_str());
        }
    }

    /// Makes `driver` the serving driver of its name, with its inventory, instead of a source to which the name does not belong any more. The
    /// error names another source with that name.
    pub fn serve(&self, source: &str, driver: Driver) -> Result<(), String> {
        let name = driver.identity.name.clone();
        let left = {
            let mut state = self.0.state.write();
            state.evict_others(source, &name);
            if let Some(other) = state
                .serving
                .get(&name)
                .and_then(|known| known.other_than(source))
            {
                return Err(other.to_owned());
            }
            // A file with another name before releases its old name.
            let left = state.drop_source(source).filter(|left| *left != name);
            state.serving.insert(name, Instances::one(source, driver));
            left
        };
        self.0.serving.send();
        if left.is_some() {
            self.0.freed.send();
        }
        Ok(())
    }

    /// Removes a source's driver from the managers. Calls in flight continue.
    pub fn retire(&self, source: &str) {
        let left = {
            let mut state = self.0.state.write();
            self.forget_conduct(state.conducts.remove(source));
            state.drop_source(source)
        };
        if let Some(name) = left {
            self.0.freed.send();
            self.settle(&name);
        }
    }

    /// Removes a source, and its driver if it still serves.
    pub fn remove(&self, source: &str) {
        self.retire(source);
        let view = {
            let mut state = self.0.state.write();
            let view = state.sources.remove(source);
            let kind = view.as_ref().map_or(DriverKind::Wasm, |view| view.kind);
            state.forget_facts(source, kind);
            view
        };
        self.0.freed.send();
        if let Some(view) = view {
            let name = view.name.as_ref().map_or(source, DriverName::as_str);
            self.0.changes.report(ChangedKind::Driver, name, "gone");
        }
    }

    pub fn tell_devices(&self, driver: &DriverName) {
        self.0
            .changes
            .report(ChangedKind::Device, driver, "changed");
    }
}
