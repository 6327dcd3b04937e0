//! Inventories and health.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::{Attribute, CounterSet, Health};
use crate::check::{self, Field, Findings, Reason, Step};
use crate::limit::{
    CONSUMED_SETS_MAX, COUNTER_SETS_MAX, DEVICES_MAX, IDENTITIES_MAX, IDENTITY_BYTES_MAX,
    LABEL_VALUE_BYTES_MAX, NUMA_NODE_ID_MAX, NUMA_NODES_MAX, POLICY_VALUES_MAX, POOLS_MAX,
    TAINTS_MAX,
};
use crate::rule::is_unprintable;
use crate::{
    AttributeValue, CONTROL_NODES, Capacity, CapacityChoice, DEVICES, Device, DeviceName,
    DriverName, ExtendedResource, HealthReport, Inventory, NODE_KEY, PathPatterns, Pool, PoolName,
    PoolScheduling, QualifiedName, SmallMap, UnparsedValue,
};

/// Converts an inventory. Without the driver's name, `name` and `driver/name` count as different attributes.
///
/// # Errors
///
/// What is wrong with it.
pub fn inventory(
    driver: Option<&DriverName>,
    answer: super::Inventory,
) -> Result<Inventory, Findings> {
    let mut findings = Findings::default();
    let mut pools = BTreeMap::new();
    let devices = answer.pools.iter().map(|pool| pool.devices.len()).sum();
    if findings.at_most(Field::Pools, answer.pools.len(), POOLS_MAX)
        && findings.at_most(Field::Devices, devices, DEVICES_MAX)
    {
        for (index, pool) in answer.pools.into_iter().enumerate() {
            let step = || Step::Entry(Field::Pools, index);
            let Some(name) = findings.at(step, |at| at.parsed(PoolName::new(&pool.name))) else {
                continue;
            };
            let pool = findings.named(Field::Pool, name.as_str(), |at| {
                self::pool(at, driver, pool)
            });
            insert(&mut findings, step(), &mut pools, name, pool);
        }
    }
    findings.accept(Inventory { pools })
}

/// Adds an entry of a list, which is to have no other of its name.
fn insert<K: Ord + ToString, V>(
    findings: &mut Findings,
    step: Step,
    entries: &mut BTreeMap<K, V>,
    key: K,
    value: V,
) {
    match entries.entry(key) {
        Entry::Occupied(known) => findings.add_at(step, Reason::Duplicate(known.key().to_string())),
        Entry::Vacant(place) => drop(place.insert(value)),
    }
}

fn pool(findings: &mut Findings, driver: Option<&DriverName>, pool: super::Pool) -> Pool {
    let shared_counters = counter_sets(
        findings,
        Field::SharedCounters,
        pool.shared_counters,
        COUNTER_SETS_MAX,
    );
    let mut devices = BTreeMap::new();
    for (index, device) in pool.devices.into_iter().enumerate() {
        let step = || Step::Entry(Field::Devices, index);
        let Some(name) = findings.at(step, |at| at.parsed(DeviceName::new(&device.name))) else {
            continue;
        };
        let device = findings.named(Field::Device, name.as_str(), |at| {
            let device = self::device(at, driver, device);
            drawn_from(at, &device.consumes, &shared_counters);
            device
        });
        insert(findings, step(), &mut devices, name, device);
    }
    findings.labels(Field::Annotations, &pool.annotations);
    let annotations: BTreeMap<_, _> = pool.annotations.into_iter().collect();
    let control_nodes = annotations.get(CONTROL_NODES);
    Pool {
        control_nodes: control_nodes.and_then(|text| {
            findings.named(Field::Annotations, CONTROL_NODES, |at| {
                self::control_nodes(at, text)
            })
        }),
        devices,
        shared_counters,
        extended_resource: pool
            .extended_resource
            .and_then(|name| findings.parsed(ExtendedResource::new(name))),
        annotations,
        scheduling: PoolScheduling::default(),
    }
}

fn control_nodes(findings: &mut Findings, text: &str) -> Option<PathPatterns> {
    let globs: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    if let Some(other) = globs.iter().find(|glob| !glob.starts_with("/dev/")) {
        findings.require(false, other, "is no path below /dev");
        return None;
    }
    findings.parsed(PathPatterns::new(globs))
}

