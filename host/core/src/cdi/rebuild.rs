//! Rebuilds claim records from this daemon's files, after the checkpoint was lost. A file does not contain all of a record: the memo,
//! the driver's digest, the claim's configs and the timeline are missing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::directory::OurFile;
use super::identity::{Identity, IdentityDevice};
use super::spec::Spec;
use nodedock_model::{
    self, ClaimRecord, ClaimState, DeviceAccess, DeviceStatus, DriverKind, DriverPart, Edits,
    POD_CLAIM_NAME, PreparedBy, PreparedClaim, PreparedDevice, Uid,
};

/// The rebuilt records.
#[derive(Debug, Default)]
pub struct Rebuilt {
    /// Claims by UID; a claim of several drivers has a part for each.
    pub claims: BTreeMap<Uid, ClaimRecord>,
    /// Files without enough data, with the reason.
    pub unusable: Vec<(String, RebuildError)>,
}

/// Why a file has no record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RebuildError {
    #[error("its first line is not an identity that this release reads")]
    Identity,
    #[error("its spec is not readable: {0}")]
    Spec(String),
    #[error("its spec has {spec} devices, and its identity {identity}")]
    Devices { spec: usize, identity: usize },
}

/// Rebuilds records from this daemon's files. Each is `prepared`; the daemon then treats it like one in the checkpoint.
pub fn rebuild(files: impl IntoIterator<Item = OurFile>) -> Rebuilt {
    let mut rebuilt = Rebuilt::default();
    for file in files {
        match part_of(&file) {
            Ok((identity, part)) => add(&mut rebuilt.claims, identity, part),
            Err(error) => rebuilt.unusable.push((file.name, error)),
        }
    }
    rebuilt
}

fn add(claims: &mut BTreeMap<Uid, ClaimRecord>, identity: Identity, part: DriverPart) {
    let record = claims.entry(identity.claim.uid.clone()).or_insert_with(|| {
        ClaimRecord::new(
            identity.claim.clone(),
            ClaimState::Prepared,
            &identity.boot_id,
        )
    });
    record
        .pods
        .extend(identity.pods.into_iter().map(|pod| (pod.uid.clone(), pod)));
    record.allocation.devices.extend(identity.allocated);
    record.holds.extend(identity.holds);
    record.annotations.extend(
        identity
            .pod_claim_name
            .map(|name| (POD_CLAIM_NAME.to_owned(), name)),
    );
    let part = DriverPart {
        kubelet: identity.kubelet.is_some(),
        ..part
    };
    record.kubelet = record.kubelet.take().or(identity.kubelet);
    record.drivers.insert(identity.driver, Box::new(part));
}

fn part_of(file: &OurFile) -> Result<(Identity, DriverPart), RebuildError> {
    let identity = file.identity.clone().ok_or(RebuildError::Identity)?;
    let spec: Spec =
        serde_json::from_str(&file.spec).map_err(|error| RebuildError::Spec(error.to_string()))?;
    if spec.devices.len() != identity.devices.len() {
        return Err(RebuildError::Devices {
            spec: spec.devices.len(),
            identity: identity.devices.len(),
        });
    }
    let devices = identity.devices.iter().zip(spec.devices);
    let devices = devices.map(|(device, in_spec)| prepared_device(device, in_spec.container_edits));
    let prepared = PreparedClaim {
        devices: devices.collect(),
        edits: spec.container_edits,
        metadata_generation: identity.metadata_generation.unwrap_or_default(),
        ..PreparedClaim::default()
    };
    let by = PreparedBy {
        kind: DriverKind::Wasm,
        version: identity.driver_version.clone(),
        digest: String::new(),
        lists: false,
    };
    Ok((
        identity,
        DriverPart {
            prepared: Some(Arc::new(prepared)),
            by: Some(by),
            ..DriverPart::default()
        },
    ))
}

fn prepared_device(device: &IdentityDevice, in_spec: Edits) -> PreparedDevice {
    let edits = match device.no_edits {
        true => Edits::default(),
        false => in_spec,
    };
    PreparedDevice {
        requests: device.requests.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share_id.clone(),
        access: DeviceAccess::Edits(edits),
        status: device.network.clone().map(|network| DeviceStatus {
            network: Some(network),
            ..DeviceStatus::default()
        }),
        attributes: device.attributes.clone(),
    }
}
