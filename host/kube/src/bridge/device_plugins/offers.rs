//! Offers of resources to a kubelet, with their devices: what drivers publish, and what was offered before a restart. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::split_id;
use crate::bridge::claims::DeviceIds;
use crate::extended_resources::{Mechanism, Mechanisms};
use nodedock_model::{DriverName, ExtendedResource, OfferSource, PluginDevice, ResourceOffer};

/// Devices that are stored for a restart: several megabytes, which one commit writes.
const STORED_DEVICES_MAX: usize = 100_000;

/// Offers by resource.
pub(in crate::bridge) type Offers = BTreeMap<ExtendedResource, ResourceOffer>;

/// Observed pools with a resource name, and observed native device plugins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ObservedPools {
    /// Resources that pools of a driver or a device plugin have, also for a time after that is gone.
    pub(super) offers: Offers,
    /// Resources of device plugins that registered with this daemon and have not listed their devices yet.
    pub(super) of_plugins: BTreeSet<ExtendedResource>,
    /// Resources of device plugins that are drivers: what was offered by the plugin's own IDs is not offered any more.
    pub(super) adapted: BTreeSet<ExtendedResource>,
    /// Drivers that published their pools, with the resources of these.
    pub(super) published: BTreeMap<DriverName, BTreeSet<ExtendedResource>>,
}

/// Returns the current offers, and those from before a restart unless another owner has the resource or its driver no longer publishes it.
/// Offers that were taken over or withdrawn are removed from `remembered` for good.
pub(super) fn desired(observed: &ObservedPools, remembered: &mut Offers) -> Offers {
    remembered.retain(|resource, offer| {
        let is_current = match offer.source.driver() {
            None => !observed.adapted.contains(resource),
            Some(driver) => {
                let published = observed.published.get(driver);
                !observed.of_plugins.contains(resource)
                    && published.is_none_or(|resources| resources.contains(resource))
            }
        };
        !observed.offers.contains_key(resource) && is_current
    });
    let mut offers = observed.offers.clone();
    offers.extend(
        remembered
            .iter()
            .map(|(resource, offer)| (resource.clone(), offer.clone())),
    );
    offers
}

/// The offers that are stored for a restart: the first resources whose devices there is room for.
pub(super) fn storable(offers: &Offers) -> Offers {
    let mut room = STORED_DEVICES_MAX;
    offers
        .iter()
        .filter(|(_, offer)| {
            let left = room.checked_sub(offer.devices.len());
            room = left.unwrap_or(room);
            left.is_some()
        })
        .map(|(resource, offer)| (resource.clone(), offer.clone()))
        .collect()
}

/// Returns the offers to the kubelet, by the mechanism of each pool. For a pool that another mechanism offers, or none, the list has the
/// devices that the kubelet's device manager has allocated, as unhealthy: a kubelet restarts containers only while their resource has a
/// plugin.
pub(super) fn by_mechanism(
    mut offers: Offers,
    mechanisms: &Mechanisms,
    allocated: &DeviceIds,
) -> Offers {
    offers.retain(|resource, offer| {
        let Some(driver) = offer.source.driver().cloned() else {
            return true;
        };
        let mut is_here = mechanisms.is_at_kubelet(&driver, resource);
        offer.devices.retain_mut(|device| {
            let Some((pool, _)) = split_id(&device.id) else {
                return false;
            };
            if mechanisms.of(&driver, &pool, true) == Some(Mechanism::DevicePlugin) {
                is_here = true;
                return true;
            }
            device.healthy = false;
            allocated.contains(&(driver.clone(), device.id.clone()))
        });
        is_here || !offer.devices.is_empty()
    });
    offers
}

