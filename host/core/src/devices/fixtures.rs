//! Short words for devices, entries and pods of tests.

use std::collections::BTreeMap;

use super::pooled;
use nodedock_model::{
    AllocationEntry, ContainerKind, DriverName, ExtendedResource, ObjectRef, PluginDevice, Uid,
};

pub(super) fn device(id: &str, numa_nodes: &[u32]) -> PluginDevice {
    PluginDevice { id: id.to_owned(), healthy: true, numa_nodes: numa_nodes.to_vec() }
}

pub(super) fn sick(id: &str) -> PluginDevice {
    PluginDevice { healthy: false, ..device(id, &[]) }
}

pub(super) fn devices(devices: impl IntoIterator<Item = PluginDevice>) -> BTreeMap<String, PluginDevice> {
    devices.into_iter().map(|device| (device.id.clone(), device)).collect()
}

pub(super) fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// The resource `gpu` is `example.com/gpu`.
pub(super) fn resource(short: &str) -> ExtendedResource {
    ExtendedResource::new(format!("example.com/{short}")).unwrap()
}

pub(super) fn driver(short: &str) -> DriverName {
    DriverName::new(format!("{short}.example.com")).unwrap()
}

pub(super) fn pod(short: &str) -> ObjectRef {
    ObjectRef::new("default", short, &format!("uid-{short}")).unwrap()
}

pub(super) fn uid(short: &str) -> Uid {
    pod(short).uid
}

/// What a container has of `example.com/gpu`.
pub(super) fn entry(container: &str, kind: ContainerKind, devices: &[&str]) -> AllocationEntry {
    AllocationEntry {
        container: container.to_owned(),
        kind,
        resource: resource("gpu"),
        devices: devices.iter().map(|id| ((*id).to_owned(), Vec::new())).collect(),
        claim: None,
        response: None,
        pre_start: false,
        unknown: BTreeMap::new(),
    }
}

/// The same of a pool of `gpu.example.com`, for the pod `a`.
pub(super) fn pooled_entry(container: &str, kind: ContainerKind, devices: &[&str]) -> AllocationEntry {
    let claim = pooled::pooled(&pod("a"), container, &resource("gpu"), &driver("gpu")).unwrap();
    AllocationEntry { claim: Some(claim), ..entry(container, kind, devices) }
}
