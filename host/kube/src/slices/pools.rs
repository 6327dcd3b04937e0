//! Which devices of a pool are in slices. Pure.
//!
//! A pool with an extended-resource name is in slices if DRA is its mechanism. Its devices get the attribute by which the DeviceClass of
//! the resource selects them. Devices that the kubelet's device manager has allocated, from the time when the pool was one of the device
//! plugin, are left out until they are free, and so are devices that overlap with one: by a counter set, or by their identity.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::extended_resources::{ATTRIBUTE, DeviceIds, Mechanism, MechanismsView, attribute};
use nodedock_model::{
    AttributeValue, Device, DeviceName, DriverName, ExtendedResource, Pool, PoolName,
    QualifiedName, limit,
};

/// Returns the pool as slices have it; `None`: it is not in slices.
pub(super) fn offered<'a>(
    driver: &DriverName,
    name: &PoolName,
    pool: &'a Pool,
    view: &MechanismsView,
) -> Option<Cow<'a, Pool>> {
    let resource = pool.extended_resource.as_ref();
    if view.mechanisms.of(driver, name, resource.is_some()) != Some(Mechanism::Dra) {
        return None;
    }

    let allocated: Vec<_> = pool
        .devices
        .iter()
        .filter(|(device, _)| is_allocated(&view.allocated, driver, name, device))
        .collect();
    if resource.is_none() && allocated.is_empty() {
        return Some(Cow::Borrowed(pool));
    }
    let free = free_devices(&pool.devices, &allocated);
    let mut pool = Pool {
        devices: free,
        ..without_devices(pool)
    };
    if let Some(resource) = resource {
        pool.devices
            .values_mut()
            .for_each(|device| add_attribute(device, resource));
    }
    Some(Cow::Owned(pool))
}

fn is_allocated(
    allocated: &DeviceIds,
    driver: &DriverName,
    pool: &PoolName,
    device: &DeviceName,
) -> bool {
    !allocated.is_empty() && allocated.contains(&(driver.clone(), format!("{pool}/{device}")))
}

fn without_devices(pool: &Pool) -> Pool {
    Pool {
        devices: BTreeMap::new(),
        shared_counters: pool.shared_counters.clone(),
        extended_resource: pool.extended_resource.clone(),
        annotations: pool.annotations.clone(),
        control_nodes: None,
        scheduling: pool.scheduling.clone(),
    }
}

fn free_devices(
    devices: &BTreeMap<DeviceName, Device>,
    allocated: &[(&DeviceName, &Device)],
) -> BTreeMap<DeviceName, Device> {
    let of_allocated = allocated.iter().map(|(_, device)| device);
    let sets: BTreeSet<_> = of_allocated
        .clone()
        .flat_map(|device| &device.consumes)
        .map(|set| &set.name)
        .collect();
    let identities: BTreeSet<_> = of_allocated.flat_map(|device| &device.identity).collect();
    let free = devices.iter().filter(|(name, device)| {
        !allocated.iter().any(|(allocated, _)| allocated == name)
            && !device.consumes.iter().any(|set| sets.contains(&set.name))
            && !device
                .identity
                .iter()
                .any(|identity| identities.contains(identity))
    });
    free.map(|(name, device)| (name.clone(), device.clone()))
        .collect()
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
    use std::sync::Arc;

    use super::*;
    use crate::extended_resources::ExtendedResources;
    use nodedock_model::CounterSet;

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

    fn view(mechanism: Mechanism, allocated: &[&str]) -> MechanismsView {
        let allocated: DeviceIds = allocated
            .iter()
            .map(|id| (driver(), (*id).to_owned()))
            .collect();
        MechanismsView {
            allocated: Arc::new(allocated),
            ..ExtendedResources::fixed(mechanism).view()
        }
    }

    fn names(pool: &Pool, view: &MechanismsView) -> Option<Vec<String>> {
        let offered = offered(&driver(), &pool_name(), pool, view)?;
        Some(offered.devices.keys().map(ToString::to_string).collect())
    }

    #[test]
    fn a_pool_with_a_name_is_in_slices_by_its_mechanism_and_carries_the_attribute() {
        let named = pool([("0", Device::default())], Some("example.com/gpu"));
        assert_eq!(names(&named, &view(Mechanism::DevicePlugin, &[])), None);
        let view = view(Mechanism::Dra, &[]);
        let offered = offered(&driver(), &pool_name(), &named, &view).unwrap();
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
            super::offered(&driver(), &pool_name(), &plain, &view),
            Some(Cow::Borrowed(_))
        ));
    }

    #[test]
    fn a_device_without_room_for_the_attribute_stays_as_it_is() {
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
        let offered = offered(&driver(), &pool_name(), &pool, &view(Mechanism::Dra, &[])).unwrap();
        assert_eq!(
            offered.devices.values().next().unwrap().attributes,
            attributes
        );
    }

    #[test]
    fn allocated_devices_and_what_overlaps_with_them_are_left_out() {
        let partition = |set: &str| Device {
            consumes: vec![CounterSet {
                name: set.to_owned(),
                counters: BTreeMap::new(),
            }],
            ..Device::default()
        };
        let of = |identity: &str| Device {
            identity: vec![identity.to_owned()],
            ..Device::default()
        };
        let devices = [
            ("a", Device::default()),
            ("b", Device::default()),
            ("c", partition("one")),
            ("d", partition("one")),
            ("e", partition("two")),
            ("f", of("pci:1")),
            ("g", of("pci:1")),
        ];
        for resource in [Some("example.com/gpu"), None] {
            let pool = pool(devices.clone(), resource);
            let left = names(
                &pool,
                &view(Mechanism::Dra, &["gpus/a", "gpus/c", "gpus/f", "other/b"]),
            );
            assert_eq!(left.unwrap(), ["b", "e"]);
        }
    }
}
