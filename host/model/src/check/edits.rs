//! Container edits of a driver. Which of them are granted, and true on the node, is another question.

use super::{Field, Findings};
use crate::limit::{
    CLOS_ID_BYTES_MAX, EDIT_WORD_BYTES_MAX, EDITS_MAX, ENV_VALUE_BYTES_MAX, LABEL_VALUE_BYTES_MAX,
};
use crate::rule::{is_env_name, is_interface_name, is_node_permissions};
use crate::{DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice};

/// Checks container edits: the bounds of the driver contract, and what CDI libraries refuse.
pub fn edits(findings: &mut Findings, edits: &Edits) {
    let count = edits.additional_gids.len();
    findings.at_most(Field::AdditionalGids, count, EDITS_MAX);
    env(findings, &edits.env);
    findings.each(
        Field::DeviceNodes,
        &edits.device_nodes,
        EDITS_MAX,
        device_node,
    );
    findings.each(Field::Mounts, &edits.mounts, EDITS_MAX, mount);
    net_devices(findings, &edits.net_devices);
    findings.each(Field::Hooks, &edits.hooks, EDITS_MAX, hook);
    if let Some(rdt) = &edits.intel_rdt {
        findings.field(Field::IntelRdt, |at| intel_rdt(at, rdt));
    }
}

fn env(findings: &mut Findings, variables: &[(String, String)]) {
    findings.each(Field::Env, variables, EDITS_MAX, |at, (name, value)| {
        if is_env_name(name) {
            at.named(Field::Value, name, |at| at.line(value, ENV_VALUE_BYTES_MAX));
        } else {
            let rule = "is not the name of an environment variable";
            at.field(Field::Key, |at| at.require(false, name, rule));
        }
    });
}

fn device_node(findings: &mut Findings, node: &DeviceNode) {
    let permissions = &node.permissions;
    findings.field(Field::Access, |at| match permissions.as_str() {
        "" => at.inconsistent("none of read, write and mknod"),
        some => at.require(is_node_permissions(some), some, "is not a subset of rwm"),
    });
    if let Some(mode) = node.file_mode.filter(|mode| *mode > 0o777) {
        findings.field(Field::FileMode, |at| {
            at.require(false, &format!("{mode:o}"), "has more than permissions");
        });
    }
    findings.field(Field::Path, |at| at.path(&node.path));
    if let Some(path) = &node.host_path {
        findings.field(Field::HostPath, |at| at.path(path));
    }
}

fn mount(findings: &mut Findings, mount: &Mount) {
    findings.each(Field::Options, &mount.options, EDITS_MAX, |at, option| {
        at.word(option, EDIT_WORD_BYTES_MAX);
    });
    findings.field(Field::HostPath, |at| at.path(&mount.host_path));
    findings.field(Field::ContainerPath, |at| at.path(&mount.container_path));
    if let Some(fs_type) = &mount.fs_type {
        findings.field(Field::FsType, |at| at.line(fs_type, EDIT_WORD_BYTES_MAX));
    }
}

/// An interface is moved once, and two cannot have one name: CDI libraries refuse such files.
fn net_devices(findings: &mut Findings, devices: &[NetDevice]) {
    findings.each(Field::NetDevices, devices, EDITS_MAX, |at, device| {
        for (field, name) in [
            (Field::HostInterface, &device.host_interface),
            (Field::ContainerInterface, &device.container_interface),
        ] {
            let rule = "is not the name of a network interface";
            at.field(field, |at| at.require(is_interface_name(name), name, rule));
        }
    });
    if devices.len() <= EDITS_MAX {
        let of_node = devices.iter().map(|device| device.host_interface.as_str());
        findings.unique(Field::NetDevices, of_node);
        let in_container = devices
            .iter()
            .map(|device| device.container_interface.as_str());
        findings.unique(Field::NetDevices, in_container);
    }
}

fn hook(findings: &mut Findings, hook: &Hook) {
    findings.each(Field::Args, &hook.args, EDITS_MAX, |at, argument| {
        at.line(argument, ENV_VALUE_BYTES_MAX);
    });
    findings.field(Field::Path, |at| at.path(&hook.path));
    env(findings, &hook.env);
}

fn intel_rdt(findings: &mut Findings, rdt: &IntelRdt) {
    if let Some(id) = &rdt.clos_id {
        findings.field(Field::ClosId, |at| class_of_service(at, id));
    }
    findings.each(Field::Schemata, &rdt.schemata, EDITS_MAX, |at, line| {
        at.word(line, LABEL_VALUE_BYTES_MAX);
    });
}

fn class_of_service(findings: &mut Findings, id: &str) {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let is_name = !id.is_empty()
        && id.len() <= CLOS_ID_BYTES_MAX
        && id.bytes().all(plain)
        && !id.starts_with('.');
    findings.require(is_name, id, "is not the plain name of a class of service");
}
