//! The inventory of an adapter: its plugin's list with what the rules say and `/sys` has.

use std::collections::BTreeMap;

use super::AdapterParts;
use crate::driver::Published;
use crate::{hardware_keys, standard_attributes};
use nodedock_model::{
    Adapter, DeviceHealth, HealthState, Inventory, PluginDevice, Pool, Problem, device_name,
};

/// Data from which an inventory is built.
pub(super) struct Material {
    pub(super) adapter: Adapter,
    pub(super) listed: BTreeMap<String, PluginDevice>,
    pub(super) left: Option<String>,
}

impl Material {
    /// Blocks: it reads below `/sys`.
    pub(super) fn publish(self, parts: &AdapterParts) -> Result<Published, Problem> {
        let Self {
            adapter,
            listed,
            left,
        } = self;
        let pool = Pool {
            devices: adapter.devices(&listed, |path| parts.sysfs.fact(path))?,
            extended_resource: Some(adapter.resource.clone()),
            ..Pool::default()
        };
        let mut inventory = Inventory {
            pools: [(adapter.pool.clone(), pool)].into(),
        };
        standard_attributes::add(&parts.sysfs, parts.numa_node_form, &mut inventory)?;
        hardware_keys::add(&parts.hardware, &parts.sysfs, &mut inventory)?;
        let health = listed.values().map(|device| {
            let health = match (&left, device.healthy) {
                (Some(why), _) => DeviceHealth {
                    state: HealthState::Unhealthy,
                    message: why.clone(),
                },
                (None, false) => {
                    let message = format!(
                        "the device plugin of {} lists it as unhealthy",
                        adapter.resource
                    );
                    DeviceHealth {
                        state: HealthState::Unhealthy,
                        message,
                    }
                }
                (None, true) => DeviceHealth {
                    state: HealthState::Healthy,
                    message: String::new(),
                },
            };
            ((adapter.pool.clone(), device_name(&device.id)), health)
        });
        Ok(Published {
            inventory,
            health: health.collect(),
            ..Published::default()
        })
    }
}
