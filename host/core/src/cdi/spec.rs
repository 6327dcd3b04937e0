//! CDI specs as in files (tags.cncf.io/container-device-interface, 0.3.0 to 1.1.0), with the fields that the host writes, and the version
//! that a spec needs.

use nodedock_model::{CdiVersion, Edits};
use serde::{Deserialize, Serialize};

/// A file's content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    pub devices: Vec<Device>,
    /// Edits for every container that uses any of the devices.
    #[serde(skip_serializing_if = "Edits::is_empty")]
    pub container_edits: Edits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    pub name: String,
    pub container_edits: Edits,
}

impl Spec {
    /// Returns the lowest version that has every feature of the spec. Runtimes refuse unknown versions (podman 4.3 supports
    /// up to 0.5.0), so the lowest works with most of them.
    pub fn required_version(&self) -> CdiVersion {
        let devices = self.devices.iter();
        let versions = devices
            .map(|device| name_version(&device.name).max(device.container_edits.cdi_version()));
        versions.fold(self.container_edits.cdi_version(), CdiVersion::max)
    }
}

fn name_version(name: &str) -> CdiVersion {
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        CdiVersion::V0_3_0
    } else {
        CdiVersion::V0_5_0
    }
}
