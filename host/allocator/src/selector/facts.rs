//! Facts about a device for a selector: the variable `device` as a value.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use nodedock_model::quantity;

use super::EvaluationError;
use super::value::{Key, Map, Quantity, Value};

/// Facts about a device for selectors: prepared once per inventory, read by all selectors.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    device: Result<Value, EvaluationError>,
}

impl DeviceFacts {
    /// Prepares a device of the driver. An attribute or a capacity that is malformed fails every selector of the device, as it does in the
    /// scheduler.
    pub fn new(driver: &str, device: &Device) -> Self {
        Self {
            device: facts(driver, device),
        }
    }

    pub(super) fn value(&self) -> Result<&Value, EvaluationError> {
        self.device.as_ref().map_err(Clone::clone)
    }
}

fn facts(driver: &str, device: &Device) -> Result<Value, EvaluationError> {
    let attributes = device.attributes.iter().flatten().map(|(name, attribute)| {
        attribute_value(attribute)
            .map(|value| (name, value))
            .ok_or_else(|| EvaluationError::MalformedDevice { name: name.clone() })
    });
    let capacity = device.capacity.iter().flatten().map(|(name, capacity)| {
        quantity::nanos(&capacity.value.0)
            .map(|nanos| (name, Value::Quantity(Quantity(nanos))))
            .ok_or_else(|| EvaluationError::MalformedDevice { name: name.clone() })
    });
    let mut facts = Map::default();
    insert(&mut facts, "driver", Value::string(driver));
    insert(
        &mut facts,
        "allowMultipleAllocations",
        Value::Bool(device.allow_multiple_allocations.unwrap_or(false)),
    );
    insert(&mut facts, "attributes", by_domain(driver, attributes)?);
    insert(&mut facts, "capacity", by_domain(driver, capacity)?);
    Ok(Value::Map(Arc::new(facts)))
}

/// Returns a map of domains to a map of names to values. A domain that it does not have is an empty map.
fn by_domain<'a>(
    driver: &str,
    values: impl Iterator<Item = Result<(&'a String, Value), EvaluationError>>,
) -> Result<Value, EvaluationError> {
    let mut domains = std::collections::BTreeMap::<&str, Map>::new();
    for entry in values {
        let (name, value) = entry?;
        let (domain, name) = name.split_once('/').unwrap_or((driver, name));
        insert(domains.entry(domain).or_default(), name, value);
    }
    let mut all = Map {
        default: Some(Value::Map(Arc::default())),
        ..Map::default()
    };
    for (domain, values) in domains {
        insert(&mut all, domain, Value::Map(Arc::new(values)));
    }
    Ok(Value::Map(Arc::new(all)))
}

fn insert(map: &mut Map, name: &str, value: Value) {
    let name: Arc<str> = name.into();
    map.entries
        .insert(Key::String(Arc::clone(&name)), (Value::String(name), value));
}

fn attribute_value(attribute: &DeviceAttribute) -> Option<Value> {
    if let Some(values) = &attribute.ints {
        Some(Value::list(
            values.iter().map(|value| Value::Int(*value)).collect(),
        ))
    } else if let Some(values) = &attribute.bools {
        Some(Value::list(
            values.iter().map(|value| Value::Bool(*value)).collect(),
        ))
    } else if let Some(values) = &attribute.strings {
        Some(Value::list(
            values
                .iter()
                .map(|value| Value::string(value.as_str()))
                .collect(),
        ))
    } else if let Some(values) = &attribute.versions {
        values
            .iter()
            .map(|text| version(text))
            .collect::<Option<Vec<_>>>()
            .map(Value::list)
    } else if let Some(value) = attribute.int {
        Some(Value::Int(value))
    } else if let Some(value) = attribute.bool {
        Some(Value::Bool(value))
    } else if let Some(value) = &attribute.string {
        Some(Value::string(value.as_str()))
    } else {
        version(attribute.version.as_ref()?)
    }
}

fn version(text: &str) -> Option<Value> {
    semver::Version::parse(text)
        .ok()
        .map(|it| Value::Semver(Arc::new(it)))
}
