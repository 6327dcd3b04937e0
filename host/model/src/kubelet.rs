//! What a kubelet is told of claims, and what is known of those that it holds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DeviceName, DeviceStatus, DriverName, ObjectName, ObjectRef, PoolName, Uid};

/// A device of a claim as a kubelet is told of it (`v1.Device` of the DRA API).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletDevice {
    /// Base names of the requests that it serves; empty: any.
    pub requests: Vec<String>,
    pub pool: PoolName,
    pub device: DeviceName,
    /// Qualified CDI names, such as `vendor.com/class=name`.
    pub cdi: Vec<String>,
    pub share_id: Option<String>,
}

/// A consumer for which a claim is reserved (`status.reservedFor`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Consumer {
    /// Empty: the core group.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    /// `pods`, as a rule.
    pub resource: String,
    pub name: ObjectName,
    pub uid: Uid,
}

impl Consumer {
    pub fn of_pod(pod: &ObjectRef) -> Self {
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        Self { api_group: String::new(), resource: "pods".to_owned(), name, uid }
    }

    pub fn is_pod(&self) -> bool {
        self.api_group.is_empty() && self.resource == "pods"
    }
}

/// A claim that is prepared, or was asked for, by a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletClaim {
    pub claim: ObjectRef,
    /// Drivers that the kubelet asked to prepare it and did not ask to give it up.
    pub drivers: Vec<DriverName>,
    /// For whom it was reserved when it was prepared last.
    pub consumers: Vec<Consumer>,
    /// When the kubelet first asked for it; milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// What a claim's record says beside `DriverPart::kubelet` while a kubelet holds parts of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubeletHold {
    /// When it first asked for the claim; milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// For whom the claim was reserved when it was asked for last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consumers: Vec<Consumer>,
    /// The claim is no object of the API server: it stands for devices that a kubelet took through a device plugin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given: bool,
}

/// What a kubelet is answered for one driver's part of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreparedForKubelet {
    /// None, where the claim has no device of the driver.
    pub devices: Vec<KubeletDevice>,
    /// For the containers that use any of the devices: what a device plugin's answer can say and a DRA driver's cannot.
    pub annotations: BTreeMap<String, String>,
}

impl PreparedForKubelet {
    /// Every qualified CDI name, in the order of the devices, each once.
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

/// What drivers tell of a claim's devices, for its `status.devices`.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimStatuses {
    pub claim: ObjectRef,
    /// Only of devices that are prepared and have something to tell; in the order of drivers, and of their devices.
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
}

impl DraService {
    /// The newest first: it is taken whatever a plugin's order.
    pub const ALL: [Self; 2] = [Self::V1, Self::V1beta1];

    /// As plugins list it, which is not the name of the gRPC service.
    pub fn listed_as(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1beta1 => "v1beta1.DRAPlugin",
        }
    }

    pub fn version(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V1beta1 => "v1beta1",
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
    /// The newest first: it is taken whatever a plugin's order.
    pub const ALL: [Self; 2] = [Self::V1, Self::V1alpha1];

    pub fn listed_as(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAResourceHealth",
            Self::V1alpha1 => "v1alpha1.DRAResourceHealth",
        }
    }
}
