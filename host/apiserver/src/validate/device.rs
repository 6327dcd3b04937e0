//! The rules of a device in a slice.

use serde_json::{Value, json};

use super::capacity;
use super::claim::taint;
use super::fields::{
    Causes, by, count, each, entries, flag, invalid, itself, list, same, set, text, too_long,
};
use super::{names, node_selector};
use crate::status::Cause;

const ATTRIBUTES_AND_CAPACITIES: usize = 32;
/// Values of all attributes of a device, with each one of a list.
const ATTRIBUTE_VALUES: usize = 48;
/// Of a text or version.
const VALUE_BYTES: usize = 64;
const TAINTS: usize = 16;
const CONSUMED_COUNTER_SETS: usize = 2;
/// Of one set, and of what a device consumes of one.
const COUNTERS: usize = 32;
const BINDING_CONDITIONS: usize = 4;
/// A domain, a slash and a name; a longer key is shortened in the path of a field.
const KEY_BYTES: usize = 63 + 1 + 32;
/// Fields of an attribute.
const SINGLE_VALUES: [&str; 4] = ["int", "bool", "string", "version"];
pub(super) const LISTS: [&str; 4] = ["ints", "bools", "strings", "versions"];

/// Checks a device; `old` is the one of the same name that the slice had before, `chooses_nodes` whether each device says its nodes.
pub(super) fn check(
    causes: &mut Causes,
    at: &str,
    device: &Value,
    old: Option<&Value>,
    chooses_nodes: bool,
) {
    let name = text(device, "name");
    names::refuse(causes, &format!("{at}.name"), name, names::label(name));
    counts(causes, at, device);
    for (key, attribute) in entries(device, "attributes") {
        names::qualified(causes, &format!("{at}.attributes"), key);
        self::attribute(
            causes,
            &format!("{at}.attributes[{}]", shortened(key, KEY_BYTES)),
            attribute,
        );
    }
    for (key, capacity) in entries(device, "capacity") {
        names::qualified(causes, &format!("{at}.capacity"), key);
        let at = format!("{at}.capacity[{}]", shortened(key, KEY_BYTES));
        capacity::check(
            causes,
            &at,
            capacity,
            flag(device, "allowMultipleAllocations"),
        );
    }
    if old.is_none_or(|old| !same(&old["taints"], &device["taints"])) {
        each(causes, at, device, "taints", TAINTS, taint);
    }
    let identity = by("counterSet");
    set(
        causes,
        at,
        device,
        "consumesCounters",
        CONSUMED_COUNTER_SETS,
        identity,
        |causes, at, consumed| {
            counters(causes, at, consumed, "counterSet");
        },
    );
    nodes(causes, at, device, chooses_nodes);
    binding_conditions(causes, at, device);
}

fn counts(causes: &mut Causes, at: &str, device: &Value) {
    let both = count(device, "attributes") + count(device, "capacity");
    if both > ATTRIBUTES_AND_CAPACITIES {
        let why = format!(
            "the total number of attributes and capacities must not exceed {ATTRIBUTES_AND_CAPACITIES}"
        );
        causes.push(Cause::invalid(at, both, &why));
    }
    let values = |attribute: &Value| {
        LISTS
            .iter()
            .map(|key| list(attribute, key).len())
            .sum::<usize>()
    };
    let values: usize = entries(device, "attributes")
        .map(|(_, attribute)| values(attribute).max(1))
        .sum();
    if values > ATTRIBUTE_VALUES {
        let why =
            format!("the total number of attribute values must not exceed {ATTRIBUTE_VALUES}");
        causes.push(Cause::invalid(at, values, &why));
    }
}

/// A key as the path of a field shows it: without its middle, if it is too long.
fn shortened(key: &str, most: usize) -> String {
    if key.len() <= most {
        return key.to_owned();
    }
    let kept = most - "...".len();
    let (start, end) = (key.get(..kept.div_ceil(2)), key.get(key.len() - kept / 2..));
    format!(
        "{}...{}",
        start.unwrap_or_default(),
        end.unwrap_or_default()
    )
}

fn attribute(causes: &mut Causes, at: &str, attribute: &Value) {
    let is_set = |key: &&&str| !attribute[**key].is_null();
    if attribute["string"].is_string() {
        text_value(causes, &format!("{at}.string"), text(attribute, "string"));
    }
    if attribute["version"].is_string() {
        version_value(causes, &format!("{at}.version"), text(attribute, "version"));
    }
    for key in LISTS.iter().filter(is_set) {
        if list(attribute, key).is_empty() {
            causes.push(Cause::invalid(
                format!("{at}.{key}"),
                json!([]),
                "must not be empty if specified",
            ));
        }
        for (index, value) in list(attribute, key).iter().enumerate() {
            let (field, value) = (
                format!("{at}.{key}[{index}]"),
                value.as_str().unwrap_or_default(),
            );
            match *key {
                "strings" => text_value(causes, &field, value),
                "versions" => version_value(causes, &field, value),
                _ => {}
            }
        }
    }
    let set: Vec<_> = SINGLE_VALUES.iter().chain(&LISTS).filter(is_set).collect();
    if set.len() != 1 {
        let why = "must have exactly one value";
        causes.push(Cause::invalid(at, json!(set), why));
    }
}

