//! The device plugin API, `v1beta1`: checks a plugin's lists and responses.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use nodedock_proto::prost::bytes::{Buf, BufMut};
use nodedock_proto::prost::encoding::{DecodeContext, WireType, skip_field};
use nodedock_proto::prost::{DecodeError, Message};

use super::{at_most, shown, unique};
use nodedock_core::driver::DeviceOptions;
use nodedock_model::limit::{
    ALLOCATION_ANNOTATIONS_BYTES_MAX, ALLOCATION_ENTRIES_MAX, ALLOCATION_ENV_BYTES_MAX,
    ENV_NAME_BYTES_MAX, LISTED_DEVICES_MAX, PATH_BYTES_MAX,
};
use nodedock_model::rule::{is_node_permissions, is_unprintable};
use nodedock_model::{
    AllocationMount, AllocationNode, ContainerAllocation, PluginDevice, is_cdi_qualified_name,
    is_label_key,
};

/// The text for a healthy device (device plugin API).
const HEALTHY: &str = "Healthy";

pub(in crate::grpc) fn options(options: wire::DevicePluginOptions) -> DeviceOptions {
    DeviceOptions {
        pre_start_required: options.pre_start_required,
        preferred_allocation_available: options.get_preferred_allocation_available,
    }
}

/// A list as it is read. Devices beyond the bound are counted and not decoded, so that an absurd message costs little memory.
#[derive(Debug, Default)]
pub(in crate::grpc) struct List {
    list: wire::ListAndWatchResponse,
    beyond: usize,
}

impl List {
    pub(in crate::grpc) fn wire(&self) -> &wire::ListAndWatchResponse {
        &self.list
    }
}

