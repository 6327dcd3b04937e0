//! Extended resources: devices of device plugins and of pools that carry a resource's name, and what pods were given of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ContainerKind, DriverName, ExtendedResource, ObjectRef, Uid};

/// A device as the device plugin API lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginDevice {
    /// Any text of a plugin's choice; `POOL/DEVICE` for a device of a pool.
    pub id: String,
    pub healthy: bool,
    /// Ascending, each once; empty: it has no topology.
    pub numa_nodes: Vec<u32>,
}

/// What a container needs for its extended resources.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerAllocation {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<AllocationMount>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<AllocationNode>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Qualified names, each once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdi_devices: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationMount {
    pub host_path: String,
    pub container_path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationNode {
    pub host_path: String,
    pub container_path: String,
    /// Subset of `rwm`.
    pub permissions: String,
}

/// What a pod was given of extended resources: one record of the checkpoint for each pod, under its UID.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodAllocation {
    pub pod: ObjectRef,
    /// In the order of the pod's containers (init containers and sidecars first), then by resource.
    pub entries: Vec<AllocationEntry>,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Fields of a newer version; kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// Devices of one resource for one container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AllocationEntry {
    pub container: String,
    #[serde(default, skip_serializing_if = "ContainerKind::is_app")]
    pub kind: ContainerKind,
    pub resource: ExtendedResource,
    /// Device to its NUMA nodes when it was given.
    pub devices: BTreeMap<String, Vec<u32>>,
    /// None: a device plugin's. Some: the driver whose pools have the devices; a claim of its own holds them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<PooledClaim>,
    /// What the plugin answered to Allocate. None: an intent, the plugin may or may not have been asked; always none for a claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<ContainerAllocation>,
    /// The plugin wants to be told before each start of the container: known here while the plugin is away.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pre_start: bool,
    /// Fields of a newer version; kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// The claim that stands for an extended resource of a container, made by the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledClaim {
    pub driver: DriverName,
    pub id: ObjectRef,
}

impl PodAllocation {
    pub fn uid(&self) -> &Uid {
        &self.pod.uid
    }

    pub fn entry(&self, container: &str, resource: &ExtendedResource) -> Option<&AllocationEntry> {
        self.entries.iter().find(|entry| entry.container == container && entry.resource == *resource)
    }
}

impl AllocationEntry {
    /// Whether a container can be answered with it: its plugin answered, or its claim is what makes it ready.
    pub fn is_complete(&self) -> bool {
        self.claim.is_some() || self.response.is_some()
    }
}
