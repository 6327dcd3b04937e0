//! What the device manager tells of resources, and what it asks about devices of pools.

use std::collections::BTreeMap;
use std::path::PathBuf;

use nodedock_model::{DriverName, ExtendedResource, ObjectRef, PluginDevice, Problem};

/// What became of one resource of one container.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceOutcome {
    pub container: String,
    pub resource: ExtendedResource,
    /// Device to its NUMA nodes.
    pub end: Result<BTreeMap<String, Vec<u32>>, Problem>,
}

/// Where a resource's devices come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResourceSource {
    /// A device plugin, by its socket.
    Plugin(PathBuf),
    /// Pools of a driver.
    Pools(DriverName),
    /// Known from the checkpoint alone: nobody has registered it since the start.
    Remembered,
}

/// A resource as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceView {
    pub name: ExtendedResource,
    pub source: ResourceSource,
    /// Whether its source is there: a resource whose source is gone stays for a time, with no healthy device.
    pub active: bool,
    /// By id.
    pub devices: Vec<DeviceView>,
}

impl ResourceView {
    /// Every device, healthy or not.
    pub fn capacity(&self) -> usize {
        self.devices.len()
    }

    /// Healthy devices, allocated or not.
    pub fn allocatable(&self) -> usize {
        self.devices.iter().filter(|device| device.device.healthy).count()
    }
}

/// A device and who holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceView {
    pub device: PluginDevice,
    /// Pods that were given it under the resource's name: several containers of one pod may share it.
    pub pods: Vec<ObjectRef>,
}

/// What a node has of extended resources, as a kubelet counts it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Capacity {
    /// By name.
    pub resources: Vec<ResourceView>,
    /// Resources that went since the start: a node that showed them shows zero.
    pub removed: Vec<ExtendedResource>,
}

/// Over what hints are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HintScope {
    /// Each container by itself.
    Container,
    /// The pod as a whole.
    Pod,
}

/// NUMA nodes from which a request can be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyHint {
    /// Ascending.
    pub numa_nodes: Vec<u32>,
    /// No smaller set of nodes could serve the request.
    pub preferred: bool,
}

/// Hints for one resource; none (`None`): the resource has no topology. An empty list: it cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceHints {
    /// Empty for a pod as a whole.
    pub container: String,
    pub resource: ExtendedResource,
    pub hints: Option<Vec<TopologyHint>>,
}

/// Whether a claim holds a device of a pool. The claim manager answers it.
pub trait DeviceHolders: Send + Sync {
    /// Claims that keep the device, or a piece of hardware behind it, from being given to somebody alone; those made for extended
    /// resources are among them.
    fn holders(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<ObjectRef>;
}
