//! CDI specs as in files (tags.cncf.io/container-device-interface, 0.3.0 to 1.1.0), with the fields that the host writes, and the version
//! that a spec needs.

use nodedock_model::{Edits, IntelRdt};
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
    #[serde(skip_serializing_if = "Edits::is_empty")]
    pub container_edits: Edits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    pub name: String,
    pub container_edits: Edits,
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
        let versions = devices
            .map(|device| name_version(&device.name).max(edits_version(&device.container_edits)));
        versions.fold(edits_version(&self.container_edits), Version::max)
    }
}

fn name_version(name: &str) -> Version {
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        Version::V0_3_0
    } else {
        Version::V0_5_0
    }
}

fn edits_version(edits: &Edits) -> Version {
    let rdt = edits.intel_rdt.as_ref();
    let has_new_fields = |rdt: &IntelRdt| !rdt.schemata.is_empty() || rdt.enable_monitoring;
    if !edits.net_devices.is_empty() || rdt.is_some_and(has_new_fields) {
        return Version::V1_1_0;
    }
    if rdt.is_some() || !edits.additional_gids.is_empty() {
        return Version::V0_7_0;
    }
    let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if edits
        .device_nodes
        .iter()
        .any(|node| is_given(&node.host_path))
    {
        return Version::V0_5_0;
    }
    if edits.mounts.iter().any(|mount| is_given(&mount.fs_type)) {
        return Version::V0_4_0;
    }
    Version::V0_3_0
}
