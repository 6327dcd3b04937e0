//! Conversions from and to the kubelet's plugin protocols. Checks a plugin's responses.

use std::time::Duration;

use nodedock_proto::kubelet::registration as wire;
use tonic::Request;

use super::problem;
use super::registration::PluginInfo;
use super::rpc::{ClaimAnswer, DeviceAnswer};
use super::{clean, cut};
use nodedock_model::limit::{
    PLUGIN_CDI_NAMES_MAX, PLUGIN_DEVICES_MAX, PLUGIN_SERVICES_MAX, SHARE_ID_BYTES_MAX,
};
use nodedock_model::{
    DeviceAccess, DeviceName, DriverName, PoolName, PreparedClaim, PreparedDevice, Problem,
    is_cdi_qualified_name, is_dns_label,
};

pub(super) mod device_plugin;
pub(super) mod health;

pub(super) fn info_request(deadline: Duration) -> Request<wire::InfoRequest> {
    let mut request = Request::new(wire::InfoRequest {});
    request.set_timeout(deadline);
    request
}

pub(super) fn plugin_info(info: wire::PluginInfo) -> PluginInfo {
    PluginInfo {
        kind: info.r#type,
        name: info.name,
        endpoint: info.endpoint.into(),
        services: info.supported_versions.into_iter().take(PLUGIN_SERVICES_MAX).collect(),
    }
}

pub(super) fn registration_status(
    registered: bool,
    error: &str,
    deadline: Duration,
) -> Request<wire::RegistrationStatus> {
    let mut request =
        Request::new(wire::RegistrationStatus { plugin_registered: registered, error: clean(error) });
    request.set_timeout(deadline);
    request
}

/// The two versions differ in one field: `share_id`.
macro_rules! dra_version {
    ($version:ident, |$device:ident| $share_id:expr) => {
        pub(in crate::grpc) mod $version {
            use nodedock_proto::kubelet::dra::$version as wire;

            use crate::grpc::rpc::{Answers, ClaimAnswer, DeviceAnswer};
            use nodedock_model::ObjectRef;

            pub(in crate::grpc) fn prepare_request(
                claims: &[&ObjectRef],
            ) -> wire::NodePrepareResourcesRequest {
                wire::NodePrepareResourcesRequest { claims: claims.iter().map(|id| claim(id)).collect() }
            }

            pub(in crate::grpc) fn unprepare_request(
                claims: &[&ObjectRef],
            ) -> wire::NodeUnprepareResourcesRequest {
                wire::NodeUnprepareResourcesRequest { claims: claims.iter().map(|id| claim(id)).collect() }
            }

            fn claim(id: &ObjectRef) -> wire::Claim {
                wire::Claim {
                    namespace: id.namespace.to_string(),
                    uid: id.uid.to_string(),
                    name: id.name.to_string(),
                }
            }

            pub(in crate::grpc) fn prepared(answer: wire::NodePrepareResourcesResponse) -> Answers {
                let one = |answer: wire::NodePrepareResourceResponse| ClaimAnswer {
                    devices: answer.devices.into_iter().map(device).collect(),
                    error: answer.error,
                };
                // A missing value is a success without devices.
                answer
                    .claims
                    .into_iter()
                    .map(|entry| (entry.key, one(entry.value.unwrap_or_default())))
                    .collect()
            }

            pub(in crate::grpc) fn unprepared(answer: wire::NodeUnprepareResourcesResponse) -> Answers {
                let one = |answer: wire::NodeUnprepareResourceResponse| ClaimAnswer {
                    devices: Vec::new(),
                    error: answer.error,
                };
                answer
                    .claims
                    .into_iter()
                    .map(|entry| (entry.key, one(entry.value.unwrap_or_default())))
                    .collect()
            }

            fn device($device: wire::Device) -> DeviceAnswer {
                DeviceAnswer {
                    share_id: $share_id,
                    requests: $device.request_names,
                    pool: $device.pool_name,
                    device: $device.device_name,
                    cdi_names: $device.cdi_device_ids,
                }
            }
        }
    };
}

