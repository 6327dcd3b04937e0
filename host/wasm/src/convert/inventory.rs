//! Inventories, devices that are left out, health and readings.

use super::{Checked, labels};
use crate::bindings::nodedock::driver::inventory::CapacityRange;
use crate::bindings::types as guest;
use nodedock_model::{
    Capacity, CapacityChoice, CapacityPolicy, DeviceHealth, DriverName, HealthReport, HealthState,
    Inventory, LeftOut, LeftOutDevice, ReadingsReport, Taint, TaintEffect, UnparsedValue, answer,
};

pub(in super::super) fn inventory(
    driver: &DriverName,
    inventory: guest::Inventory,
) -> Checked<Inventory> {
    let guest::Inventory { pools } = inventory;
    let pools = pools.into_iter().map(pool).collect();
    Ok(answer::inventory(
        Some(driver),
        answer::Inventory { pools },
    )?)
}

fn pool(pool: guest::Pool) -> answer::Pool {
    let guest::Pool {
        name,
        devices,
        shared_counters,
        extended_resource,
        annotations,
    } = pool;
    answer::Pool {
        name,
        devices: devices.into_iter().map(device).collect(),
        shared_counters: shared_counters.into_iter().map(counter_set).collect(),
        extended_resource,
        annotations: labels(annotations),
    }
}

fn device(device: guest::Device) -> answer::Device {
    let guest::Device {
        name,
        attributes: given,
        capacities,
        taints,
        consumes,
        allow_multiple_allocations,
        identity,
        numa_nodes,
        annotations,
    } = device;
    answer::Device {
        name,
        attributes: attributes(given),
        capacities: capacities.into_iter().map(capacity).collect(),
        taints: taints.into_iter().map(taint).collect(),
        consumes: consumes.into_iter().map(counter_set).collect(),
        allow_multiple_allocations,
        identity,
        numa_nodes,
        annotations: labels(annotations),
    }
}

fn capacity(capacity: guest::Capacity) -> (String, Capacity) {
    let guest::Capacity {
        name,
        value,
        policy: given,
    } = capacity;
    let policy = given.map(policy);
    (name, Capacity { value, policy })
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
        .map(|guest::Attribute { name, value: given }| (name, value(given)))
        .collect()
}

fn policy(policy: guest::CapacityPolicy) -> CapacityPolicy {
    let guest::CapacityPolicy {
        default_amount,
        choice,
    } = policy;
    CapacityPolicy {
        default_amount,
        choice: match choice {
            guest::CapacityChoice::Any => CapacityChoice::Any,
            guest::CapacityChoice::Values(values) => CapacityChoice::Values(values),
            guest::CapacityChoice::Range(CapacityRange { min, max, step }) => {
                CapacityChoice::Range { min, max, step }
            }
        },
    }
}

fn taint(taint: guest::Taint) -> Taint {
    let guest::Taint { key, value, effect } = taint;
    Taint {
        key,
        value,
        effect: match effect {
            guest::TaintEffect::None => TaintEffect::None,
            guest::TaintEffect::NoSchedule => TaintEffect::NoSchedule,
            guest::TaintEffect::NoExecute => TaintEffect::NoExecute,
        },
    }
}

fn counter_set(set: guest::CounterSet) -> answer::CounterSet {
    let guest::CounterSet { name, counters } = set;
    let counter = |guest::Counter { name, value }: guest::Counter| (name, value);
    answer::CounterSet {
        name,
        counters: counters.into_iter().map(counter).collect(),
    }
}

pub(in super::super) fn left_out(devices: Vec<guest::LeftOutDevice>) -> Checked<LeftOut> {
    let device = |guest::LeftOutDevice { name, reason }: guest::LeftOutDevice| LeftOutDevice {
        name,
        reason,
    };
    Ok(answer::left_out(devices.into_iter().map(device).collect())?)
}

pub(in super::super) fn health_report(report: Vec<guest::DeviceHealth>) -> Checked<HealthReport> {
    Ok(answer::health(report.into_iter().map(health).collect())?)
}

pub(in super::super) fn readings_report(
    report: Vec<guest::DeviceReadings>,
) -> Checked<ReadingsReport> {
    Ok(answer::readings(
        report.into_iter().map(readings).collect(),
    )?)
}

fn readings(device: guest::DeviceReadings) -> answer::DeviceReadings {
    let guest::DeviceReadings {
        pool,
        device,
        readings,
    } = device;
    let reading = |guest::Reading { name, value }: guest::Reading| (name, value);
    answer::DeviceReadings {
        pool,
        device,
        readings: readings.into_iter().map(reading).collect(),
    }
}

fn health(health: guest::DeviceHealth) -> answer::Health {
    let guest::DeviceHealth {
        pool,
        device,
        state,
        message,
    } = health;
    let state = match state {
        guest::HealthState::Unknown => HealthState::Unknown,
        guest::HealthState::Healthy => HealthState::Healthy,
        guest::HealthState::Unhealthy => HealthState::Unhealthy,
    };
    answer::Health {
        pool,
        device,
        health: DeviceHealth { state, message },
    }
}