fn device(findings: &mut Findings, driver: Option<&DriverName>, device: super::Device) -> Device {
    let count = device.attributes.len() + device.capacities.len();
    let (mut attributes, mut capacities) = (BTreeMap::new(), SmallMap::new());
    let shared = device.allow_multiple_allocations;
    if check::attribute_count(findings, count) {
        attributes = self::attributes(findings, driver, device.attributes);
        capacities = self::capacities(findings, driver, device.capacities, shared);
    }
    findings.each(Field::Taints, &device.taints, TAINTS_MAX, |at, taint| {
        check::taint(at, &taint.key, &taint.value);
    });
    findings.each(
        Field::Identity,
        &device.identity,
        IDENTITIES_MAX,
        |at, text| {
            identity(at, text);
        },
    );
    findings.each(
        Field::NumaNodes,
        &device.numa_nodes,
        NUMA_NODES_MAX,
        |at, node| {
            let rule = format!("is beyond {NUMA_NODE_ID_MAX}, the last that Linux can have");
            at.require(*node <= NUMA_NODE_ID_MAX, &node.to_string(), &rule);
        },
    );
    let consumes = counter_sets(
        findings,
        Field::Consumes,
        device.consumes,
        CONSUMED_SETS_MAX,
    );
    findings.labels(Field::Annotations, &device.annotations);
    Device {
        attributes,
        capacities,
        taints: device.taints,
        consumes,
        allow_multiple_allocations: shared,
        identity: device.identity,
        keys: Vec::new(),
        numa_nodes: device.numa_nodes,
        annotations: device.annotations.into_iter().collect(),
        scheduling: None,
    }
}

fn identity(findings: &mut Findings, text: &str) {
    let is_of_host = text.starts_with(DEVICES) || text.starts_with(NODE_KEY);
    findings.word(text, IDENTITY_BYTES_MAX);
    let rule =
        "is one of the host's own keys: name hardware as pci:ADDRESS, usb:DEVICE or dev:PATH";
    findings.require(!is_of_host, text, rule);
}

/// Returns the name of an attribute or capacity, which is not in `seen` yet: `name` and `driver/name` are the same (`resource.k8s.io/v1`).
fn new_name(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    seen: &mut BTreeSet<String>,
    text: &str,
) -> Option<QualifiedName> {
    let name = findings.parsed(QualifiedName::new(text))?;
    let full = match driver {
        Some(driver) if !text.contains('/') => format!("{driver}/{text}"),
        _ => text.to_owned(),
    };
    if !seen.insert(full) {
        findings.add(Reason::Duplicate(text.to_owned()));
        return None;
    }
    Some(name)
}

/// Converts attributes of a device, whose number is checked.
pub(super) fn attributes(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    attributes: Vec<Attribute>,
) -> BTreeMap<QualifiedName, AttributeValue> {
    let count = attributes.iter().map(|(_, value)| value.count()).sum();
    let (mut seen, mut all) = (BTreeSet::new(), BTreeMap::new());
    for (index, (name, value)) in attributes.into_iter().enumerate() {
        let step = || Step::Entry(Field::Attributes, index);
        let name = findings.at(step, |at| new_name(at, driver, &mut seen, &name));
        let Some(name) = name else { continue };
        let value = findings.named(Field::Attribute, name.as_str(), |at| attribute(at, value));
        all.extend(value.map(|value| (name, value)));
    }
    check::attribute_values(findings, count);
    all
}

/// Converts a value, whose texts are lines.
fn attribute(findings: &mut Findings, value: UnparsedValue) -> Option<AttributeValue> {
    check::attribute(findings, &value);
    let texts = match &value {
        UnparsedValue::Text(text) => std::slice::from_ref(text),
        UnparsedValue::Texts(texts) => texts,
        _ => &[],
    };
    for text in texts.iter().filter(|text| text.contains(is_unprintable)) {
        findings.line(text, usize::MAX);
    }
    // no error: the check has found it
    value.parse().ok()
}

