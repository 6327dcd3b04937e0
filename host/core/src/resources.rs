//! The resources of the node, their sources and their devices. Pure.
//!
//! A resource has one source, the first of its name, also after a restart; others wait behind it. A source that is gone stays for a grace period, with no healthy
//! device, so that a restarted plugin loses nothing.

pub(crate) mod list;
pub(crate) mod metrics;
pub mod pools;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use metrics::DeviceMetrics;
pub use view::{
    Capacity, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource, ResourceView,
};

use crate::driver::DeviceDriver;
use nodedock_model::{
    DriverName, ExtendedResource, NameSource, PluginDevice, SourceKind, limit, plugin_driver,
};

/// The devices of a resource, by id.
pub(crate) type Listed = Arc<BTreeMap<String, PluginDevice>>;

/// A registration of a plugin: if the plugin registers again, that is another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginId {
    resource: ExtendedResource,
    generation: u64,
}

impl PluginId {
    pub(crate) fn new(resource: ExtendedResource, generation: u64) -> Self {
        Self {
            resource,
            generation,
        }
    }

    pub fn resource(&self) -> &ExtendedResource {
        &self.resource
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }
}

impl fmt::Display for ResourceSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plugin(path) => write!(f, "the device plugin {}", path.display()),
            Self::Pools(driver) => write!(f, "pools of the driver {driver}"),
            Self::Remembered => f.write_str("the checkpoint"),
        }
    }
}

/// The devices of one source under a resource's name.
#[derive(Clone)]
pub(crate) struct Offer {
    pub(crate) source: ResourceSource,
    /// A plugin, and the generation of its registration.
    pub(crate) plugin: Option<(u64, Arc<dyn DeviceDriver>)>,
    pub(crate) devices: Listed,
    /// The devices are those of its list: a plugin lists some time after it registered.
    pub(crate) has_listed: bool,
    /// Time since which the source is gone.
    left: Option<Instant>,
    /// Time until which the plugin is not called for a preference, because a call failed.
    pub(crate) unasked_until: Option<Instant>,
}

impl Offer {
    fn new(source: ResourceSource, devices: Listed) -> Self {
        Self {
            source,
            plugin: None,
            devices,
            has_listed: true,
            left: None,
            unasked_until: None,
        }
    }

    fn is_generation(&self, wanted: u64) -> bool {
        self.plugin
            .as_ref()
            .is_some_and(|(generation, _)| *generation == wanted)
    }

    /// The driver of claims for its devices.
    pub(crate) fn driver(&self, resource: &ExtendedResource) -> Option<DriverName> {
        match &self.source {
            ResourceSource::Pools(driver) => Some(driver.clone()),
            ResourceSource::Plugin(_) => Some(plugin_driver(resource)),
            ResourceSource::Remembered => None,
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        self.left.is_none()
    }

    /// Replaces the list. Returns whether anything changed.
    fn replace(&mut self, devices: Listed) -> bool {
        let is_first = !std::mem::replace(&mut self.has_listed, true);
        let changed = self.left.take().is_some() || self.devices != devices || is_first;
        self.devices = devices;
        changed
    }

    fn leave(&mut self, now: Instant) {
        self.left = Some(now);
        if self.devices.values().any(|device| device.healthy) {
            self.devices = Arc::new(
                self.devices
                    .iter()
                    .map(|(id, d)| {
                        (
                            id.clone(),
                            PluginDevice {
                                healthy: false,
                                ..d.clone()
                            },
                        )
                    })
                    .collect(),
            );
        }
    }
}

/// Two sources under one name: the one that waits, and the one that has the name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contender {
    pub(crate) resource: ExtendedResource,
    pub(crate) waits: String,
    pub(crate) keeps: String,
}

/// Pools of drivers, by the resource's name and the driver's.
pub(crate) type PoolOffers = BTreeMap<(ExtendedResource, DriverName), Listed>;

/// Every resource, with its sources in the order of their arrival; each has at least one.
#[derive(Default)]
pub(crate) struct Resources {
    offers: BTreeMap<ExtendedResource, Vec<Offer>>,
    /// The source of each resource as the checkpoint has it.
    owners: BTreeMap<ExtendedResource, NameSource>,
    /// Drivers that are the adapters of resources.
    adapters: BTreeMap<ExtendedResource, DriverName>,
    removed: BTreeSet<ExtendedResource>,
    generations: u64,
    /// True if pools beyond the bound were logged.
    complained: bool,
}

