//! Patches of objects and the owners of their fields: JSON patch, merge patch, strategic merge patch and server-side apply, as functions
//! from documents to documents. They read no clock and store nothing.

mod apply;
mod fields;
mod json;
mod managed;
mod schema;
mod strategic;
mod walk;

#[cfg(test)]
mod tests;

use serde_json::Value;

pub(crate) use apply::{ApplyError, Conflict, apply};
pub(crate) use json::json_patch;
pub(crate) use managed::{Writer, is_same_but_times, managed_after_update};
pub(crate) use strategic::strategic_merge_patch;

/// Levels of arrays and objects in an object, in a patch and in its result. `serde_json` reads 127: a list, a watch, the storage and an
/// allocation, which copies parameters into the status, each add a few.
pub(crate) const DEPTH_MAX: usize = 100;

/// A patch that is refused, in the words of an API server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PatchError {
    /// The patch is malformed.
    #[error("{0}")]
    BadRequest(String),
    /// The patch cannot be applied to this document.
    #[error("{0}")]
    Unprocessable(String),
    /// The patch has more operations than a server accepts.
    #[error("{0}")]
    TooLarge(String),
}

impl PatchError {
    /// Returns the HTTP status: 400, 422 or 413.
    pub(crate) fn code(&self) -> u16 {
        match self {
            Self::BadRequest(_) => 400,
            Self::Unprocessable(_) => 422,
            Self::TooLarge(_) => 413,
        }
    }

    fn too_deep() -> Self {
        Self::BadRequest(format!(
            "error decoding patch: exceeded max depth of {DEPTH_MAX}"
        ))
    }
}

/// Returns `document` with the changes of a JSON merge patch (RFC 7386).
///
/// # Errors
/// 400 if the patch is not an object or deeper than [`DEPTH_MAX`].
pub(crate) fn merge_patch(document: &Value, patch: &Value) -> Result<Value, PatchError> {
    check_patch(patch)?;
    let mut merged = document.clone();
    json_patch::merge(&mut merged, patch);
    Ok(merged)
}

/// Fails if a patch that must be an object is another value, or too deep.
fn check_patch(patch: &Value) -> Result<(), PatchError> {
    if !patch.is_object() {
        let message = format!(
            "error decoding patch: json: cannot unmarshal {} into an object",
            kind_of(patch)
        );
        return Err(PatchError::BadRequest(message));
    }
    match is_deeper(patch, DEPTH_MAX) {
        true => Err(PatchError::too_deep()),
        false => Ok(()),
    }
}

/// Returns whether `value` has more than `levels` levels of arrays and objects. It looks no deeper than that.
pub(crate) fn is_deeper(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deeper(item, levels - 1)),
        Value::Object(fields) => {
            levels == 0 || fields.values().any(|field| is_deeper(field, levels - 1))
        }
        _ => false,
    }
}

/// Returns the JSON type of a value.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
