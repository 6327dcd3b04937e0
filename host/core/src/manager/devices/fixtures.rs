//! Short words for devices, entries and pods of tests.

use std::collections::BTreeMap;

pub(crate) use crate::manager::claims::fixtures::{driver, pod};
use crate::manager::entry::Entry;
use nodedock_model::{
    ContainerKind, DriverName, ExtendedResource, PluginDevice, PooledClaim, Uid, plugin_driver,
};

pub(crate) fn device(id: &str, numa_nodes: &[u32]) -> PluginDevice {
    PluginDevice {
        id: id.to_owned(),
        healthy: true,
        numa_nodes: numa_nodes.to_vec(),
    }
}

pub(crate) fn sick(id: &str) -> PluginDevice {
    PluginDevice {
        healthy: false,
        ..device(id, &[])
    }
}

pub(crate) fn devices(
    devices: impl IntoIterator<Item = PluginDevice>,
) -> BTreeMap<String, PluginDevice> {
    devices
        .into_iter()
        .map(|device| (device.id.clone(), device))
        .collect()
}

pub(crate) fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// The resource `gpu` is `example.com/gpu`.
pub(crate) fn resource(short: &str) -> ExtendedResource {
    ExtendedResource::new(format!("example.com/{short}")).unwrap()
}

pub(crate) fn uid(short: &str) -> Uid {
    pod(short).uid
}

/// Returns the entry of a container of the pod `a` with devices of a plugin of `example.com/gpu`.
pub(crate) fn entry(container: &str, kind: ContainerKind, devices: &[&str]) -> Entry {
    entry_of(&plugin_driver(&resource("gpu")), container, kind, devices)
}

/// The same of a pool of `gpu.example.com`.
pub(crate) fn pooled_entry(container: &str, kind: ContainerKind, devices: &[&str]) -> Entry {
    entry_of(&driver("gpu"), container, kind, devices)
}

fn entry_of(driver: &DriverName, container: &str, kind: ContainerKind, devices: &[&str]) -> Entry {
    Entry {
        container: container.to_owned(),
        kind,
        resource: resource("gpu"),
        devices: devices
            .iter()
            .map(|id| ((*id).to_owned(), Vec::new()))
            .collect(),
        claim: PooledClaim::named(&pod("a"), container, &resource("gpu"), driver),
        is_prepared: true,
    }
}
