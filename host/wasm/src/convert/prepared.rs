//! A claim as a driver prepared it. Whether its edits are granted, and true on this node, is checked by `edits`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::inventory::attributes;
use super::{
    Checked, at_most, labels, line, name, node_kind, non_empty_line, refuse, shown, twice, within,
};
use crate::Limit;
use crate::bindings::types as guest;
use nodedock_model::limit::{
    ALLOCATED_DEVICES_MAX, ATTRIBUTES_MAX, EDITS_MAX, ENV_VALUE_BYTES_MAX, LABEL_VALUE_BYTES_MAX,
    MEMO_BYTES_MAX, PATH_BYTES_MAX, STATUS_CONDITIONS_MAX, STATUS_DATA_BYTES_MAX, STATUS_IPS_MAX,
};
use nodedock_model::rule::{is_env_name, is_interface_name, is_plain_path};
use nodedock_model::{
    Condition, DeviceAccess, DeviceName, DeviceNode, DeviceStatus, DriverClaim, DriverName, Edits,
    Hook, IntelRdt, Mount, NetDevice, NetworkData, PoolName, PreparedClaim, PreparedDevice,
    is_label_key,
};

/// Bytes of a condition's kind and reason (Kubernetes, `metav1.Condition`).
const CONDITION_KIND_BYTES_MAX: usize = 316;
/// Bytes of an interface's name and hardware address in a status (`resource.k8s.io/v1`).
const INTERFACE_BYTES_MAX: usize = 256;
const HARDWARE_ADDRESS_BYTES_MAX: usize = 128;
/// Bytes of a mount option or a file system's name.
const WORD_BYTES_MAX: usize = 256;

pub(in super::super) fn prepared_claim(
    driver: &DriverName,
    asked: &DriverClaim,
    claim: guest::PreparedClaim,
) -> Checked<PreparedClaim> {
    at_most("devices", claim.devices.len(), ALLOCATED_DEVICES_MAX)?;
    within(
        Limit::Memo,
        "bytes of memo",
        claim.memo.len(),
        MEMO_BYTES_MAX,
    )?;
    let mut devices: Vec<PreparedDevice> = Vec::with_capacity(claim.devices.len());
    for device in claim.devices {
        let place = format!(
            "pool {} device {}",
            shown(&device.pool),
            shown(&device.device)
        );
        let device = prepared_device(driver, asked, device).map_err(|why| why.at(&place))?;
        let same = |other: &PreparedDevice| {
            (&other.pool, &other.device, &other.share_id)
                == (&device.pool, &device.device, &device.share_id)
        };
        if devices.iter().any(same) {
            return refuse(format!("{place} occurs twice"));
        }
        devices.push(device);
    }
    Ok(PreparedClaim {
        devices,
        edits: edits(claim.edits).map_err(|why| why.at("edits of the claim"))?,
        annotations: annotations(claim.annotations)?,
        memo: claim.memo,
        metadata_generation: 0,
    })
}

/// Annotations reach the container runtime, which would inject devices of any driver for those of CDI.
fn annotations(entries: Vec<guest::KeyValue>) -> Checked<BTreeMap<String, String>> {
    let annotations = labels("annotations", entries)?;
    if let Some(key) = annotations.keys().find(|key| !is_label_key(key)) {
        return refuse(format!("{} is not the name of an annotation", shown(key)));
    }
    if let Some(key) = annotations
        .keys()
        .find(|key| key.starts_with("cdi.k8s.io/"))
    {
        return refuse(format!(
            "annotation {key}: devices are injected by edits only"
        ));
    }
    Ok(annotations)
}

fn prepared_device(
    driver: &DriverName,
    asked: &DriverClaim,
    device: guest::PreparedDevice,
) -> Checked<PreparedDevice> {
    let pool = name(PoolName::new(&device.pool))?;
    let device_name = name(DeviceName::new(&device.device))?;
    let mut allocated = asked.devices.iter().filter(|allocated| {
        allocated.pool == pool
            && allocated.device == device_name
            && allocated.share_id == device.share_id
    });
    if allocated.clone().next().is_none() {
        return refuse("it is not allocated to the claim");
    }
    at_most("requests", device.requests.len(), ALLOCATED_DEVICES_MAX)?;
    let stranger = device
        .requests
        .iter()
        .find(|request| !allocated.clone().any(|a| a.base_request() == **request));
    if let Some(stranger) = stranger {
        let known: Vec<&str> = allocated.by_ref().map(|a| a.base_request()).collect();
        return refuse(format!(
            "request {} is not one that it is allocated for ({})",
            shown(stranger),
            known.join(", ")
        ));
    }
    Ok(PreparedDevice {
        requests: device.requests,
        pool,
        device: device_name,
        share_id: device.share_id,
        access: DeviceAccess::Edits(edits(device.edits)?),
        status: device
            .status
            .map(|given| status(driver, given))
            .transpose()
            .map_err(|why| why.at("status"))?,
        attributes: None,
    })
}