fn text_value(causes: &mut Causes, field: &str, value: &str) {
    if value.len() > VALUE_BYTES {
        causes.push(too_long(field, VALUE_BYTES));
    }
}

fn version_value(causes: &mut Causes, field: &str, value: &str) {
    if value.len() > VALUE_BYTES {
        causes.push(too_long(field, VALUE_BYTES));
    } else if semver::Version::parse(value).is_err() {
        causes.push(invalid(
            field,
            value,
            "must be a version of semver.org 2.0.0",
        ));
    }
}

/// Checks a set of counters, which a slice shares, or what a device consumes of one; `name` is the field with the name of the set.
pub(super) fn counters(causes: &mut Causes, at: &str, counters: &Value, name: &str) {
    let (field, set) = (format!("{at}.{name}"), text(counters, name));
    match set {
        "" => causes.push(Cause::required(&field, "")),
        set => names::refuse(causes, &field, set, names::label(set)),
    }
    let (field, found) = (format!("{at}.counters"), count(counters, "counters"));
    match found {
        0 => causes.push(Cause::required(field, "")),
        found if found > COUNTERS => causes.push(Cause::too_many(field, found, COUNTERS)),
        _ => {
            for (key, _) in entries(counters, "counters") {
                names::refuse(causes, &field, key, names::label(key));
            }
        }
    }
}

fn nodes(causes: &mut Causes, at: &str, device: &Value, chooses_nodes: bool) {
    if !chooses_nodes {
        let ways = ["nodeName", "nodeSelector", "allNodes"].into_iter();
        let ways: Vec<_> = ways.filter(|way| !device[*way].is_null()).collect();
        if !ways.is_empty() {
            let why = "needs `perDeviceNodeSelection` of the slice";
            causes.push(Cause::invalid(at, json!(ways), why));
        }
        return;
    }
    let mut chosen = vec![];
    match device["nodeName"].as_str() {
        Some("") => causes.push(invalid(format!("{at}.nodeName"), "", "must not be empty")),
        Some(name) => {
            chosen.push("nodeName");
            names::refuse(
                causes,
                &format!("{at}.nodeName"),
                name,
                names::subdomain(name),
            );
        }
        None => {}
    }
    if !device["nodeSelector"].is_null() {
        chosen.push("nodeSelector");
        node_selector::check(
            causes,
            &format!("{at}.nodeSelector"),
            &device["nodeSelector"],
        );
    }
    match device["allNodes"].as_bool() {
        Some(true) => chosen.push("allNodes"),
        Some(false) => {
            let why = "must be either unset or set to true";
            causes.push(Cause::invalid(format!("{at}.allNodes"), false, why));
        }
        None => {}
    }
    let why = "must have one of `nodeName`, `nodeSelector` and `allNodes`, as the slice has `perDeviceNodeSelection`";
    match chosen.len() {
        0 => causes.push(Cause::required(at, why)),
        1 => {}
        _ => causes.push(Cause::invalid(at, json!(chosen), why)),
    }
}

/// Checks the binding conditions of a device or of an allocated one.
pub(super) fn binding_conditions(causes: &mut Causes, at: &str, device: &Value) {
    let (conditions, failures) = ("bindingConditions", "bindingFailureConditions");
    for key in [conditions, failures] {
        each(
            causes,
            at,
            device,
            key,
            BINDING_CONDITIONS,
            |causes, field, condition| {
                let condition = condition.as_str().unwrap_or_default();
                names::refuse(causes, field, condition, names::label_key(condition));
            },
        );
    }
    for key in [conditions, failures] {
        let items = list(device, key);
        for (index, item) in items.iter().enumerate() {
            let (field, earlier) = (format!("{at}.{key}[{index}]"), items.iter().take(index));
            if earlier.into_iter().any(|earlier| earlier == item) {
                causes.push(Cause::duplicate(&field, itself(item)));
            }
            if key == failures && list(device, conditions).contains(item) {
                let why = "bindingFailureConditions must not overlap with bindingConditions";
                causes.push(Cause::invalid(&field, itself(item), why));
            }
        }
    }
    for (missing, other) in [(conditions, failures), (failures, conditions)] {
        if list(device, missing).is_empty() && !list(device, other).is_empty() {
            let why = format!("{missing} are required to use {other}");
            causes.push(Cause::invalid(
                format!("{at}.{missing}"),
                &device[missing],
                &why,
            ));
        }
    }
}
