//! Claims and pods of requests, and the results of drivers for claims.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use strum::{Display, EnumString, IntoStaticStr};

use super::{
    AttributeValue, Consumer, ContainerAllocation, DeviceName, DeviceNode, DriverName, Edits,
    ExtendedResource, ObjectName, ObjectRef, PoolName, QualifiedName, ResourceDevices, Uid, exact,
};

/// Annotation of a claim made from a template: the pod's own name for the claim (`resource.k8s.io/v1`).
pub const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";

/// The fields of a ResourceClaim that the node needs (`resource.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    pub id: ObjectRef,
    /// `None`: not allocated.
    pub allocation: Option<Allocation>,
    /// Consumers for which it is reserved, identified by UID.
    pub reserved_for: Vec<Consumer>,
    pub annotations: BTreeMap<String, String>,
    /// Pod that owns a claim made from a template.
    pub owner_pod: Option<Uid>,
    /// The host made it for an extended resource that a container wants.
    pub resource: Option<ResourceDevices>,
}

impl Claim {
    /// Returns whether it is reserved for a pod, or for the group that the pod belongs to.
    pub fn is_reserved_for(&self, pod: &Uid, pod_group: Option<&ObjectName>) -> bool {
        self.reserved_for.iter().any(|known| {
            known.uid == *pod || pod_group.is_some_and(|group| known.is_pod_group(group))
        })
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    #[serde(deserialize_with = "exact::list")]
    pub devices: Vec<AllocatedDevice>,
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub configs: Vec<OpaqueConfig>,
    /// Node for which it was allocated, if its selector names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
}

impl Allocation {
    /// Returns the devices of one driver.
    pub fn of_driver(&self, driver: &DriverName) -> impl Iterator<Item = &AllocatedDevice> {
        self.devices
            .iter()
            .filter(move |device| device.driver == *driver)
    }

    pub fn has_driver(&self, driver: &DriverName) -> bool {
        self.of_driver(driver).next().is_some()
    }

    /// Returns the drivers of the devices, each once.
    pub fn drivers(&self) -> BTreeSet<&DriverName> {
        self.devices.iter().map(|device| &device.driver).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Hash, Serialize, Deserialize)]
pub struct AllocatedDevice {
    /// Request of the claim; `request/subrequest` for a prioritised list.
    pub request: String,
    pub driver: DriverName,
    pub pool: PoolName,
    pub device: DeviceName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub consumed: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
    #[serde(default, skip_serializing_if = "BindingConditions::is_empty")]
    pub binding: BindingConditions,
}

impl AllocatedDevice {
    /// A device as a whole, without parameters of a scheduler.
    pub fn whole(request: &str, driver: DriverName, pool: PoolName, device: DeviceName) -> Self {
        Self {
            request: request.to_owned(),
            driver,
            pool,
            device,
            share_id: None,
            consumed: BTreeMap::new(),
            admin_access: false,
            binding: BindingConditions::default(),
        }
    }

    /// Returns the request without its subrequest: the name that containers use.
    pub fn base_request(&self) -> &str {
        self.request.split('/').next().unwrap_or(&self.request)
    }
}

/// Types of conditions of a device for which a scheduler waits before it binds a pod (KEP-5007). Both lists are empty, or neither.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BindingConditions {
    /// All of them have to be true.
    pub conditions: Vec<String>,
    /// Conditions of which any that is true means that binding failed.
    pub failures: Vec<String>,
}

impl BindingConditions {
    /// The condition that the host sets when it has prepared a device.
    pub const PREPARED: &str = "nodedock.dev/prepared";
    /// The condition that the host sets when a device cannot be prepared.
    pub const PREPARE_FAILED: &str = "nodedock.dev/prepare-failed";

    pub fn is_empty(&self) -> bool {
        self.conditions.is_empty() && self.failures.is_empty()
    }

    /// The failure condition that the host sets: its own, or else the first.
    pub fn failure(&self) -> Option<&String> {
        let own = self
            .failures
            .iter()
            .find(|kind| *kind == Self::PREPARE_FAILED);
        own.or(self.failures.first())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Display, EnumString)]
