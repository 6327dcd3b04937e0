//! Additions for the scheduler to an inventory that was checked before.

use super::Checked;
use crate::bindings::exports::nodedock::driver::scheduling as guest;
use nodedock_model::answer::{self, UnparsedAllocatable, UnparsedMapping};
use nodedock_model::{BindingConditions, DriverName, Inventory};

/// Adds to the pools and devices of an inventory, which is not to be used if any addition is refused.
pub(in super::super) fn add_scheduling(
    driver: &DriverName,
    inventory: &mut Inventory,
    additions: guest::Additions,
) -> Checked<()> {
    let guest::Additions { devices, pools } = additions;
    let additions = answer::Additions {
        devices: devices.into_iter().map(device).collect(),
        pools: pools.into_iter().map(pool).collect(),
    };
    Ok(answer::add_scheduling(Some(driver), inventory, additions)?)
}

fn device(added: guest::DeviceScheduling) -> answer::DeviceScheduling {
    let guest::DeviceScheduling {
        pool,
        device,
        binds_to_node,
        binding_conditions: conditions,
        binding_failure_conditions: failures,
        node_allocatable,
        compatibility,
    } = added;
    answer::DeviceScheduling {
        pool,
        device,
        binds_to_node,
        binding: BindingConditions {
            conditions,
            failures,
        },
        node_allocatable: node_allocatable.into_iter().map(allocatable).collect(),
        compatibility: compatibility.into_iter().map(groups).collect(),
    }
}

fn allocatable(entry: guest::NodeAllocatable) -> (String, UnparsedAllocatable) {
    let guest::NodeAllocatable {
        resource,
        mapping: of,
        per_pod,
        per_container,
    } = entry;
    let amounts = UnparsedAllocatable {
        mapping: of.map(mapping),
        per_pod,
        per_container,
    };
    (resource, amounts)
}

fn mapping(mapping: guest::AllocatableMapping) -> UnparsedMapping {
    match mapping {
        guest::AllocatableMapping::PerDevice(amount) => UnparsedMapping::PerDevice(amount),
        guest::AllocatableMapping::PerCapacity(guest::CapacityMapping {
            capacity,
            multiplier,
        }) => UnparsedMapping::PerCapacity {
            capacity,
            multiplier,
        },
    }
}

fn groups(entry: guest::Compatibility) -> (String, Vec<String>) {
    let guest::Compatibility {
        counter_set,
        groups,
    } = entry;
    (counter_set, groups)
}

fn pool(added: guest::PoolScheduling) -> answer::PoolScheduling {
    let guest::PoolScheduling {
        pool,
        partition_type_attribute,
        skip_node_operations: skipped,
    } = added;
    answer::PoolScheduling {
        pool,
        partition_type_attribute,
        skips_prepare: skipped.contains(guest::NodeOperations::PREPARE),
        skips_unprepare: skipped.contains(guest::NodeOperations::UNPREPARE),
    }
}
