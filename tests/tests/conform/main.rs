//! The conformance cases by their command: drivers that pass, and faults that are found.

mod bad_input;
mod drivers;
mod faults;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use nodedock_tests::places::nodedock;
use serde_json::Value;
use tokio::process::Command;

/// Deadline of a run: a busy machine is slow.
const RUN: Duration = Duration::from_secs(900);

/// Runs the command with a directory for temporary files of its own, in which it has to leave nothing.
async fn conform(args: &[&str]) -> Output {
    let temporary = tempfile::Builder::new()
        .prefix("c")
        .tempdir_in("/tmp")
        .expect("a directory");
    let mut command = Command::new(nodedock());
    command
        .arg("conform")
        .args(args)
        .env("TMPDIR", temporary.path())
        .env(
            "NODEDOCK_COMPILE_CACHE",
            concat!(env!("CARGO_TARGET_TMPDIR"), "/compiled"),
        )
        .env("RUST_BACKTRACE", "0");
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(RUN, command.output())
        .await
        .expect("it ends");
    let output = output.expect("the program starts");
    let left: Vec<_> = std::fs::read_dir(temporary.path())
        .expect("it is there")
        .flatten()
        .collect();
    assert!(left.is_empty(), "{args:?} leaves {left:?}");
    output
}

/// The outcome of each case by its ID, and the report.
async fn outcomes(args: &[&str]) -> (BTreeMap<String, String>, Value) {
    let output = conform(&[args, &["--json"]].concat()).await;
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let report: Value =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{args:?}: {text}{error}"));
    let verdicts = report["verdicts"].as_array().expect("verdicts");
    let text = |verdict: &Value, field: &str| verdict[field].as_str().expect("a text").to_owned();
    let outcomes: BTreeMap<_, _> = verdicts
        .iter()
        .map(|one| (text(one, "id"), text(one, "outcome")))
        .collect();
    let has_failed = outcomes.values().any(|outcome| outcome == "failed");
    assert_eq!(
        output.status.code(),
        Some(i32::from(has_failed)),
        "{args:?}"
    );
    (outcomes, report)
}

/// The IDs of all cases, in the order of the list.
async fn listed() -> Vec<String> {
    let output = conform(&["--list"]).await;
    let list = String::from_utf8(output.stdout).expect("text");
    let list: Value = serde_saphyr::from_str(&list).expect("YAML");
    let ids = list.as_array().expect("a list").iter();
    ids.map(|case| case["id"].as_str().expect("an ID").to_owned())
        .collect()
}

fn of<'a>(outcomes: &'a BTreeMap<String, String>, outcome: &str) -> Vec<&'a str> {
    let of = outcomes.iter().filter(|(_, found)| *found == outcome);
    of.map(|(id, _)| id.as_str()).collect()
}

/// Fails with what was exchanged in the cases that failed.
fn all_pass(driver: &str, outcomes: &BTreeMap<String, String>, report: &Value) {
    let failed = report["verdicts"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|one| one["outcome"] == "failed");
    let failed: Vec<_> = failed.collect();
    assert!(failed.is_empty(), "{driver}: {failed:#?}");
    assert!(
        !of(outcomes, "passed").is_empty(),
        "{driver} passes nothing"
    );
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}
