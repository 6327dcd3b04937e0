//! What a server refuses to store.

use serde_json::{Value, json};

use super::resources::Resource;
use super::status::Cause;

const DEVICES: usize = 128;
/// As soon as one device has taints or consumes counters.
const DEVICES_WITH_EXTRAS: usize = 64;
const ATTRIBUTES_AND_CAPACITIES: usize = 32;
const TAINTS: usize = 16;
const COUNTER_SETS: usize = 8;
const BINDING_CONDITIONS: usize = 4;
const NOTE_BYTES: usize = 1024;
const NOT_A_LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
     and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const NOT_A_SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
     must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const IMMUTABLE: &str = "field is immutable";
/// What a quantity has to match.
pub(super) const QUANTITY: &str = "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$";

/// What is wrong with an object that is to be stored; `old` is the one that it replaces. Of a new claim, only its metadata and status are checked.
pub(super) fn object(resource: &Resource, new: &Value, old: Option<&Value>) -> Vec<Cause> {
    let mut causes = metadata(new);
    match resource.plural {
        "resourceslices" => {
            causes.extend(slice(new));
            if let Some(old) = old {
                causes.extend(slice_change(new, old));
            }
        }
        "resourceclaims" => {
            causes.extend(claim_status(new));
            if let Some(old) = old {
                causes.extend(claim_change(new, old));
            }
        }
        _ => {}
    }
    causes
}

fn metadata(object: &Value) -> Vec<Cause> {
    let name = &object["metadata"]["name"];
    let text = name.as_str().unwrap_or_default();
    if text.is_empty() {
        return vec![Cause::required("metadata.name", "name or generateName is required")];
    }
    if is_subdomain(text) { vec![] } else { vec![Cause::invalid("metadata.name", name, NOT_A_SUBDOMAIN)] }
}

/// A write of another object than the one that is there, as an apply is refused.
pub(super) fn immutable_uid(uid: &Value) -> Vec<Cause> {
    // A server checks it twice.
    vec![Cause::invalid("metadata.uid", uid, IMMUTABLE), Cause::invalid("metadata.uid", uid, IMMUTABLE)]
}

