//! The first line of this daemon's files, which identifies the claim. It is a YAML comment, because CDI annotations need version 0.6.0,
//! and runtimes in use refuse that (`docs/decisions/0002-claim-identity-in-cdi-files.md`).

use serde::{Deserialize, Serialize};

use nodedock_model::{
    AllocatedDevice, ClaimRecord, DriverName, Hold, KubeletHold, NetworkData, ObjectRef,
    POD_CLAIM_NAME, PreparedClaim, PreparedDevice,
};

/// The beginning of each file of this daemon.
pub(super) const MARK: &str = "# nodedock.dev/claim: ";
/// The mark and the beginning of the identity, which a directory's mark replaces.
pub(super) const OPENING: &str = "# nodedock.dev/claim: {";
/// The beginning of a file of any daemon.
pub(super) const DAEMON_OPENING: &str = "# nodedock.dev/claim: {\"daemon\":";
/// Version of the identity's JSON.
pub(super) const IDENTITY_VERSION: u32 = 1;

/// The claim of the file, with the data to rebuild a lost checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    pub version: u32,
    #[serde(flatten)]
    pub claim: ObjectRef,
    pub driver: DriverName,
    /// Version of the driver that prepared it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub driver_version: String,
    pub boot_id: String,
    /// Pods that used the claim when the file was written.
    pub pods: Vec<ObjectRef>,
    /// Hold of a kubelet that used the driver's part when the file was written, without its consumers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletHold>,
    /// One for each device of the spec, in its order.
    pub devices: Vec<IdentityDevice>,
    /// The allocation from this driver.
    pub allocated: Vec<AllocatedDevice>,
    /// Metadata generation, as in the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_generation: Option<u64>,
    /// The pod's own name for a claim from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
    /// Holds, as in the record, if they are more than the allocated devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<Hold>,
}

/// The prepared device of a device in the spec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IdentityDevice {
    pub requests: Vec<String>,
    pub pool: nodedock_model::PoolName,
    pub device: nodedock_model::DeviceName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// The device has edits in the spec only because a device must have some.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_edits: bool,
    /// Attributes, as in the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<String>,
    /// Network data for the metadata file, as in the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkData>,
}

impl Identity {
    /// Returns the identity of the file for the edits of a driver.
    pub(super) fn of(record: &ClaimRecord, driver: &DriverName, prepared: &PreparedClaim) -> Self {
        let part = record.drivers.get(driver);
        let by = part.and_then(|part| part.by.as_ref());
        let kubelet = record
            .kubelet
            .as_ref()
            .filter(|_| part.is_some_and(|part| part.kubelet));
        // Consumers change during the life of a claim, as does whether a kubelet requested it: each would cause a write of the file.
        let kubelet = kubelet.map(|held| KubeletHold {
            consumers: Vec::new(),
            early: false,
            ..held.clone()
        });
        Self {
            version: IDENTITY_VERSION,
            claim: record.id.clone(),
            driver: driver.clone(),
            driver_version: by.map(|by| by.version.clone()).unwrap_or_default(),
            boot_id: record.boot_id.clone(),
            pods: record.pods.values().cloned().collect(),
            kubelet,
            devices: prepared
                .devices
                .iter()
                .filter_map(IdentityDevice::of)
                .collect(),
            allocated: record.driver_claim(driver).devices,
            metadata_generation: Some(prepared.metadata_generation)
                .filter(|generation| *generation > 0),
            pod_claim_name: record.annotations.get(POD_CLAIM_NAME).cloned(),
            holds: holds(record, driver),
        }
    }

    /// Parses a file's first line. `None`: the line is this daemon's, and not readable by this release.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let identity: Self = serde_json::from_str(line.strip_prefix(MARK)?).ok()?;
        (identity.version == IDENTITY_VERSION).then_some(identity)
    }
}

impl IdentityDevice {
    fn of(device: &PreparedDevice) -> Option<Self> {
        Some(Self {
            requests: device.requests.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
            no_edits: device.access.edits()?.is_empty(),
            attributes: device.attributes.clone(),
            network: device
                .status
                .as_ref()
                .and_then(|status| status.network.clone()),
        })
    }
}

fn holds(record: &ClaimRecord, driver: &DriverName) -> Vec<Hold> {
    let holds: Vec<_> = record
        .holds
        .iter()
        .filter(|hold| hold.is_of(driver))
        .cloned()
        .collect();
    let is_more = holds
        .iter()
        .any(|hold| hold.driver.is_some() || !hold.uses.is_empty());
    if is_more { holds } else { Vec::new() }
}
