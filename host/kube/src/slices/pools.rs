//! Devices of a pool that are in slices. Pure.
//!
//! A pool with an extended-resource name is in slices if DRA is its mechanism. Its devices get the attribute by which the DeviceClass of
//! the resource selects them.

use std::borrow::Cow;

use crate::extended_resources::{ATTRIBUTE, Mechanism, Mechanisms, attribute};
use nodedock_model::{
    AttributeValue, Device, DriverName, ExtendedResource, Pool, PoolName, QualifiedName, limit,
};

/// Returns the pool as slices have it; `None`: it is not in slices.
pub(super) fn offered<'a>(
    driver: &DriverName,
    name: &PoolName,
    pool: &'a Pool,
    mechanisms: &Mechanisms,
) -> Option<Cow<'a, Pool>> {
    let resource = pool.extended_resource.as_ref();
    if mechanisms.of(driver, name, resource.is_some()) != Some(Mechanism::Dra) {
        return None;
    }
    let Some(resource) = resource else {
        return Some(Cow::Borrowed(pool));
    };
    let mut pool = pool.clone();
    for device in pool.devices.values_mut() {
        add_attribute(device, resource);
    }
    Some(Cow::Owned(pool))
}

/// A device with as many attributes as the API permits stays without: no class selects it for the resource.
fn add_attribute(device: &mut Device, resource: &ExtendedResource) {
    let values: usize = device.attributes.values().map(AttributeValue::count).sum();
    let has_room = device.attributes.len() + device.capacities.len() < limit::ATTRIBUTES_MAX
        && values < limit::ATTRIBUTE_VALUES_MAX;
    let name = QualifiedName::new(ATTRIBUTE).expect("the name is one of the API");
    if has_room || device.attributes.contains_key(&name) {
        device
            .attributes
            .insert(name, AttributeValue::Text(attribute(resource)));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::extended_resources::ExtendedResources;

    fn driver() -> DriverName {
        "gpu.example.com".parse().unwrap()
    }

    fn pool_name() -> PoolName {
        "gpus".parse().unwrap()
    }

    fn pool(
        devices: impl IntoIterator<Item = (&'static str, Device)>,
        resource: Option<&str>,
    ) -> Pool {
        Pool {
            devices: devices
                .into_iter()
                .map(|(name, device)| (name.parse().unwrap(), device))
                .collect(),
            extended_resource: resource.map(|name| name.parse().unwrap()),
            ..Pool::default()
        }
    }

    fn fixed(mechanism: Mechanism) -> Arc<Mechanisms> {
        ExtendedResources::fixed(mechanism).mechanisms()
    }

    #[test]
    fn named_pool_follows_its_mechanism() {
        let named = pool([("0", Device::default())], Some("example.com/gpu"));
        let plugin = fixed(Mechanism::DevicePlugin);
        assert_eq!(offered(&driver(), &pool_name(), &named, &plugin), None);
        let dra = fixed(Mechanism::Dra);
        let offered = offered(&driver(), &pool_name(), &named, &dra).unwrap();
        let attributes: Vec<_> = offered
            .devices
            .values()
            .flat_map(|device| &device.attributes)
            .collect();
        let value = AttributeValue::Text("example.com/gpu".to_owned());
        assert_eq!(
            attributes,
            [(
                &QualifiedName::new("nodedock.dev/extendedResource").unwrap(),
                &value
            )]
        );
        let plain = pool([("0", Device::default())], None);
        assert!(matches!(
            super::offered(&driver(), &pool_name(), &plain, &dra),
            Some(Cow::Borrowed(_))
        ));
    }

    #[test]
    fn device_without_room_gets_no_attribute() {
        let attribute = |n| {
            (
                QualifiedName::new(format!("a{n}")).unwrap(),
                AttributeValue::Int(n),
            )
        };
        let attributes: BTreeMap<_, _> = (0..limit::ATTRIBUTES_MAX as i64).map(attribute).collect();
        let full = Device {
            attributes: attributes.clone(),
            ..Device::default()
        };
        let pool = pool([("0", full)], Some("example.com/gpu"));
        let offered = offered(&driver(), &pool_name(), &pool, &fixed(Mechanism::Dra)).unwrap();
        assert_eq!(
            offered.devices.values().next().unwrap().attributes,
            attributes
        );
    }
}