/// Resources that have a source, and as many removed ones that are still reported: drivers name the resources of their pools freely.
const RESOURCES_MAX: usize = 4 * limit::PLUGIN_RESOURCES_MAX;

impl Resources {
    /// Resources that are known from the checkpoint alone.
    pub(crate) fn remembered(names: BTreeSet<ExtendedResource>, now: Instant) -> Self {
        let offer = Offer {
            left: Some(now),
            ..Offer::new(ResourceSource::Remembered, Listed::default())
        };
        let offers = names
            .into_iter()
            .map(|name| (name, vec![offer.clone()]))
            .collect();
        Self {
            offers,
            ..Self::default()
        }
    }

    /// The source that has the name.
    pub(crate) fn source(&self, resource: &ExtendedResource) -> Option<&Offer> {
        self.offers.get(resource)?.first()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ExtendedResource, &Offer)> {
        self.offers
            .iter()
            .filter_map(|(name, offers)| Some((name, offers.first()?)))
    }

    pub(crate) fn removed(&self) -> impl Iterator<Item = &ExtendedResource> {
        self.removed.iter()
    }

    /// Adds a plugin. It replaces the one of the same resource, whose list stays until the new one lists.
    pub(crate) fn arrive(
        &mut self,
        resource: &ExtendedResource,
        path: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        self.generations += 1;
        let generation = self.generations;
        let (source, plugin) = (ResourceSource::Plugin(path), Some((generation, driver)));
        match self
            .offers
            .get_mut(resource)
            .and_then(|offers| offers.iter_mut().find(|offer| offer.plugin.is_some()))
        {
            Some(offer) => {
                (offer.source, offer.plugin, offer.left) = (source, plugin, None);
                offer.unasked_until = None;
            }
            None => {
                let offer = Offer::new(source, Listed::default());
                self.add(
                    resource,
                    Offer {
                        plugin,
                        has_listed: false,
                        ..offer
                    },
                );
            }
        }
        PluginId {
            resource: resource.clone(),
            generation,
        }
    }

    fn add(&mut self, resource: &ExtendedResource, offer: Offer) {
        self.removed.remove(resource);
        let source = self.owner(resource, &offer.source);
        let is_owner = self
            .owners
            .get(resource)
            .is_none_or(|owner| source.as_ref() == Some(owner));
        let offers = self.offers.entry(resource.clone()).or_default();
        let is_remembered = offers
            .first()
            .is_some_and(|first| first.source == ResourceSource::Remembered);
        match is_remembered && is_owner {
            true => offers[0] = offer,
            // The source that had the name before the start may come yet.
            false => offers.push(offer),
        }
    }

    /// Takes the sources that resources had before the start. Each keeps its name for the grace period.
    pub(crate) fn remember_owners(
        &mut self,
        owners: impl IntoIterator<Item = (ExtendedResource, NameSource)>,
        now: Instant,
    ) {
        for (name, owner) in owners {
            self.offers.entry(name.clone()).or_insert_with(|| {
                vec![Offer {
                    left: Some(now),
                    ..Offer::new(ResourceSource::Remembered, Listed::default())
                }]
            });
            self.owners.insert(name, owner);
        }
    }

    /// Notes the drivers that are the adapters of resources.
    pub(crate) fn set_adapters(&mut self, adapters: BTreeMap<ExtendedResource, DriverName>) {
        self.adapters = adapters;
    }

    /// A source as the checkpoint has it. Device plugins come with other sockets after a restart, and an adapter is its plugin.
    fn owner(&self, resource: &ExtendedResource, source: &ResourceSource) -> Option<NameSource> {
        match source {
            ResourceSource::Pools(driver) if self.adapters.get(resource) != Some(driver) => {
                Some(NameSource {
                    kind: SourceKind::Pools,
                    name: driver.to_string(),
                })
            }
            ResourceSource::Plugin(_) | ResourceSource::Pools(_) => Some(NameSource {
                kind: SourceKind::Plugin,
                name: String::new(),
            }),
            ResourceSource::Remembered => None,
        }
    }

    /// Returns the resources whose source is another than in the checkpoint; `None`: there is none any more.
    pub(crate) fn new_owners(&self) -> Vec<(ExtendedResource, Option<NameSource>)> {
        let new = self
            .iter()
            .filter_map(|(name, offer)| {
                Some((name.clone(), Some(self.owner(name, &offer.source)?)))
            })
            .filter(|(name, owner)| self.owners.get(name) != owner.as_ref());
        let gone = self
            .owners
            .keys()
            .filter(|name| !self.offers.contains_key(*name));
        new.chain(gone.map(|name| (name.clone(), None))).collect()
    }

