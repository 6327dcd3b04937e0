//! The table of `docs/security.md` that says which grant covers which field of an answer.

use wit_parser::{Resolve, TypeDefKind};

/// Interfaces of the contract, and the records of theirs that a driver returns.
const RECORDS: &[(&str, &[&str])] = &[
    (
        "container-edits",
        &[
            "container-edits",
            "device-node",
            "mount",
            "net-device",
            "hook",
            "intel-rdt",
        ],
    ),
    (
        "claims",
        &[
            "prepared-device",
            "prepared-claim",
            "device-status",
            "condition",
            "network-data",
            "prepare-outcome",
            "unprepare-outcome",
        ],
    ),
    ("identity", &["driver-info"]),
    ("inventory", &["inventory", "pool", "device"]),
];

/// Fields of the records in the contract, as `record.field`.
fn fields() -> Vec<String> {
    let mut resolve = Resolve::default();
    resolve
        .push_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit"))
        .unwrap();
    let mut fields = Vec::new();
    for (interface, records) in RECORDS {
        let found = resolve
            .interfaces
            .iter()
            .find(|(_, known)| known.name.as_deref() == Some(interface));
        let (_, interface) = found.unwrap();
        for record in *records {
            let TypeDefKind::Record(kind) = &resolve.types[interface.types[*record]].kind else {
                panic!("{record}")
            };
            fields.extend(
                kind.fields
                    .iter()
                    .map(|field| format!("{record}.{}", field.name)),
            );
        }
    }
    fields
}

#[test]
fn every_response_field_has_its_grant() {
    let page = include_str!("../../../../docs/security.md");
    let rows: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    let has_row = |field: &String| {
        rows.iter()
            .any(|row| row.starts_with(&format!("| `{field}` | ")) && row.len() > field.len() + 8)
    };
    let missing: Vec<_> = fields()
        .into_iter()
        .filter(|field| !has_row(field))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/security.md does not say which grant covers {missing:?}"
    );
}

/// A record of edits that is new in the contract.
#[test]
fn every_edit_record_is_in_table() {
    let mut resolve = Resolve::default();
    resolve
        .push_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit"))
        .unwrap();
    let (_, edits) = resolve
        .interfaces
        .iter()
        .find(|(_, known)| known.name.as_deref() == Some("container-edits"))
        .unwrap();
    let records = edits
        .types
        .iter()
        .filter(|(_, id)| matches!(resolve.types[**id].kind, TypeDefKind::Record(_)));
    let unknown: Vec<_> = records
        .map(|(name, _)| name.as_str())
        .filter(|name| !RECORDS[0].1.contains(name))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

fn add_sources(directory: &std::path::Path, sources: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            add_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_promise_names_tests_that_exist() {
    let page = include_str!("../../../../docs/security.md");
    let (_, section) = page
        .split_once("## Promises, and the tests that would break")
        .unwrap();
    let rows = section
        .split("\n## ")
        .next()
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("| "));
    let tests: Vec<_> = rows
        .skip(2)
        .map(|row| row.rsplit_once(" | ").unwrap().1.trim_end_matches(" |"))
        .collect();
    assert!(tests.len() > 20, "{tests:?}");
    let mut sources = String::new();
    for directory in [
        "host",
        "sdk",
        "tests",
        "xtask",
        "example-drivers",
        "conformance",
    ] {
        add_sources(
            &std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../..")
                .join(directory),
            &mut sources,
        );
    }
    let names = tests
        .iter()
        .flat_map(|tests| tests.split(", ").map(|name| name.trim_matches('`')));
    let missing: Vec<_> = names
        .filter(|name| !sources.contains(&format!("fn {name}(")))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/security.md names tests that do not exist: {missing:?}"
    );
}