fn edits(edits: guest::ContainerEdits) -> Checked<Edits> {
    at_most("additional groups", edits.additional_gids.len(), EDITS_MAX)?;
    Ok(Edits {
        env: each("env", edits.env, env)?,
        device_nodes: each("device nodes", edits.device_nodes, device_node)?,
        mounts: each("mounts", edits.mounts, mount)?,
        net_devices: net_devices(edits.net_devices)?,
        hooks: each("hooks", edits.hooks, hook)?,
        additional_gids: edits.additional_gids,
        intel_rdt: edits.intel_rdt.map(intel_rdt).transpose()?,
    })
}

fn each<A, B>(what: &str, entries: Vec<A>, convert: fn(A) -> Checked<B>) -> Checked<Vec<B>> {
    at_most(what, entries.len(), EDITS_MAX)?;
    let convert = |(index, entry)| convert(entry).map_err(|why| why.at(format!("{what}[{index}]")));
    entries.into_iter().enumerate().map(convert).collect()
}

fn env(guest::KeyValue { key, value }: guest::KeyValue) -> Checked<(String, String)> {
    if !is_env_name(&key) {
        return refuse(format!(
            "{} is not the name of an environment variable",
            shown(&key)
        ));
    }
    let value = line(&format!("the value of {key}"), value, ENV_VALUE_BYTES_MAX)?;
    Ok((key, value))
}

/// Absolute and plain: no empty, `.` or `..` segments, no control characters, no end of a list.
fn path(what: &str, path: String) -> Checked<String> {
    let path = line(what, path, PATH_BYTES_MAX)?;
    if is_plain_path(&path) {
        return Ok(path);
    }
    refuse(format!(
        "{what} {} is not an absolute, plain path",
        shown(&path)
    ))
}

fn device_node(node: guest::DeviceNode) -> Checked<DeviceNode> {
    let letters = [
        (guest::NodeAccess::READ, 'r'),
        (guest::NodeAccess::WRITE, 'w'),
        (guest::NodeAccess::MKNOD, 'm'),
    ];
    let given = letters
        .into_iter()
        .filter(|(right, _)| node.access.contains(*right));
    let permissions: String = given.map(|(_, letter)| letter).collect();
    if permissions.is_empty() {
        return refuse("access has none of read, write and mknod");
    }
    if let Some(mode) = node.file_mode.filter(|mode| *mode > 0o777) {
        return refuse(format!("file mode {mode:o} has more than permissions"));
    }
    Ok(DeviceNode {
        path: path("the path", node.path)?,
        host_path: node
            .host_path
            .map(|text| path("the host path", text))
            .transpose()?,
        kind: node.kind.map(node_kind),
        major: node.major,
        minor: node.minor,
        permissions,
        file_mode: node.file_mode,
        uid: node.uid,
        gid: node.gid,
    })
}

fn mount(mount: guest::Mount) -> Checked<Mount> {
    at_most("options", mount.options.len(), EDITS_MAX)?;
    let option = |text| non_empty_line("an option", text, WORD_BYTES_MAX);
    Ok(Mount {
        host_path: path("the host path", mount.host_path)?,
        container_path: path("the container path", mount.container_path)?,
        options: mount
            .options
            .into_iter()
            .map(option)
            .collect::<Checked<_>>()?,
        fs_type: mount
            .fs_type
            .map(|text| line("the file system", text, WORD_BYTES_MAX))
            .transpose()?,
    })
}

/// An interface is moved once, and two cannot have one name: CDI libraries refuse such files.
fn net_devices(devices: Vec<guest::NetDevice>) -> Checked<Vec<NetDevice>> {
    let devices = each("net devices", devices, net_device)?;
    let on_node = twice(devices.iter().map(|device| device.host_interface.as_str()));
    let in_container = twice(
        devices
            .iter()
            .map(|device| device.container_interface.as_str()),
    );
    match on_node.or(in_container) {
        Some(again) => refuse(format!("net devices: interface {again} occurs twice")),
        None => Ok(devices),
    }
}

fn net_device(device: guest::NetDevice) -> Checked<NetDevice> {
    Ok(NetDevice {
        host_interface: interface(device.host_interface)?,
        container_interface: interface(device.container_interface)?,
    })
}

