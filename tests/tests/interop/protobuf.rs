//! Conversion of protobuf by the local API, compared with the official library.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nodedock_apiserver::protobuf_to_json;
use nodedock_tests::machine::or_skip;
use serde_json::{Value, json};

use crate::{lines, programs};

/// Random objects of each kind, and the seed of them.
const COUNT: &str = "50";
const SEED: &str = "1";

/// Returns a value without unset fields.
fn set(value: &Value) -> Value {
    let is_set = |value: &Value| !value.is_null() && *value != json!({});
    match value {
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(name, value)| (name.clone(), set(value)));
            fields.filter(|(_, value)| is_set(value)).collect()
        }
        Value::Array(items) => items.iter().map(set).collect(),
        other => other.clone(),
    }
}

#[tokio::test]
async fn message_table_equals_the_library() {
    let Some(program) = or_skip(
        "messages in protobuf, by the library",
        programs::go("protobuf-oracle"),
    ) else {
        return;
    };
    let ours = include_str!("../../../host/apiserver/src/protobuf/messages.txt");
    let theirs = lines(&program, &["table"]).await;
    let different = ours
        .lines()
        .zip(&theirs)
        .find(|(ours, theirs)| ours != theirs);
    assert_eq!(
        (different, ours.lines().count()),
        (None, theirs.len()),
        "`protobuf-oracle table` makes the file"
    );
}

#[tokio::test]
async fn protobuf_objects_equal_library_json() {
    let Some(program) = or_skip(
        "objects in protobuf, by the library",
        programs::go("protobuf-oracle"),
    ) else {
        return;
    };
    let lines = lines(&program, &["objects", SEED, COUNT]).await;
    assert_eq!(lines.len(), 500, "fifty of ten kinds");
    for line in lines {
        let line: Value = serde_json::from_str(&line).expect("JSON");
        let body = STANDARD
            .decode(line["protobuf"].as_str().expect("a text"))
            .expect("base64");
        let json =
            protobuf_to_json(&body).unwrap_or_else(|| panic!("{} is not read", line["json"]));
        assert_eq!(set(&json), set(&line["json"]));
    }
}
