//! Access to the fields of an object, lists with their bounds, and the causes that only the rules need. A field of another type than the
//! API's counts as not set: the decoder has refused it before.

use std::collections::BTreeSet;

use nodedock_model::check::{Field, Findings, Reason, Step, Violation};
use serde_json::{Map, Value, json};

use crate::status::Cause;

/// Problems of an object so far, in the order in which an API server lists them.
pub(super) type Causes = Vec<Cause>;

/// Bound for lists of any length.
pub(super) const UNBOUNDED: usize = usize::MAX;

pub(super) fn list<'a>(object: &'a Value, key: &str) -> &'a [Value] {
    object[key]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default()
}

pub(super) fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}

/// The texts of a list; an item that is none counts as empty.
pub(super) fn texts(object: &Value, key: &str) -> Vec<String> {
    let text = |item: &Value| item.as_str().unwrap_or_default().to_owned();
    list(object, key).iter().map(text).collect()
}

pub(super) fn integer(object: &Value, key: &str) -> i64 {
    object[key].as_i64().unwrap_or_default()
}

pub(super) fn flag(object: &Value, key: &str) -> bool {
    object[key].as_bool().unwrap_or_default()
}

pub(super) fn entries<'a>(
    object: &'a Value,
    key: &str,
) -> impl Iterator<Item = (&'a String, &'a Value)> {
    object[key].as_object().into_iter().flatten()
}

pub(super) fn count(object: &Value, key: &str) -> usize {
    object[key].as_object().map_or(0, Map::len)
}

/// Returns true if an API server treats two values as equal: a null, an empty list and an empty object equal an absent value.
pub(super) fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            let mut values = keys
                .into_iter()
                .map(|key| [a, b].map(|map| map.get(key).unwrap_or(&Value::Null)));
            values.all(|[a, b]| same(a, b))
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (a, b) => a == b || (is_empty(a) && is_empty(b)),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
        _ => false,
    }
}

/// Checks each item of the list `key`, unless there are more than `most`.
pub(super) fn each(
    causes: &mut Causes,
    at: &str,
    object: &Value,
    key: &str,
    most: usize,
    mut check: impl FnMut(&mut Causes, &str, &Value),
) {
    let (field, items) = (format!("{at}.{key}"), list(object, key));
    if items.len() > most {
        // The items are not looked at: there may be very many.
        causes.push(Cause::too_many(field, items.len(), most));
        return;
    }
    for (index, item) in items.iter().enumerate() {
        check(causes, &format!("{field}[{index}]"), item);
    }
}

/// Checks the items like [`each`], then refuses items of which an earlier one has the same `identity`.
pub(super) fn set(
    causes: &mut Causes,
    at: &str,
    object: &Value,
    key: &str,
    most: usize,
    identity: impl Fn(&Value) -> String,
    check: impl FnMut(&mut Causes, &str, &Value),
) {
    each(causes, at, object, key, most, check);
    let items = list(object, key);
    if items.len() > most {
        return;
    }
    let mut seen = BTreeSet::new();
    for (index, item) in items.iter().enumerate() {
        let identity = identity(item);
        if seen.contains(&identity) {
            causes.push(Cause::duplicate(format!("{at}.{key}[{index}]"), &identity));
        }
        seen.insert(identity);
    }
}

/// The identity of an item by one of its fields, as a message shows it.
pub(super) fn by(key: &'static str) -> impl Fn(&Value) -> String {
    move |item| json!(text(item, key)).to_string()
}

/// The identity of an item that is a text.
pub(super) fn itself(item: &Value) -> String {
    json!(item.as_str().unwrap_or_default()).to_string()
}

/// Returns [`Cause::invalid`] for a text.
pub(super) fn invalid(field: impl Into<String>, value: &str, why: &str) -> Cause {
    Cause::invalid(field, json!(value), why)
}

