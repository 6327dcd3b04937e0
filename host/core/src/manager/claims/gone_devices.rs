//! Devices of prepared claims that their drivers do not have any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::RwLock;

use nodedock_model::{AllocatedDevice, DeviceName, DriverName, PoolName};

/// Handle to these devices. One task writes them; clones read the same.
#[derive(Debug, Clone, Default)]
pub struct GoneDevices(Arc<RwLock<BTreeMap<DriverName, DevicesOfDriver>>>);

/// Never empty.
type DevicesOfDriver = BTreeSet<(PoolName, DeviceName)>;

impl GoneDevices {
    /// Returns whether a device of a claim is one that its driver does not have any more.
    pub fn has(&self, device: &AllocatedDevice) -> bool {
        let gone = self.0.read();
        let of_driver = gone.get(&device.driver);
        of_driver.is_some_and(|of| of.contains(&(device.pool.clone(), device.device.clone())))
    }

    pub(super) fn is_any(&self, driver: &DriverName) -> bool {
        self.0.read().contains_key(driver)
    }

    /// Replaces the devices of a driver. Returns whether there were some before.
    pub(super) fn set(&self, driver: &DriverName, devices: DevicesOfDriver) -> bool {
        let mut gone = self.0.write();
        let before = match devices.is_empty() {
            true => gone.remove(driver),
            false => gone.insert(driver.clone(), devices),
        };
        before.is_some()
    }

    /// Removes the devices of other drivers than these. Returns those drivers.
    pub(super) fn clear_others(&self, is_kept: impl Fn(&DriverName) -> bool) -> Vec<DriverName> {
        let mut gone = self.0.write();
        let cleared: Vec<_> = gone.keys().filter(|name| !is_kept(name)).cloned().collect();
        for name in &cleared {
            gone.remove(name);
        }
        cleared
    }
}
