//! Which resources are offered to a kubelet, with which devices: what drivers have now, and what they had before our restart. Pure.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_model::{DriverName, ExtendedResource, PluginDevice};

/// What pools of one driver offer under a resource's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolOffer {
    pub driver: DriverName,
    /// By id.
    pub devices: Vec<PluginDevice>,
}

pub type Offers = BTreeMap<ExtendedResource, PoolOffer>;

/// What is known of pools with a resource's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pooled {
    /// Resources that pools of a driver have, also for a time after the driver is gone.
    pub offers: Offers,
    /// Resources that somebody else has: a device plugin of the node's own.
    pub others: BTreeSet<ExtendedResource>,
    /// Drivers that told what they have, with the resources of their pools.
    pub told: BTreeMap<DriverName, BTreeSet<ExtendedResource>>,
}

/// What is offered: what is there, and what was there before our restart, unless somebody said otherwise. What was taken over or
/// withdrawn is taken out of `remembered` for good.
pub(super) fn offered(pooled: &Pooled, remembered: &mut Offers) -> Offers {
    let is_told = |resource: &ExtendedResource, driver: &DriverName| {
        pooled.told.get(driver).is_some_and(|resources| !resources.contains(resource))
    };
    remembered.retain(|resource, offer| {
        !pooled.offers.contains_key(resource)
            && !pooled.others.contains(resource)
            && !is_told(resource, &offer.driver)
    });
    let mut offers = pooled.offers.clone();
    offers.extend(remembered.iter().map(|(resource, offer)| (resource.clone(), offer.clone())));
    offers
}

/// The devices as a kubelet is told of them. `elsewhere`: held by somebody who did not get it from a kubelet's device manager; such a
/// device cannot be given, so it is not healthy for a kubelet that would give it.
pub(super) fn listed(offer: &PoolOffer, elsewhere: impl Fn(&str) -> bool) -> Vec<PluginDevice> {
    let device = |device: &PluginDevice| PluginDevice {
        healthy: device.healthy && !elsewhere(&device.id),
        ..device.clone()
    };
    offer.devices.iter().map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(name: &str) -> ExtendedResource {
        ExtendedResource::new(format!("example.com/{name}")).unwrap()
    }

    fn driver(name: &str) -> DriverName {
        DriverName::new(name).unwrap()
    }

    fn offer(of: &str, ids: &[&str]) -> PoolOffer {
        let device = |id: &&str| PluginDevice { id: (*id).to_owned(), healthy: true, numa_nodes: vec![] };
        PoolOffer { driver: driver(of), devices: ids.iter().map(device).collect() }
    }

    #[test]
    fn what_was_there_is_offered_until_somebody_says_otherwise() {
        let known = Offers::from([(resource("gpu"), offer("a", &["p/0"]))]);
        let mut remembered = known.clone();
        assert_eq!(offered(&Pooled::default(), &mut remembered), known);
        // Its driver serves, and the device manager has not looked at its pools yet.
        let told = |resources: &[&str]| {
            BTreeMap::from([(driver("a"), resources.iter().map(|name| resource(name)).collect())])
        };
        let begun = Pooled { told: told(&["gpu"]), ..Pooled::default() };
        assert_eq!(offered(&begun, &mut remembered), known);
        let there = Pooled { offers: Offers::from([(resource("gpu"), offer("a", &["p/1"]))]), ..begun };
        assert_eq!(offered(&there, &mut remembered), there.offers);
        assert!(remembered.is_empty(), "it is over with what was there");
        assert!(offered(&Pooled::default(), &mut remembered).is_empty());
    }

    #[test]
    fn a_driver_that_has_it_no_more_and_another_owner_withdraw_it() {
        let known = Offers::from([(resource("gpu"), offer("a", &["p/0"]))]);
        let without = Pooled { told: BTreeMap::from([(driver("a"), BTreeSet::new())]), ..Pooled::default() };
        let taken = Pooled { others: BTreeSet::from([resource("gpu")]), ..Pooled::default() };
        for pooled in [without, taken] {
            assert!(offered(&pooled, &mut known.clone()).is_empty());
        }
        let another = Pooled { told: BTreeMap::from([(driver("b"), BTreeSet::new())]), ..Pooled::default() };
        assert_eq!(offered(&another, &mut known.clone()), known);
    }

    #[test]
    fn a_device_that_is_held_elsewhere_is_not_healthy() {
        let listed = listed(&offer("a", &["p/0", "p/1"]), |id| id == "p/1");
        let healthy: Vec<_> = listed.iter().map(|device| (device.id.as_str(), device.healthy)).collect();
        assert_eq!(healthy, [("p/0", true), ("p/1", false)]);
    }
}