fn is_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    !text.is_empty()
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| byte == b'-' || is_inner(byte))
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn list<'a>(object: &'a Value, key: &str) -> &'a [Value] {
    object[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn slice(object: &Value) -> Vec<Cause> {
    let spec = &object["spec"];
    let mut causes = vec![];
    match spec["driver"].as_str().unwrap_or_default() {
        "" => causes.push(Cause::required("spec.driver", "")),
        driver if driver.len() > 63 || !is_subdomain(driver) => {
            causes.push(Cause::invalid("spec.driver", &spec["driver"], NOT_A_SUBDOMAIN));
        }
        _ => {}
    }
    causes.extend(pool(&spec["pool"]));
    causes.extend(node_choice(spec));
    let (devices, counters) = (list(spec, "devices"), list(spec, "sharedCounters"));
    if !devices.is_empty() && !counters.is_empty() {
        let why = "only one of `sharedCounters` or `devices` is allowed";
        causes.push(Cause::invalid("spec", json!("<omitted>"), why));
    }
    if counters.len() > COUNTER_SETS {
        causes.push(Cause::too_many("spec.sharedCounters", counters.len(), COUNTER_SETS));
    }
    causes.extend(duplicates("spec.sharedCounters", counters, ".name"));
    let extras =
        |device: &Value| !list(device, "taints").is_empty() || !list(device, "consumesCounters").is_empty();
    let most = if devices.iter().any(extras) { DEVICES_WITH_EXTRAS } else { DEVICES };
    if devices.len() > most {
        causes.push(Cause::too_many("spec.devices", devices.len(), most));
        return causes;
    }
    for (index, item) in devices.iter().enumerate() {
        causes.extend(device(&format!("spec.devices[{index}]"), item));
    }
    causes.extend(duplicates("spec.devices", devices, ""));
    causes
}

fn pool(pool: &Value) -> Vec<Cause> {
    let mut causes = vec![];
    let name = pool["name"].as_str().unwrap_or_default();
    if name.is_empty() {
        causes.push(Cause::required("spec.pool.name", ""));
    } else if name.len() > 253 || !name.split('/').all(is_subdomain) {
        causes.push(Cause::invalid("spec.pool.name", &pool["name"], NOT_A_SUBDOMAIN));
    }
    if pool["resourceSliceCount"].as_i64().unwrap_or_default() <= 0 {
        let shown = json!(pool["resourceSliceCount"].as_i64().unwrap_or_default());
        causes.push(Cause::invalid("spec.pool.resourceSliceCount", &shown, "must be greater than zero"));
    }
    if pool["generation"].as_i64().unwrap_or_default() < 0 {
        let why = "must be greater than or equal to zero";
        causes.push(Cause::invalid("spec.pool.generation", &pool["generation"], why));
    }
    causes
}

fn node_choice(spec: &Value) -> Option<Cause> {
    let ways = ["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let set = |way: &&str| !matches!(&spec[*way], Value::Null | Value::Bool(false)) && spec[*way] != "";
    let names = "`nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection`";
    let found: Vec<_> = ways.iter().filter(|way| set(way)).map(|way| format!("`{way}`")).collect();
    let why = format!("exactly one of {names} is required");
    match found.len() {
        1 => None,
        0 => Some(Cause::required("spec", &why)),
        _ => {
            let shown = json!(format!("{{{}}}", found.join(", ")));
            Some(Cause::invalid("spec", shown, &format!("{why}, but multiple fields are set")))
        }
    }
}

fn duplicates(path: &str, items: &[Value], field: &str) -> Vec<Cause> {
    let is_again =
        |index: usize| items[..index].iter().any(|earlier| earlier["name"] == items[index]["name"]);
    let again = (0..items.len()).filter(|index| is_again(*index));
    again.map(|index| Cause::duplicate(format!("{path}[{index}]{field}"), &items[index]["name"])).collect()
}

fn device(path: &str, device: &Value) -> Vec<Cause> {
    let mut causes = vec![];
    let name = device["name"].as_str().unwrap_or_default();
    if name.is_empty() {
        causes.push(Cause::required(format!("{path}.name"), ""));
    } else if name.len() > 63 || !is_label(name) {
        causes.push(Cause::invalid(format!("{path}.name"), &device["name"], NOT_A_LABEL));
    }
    let (conditions, failures) = ("bindingConditions", "bindingFailureConditions");
    for (list, other) in [(conditions, failures), (failures, conditions)] {
        let (field, given) = (format!("{path}.{list}"), self::list(device, list));
        if given.len() > BINDING_CONDITIONS {
            causes.push(Cause::too_many(field, given.len(), BINDING_CONDITIONS));
        } else if given.is_empty() && !self::list(device, other).is_empty() {
            let why = format!("{list} are required to use {other}");
            causes.push(Cause::invalid(field, json!([]), &why));
        }
    }
    let count = |key: &str| device[key].as_object().map_or(0, serde_json::Map::len);
    let both = count("attributes") + count("capacity");
    if both > ATTRIBUTES_AND_CAPACITIES {
        let why = format!(
            "the total number of attributes and capacities must not exceed {ATTRIBUTES_AND_CAPACITIES}"
        );
        causes.push(Cause::invalid(path, json!(both), &why));
    }
    for (key, value) in device["attributes"].as_object().into_iter().flatten() {
        let kinds = value.as_object().map_or(0, serde_json::Map::len);
        if kinds != 1 {
            let field = format!("{path}.attributes[{key}]");
            let shown = if kinds == 0 { "\"\"".to_owned() } else { attribute_in_go(value) };
            causes.push(Cause::invalid(field, shown, "exactly one value must be specified"));
        }
    }
    let taints = list(device, "taints");
    if taints.len() > TAINTS {
        causes.push(Cause::too_many(format!("{path}.taints"), taints.len(), TAINTS));
    }
    for (index, taint) in taints.iter().enumerate() {
        if !matches!(taint["effect"].as_str(), Some("NoSchedule" | "NoExecute" | "None")) {
            let field = format!("{path}.taints[{index}].effect");
            let message = format!(
                "Unsupported value: {}: supported values: \"NoExecute\", \"NoSchedule\", \"None\"",
                taint["effect"]
            );
            causes.push(Cause { reason: "FieldValueNotSupported", message, field });
        }
    }
    causes
}

/// As a Go program prints its type.
fn attribute_in_go(attribute: &Value) -> String {
    let one = [("int", "Int"), ("bool", "Bool"), ("string", "String"), ("version", "Version")];
    let single = one.map(|(kind, name)| format!("\"{name}Value\":{}", attribute[kind]));
    let several = one.map(|(kind, name)| format!("\"{name}Values\":{}", attribute[format!("{kind}s")]));
    let names: Vec<_> = single.into_iter().chain(several).collect();
    format!("{{{}}}", names.join(","))
}

/// Whether a capacity is no quantity: a server cannot read such an object at all.
pub(super) fn has_unreadable_quantity(slice: &Value) -> bool {
    let devices = list(&slice["spec"], "devices").iter();
    let mut quantities = devices
        .flat_map(|device| device["capacity"].as_object().into_iter().flatten())
        .filter_map(|(_, capacity)| capacity["value"].as_str());
    quantities.any(|quantity| !is_quantity(quantity))
}

/// By the regular expression [`QUANTITY`].
fn is_quantity(text: &str) -> bool {
    let is_sign = |byte: char| matches!(byte, '+' | '-');
    let number = text.strip_prefix(is_sign).unwrap_or(text);
    let suffix = number.trim_start_matches(|byte: char| byte.is_ascii_digit() || byte == '.');
    let exponent = suffix.trim_start_matches(|byte| "eEinumkKMGTP".contains(byte));
    let exponent = exponent.strip_prefix(is_sign).unwrap_or(exponent);
    number.len() > suffix.len() && exponent.bytes().all(|byte| byte.is_ascii_digit())
}

fn slice_change(new: &Value, old: &Value) -> Vec<Cause> {
    let fields = ["/spec/nodeName", "/spec/driver", "/spec/pool/name"].into_iter();
    let changed = fields.filter(|field| new.pointer(field) != old.pointer(field));
    let cause = |field: &str| {
        let shown = new.pointer(field).unwrap_or(&Value::Null);
        Cause::invalid(field[1..].replace('/', "."), shown, IMMUTABLE)
    };
    changed.map(cause).collect()
}

fn claim_change(new: &Value, old: &Value) -> Vec<Cause> {
    let mut causes = vec![];
    if new["spec"] != old["spec"] {
        causes.push(Cause::invalid("spec", &new["spec"], IMMUTABLE));
    }
    let (now, before) = (&new["status"]["allocation"], &old["status"]["allocation"]);
    if !before.is_null() && !now.is_null() && now != before {
        causes.push(immutable_allocation(now));
    }
    causes
}

/// Also what a write is refused with that changes nothing but how the parameters are written.
pub(super) fn immutable_allocation(allocation: &Value) -> Cause {
    Cause::invalid("status.allocation", in_go(allocation), IMMUTABLE)
}

/// With names as a Go program prints the fields of its types.
fn in_go(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| {
                let mut name = key.clone();
                name[..1].make_ascii_uppercase();
                let value = if key == "parameters" { value.clone() } else { in_go(value) };
                (name, value)
            })
            .collect(),
        Value::Array(items) => items.iter().map(in_go).collect(),
        other => other.clone(),
    }
}

