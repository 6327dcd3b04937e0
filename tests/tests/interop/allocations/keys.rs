//! Random keys of hardware, and which devices they keep from a claim. The rule is here once more, as the table of decision 0028 has it: without
//! an index, each hold beside each other one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use nodedock_allocator::allocate::DeviceHolds;
use nodedock_model::Hold;
use serde_json::{Value, json};

use super::generate::{DRIVERS, Random};

/// Directories, identity strings and numbers of nodes. Some directories begin with the text of another one and are not below it.
const COMMON: [&str; 6] = [
    "/sys/devices/virtual/vfio/6",
    "/sys/devices/virtual",
    "node:character:195:255",
    "node:character:195:25",
    "serial/1",
    "serial/1/2",
];
const FUNCTIONS: usize = 8;
const BELOW_FUNCTION: [&str; 9] = [
    "",
    "",
    "",
    "/drm",
    "/drm/card0",
    "/drm/renderD128",
    "/drm-",
    "1",
    "/net/eth0",
];

/// Makes another sequence of a seed than its slices and claims have.
const SEQUENCE: u64 = 1 << 63;

type Name = (String, String, String);

pub(crate) struct Keys {
    random: Random,
    names: BTreeSet<Name>,
    of_devices: BTreeMap<Name, Vec<Hold>>,
    /// Holds by UID, in addition to those that follow from the devices of a claim.
    of_claims: BTreeMap<String, Vec<Hold>>,
    foreign: Vec<String>,
}

/// Events of keys between two allocations.
pub(crate) enum Event {
    Hold(String, Vec<Hold>),
    Release(String),
    /// Devices have other keys from now on.
    Devices,
}

impl Keys {
    pub(crate) fn new(seed: u64, slices: &[Value]) -> Self {
        let name = |value: &Value| value.as_str().expect("a name").to_owned();
        let of_slice = |slice: &Value| -> Vec<Name> {
            let (spec, pool) = (&slice["spec"], &slice["spec"]["pool"]);
            // A slice of counters has no devices.
            let devices = spec["devices"].as_array().into_iter().flatten();
            devices
                .map(|device| {
                    (
                        name(&spec["driver"]),
                        name(&pool["name"]),
                        name(&device["name"]),
                    )
                })
                .collect()
        };
        let mut keys = Self {
            random: Random::new(seed ^ SEQUENCE),
            names: slices.iter().flat_map(of_slice).collect(),
            of_devices: BTreeMap::new(),
            of_claims: BTreeMap::new(),
            foreign: Vec::new(),
        };
        keys.set_devices();
        keys
    }

    fn set_devices(&mut self) {
        let random = &mut self.random;
        let holds = |name: &Name| {
            let count = if random.percent(75) {
                1 + random.below(3)
            } else {
                0
            };
            (
                name.clone(),
                (0..count).map(|_| hold(random, &name.0)).collect(),
            )
        };
        self.of_devices = self.names.iter().map(holds).collect();
    }

    pub(crate) fn of_devices(&self) -> DeviceHolds {
        let mut found = DeviceHolds::default();
        for ((driver, pool, device), holds) in &self.of_devices {
            found.set(driver, pool, device, holds.clone());
        }
        found
    }

    pub(crate) fn of_claims(&self) -> impl Iterator<Item = (&String, &Vec<Hold>)> {
        self.of_claims.iter()
    }

    pub(crate) fn remove(&mut self, uid: &str) {
        self.of_claims.remove(uid);
    }

    /// A prepare of the claim that was allocated shows what its containers get. Beside it, claims without an allocation come and go.
    pub(crate) fn events(
        &mut self,
        allocated: Option<(&str, &AllocationResult)>,
        number: usize,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        if let Some((uid, allocation)) = allocated.filter(|_| self.random.percent(60)) {
            let drivers: Vec<&str> = results(allocation)
                .iter()
                .map(|result| result.driver.as_str())
                .collect();
            if !drivers.is_empty() {
                events.push(self.hold(uid.to_owned(), &drivers));
            }
        }
        if self.random.percent(30) {
            let uid = format!("foreign-{number}");
            self.foreign.push(uid.clone());
            events.push(self.hold(uid, &DRIVERS));
        }
        if self.random.percent(20) && !self.foreign.is_empty() {
            let place = self.random.below(self.foreign.len());
            let uid = self.foreign.swap_remove(place);
            self.of_claims.remove(&uid);
            events.push(Event::Release(uid));
        }
        if self.random.percent(5) {
            self.set_devices();
            events.push(Event::Devices);
        }
        events
    }

    fn hold(&mut self, uid: String, drivers: &[&str]) -> Event {
        let count = 1 + self.random.below(3);
        let random = &mut self.random;
        let one = |_| {
            let driver = *random.of(drivers);
            hold(random, driver)
        };
        let holds: Vec<Hold> = (0..count).map(one).collect();
        self.of_claims
            .entry(uid.clone())
            .or_default()
            .extend(holds.iter().cloned());
        Event::Hold(uid, holds)
    }

