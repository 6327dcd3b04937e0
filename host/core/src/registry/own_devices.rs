//! The devices that native plugins publish themselves, in ResourceSlices of this node.
//!
//! Is given them as a whole by the reader of the slices. Never decides whether a plugin serves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::RwLock;

use nodedock_base::changes::Changes;
use nodedock_model::{AllocatedDevice, ChangedKind, DriverName, PoolName};

/// Devices of a plugin: pools, by the names that the plugin gives them, and devices.
pub type DeviceKeys = BTreeSet<(PoolName, String)>;

/// The owner of these devices.
#[derive(Default)]
pub struct OwnDevices {
    by_driver: RwLock<BTreeMap<DriverName, Arc<DeviceKeys>>>,
    changes: Changes,
}

impl OwnDevices {
    pub(super) fn new(changes: Changes) -> Self {
        Self {
            by_driver: RwLock::default(),
            changes,
        }
    }

    /// Replaces the devices of all plugins, and reports the plugins whose devices changed. A plugin that had slices and has none now has an
    /// empty set as long as it `is_present`.
    pub fn replace(
        &self,
        mut devices: BTreeMap<DriverName, DeviceKeys>,
        is_present: impl Fn(&DriverName) -> bool,
    ) {
        let mut changed = Vec::new();
        {
            let mut known = self.by_driver.write();
            known.retain(|name, _| is_present(name));
            for name in known.keys() {
                devices.entry(name.clone()).or_default();
            }
            for (name, devices) in devices {
                if known.get(&name).is_none_or(|known| **known != devices) {
                    known.insert(name.clone(), Arc::new(devices));
                    changed.push(name);
                }
            }
        }
        for name in changed {
            self.changes.report(ChangedKind::Device, name, "changed");
        }
    }

    /// Returns the devices of a plugin; `None`: it has had no slice since the daemon started.
    pub fn of(&self, driver: &DriverName) -> Option<Arc<DeviceKeys>> {
        self.by_driver.read().get(driver).cloned()
    }
}

/// The devices that a serving driver has now.
pub enum PublishedDevices {
    /// It lists them here.
    Listed(Arc<crate::driver::Published>),
    /// It publishes them itself.
    Own(Arc<DeviceKeys>),
}

impl PublishedDevices {
    pub(crate) fn has(&self, device: &AllocatedDevice) -> bool {
        match self {
            Self::Listed(published) => published
                .inventory
                .device(&device.pool, &device.device)
                .is_some(),
            Self::Own(devices) => {
                devices.contains(&(device.pool.clone(), device.device.to_string()))
            }
        }
    }
}
