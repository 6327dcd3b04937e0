//! Extended resources: devices of device plugins and of pools with a resource's name, and their allocations to pods.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{DriverName, ExtendedResource, ObjectName, ObjectRef, Uid};

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

/// Settings that a container needs for its extended resources.
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

/// Devices of an extended resource that a container gets by a claim that the host made for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceDevices {
    pub resource: ExtendedResource,
    /// Devices with their NUMA nodes when they were chosen: the IDs of a device plugin, or `POOL/DEVICE`.
    pub devices: BTreeMap<String, Vec<u32>>,
}

/// The request of a claim that the host makes for an extended resource.
pub const EXTENDED_RESOURCE_REQUEST: &str = "extended-resource";
/// Bytes of the pod's name that such a claim's name keeps: with the rest it stays a DNS label.
const POD_NAME_BYTES_MAX: usize = 40;
/// Digits of the hash in its name.
const HASH_DIGITS: usize = 16;

/// The synthetic claim for an extended resource of a container, created by the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledClaim {
    pub driver: DriverName,
    pub id: ObjectRef,
}

impl PooledClaim {
    /// Names the claim for a resource of a container: always the same name and UID.
    pub fn named(
        pod: &ObjectRef,
        container: &str,
        resource: &ExtendedResource,
        driver: &DriverName,
    ) -> Self {
        let of = format!("{}/{container}/{resource}", pod.uid);
        let digits = hex::encode(Sha256::digest(&of));
        let name = format!("{}-{}", label(pod.name.as_str()), &digits[..HASH_DIGITS]);
        let uid = Uuid::new_v5(&Uuid::NAMESPACE_OID, of.as_bytes()).to_string();
        let id = ObjectRef {
            namespace: pod.namespace.clone(),
            name: ObjectName::new(&name)
                .expect("the beginning of a pod's name and digits are a DNS label"),
            uid: Uid::new(&uid).expect("a UUID is a UID"),
        };
        Self {
            driver: driver.clone(),
            id,
        }
    }
}

/// A pod's name for the claim of a resource, which no claim of the pod's own can have: those are DNS labels.
pub fn pod_claim_name(resource: &ExtendedResource, claim: &ObjectName) -> String {
    format!("{resource}/{claim}")
}

/// The beginning of a pod's name as the beginning of a DNS label.
fn label(name: &str) -> String {
    let cut: String = name
        .chars()
        .take(POD_NAME_BYTES_MAX)
        .map(|c| if c == '.' { '-' } else { c })
        .collect();
    cut.trim_end_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_name_is_a_dns_label() {
        let (resource, driver) = (
            "example.com/gpu".parse().unwrap(),
            "gpu.example.com".parse().unwrap(),
        );
        let long = format!("{}.{}", "x".repeat(39), "y".repeat(60));
        let (dashes, dots) = (format!("{}--b", "a".repeat(39)), "a.b.c".repeat(20));
        for pod in ["a", "0", &long, &dashes, &dots, &"z".repeat(63)] {
            let pod = ObjectRef::new("default", pod, "uid").unwrap();
            let claim = PooledClaim::named(&pod, "main", &resource, &driver).id;
            assert!(
                claim.name.as_str().len() <= 63 && !claim.name.as_str().contains('.'),
                "{claim}"
            );
            assert_ne!(
                claim.name,
                PooledClaim::named(&pod, "other", &resource, &driver)
                    .id
                    .name
            );
        }
    }
}