    /// Notes what the checkpoint has now.
    pub(crate) fn set_owners(&mut self, stored: Vec<(ExtendedResource, Option<NameSource>)>) {
        for (name, owner) in stored {
            match owner {
                Some(owner) => drop(self.owners.insert(name, owner)),
                None => drop(self.owners.remove(&name)),
            }
        }
    }

    /// Sets a plugin's list. Returns whether anything changed; `None`: the registration was replaced.
    pub(crate) fn list(&mut self, id: &PluginId, devices: Listed) -> Option<bool> {
        let offers = self.offers.get_mut(&id.resource)?;
        let offer = offers
            .iter_mut()
            .find(|offer| offer.is_generation(id.generation))?;
        Some(offer.replace(devices))
    }

    /// Notes until when a plugin is not called for a preference, unless its registration was replaced.
    pub(crate) fn leave_unasked(
        &mut self,
        resource: &ExtendedResource,
        generation: u64,
        until: Instant,
    ) {
        let offers = self.offers.get_mut(resource).into_iter().flatten();
        for offer in offers.filter(|offer| offer.is_generation(generation)) {
            offer.unasked_until = Some(until);
        }
    }

    /// Marks a plugin as gone. False: it was gone before, or its registration was replaced.
    pub(crate) fn leave(&mut self, id: &PluginId, now: Instant) -> bool {
        let Some(offers) = self.offers.get_mut(&id.resource) else {
            return false;
        };
        let Some(at) = offers
            .iter()
            .position(|offer| offer.is_generation(id.generation))
        else {
            return false;
        };
        leave_at(offers, at, now)
    }

    /// Removes the plugin of a resource, which is an adapter's from now on; the name of the resource stays that of the plugin.
    pub(crate) fn take_plugin(
        &mut self,
        resource: &ExtendedResource,
        now: Instant,
    ) -> Option<Offer> {
        let offers = self.offers.get_mut(resource)?;
        let at = offers.iter().position(|offer| offer.plugin.is_some())?;
        if at > 0 {
            return Some(offers.remove(at));
        }
        let remembered = Offer {
            left: Some(now),
            ..Offer::new(ResourceSource::Remembered, Listed::default())
        };
        Some(std::mem::replace(&mut offers[0], remembered))
    }

    /// Sets all pools that have a resource's name. Returns the resources that changed.
    pub(crate) fn set_pools(
        &mut self,
        mut pools: PoolOffers,
        now: Instant,
    ) -> BTreeSet<ExtendedResource> {
        let mut changed = BTreeSet::new();
        for (resource, offers) in &mut self.offers {
            // From the end: those that wait leave the list.
            for at in (0..offers.len()).rev() {
                let ResourceSource::Pools(driver) = offers[at].source.clone() else {
                    continue;
                };
                let differs = match pools.remove(&(resource.clone(), driver)) {
                    Some(devices) => offers[at].replace(devices),
                    None => leave_at(offers, at, now),
                };
                changed.extend(differs.then(|| resource.clone()));
            }
        }
        for ((resource, driver), devices) in pools {
            if !self.offers.contains_key(&resource) && self.offers.len() >= RESOURCES_MAX {
                if !std::mem::replace(&mut self.complained, true) {
                    tracing::warn!(%resource, %driver, max = RESOURCES_MAX, "too many extended resources: those of further pools are not offered");
                }
                continue;
            }
            self.add(
                &resource,
                Offer::new(ResourceSource::Pools(driver), devices),
            );
            changed.insert(resource);
        }
        changed
    }

    /// Removes sources that have been gone for `grace`. Returns the resources that changed.
    pub(crate) fn expire(&mut self, now: Instant, grace: Duration) -> BTreeSet<ExtendedResource> {
        let mut changed = BTreeSet::new();
        for (name, offers) in &mut self.offers {
            let before = offers.len();
            offers.retain(|offer| offer.left.is_none_or(|left| left + grace > now));
            if offers.len() < before {
                changed.insert(name.clone());
            }
        }
        let empty = self.offers.extract_if(.., |_, offers| offers.is_empty());
        self.removed.extend(empty.map(|(name, _)| name));
        // Of more, some are not reported; which ones does not matter.
        while self.removed.len() > RESOURCES_MAX {
            self.removed.pop_first();
        }
        changed
    }

