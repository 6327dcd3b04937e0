//! What a claim keeps from others because of what its containers really get: device nodes and network interfaces, of container edits or of the CDI
//! files that a native plugin wrote.
//!
//! It is known only after a prepare. A claim that would get what another one has is refused then, and its driver unprepares it. What a device
//! gave is remembered, so that the next claim of that device is decided before its driver is called, and an allocator offers it to no claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use super::machine::{self, DerivedKey, DriverResult};
use super::table::device_key;
use crate::driver::Published;
use crate::hardware_keys;
use crate::manager::Manager;
use nodedock_base::error::chain;
use nodedock_model::{
    ClaimRecord, Device, DeviceAccess, DeviceName, DeviceNode, DriverName, Edits, Hold, NetDevice, PoolName,
    PreparedClaim, Problem, ProblemCode,
};

/// Devices of which keys are remembered; far more than a node has.
const REMEMBERED_MAX: usize = 65_536;

/// Keys of what containers got of devices, by `driver/pool/device`.
#[derive(Default)]
pub(crate) struct Remembered {
    given: Mutex<BTreeMap<String, Given>>,
    /// What follows for every device, until something changes.
    holds: Mutex<(Basis, Arc<Vec<HardwareHolds>>)>,
}

/// What a device keeps from others by the hardware behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct HardwareHolds {
    pub driver: DriverName,
    pub pool: PoolName,
    pub device: DeviceName,
    /// If a claim has the device, or a share of one that allows several allocations.
    pub holds: Vec<Hold>,
}

/// What the holds of all devices follow from.
#[derive(Default)]
struct Basis {
    published: Vec<(DriverName, Arc<Published>)>,
    given: BTreeMap<String, Given>,
}

