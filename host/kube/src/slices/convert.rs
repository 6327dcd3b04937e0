//! Pools of drivers as ResourceSlices contain them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use nodedock_allocator::allocate::api_capacity;
use serde_json::{Map, Value, json};

use super::entry::{Entry, PREPARE_FAILED, UNHEALTHY};
use super::health::UnhealthyTaint;
use super::slice::{Content, PoolFields};
use nodedock_model::{
    AllocatableMapping, AttributeValue, BindingConditions, CounterSet, Device, DeviceName,
    NodeAllocatable, Pool, PoolScheduling, SkippedOperations, Taint, TaintEffect, limit,
};

/// The taints that the host adds to devices of a pool.
#[derive(Debug, Default)]
pub(super) struct PoolTaints {
    /// Taints of the key [`UNHEALTHY`], by device.
    pub(super) unhealthy: BTreeMap<DeviceName, UnhealthyTaint>,
    /// Those with a taint of the key [`PREPARE_FAILED`].
    pub(super) failed: BTreeSet<DeviceName>,
}

/// Operator's additions to the devices of a pool where their driver names nothing of its own.
#[derive(Debug, Default)]
pub(super) struct PoolAdditions {
    /// Overhead in the node's resources, by name.
    pub(super) overhead: BTreeMap<String, NodeAllocatable>,
    pub(super) binding: BindingConditions,
}

/// Returns what the slices of a pool are to contain.
pub(super) fn content(pool: &Pool, taints: &PoolTaints, additions: &PoolAdditions) -> Content {
    let devices = pool.devices.iter().map(|(name, known)| {
        let device = device(name, known, taints, &additions.binding);
        (name.to_string(), entry(&device, known, &additions.overhead))
    });
    // The API has no pool without devices, so their counters would count nothing.
    let sets = pool
        .shared_counters
        .iter()
        .filter(|_| !pool.devices.is_empty());
    let sets = sets.map(|set| {
        let wire = api::CounterSet {
            name: set.name.clone(),
            counters: counters(set),
        };
        (set.name.clone(), Entry::of(&wire))
    });
    let PoolScheduling {
        partition_type_attribute,
        skip_node_operations,
    } = &pool.scheduling;
    let skipped: &[&str] = match skip_node_operations {
        None => &[],
        Some(SkippedOperations::Unprepare) => &["NodeUnprepareResources"],
        Some(SkippedOperations::PrepareAndUnprepare) => {
            &["NodePrepareResources", "NodeUnprepareResources"]
        }
    };
    let pool_fields = PoolFields {
        partition_type_attribute: partition_type_attribute.clone(),
        skip_node_operations: skipped.iter().map(ToString::to_string).collect(),
    };
    Content {
        devices: devices.collect(),
        shared_counters: sets.collect(),
        pool_fields,
    }
}

/// A device with the fields that `k8s-openapi` does not have yet: those of Kubernetes 1.37.
fn entry(
    device: &api::Device,
    known: &Device,
    overhead: &BTreeMap<String, NodeAllocatable>,
) -> Entry {
    let scheduling = known.scheduling.as_deref().cloned().unwrap_or_default();
    let mut resources = scheduling.node_allocatable;
    for (resource, amounts) in overhead {
        resources
            .entry(resource.clone())
            .or_insert_with(|| amounts.clone());
    }
    if resources.is_empty() && scheduling.compatibility.is_empty() {
        return Entry::of(device);
    }
    let mut json = Entry::of(device).json().clone();
    if !resources.is_empty() {
        json["nodeAllocatableResources"] = resources
            .iter()
            .map(|(resource, entry)| (resource.clone(), node_allocatable(entry)))
            .collect();
    }
    for consumed in json["consumesCounters"]
        .as_array_mut()
        .into_iter()
        .flatten()
    {
        let set = consumed["counterSet"].as_str().unwrap_or_default();
        if let Some(groups) = scheduling
            .compatibility
            .get(set)
            .filter(|groups| !groups.is_empty())
        {
            consumed["compatibilityGroups"] = json!(groups);
        }
    }
    Entry::from(json)
}

/// `NodeAllocatableResource` of `resource.k8s.io/v1`.
fn node_allocatable(entry: &NodeAllocatable) -> Value {
    let mapping = entry.mapping.as_ref().map(|mapping| match mapping {
        AllocatableMapping::PerDevice(amount) => json!({ "deviceMultiplier": amount }),
        AllocatableMapping::PerCapacity {
            capacity,
            multiplier,
        } => {
            json!({ "capacityKey": capacity.to_string(), "capacityMultiplier": multiplier })
        }
    });
    let overhead = [
        ("perPod", &entry.per_pod),
        ("perContainer", &entry.per_container),
    ];
    let overhead: Map<String, Value> = overhead
        .into_iter()
        .filter_map(|(key, amount)| Some((key.to_owned(), amount.clone()?.into())))
        .collect();
    let mut resource = Map::new();
    resource.extend(mapping.map(|mapping| ("mapping".to_owned(), mapping)));
    resource.extend((!overhead.is_empty()).then(|| ("overhead".to_owned(), overhead.into())));
    resource.into()
}