    /// Returns the holds of every claim.
    fn holds<'a>(
        &'a self,
        allocated: impl Iterator<Item = (&'a str, &'a AllocationResult)>,
    ) -> Vec<(&'a str, &'a Hold)> {
        let of_devices = allocated.flat_map(|(uid, allocation)| {
            results(allocation)
                .iter()
                .flat_map(move |result| self.of_result(result))
                .map(move |hold| (uid, hold))
        });
        let of_claims = self
            .of_claims
            .iter()
            .flat_map(|(uid, holds)| holds.iter().map(|hold| (uid.as_str(), hold)));
        of_devices.chain(of_claims).collect()
    }

    /// Admin access holds nothing.
    fn of_result(&self, result: &DeviceRequestAllocationResult) -> &[Hold] {
        if result.admin_access == Some(true) {
            return &[];
        }
        let name = (
            result.driver.clone(),
            result.pool.clone(),
            result.device.clone(),
        );
        self.of_devices.get(&name).map_or(&[], Vec::as_slice)
    }

    /// The devices whose hardware claims keep from others, with what holds it.
    pub(crate) fn held<'a>(
        &'a self,
        allocated: impl Iterator<Item = (&'a str, &'a AllocationResult)>,
    ) -> Vec<Value> {
        let held = self.holds(allocated);
        let holder = |wanted: &[Hold]| {
            held.iter()
                .find(|(_, held)| wanted.iter().any(|wanted| excludes(held, wanted)))
        };
        let devices = self
            .of_devices
            .iter()
            .filter_map(|(name, wanted)| Some((name, holder(wanted)?)));
        devices
            .map(|((driver, pool, device), (by, hold))| {
                json!({"driver": driver, "pool": pool, "device": device, "by": by, "hold": hold})
            })
            .collect()
    }

    /// Returns, for each claim, the other claims that keep its hardware from it.
    pub(crate) fn in_the_way<'a>(
        &'a self,
        allocated: impl Iterator<Item = (&'a str, &'a AllocationResult)>,
    ) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
        let holds = self.holds(allocated);
        let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (uid, hold) in &holds {
            let others = holds
                .iter()
                .filter(|(other, held)| other != uid && excludes(held, hold));
            found
                .entry(uid)
                .or_default()
                .extend(others.map(|(other, _)| *other));
        }
        found
    }

    /// Returns whether two devices of one claim would exclude each other in two.
    pub(crate) fn meet_within(&self, allocation: &AllocationResult) -> bool {
        let of_results: Vec<&[Hold]> = results(allocation)
            .iter()
            .map(|result| self.of_result(result))
            .collect();
        let meets = |one: &[Hold], other: &[Hold]| {
            one.iter()
                .any(|hold| other.iter().any(|held| excludes(held, hold)))
        };
        let mut numbered = of_results.iter().enumerate();
        numbered.any(|(number, one)| {
            of_results
                .iter()
                .skip(number + 1)
                .any(|other| meets(one, other))
        })
    }
}

pub(crate) fn results(allocation: &AllocationResult) -> &[DeviceRequestAllocationResult] {
    let results = allocation
        .devices
        .as_ref()
        .and_then(|devices| devices.results.as_deref());
    results.expect("an allocation has results")
}

/// A directory is in the way of those above and below it. What is derived decides between drivers alone.
fn excludes(held: &Hold, wanted: &Hold) -> bool {
    let is_directory = |key: &str| key.starts_with("/sys/devices/");
    let is_within = |low: &str, high: &str| Path::new(low).starts_with(high);
    let (one, other) = (held.key.as_str(), wanted.key.as_str());
    let meets = if is_directory(one) && is_directory(other) {
        is_within(one, other) || is_within(other, one)
    } else {
        one == other
    };
    let is_own = matches!((&held.driver, &wanted.driver), (Some(one), Some(other)) if one == other);
    let is_derived = held.derived || wanted.derived;
    let is_shared = held.shared && wanted.shared;
    meets && !(is_derived && is_own) && !is_shared
}

fn hold(random: &mut Random, driver: &str) -> Hold {
    let key = if random.percent(15) {
        (*random.of(&COMMON)).to_owned()
    } else if random.percent(1) {
        "/sys/devices/pci0000:00".to_owned()
    } else {
        let function = 1 + random.below(FUNCTIONS);
        format!(
            "/sys/devices/pci0000:00/0000:0{function}:00.0{}",
            random.of(&BELOW_FUNCTION)
        )
    };
    let driver = (!random.percent(5)).then(|| driver.parse().expect("the name of a driver"));
    Hold {
        key,
        shared: random.percent(45),
        driver,
        derived: random.percent(50),
        uses: Vec::new(),
    }
}
