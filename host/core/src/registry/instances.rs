//! The instances of one driver: which of them serves, and what is shown of each.
//!
//! A WASM driver has one. Of a native driver that is replaced while it runs there are two for a while: the newest that is connected
//! serves, and the older ones finish what they were asked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::{DriverState, DriverView, NativeView, Registry, State};
use crate::driver::{Driver, Link, Predecessors};
use nodedock_model::{ChangedKind, DriverName, HealthReport};

/// The instances of one name, in the order of their registration; never none.
pub(super) struct Instances(Vec<Instance>);

pub(super) struct Instance {
    pub(super) source: String,
    pub(super) driver: Driver,
    /// None: a WASM driver.
    native: Option<Native>,
}

/// What a native instance stands on.
pub struct Native {
    /// With every link in it resolved.
    pub endpoint: PathBuf,
    pub services: Vec<String>,
    /// Reads how its connection is now.
    pub link: Box<dyn Fn() -> Link + Send + Sync>,
    /// Reads its devices' health as it counts now. None: the plugin has no health service.
    pub health: Option<Box<dyn Fn() -> HealthReport + Send + Sync>>,
}

/// Why an instance cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Taken {
    #[error("driver name {name} is taken by {other}, which came first")]
    Name { name: DriverName, other: String },
    #[error("endpoint {endpoint} is already registered for driver {name} by {other}")]
    Endpoint { endpoint: String, name: DriverName, other: String },
}

impl Instances {
    pub(super) fn one(source: &str, driver: Driver) -> Self {
        Self(vec![Instance { source: source.to_owned(), driver, native: None }])
    }

    /// The one that is called: the newest that is connected, or the newest.
    pub(super) fn picked(&self) -> &Instance {
        &self.0[pick(self.0.iter().map(Instance::is_connected)).expect("a name without instances is removed")]
    }

    /// A source that has the name, when it is not `source`.
    pub(super) fn other_than(&self, source: &str) -> Option<&str> {
        self.0.iter().map(|instance| instance.source.as_str()).find(|other| *other != source)
    }

    fn is_native(&self) -> bool {
        self.0.iter().all(|instance| instance.native.is_some())
    }
}

impl Instance {
    fn is_connected(&self) -> bool {
        self.native.as_ref().is_none_or(|native| (native.link)() == Link::Connected)
    }
}

/// The last that is connected, or the last.
fn pick(connected: impl Iterator<Item = bool>) -> Option<usize> {
    let mut picked = None;
    let mut last = None;
    for (index, connected) in connected.enumerate() {
        last = Some(index);
        picked = if connected { last } else { picked };
    }
    picked.or(last)
}

impl State {
    /// Takes a source's instance out. The name it had, if it had one.
    pub(super) fn drop_source(&mut self, source: &str) -> Option<DriverName> {
        let has = |instances: &Instances| instances.0.iter().any(|instance| instance.source == source);
        let name = self.serving.iter().find(|(_, instances)| has(instances)).map(|(name, _)| name.clone())?;
        let instances = self.serving.get_mut(&name)?;
        instances.0.retain(|instance| instance.source != source);
        if instances.0.is_empty() {
            self.serving.remove(&name);
        }
        Some(name)
    }

    /// Makes a source's instance another one for those who remember what it refused.
    pub(super) fn renew(&mut self, source: &str, predecessors: Option<&Arc<dyn Predecessors>>) {
        let instances = self.serving.values_mut().flat_map(|instances| &mut instances.0);
        for instance in instances.filter(|instance| instance.source == source) {
            let renewed = Arc::new((*instance.driver.identity).clone());
            // Before the other is given up, so that its file is always somebody's.
            if let Some(predecessors) = predecessors {
                predecessors.serves_as(&renewed);
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
                health: native.health.as_ref().map_or_else(HealthReport::new, |health| health()),
            };
            Some((instance.source.clone(), view))
        };
        self.serving.values().flat_map(|instances| &instances.0).filter_map(view).collect()
    }

