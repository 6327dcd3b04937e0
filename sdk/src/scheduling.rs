//! Data for the scheduler about devices beyond the inventory (`resource.k8s.io/v1`).

/// Amount of a resource of the node that a device represents (KEP-5517).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllocatableMapping {
    /// This quantity for each allocated device.
    PerDevice(String),
    /// The consumed amount of a capacity, times the multiplier.
    PerCapacity {
        /// Name as in the inventory.
        capacity: String,
        /// Quantity.
        multiplier: String,
    },
}

/// A device's consumption of a resource of the node (KEP-5517). It has a mapping or an overhead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAllocatable {
    /// `cpu`, `memory`, `hugepages-2Mi`; never an extended resource.
    pub resource: String,
    /// Amount that the device represents.
    pub mapping: Option<AllocatableMapping>,
    /// Overhead once for each pod that uses the claim.
    pub per_pod: Option<String>,
    /// Overhead for each container that uses the claim.
    pub per_container: Option<String>,
}

/// Groups of a consumed counter set (KEP-5963): devices that draw on one set are allocated together only with a common group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compatibility {
    /// Set of counters that the device consumes.
    pub counter_set: String,
    /// DNS labels, at most 2.
    pub groups: Vec<String>,
}

/// Additions to one device of the inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceScheduling {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// The allocation is for the chosen node only (KEP-5007).
    pub binds_to_node: bool,
    /// Condition types that must be true before the pod is bound: at most 4, and only together with failure conditions. The host prepares
    /// the claim before the pod is bound. It sets `nodedock.dev/prepared` itself; the others are true when the driver reports them in the
    /// status of a prepared device, or another program does.
    pub binding_conditions: Vec<String>,
    /// Condition types that say that binding failed: at most 4, none of them a binding condition. If the claim cannot be prepared, the host
    /// sets `nodedock.dev/prepare-failed`, or the first one if that is not among them.
    pub binding_failure_conditions: Vec<String>,
    /// Consumed resources of the node: at most 8.
    pub node_allocatable: Vec<NodeAllocatable>,
    /// Compatibility groups: at most one entry for each consumed counter set.
    pub compatibility: Vec<Compatibility>,
}

/// Calls of the driver that the kubelet may leave out (KEP-5945).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeOperations {
    /// Leaves out prepare, and only together with unprepare. Containers then get nothing of this driver.
    pub prepare: bool,
    /// Leaves out unprepare.
    pub unprepare: bool,
}

/// Additions to one pool of the inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolScheduling {
    /// Name of the pool.
    pub pool: String,
    /// Attribute (named as in the inventory) that names the type of each partition (KEP-4815).
    pub partition_type_attribute: Option<String>,
    /// Calls that the kubelet may leave out.
    pub skip_node_operations: NodeOperations,
}

/// Additions to an inventory.
///
/// ```
/// use nodedock_sdk::testing::bounds;
/// use nodedock_sdk::{Additions, AllocatableMapping, Device, DeviceScheduling, Inventory, NodeAllocatable, Pool};
///
/// let inventory = Inventory::new().pool(Pool::new("memory").device(Device::new("node-0")));
/// let memory = NodeAllocatable {
///     resource: "memory".into(),
///     mapping: Some(AllocatableMapping::PerDevice("16Gi".into())),
///     ..NodeAllocatable::default()
/// };
/// let device = DeviceScheduling {
///     pool: "memory".into(),
///     device: "node-0".into(),
///     node_allocatable: vec![memory],
///     ..DeviceScheduling::default()
/// };
/// let additions = Additions { devices: vec![device], ..Additions::default() };
/// assert!(bounds::additions(&inventory, &additions).is_empty());
/// ```
///
/// Devices and pools that are not listed get nothing; each must be in the inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Additions {
    /// Additions to devices.
    pub devices: Vec<DeviceScheduling>,
    /// Additions to pools.
    pub pools: Vec<PoolScheduling>,
}
