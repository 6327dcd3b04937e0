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
    let additions = answer::Additions {
        devices: additions.devices.into_iter().map(device).collect(),
        pools: additions.pools.into_iter().map(pool).collect(),
    };
    Ok(answer::add_scheduling(Some(driver), inventory, additions)?)
}

fn device(added: guest::DeviceScheduling) -> answer::DeviceScheduling {
    let mapping = |mapping| match mapping {
        guest::AllocatableMapping::PerDevice(amount) => UnparsedMapping::PerDevice(amount),
        guest::AllocatableMapping::PerCapacity(mapping) => UnparsedMapping::PerCapacity {
            capacity: mapping.capacity,
            multiplier: mapping.multiplier,
        },
    };
    let allocatable = |entry: guest::NodeAllocatable| {
        let amounts = UnparsedAllocatable {
            mapping: entry.mapping.map(mapping),
            per_pod: entry.per_pod,
            per_container: entry.per_container,
        };
        (entry.resource, amounts)
    };
    let groups = |entry: guest::Compatibility| (entry.counter_set, entry.groups);
    answer::DeviceScheduling {
        pool: added.pool,
        device: added.device,
        binds_to_node: added.binds_to_node,
        binding: BindingConditions {
            conditions: added.binding_conditions,
            failures: added.binding_failure_conditions,
        },
        node_allocatable: added
            .node_allocatable
            .into_iter()
            .map(allocatable)
            .collect(),
        compatibility: added.compatibility.into_iter().map(groups).collect(),
    }
}

fn pool(added: guest::PoolScheduling) -> answer::PoolScheduling {
    let skipped = added.skip_node_operations;
    answer::PoolScheduling {
        pool: added.pool,
        partition_type_attribute: added.partition_type_attribute,
        skips_prepare: skipped.contains(guest::NodeOperations::PREPARE),
        skips_unprepare: skipped.contains(guest::NodeOperations::UNPREPARE),
    }
}
