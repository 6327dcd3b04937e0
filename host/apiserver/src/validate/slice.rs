//! The rules of slices.

use nodedock_model::check::Field;
use nodedock_model::limit::{COUNTER_SETS_MAX, SLICE_DEVICES_MAX, SLICE_HEAVY_DEVICES_MAX};
use serde_json::{Value, json};

use super::device;
use super::fields::{Causes, by, entries, integer, invalid, list, set, text};
use super::{names, node_selector};
use crate::status::Cause;

const WAYS: &str =
    "must have one of `nodeName`, `nodeSelector`, `allNodes` and `perDeviceNodeSelection`";

/// Checks the spec of a slice; `old` is the spec that it replaces.
pub(super) fn check(causes: &mut Causes, spec: &Value, old: Option<&Value>) {
    names::driver(causes, "spec.driver", text(spec, "driver"));
    pool(causes, &spec["pool"]);
    if let Some(old) = old {
        unchanged(causes, spec, old);
    }
    nodes(causes, spec);
    if !spec["devices"].is_null() && !spec["sharedCounters"].is_null() {
        causes.push(invalid(
            "spec",
            "",
            "only one of `sharedCounters` or `devices` is allowed",
        ));
    }
    let by_device = spec["perDeviceNodeSelection"] == true;
    let most = if list(spec, "devices").iter().any(has_extras) {
        SLICE_HEAVY_DEVICES_MAX
    } else {
        SLICE_DEVICES_MAX
    };
    set(
        causes,
        "spec",
        spec,
        "devices",
        most,
        by("name"),
        |causes, at, device| {
            let earlier = old.map(|old| list(old, "devices")).unwrap_or_default();
            let earlier = earlier
                .iter()
                .find(|earlier| earlier["name"] == device["name"]);
            device::check(causes, at, device, earlier, by_device);
        },
    );
    set(
        causes,
        "spec",
        spec,
        "sharedCounters",
        COUNTER_SETS_MAX,
        by("name"),
        |causes, at, counters| {
            device::counters(causes, at, counters, (Field::Name, "name"));
        },
    );
}

fn has_extras(device: &Value) -> bool {
    let has_list = |attribute: &Value| device::LISTS.iter().any(|key| !attribute[*key].is_null());
    !list(device, "taints").is_empty()
        || !list(device, "consumesCounters").is_empty()
        || entries(device, "attributes").any(|(_, attribute)| has_list(attribute))
}

fn pool(causes: &mut Causes, pool: &Value) {
    names::pool(causes, "spec.pool.name", text(pool, "name"));
    let (slices, generation) = (
        integer(pool, "resourceSliceCount"),
        integer(pool, "generation"),
    );
    if slices <= 0 {
        causes.push(Cause::invalid(
            "spec.pool.resourceSliceCount",
            slices,
            "must be greater than zero",
        ));
    }
    if generation < 0 {
        let why = "must be greater than or equal to zero";
        causes.push(Cause::invalid("spec.pool.generation", generation, why));
    }
}

fn unchanged(causes: &mut Causes, spec: &Value, old: &Value) {
    for field in ["pool.name", "driver", "nodeName"] {
        let pointer = format!("/{}", field.replace('.', "/"));
        let (new, old) = (spec.pointer(&pointer), old.pointer(&pointer));
        if new != old {
            let shown = new.unwrap_or(&Value::Null);
            causes.push(Cause::invalid(
                format!("spec.{field}"),
                shown,
                "field is immutable",
            ));
        }
    }
}

/// The way in which a slice says which nodes its devices are for.
fn nodes(causes: &mut Causes, spec: &Value) {
    let mut ways = vec![];
    match &spec["nodeName"] {
        Value::String(name) if name.is_empty() => {
            causes.push(invalid(
                "spec.nodeName",
                "",
                "must be either unset or set to a non-empty string",
            ));
        }
        Value::String(name) => {
            ways.push("nodeName");
            names::refuse(causes, "spec.nodeName", name, names::subdomain(name));
        }
        _ => {}
    }
    let selector = &spec["nodeSelector"];
    if !selector.is_null() {
        ways.push("nodeSelector");
        node_selector::check(causes, "spec.nodeSelector", selector);
        let terms = list(selector, "nodeSelectorTerms").len();
        if terms > 1 {
            let field = "spec.nodeSelector.nodeSelectorTerms";
            causes.push(Cause::invalid(field, terms, "must have exactly one term"));
        }
    }
    for key in ["allNodes", "perDeviceNodeSelection"] {
        match spec[key].as_bool() {
            Some(true) => ways.push(key),
            Some(false) => {
                let why = "must be either unset or set to true";
                causes.push(Cause::invalid(format!("spec.{key}"), false, why));
            }
            None => {}
        }
    }
    match ways.len() {
        0 => causes.push(Cause::required("spec", WAYS)),
        1 => {}
        _ => causes.push(Cause::invalid("spec", json!(ways), WAYS)),
    }
}
