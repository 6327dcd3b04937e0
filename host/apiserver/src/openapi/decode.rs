//! Findings of a strict decoder about an object: fields that it does not know, and values of another type than the field has.

use jiff::Timestamp;
use nodedock_model::quantity;
use serde_json::{Map, Number, Value};

use super::shapes::{SHAPES, Shape};

/// Unknown fields of one object that are named; a decoder of Go stops at as many.
const UNKNOWN_FIELDS: usize = 100;
/// Regular expression that a quantity has to match.
const QUANTITY: &str = "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$";

/// Returns the fields of an object, as it is stored, that its kind does not have, in the words of a strict decoder:
/// `unknown field "spec.nosuch"`. At most 100; none for a kind that is not served.
pub(crate) fn unknown_fields(kind: &str, object: &Value) -> Vec<String> {
    let mut found = vec![];
    if let Some(shape) = shape_of(kind) {
        let mut path = vec![];
        unknown(shape, object, &mut path, &mut found);
    }
    found.truncate(UNKNOWN_FIELDS);
    found
}

/// Returns the message of a refusal for unknown fields, with `fieldValidation=Strict`.
pub(crate) fn strict_error(kind: &str, version: &str, unknown_fields: &[String]) -> String {
    cannot_be_handled(
        kind,
        version,
        &format!("strict decoding error: {}", unknown_fields.join(", ")),
    )
}

/// Removes the fields of an object, as it is stored, that its kind does not have, and those that are null: they count as not set.
pub(crate) fn prune(kind: &str, object: &mut Value) {
    if let Some(shape) = shape_of(kind) {
        prune_as(shape, object);
    }
}

/// Returns the message of a refusal for the first value of another type than its field has, for a quantity and for a time that cannot
/// be read. A field that is null counts as not set; a value of a map and an item of a list cannot be null, which typed clients do not read.
pub(crate) fn decode_error(kind: &str, version: &str, object: &Value) -> Option<String> {
    let name = SHAPES.kinds.get(kind)?;
    let place = Place {
        owner: None,
        path: vec![],
    };
    let error = mismatch(&Shape::Named(name.clone()), object, &place)?;
    Some(cannot_be_handled(kind, version, &error))
}

fn cannot_be_handled(kind: &str, version: &str, why: &str) -> String {
    format!("{kind} in version \"{version}\" cannot be handled as a {kind}: {why}")
}

fn shape_of(kind: &str) -> Option<&'static Shape> {
    SHAPES.types.get(SHAPES.kinds.get(kind)?)
}

/// The shape itself, if it is a name.
fn resolved(shape: &Shape) -> &Shape {
    match shape {
        Shape::Named(name) => SHAPES.types.get(name).unwrap_or(&Shape::Any),
        shape => shape,
    }
}

fn unknown(shape: &Shape, value: &Value, path: &mut Vec<String>, found: &mut Vec<String>) {
    if found.len() >= UNKNOWN_FIELDS {
        return;
    }
    match (resolved(shape), value) {
        (Shape::Object(known), Value::Object(fields)) => {
            for (key, value) in fields {
                path.push(format!(".{key}"));
                match known.get(key) {
                    Some(shape) => unknown(shape, value, path, found),
                    None => found.push(format!(
                        "unknown field \"{}\"",
                        path.concat().trim_start_matches('.')
                    )),
                }
                path.pop();
            }
        }
        (Shape::Map(shape), Value::Object(fields)) => {
            for (key, value) in fields {
                path.push(format!(".{key}"));
                unknown(shape, value, path, found);
                path.pop();
            }
        }
        (Shape::List(shape), Value::Array(items)) => {
            for (index, value) in items.iter().enumerate() {
                path.push(format!("[{index}]"));
                unknown(shape, value, path, found);
                path.pop();
            }
        }
        _ => {}
    }
}

fn prune_as(shape: &Shape, value: &mut Value) {
    match (resolved(shape), value) {
        (Shape::Object(known), Value::Object(fields)) => {
            fields.retain(|key, value| known.contains_key(key) && !value.is_null());
            for (key, value) in fields {
                known
                    .get(key)
                    .into_iter()
                    .for_each(|shape| prune_as(shape, value));
            }
        }
        (Shape::Map(shape), Value::Object(fields)) => {
            fields.values_mut().for_each(|value| prune_as(shape, value));
        }
        (Shape::List(shape), Value::Array(items)) => {
            items.iter_mut().for_each(|item| prune_as(shape, item))
        }
        _ => {}
    }
}

/// Position of a value, as a decoder of Go names it.
struct Place<'a> {
    /// The name of the schema of the type that has the field.
    owner: Option<&'a str>,
    /// Fields and keys, without the numbers of items.
    path: Vec<&'a str>,
}

