//! Inventories, health and readings.

use super::{Checked, labels};
use crate::bindings::types as guest;
use nodedock_model::{
    Capacity, CapacityChoice, CapacityPolicy, DeviceHealth, DriverName, HealthReport, HealthState,
    Inventory, ReadingsReport, Taint, TaintEffect, UnparsedValue, answer,
};

pub(in super::super) fn inventory(
    driver: &DriverName,
    inventory: guest::Inventory,
) -> Checked<Inventory> {
    let pools = inventory.pools.into_iter().map(pool).collect();
    Ok(answer::inventory(
        Some(driver),
        answer::Inventory { pools },
    )?)
}

fn pool(pool: guest::Pool) -> answer::Pool {
    answer::Pool {
        name: pool.name,
        devices: pool.devices.into_iter().map(device).collect(),
        shared_counters: pool.shared_counters.into_iter().map(counter_set).collect(),
        extended_resource: pool.extended_resource,
        annotations: labels(pool.annotations),
    }
}

fn device(device: guest::Device) -> answer::Device {
    let capacity = |capacity: guest::Capacity| {
        let policy = capacity.policy.map(policy);
        let value = capacity.value;
        (capacity.name, Capacity { value, policy })
    };
    answer::Device {
        name: device.name,
        attributes: attributes(device.attributes),
        capacities: device.capacities.into_iter().map(capacity).collect(),
        taints: device.taints.into_iter().map(taint).collect(),
        consumes: device.consumes.into_iter().map(counter_set).collect(),
        allow_multiple_allocations: device.allow_multiple_allocations,
        identity: device.identity,
        numa_nodes: device.numa_nodes,
        annotations: labels(device.annotations),
    }
}

pub(super) fn attributes(attributes: Vec<guest::Attribute>) -> Vec<answer::Attribute> {
    let value = |value: guest::AttributeValue| match value {
        guest::AttributeValue::Int(value) => UnparsedValue::Int(value),
        guest::AttributeValue::Boolean(value) => UnparsedValue::Bool(value),
        guest::AttributeValue::Text(text) => UnparsedValue::Text(text),
        guest::AttributeValue::Version(text) => UnparsedValue::Version(text),
        guest::AttributeValue::Ints(list) => UnparsedValue::Ints(list),
        guest::AttributeValue::Booleans(list) => UnparsedValue::Bools(list),
        guest::AttributeValue::Texts(list) => UnparsedValue::Texts(list),
        guest::AttributeValue::Versions(list) => UnparsedValue::Versions(list),
    };
    attributes
        .into_iter()
        .map(|attribute| (attribute.name, value(attribute.value)))
        .collect()
}

fn policy(policy: guest::CapacityPolicy) -> CapacityPolicy {
    CapacityPolicy {
        default_amount: policy.default_amount,
        choice: match policy.choice {
            guest::CapacityChoice::Any => CapacityChoice::Any,
            guest::CapacityChoice::Values(values) => CapacityChoice::Values(values),
            guest::CapacityChoice::Range(range) => CapacityChoice::Range {
                min: range.min,
                max: range.max,
                step: range.step,
            },
        },
    }
}

fn taint(taint: guest::Taint) -> Taint {
    Taint {
        key: taint.key,
        value: taint.value,
        effect: match taint.effect {
            guest::TaintEffect::None => TaintEffect::None,
            guest::TaintEffect::NoSchedule => TaintEffect::NoSchedule,
            guest::TaintEffect::NoExecute => TaintEffect::NoExecute,
        },
    }
}

fn counter_set(set: guest::CounterSet) -> answer::CounterSet {
    let counter = |counter: guest::Counter| (counter.name, counter.value);
    answer::CounterSet {
        name: set.name,
        counters: set.counters.into_iter().map(counter).collect(),
    }
}

pub(in super::super) fn health_report(report: Vec<guest::DeviceHealth>) -> Checked<HealthReport> {
    let health = |health: guest::DeviceHealth| answer::Health {
        pool: health.pool,
        device: health.device,
        health: DeviceHealth {
            state: match health.state {
                guest::HealthState::Unknown => HealthState::Unknown,
                guest::HealthState::Healthy => HealthState::Healthy,
                guest::HealthState::Unhealthy => HealthState::Unhealthy,
            },
            message: health.message,
        },
    };
    Ok(answer::health(report.into_iter().map(health).collect())?)
}

pub(in super::super) fn readings_report(
    report: Vec<guest::DeviceReadings>,
) -> Checked<ReadingsReport> {
    let of_device = |device: guest::DeviceReadings| answer::DeviceReadings {
        pool: device.pool,
        device: device.device,
        readings: device
            .readings
            .into_iter()
            .map(|reading| (reading.name, reading.value))
            .collect(),
    };
    Ok(answer::readings(
        report.into_iter().map(of_device).collect(),
    )?)
}
