//! Extended resources as callers of the manager see them.

use std::path::PathBuf;

use crate::driver::DeviceOptions;
use nodedock_allocator::resource::{DeviceNodes, TopologyHint};
use nodedock_model::{DriverName, ExtendedResource, ObjectRef, PluginDevice, Problem};

/// The outcome for one resource of one container.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceOutcome {
    pub container: String,
    pub resource: ExtendedResource,
    pub end: Result<DeviceNodes, Problem>,
}

/// The source of a resource's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResourceSource {
    /// A device plugin, by its socket.
    Plugin(PathBuf),
    /// Pools of a driver.
    Pools(DriverName),
    /// Known from the checkpoint alone: not registered since the start.
    Remembered,
}

/// A resource as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceView {
    pub name: ExtendedResource,
    pub source: ResourceSource,
    /// True if its source is connected: without it a resource stays for a grace period, with no healthy device.
    pub active: bool,
    /// Options of a device plugin that has listed its devices.
    pub options: Option<DeviceOptions>,
    /// Devices by ID.
    pub devices: Vec<DeviceView>,
}

impl ResourceView {
    /// Every device, healthy or not.
    pub fn capacity(&self) -> usize {
        self.devices.len()
    }

    /// Healthy devices, allocated or not.
    pub fn allocatable(&self) -> usize {
        self.devices
            .iter()
            .filter(|device| device.device.healthy)
            .count()
    }
}

/// A device and the pods that hold it.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceView {
    pub device: PluginDevice,
    /// Pods that were given it under the resource's name: several containers of one pod may share it.
    pub pods: Vec<ObjectRef>,
}

/// The extended resources of a node, as a kubelet counts them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Capacity {
    /// Resources by name.
    pub resources: Vec<ResourceView>,
    /// Resources that went since the start: a node that showed them shows zero.
    pub removed: Vec<ExtendedResource>,
}

/// Scope for which hints are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HintScope {
    /// Each container by itself.
    Container,
    /// The pod as a whole.
    Pod,
}

/// Hints for one resource; none (`None`): the resource has no topology. An empty list: it cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceHints {
    /// Empty for a pod as a whole.
    pub container: String,
    pub resource: ExtendedResource,
    pub hints: Option<Vec<TopologyHint>>,
}
