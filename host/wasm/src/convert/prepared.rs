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
    let guest::PreparedClaim {
        devices,
        edits: common,
        annotations,
        memo,
    } = claim;
    let prepared = answer::PreparedClaim {
        devices: devices.into_iter().map(prepared_device).collect(),
        edits: edits(common),
        annotations: labels(annotations),
        memo,
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
    let guest::PreparedDevice {
        requests,
        pool,
        device,
        share_id,
        edits: own,
        status: reported,
    } = device;
    answer::PreparedDevice {
        requests,
        pool,
        device,
        share_id,
        edits: edits(own),
        status: reported.map(status),
    }
}

fn edits(edits: guest::ContainerEdits) -> Edits {
    let guest::ContainerEdits {
        env,
        device_nodes,
        mounts,
        net_devices,
        hooks,
        additional_gids,
        intel_rdt: rdt,
    } = edits;
    Edits {
        env: labels(env),
        device_nodes: device_nodes.into_iter().map(device_node).collect(),
        mounts: mounts.into_iter().map(mount).collect(),
        net_devices: net_devices.into_iter().map(net_device).collect(),
        hooks: hooks.into_iter().map(hook).collect(),
        additional_gids,
        intel_rdt: rdt.map(intel_rdt),
    }
}

fn net_device(device: guest::NetDevice) -> NetDevice {
    let guest::NetDevice {
        host_interface,
        container_interface,
    } = device;
    NetDevice {
        host_interface,
        container_interface,
    }
}

fn mount(mount: guest::Mount) -> Mount {
    let guest::Mount {
        host_path,
        container_path,
        options,
        fs_type,
    } = mount;
    Mount {
        host_path,
        container_path,
        options,
        fs_type,
    }
}

fn intel_rdt(rdt: guest::IntelRdt) -> IntelRdt {
    let guest::IntelRdt {
        clos_id,
        schemata,
        enable_monitoring,
    } = rdt;
    IntelRdt {
        clos_id,
        schemata,
        enable_monitoring,
    }
}

fn device_node(node: guest::DeviceNode) -> DeviceNode {
    let guest::DeviceNode {
        path,
        host_path,
        kind,
        major,
        minor,
        access,
        file_mode,
        uid,
        gid,
    } = node;
    let letters = [
        (guest::NodeAccess::READ, 'r'),
        (guest::NodeAccess::WRITE, 'w'),
        (guest::NodeAccess::MKNOD, 'm'),
    ];
    let given = letters
        .into_iter()
        .filter(|(right, _)| access.contains(*right));
    DeviceNode {
        path,
        host_path,
        kind: kind.map(node_kind),
        major,
        minor,
        permissions: given.map(|(_, letter)| letter).collect(),
        file_mode,
        uid,
        gid,
    }
}

fn hook(hook: guest::Hook) -> Hook {
    let guest::Hook {
        stage,
        path,
        args,
        env,
        timeout_seconds,
    } = hook;
    // The names of CDI (OCI runtime specification).
    let stage = match stage {
        guest::HookStage::Prestart => "prestart",
        guest::HookStage::CreateRuntime => "createRuntime",
        guest::HookStage::CreateContainer => "createContainer",
        guest::HookStage::StartContainer => "startContainer",
        guest::HookStage::Poststart => "poststart",
        guest::HookStage::Poststop => "poststop",
    };
    Hook {
        stage: stage.to_owned(),
        path,
        args,
        env: labels(env),
        timeout_seconds,
    }
}

fn status(status: guest::DeviceStatus) -> answer::DeviceStatus {
    let guest::DeviceStatus {
        conditions,
        data,
        network: reported,
        attributes: given,
    } = status;
    answer::DeviceStatus {
        status: DeviceStatus {
            conditions: conditions.into_iter().map(condition).collect(),
            data,
            network: reported.map(network),
            ..DeviceStatus::default()
        },
        attributes: attributes(given),
    }
}

fn condition(condition: guest::Condition) -> Condition {
    let guest::Condition {
        kind,
        status,
        reason,
        message,
    } = condition;
    Condition {
        kind,
        status: match status {
            guest::ConditionStatus::True => Some(true),
            guest::ConditionStatus::False => Some(false),
            guest::ConditionStatus::Unknown => None,
        },
        reason,
        message,
    }
}

fn network(network: guest::NetworkData) -> NetworkData {
    let guest::NetworkData {
        interface_name,
        ips,
        hardware_address,
    } = network;
    NetworkData {
        interface_name,
        ips,
        hardware_address,
    }
}