fn device(
    name: &DeviceName,
    device: &Device,
    added_taints: &PoolTaints,
    binding: &BindingConditions,
) -> api::Device {
    let attributes = device
        .attributes
        .iter()
        .map(|(name, value)| (name.to_string(), attribute(value)));
    let capacities = device.capacities.iter();
    let capacity = capacities.map(|(name, capacity)| (name.to_string(), api_capacity(capacity)));
    let consumes = device
        .consumes
        .iter()
        .map(|set| api::DeviceCounterConsumption {
            counter_set: set.name.clone(),
            counters: counters(set),
        });
    let scheduling = device.scheduling.as_deref();
    let named = scheduling.map(|added| BindingConditions {
        conditions: added.binding_conditions.clone(),
        failures: added.binding_failure_conditions.clone(),
    });
    let binding = named
        .filter(|named| !named.is_empty())
        .unwrap_or_else(|| binding.clone());
    api::Device {
        name: name.to_string(),
        attributes: Some(attributes.collect()).filter(is_set),
        capacity: Some(capacity.collect()).filter(is_set),
        consumes_counters: Some(consumes.collect()).filter(is_set),
        binds_to_node: scheduling.map(|added| added.binds_to_node).filter(is_set),
        binding_conditions: Some(binding.conditions).filter(is_set),
        binding_failure_conditions: Some(binding.failures).filter(is_set),
        allow_multiple_allocations: Some(device.allow_multiple_allocations).filter(is_set),
        taints: Some(taints(name, device, added_taints)).filter(is_set),
        ..api::Device::default()
    }
}

fn is_set<T: Default + PartialEq>(value: &T) -> bool {
    *value != T::default()
}

fn quantity(text: &str) -> Quantity {
    Quantity(text.to_owned())
}

fn attribute(value: &AttributeValue) -> api::DeviceAttribute {
    let mut attribute = api::DeviceAttribute::default();
    match value.clone() {
        AttributeValue::Int(value) => attribute.int = Some(value),
        AttributeValue::Bool(value) => attribute.bool = Some(value),
        AttributeValue::Text(value) => attribute.string = Some(value),
        AttributeValue::Version(value) => attribute.version = Some(value.to_string()),
        AttributeValue::Ints(list) => attribute.ints = Some(list),
        AttributeValue::Bools(list) => attribute.bools = Some(list),
        AttributeValue::Texts(list) => attribute.strings = Some(list),
        AttributeValue::Versions(list) => {
            attribute.versions = Some(list.iter().map(ToString::to_string).collect());
        }
    }
    attribute
}

fn counters(set: &CounterSet) -> BTreeMap<String, api::Counter> {
    let counters = set.counters.iter();
    counters
        .map(|(name, value)| {
            (
                name.clone(),
                api::Counter {
                    value: quantity(value),
                },
            )
        })
        .collect()
}

fn taints(name: &DeviceName, device: &Device, added: &PoolTaints) -> Vec<api::DeviceTaint> {
    let of_host = host_taints(
        &device.taints,
        added.unhealthy.get(name),
        added.failed.contains(name),
    );
    device
        .taints
        .iter()
        .chain(&of_host)
        .map(|taint| api::DeviceTaint {
            key: taint.key.clone(),
            value: Some(taint.value.clone()).filter(is_set),
            effect: taint.effect.as_str().to_owned(),
            time_added: None,
        })
        .collect()
}

/// The taints that the host adds to those of a driver. One that the device has from its driver, or for which there is no room, is not added.
pub(super) fn host_taints(
    own: &[Taint],
    unhealthy: Option<&UnhealthyTaint>,
    has_failed: bool,
) -> Vec<Taint> {
    let unhealthy = unhealthy.map(|taint| Taint {
        key: UNHEALTHY.to_owned(),
        value: taint.value.clone(),
        effect: taint.effect(),
    });
    let failed = has_failed.then(|| Taint {
        key: PREPARE_FAILED.to_owned(),
        value: String::new(),
        effect: TaintEffect::NoSchedule,
    });
    let added = unhealthy
        .into_iter()
        .chain(failed)
        .filter(|taint| own.iter().all(|own| own.key != taint.key));
    added
        .take(limit::TAINTS_MAX.saturating_sub(own.len()))
        .collect()
}
