//! What the kinds of patches do to an object.

use serde_json::{Map, Value};

/// Lists that are maps by some fields of their items, for apply.
const KEYED: [(&str, &[&str]); 6] = [
    ("status.devices", &["driver", "pool", "device", "shareID"]),
    ("status.devices.conditions", &["type"]),
    ("status.conditions", &["type"]),
    ("status.reservedFor", &["uid"]),
    ("metadata.ownerReferences", &["uid"]),
    ("spec.taints", &["key", "effect"]),
];
/// Lists that are sets.
const SETS: [&str; 1] = ["metadata.finalizers"];

/// RFC 7396.
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    let fields = object(target);
    for (key, value) in patch {
        if value.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// As [`merge`], but the conditions of nodes and pods are merged by their type.
pub(super) fn strategic(target: &mut Value, patch: &Value) {
    let conditions = patch["status"]["conditions"].clone();
    let mut rest = patch.clone();
    if let Some(status) = rest.get_mut("status").and_then(Value::as_object_mut) {
        status.remove("conditions");
    }
    merge(target, &rest);
    if conditions.is_array() {
        let at = object(target).entry("status").or_insert(Value::Null);
        let at = object(at).entry("conditions").or_insert(Value::Null);
        join(at, &conditions, "status.conditions");
    }
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("it has just been made an object")
}

/// RFC 6902.
pub(super) fn json(target: &mut Value, operations: &Value) -> Result<(), String> {
    let operations = operations.as_array().ok_or("a JSON patch is a list of operations")?;
    for operation in operations {
        let text = |key: &str| operation[key].as_str().ok_or_else(|| format!("no {key} in {operation}"));
        let path = text("path")?;
        let value = operation["value"].clone();
        match text("op")? {
            "add" => add(target, path, value)?,
            "remove" => drop(remove(target, path)?),
            "replace" => {
                remove(target, path)?;
                add(target, path, value)?;
            }
            "move" => {
                let moved = remove(target, text("from")?)?;
                add(target, path, moved)?;
            }
            "copy" => {
                let from = text("from")?;
                let copied = target.pointer(from).cloned().ok_or_else(|| format!("nothing at {from}"))?;
                add(target, path, copied)?;
            }
            "test" => {
                if target.pointer(path) != Some(&value) {
                    return Err(format!("testing path {path} failed"));
                }
            }
            other => return Err(format!("unexpected kind: {other}")),
        }
    }
    Ok(())
}

/// The holder of the last part of a path, and that part.
fn holder<'a>(target: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let (parent, last) = path.rsplit_once('/').ok_or_else(|| format!("{path:?} is no path"))?;
    let found = target.pointer_mut(parent).ok_or_else(|| format!("nothing at {parent:?}"))?;
    Ok((found, last.replace("~1", "/").replace("~0", "~")))
}

fn add(target: &mut Value, path: &str, value: Value) -> Result<(), String> {
    if path.is_empty() {
        *target = value;
        return Ok(());
    }
    match holder(target, path)? {
        (Value::Object(fields), key) => {
            fields.insert(key, value);
        }
        (Value::Array(items), key) => {
            let at = if key == "-" { Some(items.len()) } else { key.parse().ok() };
            let at = at.filter(|at| *at <= items.len()).ok_or_else(|| format!("no place at {path}"))?;
            items.insert(at, value);
        }
        _ => return Err(format!("no place at {path}")),
    }
    Ok(())
}

fn remove(target: &mut Value, path: &str) -> Result<Value, String> {
    let removed = match holder(target, path)? {
        (Value::Object(fields), key) => fields.remove(&key),
        (Value::Array(items), key) => {
            key.parse().ok().filter(|at: &usize| *at < items.len()).map(|at| items.remove(at))
        }
        _ => None,
    };
    removed.ok_or_else(|| format!("nothing at {path}"))
}

/// Server-side apply of `new` by a manager that applied `last` before: fields that are gone from what it applies go.
pub(super) fn apply(current: &mut Value, last: Option<&Value>, new: &Value) {
    if let Some(last) = last {
        prune(current, last, new, "");
    }
    join(current, new, "");
}

