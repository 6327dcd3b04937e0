//! The rules of the CDI libraries for specs (the Go module tags.cncf.io/container-device-interface 1.1 and the crate of
//! the same name), except for fields that the host does not write, and for the version, which the
//! renderer computes.

use std::collections::HashSet;

use super::spec::{Device, Spec};
use nodedock_model::{
    DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice, is_cdi_device_name, is_cdi_vendor_or_class,
};

/// Hooks that a runtime knows (OCI runtime specification).
const HOOK_NAMES: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];
/// Bytes of a `closID`: a directory's name in resctrl, which the libraries limit to a page.
const CLOS_ID_BYTES_MAX: usize = 4095;

/// Why a library would refuse the spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error(
        "the kind {0:?} is not VENDOR/CLASS, each a letter, then letters, digits, '-', '_' or '.', and a letter or digit at its end"
    )]
    Kind(String),
    #[error(
        "the device name {0:?} is not letters, digits, '-', '_', '.' or ':' between a letter or digit at each end"
    )]
    DeviceName(String),
    #[error("the device {0:?} occurs twice")]
    DuplicateDevice(String),
    #[error("the spec has no devices")]
    NoDevices,
    #[error("the device {0:?} has no edits")]
    NoEdits(String),
    #[error("{place}: {rule}")]
    Edits { place: String, rule: EditsError },
}

/// Why edits are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EditsError {
    #[error("a variable of the environment has no name, and the value {0:?}")]
    Env(String),
    #[error("a device node has no path")]
    NodePath,
    #[error(
        "the device node {path:?} has the permissions {permissions:?}, which are not a subset of rwm"
    )]
    Permissions { path: String, permissions: String },
    #[error("a mount lacks its host path or its container path")]
    MountPath,
    #[error(
        "the hook name {0:?} is not one of prestart, createRuntime, createContainer, startContainer, poststart, poststop"
    )]
    HookName(String),
    #[error("the hook {0:?} has no path")]
    HookPath(String),
    #[error("the closID {0:?} is not a directory name")]
    ClosId(String),
    #[error("a network device lacks a name, or two have the same: {0:?}")]
    NetDevice(String),
}

/// Refuses a spec that a CDI library would refuse, regardless of its version.
pub fn validate(spec: &Spec) -> Result<(), SpecError> {
    check_kind(&spec.kind)?;
    check_edits(&spec.container_edits).map_err(|rule| at("the spec's edits", rule))?;
    let mut names = HashSet::new();
    for device in &spec.devices {
        check_device(device)?;
        if !names.insert(device.name.as_str()) {
            return Err(SpecError::DuplicateDevice(device.name.clone()));
        }
    }
    if names.is_empty() {
        Err(SpecError::NoDevices)
    } else {
        Ok(())
    }
}

fn at(place: impl Into<String>, rule: EditsError) -> SpecError {
    SpecError::Edits {
        place: place.into(),
        rule,
    }
}

fn check_kind(kind: &str) -> Result<(), SpecError> {
    match kind.split_once('/') {
        Some((vendor, class))
            if is_cdi_vendor_or_class(vendor) && is_cdi_vendor_or_class(class) =>
        {
            Ok(())
        }
        _ => Err(SpecError::Kind(kind.to_owned())),
    }
}

fn check_device(device: &Device) -> Result<(), SpecError> {
    if !is_cdi_device_name(&device.name) {
        return Err(SpecError::DeviceName(device.name.clone()));
    }
    if device.container_edits.is_empty() {
        return Err(SpecError::NoEdits(device.name.clone()));
    }
    check_edits(&device.container_edits)
        .map_err(|rule| at(format!("the device {:?}", device.name), rule))
}

fn check_edits(edits: &Edits) -> Result<(), EditsError> {
    edits.env.iter().try_for_each(check_env)?;
    edits.device_nodes.iter().try_for_each(check_node)?;
    edits.hooks.iter().try_for_each(check_hook)?;
    edits.mounts.iter().try_for_each(check_mount)?;
    edits.intel_rdt.iter().try_for_each(check_rdt)?;
    check_net_devices(&edits.net_devices)
}

fn check_env((name, value): &(String, String)) -> Result<(), EditsError> {
    match name.is_empty() || name.starts_with('=') {
        true => Err(EditsError::Env(value.clone())),
        false => Ok(()),
    }
}

fn check_node(node: &DeviceNode) -> Result<(), EditsError> {
    if node.path.is_empty() {
        return Err(EditsError::NodePath);
    }
    let permissions = &node.permissions;
    if !permissions.bytes().all(|b| matches!(b, b'r' | b'w' | b'm')) {
        let permissions = permissions.clone();
        return Err(EditsError::Permissions {
            path: node.path.clone(),
            permissions,
        });
    }
    Ok(())
}

fn check_hook(hook: &Hook) -> Result<(), EditsError> {
    if !HOOK_NAMES.contains(&hook.stage.as_str()) {
        return Err(EditsError::HookName(hook.stage.clone()));
    }
    if hook.path.is_empty() {
        return Err(EditsError::HookPath(hook.stage.clone()));
    }
    hook.env.iter().try_for_each(check_env)
}

fn check_mount(mount: &Mount) -> Result<(), EditsError> {
    if mount.host_path.is_empty() || mount.container_path.is_empty() {
        return Err(EditsError::MountPath);
    }
    Ok(())
}

fn check_rdt(rdt: &IntelRdt) -> Result<(), EditsError> {
    let Some(id) = rdt.clos_id.as_deref() else {
        return Ok(());
    };
    if id.len() > CLOS_ID_BYTES_MAX || matches!(id, "." | "..") || id.contains(['/', '\n']) {
        return Err(EditsError::ClosId(id.chars().take(64).collect()));
    }
    Ok(())
}

fn check_net_devices(devices: &[NetDevice]) -> Result<(), EditsError> {
    let (mut on_node, mut in_container) = (HashSet::new(), HashSet::new());
    for NetDevice {
        host_interface,
        container_interface,
    } in devices
    {
        let given = !host_interface.is_empty() && !container_interface.is_empty();
        if !given || !on_node.insert(host_interface) || !in_container.insert(container_interface) {
            return Err(EditsError::NetDevice(host_interface.clone()));
        }
    }
    Ok(())
}
