//! Slices against a server of our own making.

mod plans;
mod remote;
mod server;
mod wire;
mod writing;
mod writing_more;

use std::collections::BTreeMap;
use std::sync::Arc;

use server::Store;

use super::content::Content;
use super::planner::{Owner, PoolKey};
use nodedock_core::driver::Published;
use nodedock_model::{
    Device, DeviceHealth, DeviceName, DriverName, HealthState, Inventory, Pool, PoolName, Taint, TaintEffect,
    Uid,
};

fn owner() -> Owner {
    Owner { name: "node-1".to_owned(), uid: Uid::new("uid-of-node-1").unwrap() }
}

fn driver(name: &str) -> DriverName {
    DriverName::new(name).unwrap()
}

fn key(driver: &str, pool: &str) -> PoolKey {
    PoolKey { driver: self::driver(driver), pool: PoolName::new(pool).unwrap() }
}

fn device_name(index: usize) -> DeviceName {
    DeviceName::new(format!("d{index:04}")).unwrap()
}

fn taint(value: &str) -> Taint {
    Taint { key: "example.com/worn".to_owned(), value: value.to_owned(), effect: TaintEffect::NoSchedule }
}

/// A driver with one pool of so many plain devices.
fn devices(count: usize) -> Pool {
    let devices = (0..count).map(|index| (device_name(index), Device::default()));
    Pool { devices: devices.collect(), ..Pool::default() }
}

fn published(pools: &[(&str, &Pool)]) -> Published {
    let pools = pools.iter().map(|(name, pool)| (PoolName::new(name).unwrap(), (*pool).clone()));
    Published { inventory: Inventory { pools: pools.collect() }, ..Published::default() }
}

fn with_health(mut published: Published, pool: &str, index: usize, state: HealthState) -> Published {
    let place = (PoolName::new(pool).unwrap(), device_name(index));
    published.health.insert(place, DeviceHealth { state, ..DeviceHealth::default() });
    published
}

/// What a reader of the API takes for the devices of a pool. None: it is not complete.
fn visible(store: &Store, key: &PoolKey) -> Option<Content> {
    let slices: Vec<_> = store.held().filter(|held| held.key == *key).collect();
    let Some(newest) = slices.iter().map(|held| held.generation).max() else {
        return Some(Content::default());
    };
    let current: Vec<_> = slices.iter().filter(|held| held.generation == newest).collect();
    let count = i64::try_from(current.len()).unwrap();
    if current.iter().any(|held| held.count != count) {
        return None;
    }
    let (mut devices, mut counters) = (BTreeMap::new(), BTreeMap::new());
    for held in current {
        for (name, device) in &held.content.devices {
            if devices.insert(name.clone(), device.clone()).is_some() {
                return None;
            }
        }
        counters.extend(held.content.counters.clone());
    }
    Some(Content { devices, counters })
}

fn arc(published: Published) -> Arc<Published> {
    Arc::new(published)
}
