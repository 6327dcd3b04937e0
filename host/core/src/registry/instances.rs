//! The instances of one driver: which one serves, and the state of each.
//!
//! A WASM driver has one instance. A native driver that is replaced while it runs has two for a while: the newest connected one
//! serves, and the older ones finish their calls.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::{DriverState, NativeView, Registry, State};
use crate::driver::{Driver, Link, StoredDrivers};
use nodedock_model::{ChangedKind, DriverName, HealthReport};

/// The instances of one name, in the order of their registration; never empty.
pub(super) struct Instances(Vec<Instance>);

pub(super) struct Instance {
    pub(super) source: String,
    pub(super) driver: Driver,
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

impl Instances {
    pub(super) fn one(source: &str, driver: Driver) -> Self {
        Self(vec![Instance {
            source: source.to_owned(),
            driver,
            native: None,
        }])
    }

    /// Returns the instance for calls: the newest connected one, or the newest.
    pub(super) fn picked(&self) -> &Instance {
        let connected = self.0.iter().rfind(|instance| instance.is_connected());
        connected
            .or(self.0.last())
            .expect("a name without instances is removed")
    }

    /// Returns a source with the name, other than `source`.
    pub(super) fn other_than(&self, source: &str) -> Option<&str> {
        self.0
            .iter()
            .map(|instance| instance.source.as_str())
            .find(|other| *other != source)
    }

    /// Keeps the instances of some sources. Returns whether any is left.
    pub(super) fn retain(&mut self, is_kept: impl Fn(&str) -> bool) -> bool {
        self.0.retain(|instance| is_kept(&instance.source));
        !self.0.is_empty()
    }

    /// Whether an instance is of one of some sources.
    pub(super) fn any(&self, is_wanted: impl Fn(&str) -> bool) -> bool {
        self.0.iter().any(|instance| is_wanted(&instance.source))
    }

    fn is_native(&self) -> bool {
        self.0.iter().all(|instance| instance.native.is_some())
    }
}

impl Instance {
    pub(super) fn is_connected(&self) -> bool {
        self.native
            .as_ref()
            .is_none_or(|native| (native.link)() == Link::Connected)
    }
}

impl State {
    /// Removes a source's instance. Returns its name, if it had one.
    pub(super) fn drop_source(&mut self, source: &str) -> Option<DriverName> {
        let has =
            |instances: &Instances| instances.0.iter().any(|instance| instance.source == source);
        let name = self
            .serving
            .iter()
            .find(|(_, instances)| has(instances))
            .map(|(name, _)| name.clone())?;
        let instances = self.serving.get_mut(&name)?;
        instances.0.retain(|instance| instance.source != source);
        if instances.0.is_empty() {
            self.serving.remove(&name);
        }
        Some(name)
    }

    /// Gives a source's instance a new identity, so that recorded refusals no longer apply.
    pub(super) fn renew(&mut self, source: &str, stored: Option<&Arc<dyn StoredDrivers>>) {
        let instances = self
            .serving
            .values_mut()
            .flat_map(|instances| &mut instances.0);
        for instance in instances.filter(|instance| instance.source == source) {
            let renewed = Arc::new((*instance.driver.identity).clone());
            // Before the other is dropped, so that its file always has an owner.
            if let Some(stored) = stored {
                stored.serves_as(&renewed);
            }
            instance.driver.identity = renewed;
        }
    }

    pub(super) fn natives(&self) -> BTreeMap<String, NativeView> {
        let view = |instance: &Instance| {
            let native = instance.native.as_ref()?;
            let view = NativeView {
                endpoint: native.endpoint.display().to_string(),
                services: native.services.clone(),
                connection: (native.link)().as_str(),
                health: native
                    .health
                    .as_ref()
                    .map_or_else(HealthReport::new, |health| health()),
            };
            Some((instance.source.clone(), view))
        };
        self.serving
            .values()
            .flat_map(|instances| &instances.0)
            .filter_map(view)
            .collect()
    }

    fn check(
        &self,
        name: &DriverName,
        source: &str,
        endpoint: &std::path::Path,
    ) -> Result<(), Taken> {
        if let Some(known) = self.serving.get(name).filter(|known| !known.is_native()) {
            let other = known.picked().source.clone();
            return Err(Taken::Name {
                name: name.clone(),
                other,
            });
        }
        let instances = self
            .serving
            .iter()
            .flat_map(|(name, known)| known.0.iter().map(move |i| (name, i)));
        for (name, other) in instances.filter(|(_, instance)| instance.source != source) {
            if other
                .native
                .as_ref()
                .is_some_and(|native| native.endpoint == endpoint)
            {
                let (endpoint, other) = (endpoint.display().to_string(), other.source.clone());
                return Err(Taken::Endpoint {
                    endpoint,
                    name: name.clone(),
                    other,
                });
            }
        }
        Ok(())
    }

    /// Updates the state of each instance of a name. Returns the changes: source and state.
    fn settle(&mut self, name: &DriverName) -> Vec<(String, DriverState)> {
        let Some(instances) = self
            .serving
            .get(name)
            .filter(|instances| instances.is_native())
        else {
            return Vec::new();
        };
        let serving = &instances.picked().source;
        let mut changed = Vec::new();
        for instance in &instances.0 {
            let Some(view) = self.sources.get_mut(&instance.source) else {
                continue;
            };
            let (state, reason) = state_of(instance, serving);
            if view.state != state {
                view.state = state;
                view.note(state.as_str(), &reason, 0, None);
                changed.push((instance.source.clone(), state));
            }
            view.reason = reason;
        }
        changed
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

impl Registry {
    /// Adds a native driver's instance. Its source must exist.
    pub fn serve_instance(
        &self,
        source: &str,
        driver: Driver,
        native: Native,
    ) -> Result<(), Taken> {
        let name = driver.identity.name.clone();
        {
            let mut state = self.0.state.write();
            state.evict_others(source, &name);
            state.check(&name, source, &native.endpoint)?;
            state.drop_source(source);
            let instance = Instance {
                source: source.to_owned(),
                driver,
                native: Some(native),
            };
            state
                .serving
                .entry(name.clone())
                .or_insert_with(|| Instances(Vec::new()))
                .0
                .push(instance);
        }
        self.settle(&name);
        Ok(())
    }

    /// Returns the current health of a native driver's devices. `None`: it does not serve, or has no health service.
    pub fn native_health(&self, name: &DriverName) -> Option<HealthReport> {
        let state = self.0.state.read();
        let native = state.serving.get(name)?.picked().native.as_ref()?;
        native.health.as_ref().map(|health| health())
    }

    /// Updates the state of each instance of a driver, and notifies waiting callers.
    pub fn settle(&self, name: &DriverName) {
        let changed = self.0.state.write().settle(name);
        for (source, state) in &changed {
            match state {
                DriverState::Lost => {
                    tracing::warn!(driver = %name, socket = source, "plugin lost, connecting again")
                }
                state => {
                    tracing::info!(driver = %name, socket = source, state = state.as_str(), "plugin changed")
                }
            }
            self.0
                .changes
                .report(ChangedKind::Driver, name, state.as_str());
        }
        if changed
            .iter()
            .any(|(_, state)| *state == DriverState::Serving)
        {
            self.0.serving.send();
        }
    }
}