fn capacities(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    capacities: Vec<(String, Capacity)>,
    shared: bool,
) -> SmallMap<QualifiedName, Capacity> {
    let (mut seen, mut all) = (BTreeSet::new(), SmallMap::new());
    for (index, (name, capacity)) in capacities.into_iter().enumerate() {
        let step = || Step::Entry(Field::Capacities, index);
        let name = findings.at(step, |at| new_name(at, driver, &mut seen, &name));
        let Some(name) = name else { continue };
        findings.named(Field::Capacity, name.as_str(), |at| {
            self::capacity(at, &capacity, shared);
        });
        all.insert(name, capacity);
    }
    all
}

/// Checks that every amount is a quantity, and then the policy.
fn capacity(findings: &mut Findings, capacity: &Capacity, shared: bool) {
    let mut amounts = Findings::default();
    amounts.field(Field::Value, |at| at.quantity(&capacity.value));
    if let Some(policy) = &capacity.policy {
        amounts.field(Field::Policy, |at| {
            if let Some(amount) = &policy.default_amount {
                at.field(Field::DefaultAmount, |at| at.quantity(amount));
            }
            match &policy.choice {
                CapacityChoice::Any => {}
                CapacityChoice::Values(values) => {
                    at.each(Field::Values, values, POLICY_VALUES_MAX, |at, amount| {
                        at.quantity(amount);
                    });
                }
                CapacityChoice::Range { min, max, step } => at.field(Field::Range, |at| {
                    at.field(Field::Min, |at| at.quantity(min));
                    for (field, amount) in [(Field::Max, max), (Field::Step, step)] {
                        if let Some(amount) = amount {
                            at.field(field, |at| at.quantity(amount));
                        }
                    }
                }),
            }
        });
    }
    if amounts.is_empty() {
        check::capacity(&mut amounts, capacity, shared);
    }
    findings.extend(amounts);
}

fn counter_sets(
    findings: &mut Findings,
    field: Field,
    sets: Vec<CounterSet>,
    max: usize,
) -> Vec<crate::CounterSet> {
    findings.each(field, &sets, max, |at, set| {
        let names = set.counters.iter().map(|(name, _)| name.as_str());
        check::counter_set(at, (Field::Name, &set.name), names.clone());
        at.unique(Field::Counters, names);
        for (name, amount) in &set.counters {
            at.named(Field::Counters, name, |at| at.quantity(amount));
        }
    });
    if sets.len() <= max {
        findings.unique(field, sets.iter().map(|set| set.name.as_str()));
    }
    let convert = |set: CounterSet| crate::CounterSet {
        name: set.name,
        counters: set.counters.into_iter().collect(),
    };
    sets.into_iter().map(convert).collect()
}

/// Checks that the pool has the counters that a device consumes.
fn drawn_from(
    findings: &mut Findings,
    consumed: &[crate::CounterSet],
    shared: &[crate::CounterSet],
) {
    for set in consumed {
        let Some(source) = shared.iter().find(|source| source.name == set.name) else {
            findings.inconsistent(format!(
                "it consumes counter set {:?}, which the pool does not have",
                set.name
            ));
            continue;
        };
        let unknown = set.counters.keys();
        for counter in unknown.filter(|counter| !source.counters.contains_key(*counter)) {
            findings.inconsistent(format!(
                "it consumes counter {counter:?}, which the pool's set {:?} does not have",
                set.name
            ));
        }
    }
}

/// Converts the health of devices.
///
/// # Errors
///
/// What is wrong with it.
pub fn health(answer: Vec<Health>) -> Result<HealthReport, Findings> {
    let mut findings = Findings::default();
    let mut all = HealthReport::new();
    let fits = findings.at_most(Field::Devices, answer.len(), DEVICES_MAX);
    for (index, entry) in answer.into_iter().enumerate().filter(|_| fits) {
        findings.at(
            || Step::Entry(Field::Devices, index),
            |at| {
                let pool = at.parsed(PoolName::new(&entry.pool));
                let device = at.parsed(DeviceName::new(&entry.device));
                at.field(Field::Message, |at| {
                    at.line(&entry.health.message, LABEL_VALUE_BYTES_MAX)
                });
                let Some(key) = pool.zip(device) else { return };
                let shown = format!("{}/{}", key.0, key.1);
                if all.insert(key, entry.health).is_some() {
                    at.add(Reason::Duplicate(shown));
                }
            },
        );
    }
    findings.accept(all)
}
