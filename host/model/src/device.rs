//! Inventories: pools of devices, as Kubernetes' structured parameters describe them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use super::{DeviceName, ExtendedResource, PathPatterns, PoolName, QualifiedName, SmallMap};

/// Every device that a driver has on this node now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    pub pools: BTreeMap<PoolName, Pool>,
}

impl Inventory {
    pub fn device_count(&self) -> usize {
        self.pools.values().map(|pool| pool.devices.len()).sum()
    }

    pub fn device(&self, pool: &PoolName, device: &DeviceName) -> Option<&Device> {
        self.pools.get(pool)?.devices.get(device)
    }
}

/// The annotation of a pool with its control nodes: globs of paths, with spaces between them.
pub const CONTROL_NODES: &str = "nodedock.dev/control-nodes";

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    pub devices: BTreeMap<DeviceName, Device>,
    pub shared_counters: Vec<CounterSet>,
    pub extended_resource: Option<ExtendedResource>,
    pub annotations: BTreeMap<String, String>,
    /// Device nodes without hardware that several devices share by design (`/dev/vfio/vfio`): a claim holds none of them.
    #[serde(skip)]
    pub control_nodes: Option<PathPatterns>,
    #[serde(default, skip_serializing_if = "PoolScheduling::is_empty")]
    pub scheduling: PoolScheduling,
}

/// One allocatable device. Its name is its key in the pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    pub attributes: BTreeMap<QualifiedName, AttributeValue>,
    pub capacities: SmallMap<QualifiedName, Capacity>,
    pub taints: Vec<Taint>,
    pub consumes: Vec<CounterSet>,
    pub allow_multiple_allocations: bool,
    /// Physical identity, such as `pci:0000:3b:00.0`: devices with a common identity exclude each other, also across drivers.
    pub identity: Vec<String>,
    /// Directories in `/sys` and numbers of device nodes of the hardware that `identity` names, as the host found them.
    #[serde(skip)]
    pub keys: Vec<String>,
    pub numa_nodes: Vec<u32>,
    pub annotations: BTreeMap<String, String>,
    /// Boxed: few devices have any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Box<DeviceScheduling>>,
}

/// Fields of a pool's ResourceSlices that Kubernetes added later.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolScheduling {
    /// Attribute, with its domain, that names the type of each partition (KEP-4815).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition_type_attribute: Option<String>,
    /// The kubelet calls neither prepare nor, if `prepare` is false, unprepare (KEP-5945).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_node_operations: Option<SkippedOperations>,
}

impl PoolScheduling {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Calls of a driver that the kubelet leaves out. Without unprepare there is no leaving out of prepare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SkippedOperations {
    Unprepare,
    PrepareAndUnprepare,
}

/// Fields of a device in a ResourceSlice that Kubernetes added later, in the notation of `resource.k8s.io/v1`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceScheduling {
    pub binds_to_node: bool,
    pub binding_conditions: Vec<String>,
    pub binding_failure_conditions: Vec<String>,
    /// Consumption by resource of the node.
    pub node_allocatable: BTreeMap<String, NodeAllocatable>,
    /// Compatibility groups by consumed counter set.
    pub compatibility: BTreeMap<String, Vec<String>>,
}

/// A device's consumption of a resource of the node (KEP-5517).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeAllocatable {
    pub mapping: Option<AllocatableMapping>,
    pub per_pod: Option<String>,
    pub per_container: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllocatableMapping {
    PerDevice(String),
    PerCapacity {
        capacity: QualifiedName,
        multiplier: String,
    },
}

/// An attribute's value; in JSON the plain value, a version as its text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AttributeValue {
    Int(i64),
    Bool(bool),
    Text(String),
    Version(semver::Version),
    Ints(Vec<i64>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
    Versions(Vec<semver::Version>),
}

impl AttributeValue {
    /// Returns the number of values: of a list, its length.
    pub fn count(&self) -> usize {
        match self {
            Self::Int(_) | Self::Bool(_) | Self::Text(_) | Self::Version(_) => 1,
            Self::Ints(list) => list.len(),
            Self::Bools(list) => list.len(),
            Self::Texts(list) => list.len(),
            Self::Versions(list) => list.len(),
        }
    }
}

/// An attribute's value as a driver or an API object has it: a version is a text.
#[derive(Debug, Clone, PartialEq)]
pub enum UnparsedValue {
    Int(i64),
    Bool(bool),
    Text(String),
    Version(String),
    Ints(Vec<i64>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
    Versions(Vec<String>),
}

impl UnparsedValue {
    /// Returns the number of values: of a list, its length.
    pub fn count(&self) -> usize {
        match self {
            Self::Int(_) | Self::Bool(_) | Self::Text(_) | Self::Version(_) => 1,
            Self::Ints(list) => list.len(),
            Self::Bools(list) => list.len(),
            Self::Texts(list) | Self::Versions(list) => list.len(),
        }
    }

    /// Fails if a version is none.
    pub fn parse(self) -> Result<AttributeValue, semver::Error> {
        let version = |text: &String| semver::Version::parse(text);
        Ok(match self {
            Self::Int(value) => AttributeValue::Int(value),
            Self::Bool(value) => AttributeValue::Bool(value),
            Self::Text(text) => AttributeValue::Text(text),
            Self::Version(text) => AttributeValue::Version(version(&text)?),
            Self::Ints(list) => AttributeValue::Ints(list),
            Self::Bools(list) => AttributeValue::Bools(list),
            Self::Texts(list) => AttributeValue::Texts(list),
            Self::Versions(list) => {
                AttributeValue::Versions(list.iter().map(version).collect::<Result<_, _>>()?)
            }
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    pub value: String,
    pub policy: Option<CapacityPolicy>,
}

/// Amounts of a shared device's capacity that a claim may request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CapacityPolicy {
    pub default_amount: Option<String>,
    pub choice: CapacityChoice,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CapacityChoice {
    Any,
    Values(Vec<String>),
    Range {
        min: String,
        max: Option<String>,
        step: Option<String>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CounterSet {
    pub name: String,
    pub counters: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
pub enum TaintEffect {
    None,
    NoSchedule,
    NoExecute,
}

impl TaintEffect {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: TaintEffect,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum HealthState {
    #[default]
    Unknown,
    Healthy,
    Unhealthy,
}

impl HealthState {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Health of a device, as its driver reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    pub state: HealthState,
    /// Message of at most 1 KiB.
    pub message: String,
}

/// Values of a device now, by what is measured and its unit, such as `temperature_celsius`.
pub type Readings = BTreeMap<String, f64>;

/// Readings by pool and device; missing devices have none.
pub type ReadingsReport = BTreeMap<(PoolName, DeviceName), Readings>;

/// Health by pool and device; missing devices are unknown.
pub type HealthReport = BTreeMap<(PoolName, DeviceName), DeviceHealth>;
