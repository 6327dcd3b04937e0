//! Rebuilds claim records from this daemon's files, after the checkpoint was lost. A file does not contain all of a record: the memo,
//! the driver's digest, the claim's configs and the timeline are missing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::directory::OurFile;
use super::identity::{Identity, IdentityDevice};
use super::spec::{ContainerEdits, DeviceNode, Spec};
use crate::device_metadata::POD_CLAIM_NAME;
use nodedock_model::{
    self, ClaimRecord, ClaimState, DeviceAccess, DeviceStatus, DriverKind, DriverPart, Edits,
    NodeKind, PreparedBy, PreparedClaim, PreparedDevice, Uid,
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
    #[error("its spec has an entry that this daemon does not write: {0}")]
    Edits(String),
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
    let new = || {
        ClaimRecord::new(
            identity.claim.clone(),
            ClaimState::Prepared,
            &identity.boot_id,
        )
    };
    let record = claims.entry(identity.claim.uid.clone()).or_insert_with(new);
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
    let devices = identity.devices.iter().zip(&spec.devices);
    let devices =
        devices.map(|(device, in_spec)| prepared_device(device, &in_spec.container_edits));
    let prepared = PreparedClaim {
        devices: devices.collect::<Result<_, _>>()?,
        edits: edits_of(&spec.container_edits)?,
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

fn prepared_device(
    device: &IdentityDevice,
    edits: &ContainerEdits,
) -> Result<PreparedDevice, RebuildError> {
    let edits = if device.no_edits {
        Edits::default()
    } else {
        edits_of(edits)?
    };
    Ok(PreparedDevice {
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
    })
}

fn edits_of(edits: &ContainerEdits) -> Result<Edits, RebuildError> {
    Ok(Edits {
        env: edits
            .env
            .iter()
            .map(|entry| env_of(entry))
            .collect::<Result<_, _>>()?,
        device_nodes: edits
            .device_nodes
            .iter()
            .map(node_of)
            .collect::<Result<_, _>>()?,
        mounts: edits.mounts.iter().map(mount_of).collect(),
        net_devices: edits.net_devices.iter().map(net_device_of).collect(),
        hooks: edits.hooks.iter().map(hook_of).collect::<Result<_, _>>()?,
        additional_gids: edits.additional_gids.clone(),
        intel_rdt: edits.intel_rdt.as_ref().map(rdt_of),
    })
}

fn unknown(what: impl Into<String>) -> RebuildError {
    RebuildError::Edits(what.into())
}

fn env_of(entry: &str) -> Result<(String, String), RebuildError> {
    let (name, value) = entry.split_once('=').ok_or_else(|| unknown(entry))?;
    Ok((name.to_owned(), value.to_owned()))
}

fn node_of(node: &DeviceNode) -> Result<nodedock_model::DeviceNode, RebuildError> {
    let number = |number: Option<i64>| number.map(u32::try_from).transpose();
    let out_of_range = |_| unknown(format!("the number of {}", node.path));
    Ok(nodedock_model::DeviceNode {
        path: node.path.clone(),
        host_path: node.host_path.clone(),
        kind: node.kind.as_deref().map(kind_of).transpose()?,
        major: number(node.major).map_err(out_of_range)?,
        minor: number(node.minor).map_err(out_of_range)?,
        permissions: node
            .permissions
            .clone()
            .filter(|permissions| permissions != "none")
            .unwrap_or_default(),
        file_mode: node.file_mode,
        uid: node.uid,
        gid: node.gid,
    })
}

fn kind_of(letter: &str) -> Result<NodeKind, RebuildError> {
    match letter {
        "c" => Ok(NodeKind::Character),
        "b" => Ok(NodeKind::Block),
        "p" => Ok(NodeKind::Fifo),
        other => Err(unknown(format!("the node type {other}"))),
    }
}

fn mount_of(mount: &super::Mount) -> nodedock_model::Mount {
    nodedock_model::Mount {
        host_path: mount.host_path.clone(),
        container_path: mount.container_path.clone(),
        options: mount.options.clone(),
        fs_type: mount.fs_type.clone(),
    }
}

fn net_device_of(device: &super::NetDevice) -> nodedock_model::NetDevice {
    nodedock_model::NetDevice {
        host_interface: device.host_interface_name.clone(),
        container_interface: device.name.clone(),
    }
}

fn hook_of(hook: &super::Hook) -> Result<nodedock_model::Hook, RebuildError> {
    let timeout = hook.timeout.map(u32::try_from).transpose();
    Ok(nodedock_model::Hook {
        stage: hook.hook_name.clone(),
        path: hook.path.clone(),
        args: hook.args.clone(),
        env: hook
            .env
            .iter()
            .map(|entry| env_of(entry))
            .collect::<Result<_, _>>()?,
        timeout_seconds: timeout.map_err(|_| unknown(format!("the timeout of {}", hook.path)))?,
    })
}

fn rdt_of(rdt: &super::IntelRdt) -> nodedock_model::IntelRdt {
    nodedock_model::IntelRdt {
        clos_id: rdt.clos_id.clone(),
        schemata: rdt.schemata.clone().unwrap_or_default(),
        enable_monitoring: rdt.enable_monitoring.unwrap_or_default(),
    }
}