pub enum ConfigSource {
    #[serde(rename = "FromClass")]
    #[strum(serialize = "FromClass")]
    DeviceClass,
    #[serde(rename = "FromClaim")]
    #[strum(serialize = "FromClaim")]
    Claim,
}

/// Parameters for a driver, from a DeviceClass or a claim.
#[derive(Debug, Clone, PartialEq, Hash, Serialize, Deserialize)]
pub struct OpaqueConfig {
    pub source: ConfigSource,
    /// Requests to which the config applies; empty means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<String>,
    pub driver: DriverName,
    /// JSON.
    pub parameters: String,
}

/// One driver's part of a claim, as a call contains it.
#[derive(Debug, Clone, PartialEq, Hash)]
pub struct DriverClaim {
    pub id: ObjectRef,
    pub devices: Vec<AllocatedDevice>,
    /// Configs for this driver only; class before claim, later entries take precedence.
    pub configs: Vec<OpaqueConfig>,
    pub annotations: BTreeMap<String, String>,
    /// Consumers that the host knows when the call begins.
    pub reserved_for: Vec<Consumer>,
    /// Progress that the driver saved in a prepare of the claim that did not succeed.
    pub progress: Vec<u8>,
}

/// A claim that a driver prepared, or may have begun to prepare: the contract's `claim-record`.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverClaimRecord {
    pub claim: DriverClaim,
    /// True if a prepare succeeded.
    pub prepared: bool,
    /// Memo of the last prepare that succeeded.
    pub memo: Vec<u8>,
    /// Version that prepared it, or else that was called last.
    pub driver_version: String,
    /// Boot in which the driver was called.
    pub boot_id: String,
}

/// A driver's result for its part of a claim.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PreparedClaim {
    #[serde(deserialize_with = "exact::list")]
    pub devices: Vec<PreparedDevice>,
    /// Edits for every container that uses any of the devices.
    #[serde(default, skip_serializing_if = "Edits::is_empty")]
    pub edits: Edits,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "memo_text")]
    pub memo: Vec<u8>,
    /// Counts the prepares with metadata files; 0 without such files.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub metadata_generation: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreparedDevice {
    /// Base names of the requests that it satisfies; empty means any.
    #[serde(deserialize_with = "exact::list")]
    pub requests: Vec<String>,
    pub pool: PoolName,
    pub device: DeviceName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Access of a container to the device.
    pub access: DeviceAccess,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<DeviceStatus>,
    /// Attributes for its metadata file, as a JSON object in the notation of `resource.k8s.io/v1`. `None`: the host writes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<String>,
}

/// Access of a container to a device: edits that the host renders as CDI, or CDI names of files that a native plugin wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceAccess {
    Edits(Edits),
    CdiDevices(Vec<String>),
    /// Both, of a device plugin.
    EditsAndCdiDevices(Edits, Vec<String>),
    /// The answer of a device plugin as it is, for a container that wants its extended resource.
    Plugin(PluginAnswer),
}

/// The answer of a device plugin for a container.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PluginAnswer {
    pub allocation: ContainerAllocation,
    /// The plugin requests a call before each start of the container: recorded for the time when the plugin is not connected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pre_start: bool,
    /// The device nodes that a runtime finds by it. Not recorded.
    #[serde(skip)]
    pub nodes: Vec<DeviceNode>,
}

impl PluginAnswer {
    /// The result for a claim. The answer is for all of its devices together, so the first one has it.
    pub fn prepared(self, devices: &[AllocatedDevice]) -> PreparedClaim {
        let device = devices.first().map(|device| PreparedDevice {
            requests: vec![device.request.clone()],
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: None,
            access: DeviceAccess::Plugin(self),
            status: None,
            attributes: None,
        });
        PreparedClaim {
            devices: device.into_iter().collect(),
            ..PreparedClaim::default()
        }
    }
}

