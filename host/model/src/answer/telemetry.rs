//! Readings of devices: values that change.

use super::DeviceReadings;
use crate::check::{Field, Findings, Reason, Step};
use crate::limit::{DEVICE_READINGS_MAX, DEVICES_MAX, READINGS_MAX};
use crate::rule::is_reading_name;
use crate::{DeviceName, PoolName, Readings, ReadingsReport};

/// Converts the readings of devices.
///
/// # Errors
///
/// What is wrong with them.
pub fn readings(answer: Vec<DeviceReadings>) -> Result<ReadingsReport, Findings> {
    let mut findings = Findings::default();
    let mut all = ReadingsReport::new();
    let count = answer.iter().map(|device| device.readings.len()).sum();
    let fits = findings.at_most(Field::Devices, answer.len(), DEVICES_MAX)
        && findings.at_most(Field::Readings, count, READINGS_MAX);
    for (index, entry) in answer.into_iter().enumerate().filter(|_| fits) {
        findings.at(
            || Step::Entry(Field::Devices, index),
            |at| {
                let pool = at.parsed(PoolName::new(&entry.pool));
                let device = at.parsed(DeviceName::new(&entry.device));
                let readings = of_device(at, entry.readings);
                let Some(key) = pool.zip(device) else { return };
                let shown = format!("{}/{}", key.0, key.1);
                if all.insert(key, readings).is_some() {
                    at.add(Reason::Duplicate(shown));
                }
            },
        );
    }
    findings.accept(all)
}

fn of_device(findings: &mut Findings, readings: Vec<(String, f64)>) -> Readings {
    findings.each(
        Field::Readings,
        &readings,
        DEVICE_READINGS_MAX,
        |at, (name, value)| {
            let rule = "is not at most 64 bytes of snake case that begin with a letter";
            at.field(Field::Name, |at| {
                at.require(is_reading_name(name), name, rule)
            });
            at.field(Field::Value, |at| {
                at.require(value.is_finite(), &value.to_string(), "is not finite");
            });
        },
    );
    if readings.len() <= DEVICE_READINGS_MAX {
        findings.unique(
            Field::Readings,
            readings.iter().map(|(name, _)| name.as_str()),
        );
    }
    readings.into_iter().collect()
}