dra_version!(v1, |device| device.share_id);
dra_version!(v1beta1, |device| None);

/// Checks a plugin's result of a prepare of one claim.
pub(super) fn prepared_claim(driver: &DriverName, answer: ClaimAnswer) -> Result<PreparedClaim, Problem> {
    if !answer.error.is_empty() {
        return Err(problem::of_claim(driver, &answer.error));
    }
    let devices = prepared_devices(answer.devices).map_err(|why| problem::not_valid(driver, &why))?;
    Ok(PreparedClaim { devices, ..PreparedClaim::default() })
}

/// Checks a plugin's result of an unprepare of one claim.
pub(super) fn unprepared(driver: &DriverName, answer: &ClaimAnswer) -> Result<(), Problem> {
    if answer.error.is_empty() { Ok(()) } else { Err(problem::of_claim(driver, &answer.error)) }
}

fn prepared_devices(answers: Vec<DeviceAnswer>) -> Result<Vec<PreparedDevice>, String> {
    at_most("devices", answers.len(), PLUGIN_DEVICES_MAX)?;
    let mut devices: Vec<PreparedDevice> = Vec::with_capacity(answers.len());
    for answer in answers {
        let place = format!("pool {} device {}", shown(&answer.pool), shown(&answer.device));
        let device = prepared_device(answer).map_err(|why| format!("{place}: {why}"))?;
        let same = |other: &&mut PreparedDevice| {
            (&other.pool, &other.device, &other.share_id, &other.requests)
                == (&device.pool, &device.device, &device.share_id, &device.requests)
        };
        match devices.iter_mut().find(same) {
            Some(other) => {
                merge(&mut other.access, device.access).map_err(|why| format!("{place}: {why}"))?
            }
            None => devices.push(device),
        }
    }
    Ok(devices)
}

fn prepared_device(answer: DeviceAnswer) -> Result<PreparedDevice, String> {
    at_most("CDI devices", answer.cdi_names.len(), PLUGIN_CDI_NAMES_MAX)?;
    if let Some(bad) = answer.cdi_names.iter().find(|name| !is_cdi_qualified_name(name)) {
        return Err(format!("CDI device {} is not VENDOR/CLASS=NAME", shown(bad)));
    }
    if let Some(share_id) = answer.share_id.as_ref().filter(|id| !is_share_id(id)) {
        return Err(format!("share {} is no UUID", shown(share_id)));
    }
    at_most("requests", answer.requests.len(), PLUGIN_DEVICES_MAX)?;
    Ok(PreparedDevice {
        requests: base_requests(answer.requests)?,
        pool: PoolName::new(&answer.pool).map_err(|error| error.to_string())?,
        device: DeviceName::new(&answer.device).map_err(|error| error.to_string())?,
        share_id: answer.share_id,
        access: DeviceAccess::CdiDevices(unique(answer.cdi_names)),
        status: None,
    })
}

/// Containers use base names, so a subrequest from a plugin is removed.
fn base_requests(requests: Vec<String>) -> Result<Vec<String>, String> {
    let base = |request: String| {
        let base = request.split('/').next().unwrap_or_default();
        if is_dns_label(base) {
            Ok(base.to_owned())
        } else {
            Err(format!("request {} is no name", shown(&request)))
        }
    };
    requests.into_iter().map(base).collect::<Result<_, _>>().map(unique)
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
    names.into_iter().filter(|name| seen.insert(name.clone())).collect()
}

fn is_share_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= SHARE_ID_BYTES_MAX
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn at_most(what: &str, count: usize, max: usize) -> Result<(), String> {
    if count <= max { Ok(()) } else { Err(format!("{count} {what}, at most {max} are allowed")) }
}

fn shown(text: &str) -> String {
    format!("{:?}", cut(text, 64))
}
