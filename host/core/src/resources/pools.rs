//! The devices of pools that have a resource's name. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Listed, PoolOffers};
use crate::driver::Published;
use nodedock_model::{
    Device, DeviceName, DriverName, ExtendedResource, HealthReport, HealthState, PluginDevice,
    Pool, PoolName, TaintEffect,
};

/// The ID of a pool's device in a resource.
pub fn device_id(pool: &PoolName, device: &DeviceName) -> String {
    format!("{pool}/{device}")
}

/// The pool and the device of an id: a pool's name may have slashes, a device's has none.
pub fn split_id(id: &str) -> Option<(PoolName, DeviceName)> {
    let (pool, device) = id.rsplit_once('/')?;
    Some((PoolName::new(pool).ok()?, DeviceName::new(device).ok()?))
}

/// The offers of drivers under names of resources. Several pools of a driver under one name are one offer.
pub(crate) fn offers(drivers: &[(DriverName, Arc<Published>)]) -> PoolOffers {
    let mut offers: BTreeMap<(ExtendedResource, DriverName), BTreeMap<String, PluginDevice>> =
        BTreeMap::new();
    for (driver, published) in drivers {
        for (name, pool) in &published.inventory.pools {
            let Some(resource) = &pool.extended_resource else {
                continue;
            };
            let devices = offers
                .entry((resource.clone(), driver.clone()))
                .or_default();
            devices.extend(
                devices_of(name, pool, &published.health).map(|device| (device.id.clone(), device)),
            );
        }
    }
    offers
        .into_iter()
        .map(|(key, devices)| (key, Listed::new(devices)))
        .collect()
}

fn devices_of(
    name: &PoolName,
    pool: &Pool,
    health: &HealthReport,
) -> impl Iterator<Item = PluginDevice> {
    pool.devices.iter().map(|(device, facts)| {
        let mut numa_nodes = facts.numa_nodes.clone();
        numa_nodes.sort_unstable();
        numa_nodes.dedup();
        let healthy = is_healthy(name, device, facts, health);
        PluginDevice {
            id: device_id(name, device),
            healthy,
            numa_nodes,
        }
    })
}

/// A device is healthy unless the driver reports otherwise, or taints it against scheduling.
fn is_healthy(pool: &PoolName, name: &DeviceName, device: &Device, health: &HealthReport) -> bool {
    let said = health
        .get(&(pool.clone(), name.clone()))
        .map(|health| health.state);
    said != Some(HealthState::Unhealthy)
        && device
            .taints
            .iter()
            .all(|taint| taint.effect == TaintEffect::None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::{driver, resource};
    use nodedock_model::{DeviceHealth, Inventory, Taint};

    fn taint(effect: TaintEffect) -> Device {
        Device {
            taints: vec![Taint {
                key: "k".to_owned(),
                value: String::new(),
                effect,
            }],
            ..Device::default()
        }
    }

    fn pool(resource_name: Option<&str>, devices: Vec<(&str, Device)>) -> Pool {
        Pool {
            devices: devices
                .into_iter()
                .map(|(name, device)| (DeviceName::new(name).unwrap(), device))
                .collect(),
            extended_resource: resource_name.map(resource),
            ..Pool::default()
        }
    }

    #[test]
    fn named_pools_are_offered_as_resource() {
        let shared = Device {
            allow_multiple_allocations: true,
            numa_nodes: vec![1, 0, 1],
            ..Device::default()
        };
        let one = pool(
            Some("gpu"),
            vec![
                ("0", shared),
                ("1", Device::default()),
                ("2", taint(TaintEffect::NoSchedule)),
                ("3", taint(TaintEffect::NoExecute)),
                ("4", taint(TaintEffect::None)),
            ],
        );
        let two = pool(Some("gpu"), vec![("0", Device::default())]);
        let pools = [
            ("a/one", one),
            ("two", two),
            ("other", pool(None, vec![("9", Device::default())])),
        ];
        let pools = pools
            .into_iter()
            .map(|(name, pool)| (PoolName::new(name).unwrap(), pool))
            .collect();
        let sick = (
            (
                PoolName::new("a/one").unwrap(),
                DeviceName::new("1").unwrap(),
            ),
            HealthState::Unhealthy,
        );
        let health = [sick].map(|(key, state)| {
            (
                key,
                DeviceHealth {
                    state,
                    ..DeviceHealth::default()
                },
            )
        });
        let published = Published {
            inventory: Inventory { pools },
            health: health.into(),
            ..Published::default()
        };
        let offers = offers(&[(driver("gpu"), Arc::new(published))]);
        let devices = &offers[&(resource("gpu"), driver("gpu"))];
        let healthy: Vec<_> = devices
            .values()
            .map(|device| (device.id.as_str(), device.healthy))
            .collect();
        assert_eq!(
            healthy,
            [
                ("a/one/0", true),
                ("a/one/1", false),
                ("a/one/2", false),
                ("a/one/3", false),
                ("a/one/4", true),
                ("two/0", true)
            ]
        );
        assert_eq!(
            (offers.len(), devices["a/one/0"].numa_nodes.clone()),
            (1, vec![0, 1])
        );
        let (pool, device) = split_id("a/one/0").unwrap();
        assert_eq!((pool.as_str(), device.as_str()), ("a/one", "0"));
    }
}
