//! Slices at an API server in memory.

mod diff;
mod reconcile;
mod restarts;
mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::slice::{Content, Slice};
use crate::facts::NodeFacts;
use crate::pools::PoolKey;
use nodedock_core::driver::Published;
use nodedock_model::{
    Device, DeviceHealth, DeviceName, DriverName, HealthState, Inventory, ObjectName, Pool,
    PoolName, Taint, TaintEffect, Uid,
};

const GPU: &str = "gpu.example.com";
const NODE: &str = "node-1";

fn node() -> NodeFacts {
    NodeFacts {
        name: ObjectName::new(NODE).unwrap(),
        uid: Uid::new("uid-of-node-1").unwrap(),
    }
}

fn driver(name: &str) -> DriverName {
    DriverName::new(name).unwrap()
}

fn key(driver: &str, pool: &str) -> PoolKey {
    PoolKey {
        driver: self::driver(driver),
        pool: PoolName::new(pool).unwrap(),
    }
}

fn device_name(index: usize) -> DeviceName {
    DeviceName::new(format!("d{index:04}")).unwrap()
}

fn taint(value: &str) -> Taint {
    Taint {
        key: "example.com/worn".to_owned(),
        value: value.to_owned(),
        effect: TaintEffect::NoSchedule,
    }
}

/// A pool of so many plain devices.
fn devices(count: usize) -> Pool {
    let devices = (0..count).map(|index| (device_name(index), Device::default()));
    Pool {
        devices: devices.collect(),
        ..Pool::default()
    }
}

fn published(pools: &[(&str, &Pool)]) -> Published {
    let pools = pools
        .iter()
        .map(|(name, pool)| (PoolName::new(name).unwrap(), (*pool).clone()));
    Published {
        inventory: Inventory {
            pools: pools.collect(),
        },
        ..Published::default()
    }
}

fn with_health(
    mut published: Published,
    pool: &str,
    index: usize,
    state: HealthState,
) -> Published {
    let device = (PoolName::new(pool).unwrap(), device_name(index));
    published.health.insert(
        device,
        DeviceHealth {
            state,
            ..DeviceHealth::default()
        },
    );
    published
}

fn content(pool: &Pool) -> Content {
    super::convert::content(pool, &Default::default(), &Default::default())
}

/// Returns the devices of a pool as a reader of the API sees them. None: the pool is not complete.
fn visible(slices: &[Arc<Slice>], key: &PoolKey) -> Option<Content> {
    let slices: Vec<_> = slices
        .iter()
        .filter(|slice| slice.spec.key() == *key)
        .collect();
    let Some(newest) = slices.iter().map(|slice| slice.spec.pool.generation).max() else {
        return Some(Content::default());
    };
    let current: Vec<_> = slices
        .iter()
        .filter(|slice| slice.spec.pool.generation == newest)
        .collect();
    let count = i64::try_from(current.len()).unwrap();
    if current
        .iter()
        .any(|slice| slice.spec.pool.resource_slice_count != count)
    {
        return None;
    }
    let (mut devices, mut shared_counters) = (BTreeMap::new(), BTreeMap::new());
    for slice in current {
        for (name, device) in &slice.spec.content.devices {
            if devices.insert(name.clone(), device.clone()).is_some() {
                return None;
            }
        }
        shared_counters.extend(slice.spec.content.shared_counters.clone());
    }
    Some(Content {
        devices,
        shared_counters,
        ..Content::default()
    })
}
