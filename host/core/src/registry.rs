//! The registry: drivers with their states, the sources that names belong to, and the serving instance of each driver name.
//!
//! Puts its owners together, each with its own state and lock: the sources, the serving instances, the names, the quarantines and the requests to
//! reload. Given the states of drivers, it returns the driver to call to the managers, and views to the APIs. Never prepares anything.
//!
//! Locks are taken in this order: a quarantine, the instances, the names or the sources.

mod instances;
pub mod names;
mod own_devices;
mod quarantine;
mod reloads;
mod sources;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use instances::{Instances, Native, Taken};
pub use names::Names;
pub use own_devices::{DeviceKeys, OwnDevices, PublishedDevices};
pub use quarantine::Quarantines;
pub use reloads::{ReloadRequest, Reloaded, Reloads, spare_place};
pub use sources::{DriverState, DriverView, NativeView, Sources, TrustView};

use crate::driver::{Driver, StoredDrivers};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_model::{DriverKind, DriverName, NameSource, Problem, ProblemCode};

/// Names of drivers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverNames {
    /// Drivers that are called for claims, connected or not.
    pub serving: BTreeSet<DriverName>,
    /// Names of all sources with a known name, in any state.
    pub known: BTreeSet<DriverName>,
}

/// Interval between two checks whether an awaited driver may still come.
pub(crate) const DRIVER_POLL_PERIOD: Duration = Duration::from_millis(500);

/// Handles to the owners of the registry. None calls one that is below it.
#[derive(Clone)]
pub struct Registry {
    /// Sources of drivers, and their states.
    pub sources: Arc<Sources>,
    /// The drivers that serve.
    pub instances: Arc<Instances>,
    /// The devices that native plugins publish themselves.
    pub own_devices: Arc<OwnDevices>,
    /// The sources that names belong to.
    pub names: Arc<Names>,
    pub quarantines: Arc<Quarantines>,
    pub reloads: Arc<Reloads>,
}

impl Registry {
    /// Creates a registry that sets conditions of the node, and finds previous versions of drivers in `stored`.
    pub fn new(
        changes: Changes,
        conditions: Conditions,
        stored: Option<Arc<dyn StoredDrivers>>,
    ) -> Self {
        let own_devices = Arc::new(OwnDevices::new(changes.clone()));
        let sources = Arc::new(Sources::new(changes, conditions.clone()));
        let instances = Arc::new(Instances::new(sources.clone(), stored));
        Self {
            own_devices,
            names: Arc::new(Names::new(sources.clone(), instances.clone())),
            quarantines: Arc::new(Quarantines::new(
                sources.clone(),
                instances.clone(),
                conditions,
            )),
            reloads: Arc::new(Reloads::new()),
            sources,
            instances,
        }
    }

    /// Returns the serving driver of a name; otherwise a problem with its state.
    pub fn serving(&self, name: &DriverName) -> Result<Driver, Problem> {
        self.instances
            .serving(name)
            .ok_or_else(|| self.not_serving(name))
    }

