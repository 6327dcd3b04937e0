//! The rules of a claim's status: its allocation, its consumers, and what drivers report of its devices.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};

use super::claim::{self, CONFIGS, PARAMETER_BYTES, RequestNames};
use super::fields::{
    Causes, REQUESTS, UNBOUNDED, by, each, integer, invalid, itself, list, one_of, same, set, text,
    too_long, unsupported,
};
use super::{device, names, node_selector};
use crate::status::Cause;

/// Consumers of a claim.
const RESERVED_FOR: usize = 256;
/// Devices of a claim: as many as it can have requests.
const RESULTS: usize = REQUESTS;
/// Of the reported status of a device.
const CONDITIONS: usize = 8;
const DATA_BYTES: usize = PARAMETER_BYTES;
const ADDRESSES: usize = 16;
const INTERFACE_BYTES: usize = 256;
const HARDWARE_ADDRESS_BYTES: usize = 128;
const REASON_BYTES: usize = 1024;
const MESSAGE_BYTES: usize = 32 * 1024;
const REASON: &str =
    "must be of A-Z, a-z, 0-9, '_', ',' and ':', with a letter first and neither ',' nor ':' last";

/// Driver, pool, device and share.
type DeviceId = [String; 4];

fn id(device: &Value) -> DeviceId {
    ["driver", "pool", "device", "shareID"].map(|key| text(device, key).to_owned())
}

fn shown(device: &Value) -> String {
    let parts = id(device).into_iter().filter(|part| !part.is_empty());
    json!(parts.collect::<Vec<_>>().join("/")).to_string()
}

fn allocated(status: &Value) -> BTreeSet<DeviceId> {
    list(&status["allocation"]["devices"], "results")
        .iter()
        .map(id)
        .collect()
}

/// Checks a status that is new or differs from the one before.
pub(super) fn check(causes: &mut Causes, new: &Value, old: Option<&Value>) {
    let (status, before) = (
        &new["status"],
        old.map_or(&Value::Null, |old| &old["status"]),
    );
    set(
        causes,
        "status",
        status,
        "reservedFor",
        RESERVED_FOR,
        by("uid"),
        |causes, at, consumer| {
            for key in ["resource", "name", "uid"]
                .into_iter()
                .filter(|key| text(consumer, key).is_empty())
            {
                causes.push(Cause::required(format!("{at}.{key}"), ""));
            }
        },
    );
    let allocated = allocated(status);
    set(
        causes,
        "status",
        status,
        "devices",
        UNBOUNDED,
        shown,
        |causes, at, device| {
            reported(causes, at, device, &allocated);
        },
    );
    consumers(
        causes,
        status,
        before,
        !new["metadata"]["deletionTimestamp"].is_null(),
    );
    match (&status["allocation"], &before["allocation"]) {
        (Value::Null, _) => {}
        (new, old) if !old.is_null() => {
            if !same(new, old) {
                causes.push(immutable_allocation());
            }
        }
        (allocation, _) => result(
            causes,
            allocation,
            &RequestNames::of(&new["spec"]["devices"]),
        ),
    }
}

/// What a write is refused with that changes an allocation, or only how its parameters are written.
pub(crate) fn immutable_allocation() -> Cause {
    Cause::immutable("status.allocation")
}

fn consumers(causes: &mut Causes, status: &Value, before: &Value, is_deleted: bool) {
    const FIELD: &str = "status.reservedFor";
    let consumers = list(status, "reservedFor");
    if consumers.is_empty() {
        return;
    }
    if status["allocation"].is_null() {
        causes.push(Cause::forbidden(
            FIELD,
            "may not be specified when `allocated` is not set",
        ));
    } else if is_deleted
        && consumers
            .iter()
            .any(|consumer| !list(before, "reservedFor").contains(consumer))
    {
        let why = "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set";
        causes.push(Cause::forbidden(FIELD, why));
    }
}

fn result(causes: &mut Causes, allocation: &Value, requests: &RequestNames<'_>) {
    const AT: &str = "status.allocation.devices";
    let devices = &allocation["devices"];
    each(
        causes,
        AT,
        devices,
        "results",
        RESULTS,
        |causes, at, result| {
            requests.check(causes, &format!("{at}.request"), text(result, "request"));
            names::driver(causes, &format!("{at}.driver"), text(result, "driver"));
            names::pool(causes, &format!("{at}.pool"), text(result, "pool"));
            let name = text(result, "device");
            names::refuse(causes, &format!("{at}.device"), name, names::label(name));
            device::binding_conditions(causes, at, result);
            share(causes, at, result);
        },
    );
    // Of the claim and of its classes.
    each(
        causes,
        AT,
        devices,
        "config",
        2 * CONFIGS,
        |causes, at, config| {
            one_of(
                causes,
                &format!("{at}.source"),
                text(config, "source"),
                &["FromClaim", "FromClass"],
            );
            requests.check_list(causes, at, config);
            claim::configuration(causes, at, config, true);
        },
    );
    if !allocation["nodeSelector"].is_null() {
        node_selector::check(
            causes,
            "status.allocation.nodeSelector",
            &allocation["nodeSelector"],
        );
    }
}

