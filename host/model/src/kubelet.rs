//! The kubelet's view of claims, and the state of the claims that it prepared.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DeviceName, DeviceStatus, DriverName, ObjectName, ObjectRef, PoolName, Uid, exact};

/// A device of a claim in a response to a kubelet (`v1.Device` of the DRA API).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletDevice {
    /// Base names of the requests that it satisfies; empty: any.
    pub requests: Vec<String>,
    pub pool: PoolName,
    pub device: DeviceName,
    /// Qualified CDI names, such as `vendor.com/class=name`.
    pub cdi: Vec<String>,
    pub share_id: Option<String>,
}

/// API group of PodGroups, for which a claim can be reserved instead of for each of their pods (KEP-5729).
const POD_GROUP_API: &str = "scheduling.k8s.io";

/// A consumer for which a claim is reserved (`status.reservedFor`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Consumer {
    /// Empty: the core group.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    /// Usually `pods`.
    pub resource: String,
    pub name: ObjectName,
    pub uid: Uid,
}

impl Consumer {
    pub fn of_pod(pod: &ObjectRef) -> Self {
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        Self {
            api_group: String::new(),
            resource: "pods".to_owned(),
            name,
            uid,
        }
    }

    pub fn is_pod(&self) -> bool {
        self.api_group.is_empty() && self.resource == "pods"
    }

    /// Returns whether it is the group of a pod, which has the group's name and not its UID.
    pub fn is_pod_group(&self, name: &ObjectName) -> bool {
        self.api_group == POD_GROUP_API && self.resource == "podgroups" && self.name == *name
    }
}

/// A claim that a kubelet prepared, or requested to prepare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletClaim {
    pub claim: ObjectRef,
    /// Drivers that the kubelet called to prepare it and not to unprepare it.
    pub drivers: Vec<DriverName>,
    /// Consumers for which it was reserved at its last prepare.
    pub consumers: Vec<Consumer>,
    /// Time of the kubelet's first request for it; milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Number of the kubelet's last request for it in this process, among all requests; `None`: it was before the start.
    pub last_request: Option<u64>,
    /// No kubelet has requested it yet; see [`KubeletHold::early`].
    pub early: bool,
}

/// The state of a claim's record, in addition to `DriverPart::kubelet`, while a kubelet uses parts of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubeletHold {
    /// Time of its first request for the claim; milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Consumers for which the claim was reserved at the last request.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub consumers: Vec<Consumer>,
    /// The claim is not an object of the API server: it represents devices that a kubelet allocated through a device plugin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given: bool,
    /// No kubelet has requested the claim yet: it was prepared for a scheduler, which waits for the device before it binds the pod.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early: bool,
}

/// The response to a kubelet for one driver's part of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreparedForKubelet {
    /// `None` if the claim has no device of the driver.
    pub devices: Vec<KubeletDevice>,
    /// Annotations for containers that use any of the devices: data that a device plugin's response can contain and a DRA driver's cannot.
    pub annotations: BTreeMap<String, String>,
}

impl PreparedForKubelet {
    /// Returns every qualified CDI name, in the order of the devices, each once.
    pub fn cdi_names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.devices.iter().flat_map(|device| &device.cdi) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}

/// The status of a claim's devices that drivers report, for its `status.devices`.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimStatuses {
    pub claim: ObjectRef,
    /// Time of the allocation, in milliseconds since the Unix epoch; 0: not known. The status of the same devices in another allocation
    /// is another status.
    pub allocated_ms: u64,
    /// Only prepared devices with a status; in the order of drivers, and of their devices.
    pub devices: Vec<ReportedDevice>,
}

/// An entry of `status.devices`: driver, pool, device and share ID are its key.
#[derive(Debug, Clone, PartialEq)]
pub struct ReportedDevice {
    pub driver: DriverName,
    pub pool: PoolName,
    pub device: DeviceName,
    pub share_id: Option<String>,
    pub status: DeviceStatus,
}

/// The version of the DRA API that a plugin is called with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraService {
    V1,
    V1beta1,
    /// `v1alpha3` or `v1alpha2`: a registration does not say which.
    Alpha,
}

impl DraService {
    /// Services of current kubelets, the newest first: the newest is used regardless of a plugin's order.
    pub const ALL: [Self; 2] = [Self::V1, Self::V1beta1];

    /// Returns the name under which plugins list the service, which is not the name of the gRPC service.
    pub fn listed_as(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1beta1 => "v1beta1.DRAPlugin",
            Self::Alpha => "1.0.0",
        }
    }

    pub fn version(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V1beta1 => "v1beta1",
            Self::Alpha => "v1alpha",
        }
    }
}

/// The version of the health API that a plugin is called with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthService {
    V1,
    V1alpha1,
}

impl HealthService {
    /// All services, the newest first: the newest is used regardless of a plugin's order.
    pub const ALL: [Self; 2] = [Self::V1, Self::V1alpha1];

    pub fn listed_as(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAResourceHealth",
            Self::V1alpha1 => "v1alpha1.DRAResourceHealth",
        }
    }
}