    /// Returns the time at which `expire` has something to do.
    pub(crate) fn next_expiry(&self, grace: Duration) -> Option<Instant> {
        let left = self
            .offers
            .values()
            .flatten()
            .filter_map(|offer| offer.left);
        left.min().map(|left| left + grace)
    }

    fn owner_of(&self, resource: &ExtendedResource, first: &Offer) -> String {
        let before = self
            .owners
            .get(resource)
            .filter(|_| first.source == ResourceSource::Remembered);
        before.map_or_else(|| first.source.to_string(), NameSource::to_string)
    }

    /// Sources that wait behind another.
    pub(crate) fn contenders(&self) -> Vec<Contender> {
        let mut found = Vec::new();
        for (resource, offers) in &self.offers {
            let Some((first, rest)) = offers.split_first() else {
                continue;
            };
            found.extend(rest.iter().map(|offer| Contender {
                resource: resource.clone(),
                waits: offer.source.to_string(),
                keeps: self.owner_of(resource, first),
            }));
        }
        found
    }
}

/// Marks the source at an index as gone, if it is the first; any other is removed.
fn leave_at(offers: &mut Vec<Offer>, at: usize, now: Instant) -> bool {
    if at > 0 {
        offers.remove(at);
        return true;
    }
    let was_there = offers[at].is_active();
    if was_there {
        offers[at].leave(now);
    }
    was_there
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::{device, devices, driver, resource};
    use crate::manager::tests::scene::FakePlugin;

    const GRACE: Duration = Duration::from_secs(300);

    fn pools(drivers: &[&str]) -> PoolOffers {
        let listed = |short: &str| Listed::new(devices([device(&format!("{short}/0"), &[])]));
        drivers
            .iter()
            .map(|short| ((resource("gpu"), driver(short)), listed(short)))
            .collect()
    }

    /// The source of `example.com/gpu`, and whether it is there.
    fn source(resources: &Resources) -> Option<(ResourceSource, bool)> {
        resources
            .source(&resource("gpu"))
            .map(|offer| (offer.source.clone(), offer.is_active()))
    }

    #[test]
    fn first_pool_driver_keeps_resource() {
        let (mut resources, start) = (Resources::default(), Instant::now());
        let of = |short: &str| ResourceSource::Pools(driver(short));
        let gpu = BTreeSet::from([resource("gpu")]);
        assert_eq!(resources.set_pools(pools(&["b"]), start), gpu);
        assert_eq!(resources.set_pools(pools(&["a", "b"]), start), gpu);
        assert!(resources.set_pools(pools(&["a", "b"]), start).is_empty());
        let contenders = resources.contenders();
        assert_eq!(contenders.len(), 1);
        assert!(
            contenders[0].waits.ends_with("a.example.com")
                && contenders[0].keeps.ends_with("b.example.com")
        );

        resources.set_pools(pools(&["a"]), start);
        assert_eq!(source(&resources), Some((of("b"), false)));
        resources.set_pools(pools(&["a", "b"]), start + GRACE / 2);
        assert_eq!(
            (source(&resources), resources.next_expiry(GRACE)),
            (Some((of("b"), true)), None)
        );

        resources.set_pools(pools(&["a"]), start);
        assert_eq!(resources.next_expiry(GRACE), Some(start + GRACE));
        assert!(resources.expire(start + GRACE / 2, GRACE).is_empty());
        assert_eq!(resources.expire(start + GRACE, GRACE), gpu);
        assert_eq!(source(&resources), Some((of("a"), true)));
        resources.set_pools(pools(&[]), start);
        resources.expire(start + GRACE, GRACE);
        assert_eq!(
            (source(&resources), resources.removed().collect::<Vec<_>>()),
            (None, vec![&resource("gpu")])
        );
    }

    /// Another driver could have taken the name before the adapter's pool is there.
    #[test]
    fn adopted_plugin_leaves_its_name() {
        let (mut resources, now) = (Resources::default(), Instant::now());
        let gpu = resource("gpu");
        assert!(resources.take_plugin(&gpu, now).is_none());
        let id = resources.arrive(&gpu, "/a.sock".into(), FakePlugin::new());
        let listed = Listed::new(devices([device("a", &[])]));
        assert_eq!(resources.list(&id, listed.clone()), Some(true));
        resources.set_owners(resources.new_owners());
        resources.set_adapters(BTreeMap::from([(gpu.clone(), driver("a"))]));
        let taken = resources.take_plugin(&gpu, now).unwrap();
        assert!(taken.is_active() && taken.has_listed && taken.devices == listed);
        assert!(taken.is_generation(id.generation()));
        assert_eq!(resources.list(&id, listed), None);
        assert!(!resources.leave(&id, now));
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Remembered, false))
        );
        resources.set_pools(pools(&["b"]), now);
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Remembered, false))
        );
        resources.set_pools(pools(&["a", "b"]), now);
        let of_adapter = ResourceSource::Pools(driver("a"));
        assert_eq!(source(&resources), Some((of_adapter, true)));
        assert!(resources.new_owners().is_empty());
    }

    #[test]
    fn changing_names_are_bounded() {
        let (mut resources, mut now) = (Resources::default(), Instant::now());
        let named = |round: usize| -> PoolOffers {
            let names = (0..RESOURCES_MAX).map(|n| resource(&format!("r{round}-{n}")));
            names
                .map(|name| ((name, driver("a")), Listed::default()))
                .collect()
        };
        assert_eq!(resources.set_pools(named(0), now).len(), RESOURCES_MAX);
        let mut more = named(0);
        more.extend(pools(&["b"]));
        assert!(
            resources.set_pools(more, now).is_empty(),
            "one more is not offered"
        );
        assert_eq!(
            (resources.iter().count(), source(&resources)),
            (RESOURCES_MAX, None)
        );
        for round in 1..3 {
            resources.set_pools(PoolOffers::new(), now);
            now += GRACE;
            resources.expire(now, GRACE);
            resources.set_pools(named(round), now);
        }
        assert_eq!(
            (resources.iter().count(), resources.removed().count()),
            (RESOURCES_MAX, RESOURCES_MAX)
        );
    }

    /// The driver that was loaded first had the name after a restart.
    #[test]
    fn resource_keeps_its_source_after_restart() {
        let now = Instant::now();
        let mut before = Resources::default();
        before.set_pools(pools(&["b"]), now);
        before.set_pools(pools(&["a", "b"]), now);
        let owners = before.new_owners();
        assert_eq!(owners.len(), 1);
        before.set_owners(owners.clone());
        assert!(before.new_owners().is_empty());

        let start = || {
            let mut resources = Resources::default();
            let known = owners
                .iter()
                .filter_map(|(name, owner)| Some((name.clone(), owner.clone()?)));
            resources.remember_owners(known, now);
            resources
        };
        let mut resources = start();
        resources.set_pools(pools(&["a"]), now);
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Remembered, false))
        );
        let keeps: Vec<_> = resources
            .contenders()
            .into_iter()
            .map(|contender| contender.keeps)
            .collect();
        assert_eq!(keeps, ["the pools of the driver b.example.com"]);
        assert!(resources.new_owners().is_empty());
        resources.set_pools(pools(&["a", "b"]), now);
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Pools(driver("b")), true))
        );

        let mut gone = start();
        gone.set_pools(pools(&["a"]), now);
        gone.expire(now + GRACE, GRACE);
        assert_eq!(
            source(&gone),
            Some((ResourceSource::Pools(driver("a")), true))
        );
        assert_eq!(gone.new_owners().len(), 1);
        gone.set_pools(pools(&[]), now);
        gone.expire(now + GRACE, GRACE);
        assert_eq!(gone.new_owners(), [(resource("gpu"), None)]);
    }

    #[test]
    fn adapter_has_its_plugins_resource() {
        let now = Instant::now();
        let mut resources = Resources::default();
        let plugin = NameSource {
            kind: SourceKind::Plugin,
            name: String::new(),
        };
        resources.remember_owners([(resource("gpu"), plugin)], now);
        resources.set_adapters([(resource("gpu"), driver("b"))].into());
        resources.set_pools(pools(&["a", "b"]), now);
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Pools(driver("b")), true))
        );
        assert!(resources.new_owners().is_empty());
    }

    #[test]
    fn source_replaces_remembered_resource() {
        let now = Instant::now();
        let mut resources = Resources::remembered(BTreeSet::from([resource("gpu")]), now);
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Remembered, false))
        );
        resources.set_pools(pools(&["a"]), now);
        assert_eq!(
            source(&resources),
            Some((ResourceSource::Pools(driver("a")), true))
        );
        assert!(resources.contenders().is_empty());
    }
}
