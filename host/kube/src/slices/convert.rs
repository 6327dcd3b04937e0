//! Pools of drivers as ResourceSlices contain them.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::entry::{Entry, UNHEALTHY};
use super::slice::Content;
use nodedock_model::{
    AttributeValue, CapacityChoice, CapacityPolicy, CounterSet, Device, DeviceName, Pool, TaintEffect, limit,
};

/// The standard attribute of a device's NUMA node (KEP-6072).
const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";

/// Returns what the slices of a pool are to contain. `unhealthy` devices get the taint of [`UNHEALTHY`] with these values.
pub(super) fn content(pool: &Pool, unhealthy: &BTreeMap<DeviceName, String>) -> Content {
    let devices = pool
        .devices
        .iter()
        .map(|(name, known)| (name.to_string(), Entry::of(&device(name, known, unhealthy.get(name)))));
    // The API has no pool without devices, so their counters would count nothing.
    let sets = pool.shared_counters.iter().filter(|_| !pool.devices.is_empty());
    let sets = sets.map(|set| {
        let wire = api::CounterSet { name: set.name.clone(), counters: counters(set) };
        (set.name.clone(), Entry::of(&wire))
    });
    Content { devices: devices.collect(), shared_counters: sets.collect() }
}

fn device(name: &DeviceName, device: &Device, unhealthy: Option<&String>) -> api::Device {
    let own = device.attributes.iter().map(|(name, value)| (name.to_string(), attribute(value)));
    let mut attributes: BTreeMap<_, _> = own.collect();
    if let Some(node) = numa_node(device) {
        attributes.entry(NUMA_NODE.to_owned()).or_insert_with(|| attribute(&AttributeValue::Int(node)));
    }
    let capacity = device.capacities.iter().map(|(name, capacity)| {
        let request_policy = capacity.policy.as_ref().map(request_policy).filter(is_set);
        (name.to_string(), api::DeviceCapacity { value: quantity(&capacity.value), request_policy })
    });
    let consumes = device
        .consumes
        .iter()
        .map(|set| api::DeviceCounterConsumption { counter_set: set.name.clone(), counters: counters(set) });
    api::Device {
        name: name.to_string(),
        attributes: Some(attributes).filter(is_set),
        capacity: Some(capacity.collect()).filter(is_set),
        consumes_counters: Some(consumes.collect()).filter(is_set),
        allow_multiple_allocations: Some(device.allow_multiple_allocations).filter(is_set),
        taints: Some(taints(device, unhealthy)).filter(is_set),
        ..api::Device::default()
    }
}

/// The one NUMA node of a device that has room for an attribute. Several would be a list, which not every server accepts.
fn numa_node(device: &Device) -> Option<i64> {
    let [node] = device.numa_nodes[..] else { return None };
    let values = device.attributes.values().map(AttributeValue::count).sum::<usize>();
    let has_room = device.attributes.len() + device.capacities.len() < limit::ATTRIBUTES_MAX
        && values < limit::ATTRIBUTE_VALUES_MAX;
    has_room.then_some(node.into())
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

fn request_policy(policy: &CapacityPolicy) -> api::CapacityRequestPolicy {
    let (valid_values, valid_range) = match &policy.choice {
        CapacityChoice::Any => (None, None),
        CapacityChoice::Values(values) => (Some(values.iter().map(|value| quantity(value)).collect()), None),
        CapacityChoice::Range { min, max, step } => {
            let (max, step) = (max.as_deref().map(quantity), step.as_deref().map(quantity));
            (None, Some(api::CapacityRequestPolicyRange { min: quantity(min), max, step }))
        }
    };
    let default = policy.default_amount.as_deref().map(quantity);
    api::CapacityRequestPolicy { default, valid_values, valid_range }
}

fn counters(set: &CounterSet) -> BTreeMap<String, api::Counter> {
    let counters = set.counters.iter();
    counters.map(|(name, value)| (name.clone(), api::Counter { value: quantity(value) })).collect()
}

fn taints(device: &Device, unhealthy: Option<&String>) -> Vec<api::DeviceTaint> {
    let taint = |key: &str, value: &str, effect: TaintEffect| api::DeviceTaint {
        key: key.to_owned(),
        value: Some(value.to_owned()).filter(is_set),
        effect: effect_name(effect).to_owned(),
        time_added: None,
    };
    let own = device.taints.iter();
    let mut taints: Vec<_> = own.map(|own| taint(&own.key, &own.value, own.effect)).collect();
    // A device that has this taint from its driver, or no room for one more, is left as the driver describes it.
    let has_room = taints.len() < limit::TAINTS_MAX && taints.iter().all(|taint| taint.key != UNHEALTHY);
    if let Some(value) = unhealthy.filter(|_| has_room) {
        taints.push(taint(UNHEALTHY, value, TaintEffect::NoSchedule));
    }
    taints
}

fn effect_name(effect: TaintEffect) -> &'static str {
    match effect {
        TaintEffect::None => "None",
        TaintEffect::NoSchedule => "NoSchedule",
        TaintEffect::NoExecute => "NoExecute",
    }
}
