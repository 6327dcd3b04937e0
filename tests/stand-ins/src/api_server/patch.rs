//! What patches do to an object.

use serde_json::{Map, Value};

/// RFC 7396.
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let fields = target.as_object_mut().expect("it has just been made an object");
    for (key, value) in patch {
        if value.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Server-side apply of a claim's `status.devices`, a list that is merged by driver, pool, device and share. `last` is what the same
/// manager applied before: its entries that `new` does not have are removed.
pub(super) fn apply(current: &mut Value, last: Option<&Value>, new: &Value) {
    let list = |object: &Value| object["status"]["devices"].as_array().cloned().unwrap_or_default();
    let is_same =
        |a: &Value, b: &Value| ["driver", "pool", "device", "shareID"].iter().all(|key| a[*key] == b[*key]);
    let has = |list: &[Value], device: &Value| list.iter().any(|other| is_same(other, device));
    let (last, new) = (last.map(list).unwrap_or_default(), list(new));
    let mut devices = list(current);
    devices.retain(|device| !has(&last, device) || has(&new, device));
    for device in &new {
        match devices.iter_mut().find(|other| is_same(other, device)) {
            Some(own) if has(&last, own) => own.clone_from(device),
            Some(other) => merge(other, device),
            None => devices.push(device.clone()),
        }
    }
    match devices.is_empty() {
        true => drop(current["status"].as_object_mut().map(|status| status.remove("devices"))),
        false => current["status"]["devices"] = devices.into(),
    }
}

/// Removes a field: `spec.devices[*].taints`.
pub(super) fn drop_field(object: &mut Value, path: &str) {
    let Some((head, rest)) = path.split_once('.') else {
        object.as_object_mut().map(|fields| fields.remove(path));
        return;
    };
    let items = match head.strip_suffix("[*]") {
        Some(list) => object.get_mut(list).and_then(Value::as_array_mut).map(Vec::as_mut_slice),
        None => object.get_mut(head).map(std::slice::from_mut),
    };
    items.into_iter().flatten().for_each(|item| drop_field(item, rest));
}
