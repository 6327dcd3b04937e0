//! Inventories and health.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Checked, Refusal, at_most, labels, line, name, non_empty_line, quantity, refuse, shown, twice,
    within,
};
use crate::Limit;
use crate::bindings::types as guest;
use nodedock_model::limit::{
    ATTRIBUTE_TEXT_MAX, ATTRIBUTE_VALUES_MAX, ATTRIBUTES_MAX, CONSUMED_SETS_MAX, COUNTER_SETS_MAX,
    COUNTERS_MAX, DEVICES_MAX, IDENTITIES_MAX, IDENTITY_BYTES_MAX, LABEL_VALUE_BYTES_MAX,
    NUMA_NODE_ID_MAX, NUMA_NODES_MAX, POLICY_VALUES_MAX, POOLS_MAX, TAINTS_MAX,
};
use nodedock_model::{
    AttributeValue, CONTROL_NODES, Capacity, CapacityChoice, CapacityPolicy, CounterSet, DEVICES,
    Device, DeviceHealth, DeviceName, DriverName, ExtendedResource, HealthReport, HealthState,
    Inventory, NODE_KEY, PathPatterns, Pool, PoolName, PoolScheduling, QualifiedName, Taint,
    TaintEffect, is_dns_label, is_label_key, is_label_value,
};

pub(in super::super) fn inventory(
    driver: &DriverName,
    inventory: guest::Inventory,
) -> Checked<Inventory> {
    at_most("pools", inventory.pools.len(), POOLS_MAX)?;
    at_most(
        "devices",
        inventory.pools.iter().map(|pool| pool.devices.len()).sum(),
        DEVICES_MAX,
    )?;
    let mut pools = BTreeMap::new();
    for pool in inventory.pools {
        let pool_name = name(PoolName::new(&pool.name))?;
        let converted =
            self::pool(driver, pool).map_err(|why| why.at(format!("pool {pool_name}")))?;
        if pools.insert(pool_name.clone(), converted).is_some() {
            return refuse(format!("pool {pool_name} occurs twice"));
        }
    }
    Ok(Inventory { pools })
}

fn pool(driver: &DriverName, pool: guest::Pool) -> Checked<Pool> {
    let shared_counters = counter_sets(
        "shared counter sets",
        pool.shared_counters,
        COUNTER_SETS_MAX,
    )?;
    let mut devices = BTreeMap::new();
    for device in pool.devices {
        let device_name = name(DeviceName::new(&device.name))?;
        let place = || format!("device {device_name}");
        let converted = self::device(driver, device).map_err(|why| why.at(place()))?;
        drawn_from(&converted.consumes, &shared_counters).map_err(|why| why.at(place()))?;
        if devices.insert(device_name.clone(), converted).is_some() {
            return refuse(format!("device {device_name} occurs twice"));
        }
    }
    let annotations = labels("annotations", pool.annotations)?;
    let control_nodes = annotations
        .get(CONTROL_NODES)
        .map(|text| control_nodes(text))
        .transpose()?;
    Ok(Pool {
        control_nodes,
        devices,
        shared_counters,
        extended_resource: pool
            .extended_resource
            .map(ExtendedResource::new)
            .map(name)
            .transpose()?,
        annotations,
        scheduling: PoolScheduling::default(),
    })
}

fn control_nodes(text: &str) -> Checked<PathPatterns> {
    let globs: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    if let Some(other) = globs.iter().find(|glob| !glob.starts_with("/dev/")) {
        return refuse(format!("{CONTROL_NODES}: {other:?} is no path below /dev"));
    }
    PathPatterns::new(globs).or_else(|error| refuse(format!("{CONTROL_NODES}: {error}")))
}

