//! Extended resources: devices of device plugins and of pools with a resource's name, and their allocations to pods.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ContainerKind, DriverName, ExtendedResource, ObjectRef, Uid};

/// A device as the device plugin API lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PluginDevice {
    /// Any text from a plugin; `POOL/DEVICE` for a device of a pool.
    pub id: String,
    pub healthy: bool,
    /// Ascending, each once; empty: it has no topology.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
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

/// Extended resources of a pod: one record of the checkpoint for each pod, under its UID.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodAllocation {
    pub pod: ObjectRef,
    /// In the order of the pod's containers (init containers and sidecars first), then by resource.
    pub entries: Vec<AllocationEntry>,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Fields of a newer version, preserved unchanged.
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
    /// Devices with their NUMA nodes at the allocation.
    pub devices: BTreeMap<String, Vec<u32>>,
    /// `None`: a device plugin's. `Some`: the driver whose pools have the devices, which a synthetic claim reserves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<PooledClaim>,
    /// The plugin's Allocate response. `None`: an intent, the plugin may or may not have been called; always `None` for a claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<ContainerAllocation>,
    /// The plugin requests a call before each start of the container: recorded for the time when the plugin is not connected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pre_start: bool,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// The synthetic claim for an extended resource of a container, created by the daemon.
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
    /// Returns whether the entry is complete for a container: its plugin has responded, or it has a claim.
    pub fn is_complete(&self) -> bool {
        self.claim.is_some() || self.response.is_some()
    }
}
