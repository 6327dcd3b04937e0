//! The devices that live claims have, kept up to date claim by claim. It knows no inventory: an allocation reads it beside one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use nodedock_model::{HeldKeys, Hold, quantity};

use super::inventory::{Inventory, Offered};
use super::table::Table;

/// Hardware behind each device that is reserved for the device's claim, so that no other claim gets it. A device without an entry has no
/// reservation besides its name.
#[derive(Debug, Default, PartialEq)]
pub struct DeviceHolds(HashMap<DeviceName, Vec<Hold>>);

impl DeviceHolds {
    /// Sets the holds of a device, whose pool has the name of its slices.
    pub fn set(&mut self, driver: &str, pool: &str, device: &str, holds: Vec<Hold>) {
        if !holds.is_empty() {
            self.0.insert(DeviceName::new(driver, pool, device), holds);
        }
    }

    fn of(&self, driver: &str, pool: &str, device: &str) -> &[Hold] {
        // Most nodes have no such device.
        let found = if self.0.is_empty() {
            None
        } else {
            self.0.get(&DeviceName::new(driver, pool, device))
        };
        found.map_or(&[], Vec::as_slice)
    }
}

/// The devices, shares and capacities that claims have, and the hardware behind them. Admin access takes nothing and is not in it.
#[derive(Debug, Default)]
pub struct InUse {
    claims: HashMap<String, Vec<DeviceName>>,
    of_devices: Arc<DeviceHolds>,
    /// Holds of each claim, by the UID of the claim.
    holds: HashMap<String, Vec<Hold>>,
    held: HeldKeys<String>,
    /// Uses by driver and pool, then by device.
    pools: HashMap<String, HashMap<String, HashMap<String, DeviceUse>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct DeviceName {
    driver: String,
    pool: String,
    device: String,
}

impl DeviceName {
    fn new(driver: &str, pool: &str, device: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            pool: pool.to_owned(),
            device: device.to_owned(),
        }
    }
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
    pub fn new(of_devices: Arc<DeviceHolds>) -> Self {
        Self {
            of_devices,
            ..Self::default()
        }
    }

    /// Adds what a claim's allocation takes. An earlier allocation of the same claim is replaced.
    pub fn add(&mut self, uid: &str, allocation: &AllocationResult) {
        self.remove(uid);
        let results = allocation
            .devices
            .as_ref()
            .and_then(|devices| devices.results.as_deref());
        let mut names = Vec::new();
        for result in results
            .unwrap_or_default()
            .iter()
            .filter(|result| result.admin_access != Some(true))
        {
            let pools = self.pools.entry(result.driver.clone()).or_default();
            let devices = pools.entry(result.pool.clone()).or_default();
            let device = devices.entry(result.device.clone()).or_default();
            device.holders.push(Holder {
                claim: uid.to_owned(),
                consumed: share(result),
            });
            let (driver, pool) = (result.driver.clone(), result.pool.clone());
            names.push(DeviceName {
                driver,
                pool,
                device: result.device.clone(),
            });
            let of_devices = Arc::clone(&self.of_devices);
            self.hold(
                uid,
                of_devices.of(&result.driver, &result.pool, &result.device),
            );
        }
        if !names.is_empty() {
            self.claims.insert(uid.to_owned(), names);
        }
    }

    /// Adds what a claim keeps from others, beside what follows from its allocation, until it is removed.
    pub fn hold(&mut self, uid: &str, holds: &[Hold]) {
        if holds.is_empty() {
            return;
        }
        let owner = uid.to_owned();
        let known = self.holds.entry(owner.clone()).or_default();
        for hold in holds {
            if !known.contains(hold) {
                self.held.add(&owner, hold);
                known.push(hold.clone());
            }
        }
    }

    /// Returns the claims that keep the hardware of a claim from it.
    pub fn in_the_way(&self, uid: &str) -> impl Iterator<Item = &str> {
        let owner = uid.to_owned();
        let holds = self.holds.get(uid).into_iter().flatten();
        holds
            .flat_map(move |hold| self.held.all_in_the_way(Some(&owner), hold))
            .map(|(claim, _)| claim.as_str())
    }

    /// Returns a claim that keeps the hardware of a device from any other claim, and the key that it holds.
    pub(super) fn holder(&self, driver: &str, pool: &str, device: &str) -> Option<(&str, &str)> {
        let mut holds = self.of_devices.of(driver, pool, device).iter();
        let found = holds.find_map(|hold| self.held.in_the_way(None, hold));
        found.map(|(claim, key)| (claim.as_str(), key))
    }