/// Fields of `new` that `current` has with another value, where the manager did not set that value itself.
pub(super) fn foreign(current: &Value, last: Option<&Value>, new: &Value, path: &str) -> Vec<String> {
    match (current, new) {
        (Value::Null, _) => vec![],
        (Value::Object(old), Value::Object(fields)) => fields
            .iter()
            .filter(|(key, _)| !matches!(key.as_str(), "apiVersion" | "kind"))
            .flat_map(|(key, value)| {
                let last = last.and_then(|last| last.get(key));
                foreign(old.get(key).unwrap_or(&Value::Null), last, value, &format!("{path}.{key}"))
            })
            .collect(),
        (Value::Array(old), Value::Array(items)) if keys(path.trim_start_matches('.')).is_some() => {
            let keys = keys(path.trim_start_matches('.')).expect("it was there a moment ago");
            let same = |one: &Value, other: &Value| keys.iter().all(|key| one[*key] == other[*key]);
            let mut found = vec![];
            for item in items {
                let Some(old) = old.iter().find(|old| same(old, item)) else { continue };
                let last = last.and_then(Value::as_array);
                let last = last.and_then(|last| last.iter().find(|last| same(last, item)));
                found.extend(foreign(old, last, item, path));
            }
            found
        }
        (old, new) if old == new || last == Some(old) => vec![],
        _ => vec![path.to_owned()],
    }
}

fn keys(path: &str) -> Option<&'static [&'static str]> {
    KEYED.iter().find(|(keyed, _)| *keyed == path).map(|(_, keys)| *keys)
}

fn below(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn join(current: &mut Value, new: &Value, path: &str) {
    match new {
        Value::Object(fields) => {
            let target = object(current);
            for (key, value) in fields {
                join(target.entry(key.clone()).or_insert(Value::Null), value, &below(path, key));
            }
        }
        Value::Array(items) if current.is_null() || current.is_array() => {
            if current.is_null() {
                *current = Value::Array(vec![]);
            }
            let Some(old) = current.as_array_mut() else { return };
            if let Some(keys) = keys(path) {
                for item in items {
                    let same = |old: &&mut Value| keys.iter().all(|key| old[*key] == item[*key]);
                    match old.iter_mut().find(same) {
                        Some(old) => join(old, item, path),
                        None => old.push(item.clone()),
                    }
                }
            } else if SETS.contains(&path) {
                let added: Vec<Value> = items.iter().filter(|item| !old.contains(item)).cloned().collect();
                old.extend(added);
            } else {
                old.clone_from(items);
            }
        }
        other => *current = other.clone(),
    }
}

fn prune(current: &mut Value, last: &Value, new: &Value, path: &str) {
    match (current, last) {
        (Value::Object(fields), Value::Object(last)) => {
            for (key, last) in last {
                let Some(value) = fields.get_mut(key) else { continue };
                let path = below(path, key);
                match new.get(key) {
                    Some(new) => prune(value, last, new, &path),
                    // Parts of a map or a keyed list may be others'.
                    None if value.is_object() || keys(&path).is_some() => {
                        prune(value, last, &Value::Null, &path);
                        if value.as_object().is_some_and(Map::is_empty)
                            || value.as_array().is_some_and(Vec::is_empty)
                        {
                            fields.remove(key);
                        }
                    }
                    None => drop(fields.remove(key)),
                }
            }
        }
        (Value::Array(items), Value::Array(last)) => {
            let Some(keys) = keys(path) else { return };
            let same = |one: &Value, other: &Value| keys.iter().all(|key| one[*key] == other[*key]);
            let new = new.as_array().map(Vec::as_slice).unwrap_or_default();
            items.retain(|item| {
                !last.iter().any(|last| same(last, item)) || new.iter().any(|new| same(new, item))
            });
            for item in items {
                let last = last.iter().find(|last| same(last, item));
                let new = new.iter().find(|new| same(new, item));
                if let (Some(last), Some(new)) = (last, new) {
                    prune(item, last, new, path);
                }
            }
        }
        _ => {}
    }
}

/// Takes a field out of a document: `spec.devices[*].taints`.
pub(super) fn drop_field(document: &mut Value, path: &str) {
    let (head, rest) = match path.split_once('.') {
        Some((head, rest)) => (head, Some(rest)),
        None => (path, None),
    };
    if let Some(list) = head.strip_suffix("[*]") {
        let items = document.get_mut(list).and_then(Value::as_array_mut);
        for item in items.into_iter().flatten() {
            if let Some(rest) = rest {
                drop_field(item, rest);
            }
        }
        return;
    }
    match rest {
        Some(rest) => {
            if let Some(inner) = document.get_mut(head) {
                drop_field(inner, rest);
            }
        }
        None => {
            if let Some(fields) = document.as_object_mut() {
                fields.remove(head);
            }
        }
    }
}
