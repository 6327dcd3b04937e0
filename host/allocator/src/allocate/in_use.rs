//! The devices that live claims have, kept up to date claim by claim. It knows no inventory: an allocation reads it beside one.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use nodedock_model::quantity;

use super::inventory::{Inventory, PoolMember};
use super::table::Table;

/// The devices, shares and capacities that claims have. Admin access takes nothing and is not in it.
#[derive(Debug, Default)]
pub struct InUse {
    claims: HashMap<String, Vec<DeviceName>>,
    /// By driver and pool, then by device.
    pools: HashMap<String, HashMap<String, HashMap<String, DeviceUse>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct DeviceName {
    driver: String,
    pool: String,
    device: String,
}

/// The claims that have a device.
#[derive(Debug, Default)]
pub(super) struct DeviceUse {
    holders: Vec<Holder>,
}

#[derive(Debug)]
struct Holder {
    claim: String,
    /// None: the claim has the whole device.
    consumed: Option<BTreeMap<String, i128>>,
}

impl InUse {
    /// Returns what is in use when no claim has a device.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what a claim's allocation takes. An earlier allocation of the same claim is replaced.
    pub fn add(&mut self, uid: &str, allocation: &AllocationResult) {
        self.remove(uid);
        let results = allocation.devices.as_ref().and_then(|devices| devices.results.as_deref());
        let mut names = Vec::new();
        for result in results.unwrap_or_default().iter().filter(|result| result.admin_access != Some(true)) {
            let pools = self.pools.entry(result.driver.clone()).or_default();
            let devices = pools.entry(result.pool.clone()).or_default();
            let device = devices.entry(result.device.clone()).or_default();
            device.holders.push(Holder { claim: uid.to_owned(), consumed: share(result) });
            let (driver, pool) = (result.driver.clone(), result.pool.clone());
            names.push(DeviceName { driver, pool, device: result.device.clone() });
        }
        if !names.is_empty() {
            self.claims.insert(uid.to_owned(), names);
        }
    }

    /// Removes what a claim has. A claim without an allocation has nothing, and this does nothing.
    pub fn remove(&mut self, uid: &str) {
        for name in self.claims.remove(uid).unwrap_or_default() {
            self.remove_from(uid, &name);
        }
    }

    fn remove_from(&mut self, uid: &str, name: &DeviceName) {
        let Some(pools) = self.pools.get_mut(&name.driver) else { return };
        let Some(devices) = pools.get_mut(&name.pool) else { return };
        let Some(device) = devices.get_mut(&name.device) else { return };
        device.holders.retain(|holder| holder.claim != uid);
        if device.holders.is_empty() {
            devices.remove(&name.device);
        }
        if devices.is_empty() {
            pools.remove(&name.pool);
        }
        if pools.is_empty() {
            self.pools.remove(&name.driver);
        }
    }

    fn devices(&self, driver: &str, pool: &str) -> impl Iterator<Item = (&String, &DeviceUse)> {
        self.pools.get(driver).and_then(|pools| pools.get(pool)).into_iter().flatten()
    }
}

/// Returns what a share of a device consumes. An amount that cannot be read counts as more than any device has.
fn share(result: &DeviceRequestAllocationResult) -> Option<BTreeMap<String, i128>> {
    result.share_id.as_ref()?;
    let consumed = result.consumed_capacity.iter().flatten();
    let amount = |text: &str| quantity::nanos(text).unwrap_or(i128::MAX);
    Some(consumed.map(|(name, quantity)| (name.clone(), amount(&quantity.0))).collect())
}

impl DeviceUse {
    /// The claim that has the whole device.
    pub(super) fn exclusive_claim(&self) -> Option<&str> {
        self.holders.iter().find(|holder| holder.consumed.is_none()).map(|holder| holder.claim.as_str())
    }

    pub(super) fn first_claim(&self) -> &str {
        self.holders.first().map_or("", |holder| holder.claim.as_str())
    }

    pub(super) fn is_shared(&self) -> bool {
        self.holders.iter().any(|holder| holder.consumed.is_some())
    }

    pub(super) fn consumed(&self, capacity: &str) -> i128 {
        let shares = self.holders.iter().filter_map(|holder| holder.consumed.as_ref());
        shares.filter_map(|share| share.get(capacity)).fold(0, |sum, amount| sum.saturating_add(*amount))
    }
}

/// What of an inventory is in use when an allocation begins.
pub(super) struct Usage<'a> {
    pub(super) devices: Table<Option<&'a DeviceUse>>,
    /// What devices in use consume of each counter.
    pub(super) counters: Table<i128>,
}

impl<'a> Usage<'a> {
    /// A device that no slice has any more consumes no counter, as upstream.
    pub(super) fn of(in_use: &'a InUse, inventory: &Inventory) -> Self {
        let mut usage = Self {
            devices: Table::new(inventory.devices.len()),
            counters: Table::new(inventory.counters.len()),
        };
        for pool in &inventory.pools {
            for (name, device_use) in in_use.devices(&pool.driver, &pool.name) {
                match pool.members.get(name) {
                    Some(PoolMember::Local(id)) => {
                        usage.devices.set(*id, Some(device_use));
                        usage.add_counters(inventory.device(*id).map_or(&[], |device| &device.consumes));
                    }
                    Some(PoolMember::Remote(consumes)) => usage.add_counters(consumes),
                    None => {}
                }
            }
        }
        usage
    }

    fn add_counters(&mut self, consumes: &[(u32, i128)]) {
        for (counter, amount) in consumes {
            self.counters.set(*counter, self.counters.get(*counter).saturating_add(*amount));
        }
    }
}
