//! Pools of drivers that carry a resource's name, as the device manager and the registry know them.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

use super::offer::{PoolOffer, Pooled};
use super::{DriverNow, PooledResources};
use nodedock_core::manager::Manager;
use nodedock_core::manager::devices::ResourceSource;
use nodedock_core::registry::Registry;
use nodedock_model::DriverName;

/// The daemon's own.
pub struct PoolsOfDrivers {
    pub devices: Arc<Manager>,
    pub registry: Registry,
}

impl PooledResources for PoolsOfDrivers {
    fn now(&self) -> Pooled {
        let mut pooled = Pooled { told: BTreeMap::new(), ..Pooled::default() };
        // Before the device manager is asked: it looks at inventories a moment after they change, and what it has is the newer.
        for driver in self.registry.all_serving() {
            let Some(published) = &driver.inventory else { continue };
            let published = published.borrow();
            let resources =
                published.inventory.pools.values().filter_map(|pool| pool.extended_resource.clone());
            pooled.told.insert(driver.identity.name.clone(), resources.collect());
        }
        for view in self.devices.capacity().resources {
            match view.source {
                ResourceSource::Pools(driver) => {
                    let devices = view.devices.into_iter().map(|device| device.device).collect();
                    pooled.offers.insert(view.name, PoolOffer { driver, devices });
                }
                ResourceSource::Plugin(_) => {
                    pooled.others.insert(view.name);
                }
                ResourceSource::Remembered => {}
            }
        }
        pooled
    }

    fn driver(&self, driver: &DriverName) -> DriverNow {
        if self.registry.serving(driver).is_ok() {
            DriverNow::Serves
        } else if self.registry.is_under_way(driver) {
            DriverNow::Comes
        } else {
            DriverNow::Away
        }
    }

    fn follow(&self) -> Vec<watch::Receiver<u64>> {
        vec![self.devices.device_changes(), self.registry.serving_changes()]
    }
}