fn share(causes: &mut Causes, at: &str, device: &Value) {
    if !device["shareID"].is_null() {
        names::uid(causes, &format!("{at}.shareID"), text(device, "shareID"));
    }
}

/// The status of a device that a driver reports.
fn reported(causes: &mut Causes, at: &str, device: &Value, allocated: &BTreeSet<DeviceId>) {
    names::driver(causes, &format!("{at}.driver"), text(device, "driver"));
    names::pool(causes, &format!("{at}.pool"), text(device, "pool"));
    let name = text(device, "device");
    names::refuse(causes, &format!("{at}.device"), name, names::label(name));
    share(causes, at, device);
    if !allocated.contains(&id(device)) {
        causes.push(Cause::invalid(
            at,
            shown(device),
            "must be an allocated device in the claim",
        ));
    }
    let conditions = list(device, "conditions");
    if conditions.len() > CONDITIONS {
        causes.push(Cause::too_many(
            format!("{at}.conditions"),
            conditions.len(),
            CONDITIONS,
        ));
    }
    self::conditions(causes, at, device);
    if !device["data"].is_null() {
        claim::raw(causes, &format!("{at}.data"), &device["data"], DATA_BYTES);
    }
    network(causes, &format!("{at}.networkData"), &device["networkData"]);
}

/// Checks `conditions` of a reported device or a taint rule.
pub(super) fn conditions(causes: &mut Causes, at: &str, object: &Value) {
    let mut seen = BTreeMap::new();
    for (index, condition) in list(object, "conditions").iter().enumerate() {
        let (at, kind) = (format!("{at}.conditions[{index}]"), text(condition, "type"));
        if seen.insert(kind, ()).is_some() {
            causes.push(Cause::duplicate(format!("{at}.type"), json!(kind)));
        }
        names::refuse(causes, &format!("{at}.type"), kind, names::label_key(kind));
        let (status, known) = (text(condition, "status"), ["False", "True", "Unknown"]);
        if !known.contains(&status) {
            causes.push(unsupported(format!("{at}.status"), status, &known));
        }
        let generation = integer(condition, "observedGeneration");
        if generation < 0 {
            let why = "must be greater than or equal to zero";
            causes.push(Cause::invalid(
                format!("{at}.observedGeneration"),
                generation,
                why,
            ));
        }
        if condition["lastTransitionTime"].is_null() {
            causes.push(Cause::required(format!("{at}.lastTransitionTime"), ""));
        }
        reason(causes, &format!("{at}.reason"), text(condition, "reason"));
        if text(condition, "message").len() > MESSAGE_BYTES {
            causes.push(too_long(format!("{at}.message"), MESSAGE_BYTES));
        }
    }
}

fn reason(causes: &mut Causes, field: &str, reason: &str) {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"_,:".contains(&byte);
    let has_form = reason.starts_with(|first: char| first.is_ascii_alphabetic())
        && !reason.ends_with([',', ':'])
        && reason.bytes().all(inner);
    if reason.is_empty() {
        causes.push(Cause::required(field, ""));
    } else if reason.len() > REASON_BYTES {
        causes.push(too_long(field, REASON_BYTES));
    } else if !has_form {
        causes.push(invalid(field, reason, REASON));
    }
}

fn network(causes: &mut Causes, at: &str, data: &Value) {
    let bounds = [
        ("interfaceName", INTERFACE_BYTES),
        ("hardwareAddress", HARDWARE_ADDRESS_BYTES),
    ];
    for (key, most) in bounds
        .into_iter()
        .filter(|(key, most)| text(data, key).len() > *most)
    {
        causes.push(too_long(format!("{at}.{key}"), most));
    }
    set(
        causes,
        at,
        data,
        "ips",
        ADDRESSES,
        itself,
        |causes, field, address| {
            let address = address.as_str().unwrap_or_default();
            match canonical(address) {
                None => {
                    let why = "must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)";
                    causes.push(invalid(field, address, why));
                }
                Some(canonical) if canonical != address => {
                    let why = format!("must be in canonical form ({})", json!(canonical));
                    causes.push(invalid(field, address, &why));
                }
                Some(_) => {}
            }
        },
    );
}

/// An address with the length of its prefix, as Go's `net` writes it.
fn canonical(text: &str) -> Option<String> {
    let (address, prefix) = text.split_once('/')?;
    let (address, prefix): (IpAddr, u8) = (address.parse().ok()?, prefix.parse().ok()?);
    let bits = if address.is_ipv4() { 32 } else { 128 };
    (prefix <= bits).then(|| format!("{}/{prefix}", address.to_canonical()))
}

/// Removes what drivers reported of devices that this write takes from the claim, as an API server does before it checks the status.
pub(crate) fn drop_deallocated_devices(new: &mut Value, old: &Value) {
    let (now, before) = (allocated(&new["status"]), allocated(&old["status"]));
    let Some(status) = new.get_mut("status").and_then(Value::as_object_mut) else {
        return;
    };
    let Some(Value::Array(devices)) = status.get_mut("devices") else {
        return;
    };
    devices.retain(|device| !before.contains(&id(device)) || now.contains(&id(device)));
    if devices.is_empty() {
        status.remove("devices");
    }
}
