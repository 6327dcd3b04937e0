//! JSON patch (RFC 6902), as API servers apply it: `replace` sets a field that is absent, and `test` finds an absent field equal to
//! `null`.

use json_patch::{AddOperation, Patch, PatchErrorKind, PatchOperation};
use serde_json::Value;

use super::{DEPTH_MAX, PatchError, is_deeper, kind_of};

/// Operations of a patch, as an API server has it.
const OPERATIONS_MAX: usize = 10_000;

/// Bytes that the `copy` and `move` operations of a patch handle together, as an API server has it for copies: without it, a small patch
/// doubles a document again and again.
const COPIED_BYTES_MAX: usize = 3 * 1024 * 1024;

/// Returns `document` with the changes of a JSON patch.
///
/// # Errors
/// 400 for a patch that is no list of operations, 413 for more than [`OPERATIONS_MAX`], 422 if an operation cannot be applied or would
/// make the document larger or deeper than the bounds.
pub(crate) fn json_patch(document: &Value, patch: &Value) -> Result<Value, PatchError> {
    let Value::Array(operations) = patch else {
        let message = format!(
            "error decoding patch: json: cannot unmarshal {} into a list of operations",
            kind_of(patch)
        );
        return Err(PatchError::BadRequest(message));
    };
    if operations.len() > OPERATIONS_MAX {
        return Err(PatchError::TooLarge(format!(
            "The allowed maximum operations in a JSON patch is {OPERATIONS_MAX}, got {}",
            operations.len()
        )));
    }
    if is_deeper(patch, DEPTH_MAX) {
        return Err(PatchError::too_deep());
    }
    let Patch(operations) = serde_json::from_value(patch.clone())
        .map_err(|why| PatchError::BadRequest(format!("error decoding patch: {why}")))?;
    let mut patched = document.clone();
    let mut copied = 0;
    for operation in operations {
        check_bounds(&patched, &operation, &mut copied).map_err(PatchError::Unprocessable)?;
        if let Some(operation) = as_servers_do(&patched, operation) {
            json_patch::patch(&mut patched, std::slice::from_ref(&operation)).map_err(|error| {
                PatchError::Unprocessable(refusal(&patched, &operation, &error.kind))
            })?;
        }
    }
    Ok(patched)
}

/// Fails if the operation would leave a document deeper than [`DEPTH_MAX`], or handles too much.
fn check_bounds(
    document: &Value,
    operation: &PatchOperation,
    copied: &mut usize,
) -> Result<(), String> {
    let value = match operation {
        PatchOperation::Add(add) => Some(&add.value),
        PatchOperation::Replace(replace) => Some(&replace.value),
        PatchOperation::Copy(copy) => document.pointer(copy.from.as_str()),
        PatchOperation::Move(from) => document.pointer(from.from.as_str()),
        PatchOperation::Remove(_) | PatchOperation::Test(_) => None,
    };
    let levels = DEPTH_MAX.checked_sub(operation.path().count());
    if levels.is_none_or(|levels| value.is_some_and(|value| is_deeper(value, levels))) {
        return Err(format!(
            "the patched document exceeds max depth of {DEPTH_MAX}"
        ));
    }
    if matches!(operation, PatchOperation::Copy(_) | PatchOperation::Move(_)) {
        *copied += value.map_or(0, |value| value.to_string().len());
        if *copied > COPIED_BYTES_MAX {
            return Err(format!(
                "Unable to complete the copy, the accumulated size increase of copy is {copied}, exceeding the limit {COPIED_BYTES_MAX}"
            ));
        }
    }
    Ok(())
}

/// Returns whether a path is that of a field, present or absent, of an object that exists.
fn has_parent_object(document: &Value, path: &str) -> bool {
    path.rsplit_once('/')
        .and_then(|(parent, _)| document.pointer(parent))
        .is_some_and(Value::is_object)
}

/// Returns the operation in the meaning that it has to API servers; none if nothing is left to do.
fn as_servers_do(document: &Value, operation: PatchOperation) -> Option<PatchOperation> {
    match operation {
        PatchOperation::Replace(replace) if has_parent_object(document, replace.path.as_str()) => {
            Some(PatchOperation::Add(AddOperation {
                path: replace.path,
                value: replace.value,
            }))
        }
        PatchOperation::Test(test)
            if test.value.is_null()
                && document.pointer(test.path.as_str()).is_none()
                && has_parent_object(document, test.path.as_str()) =>
        {
            None
        }
        other => Some(other),
    }
}