fn device(driver: &DriverName, device: guest::Device) -> Checked<Device> {
    at_most(
        "attributes and capacities",
        device.attributes.len() + device.capacities.len(),
        ATTRIBUTES_MAX,
    )?;
    at_most("taints", device.taints.len(), TAINTS_MAX)?;
    at_most("identities", device.identity.len(), IDENTITIES_MAX)?;
    at_most("NUMA nodes", device.numa_nodes.len(), NUMA_NODES_MAX)?;
    if let Some(node) = device
        .numa_nodes
        .iter()
        .find(|node| **node > NUMA_NODE_ID_MAX)
    {
        return refuse(format!(
            "NUMA node {node} is beyond {NUMA_NODE_ID_MAX}, the last that Linux can have"
        ));
    }
    let shared = device.allow_multiple_allocations;
    let identity = |text: String| {
        if text.starts_with(DEVICES) || text.starts_with(NODE_KEY) {
            return refuse(format!(
                "the identity {text:?} is one of the host's own keys: name hardware as pci:ADDRESS, usb:DEVICE or dev:PATH"
            ));
        }
        non_empty_line("an identity", text, IDENTITY_BYTES_MAX)
    };
    Ok(Device {
        attributes: attributes(driver, device.attributes)?,
        capacities: capacities(driver, device.capacities, shared)?,
        taints: device
            .taints
            .into_iter()
            .map(taint)
            .collect::<Checked<_>>()?,
        consumes: counter_sets("consumed counter sets", device.consumes, CONSUMED_SETS_MAX)?,
        allow_multiple_allocations: shared,
        identity: device
            .identity
            .into_iter()
            .map(identity)
            .collect::<Checked<_>>()?,
        keys: Vec::new(),
        numa_nodes: device.numa_nodes,
        scheduling: None,
        annotations: labels("annotations", device.annotations)?,
    })
}

/// A name of an attribute or capacity, which is not in `seen` yet: `name` and `driver/name` are the same (`resource.k8s.io/v1`).
fn new_name(
    driver: &DriverName,
    seen: &mut BTreeSet<String>,
    text: &str,
) -> Checked<QualifiedName> {
    let parsed = name(QualifiedName::new(text))?;
    let full = if text.contains('/') {
        text.to_owned()
    } else {
        format!("{driver}/{text}")
    };
    if seen.insert(full) {
        Ok(parsed)
    } else {
        refuse(format!("{text} occurs twice"))
    }
}

pub(super) fn attributes(
    driver: &DriverName,
    attributes: Vec<guest::Attribute>,
) -> Checked<BTreeMap<QualifiedName, AttributeValue>> {
    let (mut seen, mut all, mut values) = (BTreeSet::new(), BTreeMap::new(), 0);
    for attribute in attributes {
        let key =
            new_name(driver, &mut seen, &attribute.name).map_err(|why| why.at("attribute"))?;
        let value =
            attribute_value(attribute.value).map_err(|why| why.at(format!("attribute {key}")))?;
        values += value.count();
        all.insert(key, value);
    }
    at_most("attribute values", values, ATTRIBUTE_VALUES_MAX)?;
    Ok(all)
}

fn attribute_value(value: guest::AttributeValue) -> Checked<AttributeValue> {
    let text = |text: String| line("the text", text, ATTRIBUTE_TEXT_MAX);
    let value = match value {
        guest::AttributeValue::Int(value) => AttributeValue::Int(value),
        guest::AttributeValue::Boolean(value) => AttributeValue::Bool(value),
        guest::AttributeValue::Text(value) => AttributeValue::Text(text(value)?),
        guest::AttributeValue::Version(value) => AttributeValue::Version(version(&value)?),
        guest::AttributeValue::Ints(list) => AttributeValue::Ints(list),
        guest::AttributeValue::Booleans(list) => AttributeValue::Bools(list),
        guest::AttributeValue::Texts(list) => {
            AttributeValue::Texts(list.into_iter().map(text).collect::<Checked<_>>()?)
        }
        guest::AttributeValue::Versions(list) => {
            AttributeValue::Versions(list.iter().map(|v| version(v)).collect::<Checked<_>>()?)
        }
    };
    if value.count() == 0 {
        refuse("the list is empty")
    } else {
        Ok(value)
    }
}

fn version(text: &str) -> Checked<semver::Version> {
    within(
        Limit::AnswerBytes,
        "bytes in the version",
        text.len(),
        ATTRIBUTE_TEXT_MAX,
    )?;
    semver::Version::parse(text).map_err(|error| {
        Refusal::new(format!(
            "{} is not a semantic version: {error}",
            shown(text)
        ))
    })
}

fn capacities(
    driver: &DriverName,
    capacities: Vec<guest::Capacity>,
    shared: bool,
) -> Checked<BTreeMap<QualifiedName, Capacity>> {
    let (mut seen, mut all) = (BTreeSet::new(), BTreeMap::new());
    for capacity in capacities {
        let key = new_name(driver, &mut seen, &capacity.name).map_err(|why| why.at("capacity"))?;
        let converted =
            self::capacity(capacity, shared).map_err(|why| why.at(format!("capacity {key}")))?;
        all.insert(key, converted);
    }
    Ok(all)
}

fn capacity(capacity: guest::Capacity, shared: bool) -> Checked<Capacity> {
    if capacity.policy.is_some() && !shared {
        return refuse("a policy is for devices that allow several allocations");
    }
    let value = quantity("the value", capacity.value)?;
    Ok(Capacity {
        value,
        policy: capacity.policy.map(policy).transpose()?,
    })
}

