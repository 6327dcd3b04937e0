//! The types of fields, read from the schemas once: small, since they are looked up with every write.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::{generator, stored_kinds};

const QUANTITY: &str = "io.k8s.apimachinery.pkg.api.resource.Quantity";

/// Fields of Kubernetes 1.37 that the schemas, which are of 1.36, do not have: the type in `resource.k8s.io/v1`, and the field. They are
/// stored as they come.
const NEWER_FIELDS: [(&str, &str); 7] = [
    ("Device", "nodeAllocatableResources"),
    ("DeviceCounterConsumption", "compatibilityGroups"),
    ("DeviceRequestAllocationResult", "skipNodeOperations"),
    ("DeviceSubRequest", "derivedAttributes"),
    ("ExactDeviceRequest", "derivedAttributes"),
    ("ResourceSliceSpec", "partitionTypeAttribute"),
    ("ResourceSliceSpec", "skipNodeOperations"),
];

/// Type of the values of a field.
#[derive(Debug)]
pub(super) enum Shape {
    /// Any JSON: opaque parameters, sets of fields.
    Any,
    Text,
    /// A text that is a time.
    Time,
    Boolean,
    /// An integer of a type that Go names: `int32`, `int64`.
    Integer(&'static str),
    Number,
    Quantity,
    /// A number or a text.
    IntOrText,
    List(Box<Shape>),
    Map(Box<Shape>),
    /// A type with a name, in [`Shapes::types`].
    Named(String),
    Object(BTreeMap<String, Shape>),
}

/// The types of all fields of all kinds.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    /// Types by the name of the schema.
    pub(super) types: BTreeMap<String, Shape>,
    /// The schema of a kind.
    pub(super) kinds: BTreeMap<&'static str, String>,
}

pub(super) static SHAPES: LazyLock<Shapes> = LazyLock::new(|| {
    let mut generator = generator();
    let kinds = stored_kinds(&mut generator);
    let schemas = generator.take_definitions(true);
    let types = schemas
        .iter()
        .map(|(name, schema)| (name.clone(), named(name, schema)))
        .collect();
    Shapes {
        types,
        kinds: kinds
            .into_iter()
            .map(|kind| (kind.kind, kind.schema))
            .collect(),
    }
});

fn named(name: &str, schema: &Value) -> Shape {
    if name == QUANTITY {
        return Shape::Quantity;
    }
    let mut shape = shape(schema);
    if let (Shape::Object(fields), Some(kind)) =
        (&mut shape, name.strip_prefix("io.k8s.api.resource.v1."))
    {
        let newer = NEWER_FIELDS.iter().filter(|(owner, _)| *owner == kind);
        fields.extend(newer.map(|(_, field)| ((*field).to_owned(), Shape::Any)));
    }
    shape
}

fn shape(schema: &Value) -> Shape {
    let reference = schema["$ref"]
        .as_str()
        .or_else(|| schema["allOf"][0]["$ref"].as_str());
    if let Some(name) = reference.and_then(|reference| reference.rsplit('/').next()) {
        return Shape::Named(name.to_owned());
    }
    if schema["x-kubernetes-int-or-string"] == true {
        return Shape::IntOrText;
    }
    match schema["type"].as_str().unwrap_or_default() {
        "string" if schema["format"] == "date-time" => Shape::Time,
        "string" => Shape::Text,
        "boolean" => Shape::Boolean,
        "integer" if schema["format"] == "int32" => Shape::Integer("int32"),
        "integer" => Shape::Integer("int64"),
        "number" => Shape::Number,
        "array" => Shape::List(Box::new(shape(&schema["items"]))),
        _ => object(schema),
    }
}

fn object(schema: &Value) -> Shape {
    if let Some(fields) = schema["properties"].as_object() {
        return Shape::Object(
            fields
                .iter()
                .map(|(name, schema)| (name.clone(), shape(schema)))
                .collect(),
        );
    }
    match &schema["additionalProperties"] {
        values @ Value::Object(fields) if fields != &Map::new() => {
            Shape::Map(Box::new(shape(values)))
        }
        _ => Shape::Any,
    }
}