/// Says why an operation could not be applied.
fn refusal(document: &Value, operation: &PatchOperation, kind: &PatchErrorKind) -> String {
    let path = operation.path().as_str();
    let (name, from) = match operation {
        PatchOperation::Add(_) => ("add", None),
        PatchOperation::Remove(_) => ("remove", None),
        PatchOperation::Replace(_) => ("replace", None),
        PatchOperation::Move(operation) => ("move", Some(operation.from.as_str())),
        PatchOperation::Copy(operation) => ("copy", Some(operation.from.as_str())),
        PatchOperation::Test(_) => ("test", None),
    };
    let (parent, key) = path.rsplit_once('/').unwrap_or(("", path));
    let parent = document
        .pointer(parent)
        .filter(|parent| parent.is_object() || parent.is_array());
    match (kind, parent) {
        (PatchErrorKind::TestFailed, _) => format!("testing value {path} failed: test failed"),
        (PatchErrorKind::InvalidFromPointer, _) => {
            format!(
                "{name} operation does not apply: doc is missing from path: {}: missing value",
                from.unwrap_or_default()
            )
        }
        (PatchErrorKind::CannotMoveInsideItself, _) => {
            format!(
                "{name} operation does not apply: doc is missing destination path: {path}: missing value"
            )
        }
        (_, None) if from.is_some() => {
            format!(
                "{name} operation does not apply: doc is missing destination path: {path}: missing value"
            )
        }
        (_, None) => {
            format!("{name} operation does not apply: doc is missing path: {path:?}: missing value")
        }
        (_, Some(Value::Array(_))) if key.parse::<usize>().is_err() => {
            format!(
                "error in {name} for path: '{path}': value was not a proper array index: '{key}'"
            )
        }
        (_, Some(Value::Array(_))) => {
            format!(
                "error in {name} for path: '{path}': Unable to access invalid index: {key}: invalid index referenced"
            )
        }
        (_, Some(_)) => format!(
            "error in {name} for path: '{path}': Unable to {name} nonexistent key: {key}: missing value"
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn operations_change_the_document_in_turn() {
        let patch = json!([
            {"op": "test", "path": "/metadata/labels/absent", "value": null},
            {"op": "replace", "path": "/metadata/labels/a~1b", "value": "x"},
            {"op": "add", "path": "/spec/list/-", "value": 3},
            {"op": "move", "from": "/spec/old", "path": "/spec/new"},
            {"op": "copy", "from": "/spec/new", "path": "/spec/list/0"},
            {"op": "remove", "path": "/spec/gone"},
            {"op": "test", "path": "/spec/list", "value": ["o", 1, 3]},
        ]);
        let document =
            json!({"metadata": {"labels": {}}, "spec": {"list": [1], "old": "o", "gone": true}});
        let expected = json!({"metadata": {"labels": {"a/b": "x"}}, "spec": {"list": ["o", 1, 3], "new": "o"}});
        assert_eq!(json_patch(&document, &patch), Ok(expected));
    }

    #[test]
    fn failed_patch_operation_is_named() {
        let document = json!({"spec": {"list": [1], "name": "a"}});
        let add = |path: &str| json!({"op": "add", "path": path, "value": 1});
        for (operation, message) in [
            (
                add("/status/x"),
                "add operation does not apply: doc is missing path: \"/status/x\": missing value",
            ),
            (
                add("/spec/list/7"),
                "error in add for path: '/spec/list/7': Unable to access invalid index: 7: invalid index referenced",
            ),
            (
                add("/spec/list/x"),
                "error in add for path: '/spec/list/x': value was not a proper array index: 'x'",
            ),
            (
                json!({"op": "remove", "path": "/spec/x"}),
                "error in remove for path: '/spec/x': Unable to remove nonexistent key: x: missing value",
            ),
            (
                json!({"op": "test", "path": "/spec/name", "value": "b"}),
                "testing value /spec/name failed: test failed",
            ),
            (
                json!({"op": "copy", "from": "/x", "path": "/y"}),
                "copy operation does not apply: doc is missing from path: /x: missing value",
            ),
            (
                json!({"op": "move", "from": "/spec/name", "path": "/status/name"}),
                "move operation does not apply: doc is missing destination path: /status/name: missing value",
            ),
        ] {
            let refused = json_patch(&document, &json!([operation]));
            assert_eq!(
                refused,
                Err(PatchError::Unprocessable(message.into())),
                "{operation}"
            );
        }
    }

    #[test]
    fn patches_are_bounded() {
        let document = json!({"a": {}});
        let code = |patch: &Value| {
            json_patch(&document, patch)
                .expect_err("it is refused")
                .code()
        };
        let test = json!({"op": "test", "path": "/a", "value": {}});
        assert!(json_patch(&document, &Value::Array(vec![test.clone(); OPERATIONS_MAX])).is_ok());
        assert_eq!(code(&Value::Array(vec![test; OPERATIONS_MAX + 1])), 413);
        let double = json!({"op": "copy", "from": "/a", "path": "/a/-"});
        let mut doubling =
            vec![json!({"op": "replace", "path": "/a", "value": ["x".repeat(1000)]})];
        doubling.extend(vec![double; 40]);
        let refused = json_patch(&document, &Value::Array(doubling)).expect_err("it is refused");
        assert!(
            refused
                .to_string()
                .starts_with("Unable to complete the copy"),
            "{refused}"
        );
        let nested = (0..OPERATIONS_MAX)
            .map(|n| json!({"op": "add", "path": "/a".repeat(n + 1), "value": {}}));
        let refused = json_patch(&document, &nested.collect()).expect_err("it is refused");
        assert_eq!(
            refused.to_string(),
            "the patched document exceeds max depth of 100"
        );
        for malformed in [
            json!({}),
            json!([{"op": "add"}]),
            json!([{"op": "x", "path": ""}]),
            json!([1]),
        ] {
            assert_eq!(code(&malformed), 400, "{malformed}");
        }
    }
}
