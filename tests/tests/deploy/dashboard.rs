//! The dashboard shows figures that the daemon has, by labels that they have.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::objects::deploy;

/// The families of the documentation, by name, with their labels.
fn families() -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string(deploy().join("../docs/metrics.md")).unwrap();
    let cell = |cell: &str| cell.trim().replace('`', "");
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| `") && line.matches('|').count() >= 5);
    let family = |line: &str| {
        let cells: Vec<_> = line.split('|').map(cell).collect();
        let labels = cells[3]
            .split(',')
            .map(|label| label.trim().to_owned())
            .filter(|label| !label.is_empty());
        (cells[1].clone(), labels.collect())
    };
    rows.map(family).collect()
}

fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            if let Some(expression) = map.get("expr").and_then(Value::as_str) {
                found.push(expression.to_owned());
            }
            map.values().for_each(|value| expressions(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

/// Words of an expression that name a metric or a label.
fn words(expression: &str) -> Vec<String> {
    let mut quoted = false;
    let unquoted: String = expression
        .chars()
        .map(|c| {
            quoted ^= c == '"';
            if quoted || c == '"' { ' ' } else { c }
        })
        .collect();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    unquoted
        .split(|c| !is_word(c))
        .map(str::to_owned)
        .filter(|word| !word.is_empty())
        .collect()
}

#[test]
fn expressions_name_existing_metrics_and_labels() {
    let text = std::fs::read_to_string(deploy().join("grafana/nodedock.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut found = Vec::new();
    expressions(&dashboard, &mut found);
    assert!(found.len() > 10);
    let families = families();
    // Of the query language, and the label that the scrape adds.
    let known = [
        "sum",
        "max",
        "count",
        "by",
        "rate",
        "histogram_quantile",
        "le",
        "node",
        "$__rate_interval",
        "0",
        "99",
    ];
    for expression in &found {
        let words = words(expression);
        let family = words.iter().find_map(|word| {
            let plain = word
                .strip_suffix("_bucket")
                .or_else(|| word.strip_suffix("_count"));
            let name = plain.unwrap_or(word);
            families.get(name).map(|labels| (word.clone(), labels))
        });
        let (name, labels) =
            family.unwrap_or_else(|| panic!("no figure that docs/metrics.md has: {expression}"));
        for word in words
            .iter()
            .filter(|word| **word != name && !known.contains(&word.as_str()))
        {
            assert!(
                labels.contains(word),
                "{word} is no label of {name}: {expression}"
            );
        }
    }
}

#[test]
fn panels_have_places_of_their_own() {
    let text = std::fs::read_to_string(deploy().join("grafana/nodedock.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len());
    let number = |panel: &Value, key: &str| panel["gridPos"][key].as_u64().unwrap();
    for (n, a) in panels.iter().enumerate() {
        assert!(number(a, "x") + number(a, "w") <= 24, "{}", a["title"]);
        for b in &panels[n + 1..] {
            let apart = |at: &str, size: &str| {
                number(a, at) + number(a, size) <= number(b, at)
                    || number(b, at) + number(b, size) <= number(a, at)
            };
            assert!(
                apart("x", "w") || apart("y", "h"),
                "{} and {}",
                a["title"],
                b["title"]
            );
        }
    }
}
