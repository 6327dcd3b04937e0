//! Holds of a claim that follow from what its containers really get: device nodes and network interfaces, from container edits or from the
//! CDI files that a native plugin wrote.
//!
//! These holds are known only after a prepare. A claim that would get what another claim has is refused then, and its driver unprepares it.
//! The manager remembers what a device gave, so that the next claim of that device is decided before its driver is called, and an allocator
//! offers the device to no claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use super::files::SpecFiles;
use super::machine::{self, DerivedKey, DeviceFacts, DriverResult};
use super::overlap;
use crate::driver::Published;
use crate::driver::moved::have_moved;
use crate::hardware::Hardware;
use crate::hardware_keys;
use crate::records::RecordStore;
use crate::records::table::device_key;
use crate::registry::Registry;
use nodedock_base::error::chain;
use nodedock_model::{
    ClaimRecord, Device, DeviceName, DeviceNode, DriverName, Hold, NetDevice, ObjectRef, PoolName,
    PreparedClaim, Problem, ProblemCode, Uid,
};

/// Devices of which keys are remembered; far more than a node has.
const REMEMBERED_MAX: usize = 65_536;

/// The owner of the keys of what containers got of devices.
pub struct Holds {
    records: Arc<RecordStore>,
    files: Arc<SpecFiles>,
    registry: Registry,
    hardware: Hardware,
    given: Mutex<AllGiven>,
    /// Cached holds of all devices, valid until their basis changes.
    holds: Mutex<(Basis, Arc<Vec<HardwareHolds>>)>,
}

#[derive(Default)]
struct AllGiven {
    /// Keys that devices gave at their last prepare, by `driver/pool/device`.
    devices: BTreeMap<String, Given>,
    /// Counts changes.
    revision: u64,
}

#[derive(Debug, Clone, PartialEq)]
struct Given {
    name: FullName,
    /// Device as its driver described it then: a device that has changed may give something else.
    device: Option<Device>,
    keys: Vec<DerivedKey>,
}

/// A device of a driver.
type FullName = (DriverName, PoolName, DeviceName);

/// Holds of a device on the hardware behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct HardwareHolds {
    pub driver: DriverName,
    pub pool: PoolName,
    pub device: DeviceName,
    /// Holds of a claim that has the device, or a share of a device that allows several allocations.
    pub holds: Vec<Hold>,
}

/// Inputs from which the holds of all devices follow.
#[derive(Default)]
struct Basis {
    published: Vec<(DriverName, Arc<Published>)>,
    /// Revision of [`AllGiven`].
    revision: u64,
}

impl Basis {
    fn is_same(&self, other: &Self) -> bool {
        let mut pairs = self.published.iter().zip(&other.published);
        self.revision == other.revision
            && self.published.len() == other.published.len()
            && pairs.all(|(one, other)| one.0 == other.0 && Arc::ptr_eq(&one.1, &other.1))
    }
}

impl Holds {
    pub(in crate::manager) fn new(
        records: Arc<RecordStore>,
        files: Arc<SpecFiles>,
        registry: Registry,
        hardware: Hardware,
    ) -> Self {
        Self {
            records,
            files,
            registry,
            hardware,
            given: Mutex::default(),
            holds: Mutex::default(),
        }
    }

    fn put(&self, key: &str, given: Given) {
        let mut all = self.given.lock();
        let is_known = all.devices.get(key).is_some_and(|known| *known == given);
        let has_room = all.devices.len() < REMEMBERED_MAX || all.devices.contains_key(key);
        if is_known || !has_room || (given.keys.is_empty() && all.devices.remove(key).is_none()) {
            return;
        }
        if !given.keys.is_empty() {
            all.devices.insert(key.to_owned(), given);
        }
        all.revision += 1;
    }

    /// Pools and devices of a driver of which keys are known.
    pub(in crate::manager) fn of_driver(&self, driver: &DriverName) -> Vec<(PoolName, DeviceName)> {
        let all = self.given.lock();
        // `0` follows `/`.
        let known = all
            .devices
            .range(format!("{driver}/")..format!("{driver}0"));
        known
            .map(|(_, given)| (given.name.1.clone(), given.name.2.clone()))
            .collect()
    }

    fn remembered(&self, key: &str, device: Option<&Device>) -> Vec<DerivedKey> {
        let all = self.given.lock();
        // A device that gave nothing holds nothing more.
        let given = all
            .devices
            .get(key)
            .filter(|given| given.device.as_ref() == device);
        given.map_or_else(Vec::new, |given| given.keys.clone())
    }

