//! Conversions from and to the kubelet's plugin protocols. Checks a plugin's responses.
//!
//! `v1` and `v1beta1` of the DRA API have the same messages, except that `v1beta1` has no shares of devices.

use std::path::PathBuf;

use nodedock_proto::kubelet::dra::v1 as wire;
use nodedock_proto::kubelet::registration;

use super::{DraService, problem};
use nodedock_base::printable::one_line;
use nodedock_model::limit::{
    PLUGIN_CDI_NAMES_MAX, PLUGIN_DEVICES_MAX, PLUGIN_SERVICES_MAX, SHARE_ID_BYTES_MAX,
};
use nodedock_model::{
    DeviceAccess, DeviceName, ObjectRef, PoolName, PreparedClaim, PreparedDevice, Problem,
    is_cdi_qualified_name, is_dns_label,
};

pub(super) mod device_plugin;
pub(super) mod health;

/// A plugin's GetInfo response, unchecked except for its size.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginInfo {
    pub kind: String,
    pub name: String,
    /// Endpoint; empty: the registration socket itself.
    pub endpoint: PathBuf,
    pub services: Vec<String>,
}

pub(super) fn plugin_info(info: registration::PluginInfo) -> PluginInfo {
    PluginInfo {
        kind: info.r#type,
        name: info.name,
        endpoint: info.endpoint.into(),
        services: info
            .supported_versions
            .into_iter()
            .take(PLUGIN_SERVICES_MAX)
            .collect(),
    }
}

pub(super) fn claim(id: &ObjectRef) -> wire::Claim {
    wire::Claim {
        namespace: id.namespace.to_string(),
        uid: id.uid.to_string(),
        name: id.name.to_string(),
    }
}

/// Checks every entry of a response, by claim UID; a UID may occur twice. A missing value is a success without devices.
pub(super) fn prepared(
    peer: &str,
    service: DraService,
    answer: wire::NodePrepareResourcesResponse,
) -> impl Iterator<Item = (String, Result<PreparedClaim, Problem>)> {
    answer.claims.into_iter().map(move |entry| {
        (
            entry.key,
            prepared_claim(peer, service, entry.value.unwrap_or_default()),
        )
    })
}

/// Reads every entry of a response as `prepared` does.
pub(super) fn unprepared(
    peer: &str,
    answer: wire::NodeUnprepareResourcesResponse,
) -> impl Iterator<Item = (String, Result<(), Problem>)> {
    answer.claims.into_iter().map(move |entry| {
        (
            entry.key,
            refused(peer, &entry.value.unwrap_or_default().error),
        )
    })
}

fn prepared_claim(
    peer: &str,
    service: DraService,
    mut answer: wire::NodePrepareResourceResponse,
) -> Result<PreparedClaim, Problem> {
    refused(peer, &answer.error)?;
    if service == DraService::V1beta1 {
        answer
            .devices
            .iter_mut()
            .for_each(|device| device.share_id = None);
    }
    let devices = prepared_devices(answer.devices).map_err(|why| problem::not_valid(peer, &why))?;
    Ok(PreparedClaim {
        devices,
        ..PreparedClaim::default()
    })
}

/// An empty error is success.
fn refused(peer: &str, error: &str) -> Result<(), Problem> {
    if error.is_empty() {
        Ok(())
    } else {
        Err(problem::of_claim(peer, error))
    }
}

pub(super) fn prepared_devices(answers: Vec<wire::Device>) -> Result<Vec<PreparedDevice>, String> {
    at_most("devices", answers.len(), PLUGIN_DEVICES_MAX)?;
    let mut devices: Vec<PreparedDevice> = Vec::with_capacity(answers.len());
    for answer in answers {
        let subject = format!(
            "pool {} device {}",
            shown(&answer.pool_name),
            shown(&answer.device_name)
        );
        let device = prepared_device(answer).map_err(|why| format!("{subject}: {why}"))?;
        let same = devices.iter_mut().find(|other| {
            (&other.pool, &other.device) == (&device.pool, &device.device)
                && (&other.share_id, &other.requests) == (&device.share_id, &device.requests)
        });
        match same {
            Some(other) => merge(&mut other.access, device.access)
                .map_err(|why| format!("{subject}: {why}"))?,
            None => devices.push(device),
        }
    }
    Ok(devices)
}

fn prepared_device(answer: wire::Device) -> Result<PreparedDevice, String> {
    at_most(
        "CDI devices",
        answer.cdi_device_ids.len(),
        PLUGIN_CDI_NAMES_MAX,
    )?;
    if let Some(bad) = answer
        .cdi_device_ids
        .iter()
        .find(|name| !is_cdi_qualified_name(name))
    {
        return Err(format!(
            "CDI device {} is not VENDOR/CLASS=NAME",
            shown(bad)
        ));
    }
    if let Some(share_id) = answer.share_id.as_ref().filter(|id| !is_share_id(id)) {
        return Err(format!("share {} is no UUID", shown(share_id)));
    }
    at_most("requests", answer.request_names.len(), PLUGIN_DEVICES_MAX)?;
    Ok(PreparedDevice {
        requests: base_requests(answer.request_names)?,
        pool: PoolName::new(&answer.pool_name).map_err(|error| error.to_string())?,
        device: DeviceName::new(&answer.device_name).map_err(|error| error.to_string())?,
        share_id: answer.share_id,
        access: DeviceAccess::CdiDevices(unique(answer.cdi_device_ids)),
        status: None,
        attributes: None,
    })
}

/// Containers use base names, so a subrequest from a plugin is removed.
fn base_requests(requests: Vec<String>) -> Result<Vec<String>, String> {
    requests
        .into_iter()
        .map(base_request)
        .collect::<Result<_, _>>()
        .map(unique)
}

fn base_request(request: String) -> Result<String, String> {
    let base = request.split('/').next().unwrap_or_default();
    if is_dns_label(base) {
        Ok(base.to_owned())
    } else {
        Err(format!("request {} is no name", shown(&request)))
    }
}

/// A plugin may append to its earlier result in a repeated call.
fn merge(known: &mut DeviceAccess, more: DeviceAccess) -> Result<(), String> {
    if let (DeviceAccess::CdiDevices(known), DeviceAccess::CdiDevices(more)) = (known, more) {
        let all = unique(known.drain(..).chain(more).collect());
        at_most("CDI devices", all.len(), PLUGIN_CDI_NAMES_MAX)?;
        *known = all;
    }
    Ok(())
}

/// Removes duplicates, in the order of first occurrence.
fn unique(names: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    names
        .into_iter()
        .filter(|name| seen.insert(name.clone()))
        .collect()
}

fn is_share_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= SHARE_ID_BYTES_MAX
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn at_most(what: &str, count: usize, max: usize) -> Result<(), String> {
    if count <= max {
        Ok(())
    } else {
        Err(format!("{count} {what}, at most {max} are allowed"))
    }
}

fn shown(text: &str) -> String {
    format!("{:?}", one_line(text, 64))
}
