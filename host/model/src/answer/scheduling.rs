//! Additions for the scheduler to an inventory that was checked before.

use std::collections::{BTreeMap, BTreeSet};

use super::{Additions, UnparsedAllocatable, UnparsedMapping};
use crate::check::{self, Field, Findings, Reason};
use crate::limit::{COMPATIBILITY_GROUPS_MAX, NODE_ALLOCATABLE_MAX};
use crate::rule::is_node_resource;
use crate::{
    AllocatableMapping, AttributeValue, Device, DeviceScheduling, DriverName, Inventory,
    NodeAllocatable, Pool, PoolScheduling, QualifiedName, SkippedOperations, quantity,
};

/// Adds to the pools and devices of an inventory.
///
/// # Errors
///
/// What is wrong with an addition; the inventory is not to be used then.
pub fn add_scheduling(
    driver: Option<&DriverName>,
    inventory: &mut Inventory,
    additions: Additions,
) -> Result<(), Findings> {
    let mut findings = Findings::default();
    let mut seen = BTreeSet::new();
    for added in additions.devices {
        let name = format!("{}/{}", added.pool, added.device);
        let known = inventory.pools.get_mut(added.pool.as_str());
        let known = known.and_then(|pool| pool.devices.get_mut(added.device.as_str()));
        findings.named(Field::Device, &name, |at| match known {
            None => at.inconsistent("the inventory does not have it"),
            Some(known) => {
                let scheduling = device_scheduling(at, known, added);
                known.scheduling = Some(Box::new(scheduling))
                    .filter(|added| **added != DeviceScheduling::default());
            }
        });
        if !seen.insert(name.clone()) {
            findings.add_at(Field::Devices, Reason::Duplicate(name));
        }
    }
    seen.clear();
    for added in additions.pools {
        let name = added.pool.clone();
        findings.named(Field::Pool, &name, |at| {
            match inventory.pools.get_mut(name.as_str()) {
                None => at.inconsistent("the inventory does not have it"),
                Some(known) => known.scheduling = pool_scheduling(at, driver, known, added),
            }
        });
        if !seen.insert(name.clone()) {
            findings.add_at(Field::Pools, Reason::Duplicate(name));
        }
    }
    findings.accept(())
}

fn device_scheduling(
    findings: &mut Findings,
    device: &Device,
    added: super::DeviceScheduling,
) -> DeviceScheduling {
    let (resources, sets) = (&added.node_allocatable, &added.compatibility);
    if findings.at_most(
        Field::NodeAllocatable,
        resources.len(),
        NODE_ALLOCATABLE_MAX,
    ) {
        findings.unique(
            Field::NodeAllocatable,
            resources.iter().map(|(name, _)| name.as_str()),
        );
    }
    findings.unique(
        Field::Compatibility,
        sets.iter().map(|(set, _)| set.as_str()),
    );
    let resources = added
        .node_allocatable
        .into_iter()
        .take(NODE_ALLOCATABLE_MAX);
    let node_allocatable: BTreeMap<_, _> = resources
        .map(|(resource, amounts)| {
            let amounts = findings.named(Field::NodeAllocatable, &resource, |at| {
                allocatable(at, device, &resource, amounts)
            });
            (resource, amounts)
        })
        .collect();
    for (set, groups) in &added.compatibility {
        findings.named(Field::Compatibility, set, |at| {
            self::groups(at, device, set, groups)
        });
    }
    check::binding_conditions(findings, &added.binding);
    DeviceScheduling {
        binds_to_node: added.binds_to_node,
        binding_conditions: added.binding.conditions,
        binding_failure_conditions: added.binding.failures,
        node_allocatable,
        compatibility: added.compatibility.into_iter().collect(),
    }
}

fn allocatable(
    findings: &mut Findings,
    device: &Device,
    resource: &str,
    amounts: UnparsedAllocatable,
) -> NodeAllocatable {
    if !is_node_resource(resource) {
        findings.inconsistent("it is not cpu, memory, ephemeral-storage or hugepages-SIZE");
    }
    if amounts == UnparsedAllocatable::default() {
        findings.inconsistent("it has neither a mapping nor an overhead");
    }
    let overheads = [
        (Field::PerPod, &amounts.per_pod),
        (Field::PerContainer, &amounts.per_container),
    ];
    for (field, overhead) in overheads {
        if let Some(amount) = overhead {
            findings.field(field, |at| at.quantity(amount));
        }
    }
    NodeAllocatable {
        mapping: amounts
            .mapping
            .and_then(|mapping| self::mapping(findings, device, mapping)),
        per_pod: amounts.per_pod,
        per_container: amounts.per_container,
    }
}

fn mapping(
    findings: &mut Findings,
    device: &Device,
    mapping: UnparsedMapping,
) -> Option<AllocatableMapping> {
    let (UnparsedMapping::PerDevice(amount)
    | UnparsedMapping::PerCapacity {
        multiplier: amount, ..
    }) = &mapping;
    findings.field(Field::Multiplier, |at| {
        at.quantity(amount);
        at.require(
            quantity::nanos(amount) != Some(0),
            amount,
            "is not positive",
        );
    });
    Some(match mapping {
        UnparsedMapping::PerDevice(amount) => AllocatableMapping::PerDevice(amount),
        UnparsedMapping::PerCapacity {
            capacity,
            multiplier,
        } => {
            let capacity = findings.parsed(QualifiedName::new(capacity))?;
            if !device.capacities.contains_key(&capacity) {
                findings.inconsistent(format!("the device has no capacity {capacity}"));
            }
            AllocatableMapping::PerCapacity {
                capacity,
                multiplier,
            }
        }
    })
}

fn groups(findings: &mut Findings, device: &Device, set: &str, groups: &[String]) {
    if !device.consumes.iter().any(|consumed| consumed.name == set) {
        findings.inconsistent("the device does not consume it");
    }
    findings.each(
        Field::Groups,
        groups,
        COMPATIBILITY_GROUPS_MAX,
        |at, group| {
            at.dns_label(group);
        },
    );
    findings.unique(Field::Groups, groups.iter().map(String::as_str));
}

fn pool_scheduling(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    pool: &Pool,
    added: super::PoolScheduling,
) -> PoolScheduling {
    if added.skips_prepare && !added.skips_unprepare {
        findings.inconsistent("prepare is left out only together with unprepare");
    }
    PoolScheduling {
        partition_type_attribute: added
            .partition_type_attribute
            .and_then(|text| partition_type(findings, driver, pool, &text)),
        skip_node_operations: match (added.skips_prepare, added.skips_unprepare) {
            (_, false) => None,
            (false, true) => Some(SkippedOperations::Unprepare),
            (true, true) => Some(SkippedOperations::PrepareAndUnprepare),
        },
    }
}

/// Every partition, which is a device that consumes counters, must have the attribute as a text.
fn partition_type(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    pool: &Pool,
    text: &str,
) -> Option<String> {
    let key = findings.parsed(QualifiedName::new(text))?;
    let lacks = |device: &&Device| {
        !device.consumes.is_empty()
            && !matches!(device.attributes.get(&key), Some(AttributeValue::Text(_)))
    };
    if pool.devices.values().any(|device| lacks(&device)) {
        findings.inconsistent(format!(
            "a device that consumes counters has no text attribute {key}"
        ));
    }
    Some(match driver {
        Some(driver) if !text.contains('/') => format!("{driver}/{text}"),
        _ => text.to_owned(),
    })
}
