//! Each rule with an object that keeps it and objects that break it, with the field and the reason of an API server.

mod claims;
mod metadata;
mod others;
mod property;
mod recorded;
mod slices;
mod statuses;

use serde_json::{Value, json};

use super::{Compiled, new_expressions};
use crate::resources::{Resource, resource};
use crate::status::Cause;

fn resource_of(object: &Value) -> &'static Resource {
    resource(object["kind"].as_str().unwrap()).unwrap()
}

/// Checks an object by the rules, with the expressions compiled.
fn object(resource: &Resource, new: &Value, old: Option<&Value>) -> Vec<Cause> {
    let mut compiled = Compiled::default();
    let expressions = new_expressions(resource, new, old);
    let mut causes: Vec<Cause> = expressions.as_ref().err().cloned().into_iter().collect();
    compiled.compile(compiled.missing(&expressions.unwrap_or_default()));
    causes.extend(super::object(resource, new, old, &compiled));
    causes
}

/// Returns the problems of an object: the field, and the reason without `FieldValue`.
fn wrong(new: &Value, old: Option<&Value>) -> Vec<String> {
    let causes = object(resource_of(new), new, old);
    causes.iter().map(refusal).collect()
}

fn refusal(cause: &Cause) -> String {
    let reason = cause.reason.trim_start_matches("FieldValue");
    format!("{}: {reason}", cause.field)
}

/// A copy with the value at a JSON pointer set, or removed where it is null. The field may be new; what it is in is there.
fn with(object: &Value, pointer: &str, value: Value) -> Value {
    let mut object = object.clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/");
    match object
        .pointer_mut(parent)
        .unwrap_or_else(|| panic!("no {parent} in the object"))
    {
        Value::Array(items) => match key.as_str() {
            "-" => items.push(value),
            index => items[index.parse::<usize>().unwrap()] = value,
        },
        Value::Object(fields) if value.is_null() => drop(fields.remove(&key)),
        Value::Object(fields) => drop(fields.insert(key, value)),
        other => panic!("{parent} is {other}"),
    }
    object
}

/// Each change of a good object, and what it is refused with.
fn assert_each(good: &Value, cases: &[(&str, Value, &[&str])]) {
    assert_eq!(wrong(good, None), Vec::<String>::new(), "the good object");
    for (pointer, value, expected) in cases {
        assert_eq!(
            wrong(&with(good, pointer, value.clone()), None),
            *expected,
            "{pointer} = {value}"
        );
    }
}

/// Checks changes of an existing object like [`assert_each`].
fn assert_each_change(old: &Value, cases: &[(&str, Value, &[&str])]) {
    assert_eq!(wrong(old, Some(old)), Vec::<String>::new(), "no change");
    for (pointer, value, expected) in cases {
        assert_eq!(
            wrong(&with(old, pointer, value.clone()), Some(old)),
            *expected,
            "{pointer} = {value}"
        );
    }
}

fn claim() -> Value {
    json!({
        "kind": "ResourceClaim", "metadata": { "name": "c", "namespace": "default" },
        "spec": { "devices": {
            "requests": [
                { "name": "gpu", "exactly": {
                    "deviceClassName": "gpu.example.com", "allocationMode": "ExactCount", "count": 1,
                    "selectors": [{ "cel": { "expression": "true" } }],
                    "tolerations": [{ "key": "example.com/t", "operator": "Exists", "effect": "NoExecute" }],
                } },
                { "name": "nic", "firstAvailable": [
                    { "name": "fast", "deviceClassName": "fast.example.com", "allocationMode": "All" },
                    { "name": "slow", "deviceClassName": "slow.example.com", "allocationMode": "ExactCount", "count": 2 },
                ] },
            ],
            "constraints": [{ "requests": ["gpu", "nic/fast"], "matchAttribute": "example.com/numa" }],
            "config": [{ "requests": ["nic"], "opaque": { "driver": "nic.example.com", "parameters": { "mtu": 9000 } } }],
        } },
    })
}

#[test]
fn message_has_value_and_rule() {
    let named = with(&claim(), "/metadata/name", json!("Bad_Name"));
    let named = object(resource_of(&named), &named, None);
    let messages: Vec<_> = named.iter().map(|cause| cause.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "Invalid value: \"Bad_Name\": must be an RFC 1123 subdomain: at most 253 bytes, labels of a-z, 0-9 and '-' with dots \
             between them"
        ]
    );
}