    /// Removes what a claim has. A claim without an allocation has nothing, and this does nothing.
    pub fn remove(&mut self, uid: &str) {
        let owner = uid.to_owned();
        for hold in self.holds.remove(uid).unwrap_or_default() {
            self.held.remove(&owner, &hold);
        }
        for name in self.claims.remove(uid).unwrap_or_default() {
            self.remove_from(uid, &name);
        }
    }

    fn remove_from(&mut self, uid: &str, name: &DeviceName) {
        let Some(pools) = self.pools.get_mut(&name.driver) else {
            return;
        };
        let Some(devices) = pools.get_mut(&name.pool) else {
            return;
        };
        let Some(device) = devices.get_mut(&name.device) else {
            return;
        };
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
        self.pools
            .get(driver)
            .and_then(|pools| pools.get(pool))
            .into_iter()
            .flatten()
    }
}

/// Returns what a share of a device consumes. An amount that cannot be read counts as more than any device has.
fn share(result: &DeviceRequestAllocationResult) -> Option<BTreeMap<String, i128>> {
    result.share_id.as_ref()?;
    let consumed = result.consumed_capacity.iter().flatten();
    Some(
        consumed
            .map(|(name, quantity)| {
                (
                    name.clone(),
                    quantity::nanos(&quantity.0).unwrap_or(i128::MAX),
                )
            })
            .collect(),
    )
}

impl DeviceUse {
    /// The claim that has the whole device.
    pub(super) fn exclusive_claim(&self) -> Option<&str> {
        self.holders
            .iter()
            .find(|holder| holder.consumed.is_none())
            .map(|holder| holder.claim.as_str())
    }

    pub(super) fn first_claim(&self) -> &str {
        self.holders
            .first()
            .map_or("", |holder| holder.claim.as_str())
    }

    pub(super) fn is_shared(&self) -> bool {
        self.holders.iter().any(|holder| holder.consumed.is_some())
    }

    pub(super) fn consumed(&self, capacity: &str) -> i128 {
        let shares = self
            .holders
            .iter()
            .filter_map(|holder| holder.consumed.as_ref());
        shares
            .filter_map(|share| share.get(capacity))
            .fold(0, |sum, amount| sum.saturating_add(*amount))
    }
}

/// Part of an inventory that is in use when an allocation begins.
pub(super) struct Usage<'a> {
    pub(super) in_use: &'a InUse,
    /// Cached results of `is_held`, for the devices that were looked at.
    held: Table<Option<bool>>,
    pub(super) devices: Table<Option<&'a DeviceUse>>,
    /// Amount of each counter that devices in use consume.
    pub(super) counters: Table<i128>,
}

impl<'a> Usage<'a> {
    /// A device that no slice has any more consumes no counter, and one that a pool has again for other nodes consumes for each, as upstream.
    pub(super) fn of(in_use: &'a InUse, inventory: &Inventory) -> Self {
        let mut usage = Self {
            in_use,
            held: Table::new(inventory.devices.len()),
            devices: Table::new(inventory.devices.len()),
            counters: Table::new(inventory.counters.len()),
        };
        for pool in &inventory.pools {
            for (name, device_use) in in_use.devices(&pool.driver, &pool.name) {
                let Some(member) = pool.members.get(name) else {
                    continue;
                };
                usage.add_counters(&member.remote);
                if let Some(id) = member.local {
                    usage.devices.set(id, Some(device_use));
                    usage.add_counters(inventory.device(id).map_or(&[], |device| &device.consumes));
                }
            }
        }
        usage
    }

    /// Returns true if a claim has the hardware behind a device.
    pub(super) fn is_held(&mut self, device: &Offered) -> bool {
        if let Some(is_held) = self.held.get(device.id) {
            return is_held;
        }
        let is_held = self
            .in_use
            .holder(device.driver(), device.pool(), &device.device().name)
            .is_some();
        self.held.set(device.id, Some(is_held));
        is_held
    }

    fn add_counters(&mut self, consumes: &[(u32, i128)]) {
        for (counter, amount) in consumes {
            self.counters.set(
                *counter,
                self.counters.get(*counter).saturating_add(*amount),
            );
        }
    }
}