    fn not_serving(&self, name: &DriverName) -> Problem {
        let Some(view) = self.sources.of_name(name.as_str()) else {
            let why = match self.sources.nameless() {
                Some(source) => format!(" yet: {source} is being loaded"),
                None if !self.names.is_listed() => {
                    " yet: the drivers directory is being read".to_owned()
                }
                None => String::new(),
            };
            let message = format!("driver {name} is not here{why}");
            return Problem::unavailable(ProblemCode::DriverUnknown, message);
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
        Problem::unavailable(ProblemCode::DriverNotServing, message)
    }

    /// Returns the kind of a driver; `None` if it has no source.
    pub fn kind(&self, name: &DriverName) -> Option<DriverKind> {
        let serving = self.instances.serving(name);
        let serving = serving.map(|driver| driver.identity.kind);
        serving.or_else(|| Some(self.sources.of_name(name.as_str())?.kind))
    }

    /// Returns whether a driver publishes its own pools: a native plugin that does not list its devices here. One that does not serve yet is
    /// taken for such a plugin.
    pub fn publishes_itself(&self, name: &DriverName) -> bool {
        let serving = self.instances.publishes_itself(name);
        serving.unwrap_or_else(|| self.sources.has_plugin(name))
    }

    /// Returns the devices of each serving driver, as far as they are known. Those of a plugin that is not connected are not: others delete its
    /// slices.
    pub fn published_devices(&self) -> BTreeMap<DriverName, PublishedDevices> {
        let connected = self.instances.connected();
        let devices = |driver: Driver| {
            let name = driver.identity.name.clone();
            let published = match driver.inventory {
                Some(inventory) => PublishedDevices::Listed(inventory.borrow().clone()),
                None if connected.contains(&name) => {
                    PublishedDevices::Own(self.own_devices.of(&name)?)
                }
                None => return None,
            };
            Some((name, published))
        };
        self.instances
            .all()
            .into_iter()
            .filter_map(devices)
            .collect()
    }

    /// Returns the names of drivers with a source.
    pub fn driver_names(&self) -> DriverNames {
        let serving = self.instances.names_for_claims();
        let mut known = self.sources.names();
        // A source that ends meanwhile was known.
        known.extend(serving.iter().cloned());
        DriverNames { serving, known }
    }

    /// Returns whether a source in a transient state has this name, or may have it.
    pub fn is_under_way(&self, name: &DriverName) -> bool {
        let known = self.sources.is_under_way(name);
        known.unwrap_or_else(|| !self.names.is_listed() || self.sources.nameless().is_some())
    }

    /// Returns whether a driver that has no source now served a moment ago, and so may be one that is being replaced.
    pub fn may_return(&self, name: &DriverName) -> bool {
        self.instances.has_just_ended(name) && self.sources.of_name(name.as_str()).is_none()
    }

    /// Waits until a driver serves. False: `may_come` says that it will not, or it is `until`.
    pub async fn serves_by(
        &self,
        driver: &DriverName,
        until: Instant,
        may_come: impl Fn() -> bool,
    ) -> bool {
        let mut changes = self.instances.changes();
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

    /// Returns every source, sorted by name.
    pub fn list(&self) -> Vec<DriverView> {
        let mut natives = self.instances.natives();
        let mut views = self.sources.views();
        for view in &mut views {
            view.native = natives.remove(&view.source);
        }
        views
    }

    /// Reads a driver's files again, by driver name or file name, and calls it for its devices.
    pub async fn reload(&self, name: &str) -> Result<DriverView, Problem> {
        let source = self.known_source(name)?;
        let kind = self.sources.view(&source)?.kind;
        let why = match kind {
            DriverKind::Wasm | DriverKind::Grpc => None,
            DriverKind::Adapter => Some("reads the adapter whenever its file changes"),
            DriverKind::Cdi => Some("reads its CDI specs whenever they change"),
        };
        if let Some(why) = why {
            let message = format!("{source} {why}");
            return Err(Problem::invalid(ProblemCode::DriverNative, message));
        }
        self.reloads.request(kind, &source).await?;
        self.sources.view(&source)
    }

    /// Ends a driver's quarantine, by driver name or file name.
    pub fn resume(&self, name: &str) -> Result<DriverView, Problem> {
        let source = self.known_source(name)?;
        self.quarantines.resume(&source, name)
    }

    fn known_source(&self, name: &str) -> Result<String, Problem> {
        if self.sources.view(name).is_ok() {
            return Ok(name.to_owned());
        }
        let serving = self.instances.source_of(name);
        let found = serving.or_else(|| Some(self.sources.of_name(name)?.source));
        found.ok_or_else(|| {
            let message = format!("there is no driver or driver file {name:?}");
            Problem::not_found(ProblemCode::DriverUnknown, message)
        })
    }

    /// Makes `driver` the serving driver of its name, with its inventory, instead of a source to which the name does not belong any more. The
    /// error names another source with that name.
    pub fn serve(&self, source: &str, driver: Driver) -> Result<(), String> {
        let name = driver.identity.name.clone();
        let is_evicted = |other: &str| self.names.gives_way(other, source, &name);
        // A file with another name before releases its old name.
        if self.instances.serve(source, driver, is_evicted)?.is_some() {
            self.names.report_freed();
        }
        Ok(())
    }

    /// Makes a driver of this process the serving driver of its name, by a source of its own. The error says why the name is not free.
    pub fn serve_own(&self, source: NameSource, driver: Driver) -> Result<(), String> {
        let identity = driver.identity.clone();
        let (key, name) = (identity.source.as_str(), &identity.name);
        self.names.set_source(key, Some(source));
        self.names.set_described(key, name);
        self.names.hold(key, name).map_err(|why| why.to_string())?;
        self.serve(key, driver)
            .map_err(|other| format!("it is taken by {other}, which came first"))
    }

    /// Adds a native driver's instance. Its source must exist.
    pub fn serve_instance(
        &self,
        source: &str,
        driver: Driver,
        native: Native,
    ) -> Result<(), Taken> {
        let name = driver.identity.name.clone();
        let is_evicted = |other: &str| self.names.gives_way(other, source, &name);
        self.instances.add(source, driver, native, is_evicted)?;
        self.instances.settle(&name);
        Ok(())
    }

    /// Removes a source's driver from the managers. Calls in flight continue.
    pub fn retire(&self, source: &str) {
        self.quarantines.forget(source);
        if let Some(name) = self.instances.retire(source) {
            self.names.report_freed();
            self.instances.settle(&name);
        }
    }

    /// Removes a source, and its driver if it still serves.
    pub fn remove(&self, source: &str) {
        self.retire(source);
        let view = self.sources.remove(source);
        let kind = view.as_ref().map_or(DriverKind::Wasm, |view| view.kind);
        self.names.end_source(source, kind);
        if let Some(view) = view {
            self.sources.report_gone(&view);
        }
    }
}
