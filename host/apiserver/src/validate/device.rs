//! The rules of a device in a slice.

use nodedock_model::check::{self, Field};
use nodedock_model::limit::{
    CONSUMED_SETS_MAX, DRIVER_NAME_BYTES_MAX, IDENTIFIER_BYTES_MAX, TAINTS_MAX,
};
use nodedock_model::{BindingConditions, UnparsedValue};
use serde_json::{Value, json};

use super::capacity;
use super::claim::taint;
use super::fields::{
    Causes, by, checked, count, each, entries, flag, invalid, list, same, set, text, texts,
};
use super::{names, node_selector};
use crate::status::Cause;

/// A domain, a slash and a name; a longer key is shortened in the path of a field.
const KEY_BYTES: usize = DRIVER_NAME_BYTES_MAX + 1 + IDENTIFIER_BYTES_MAX;
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
        each(causes, at, device, "taints", TAINTS_MAX, taint);
    }
    let identity = by("counterSet");
    set(
        causes,
        at,
        device,
        "consumesCounters",
        CONSUMED_SETS_MAX,
        identity,
        |causes, at, consumed| {
            counters(causes, at, consumed, (Field::CounterSet, "counterSet"));
        },
    );
    nodes(causes, at, device, chooses_nodes);
    binding_conditions(causes, at, device);
}

fn counts(causes: &mut Causes, at: &str, device: &Value) {
    let both = count(device, "attributes") + count(device, "capacity");
    let values = |attribute: &Value| {
        LISTS
            .iter()
            .map(|key| list(attribute, key).len())
            .sum::<usize>()
    };
    let values: usize = entries(device, "attributes")
        .map(|(_, attribute)| values(attribute).max(1))
        .sum();
    checked(causes, at, |findings| {
        check::attribute_count(findings, both);
        check::attribute_values(findings, values);
    });
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
    let set: Vec<_> = SINGLE_VALUES.iter().chain(&LISTS).filter(is_set).collect();
    checked(causes, at, |findings| {
        for value in set.iter().filter_map(|key| value(attribute, key)) {
            check::attribute(findings, &value);
        }
    });
    if set.len() != 1 {
        let why = "must have exactly one value";
        causes.push(Cause::invalid(at, json!(set), why));
    }
}

/// One value of an attribute. Numbers and truth values have no rules, and count alone.
fn value(attribute: &Value, key: &str) -> Option<UnparsedValue> {
    let count = list(attribute, key).len();
    Some(match key {
        "string" => UnparsedValue::Text(attribute[key].as_str()?.to_owned()),
        "version" => UnparsedValue::Version(attribute[key].as_str()?.to_owned()),
        "ints" => UnparsedValue::Ints(vec![0; count]),
        "bools" => UnparsedValue::Bools(vec![false; count]),
        "strings" => UnparsedValue::Texts(texts(attribute, key)),
        "versions" => UnparsedValue::Versions(texts(attribute, key)),
        _ => return None,
    })
}

/// Checks a set of counters, which a slice shares, or what a device consumes of one; `name` is the field with the name of the set.
pub(super) fn counters(causes: &mut Causes, at: &str, counters: &Value, name: (Field, &str)) {
    let keys: Vec<&str> = entries(counters, "counters")
        .map(|(key, _)| key.as_str())
        .collect();
    let (field, key) = name;
    checked(causes, at, |findings| {
        check::counter_set(findings, (field, text(counters, key)), keys.into_iter());
    });
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
    let binding = BindingConditions {
        conditions: texts(device, "bindingConditions"),
        failures: texts(device, "bindingFailureConditions"),
    };
    checked(causes, at, |findings| {
        check::binding_conditions(findings, &binding);
    });
}
