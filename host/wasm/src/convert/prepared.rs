//! A claim as a driver prepared it. Whether its edits are granted, and true on this node, is checked by `edits`.

use super::inventory::attributes;
use super::{Checked, Refusal, labels, node_kind};
use crate::bindings::types as guest;
use nodedock_base::printable::cut;
use nodedock_model::{
    Condition, DeviceNode, DeviceStatus, DriverClaim, DriverName, Edits, Hook, IntelRdt, Mount,
    NetDevice, NetworkData, PreparedClaim, PreparedDevice, answer,
};

pub(in super::super) fn prepared_claim(
    driver: &DriverName,
    asked: &DriverClaim,
    claim: guest::PreparedClaim,
) -> Checked<PreparedClaim> {
    let prepared = answer::PreparedClaim {
        devices: claim.devices.into_iter().map(prepared_device).collect(),
        edits: edits(claim.edits),
        annotations: labels(claim.annotations),
        memo: claim.memo,
    };
    let prepared = answer::prepared_claim(Some(driver), prepared)?;
    for device in &prepared.devices {
        allocated(asked, device).map_err(|why| {
            Refusal::new(format!("device {}/{}: {why}", device.pool, device.device))
        })?;
    }
    Ok(prepared)
}

/// Checks that a device, and the requests that it is for, are allocated to the claim.
fn allocated(asked: &DriverClaim, device: &PreparedDevice) -> Result<(), String> {
    let allocated = asked.devices.iter().filter(|allocated| {
        (&allocated.pool, &allocated.device, &allocated.share_id)
            == (&device.pool, &device.device, &device.share_id)
    });
    let known: Vec<&str> = allocated.map(|device| device.base_request()).collect();
    if known.is_empty() {
        return Err("it is not allocated to the claim".to_owned());
    }
    let is_stranger = |request: &&String| !known.contains(&request.as_str());
    match device.requests.iter().find(is_stranger) {
        None => Ok(()),
        Some(stranger) => Err(format!(
            "request {:?} is not one that it is allocated for ({})",
            cut(stranger, 64),
            known.join(", ")
        )),
    }
}

fn prepared_device(device: guest::PreparedDevice) -> answer::PreparedDevice {
    answer::PreparedDevice {
        requests: device.requests,
        pool: device.pool,
        device: device.device,
        share_id: device.share_id,
        edits: edits(device.edits),
        status: device.status.map(status),
    }
}

fn edits(edits: guest::ContainerEdits) -> Edits {
    let net_device = |device: guest::NetDevice| NetDevice {
        host_interface: device.host_interface,
        container_interface: device.container_interface,
    };
    let mount = |mount: guest::Mount| Mount {
        host_path: mount.host_path,
        container_path: mount.container_path,
        options: mount.options,
        fs_type: mount.fs_type,
    };
    let intel_rdt = |rdt: guest::IntelRdt| IntelRdt {
        clos_id: rdt.clos_id,
        schemata: rdt.schemata,
        enable_monitoring: rdt.enable_monitoring,
    };
    Edits {
        env: labels(edits.env),
        device_nodes: edits.device_nodes.into_iter().map(device_node).collect(),
        mounts: edits.mounts.into_iter().map(mount).collect(),
        net_devices: edits.net_devices.into_iter().map(net_device).collect(),
        hooks: edits.hooks.into_iter().map(hook).collect(),
        additional_gids: edits.additional_gids,
        intel_rdt: edits.intel_rdt.map(intel_rdt),
    }
}

fn device_node(node: guest::DeviceNode) -> DeviceNode {
    let letters = [
        (guest::NodeAccess::READ, 'r'),
        (guest::NodeAccess::WRITE, 'w'),
        (guest::NodeAccess::MKNOD, 'm'),
    ];
    let given = letters
        .into_iter()
        .filter(|(right, _)| node.access.contains(*right));
    DeviceNode {
        path: node.path,
        host_path: node.host_path,
        kind: node.kind.map(node_kind),
        major: node.major,
        minor: node.minor,
        permissions: given.map(|(_, letter)| letter).collect(),
        file_mode: node.file_mode,
        uid: node.uid,
        gid: node.gid,
    }
}

fn hook(hook: guest::Hook) -> Hook {
    // The names of CDI (OCI runtime specification).
    let stage = match hook.stage {
        guest::HookStage::Prestart => "prestart",
        guest::HookStage::CreateRuntime => "createRuntime",
        guest::HookStage::CreateContainer => "createContainer",
        guest::HookStage::StartContainer => "startContainer",
        guest::HookStage::Poststart => "poststart",
        guest::HookStage::Poststop => "poststop",
    };
    Hook {
        stage: stage.to_owned(),
        path: hook.path,
        args: hook.args,
        env: labels(hook.env),
        timeout_seconds: hook.timeout_seconds,
    }
}

fn status(status: guest::DeviceStatus) -> answer::DeviceStatus {
    let condition = |condition: guest::Condition| Condition {
        kind: condition.kind,
        status: match condition.status {
            guest::ConditionStatus::True => Some(true),
            guest::ConditionStatus::False => Some(false),
            guest::ConditionStatus::Unknown => None,
        },
        reason: condition.reason,
        message: condition.message,
    };
    let network = |network: guest::NetworkData| NetworkData {
        interface_name: network.interface_name,
        ips: network.ips,
        hardware_address: network.hardware_address,
    };
    answer::DeviceStatus {
        status: DeviceStatus {
            conditions: status.conditions.into_iter().map(condition).collect(),
            data: status.data,
            network: status.network.map(network),
            ..DeviceStatus::default()
        },
        attributes: attributes(status.attributes),
    }
}