fn mismatch(shape: &Shape, value: &Value, place: &Place<'_>) -> Option<String> {
    match (resolved(shape), value) {
        (_, Value::Null) | (Shape::Any, _) => None,
        (Shape::Object(known), Value::Object(fields)) => {
            let owner = if let Shape::Named(name) = shape {
                Some(name.as_str())
            } else {
                place.owner
            };
            first(fields, place, owner, |key| known.get(key), mismatch)
        }
        (Shape::Map(shape), Value::Object(fields)) => {
            first(fields, place, place.owner, |_| Some(shape), mismatch_in)
        }
        (Shape::List(shape), Value::Array(items)) => items
            .iter()
            .find_map(|item| mismatch_in(shape, item, place)),
        (Shape::Quantity, Value::String(text)) => quantity::nanos(text)
            .is_none()
            .then(|| format!("quantities must match the regular expression '{QUANTITY}'")),
        (Shape::Time, Value::String(text)) => {
            let is_time = text.parse::<Timestamp>().is_ok();
            (!is_time).then(|| {
                format!("parsing time {value}: it has not the form \"2006-01-02T15:04:05Z07:00\"")
            })
        }
        (Shape::Integer(name), Value::Number(number)) if fits(name, number) => None,
        // As `IntOrString` of Kubernetes has it.
        (Shape::IntOrText, Value::Number(number)) if fits("int32", number) => None,
        (Shape::Text, Value::String(_))
        | (Shape::Boolean, Value::Bool(_))
        | (Shape::Number | Shape::Quantity, Value::Number(_))
        | (Shape::IntOrText, Value::String(_)) => None,
        (known, value) => Some(refusal(shape, known, value, place)),
    }
}

/// Checks a value of a map or an item of a list like [`mismatch`].
fn mismatch_in(shape: &Shape, value: &Value, place: &Place<'_>) -> Option<String> {
    match (resolved(shape), value) {
        (Shape::Any, _) => None,
        (known, Value::Null) => Some(refusal(shape, known, value, place)),
        _ => mismatch(shape, value, place),
    }
}

fn fits(integer: &str, number: &Number) -> bool {
    number
        .as_i64()
        .is_some_and(|number| integer != "int32" || i32::try_from(number).is_ok())
}

fn first<'a>(
    fields: &Map<String, Value>,
    place: &Place<'_>,
    owner: Option<&str>,
    shape_of: impl Fn(&str) -> Option<&'a Shape>,
    mismatch: fn(&Shape, &Value, &Place<'_>) -> Option<String>,
) -> Option<String> {
    fields.iter().find_map(|(key, value)| {
        let path = place.path.iter().copied().chain([key.as_str()]).collect();
        mismatch(shape_of(key)?, value, &Place { owner, path })
    })
}

fn refusal(shape: &Shape, known: &Shape, value: &Value, place: &Place<'_>) -> String {
    let found = match (value, known) {
        (Value::Number(number), Shape::Integer(_)) => format!("number {number}"),
        (Value::Number(_), _) => "number".to_owned(),
        (Value::String(_), _) => "string".to_owned(),
        (Value::Bool(_), _) => "bool".to_owned(),
        (Value::Array(_), _) => "array".to_owned(),
        (Value::Null, _) => "null".to_owned(),
        (Value::Object(_), _) => "object".to_owned(),
    };
    let wanted = go_type(shape);
    match place.owner {
        None => format!("json: cannot unmarshal {found} into Go value of type {wanted}"),
        Some(owner) => {
            let owner = owner.rsplit('.').next().unwrap_or(owner);
            let path = place.path.join(".");
            format!(
                "json: cannot unmarshal {found} into Go struct field {owner}.{path} of type {wanted}"
            )
        }
    }
}

fn go_type(shape: &Shape) -> String {
    match shape {
        Shape::Any => "interface {}".to_owned(),
        Shape::Text => "string".to_owned(),
        Shape::Time => "v1.Time".to_owned(),
        Shape::Boolean => "bool".to_owned(),
        Shape::Integer(name) => (*name).to_owned(),
        Shape::Number => "float64".to_owned(),
        Shape::Quantity => "resource.Quantity".to_owned(),
        Shape::IntOrText => "intstr.IntOrString".to_owned(),
        Shape::List(items) => format!("[]{}", go_type(items)),
        Shape::Map(values) => format!("map[string]{}", go_type(values)),
        Shape::Named(name) => {
            let mut parts = name.rsplitn(3, '.');
            let (last, version) = (
                parts.next().unwrap_or_default(),
                parts.next().unwrap_or_default(),
            );
            format!("{version}.{last}")
        }
        Shape::Object(_) => "struct".to_owned(),
    }
}
