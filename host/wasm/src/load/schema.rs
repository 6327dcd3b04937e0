//! Validates JSON against a driver's schema.
//!
//! The schema is hostile: before it is compiled, its size is computed as if every reference were replaced by its target, which bounds both
//! the compiler's work and that of each validation.

use std::collections::HashMap;

use serde_json::Value;

use nodedock_base::printable::one_line;
use nodedock_model::{Problem, ProblemCode};

/// Bytes of a schema.
const SCHEMA_BYTES_MAX: usize = 256 << 10;

/// Values of a schema with its references replaced: real ones have some hundreds.
const VALUES_MAX: u64 = 10_000;
/// Weight of a pattern: compiled it may take `PATTERN_BYTES_MAX`.
const PATTERN_WEIGHT: u64 = 100;
const PATTERN_BYTES_MAX: usize = 256 << 10;
/// Findings that a message names, and bytes of each.
const FINDINGS_SHOWN: usize = 4;
const FINDING_BYTES_MAX: usize = 200;

/// Keywords that change the target of a reference.
const MOVING: &[&str] = &[
    "$id",
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
];

/// Validates `value`. A refused schema is the driver's fault.
pub(crate) fn check(schema: &str, value: &Value) -> Result<(), Problem> {
    if schema.len() > SCHEMA_BYTES_MAX {
        return Err(broken(format!(
            "{} bytes, at most {SCHEMA_BYTES_MAX} are allowed",
            schema.len()
        )));
    }
    let schema: Value = serde_json::from_str(schema).map_err(|error| broken(error.to_string()))?;
    measure(&schema).map_err(broken)?;
    let patterns = jsonschema::PatternOptions::regex();
    let patterns = patterns
        .size_limit(PATTERN_BYTES_MAX)
        .dfa_size_limit(PATTERN_BYTES_MAX);
    let validator = jsonschema::options()
        .with_pattern_options(patterns)
        .build(&schema)
        .map_err(|error| broken(error.to_string()))?;
    let findings: Vec<String> = validator
        .iter_errors(value)
        .take(FINDINGS_SHOWN)
        .map(|error| finding(&error))
        .collect();
    if findings.is_empty() {
        return Ok(());
    }
    Err(Problem::invalid(
        ProblemCode::SchemaViolated,
        format!(
            "the config does not fit the driver's schema: {}",
            findings.join("; ")
        ),
    ))
}

fn finding(error: &jsonschema::ValidationError<'_>) -> String {
    let place = one_line(&error.instance_path().to_string(), FINDING_BYTES_MAX);
    let text = one_line(&error.to_string(), FINDING_BYTES_MAX);
    if place.is_empty() {
        text
    } else {
        format!("{place}: {text}")
    }
}

fn broken(why: String) -> Problem {
    let why = one_line(&why, 2 * FINDING_BYTES_MAX);
    Problem::internal(
        ProblemCode::SchemaInvalid,
        format!("the driver's schema of its config: {why}"),
    )
}

fn measure(schema: &Value) -> Result<(), String> {
    let old = schema
        .get("$schema")
        .and_then(Value::as_str)
        .is_some_and(|text| text.contains("draft-04"));
    if old {
        return Err("draft 4 is not taken: draft 6 is the oldest".to_owned());
    }
    let size = Measure {
        root: schema,
        known: HashMap::new(),
    }
    .size(schema, true)?;
    if size > VALUES_MAX {
        return Err(format!(
            "with its references replaced it is too large (more than {VALUES_MAX} values)"
        ));
    }
    Ok(())
}

struct Measure<'a> {
    root: &'a Value,
    /// Sizes by reference; None while one is computed.
    known: HashMap<&'a str, Option<u64>>,
}

impl<'a> Measure<'a> {
    fn size(&mut self, value: &'a Value, is_root: bool) -> Result<u64, String> {
        let mut size: u64 = 1;
        let mut looks_twice = false;
        match value {
            Value::Array(entries) => {
                for entry in entries {
                    size = size.saturating_add(self.size(entry, false)?);
                }
            }
            Value::Object(entries) => {
                for (key, entry) in entries {
                    looks_twice |= key.starts_with("unevaluated");
                    size = size.saturating_add(self.keyword(key, entry, is_root)?);
                }
            }
            _ => {}
        }
        // `unevaluated…` keywords evaluate their siblings again.
        Ok(if looks_twice {
            size.saturating_mul(2)
        } else {
            size
        })
    }

    fn keyword(&mut self, key: &str, value: &'a Value, is_root: bool) -> Result<u64, String> {
        let own = self.size(value, false)?;
        let more = match (key, value) {
            ("$ref", Value::String(reference)) => self.referred(reference)?,
            ("$id", Value::String(_)) if is_root => 0,
            (key, Value::String(_)) if MOVING.contains(&key) => {
                return Err(format!(
                    "{key} is not taken here: references name places, such as #/$defs/name"
                ));
            }
            ("$recursiveAnchor", Value::Bool(_)) => return Err(format!("{key} is not taken")),
            ("pattern", Value::String(_)) => PATTERN_WEIGHT,
            ("patternProperties", Value::Object(patterns)) => {
                PATTERN_WEIGHT.saturating_mul(patterns.len() as u64)
            }
            _ => 0,
        };
        Ok(own.saturating_add(more))
    }

    fn referred(&mut self, reference: &'a str) -> Result<u64, String> {
        match self.known.get(reference) {
            Some(Some(size)) => return Ok(*size),
            Some(None) => return Err(format!("{reference:?} refers to itself")),
            None => {}
        }
        let pointer = reference
            .strip_prefix('#')
            .filter(|rest| !rest.contains('%'));
        let pointer = pointer.filter(|rest| rest.is_empty() || rest.starts_with('/'));
        let found = pointer.and_then(|pointer| self.root.pointer(pointer));
        let Some(found) = found else {
            return Err(format!(
                "{reference:?} refers to nothing in it, and nothing else is looked for"
            ));
        };
        self.known.insert(reference, None);
        let size = self.size(found, false)?;
        self.known.insert(reference, Some(size));
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn verdict(schema: &Value, value: &Value) -> Result<(), String> {
        check(&schema.to_string(), value).map_err(|problem| problem.message)
    }

    #[test]
    fn common_schema_is_checked_against_value() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x",
            "type": "object", "additionalProperties": false,
            "properties": {"name": {"$ref": "#/$defs/name"}, "names": {"items": {"$ref": "#/$defs/name"}}},
            "$defs": {"name": {"type": "string", "pattern": "^[a-z]+$", "enum": ["a", "b"]}}
        });
        assert_eq!(
            verdict(&schema, &json!({"name": "a", "names": ["a", "b"]})),
            Ok(())
        );
        let why = verdict(&schema, &json!({"name": "A"})).unwrap_err();
        assert!(why.contains("/name"), "{why}");
    }

    #[test]
    fn self_referring_root_is_a_cycle() {
        let schema = json!({"properties": {"a": {"$ref": "#"}}});
        assert!(
            verdict(&schema, &json!({}))
                .unwrap_err()
                .contains("refers to itself")
        );
    }

    #[test]
    fn schema_message_is_one_short_line() {
        let long = "x\n".repeat(10_000);
        let why = verdict(&json!({"additionalProperties": false}), &json!({long: 1})).unwrap_err();
        assert!(why.len() < 1024 && !why.contains('\n'), "{why}");
    }
}
