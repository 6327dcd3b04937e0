//! Schemas that take for ever, or say what nobody can satisfy.

use serde_json::{Value, json};

use super::Stop::{Config, Harmless};
use super::{Case, case, small};

const INVALID: &str = "schema-invalid";

fn demands(schema: &Value) -> Vec<u8> {
    small().demands(json!(schema.to_string())).module()
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "schema-of-the-web",
            "has the host fetch a schema from the network",
            || demands(&json!({"$ref": "http://169.254.169.254/latest/meta-data"})),
            (Config, INVALID, "refers to"),
        ),
        case(
            "schema-of-a-file",
            "has the host read a schema from a file",
            || demands(&json!({"$ref": "file:///etc/shadow"})),
            (Config, INVALID, "refers to"),
        ),
        case(
            "schema-of-itself",
            "a schema that is itself",
            || demands(&json!({"$ref": "#"})),
            (Config, INVALID, "refers to itself"),
        ),
        case(
            "schema-in-a-circle",
            "two schemas that are each other",
            || {
                demands(
                    &json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
                )
            },
            (Config, INVALID, "refers to itself"),
        ),
        case(
            "schema-doubles",
            "a schema of which each part is two of the next, forty times",
            || {
                let part = |n: u32| json!({"allOf": [{"$ref": format!("#/$defs/d{}", n + 1)}, {"$ref": format!("#/$defs/d{}", n + 1)}]});
                let mut parts: serde_json::Map<String, Value> =
                    (0..40).map(|n| (format!("d{n}"), part(n))).collect();
                parts.insert("d40".into(), json!({"type": "object"}));
                demands(&json!({"$ref": "#/$defs/d0", "$defs": parts}))
            },
            (Config, INVALID, "is too large"),
        ),
        case(
            "schema-with-anchors",
            "a schema that moves what its references mean",
            || {
                demands(
                    &json!({"$defs": {"a": {"$id": "http://x/", "$defs": {"a": {}}}}, "$ref": "#/$defs/a"}),
                )
            },
            (Config, INVALID, "$id"),
        ),
        case(
            "schema-of-dynamic-references",
            "a schema whose references are found as it is used",
            || demands(&json!({"$dynamicAnchor": "a", "properties": {"x": {"$dynamicRef": "#a"}}})),
            (Config, INVALID, "$dynamic"),
        ),
        case(
            "schema-of-a-huge-pattern",
            "a pattern that takes gigabytes once it is compiled",
            || demands(&json!({"properties": {"a": {"pattern": "((\\w{100}){100}){100}"}}})),
            (Config, INVALID, "is not a"),
        ),
        case(
            "schema-of-many-patterns",
            "ten thousand patterns that take a megabyte each",
            || {
                let patterns: serde_json::Map<String, Value> =
                    (0..5000).map(|n| (format!("\\w{{90}}{n}"), json!(true))).collect();
                demands(&json!({"patternProperties": patterns}))
            },
            (Config, INVALID, "is too large"),
        ),
        case(
            "schema-unevaluated",
            "a schema that looks at its parts twice, at each of fifty depths",
            || {
                let deep = (0..40)
                    .fold(json!({}), |inner, _| json!({"allOf": [inner], "unevaluatedProperties": false}));
                demands(&deep)
            },
            (Config, INVALID, "is too large"),
        ),
        case(
            "schema-of-300-kb",
            "a schema of 300 kB",
            || demands(&json!({"description": "x".repeat(300_000)})),
            (Config, INVALID, "at most 262144"),
        ),
        case(
            "schema-not-json",
            "a schema that is no JSON",
            || small().demands(json!("{\"type\":")).module(),
            (Config, INVALID, "EOF"),
        ),
        case(
            "schema-deep",
            "a schema of a thousand depths",
            || small().demands(json!("{\"not\":".repeat(1000) + &"}".repeat(1000))).module(),
            (Config, INVALID, "recursion limit"),
        ),
        case(
            "schema-of-no-type",
            "a schema that is none",
            || demands(&json!({"type": "x\n".repeat(2000)})),
            (Config, INVALID, ""),
        ),
        case(
            "schema-refuses-all",
            "a schema that nothing satisfies",
            || demands(&json!(false)),
            (Config, "schema-violated", "does not fit"),
        ),
        case(
            "schema-shares",
            "a schema that uses a part of itself twice, as real ones do",
            || {
                demands(
                    &json!({"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"pattern": "^[a-z]+$"}}}),
                )
            },
            (Harmless, "", ""),
        ),
    ]
}
