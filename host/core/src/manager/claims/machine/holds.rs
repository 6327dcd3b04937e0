//! Holds of a claim, which exclude other claims: devices, the hardware behind them, and parts of counters and capacities.

use std::collections::BTreeMap;

use crate::records::table::device_key;
use nodedock_model::{AllocatedDevice, Allocation, CounterSet, Device, DriverName, Hold, Use};

/// The facts of a device that decide whether several claims may have it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    pub allow_multiple_allocations: bool,
    pub identity: Vec<String>,
    /// Keys of the hardware that `identity` names.
    pub keys: Vec<String>,
    /// Keys of what containers got of the device when it was prepared last.
    pub derived: Vec<DerivedKey>,
    pub counters: Vec<CounterFacts>,
    /// Compatibility groups, by counter set from which the device consumes.
    pub groups: BTreeMap<String, Vec<String>>,
    /// Capacities, by name, of a device that allows several allocations.
    pub capacities: BTreeMap<String, String>,
}

/// A key of what a container gets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DerivedKey {
    pub key: String,
    /// True if there is hardware behind the key. A key without hardware, such as that of a control node of several devices, excludes only
    /// claims that hold it exclusively.
    pub has_hardware: bool,
}

/// Amount that a device takes of a counter of its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterFacts {
    pub set: String,
    pub counter: String,
    pub amount: String,
    pub whole: String,
}

impl DeviceFacts {
    /// `sets`: the counters of the device's pool. One that is not there has nothing.
    pub fn of(device: &Device, sets: &[CounterSet]) -> Self {
        let mut groups = BTreeMap::new();
        let mut counters = Vec::new();
        for consumed in &device.consumes {
            let set = sets.iter().find(|set| set.name == consumed.name);
            counters.extend(consumed.counters.iter().map(|(counter, amount)| {
                let whole = set.and_then(|set| set.counters.get(counter));
                CounterFacts {
                    set: consumed.name.clone(),
                    whole: whole.map_or("0", String::as_str).to_owned(),
                    counter: counter.clone(),
                    amount: amount.clone(),
                }
            }));
            let of_set = device
                .scheduling
                .as_deref()
                .and_then(|added| added.compatibility.get(&consumed.name));
            groups.insert(consumed.name.clone(), of_set.cloned().unwrap_or_default());
        }
        let capacities = device
            .capacities
            .iter()
            .filter(|_| device.allow_multiple_allocations);
        Self {
            allow_multiple_allocations: device.allow_multiple_allocations,
            identity: device.identity.clone(),
            keys: device.keys.clone(),
            derived: Vec::new(),
            counters,
            groups,
            capacities: capacities
                .map(|(name, capacity)| (name.to_string(), capacity.value.clone()))
                .collect(),
        }
    }

    /// Returns the hold on counters that a claim with the device would have; `None` if the device takes nothing.
    pub fn hold(&self, driver: &DriverName, pool: &str, device: &str) -> Option<Hold> {
        let (key, uses) = (
            device_key(driver, pool, device),
            self.counter_uses(&format!("{driver}/{pool}")),
        );
        (!uses.is_empty()).then_some(Hold {
            key,
            shared: false,
            driver: None,
            derived: false,
            uses,
        })
    }

    /// Returns whether several claims may have what a container gets of the device: the device allows it, or counters decide.
    fn is_divided(&self) -> bool {
        self.allow_multiple_allocations || !self.counters.is_empty()
    }

    /// Returns the holds of a claim with the device that exclude other drivers' devices, and devices of its driver with a common identity.
    pub(in crate::manager::claims) fn hardware_holds(
        &self,
        driver: &DriverName,
        shared: bool,
    ) -> Vec<Hold> {
        let is_divided = shared || self.is_divided();
        let declared = self
            .identity
            .iter()
            .chain(&self.keys)
            .map(|key| (key, shared, false));
        let derived = self.derived.iter();
        let derived = derived.map(|found| (&found.key, is_divided || !found.has_hardware, true));
        declared
            .chain(derived)
            .map(|(key, shared, derived)| {
                let driver = Some(driver.clone());
                Hold {
                    key: key.clone(),
                    shared,
                    driver,
                    derived,
                    uses: Vec::new(),
                }
            })
            .collect()
    }