    pub(in crate::manager) fn facts(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> DeviceFacts {
        let key = device_key(driver, pool, device);
        let found = self
            .registry
            .instances
            .with_device(driver, pool, device, |device, sets| DeviceFacts {
                derived: self.remembered(&key, Some(device)),
                ..DeviceFacts::of(device, sets)
            });
        // A native plugin reports no devices.
        found.unwrap_or_else(|| DeviceFacts {
            derived: self.remembered(&key, None),
            ..DeviceFacts::default()
        })
    }

    /// Drivers whose device nodes are no longer those of the time when the claim was prepared.
    pub(super) fn moved<'a>(
        &self,
        uids: impl Iterator<Item = &'a Uid>,
    ) -> BTreeMap<Uid, Vec<DriverName>> {
        let known: Vec<_> = {
            let table = self.records.table();
            uids.filter_map(|uid| table.claim(uid.as_str()).cloned())
                .collect()
        };
        let moved = known.iter().map(|record| {
            let parts = record.drivers.iter();
            let parts = parts.filter(|(_, part)| {
                part.current()
                    .is_some_and(|prepared| have_moved(prepared, &self.hardware))
            });
            (
                record.id.uid.clone(),
                parts.map(|(driver, _)| driver.clone()).collect::<Vec<_>>(),
            )
        });
        moved.filter(|(_, drivers)| !drivers.is_empty()).collect()
    }

