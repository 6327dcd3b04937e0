//! The drivers that serve: the instances of each name, which one of them is called, and the state of each.
//!
//! Given drivers and the sources that have to give way to them, it says when one begins to serve. A WASM driver has one instance. A native driver that is replaced while it runs has two for a while: the newest connected one
//! serves, and the older ones finish their calls.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use super::sources::{DriverState, NativeView, Sources};
use crate::driver::{Driver, DriverStats, Link, Published, StoredDrivers};
use nodedock_base::signal::{Listener, Signal};
use nodedock_model::limit::DRIVER_RETURN;
use nodedock_model::{
    CounterSet, Device, DeviceName, DriverKind, DriverName, HealthReport, PathPatterns, PoolName,
};

/// The instances of one name, in the order of their registration; never empty.
struct NamedInstances(Vec<Instance>);

struct Instance {
    source: String,
    driver: Driver,
    /// `None`: a WASM driver.
    native: Option<Native>,
}

/// State of a native instance.
pub struct Native {
    /// Endpoint, with all links resolved.
    pub endpoint: PathBuf,
    pub services: Vec<String>,
    /// Returns the state of its connection.
    pub link: Box<dyn Fn() -> Link + Send + Sync>,
    /// Returns the current health of its devices. `None`: the plugin has no health service.
    pub health: Option<Box<dyn Fn() -> HealthReport + Send + Sync>>,
}

/// Why an instance cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Taken {
    #[error("driver name {name} is taken by {other}, which came first")]
    Name { name: DriverName, other: String },
    #[error("endpoint {endpoint} is already registered for driver {name} by {other}")]
    Endpoint {
        endpoint: String,
        name: DriverName,
        other: String,
    },
}

impl NamedInstances {
    /// Returns the instance for calls: the newest connected one, or the newest.
    fn picked(&self) -> &Instance {
        let connected = self.0.iter().rfind(|instance| instance.is_connected());
        connected
            .or(self.0.last())
            .expect("a name without instances is removed")
    }

    fn has(&self, source: &str) -> bool {
        self.0.iter().any(|instance| instance.source == source)
    }

    fn is_native(&self) -> bool {
        self.0.iter().all(|instance| instance.native.is_some())
    }
}

impl Instance {
    fn is_connected(&self) -> bool {
        self.native
            .as_ref()
            .is_none_or(|native| (native.link)() == Link::Connected)
    }

    fn view(&self) -> Option<NativeView> {
        let native = self.native.as_ref()?;
        Some(NativeView {
            endpoint: native.endpoint.display().to_string(),
            services: native.services.clone(),
            connection: (native.link)().as_str(),
            health: native
                .health
                .as_ref()
                .map_or_else(HealthReport::new, |health| health()),
        })
    }
}

#[derive(Default)]
struct ByName(BTreeMap<DriverName, NamedInstances>);

impl ByName {
    fn all(&self) -> impl Iterator<Item = (&DriverName, &Instance)> {
        self.0
            .iter()
            .flat_map(|(name, known)| known.0.iter().map(move |one| (name, one)))
    }

    /// Removes those instances of a name that `is_removed` says of their sources.
    fn remove(&mut self, name: &DriverName, is_removed: impl Fn(&str) -> bool) {
        if let Some(known) = self.0.get_mut(name) {
            known.0.retain(|instance| !is_removed(&instance.source));
            if known.0.is_empty() {
                self.0.remove(name);
            }
        }
    }

    /// Removes a source's instance. Returns its name, if it had one.
    fn remove_source(&mut self, source: &str) -> Option<DriverName> {
        let (name, _) = self.0.iter().find(|(_, known)| known.has(source))?;
        let name = name.clone();
        self.remove(&name, |other| other == source);
        Some(name)
    }

