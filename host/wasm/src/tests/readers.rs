//! Each field that a driver returns, and the place where the host uses it after the conversion: an addition to the contract that is converted
//! and then read nowhere fails here.

use super::contract::{RECORDS, Way, contract, is_complete, read, records};
use super::*;
use serde_json::json;

/// A row of `readers.txt`.
struct Reader {
    /// `interface.record.field`
    field: &'static str,
    /// Below `host`.
    file: &'static str,
    text: &'static str,
}

fn readers() -> Vec<Reader> {
    let lines = include_str!("readers.txt")
        .lines()
        .filter(|line| !line.starts_with('#'));
    let rows = lines.map(|line| {
        let parts: Vec<_> = line.splitn(3, " | ").collect();
        let [field, file, text] = parts[..] else {
            panic!("{line}")
        };
        Reader { field, file, text }
    });
    rows.collect()
}

/// The fields of the records that a driver returns.
fn returned_fields() -> Vec<String> {
    let records = records(&contract());
    let is_returned = |name: &str| {
        let row = RECORDS.iter().find(|row| row.0 == name);
        row.is_some_and(|row| row.1 != Way::ToGuest)
    };
    let returned = records.iter().filter(|(name, _)| is_returned(name));
    let fields = returned.flat_map(|(name, fields)| {
        let fields = fields.iter();
        fields.map(move |field| format!("{name}.{}", field.replace('_', "-")))
    });
    fields.collect()
}

/// A source without comments, without the tests at its end, and without white space: code is broken into lines by its length.
fn code(source: &str) -> String {
    let mut lines = Vec::new();
    let mut is_test = false;
    for line in source.lines() {
        if is_test && line.starts_with("mod ") && line.ends_with('{') {
            break;
        }
        is_test = line == "#[cfg(test)]";
        if !line.trim_start().starts_with("//") {
            lines.push(line);
        }
    }
    without_space(&lines.concat())
}

fn without_space(text: &str) -> String {
    text.split_whitespace().collect()
}

#[test]
fn every_returned_field_has_reader() {
    let readers = readers();
    let fields = readers.iter().map(|row| row.field);
    is_complete("fields that a driver returns", returned_fields(), fields);
    let wrong = readers.iter().filter(|row| {
        // The conversion names every field.
        let is_conversion = row.file.starts_with("wasm/src/convert/");
        let source = code(&read(&format!("../{}", row.file)));
        is_conversion || !source.contains(&without_space(row.text))
    });
    let wrong: Vec<_> = wrong
        .map(|row| format!("{} does not read {}: {}", row.file, row.field, row.text))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn comments_and_tests_read_nothing() {
    let source = "#[cfg(test)]\nmod tests;\n// a.comment\nlet x = a\n    .field;\n#[cfg(test)]\nmod tests {\n    a.test\n}\n";
    assert_eq!(
        code(source),
        "#[cfg(test)]modtests;letx=a.field;#[cfg(test)]"
    );
}

#[tokio::test]
async fn annotations_of_a_guest_are_taken() {
    let stage = Stage::new();
    let answers = |key: &str| {
        let device = json!({"name": "d", "annotations": [["example.com/slot", "4"]]});
        let pool = json!({"name": "p", "devices": [device], "annotations": [[key, "left"]]});
        Guest::default().discovers(json!({"ok": {"pools": [pool]}}))
    };
    let driver = stage.load(&answers("example.com/side")).await;
    let inventory = driver.discover(&a_call(), Trigger::Load).await.unwrap();
    let pool = &inventory.pools["p"];
    assert_eq!(pool.annotations["example.com/side"], "left");
    assert_eq!(pool.devices["d"].annotations["example.com/slot"], "4");

    let driver = stage.load(&answers("")).await;
    let problem = driver.discover(&a_call(), Trigger::Load).await.unwrap_err();
    assert_eq!(problem.code, "driver-answer-not-valid", "{problem}");
    assert!(problem.message.contains("annotations"), "{problem}");
}
