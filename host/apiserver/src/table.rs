//! Objects as rows, for kubectl: the columns that an API server of Kubernetes 1.36 prints for each kind.

mod age;
mod cells;
#[cfg(test)]
mod tests;

use jiff::Timestamp;
use serde_json::{Value, json};

pub use self::age::age;
pub use self::cells::claim_state;

/// Part of its object that a row carries: the parameter `includeObject` of a request for a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum IncludeObject {
    /// Nothing.
    None,
    /// A `PartialObjectMetadata`, with which kubectl does what it is asked.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

impl IncludeObject {
    /// Reads the parameter; an empty one is [`Self::Metadata`].
    ///
    /// # Errors
    ///
    /// The message of a refusal with 400, for any other text.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" | "Metadata" => Ok(Self::Metadata),
            "None" => Ok(Self::None),
            "Object" => Ok(Self::Object),
            other => Err(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {}: must be 'Metadata', 'Object', 'None', \
                 or empty",
                json!(other)
            )),
        }
    }
}

/// Returns objects of one version and kind as a `Table` of `meta.k8s.io/v1`. `list_metadata` becomes the table's `metadata`: of a list its own, of a
/// single object `{"resourceVersion": …}`. Ages are those at `now`. A kind without columns of its own gets its name and age.
pub(crate) fn table<'a>(
    api_version: &str,
    kind: &str,
    objects: impl IntoIterator<Item = &'a Value>,
    list_metadata: &Value,
    include: IncludeObject,
    now: Timestamp,
) -> Value {
    let columns = cells::columns(kind);
    let definitions: Vec<Value> = columns.iter().map(cells::Column::definition).collect();
    let rows: Vec<Value> = objects
        .into_iter()
        .map(|object| {
            let mut row =
                json!({ "cells": cells::of(kind, object, now), "object": included(api_version, kind, object, include) });
            if let Some(condition) = completed(kind, object) {
                row["conditions"] = json!([condition]);
            }
            row
        })
        .collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": list_metadata,
        "columnDefinitions": definitions, "rows": rows,
    })
}

fn included(api_version: &str, kind: &str, object: &Value, include: IncludeObject) -> Value {
    match include {
        IncludeObject::None => Value::Null,
        // Items of a list have neither version nor kind, and kubectl reads each row by them.
        IncludeObject::Object => {
            let mut object = object.clone();
            if let Some(fields) = object.as_object_mut() {
                fields.insert("apiVersion".to_owned(), api_version.into());
                fields.insert("kind".to_owned(), kind.into());
            }
            object
        }
        IncludeObject::Metadata => json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
        }),
    }
}

/// A pod that has ended, which kubectl does not show with some options.
fn completed(kind: &str, object: &Value) -> Option<Value> {
    let reason = object["status"]["phase"]
        .as_str()
        .filter(|_| kind == "Pod")?;
    let message = match reason {
        "Succeeded" => "The pod has completed successfully.",
        "Failed" => "The pod failed.",
        _ => return None,
    };
    Some(json!({ "type": "Completed", "status": "True", "reason": reason, "message": message }))
}