impl Basis {
    fn is_same(&self, other: &Self) -> bool {
        let pairs = || self.published.iter().zip(&other.published);
        self.published.len() == other.published.len()
            && pairs().all(|(one, other)| one.0 == other.0 && Arc::ptr_eq(&one.1, &other.1))
            && self.given == other.given
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Given {
    /// As the driver had it: one that has changed may give something else.
    device: Option<Device>,
    keys: Vec<DerivedKey>,
}

impl Remembered {
    fn put(&self, key: String, device: Option<Device>, keys: Vec<DerivedKey>) {
        let mut remembered = self.given.lock();
        if keys.is_empty() {
            remembered.remove(&key);
        } else if remembered.len() < REMEMBERED_MAX || remembered.contains_key(&key) {
            remembered.insert(key, Given { device, keys });
        }
    }

    pub(super) fn get(&self, key: &str, device: Option<&Device>) -> Vec<DerivedKey> {
        let remembered = self.given.lock();
        let given = remembered.get(key).filter(|given| given.device.as_ref() == device);
        given.map(|given| given.keys.clone()).unwrap_or_default()
    }
}

impl Manager {
    /// What the devices of all drivers keep from others by their hardware: by what drivers declare, and by what their containers got.
    pub fn hardware_holds(&self) -> Arc<Vec<HardwareHolds>> {
        let mut published = self.registry.published();
        published.sort_by(|(one, _), (other, _)| one.cmp(other));
        let basis = Basis { published, given: self.remembered.given.lock().clone() };
        let mut known = self.remembered.holds.lock();
        if !known.0.is_same(&basis) {
            let holds = self.holds_by(&basis);
            *known = (basis, Arc::new(holds));
        }
        known.1.clone()
    }

    fn holds_by(&self, basis: &Basis) -> Vec<HardwareHolds> {
        let mut names = BTreeSet::new();
        for (driver, published) in &basis.published {
            for (pool, found) in &published.inventory.pools {
                names.extend(
                    found.devices.keys().map(|device| (driver.clone(), pool.clone(), device.clone())),
                );
            }
        }
        names.extend(basis.given.keys().filter_map(|key| split_key(key)));
        let holds = |(driver, pool, device): (DriverName, PoolName, DeviceName)| {
            let facts = self.facts(&driver, pool.as_str(), device.as_str());
            let holds = facts.hardware_holds(&driver, facts.allow_multiple_allocations);
            HardwareHolds { driver, pool, device, holds }
        };
        names.into_iter().map(holds).filter(|found| !found.holds.is_empty()).collect()
    }

    /// Adds what containers get of a claim to what it holds, in the table. Refuses the results of drivers that give what another claim has.
    pub(super) async fn hold_hardware(
        &self,
        record: &Arc<ClaimRecord>,
        mut results: Vec<DriverResult>,
    ) -> (Arc<ClaimRecord>, Vec<DriverResult>) {
        for result in &mut results {
            let Ok(prepared) = &result.outcome else { continue };
            if let Err(problem) = self.remember(record, &result.driver, prepared).await {
                result.outcome = Err(problem);
            }
        }
        let mut held = ClaimRecord::clone(record);
        let mut table = self.table();
        for result in results.iter_mut().filter(|result| result.outcome.is_ok()) {
            let is_of = |driver: &DriverName| *driver == result.driver;
            let facts = |driver: &DriverName, pool: &str, device: &str| self.facts(driver, pool, device);
            let mut derived = machine::holds_of(&record.allocation, is_of, facts);
            derived.retain(|hold| hold.derived);
            if let Some((holder, key)) = table.conflict(&record.id.uid, &derived) {
                result.outcome = Err(machine::held(&record.id, holder, key));
                continue;
            }
            // What it gave before is another container's, and its numbers may be another device's by now.
            held.holds.retain(|known| !known.derived || known.driver.as_ref() != Some(&result.driver));
            let is_known = |hold: &Hold| {
                held.holds.iter().any(|known| known.key == hold.key && known.driver == hold.driver)
            };
            derived.retain(|hold| !is_known(hold));
            held.holds.extend(derived);
        }
        if held.holds == record.holds {
            return (record.clone(), results);
        }
        let held = Arc::new(held);
        drop(table.put(held.clone()));
        (held, results)
    }

    /// Remembers what each device of a claim gives.
    async fn remember(
        &self,
        record: &ClaimRecord,
        driver: &DriverName,
        prepared: &PreparedClaim,
    ) -> Result<(), Problem> {
        let names: Vec<String> =
            prepared.devices.iter().flat_map(|device| cdi_names(&device.access)).cloned().collect();
        if !names.is_empty() {
            self.survey().await;
        }
        // The nodes of a recorded machine are below its own directory.
        let hardware = &self.settings.hardware;
        let sysfs = hardware.open_sys().map_err(|error| {
            let message = format!("{} cannot be read: {}", hardware.sys().display(), chain(&error));
            Problem::unavailable(ProblemCode::IoError, message)
        })?;
        let pools = prepared.devices.iter().map(|device| &device.pool).collect::<BTreeSet<_>>();
        let control: Vec<_> =
            pools.into_iter().filter_map(|pool| self.registry.control_nodes(driver, pool)).collect();
        let keys = |nodes: &[DeviceNode], interfaces: &[NetDevice]| {
            let mut keys = Vec::new();
            for node in nodes {
                let found = hardware_keys::of_edit(hardware, &sysfs, node)?.unwrap_or_default();
                let has_hardware = found.has_hardware;
                // A driver cannot say so of hardware.
                if !has_hardware && control.iter().any(|nodes| nodes.matches(node.node_path())) {
                    continue;
                }
                keys.extend(found.keys.into_iter().map(|key| DerivedKey { key, has_hardware }));
            }
            for interface in interfaces {
                let found = hardware_keys::of_interface(&sysfs, interface)?;
                keys.extend(found.into_iter().map(|key| DerivedKey { key, has_hardware: true }));
            }
            Ok::<_, Problem>(keys)
        };
        let of_edits = |edits: &Edits| keys(&edits.device_nodes, &edits.net_devices);
        let of_all = of_edits(&prepared.edits)?;
        let mut by_device: BTreeMap<(String, String), Vec<DerivedKey>> = BTreeMap::new();
        for device in &prepared.devices {
            let (pool, name) = (device.pool.to_string(), device.device.to_string());
            let found = by_device.entry((pool, name)).or_insert_with(|| of_all.clone());
            found.extend(device.access.edits().map(of_edits).transpose()?.unwrap_or_default());
            for given in cdi_names(&device.access).flat_map(|name| self.cdi.given(name)) {
                found.extend(keys(&given.device_nodes, &given.net_devices)?);
            }
        }
        let of_driver = record.allocation.of_driver(driver);
        for device in of_driver {
            let (pool, name) = (device.pool.as_str(), device.device.as_str());
            let mut keys =
                by_device.remove(&(pool.to_owned(), name.to_owned())).unwrap_or_else(|| of_all.clone());
            let known = self.registry.device(driver, pool, name);
            // What the driver declares it holds anyway.
            keys.retain(|found| known.as_ref().is_none_or(|device| !device.keys.contains(&found.key)));
            keys.sort();
            keys.dedup();
            self.remembered.put(device_key(driver, pool, name), known, keys);
        }
        Ok(())
    }
}

fn split_key(key: &str) -> Option<(DriverName, PoolName, DeviceName)> {
    let (driver, rest) = key.split_once('/')?;
    let (pool, device) = rest.rsplit_once('/')?;
    Some((DriverName::new(driver).ok()?, PoolName::new(pool).ok()?, DeviceName::new(device).ok()?))
}

fn cdi_names(access: &DeviceAccess) -> impl Iterator<Item = &String> {
    let names = match access {
        DeviceAccess::Edits(_) => &[][..],
        DeviceAccess::CdiDevices(names) | DeviceAccess::EditsAndCdiDevices(_, names) => names,
    };
    names.iter()
}
