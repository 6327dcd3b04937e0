//! Parses JSON configs and parameters.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::Problem;

/// Bytes of a problem's message (`wit/common.wit`).
const MESSAGE_BYTES_MAX: usize = 1024;

/// Parses a config or parameters. `what` names it in the message: "the config".
///
/// # Errors
///
/// `invalid` with the given code, and with serde's message, which names the field and the position.
///
/// ```
/// use nodedock_sdk::{ProblemKind, parse_json};
///
/// #[derive(Debug, serde::Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Config {
///     count: u32,
/// }
///
/// let config: Config = parse_json("bad-config", "the config", r#"{"count": 2}"#)?;
/// assert_eq!(config.count, 2);
///
/// let problem = parse_json::<Config>("bad-config", "the config", r#"{"cuont": 2}"#).unwrap_err();
/// assert_eq!(problem.kind, ProblemKind::Invalid);
/// assert_eq!(problem.message, "the config: unknown field `cuont`, expected `count` at line 1 column 8");
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
pub fn parse_json<T: DeserializeOwned>(code: &str, what: &str, text: &str) -> Result<T, Problem> {
    serde_json::from_str(text).map_err(|error| {
        let mut message = format!("{what}: {error}");
        // serde quotes what it read, which may be longer than a message.
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        Problem::invalid(code, message)
    })
}

/// Merges `patch` into `target` by RFC 7396: objects field by field, null removes, any other value replaces.
pub(crate) fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let Value::Object(target) = target else {
        return;
    };
    for (key, value) in patch {
        if value.is_null() {
            target.remove(&key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn problem_message_is_bounded() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Config {}

        let text = json!({ "é".repeat(2000): 1 }).to_string();
        let problem = parse_json::<Config>("bad-config", "the config", &text).unwrap_err();
        assert_eq!(problem.message.len(), 1023, "up to a whole character");
    }

    #[test]
    fn merge_patches_fields_and_removes_nulls() {
        let mut target = json!({"a": {"b": 1, "c": 2}, "d": [1, 2]});
        merge(
            &mut target,
            json!({"a": {"b": 3, "c": null}, "d": [4], "e": {"f": null, "g": 1}}),
        );
        assert_eq!(target, json!({"a": {"b": 3}, "d": [4], "e": {"g": 1}}));
    }
}