/// Every reported device must be an allocated one.
fn claim_status(claim: &Value) -> Vec<Cause> {
    let status = &claim["status"];
    let mut causes = vec![];
    if !list(status, "reservedFor").is_empty() && status["allocation"].is_null() {
        let why = "may not be specified when `allocated` is not set";
        causes.push(Cause::forbidden("status.reservedFor", why));
    }
    let allocated = list(&status["allocation"]["devices"], "results");
    let id = |device: &Value| {
        ["driver", "pool", "device", "shareID"].map(|key| device[key].as_str().unwrap_or_default().to_owned())
    };
    let devices = list(status, "devices");
    for (index, device) in devices.iter().enumerate() {
        let [driver, pool, name, share] = id(device);
        let shown = format!(
            "{{\"Driver\":\"{driver}\",\"Pool\":\"{pool}\",\"Device\":\"{name}\",\"ShareID\":\"{share}\"}}"
        );
        let field = format!("status.devices[{index}]");
        if devices[..index].iter().any(|earlier| id(earlier) == id(device)) {
            causes.push(Cause::duplicate(field, &shown));
        } else if !allocated.iter().any(|result| id(result) == id(device)) {
            causes.push(Cause::invalid(field, &shown, "must be an allocated device in the claim"));
        }
    }
    causes
}

/// An event that is made in a group. `event` is as stored.
pub(super) fn event(event: &Value, new_group: bool) -> Vec<Cause> {
    let mut causes = vec![];
    let text = |key: &str| event[key].as_str().unwrap_or_default();
    let namespace = event["metadata"]["namespace"].as_str().unwrap_or_default();
    let about = event["involvedObject"]["namespace"].as_str().unwrap_or_default();
    let is_here = about == namespace || (about.is_empty() && matches!(namespace, "default" | "kube-system"));
    // Events that have the field are of the new kind, which may be about another namespace.
    if event["eventTime"].is_null() && !is_here {
        causes.push(Cause::invalid(
            "involvedObject.namespace",
            json!(about),
            "does not match event.namespace",
        ));
    }
    if !new_group {
        return causes;
    }
    for (stored, named) in [
        ("eventTime", "eventTime"),
        ("reportingComponent", "reportingController"),
        ("reportingInstance", "reportingInstance"),
        ("action", "action"),
        ("reason", "reason"),
    ] {
        if text(stored).is_empty() {
            causes.push(Cause::required(named, ""));
        } else if text(stored).len() > 128 {
            let why = "can have at most 128 characters";
            causes.push(Cause::invalid(named, &event[stored], why));
        }
    }
    if !matches!(text("type"), "Normal" | "Warning") {
        causes.push(Cause::invalid("type", json!(text("type")), "has invalid value: "));
    }
    if text("message").len() > NOTE_BYTES {
        causes.push(Cause::invalid("note", json!(""), "can have at most 1024 characters"));
    }
    causes
}
