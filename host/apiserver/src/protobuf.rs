//! Conversion of bodies in Kubernetes' protobuf, which Go's typed clients send, to JSON: the objects of the API and the options of
//! deletions.
//!
//! The fields are listed in `protobuf/messages.txt`, of Kubernetes 1.37; `cargo test --test interop -- protobuf` compares it with the
//! official library. A field that is not in the list is dropped, and a kind that is not in it is refused as an encoding that the server
//! does not know.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::resources::{api_version, of_type};
use fields::{Fields, Wire};
use messages::{Count, Field, Kind, MESSAGES, Message};

mod fields;
mod messages;
#[cfg(test)]
mod tests;

pub const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";
/// Prefix of an encoded object.
const MAGIC: &[u8] = b"k8s\0";

/// The object as JSON; `None`: it is no object, or of a kind that is not known here.
pub fn to_json(body: &[u8]) -> Option<Value> {
    let [type_meta, raw] = pair(body.strip_prefix(MAGIC)?)?;
    let [version, kind] = pair(type_meta.bytes()?)?;
    let (version, kind) = (version.text()?, kind.text()?);
    let mut object = decode(message_of(version, kind)?, raw.bytes()?)?;
    object.insert("apiVersion".to_owned(), version.into());
    object.insert("kind".to_owned(), kind.into());
    Some(Value::Object(object))
}

/// The message of an object's type.
fn message_of(version: &str, kind: &str) -> Option<&'static Message> {
    if kind == "DeleteOptions" {
        return MESSAGES.get("meta.DeleteOptions");
    }
    let group = version.split_once('/').map_or("", |(group, _)| group);
    of_type(version, kind).filter(|_| api_version(group) == version)?;
    let package = if group.is_empty() {
        "core"
    } else {
        group.split('.').next().unwrap_or_default()
    };
    MESSAGES.get(format!("{package}.{kind}").as_str())
}

/// The fields 1 and 2 of a message, which are empty if they are not set.
fn pair(bytes: &[u8]) -> Option<[Wire<'_>; 2]> {
    let fields: BTreeMap<u64, Wire<'_>> = Fields(bytes).collect::<Option<_>>()?;
    Some([1, 2].map(|number| fields.get(&number).copied().unwrap_or(Wire::Bytes(&[]))))
}

fn decode(message: &Message, bytes: &[u8]) -> Option<Map<String, Value>> {
    let mut object = Map::new();
    for field in Fields(bytes) {
        let (number, wire) = field?;
        if let Some(field) = message.get(&number) {
            add(&mut object, field, wire)?;
        }
    }
    Some(object)
}

fn add(object: &mut Map<String, Value>, field: &Field, wire: Wire<'_>) -> Option<()> {
    match field.count {
        Count::Many => {
            let value = value(field.kind, wire)?;
            let list = object.entry(field.name).or_insert_with(|| json!([]));
            list.as_array_mut()?.push(value);
        }
        Count::Map => {
            let [key, of_key] = pair(wire.bytes()?)?;
            let value = value(field.kind, of_key)?;
            let map = object.entry(field.name).or_insert_with(|| json!({}));
            map.as_object_mut()?.insert(key.text()?.to_owned(), value);
        }
        Count::One | Count::OneUnlessZero => match value(field.kind, wire)? {
            Value::Null => {}
            // The fields of a part without a name are those of the whole.
            Value::Object(fields) if field.name.is_empty() => object.extend(fields),
            value if field.count == Count::OneUnlessZero && is_zero(&value) => {}
            value => drop(object.insert(field.name.to_owned(), value)),
        },
    }
    Some(())
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn value(kind: Kind, wire: Wire<'_>) -> Option<Value> {
    match kind {
        Kind::Text => wire.text().map(Value::from),
        Kind::Int => wire.number().map(Value::from),
        Kind::Bool => wire.number().map(|number| Value::from(number != 0)),
        Kind::Time => time(wire, "%Y-%m-%dT%H:%M:%SZ"),
        Kind::MicroTime => time(wire, "%Y-%m-%dT%H:%M:%S%.6fZ"),
        Kind::Quantity => pair(wire.bytes()?)?[0].text().map(Value::from),
        Kind::IntOrText => int_or_text(wire.bytes()?),
        Kind::Json => match pair(wire.bytes()?)?[0].bytes()? {
            [] => Some(Value::Null),
            text => serde_json::from_slice(text).ok(),
        },
        Kind::Message(name) => decode(MESSAGES.get(name)?, wire.bytes()?).map(Value::Object),
    }
}

/// A moment as a text; without any content, it is no moment.
fn time(wire: Wire<'_>, format: &str) -> Option<Value> {
    let bytes = wire.bytes()?;
    if bytes.is_empty() {
        return Some(Value::Null);
    }
    let [seconds, nanos] = pair(bytes)?.map(|wire| wire.number().unwrap_or_default());
    let moment = jiff::Timestamp::new(seconds, i32::try_from(nanos).ok()?).ok()?;
    Some(moment.strftime(format).to_string().into())
}

/// The first field says whether it is the text of the third or the number of the second.
fn int_or_text(bytes: &[u8]) -> Option<Value> {
    let fields: BTreeMap<u64, Wire<'_>> = Fields(bytes).collect::<Option<_>>()?;
    let number = |field: u64| fields.get(&field).map_or(Some(0), |wire| wire.number());
    match number(1)? {
        0 => number(2).map(Value::from),
        _ => fields
            .get(&3)
            .map_or(Some(""), |wire| wire.text())
            .map(Value::from),
    }
}