impl Message for List {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        self.list.encode_raw(buffer);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if self.list.devices.len() < LISTED_DEVICES_MAX {
            return self.list.merge_field(tag, wire_type, buffer, context);
        }
        self.beyond += 1;
        skip_field(wire_type, tag, buffer, context)
    }

    fn encoded_len(&self) -> usize {
        self.list.encoded_len()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Converts a list unchecked: the device manager selects the valid devices and reports the others.
pub(in crate::grpc) fn listed(list: List) -> Result<Arc<[PluginDevice]>, String> {
    at_most(
        "devices",
        list.list.devices.len() + list.beyond,
        LISTED_DEVICES_MAX,
    )?;
    Ok(list.list.devices.into_iter().map(listed_device).collect())
}

fn listed_device(device: wire::Device) -> PluginDevice {
    let nodes = device.topology.unwrap_or_default().nodes;
    // A negative number becomes a node that no machine has.
    let mut numa_nodes: Vec<_> = nodes
        .iter()
        .map(|node| u32::try_from(node.id).unwrap_or(u32::MAX))
        .collect();
    numa_nodes.sort_unstable();
    numa_nodes.dedup();
    PluginDevice {
        id: device.id,
        healthy: device.health == HEALTHY,
        numa_nodes,
    }
}

pub(in crate::grpc) fn allocate_request(device_ids: &[String]) -> wire::AllocateRequest {
    let container = wire::ContainerAllocateRequest {
        devices_ids: device_ids.to_vec(),
    };
    wire::AllocateRequest {
        container_requests: vec![container],
    }
}

/// The request had one container, so the first response is for it.
pub(in crate::grpc) fn allocation(
    answer: wire::AllocateResponse,
) -> Result<ContainerAllocation, String> {
    let response = answer
        .container_responses
        .into_iter()
        .next()
        .ok_or("no container response")?;
    Ok(ContainerAllocation {
        env: env(response.envs)?,
        mounts: each("mounts", response.mounts, mount)?,
        device_nodes: each("devices", response.devices, device_node)?,
        annotations: annotations(response.annotations)?,
        cdi_devices: each("cdi_devices", response.cdi_devices, cdi_device).map(unique)?,
    })
}

pub(in crate::grpc) fn preferred_request(
    available: &[String],
    must_include: &[String],
    size: u32,
) -> wire::PreferredAllocationRequest {
    let container = wire::ContainerPreferredAllocationRequest {
        available_device_ids: available.to_vec(),
        must_include_device_ids: must_include.to_vec(),
        allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
    };
    wire::PreferredAllocationRequest {
        container_requests: vec![container],
    }
}

/// An empty response is no preference.
pub(in crate::grpc) fn preferred(
    answer: wire::PreferredAllocationResponse,
) -> Result<Vec<String>, String> {
    let first = answer.container_responses.into_iter().next();
    let ids = first
        .map(|response| response.device_ids)
        .unwrap_or_default();
    at_most("preferred devices", ids.len(), LISTED_DEVICES_MAX)?;
    Ok(ids)
}

fn each<A, B>(
    field: &str,
    entries: Vec<A>,
    convert: fn(A) -> Result<B, String>,
) -> Result<Vec<B>, String> {
    at_most(field, entries.len(), ALLOCATION_ENTRIES_MAX)?;
    entries
        .into_iter()
        .enumerate()
        .map(|(index, entry)| {
            convert(entry).map_err(|why: String| format!("{field}[{index}]: {why}"))
        })
        .collect()
}

/// Names that Kubernetes accepts for a container: printable ASCII except `=`. A value may have several lines.
fn env(envs: BTreeMap<String, String>) -> Result<BTreeMap<String, String>, String> {
    at_most("envs", envs.len(), ALLOCATION_ENTRIES_MAX)?;
    for (name, value) in &envs {
        if name.is_empty()
            || name.len() > ENV_NAME_BYTES_MAX
            || !name.bytes().all(|b| b.is_ascii_graphic() && b != b'=')
        {
            return Err(format!(
                "envs: {} is not the name of a variable",
                shown(name)
            ));
        }
        let what = format!("envs: the value of {}", shown(name));
        bytes(&what, value, ALLOCATION_ENV_BYTES_MAX)
            .map_err(|why| format!("{why} (Linux starts no program with another, execve(2))"))?;
    }
    Ok(envs)
}

/// Kubernetes' rule for annotations.
fn annotations(annotations: BTreeMap<String, String>) -> Result<BTreeMap<String, String>, String> {
    at_most("annotations", annotations.len(), ALLOCATION_ENTRIES_MAX)?;
    for (key, value) in &annotations {
        if !is_label_key(&key.to_ascii_lowercase()) {
            return Err(format!(
                "annotations: the key {} is no qualified name",
                shown(key)
            ));
        }
        bytes(
            &format!("annotations: the value of {key}"),
            value,
            ALLOCATION_ANNOTATIONS_BYTES_MAX,
        )?;
    }
    let length = annotations
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    at_most(
        "bytes of annotations",
        length,
        ALLOCATION_ANNOTATIONS_BYTES_MAX,
    )?;
    Ok(annotations)
}

fn mount(mount: wire::Mount) -> Result<AllocationMount, String> {
    Ok(AllocationMount {
        host_path: path("host_path", &mount.host_path)?,
        container_path: path("container_path", &mount.container_path)?,
        read_only: mount.read_only,
    })
}

/// Permissions that are empty are all, as in CDI: a kubelet passes such a device on.
fn device_node(node: wire::DeviceSpec) -> Result<AllocationNode, String> {
    let permissions = match node.permissions.as_str() {
        "" => "rwm".to_owned(),
        some => some.to_owned(),
    };
    if !is_node_permissions(&permissions) {
        return Err(format!(
            "permissions {} are not one or more of r, w, m, each once",
            shown(&node.permissions)
        ));
    }
    Ok(AllocationNode {
        host_path: path("host_path", &node.host_path)?,
        container_path: path("container_path", &node.container_path)?,
        permissions,
    })
}

fn cdi_device(device: wire::CdiDevice) -> Result<String, String> {
    if is_cdi_qualified_name(&device.name) {
        return Ok(device.name);
    }
    Err(format!(
        "name {} is not VENDOR/CLASS=NAME",
        shown(&device.name)
    ))
}

/// Absolute and without `..`. Removes double slashes, single dots and a trailing slash, which plugins use.
fn path(field: &str, path: &str) -> Result<String, String> {
    bytes(field, path, PATH_BYTES_MAX)?;
    let is_plain = path.starts_with('/') && !path.contains(is_unprintable);
    if !is_plain || path.split('/').any(|part| part == "..") {
        return Err(format!(
            "{field} {} is not an absolute path without '..'",
            shown(path)
        ));
    }
    let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
    Ok(parts.fold(String::new(), |path, part| path + "/" + part)).map(|path| match path.as_str() {
        "" => "/".to_owned(),
        _ => path,
    })
}

/// A text of at most `max` bytes without NUL.
fn bytes(what: &str, text: &str, max: usize) -> Result<(), String> {
    if text.len() > max {
        return Err(format!(
            "{what} has {} bytes, at most {max} are allowed",
            text.len()
        ));
    }
    if text.contains('\0') {
        return Err(format!("{what} has a zero byte: {}", shown(text)));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