    fn check(&self, name: &DriverName, source: &str, endpoint: &std::path::Path) -> Result<(), Taken> {
        if let Some(known) = self.serving.get(name).filter(|known| !known.is_native()) {
            let other = known.picked().source.clone();
            return Err(Taken::Name { name: name.clone(), other });
        }
        let instances = self.serving.iter().flat_map(|(name, known)| known.0.iter().map(move |i| (name, i)));
        for (name, other) in instances.filter(|(_, instance)| instance.source != source) {
            if other.native.as_ref().is_some_and(|native| native.endpoint == endpoint) {
                let (endpoint, other) = (endpoint.display().to_string(), other.source.clone());
                return Err(Taken::Endpoint { endpoint, name: name.clone(), other });
            }
        }
        Ok(())
    }

    /// Shows what each instance of a name is now. What changed: source and state.
    fn settle(&mut self, name: &DriverName) -> Vec<(String, DriverState)> {
        let Some(instances) = self.serving.get(name).filter(|instances| instances.is_native()) else {
            return Vec::new();
        };
        let serving = &instances.picked().source;
        let mut changed = Vec::new();
        for instance in &instances.0 {
            let Some(view) = self.sources.get_mut(&instance.source) else { continue };
            let (state, reason) = standing(instance, serving);
            if note(view, state, &reason) {
                changed.push((instance.source.clone(), state));
            }
            view.reason = reason;
        }
        changed
    }
}

/// What an instance is, and why.
fn standing(instance: &Instance, serving: &str) -> (DriverState, String) {
    match instance.native.as_ref().map(|native| (native.link)()) {
        Some(Link::Lost(why)) => (DriverState::Lost, why),
        Some(Link::Closed) => (DriverState::Draining, "its registration is gone".to_owned()),
        Some(Link::Connecting) => (DriverState::Described, "not connected yet".to_owned()),
        Some(Link::Connected) | None if instance.source == serving => (DriverState::Serving, String::new()),
        Some(Link::Connected) | None => {
            (DriverState::Draining, format!("a newer instance serves: {serving}"))
        }
    }
}

/// True: it is another state than before.
fn note(view: &mut DriverView, state: DriverState, reason: &str) -> bool {
    let is_new = view.state != state;
    if is_new {
        view.state = state;
        view.note(state.as_str(), reason, 0, None);
    }
    is_new
}

impl Registry {
    /// Adds a native driver's instance. Its source must be shown already.
    pub fn serve_instance(&self, source: &str, driver: Driver, native: Native) -> Result<(), Taken> {
        let name = driver.identity.name.clone();
        {
            let mut state = self.write();
            state.check(&name, source, &native.endpoint)?;
            state.drop_source(source);
            let instance = Instance { source: source.to_owned(), driver, native: Some(native) };
            state.serving.entry(name.clone()).or_insert_with(|| Instances(Vec::new())).0.push(instance);
        }
        self.settle(&name);
        Ok(())
    }

    /// Health of a native driver's devices as it counts now. None: it does not serve, or has no health service.
    pub fn native_health(&self, name: &DriverName) -> Option<HealthReport> {
        let state = self.read();
        let native = state.serving.get(name)?.picked().native.as_ref()?;
        native.health.as_ref().map(|health| health())
    }

    /// Shows what each instance of a driver is now, and tells who waits for it.
    pub fn settle(&self, name: &DriverName) {
        let changed = self.write().settle(name);
        for (source, state) in &changed {
            match state {
                DriverState::Lost => {
                    tracing::warn!(driver = %name, socket = source, "plugin lost, connecting again")
                }
                state => {
                    tracing::info!(driver = %name, socket = source, state = state.as_str(), "plugin changed")
                }
            }
            self.0.changes.tell(ChangedKind::Driver, name, state.as_str());
        }
        if changed.iter().any(|(_, state)| *state == DriverState::Serving) {
            self.0.serving.send_modify(|count| *count += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_connected_instance_is_picked_and_the_newest_where_none_is() {
        assert_eq!(pick([true, true, false].into_iter()), Some(1));
        assert_eq!(pick([true, false, true].into_iter()), Some(2));
        assert_eq!(pick([false, false].into_iter()), Some(1));
        assert_eq!(pick([].into_iter()), None);
    }
}
