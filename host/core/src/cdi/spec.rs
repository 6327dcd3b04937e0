//! CDI specs as in files (tags.cncf.io/container-device-interface, 0.3.0 to 1.1.0), with the fields that the host writes, and the version
//! that a spec needs.

use serde::{Deserialize, Serialize};

/// A file's content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    pub devices: Vec<Device>,
    /// For every container that uses any of the devices.
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    pub name: String,
    pub container_edits: ContainerEdits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// `NAME=VALUE`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceNode {
    /// In the container.
    pub path: String,
    /// Path on the node; `None`: the same path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `b`, `c`, `u` or `p`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Subset of `rwm`; absent or empty: all of them; `none`: none of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub fs_type: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hook {
    pub hook_name: String,
    pub path: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// `NAME=VALUE`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetDevice {
    /// On the node.
    pub host_interface_name: String,
    /// In the container.
    pub name: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IntelRdt {
    #[serde(rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schemata: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable_monitoring: Option<bool>,
}

nodedock_base::worded! {
    /// A version of the CDI specification that brought a field of the host.
    Version {
        V0_3_0 = "0.3.0",
        V0_4_0 = "0.4.0",
        V0_5_0 = "0.5.0",
        V0_7_0 = "0.7.0",
        V1_1_0 = "1.1.0",
    }
}

impl Spec {
    /// Returns the lowest version that has every feature of the spec. Runtimes refuse unknown versions (podman 4.3 supports
    /// up to 0.5.0), so the lowest works with most of them.
    pub fn required_version(&self) -> Version {
        let devices = self.devices.iter();
        let versions = devices.map(|device| {
            name_version(&device.name).max(device.container_edits.required_version())
        });
        versions.fold(self.container_edits.required_version(), Version::max)
    }
}

fn name_version(name: &str) -> Version {
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        Version::V0_3_0
    } else {
        Version::V0_5_0
    }
}

impl ContainerEdits {
    fn required_version(&self) -> Version {
        let rdt = self.intel_rdt.as_ref();
        let has_new_fields =
            |rdt: &IntelRdt| rdt.schemata.is_some() || rdt.enable_monitoring.is_some();
        let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if !self.net_devices.is_empty() || rdt.is_some_and(has_new_fields) {
            return Version::V1_1_0;
        }
        if rdt.is_some() || !self.additional_gids.is_empty() {
            return Version::V0_7_0;
        }
        if self
            .device_nodes
            .iter()
            .any(|node| is_given(&node.host_path))
        {
            return Version::V0_5_0;
        }
        if self.mounts.iter().any(|mount| is_given(&mount.fs_type)) {
            return Version::V0_4_0;
        }
        Version::V0_3_0
    }
}