impl DeviceAccess {
    /// Returns the edits. `None`: a native plugin wrote the CDI files, or a device plugin answered for a container.
    pub fn edits(&self) -> Option<&Edits> {
        match self {
            Self::Edits(edits) | Self::EditsAndCdiDevices(edits, _) => Some(edits),
            Self::CdiDevices(_) | Self::Plugin(_) => None,
        }
    }

    /// Returns the CDI names that a plugin gave.
    pub fn cdi_names(&self) -> &[String] {
        match self {
            Self::Edits(_) => &[],
            Self::CdiDevices(names) | Self::EditsAndCdiDevices(_, names) => names,
            Self::Plugin(answer) => &answer.allocation.cdi_devices,
        }
    }

    /// Returns the device nodes of edits, or of a device plugin's answer.
    pub fn device_nodes(&self) -> &[DeviceNode] {
        match self {
            Self::Edits(edits) | Self::EditsAndCdiDevices(edits, _) => &edits.device_nodes,
            Self::CdiDevices(_) => &[],
            Self::Plugin(answer) => &answer.nodes,
        }
    }
}

/// Status of a device for the claim's `status.devices`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// JSON object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkData>,
    /// Attributes that the driver adds to those of its inventory, for the metadata file: they become part of
    /// [`PreparedDevice::attributes`].
    #[serde(skip)]
    pub attributes: BTreeMap<QualifiedName, AttributeValue>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    pub kind: String,
    pub status: Option<bool>,
    pub reason: String,
    pub message: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkData {
    pub interface_name: String,
    pub ips: Vec<String>,
    pub hardware_address: String,
}

/// A pod with its claims and containers, as a prepare requests it.
#[derive(Debug, Clone, PartialEq)]
pub struct PodRequest {
    pub pod: ObjectRef,
    /// Name of the PodGroup that the pod belongs to, in its namespace (`spec.schedulingGroup.podGroupName`).
    pub pod_group: Option<ObjectName>,
    pub claims: Vec<ClaimReference>,
    pub containers: Vec<PodContainer>,
}

/// A claim that a pod refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimReference {
    /// The pod's own name for it.
    pub pod_claim_name: String,
    pub claim_name: ObjectName,
    /// `None`: any UID.
    pub claim_uid: Option<Uid>,
}

/// A container with the claims that it uses and the limits of its extended resources.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodContainer {
    pub name: String,
    #[serde(deserialize_with = "exact::list")]
    pub claims: Vec<ContainerClaim>,
    #[serde(default, skip_serializing_if = "ContainerKind::is_app")]
    pub kind: ContainerKind,
    /// Number of devices of each resource (`resources.limits`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<ExtendedResource, u32>,
    /// Preferred NUMA nodes of its devices; empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numa_affinity: Vec<u32>,
}

/// The phase in which a container runs. Init containers end before the next one starts, so their devices are reused.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum ContainerKind {
    #[default]
    App,
    Init,
    /// An init container with `restartPolicy: Always`, which keeps its devices while the others run.
    Sidecar,
}

impl ContainerKind {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    pub fn is_app(&self) -> bool {
        *self == Self::App
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerClaim {
    pub pod_claim_name: String,
    /// `None`: every request of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Serializes memos as hexadecimal text.
pub(crate) mod memo_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(memo: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(memo))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        hex::decode(String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binding(conditions: &[&str], failures: &[&str]) -> BindingConditions {
        let texts = |types: &[&str]| types.iter().map(|kind| (*kind).to_owned()).collect();
        BindingConditions {
            conditions: texts(conditions),
            failures: texts(failures),
        }
    }

    #[test]
    fn own_failure_condition_is_preferred() {
        let first = binding(&["A"], &["example.com/failed", "B"]);
        assert_eq!(
            first.failure().map(String::as_str),
            Some("example.com/failed")
        );
        let own = binding(&["A"], &["B", BindingConditions::PREPARE_FAILED]);
        assert_eq!(
            own.failure().map(String::as_str),
            Some(BindingConditions::PREPARE_FAILED)
        );
        assert_eq!(BindingConditions::default().failure(), None);
    }
}
