//! The rules of a claim's status: its allocation, its consumers, and what drivers report of its devices.

use std::collections::BTreeSet;

use nodedock_model::limit::{
    ALLOCATED_DEVICES_MAX, CONFIGS_MAX, RESERVED_FOR_MAX, STATUS_CONDITIONS_MAX,
    STATUS_DATA_BYTES_MAX,
};
use nodedock_model::{NetworkData, check};
use serde_json::{Value, json};

use super::claim::{self, RequestNames};
use super::fields::{
    Causes, UNBOUNDED, by, checked, each, integer, list, one_of, same, set, text, texts,
    unsupported,
};
use super::{device, names, node_selector};
use crate::status::Cause;

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
        RESERVED_FOR_MAX,
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

/// Returns the cause with which a write is refused that changes an allocation, or only the encoding of its parameters.
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
        ALLOCATED_DEVICES_MAX,
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
        CONFIGS_MAX,
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
    self::conditions(causes, at, device);
    if !device["data"].is_null() {
        claim::raw(
            causes,
            &format!("{at}.data"),
            &device["data"],
            STATUS_DATA_BYTES_MAX,
        );
    }
    let data = &device["networkData"];
    let network = NetworkData {
        interface_name: text(data, "interfaceName").to_owned(),
        ips: texts(data, "ips"),
        hardware_address: text(data, "hardwareAddress").to_owned(),
    };
    checked(causes, &format!("{at}.networkData"), |findings| {
        check::network(findings, &network);
    });
}

/// Checks `conditions` of a reported device or a taint rule.
pub(super) fn conditions(causes: &mut Causes, at: &str, object: &Value) {
    let count = list(object, "conditions").len();
    if count > STATUS_CONDITIONS_MAX {
        let field = format!("{at}.conditions");
        causes.push(Cause::too_many(field, count, STATUS_CONDITIONS_MAX));
    }
    let mut seen = BTreeSet::new();
    for (index, condition) in list(object, "conditions").iter().enumerate() {
        let (at, kind) = (format!("{at}.conditions[{index}]"), text(condition, "type"));
        if !seen.insert(kind) {
            causes.push(Cause::duplicate(format!("{at}.type"), json!(kind)));
        }
        checked(causes, &at, |findings| {
            check::condition_type(findings, kind)
        });
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
        checked(causes, &at, |findings| {
            check::condition_reason(findings, text(condition, "reason"));
            check::condition_message(findings, text(condition, "message"));
        });
    }
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