/// Adds the devices that pods have by the own IDs of a device plugin that became a driver, as unhealthy: a kubelet restarts their containers
/// only while their resource has a plugin.
pub(super) fn with_held(
    mut offers: Offers,
    held: Vec<(ExtendedResource, DriverName, BTreeSet<String>)>,
) -> Offers {
    for (resource, driver, ids) in held {
        let offer = offers.entry(resource.clone()).or_insert_with(|| {
            let source = OfferSource::Driver(driver);
            ResourceOffer {
                resource: resource.clone(),
                source,
                devices: Vec::new(),
            }
        });
        offer.devices.extend(ids.into_iter().map(|id| PluginDevice {
            id,
            healthy: false,
            numa_nodes: Vec::new(),
        }));
        offer.devices.sort_by(|a, b| a.id.cmp(&b.id));
        offer.devices.dedup_by(|a, b| a.id == b.id);
    }
    offers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extended_resources::{LocalPool, PoolStatus};
    use nodedock_model::DeviceOptions;

    fn resource(name: &str) -> ExtendedResource {
        ExtendedResource::new(format!("example.com/{name}")).unwrap()
    }

    fn driver(name: &str) -> DriverName {
        DriverName::new(name).unwrap()
    }

    fn offer(of: &str, ids: &[&str]) -> ResourceOffer {
        let device = |id: &&str| PluginDevice {
            id: (*id).to_owned(),
            healthy: true,
            numa_nodes: vec![],
        };
        let (resource, source) = (resource("gpu"), OfferSource::Driver(driver(of)));
        ResourceOffer {
            resource,
            source,
            devices: ids.iter().map(device).collect(),
        }
    }

    #[test]
    fn offers_over_the_limit_are_dropped() {
        let ids: Vec<_> = (0..=STORED_DEVICES_MAX).map(|n| format!("p/{n}")).collect();
        let ids: Vec<_> = ids.iter().map(String::as_str).collect();
        let offers = Offers::from([
            (resource("a"), offer("a", &ids[..STORED_DEVICES_MAX - 1])),
            (resource("b"), offer("b", &ids)),
            (resource("c"), offer("c", &ids[..1])),
        ]);
        let stored: Vec<_> = storable(&offers).into_keys().collect();
        assert_eq!(stored, [resource("a"), resource("c")]);
    }

    #[test]
    fn old_offer_lasts_until_driver_publishes() {
        let known = Offers::from([(resource("gpu"), offer("a", &["p/0"]))]);
        let mut remembered = known.clone();
        assert_eq!(desired(&ObservedPools::default(), &mut remembered), known);
        // Its driver serves, and the device manager has not looked at its pools yet.
        let published = |resources: &[&str]| {
            BTreeMap::from([(
                driver("a"),
                resources.iter().map(|name| resource(name)).collect(),
            )])
        };
        let begun = ObservedPools {
            published: published(&["gpu"]),
            ..ObservedPools::default()
        };
        assert_eq!(desired(&begun, &mut remembered), known);
        let there = ObservedPools {
            offers: Offers::from([(resource("gpu"), offer("a", &["p/1"]))]),
            ..begun
        };
        assert_eq!(desired(&there, &mut remembered), there.offers);
        assert!(remembered.is_empty(), "what was there counts no more");
        assert!(desired(&ObservedPools::default(), &mut remembered).is_empty());
    }

    #[test]
    fn old_plugin_offer_lasts_until_list() {
        let plugin = ResourceOffer {
            source: OfferSource::Plugin(DeviceOptions::default()),
            ..offer("a", &["0"])
        };
        let known = Offers::from([(resource("gpu"), plugin.clone())]);
        let mut remembered = known.clone();
        let registered = ObservedPools {
            of_plugins: [resource("gpu")].into(),
            ..ObservedPools::default()
        };
        assert_eq!(desired(&registered, &mut remembered), known);
        let listed = ResourceOffer {
            devices: Vec::new(),
            ..plugin
        };
        let observed = ObservedPools {
            offers: [(resource("gpu"), listed)].into(),
            ..ObservedPools::default()
        };
        assert_eq!(desired(&observed, &mut remembered), observed.offers);
        assert!(remembered.is_empty());
    }

    #[test]
    fn old_plugin_offer_ends_with_adapter() {
        let plugin = ResourceOffer {
            source: OfferSource::Plugin(DeviceOptions::default()),
            ..offer("a", &["0"])
        };
        let mut remembered = Offers::from([(resource("gpu"), plugin)]);
        let adapted = ObservedPools {
            adapted: [resource("gpu")].into(),
            ..ObservedPools::default()
        };
        assert!(desired(&adapted, &mut remembered).is_empty() && remembered.is_empty());
        // What the driver had is offered until it publishes.
        let known = Offers::from([(resource("gpu"), offer("a", &["p/0"]))]);
        assert_eq!(desired(&adapted, &mut known.clone()), known);
    }

    #[test]
    fn list_keeps_allocated_devices_as_unhealthy() {
        let status = |offered| PoolStatus {
            resource: resource("gpu"),
            offered,
            waits_for: String::new(),
        };
        let key = |pool: &str| LocalPool {
            driver: driver("a"),
            pool: pool.parse().unwrap(),
        };
        let pools = [
            (key("here"), status(Some(Mechanism::DevicePlugin))),
            (key("slices"), status(Some(Mechanism::Dra))),
            (key("neither"), status(None)),
        ];
        let mechanisms = Mechanisms {
            pools: pools.into(),
            ..Mechanisms::default()
        };
        let ids = [
            "here/0",
            "here/1",
            "neither/0",
            "neither/1",
            "slices/0",
            "slices/1",
            "unknown/0",
            "no-pool",
        ];
        let allocated: DeviceIds = ["here/0", "neither/1", "slices/0"]
            .map(|id| (driver("a"), id.to_owned()))
            .into();
        let offers = Offers::from([(resource("gpu"), offer("a", &ids))]);
        let listed = by_mechanism(offers.clone(), &mechanisms, &allocated);
        let devices: Vec<_> = listed[&resource("gpu")]
            .devices
            .iter()
            .map(|device| (device.id.as_str(), device.healthy))
            .collect();
        assert_eq!(
            devices,
            [
                ("here/0", true),
                ("here/1", true),
                ("neither/1", false),
                ("slices/0", false)
            ]
        );
        assert!(by_mechanism(offers, &Mechanisms::default(), &DeviceIds::new()).is_empty());
        // A native plugin is not concerned.
        let plugin = ResourceOffer {
            source: OfferSource::Plugin(DeviceOptions::default()),
            ..offer("a", &["0"])
        };
        let offers = Offers::from([(resource("gpu"), plugin)]);
        assert_eq!(
            by_mechanism(offers.clone(), &Mechanisms::default(), &DeviceIds::new()),
            offers
        );
    }

    #[test]
    fn devices_predating_adapter_are_listed_unhealthy() {
        let held = |ids: &[&str]| {
            vec![(
                resource("gpu"),
                driver("a"),
                ids.iter().map(|id| (*id).to_owned()).collect(),
            )]
        };
        let listed = |offers: Offers| -> Vec<_> {
            let devices = &offers[&resource("gpu")].devices;
            devices
                .iter()
                .map(|device| (device.id.clone(), device.healthy))
                .collect()
        };
        assert_eq!(
            listed(with_held(Offers::new(), held(&["0"]))),
            [("0".to_owned(), false)]
        );
        let offers = Offers::from([(resource("gpu"), offer("a", &["p/1"]))]);
        let both = [("0".to_owned(), false), ("p/1".to_owned(), true)];
        assert_eq!(listed(with_held(offers.clone(), held(&["0"]))), both);
        assert_eq!(with_held(offers.clone(), Vec::new()), offers);
    }

    #[test]
    fn dropped_or_taken_resource_is_withdrawn() {
        let known = Offers::from([(resource("gpu"), offer("a", &["p/0"]))]);
        let without = ObservedPools {
            published: BTreeMap::from([(driver("a"), BTreeSet::new())]),
            ..ObservedPools::default()
        };
        let taken = ObservedPools {
            of_plugins: BTreeSet::from([resource("gpu")]),
            ..ObservedPools::default()
        };
        for observed in [without, taken] {
            assert!(desired(&observed, &mut known.clone()).is_empty());
        }
        let another = ObservedPools {
            published: BTreeMap::from([(driver("b"), BTreeSet::new())]),
            ..ObservedPools::default()
        };
        assert_eq!(desired(&another, &mut known.clone()), known);
    }
}