    /// Returns the holds of a claim that has all of the device.
    pub fn exclusive_holds(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<Hold> {
        let key = device_key(driver, pool, device);
        let own = Hold {
            key,
            shared: false,
            driver: None,
            derived: false,
            uses: Vec::new(),
        };
        std::iter::once(own)
            .chain(self.hardware_holds(driver, false))
            .collect()
    }

    /// Returns the counters and capacities that an allocation of the device uses together with others.
    fn uses(&self, device: &AllocatedDevice) -> Vec<Use> {
        let pool = format!("{}/{}", device.driver, device.pool);
        let capacities = device.consumed.iter().filter_map(|(name, amount)| {
            let whole = self.capacities.get(name)?.clone();
            let of = format!("{pool}/{}@{name}", device.device);
            Some(Use {
                of,
                amount: amount.clone(),
                whole,
                groups: Vec::new(),
            })
        });
        let capacities: Vec<_> = capacities.collect();
        self.counter_uses(&pool)
            .into_iter()
            .chain(capacities)
            .collect()
    }

    /// `pool`: with its driver's name before it.
    fn counter_uses(&self, pool: &str) -> Vec<Use> {
        let counters = self.counters.iter().map(|facts| Use {
            of: format!("{pool}#{}/{}", facts.set, facts.counter),
            amount: facts.amount.clone(),
            whole: facts.whole.clone(),
            groups: Vec::new(),
        });
        let groups = self.groups.iter().map(|(set, groups)| Use {
            of: format!("{pool}#{set}"),
            amount: String::new(),
            whole: String::new(),
            groups: groups.clone(),
        });
        counters.chain(groups).collect()
    }
}

/// The devices and identity strings that a claim keeps from others. Devices with admin access are kept from no claim; shares and devices
/// that allow several allocations are kept from exclusive claims.
pub fn holds(
    allocation: &Allocation,
    facts: impl Fn(&DriverName, &str, &str) -> DeviceFacts,
) -> Vec<Hold> {
    holds_of(allocation, |_| true, facts)
}

/// The same for some of its drivers.
pub(in crate::manager::claims) fn holds_of(
    allocation: &Allocation,
    wanted: impl Fn(&DriverName) -> bool,
    facts: impl Fn(&DriverName, &str, &str) -> DeviceFacts,
) -> Vec<Hold> {
    let mut holds: BTreeMap<(String, Option<DriverName>), Hold> = BTreeMap::new();
    let devices = allocation
        .devices
        .iter()
        .filter(|device| wanted(&device.driver));
    for device in devices.filter(|device| !device.admin_access) {
        let facts = facts(&device.driver, device.pool.as_str(), device.device.as_str());
        let shared = device.share_id.is_some() || facts.allow_multiple_allocations;
        let key = device_key(&device.driver, device.pool.as_str(), device.device.as_str());
        let uses = facts.uses(device);
        let of_hardware = facts.hardware_holds(&device.driver, shared);
        let own = Hold {
            key,
            shared,
            driver: None,
            derived: false,
            uses,
        };
        for new in std::iter::once(own).chain(of_hardware) {
            let hold = holds
                .entry((new.key.clone(), new.driver.clone()))
                .or_insert_with(|| Hold {
                    uses: Vec::new(),
                    ..new.clone()
                });
            // What a driver says of its device goes before what was found.
            if hold.derived && !new.derived {
                (hold.shared, hold.derived) = (new.shared, false);
            } else if hold.derived == new.derived {
                hold.shared &= new.shared;
            }
            // A second share of the device uses its capacity once more, and nothing else.
            let uses: Vec<_> = new
                .uses
                .into_iter()
                .filter(|new| new.of.contains('@') || !hold.uses.contains(new))
                .collect();
            hold.uses.extend(uses);
        }
    }
    holds.into_values().collect()
}
