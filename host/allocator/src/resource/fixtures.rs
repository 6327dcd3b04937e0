//! Short words for devices of tests.

use std::collections::BTreeMap;

use nodedock_model::{ExtendedResource, PluginDevice};

pub(super) fn device(id: &str, numa_nodes: &[u32]) -> PluginDevice {
    PluginDevice {
        id: id.to_owned(),
        healthy: true,
        numa_nodes: numa_nodes.to_vec(),
    }
}

pub(super) fn sick(id: &str) -> PluginDevice {
    PluginDevice {
        healthy: false,
        ..device(id, &[])
    }
}

pub(super) fn devices(
    devices: impl IntoIterator<Item = PluginDevice>,
) -> BTreeMap<String, PluginDevice> {
    devices
        .into_iter()
        .map(|device| (device.id.clone(), device))
        .collect()
}

pub(super) fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// The resource `gpu` is `example.com/gpu`.
pub(super) fn resource(short: &str) -> ExtendedResource {
    ExtendedResource::new(format!("example.com/{short}")).unwrap()
}