fn interface(text: String) -> Checked<String> {
    if is_interface_name(&text) {
        return Ok(text);
    }
    refuse(format!(
        "{} is not the name of a network interface",
        shown(&text)
    ))
}

fn hook(hook: guest::Hook) -> Checked<Hook> {
    // The names of CDI (OCI runtime specification).
    let stage = match hook.stage {
        guest::HookStage::Prestart => "prestart",
        guest::HookStage::CreateRuntime => "createRuntime",
        guest::HookStage::CreateContainer => "createContainer",
        guest::HookStage::StartContainer => "startContainer",
        guest::HookStage::Poststart => "poststart",
        guest::HookStage::Poststop => "poststop",
    };
    at_most("arguments", hook.args.len(), EDITS_MAX)?;
    let argument = |text| line("an argument", text, ENV_VALUE_BYTES_MAX);
    Ok(Hook {
        stage: stage.to_owned(),
        path: path("the path", hook.path)?,
        args: hook
            .args
            .into_iter()
            .map(argument)
            .collect::<Checked<_>>()?,
        env: each("env", hook.env, env)?,
        timeout_seconds: hook.timeout_seconds,
    })
}

fn intel_rdt(rdt: guest::IntelRdt) -> Checked<IntelRdt> {
    at_most("schemata", rdt.schemata.len(), EDITS_MAX)?;
    let clos = |text: String| {
        let plain = text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if text.is_empty() || text.len() > 255 || !plain || text.starts_with('.') {
            return refuse(format!(
                "class of service {} is not a plain name",
                shown(&text)
            ));
        }
        Ok(text)
    };
    let schema = |text| non_empty_line("a line of schemata", text, LABEL_VALUE_BYTES_MAX);
    Ok(IntelRdt {
        clos_id: rdt.clos_id.map(clos).transpose()?,
        schemata: rdt
            .schemata
            .into_iter()
            .map(schema)
            .collect::<Checked<_>>()?,
        enable_monitoring: rdt.enable_monitoring,
    })
}

fn status(driver: &DriverName, status: guest::DeviceStatus) -> Checked<DeviceStatus> {
    at_most("conditions", status.conditions.len(), STATUS_CONDITIONS_MAX)?;
    at_most("attributes", status.attributes.len(), ATTRIBUTES_MAX)?;
    let condition = |condition: guest::Condition| {
        Ok(Condition {
            kind: non_empty_line(
                "a condition's kind",
                condition.kind,
                CONDITION_KIND_BYTES_MAX,
            )?,
            status: match condition.status {
                guest::ConditionStatus::True => Some(true),
                guest::ConditionStatus::False => Some(false),
                guest::ConditionStatus::Unknown => None,
            },
            reason: line(
                "a condition's reason",
                condition.reason,
                LABEL_VALUE_BYTES_MAX,
            )?,
            message: line(
                "a condition's message",
                condition.message,
                LABEL_VALUE_BYTES_MAX,
            )?,
        })
    };
    Ok(DeviceStatus {
        conditions: status
            .conditions
            .into_iter()
            .map(condition)
            .collect::<Checked<_>>()?,
        data: status.data.map(data).transpose()?,
        network: status.network.map(network).transpose()?,
        attributes: attributes(driver, status.attributes)?,
    })
}

fn data(text: String) -> Checked<String> {
    within(
        Limit::AnswerBytes,
        "bytes of data",
        text.len(),
        STATUS_DATA_BYTES_MAX,
    )?;
    match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text) {
        Ok(_) => Ok(text),
        Err(error) => refuse(format!("data is not a JSON object: {error}")),
    }
}

fn network(network: guest::NetworkData) -> Checked<NetworkData> {
    at_most("addresses", network.ips.len(), STATUS_IPS_MAX)?;
    if let Some(wrong) = network.ips.iter().find(|ip| !is_cidr(ip)) {
        return refuse(format!(
            "{} is not an address such as 192.0.2.1/24",
            shown(wrong)
        ));
    }
    Ok(NetworkData {
        interface_name: line(
            "the interface's name",
            network.interface_name,
            INTERFACE_BYTES_MAX,
        )?,
        ips: network.ips,
        hardware_address: line(
            "the hardware address",
            network.hardware_address,
            HARDWARE_ADDRESS_BYTES_MAX,
        )?,
    })
}

fn is_cidr(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else {
        return false;
    };
    let bits = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    length.len() <= 3 && length.parse::<u8>().is_ok_and(|length| length <= bits)
}