    /// Claims that keep a device, the hardware behind it, or what it takes of counters from an exclusive claim. Pool claims are among them.
    pub fn holders_of_device(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> Vec<ObjectRef> {
        let facts = self.facts(driver, pool, device);
        let table = self.records.table();
        let mut holders = table.holders(&facts.exclusive_holds(driver, pool, device));
        let overlapping = facts
            .hold(driver, pool, device)
            .map(|hold| overlap::in_the_way(&table, &hold));
        let others: Vec<_> = overlapping
            .into_iter()
            .flatten()
            .filter(|claim| holders.iter().all(|holder| holder.uid != claim.uid))
            .collect();
        holders.extend(others);
        holders
    }

    /// Returns whether devices of a driver fit beside each other and those of all claims, by their use of counters.
    pub(in crate::manager) fn fit_together(
        &self,
        driver: &DriverName,
        devices: impl Iterator<Item = (PoolName, DeviceName)>,
    ) -> bool {
        let holds: Vec<_> = devices
            .filter_map(|(pool, device)| {
                self.facts(driver, pool.as_str(), device.as_str()).hold(
                    driver,
                    pool.as_str(),
                    device.as_str(),
                )
            })
            .collect();
        holds.is_empty() || overlap::fits(&self.records.table(), &holds)
    }

    /// Returns the holds of all drivers' devices on their hardware: those that drivers declare, and those of what their containers got.
    pub fn of_hardware(&self) -> Arc<Vec<HardwareHolds>> {
        let basis = Basis {
            published: self.registry.instances.published(),
            revision: self.given.lock().revision,
        };
        let mut known = self.holds.lock();
        if !known.0.is_same(&basis) {
            let holds = self.holds_by(&basis.published);
            *known = (basis, Arc::new(holds));
        }
        known.1.clone()
    }

    fn holds_by(&self, published: &[(DriverName, Arc<Published>)]) -> Vec<HardwareHolds> {
        let given = self
            .given
            .lock()
            .devices
            .values()
            .map(|given| given.name.clone())
            .collect();
        let mut names: BTreeSet<FullName> = given;
        for (driver, published) in published {
            for (pool, found) in &published.inventory.pools {
                names.extend(
                    found
                        .devices
                        .keys()
                        .map(|device| (driver.clone(), pool.clone(), device.clone())),
                );
            }
        }
        let holds = names.into_iter().map(|(driver, pool, device)| {
            let facts = self.facts(&driver, pool.as_str(), device.as_str());
            let holds = facts.hardware_holds(&driver, facts.allow_multiple_allocations);
            HardwareHolds {
                driver,
                pool,
                device,
                holds,
            }
        });
        holds.filter(|found| !found.holds.is_empty()).collect()
    }

    /// Adds what containers get of a claim to what it holds, in the table. Refuses the results of drivers that give what another claim has.
    pub(super) async fn hold_hardware(
        &self,
        record: &Arc<ClaimRecord>,
        mut results: Vec<DriverResult>,
    ) -> (Arc<ClaimRecord>, Vec<DriverResult>) {
        let mut given = BTreeMap::new();
        for result in &mut results {
            let Ok(prepared) = &result.outcome else {
                continue;
            };
            match self.given_by(record, &result.driver, prepared).await {
                Ok(found) => given.extend(found),
                Err(problem) => result.outcome = Err(problem),
            }
        }
        given
            .iter()
            .for_each(|(key, given)| self.put(key, given.clone()));
        let facts = |driver: &DriverName, pool: &str, device: &str| {
            let facts = self.facts(driver, pool, device);
            let derived = given
                .get(&device_key(driver, pool, device))
                .map(|given| given.keys.clone());
            DeviceFacts {
                derived: derived.unwrap_or_else(|| facts.derived.clone()),
                ..facts
            }
        };
        let mut holds = record.holds.clone();
        let mut table = self.records.table();
        for result in results.iter_mut().filter(|result| result.outcome.is_ok()) {
            let mut derived =
                machine::holds_of(&record.allocation, |driver| *driver == result.driver, facts);
            derived.retain(|hold| hold.derived);
            if let Some((holder, key)) = table.conflict(&record.id.uid, record.made_for(), &derived)
            {
                result.outcome = Err(machine::held(&record.id, holder, key));
                continue;
            }
            // What it gave before is no container's any more, and its numbers may be another device's by now.
            holds.retain(|known| !known.derived || known.driver.as_ref() != Some(&result.driver));
            derived.retain(|new| {
                !holds
                    .iter()
                    .any(|known| known.key == new.key && known.driver == new.driver)
            });
            holds.extend(derived);
        }
        if holds == record.holds {
            return (record.clone(), results);
        }
        let held = Arc::new(ClaimRecord {
            holds,
            ..ClaimRecord::clone(record)
        });
        drop(table.put(held.clone()));
        (held, results)
    }

    /// Returns the keys of what each device of a claim gives, by `driver/pool/device`.
    async fn given_by(
        &self,
        record: &ClaimRecord,
        driver: &DriverName,
        prepared: &PreparedClaim,
    ) -> Result<BTreeMap<String, Given>, Problem> {
        if prepared
            .devices
            .iter()
            .any(|device| !device.access.cdi_names().is_empty())
        {
            self.files.survey().await;
        }
        // The nodes of a recorded machine are below its own directory.
        let hardware = &self.hardware;
        let sysfs = hardware.open_sys().map_err(|error| {
            let message = format!(
                "{} cannot be read: {}",
                hardware.sys().display(),
                chain(&error)
            );
            Problem::unavailable(ProblemCode::IoError, message)
        })?;
        let pools: BTreeSet<_> = prepared.devices.iter().map(|device| &device.pool).collect();
        let control: Vec<_> = pools
            .into_iter()
            .filter_map(|pool| self.registry.instances.control_nodes(driver, pool))
            .collect();
        let keys = |nodes: &[DeviceNode], interfaces: &[NetDevice]| {
            let mut keys = Vec::new();
            for node in nodes {
                // One that is not there is given to no container.
                let Some(found) = hardware_keys::of_edit(hardware, &sysfs, node)? else {
                    continue;
                };
                let has_hardware = found.has_hardware;
                // A driver cannot say so of hardware.
                if !has_hardware && control.iter().any(|nodes| nodes.matches(node.node_path())) {
                    continue;
                }
                keys.extend(
                    found
                        .keys
                        .into_iter()
                        .map(|key| DerivedKey { key, has_hardware }),
                );
            }
            for interface in interfaces {
                let found = hardware_keys::of_interface(&sysfs, interface)?;
                keys.extend(found.into_iter().map(|key| DerivedKey {
                    key,
                    has_hardware: true,
                }));
            }
            Ok::<_, Problem>(keys)
        };
        let of_all = keys(&prepared.edits.device_nodes, &prepared.edits.net_devices)?;
        let mut given = BTreeMap::new();
        for allocated in record.allocation.of_driver(driver) {
            let (pool, name) = (&allocated.pool, &allocated.device);
            let mut found = of_all.clone();
            for device in prepared
                .devices
                .iter()
                .filter(|of| of.pool == *pool && of.device == *name)
            {
                let interfaces = device
                    .access
                    .edits()
                    .map_or(&[][..], |edits| &edits.net_devices);
                found.extend(keys(device.access.device_nodes(), interfaces)?);
                for file in device
                    .access
                    .cdi_names()
                    .iter()
                    .flat_map(|name| self.files.given(name))
                {
                    found.extend(keys(&file.device_nodes, &file.net_devices)?);
                }
            }
            let device = self
                .registry
                .instances
                .device(driver, pool.as_str(), name.as_str());
            // What the driver declares it holds anyway.
            found.retain(|found| {
                device
                    .as_ref()
                    .is_none_or(|device| !device.keys.contains(&found.key))
            });
            found.sort();
            found.dedup();
            let full = (driver.clone(), pool.clone(), name.clone());
            let key = device_key(driver, pool.as_str(), name.as_str());
            given.insert(
                key,
                Given {
                    name: full,
                    device,
                    keys: found,
                },
            );
        }
        Ok(given)
    }
}