pub(super) fn unsupported(field: impl Into<String>, value: &str, supported: &[&str]) -> Cause {
    let supported: Vec<String> = supported
        .iter()
        .map(|value| json!(value).to_string())
        .collect();
    let message = format!(
        "Unsupported value: {}: supported values: {}",
        json!(value),
        supported.join(", ")
    );
    Cause {
        reason: "FieldValueNotSupported",
        message,
        field: field.into(),
    }
}

/// A text or document that has more than `most` bytes.
pub(super) fn too_long(field: impl Into<String>, most: usize) -> Cause {
    let message = format!("Too long: may not be more than {most} bytes");
    Cause {
        reason: "FieldValueTooLong",
        message,
        field: field.into(),
    }
}

pub(super) fn not_found(field: impl Into<String>, value: &str, why: &str) -> Cause {
    let message = format!("Not found: {}: {why}", json!(value));
    Cause {
        reason: "FieldValueNotFound",
        message,
        field: field.into(),
    }
}

pub(super) fn internal(field: impl Into<String>, why: &str) -> Cause {
    Cause {
        reason: "InternalError",
        message: format!("Internal error: {why}"),
        field: field.into(),
    }
}

/// Runs a check that drivers' answers have as well: what it finds is refused below `at`.
pub(super) fn checked<T>(
    causes: &mut Causes,
    at: &str,
    check: impl FnOnce(&mut Findings) -> T,
) -> T {
    let mut findings = Findings::default();
    let result = check(&mut findings);
    causes.extend(findings.into_iter().map(|violation| cause(at, violation)));
    result
}

fn cause(at: &str, violation: Violation) -> Cause {
    let mut field = at.to_owned();
    for step in violation.path() {
        match step {
            Step::Field(name) => field += &format!(".{}", api_name(*name)),
            Step::Entry(name, index) => field += &format!(".{}[{index}]", api_name(*name)),
            Step::Named(name, key) => field += &format!(".{}[{key}]", api_name(*name)),
        }
    }
    match (violation.field(), violation.reason) {
        // A rule about several fields is refused where these are.
        (
            Some(of @ (Field::AttributeValues | Field::AttributesAndCapacities)),
            Reason::TooMany { count, max },
        ) => {
            let why = format!("the total number of {of} must not exceed {max}");
            Cause::invalid(at, count, &why)
        }
        (_, reason) => refused(field, reason),
    }
}

fn refused(field: String, reason: Reason) -> Cause {
    match reason {
        Reason::Required => Cause::required(field, ""),
        Reason::TooMany { count, max } => Cause::too_many(field, count, max),
        Reason::TooLong { max, .. } => too_long(field, max),
        Reason::Duplicate(identity) => Cause::duplicate(field, json!(identity)),
        Reason::Invalid { value, rule } => invalid(field, &value, &rule),
        Reason::Forbidden(why) => Cause::forbidden(field, why),
        Reason::Inconsistent(why) => Cause::invalid(field, "null", &why),
    }
}

/// Returns the name that the API has for a field of the driver contract.
fn api_name(field: Field) -> String {
    let other: &str = field.into();
    let name = match field {
        Field::Booleans => "bools",
        Field::DefaultAmount => "default",
        Field::Kind => "type",
        Field::Policy => "requestPolicy",
        Field::Range => "validRange",
        Field::Text => "string",
        Field::Texts => "strings",
        Field::Values => "validValues",
        _ => other,
    };
    let (start, rest) = name.split_once('-').unwrap_or((name, ""));
    let capitalized = rest.split('-').filter_map(|word| {
        let (first, rest) = word.split_at_checked(1)?;
        Some(first.to_uppercase() + rest)
    });
    capitalized.fold(start.to_owned(), |name, word| name + &word)
}

/// Refuses a text that is none of `supported`, and a missing one.
pub(super) fn one_of(causes: &mut Causes, field: &str, value: &str, supported: &[&str]) {
    match value {
        "" => causes.push(Cause::required(field, "")),
        value if supported.contains(&value) => {}
        value => causes.push(unsupported(field, value, supported)),
    }
}