fn policy(policy: guest::CapacityPolicy) -> Checked<CapacityPolicy> {
    let optional =
        |what: &str, text: Option<String>| text.map(|text| quantity(what, text)).transpose();
    let choice = match policy.choice {
        guest::CapacityChoice::Any => CapacityChoice::Any,
        guest::CapacityChoice::Values(values) => {
            at_most("values of the policy", values.len(), POLICY_VALUES_MAX)?;
            let value = |text| quantity("a value of the policy", text);
            CapacityChoice::Values(values.into_iter().map(value).collect::<Checked<_>>()?)
        }
        guest::CapacityChoice::Range(range) => CapacityChoice::Range {
            min: quantity("the least amount", range.min)?,
            max: optional("the greatest amount", range.max)?,
            step: optional("the step", range.step)?,
        },
    };
    Ok(CapacityPolicy {
        default_amount: optional("the default amount", policy.default_amount)?,
        choice,
    })
}

fn taint(taint: guest::Taint) -> Checked<Taint> {
    if !is_label_key(&taint.key) {
        return refuse(format!(
            "taint key {} is not a label key such as example.com/broken",
            shown(&taint.key)
        ));
    }
    if !is_label_value(&taint.value) {
        return refuse(format!(
            "taint {}: {} is not a label value",
            taint.key,
            shown(&taint.value)
        ));
    }
    let effect = match taint.effect {
        guest::TaintEffect::None => TaintEffect::None,
        guest::TaintEffect::NoSchedule => TaintEffect::NoSchedule,
        guest::TaintEffect::NoExecute => TaintEffect::NoExecute,
    };
    Ok(Taint {
        key: taint.key,
        value: taint.value,
        effect,
    })
}

fn counter_sets(what: &str, sets: Vec<guest::CounterSet>, max: usize) -> Checked<Vec<CounterSet>> {
    at_most(what, sets.len(), max)?;
    if let Some(again) = twice(sets.iter().map(|set| set.name.as_str())) {
        return refuse(format!("counter set {} occurs twice", shown(again)));
    }
    let label = |what: &str, text: &str| {
        if is_dns_label(text) {
            Ok(())
        } else {
            refuse(format!("{what} {} is not a DNS label", shown(text)))
        }
    };
    let convert = |set: guest::CounterSet| {
        label("counter set", &set.name)?;
        at_most("counters", set.counters.len(), COUNTERS_MAX).map_err(|why| why.at(&set.name))?;
        let mut counters = BTreeMap::new();
        for counter in set.counters {
            label("counter", &counter.name)?;
            let value = quantity(&format!("counter {}", counter.name), counter.value)?;
            if counters.insert(counter.name.clone(), value).is_some() {
                return refuse(format!("counter {} occurs twice", counter.name));
            }
        }
        Ok(CounterSet {
            name: set.name,
            counters,
        })
    };
    sets.into_iter().map(convert).collect()
}

/// Checks that the pool has the counters that a device consumes.
fn drawn_from(consumed: &[CounterSet], shared: &[CounterSet]) -> Checked<()> {
    for set in consumed {
        let Some(source) = shared.iter().find(|source| source.name == set.name) else {
            return refuse(format!(
                "it consumes counter set {}, which the pool does not have",
                set.name
            ));
        };
        if let Some(counter) = set
            .counters
            .keys()
            .find(|counter| !source.counters.contains_key(*counter))
        {
            return refuse(format!(
                "it consumes counter {counter}, which the pool's set {} does not have",
                set.name
            ));
        }
    }
    Ok(())
}

pub(in super::super) fn health_report(report: Vec<guest::DeviceHealth>) -> Checked<HealthReport> {
    at_most("devices", report.len(), DEVICES_MAX)?;
    let mut all = HealthReport::new();
    for health in report {
        let key = (
            name(PoolName::new(&health.pool))?,
            name(DeviceName::new(&health.device))?,
        );
        let state = match health.state {
            guest::HealthState::Unknown => HealthState::Unknown,
            guest::HealthState::Healthy => HealthState::Healthy,
            guest::HealthState::Unhealthy => HealthState::Unhealthy,
        };
        let place = format!("pool {} device {}", key.0, key.1);
        let message = line("the message", health.message, LABEL_VALUE_BYTES_MAX)
            .map_err(|why| why.at(&place))?;
        if all.insert(key, DeviceHealth { state, message }).is_some() {
            return refuse(format!("{place} occurs twice"));
        }
    }
    Ok(all)
}
