//! Validates JSON against a driver's schemas.
//!
//! A schema is hostile: before it is compiled, its size is computed as if every reference were replaced by its target, which bounds both
//! the compiler's work and that of each validation. A compiled schema may take some MiB, so none is kept: a validation compiles it.

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
/// Properties that a summary names, and bytes of each name.
const NAMES_SHOWN: usize = 12;
const NAME_BYTES_MAX: usize = 64;

/// Keywords that change the target of a reference.
const MOVING: &[&str] = &[
    "$id",
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
];

/// The values that a schema of a driver describes.
#[derive(Debug, Clone, Copy)]
enum Subject {
    /// The operator's.
    Config,
    /// Those of a claim or a class.
    Parameters,
}

impl Subject {
    fn as_str(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Parameters => "parameters",
        }
    }
}

/// The schemas that a driver has.
#[derive(Debug, Default)]
pub(crate) struct Schemas {
    pub(crate) config: Option<Schema>,
    pub(crate) parameters: Option<Schema>,
}

impl Schemas {
    /// Reads the texts that a driver returned. A refused one is the driver's fault.
    pub(crate) fn read(config: Option<&str>, parameters: Option<&str>) -> Result<Self, Problem> {
        Ok(Self {
            config: config
                .map(|text| Schema::read(Subject::Config, text))
                .transpose()?,
            parameters: parameters
                .map(|text| Schema::read(Subject::Parameters, text))
                .transpose()?,
        })
    }
}

/// A schema that can be compiled.
#[derive(Debug)]
pub(crate) struct Schema {
    subject: Subject,
    document: Value,
}

impl Schema {
    fn read(subject: Subject, text: &str) -> Result<Self, Problem> {
        if text.len() > SCHEMA_BYTES_MAX {
            let why = format!(
                "{} bytes, at most {SCHEMA_BYTES_MAX} are allowed",
                text.len()
            );
            return Err(broken(subject, &why));
        }
        let document: Value =
            serde_json::from_str(text).map_err(|error| broken(subject, &error.to_string()))?;
        measure(&document).map_err(|why| broken(subject, &why))?;
        let schema = Self { subject, document };
        schema.compiled()?;
        Ok(schema)
    }

    fn compiled(&self) -> Result<jsonschema::Validator, Problem> {
        let patterns = jsonschema::PatternOptions::regex();
        let patterns = patterns
            .size_limit(PATTERN_BYTES_MAX)
            .dfa_size_limit(PATTERN_BYTES_MAX);
        jsonschema::options()
            .with_pattern_options(patterns)
            .build(&self.document)
            .map_err(|error| broken(self.subject, &error.to_string()))
    }

    /// Validates `value`. The problem has the JSON Pointer of the first finding in its detail `path`.
    pub(crate) fn check(&self, value: &Value) -> Result<(), Problem> {
        let validator = self.compiled()?;
        let (mut path, mut findings) = (None, Vec::new());
        for error in validator.iter_errors(value).take(FINDINGS_SHOWN) {
            path.get_or_insert_with(|| error.instance_path().to_string());
            findings.push(finding(&error));
        }
        let Some(path) = path else {
            return Ok(());
        };
        let subject = match self.subject {
            Subject::Config => "the config does",
            Subject::Parameters => "the parameters do",
        };
        let message = format!(
            "{subject} not fit the driver's schema: {}",
            findings.join("; ")
        );
        Err(Problem::invalid(ProblemCode::SchemaViolated, message)
            .with("path", one_line(&path, FINDING_BYTES_MAX)))
    }

    pub(crate) fn document(&self) -> &Value {
        &self.document
    }

    /// Returns the properties in one line: `mtu, vlan (required), and 3 more`. Without any, says that it names none.
    pub(crate) fn summary(&self) -> String {
        let required = self.document["required"].as_array();
        let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|it| it == name));
        let properties = self.document["properties"].as_object();
        let Some(properties) = properties.filter(|properties| !properties.is_empty()) else {
            return "the schema names no properties".to_owned();
        };
        let mut names: Vec<_> = properties
            .keys()
            .take(NAMES_SHOWN)
            .map(|name| {
                let shown = one_line(name, NAME_BYTES_MAX);
                match is_required(name) {
                    true => format!("{shown} (required)"),
                    false => shown,
                }
            })
            .collect();
        let more = properties.len() - names.len();
        if more > 0 {
            names.push(format!("and {more} more"));
        }
        names.join(", ")
    }
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

fn broken(subject: Subject, why: &str) -> Problem {
    let why = one_line(why, 2 * FINDING_BYTES_MAX);
    Problem::internal(
        ProblemCode::SchemaInvalid,
        format!(
            "the driver's schema of its {} is not valid: {why}",
            subject.as_str()
        ),
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
        Schema::read(Subject::Config, &schema.to_string())
            .and_then(|schema| schema.check(value))
            .map_err(|problem| problem.message)
    }

    fn of_parameters(schema: &Value) -> Result<Schema, Problem> {
        Schema::read(Subject::Parameters, &schema.to_string())
    }

    #[test]
    fn violation_names_path_value_and_rule() {
        let schema = json!({"properties": {"ports": {"items": {"maximum": 4094}}}});
        let schema = of_parameters(&schema).unwrap();
        assert_eq!(schema.check(&json!({"ports": [1, 4094]})), Ok(()));
        let problem = schema.check(&json!({"ports": [1, 5000]})).unwrap_err();
        assert_eq!(problem.code, ProblemCode::SchemaViolated);
        assert!(problem.kind.is_permanent());
        assert_eq!(
            problem.details,
            [("path".to_owned(), "/ports/1".to_owned())]
        );
        assert!(
            problem.message.starts_with("the parameters do not fit")
                && problem.message.contains("/ports/1: 5000")
                && problem.message.contains("4094"),
            "{problem}"
        );
    }

    #[test]
    fn invalid_schema_is_named_by_subject() {
        let long = json!({"description": "x".repeat(SCHEMA_BYTES_MAX)});
        let values = json!({"enum": vec![0; 10_001]});
        let patterns: Vec<_> = (0..200).map(|_| json!({"pattern": "a"})).collect();
        let cases = [
            (json!({"type": "nothing"}), "nothing"),
            (json!({"minimum": "x"}), "x"),
            (json!({"pattern": "("}), "("),
            (long, "at most"),
            (values, "too large"),
            (json!({"anyOf": patterns}), "too large"),
            (
                json!({"$schema": "http://json-schema.org/draft-04/schema#"}),
                "draft 4",
            ),
            (
                json!({"$ref": "https://example.com/schema"}),
                "refers to nothing",
            ),
        ];
        for (schema, says) in cases {
            let problem = of_parameters(&schema).unwrap_err();
            assert_eq!(problem.code, ProblemCode::SchemaInvalid);
            assert!(
                problem.message.contains("schema of its parameters")
                    && problem.message.contains(says),
                "{says}: {problem}"
            );
        }
    }

    #[test]
    fn summary_names_properties_within_bound() {
        let schema = json!({"properties": {"b": {}, "a": {}}, "required": ["b"]});
        assert_eq!(of_parameters(&schema).unwrap().summary(), "a, b (required)");
        let many: serde_json::Map<_, _> = (10..30).map(|n| (format!("k{n}"), json!({}))).collect();
        let summary = of_parameters(&json!({"properties": many}))
            .unwrap()
            .summary();
        assert!(summary.ends_with("k21, and 8 more"), "{summary}");
        let none = of_parameters(&json!(true)).unwrap().summary();
        assert_eq!(none, "the schema names no properties");
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