    /// Checks that a native instance can be added.
    fn check(&self, name: &DriverName, source: &str, endpoint: &Path) -> Result<(), Taken> {
        if let Some(known) = self.0.get(name).filter(|known| !known.is_native()) {
            let other = known.picked().source.clone();
            return Err(Taken::Name {
                name: name.clone(),
                other,
            });
        }
        let has_endpoint = |instance: &Instance| {
            let native = instance.native.as_ref();
            native.is_some_and(|native| native.endpoint == endpoint)
        };
        let mut others = self.all().filter(|(_, other)| other.source != source);
        match others.find(|(_, other)| has_endpoint(other)) {
            Some((name, other)) => Err(Taken::Endpoint {
                endpoint: endpoint.display().to_string(),
                name: name.clone(),
                other: other.source.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// The owner of the instances.
pub struct Instances {
    by_name: RwLock<ByName>,
    sources: Arc<Sources>,
    /// Sent when a driver begins to serve, or serves again after a quarantine.
    serving: Signal,
    /// Times at which an instance of a name ended, for as long as it is expected back.
    ended: Mutex<BTreeMap<DriverName, Instant>>,
    stored: Option<Arc<dyn StoredDrivers>>,
}

impl Instances {
    pub(super) fn new(sources: Arc<Sources>, stored: Option<Arc<dyn StoredDrivers>>) -> Self {
        Self {
            by_name: RwLock::default(),
            sources,
            serving: Signal::new(),
            ended: Mutex::default(),
            stored,
        }
    }

    /// Returns a watch that changes whenever a driver begins to serve.
    pub fn changes(&self) -> Listener {
        self.serving.subscribe()
    }

    /// Returns the previous versions of drivers, if they are stored.
    pub fn stored_drivers(&self) -> Option<&Arc<dyn StoredDrivers>> {
        self.stored.as_ref()
    }

    pub(super) fn serving(&self, name: &DriverName) -> Option<Driver> {
        let by_name = self.by_name.read();
        Some(by_name.0.get(name)?.picked().driver.clone())
    }

    /// Returns the source of a serving driver.
    pub(super) fn source_of(&self, name: &str) -> Option<String> {
        let by_name = self.by_name.read();
        Some(by_name.0.get(name)?.picked().source.clone())
    }

    /// Returns the sources of all instances of a name.
    pub(super) fn sources_of(&self, name: &DriverName) -> Vec<String> {
        let by_name = self.by_name.read();
        let instances = by_name.0.get(name).into_iter().flat_map(|known| &known.0);
        instances.map(|instance| instance.source.clone()).collect()
    }

    /// Returns the serving drivers.
    pub fn all(&self) -> Vec<Driver> {
        let by_name = self.by_name.read();
        let picked = by_name.0.values().map(NamedInstances::picked);
        picked.map(|instance| instance.driver.clone()).collect()
    }

    /// Returns the names of drivers that are called for claims, connected or not.
    pub(super) fn names_for_claims(&self) -> BTreeSet<DriverName> {
        let serving = self.all().into_iter();
        let serving = serving.filter(|driver| driver.claims.is_some());
        serving.map(|driver| driver.identity.name.clone()).collect()
    }

    /// Returns the drivers that serve, without native plugins that are not connected.
    pub fn connected(&self) -> BTreeSet<DriverName> {
        let by_name = self.by_name.read();
        let names = by_name.0.iter();
        let connected = names.filter(|(_, known)| known.picked().is_connected());
        connected.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the last inventory and health of each driver that reports one.
    pub fn published(&self) -> Vec<(DriverName, Arc<Published>)> {
        let published = |driver: Driver| {
            Some((
                driver.identity.name.clone(),
                driver.inventory?.borrow().clone(),
            ))
        };
        self.all().into_iter().filter_map(published).collect()
    }

    fn published_by(&self, driver: &DriverName) -> Option<Arc<Published>> {
        Some(self.serving(driver)?.inventory?.borrow().clone())
    }

    /// Returns a device from its driver's last inventory.
    pub fn device(&self, driver: &DriverName, pool: &str, device: &str) -> Option<Device> {
        let (pool, device) = (PoolName::new(pool).ok()?, DeviceName::new(device).ok()?);
        let published = self.published_by(driver)?;
        published.inventory.device(&pool, &device).cloned()
    }

    /// Returns the control nodes of a pool, if its driver names any.
    pub fn control_nodes(&self, driver: &DriverName, pool: &PoolName) -> Option<PathPatterns> {
        let published = self.published_by(driver)?;
        published.inventory.pools.get(pool)?.control_nodes.clone()
    }

    /// Returns what `look` finds at a device and the counter sets of its pool.
    pub fn with_device<T>(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
        look: impl FnOnce(&Device, &[CounterSet]) -> T,
    ) -> Option<T> {
        let (pool, device) = (PoolName::new(pool).ok()?, DeviceName::new(device).ok()?);
        let published = self.published_by(driver)?;
        let pool = published.inventory.pools.get(&pool)?;
        Some(look(pool.devices.get(&device)?, &pool.shared_counters))
    }

    /// Returns whether a serving driver publishes its own pools: a native plugin that does not list its devices here; `None` of any other.
    pub fn publishes_itself(&self, name: &DriverName) -> Option<bool> {
        let driver = self.serving(name)?;
        Some(driver.identity.kind == DriverKind::Grpc && driver.inventory.is_none())
    }

    /// Returns metrics of the calls of the serving drivers.
    pub fn stats(&self) -> Vec<(DriverName, DriverStats)> {
        let of = |driver: Driver| Some((driver.identity.name.clone(), driver.claims?.stats()?));
        self.all().into_iter().filter_map(of).collect()
    }

    /// Returns the current health of a native driver's devices. `None`: it does not serve, or has no health service.
    pub fn native_health(&self, name: &DriverName) -> Option<HealthReport> {
        let by_name = self.by_name.read();
        let native = by_name.0.get(name)?.picked().native.as_ref()?;
        native.health.as_ref().map(|health| health())
    }

    /// Returns the data of native plugins, by source.
    pub(super) fn natives(&self) -> BTreeMap<String, NativeView> {
        let by_name = self.by_name.read();
        let natives = by_name.all();
        let natives = natives.filter_map(|(_, one)| Some((one.source.clone(), one.view()?)));
        natives.collect()
    }

    /// Makes `driver` the only instance of its name, instead of the sources that `is_evicted` says. Returns another name that the source had
    /// before. The error names another source with that name.
    pub(super) fn serve(
        &self,
        source: &str,
        driver: Driver,
        is_evicted: impl Fn(&str) -> bool,
    ) -> Result<Option<DriverName>, String> {
        let name = driver.identity.name.clone();
        let mut by_name = self.by_name.write();
        by_name.remove(&name, is_evicted);
        let mut known = by_name.0.get(&name).into_iter().flat_map(|known| &known.0);
        if let Some(other) = known.find(|other| other.source != source) {
            return Err(other.source.clone());
        }
        let left = by_name.remove_source(source).filter(|left| *left != name);
        let instance = Instance {
            source: source.to_owned(),
            driver,
            native: None,
        };
        by_name.0.insert(name, NamedInstances(vec![instance]));
        drop(by_name);
        self.serving.send();
        Ok(left)
    }

    /// Adds a native driver's instance, instead of the sources that `is_evicted` says.
    pub(super) fn add(
        &self,
        source: &str,
        driver: Driver,
        native: Native,
        is_evicted: impl Fn(&str) -> bool,
    ) -> Result<(), Taken> {
        let name = driver.identity.name.clone();
        let mut by_name = self.by_name.write();
        by_name.remove(&name, is_evicted);
        by_name.check(&name, source, &native.endpoint)?;
        by_name.remove_source(source);
        let instance = Instance {
            source: source.to_owned(),
            driver,
            native: Some(native),
        };
        let known = by_name.0.entry(name);
        known
            .or_insert_with(|| NamedInstances(Vec::new()))
            .0
            .push(instance);
        Ok(())
    }

    /// Removes a source's instance. Returns its name, if it had one.
    pub(super) fn retire(&self, source: &str) -> Option<DriverName> {
        let name = self.by_name.write().remove_source(source)?;
        let now = Instant::now();
        let mut ended = self.ended.lock();
        ended.retain(|_, at| now < *at + DRIVER_RETURN);
        ended.insert(name.clone(), now);
        Some(name)
    }

    /// Returns whether an instance of a name ended a moment ago.
    pub(super) fn has_just_ended(&self, name: &DriverName) -> bool {
        let ended = self.ended.lock().get(name).copied();
        ended.is_some_and(|at| Instant::now() < at + DRIVER_RETURN)
    }

    /// Gives a source's instance a new identity, so that recorded refusals no longer apply.
    pub(super) fn renew(&self, source: &str) {
        let mut by_name = self.by_name.write();
        let instances = by_name.0.values_mut().flat_map(|known| &mut known.0);
        for instance in instances.filter(|instance| instance.source == source) {
            let renewed = Arc::new((*instance.driver.identity).clone());
            // Before the other is dropped, so that its file always has an owner.
            if let Some(stored) = &self.stored {
                stored.serves_as(&renewed);
            }
            instance.driver.identity = renewed;
        }
        drop(by_name);
        self.serving.send();
    }

    /// Updates the state of each instance of a native driver, and notifies waiting callers.
    pub fn settle(&self, name: &DriverName) {
        let changed = self.settle_sources(name);
        for (source, state) in &changed {
            match state {
                DriverState::Lost => {
                    tracing::warn!(driver = %name, socket = source, "plugin lost, connecting again")
                }
                state => {
                    tracing::info!(driver = %name, socket = source, state = state.as_str(), "plugin changed")
                }
            }
            self.sources.report(name, *state);
        }
        if changed
            .iter()
            .any(|(_, state)| *state == DriverState::Serving)
        {
            self.serving.send();
        }
    }

    /// Returns the changes: source and state.
    fn settle_sources(&self, name: &DriverName) -> Vec<(String, DriverState)> {
        // Locked for one caller alone, so that an outdated state is not shown last.
        let by_name = self.by_name.write();
        let Some(known) = by_name.0.get(name).filter(|known| known.is_native()) else {
            return Vec::new();
        };
        let serving = &known.picked().source;
        let settled = known.0.iter().filter_map(|instance| {
            let (state, reason) = state_of(instance, serving);
            let is_changed = self.sources.change(&instance.source, |view| {
                let is_changed = view.state != state;
                if is_changed {
                    view.state = state;
                    view.note(state.as_str(), &reason, 0, None);
                }
                view.reason = reason;
                is_changed
            })?;
            is_changed.then(|| (instance.source.clone(), state))
        });
        settled.collect()
    }
}

/// Returns the state of an instance, with the reason.
fn state_of(instance: &Instance, serving: &str) -> (DriverState, String) {
    match instance.native.as_ref().map(|native| (native.link)()) {
        Some(Link::Lost(why)) => (DriverState::Lost, why),
        Some(Link::Closed) => (DriverState::Draining, "its registration is gone".to_owned()),
        Some(Link::Connecting) => (DriverState::Described, "not connected yet".to_owned()),
        Some(Link::Connected) | None if instance.source == serving => {
            (DriverState::Serving, String::new())
        }
        Some(Link::Connected) | None => (
            DriverState::Draining,
            format!("a newer instance serves: {serving}"),
        ),
    }
}
