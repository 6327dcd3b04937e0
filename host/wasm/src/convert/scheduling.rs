//! Additions for the scheduler to an inventory that was checked before.

use std::collections::{BTreeMap, BTreeSet};

use super::{Checked, at_most, name, quantity, refuse, shown, twice};
use crate::bindings::exports::nodedock::driver::scheduling as guest;
use nodedock_model::limit::{COMPATIBILITY_GROUPS_MAX, NODE_ALLOCATABLE_MAX};
use nodedock_model::rule::is_node_resource;
use nodedock_model::{
    AllocatableMapping, AttributeValue, BindingConditions, Device, DeviceName, DeviceScheduling,
    DriverName, Inventory, NodeAllocatable, Pool, PoolName, PoolScheduling, QualifiedName,
    SkippedOperations, is_dns_label,
};

/// Adds to the pools and devices of an inventory; nothing if any addition is refused.
pub(in super::super) fn add_scheduling(
    driver: &DriverName,
    inventory: &mut Inventory,
    additions: guest::Additions,
) -> Checked<()> {
    let (mut devices, mut pools) = (BTreeSet::new(), BTreeSet::new());
    for added in additions.devices {
        let (pool, device) = (
            name(PoolName::new(&added.pool))?,
            name(DeviceName::new(&added.device))?,
        );
        let place = format!("scheduling of device {pool}/{device}");
        let known = inventory
            .pools
            .get_mut(&pool)
            .and_then(|pool| pool.devices.get_mut(&device));
        let Some(known) = known else {
            return refuse(format!("{place}: the inventory does not have it"));
        };
        let scheduling = device_scheduling(known, added).map_err(|why| why.at(&place))?;
        known.scheduling =
            Some(Box::new(scheduling)).filter(|added| **added != DeviceScheduling::default());
        if !devices.insert((pool, device)) {
            return refuse(format!("{place} occurs twice"));
        }
    }
    for added in additions.pools {
        let pool = name(PoolName::new(&added.pool))?;
        let place = format!("scheduling of pool {pool}");
        let Some(known) = inventory.pools.get_mut(&pool) else {
            return refuse(format!("{place}: the inventory does not have it"));
        };
        known.scheduling = pool_scheduling(driver, known, &added).map_err(|why| why.at(&place))?;
        if !pools.insert(pool) {
            return refuse(format!("{place} occurs twice"));
        }
    }
    Ok(())
}

fn device_scheduling(device: &Device, added: guest::DeviceScheduling) -> Checked<DeviceScheduling> {
    at_most(
        "resources of the node",
        added.node_allocatable.len(),
        NODE_ALLOCATABLE_MAX,
    )?;
    let mut node_allocatable = BTreeMap::new();
    for entry in added.node_allocatable {
        let resource = entry.resource.clone();
        let entry = allocatable(device, entry).map_err(|why| why.at(shown(&resource)))?;
        if node_allocatable.insert(resource.clone(), entry).is_some() {
            return refuse(format!("resource {} occurs twice", shown(&resource)));
        }
    }
    let mut compatibility = BTreeMap::new();
    for entry in added.compatibility {
        let set = entry.counter_set.clone();
        let groups =
            groups(device, entry).map_err(|why| why.at(format!("counter set {}", shown(&set))))?;
        if compatibility.insert(set.clone(), groups).is_some() {
            return refuse(format!("counter set {} occurs twice", shown(&set)));
        }
    }
    let binding = BindingConditions {
        conditions: added.binding_conditions,
        failures: added.binding_failure_conditions,
    };
    if let Err(error) = binding.check() {
        return refuse(error.to_string());
    }
    Ok(DeviceScheduling {
        binds_to_node: added.binds_to_node,
        binding_conditions: binding.conditions,
        binding_failure_conditions: binding.failures,
        node_allocatable,
        compatibility,
    })
}

fn allocatable(device: &Device, entry: guest::NodeAllocatable) -> Checked<NodeAllocatable> {
    if !is_node_resource(&entry.resource) {
        return refuse("it is not cpu, memory, ephemeral-storage or hugepages-SIZE");
    }
    if entry.mapping.is_none() && entry.per_pod.is_none() && entry.per_container.is_none() {
        return refuse("it has neither a mapping nor an overhead");
    }
    let optional =
        |what: &str, text: Option<String>| text.map(|text| quantity(what, text)).transpose();
    let mapping = entry.mapping.map(|mapping| match mapping {
        guest::AllocatableMapping::PerDevice(amount) => Ok(AllocatableMapping::PerDevice(
            quantity("the amount", amount)?,
        )),
        guest::AllocatableMapping::PerCapacity(guest::CapacityMapping {
            capacity,
            multiplier,
        }) => {
            let capacity = name(QualifiedName::new(&capacity))?;
            if !device.capacities.contains_key(&capacity) {
                return refuse(format!("the device has no capacity {capacity}"));
            }
            let multiplier = quantity("the multiplier", multiplier)?;
            Ok(AllocatableMapping::PerCapacity {
                capacity,
                multiplier,
            })
        }
    });
    Ok(NodeAllocatable {
        mapping: mapping.transpose()?,
        per_pod: optional("the overhead of a pod", entry.per_pod)?,
        per_container: optional("the overhead of a container", entry.per_container)?,
    })
}

fn groups(device: &Device, entry: guest::Compatibility) -> Checked<Vec<String>> {
    if !device
        .consumes
        .iter()
        .any(|set| set.name == entry.counter_set)
    {
        return refuse("the device does not consume it");
    }
    at_most("groups", entry.groups.len(), COMPATIBILITY_GROUPS_MAX)?;
    if let Some(again) = twice(entry.groups.iter().map(String::as_str)) {
        return refuse(format!("group {} occurs twice", shown(again)));
    }
    match entry.groups.iter().find(|group| !is_dns_label(group)) {
        Some(bad) => refuse(format!("group {} is not a DNS label", shown(bad))),
        None => Ok(entry.groups),
    }
}

fn pool_scheduling(
    driver: &DriverName,
    pool: &Pool,
    added: &guest::PoolScheduling,
) -> Checked<PoolScheduling> {
    let attribute = added.partition_type_attribute.as_deref();
    let skipped = added.skip_node_operations;
    let (prepare, unprepare) = (
        skipped.contains(guest::NodeOperations::PREPARE),
        skipped.contains(guest::NodeOperations::UNPREPARE),
    );
    Ok(PoolScheduling {
        partition_type_attribute: attribute
            .map(|text| partition_type(driver, pool, text))
            .transpose()?,
        skip_node_operations: match (prepare, unprepare) {
            (false, false) => None,
            (false, true) => Some(SkippedOperations::Unprepare),
            (true, true) => Some(SkippedOperations::PrepareAndUnprepare),
            (true, false) => return refuse("prepare is left out only together with unprepare"),
        },
    })
}

/// Every partition, which is a device that consumes counters, must have the attribute as a text.
fn partition_type(driver: &DriverName, pool: &Pool, text: &str) -> Checked<String> {
    let key = name(QualifiedName::new(text))?;
    let lacks = |device: &&Device| {
        !device.consumes.is_empty()
            && !matches!(device.attributes.get(&key), Some(AttributeValue::Text(_)))
    };
    if pool.devices.values().any(|device| lacks(&device)) {
        return refuse(format!(
            "a device that consumes counters has no text attribute {key}"
        ));
    }
    Ok(if text.contains('/') {
        text.to_owned()
    } else {
        format!("{driver}/{text}")
    })
}
