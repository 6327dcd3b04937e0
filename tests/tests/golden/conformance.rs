//! The driver in every language behaves as a kubelet and a cluster need it.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nodedock_tests::golden::{ALL, GOLDEN, GOLDEN_FILE};
use nodedock_tests::machine::skip;
use nodedock_tests::places::{examples, nodedock};
use nodedock_tests::recorded::Recorded;
use serde_json::Value;
use tokio::process::Command;

/// Deadline of a command: a busy machine is slow.
pub(super) const COMMAND: Duration = Duration::from_secs(1800);
/// Cases that depend on a driver's own answers, and of the host's publications the names and a repair: more cases would wait for a minute.
const CASES: &str = "wire,idempotency,slices.names-stable,slices.repaired";
/// Time for compiling a driver of 18 MB, in seconds.
const START_TIMEOUT: &str = "900";

pub(super) fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}

/// Runs `nodedock conform` on a file, and fails with what was exchanged in the cases that failed.
pub(super) async fn passes(driver: &str, file: &Path, cases: &str, more: &[&str]) {
    let mut command = Command::new(nodedock());
    command.args([
        "conform",
        text(file),
        "--only",
        cases,
        "--start-timeout",
        START_TIMEOUT,
        "--json",
    ]);
    command.args(more).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(COMMAND, command.output())
        .await
        .expect("it ends");
    let output = output.expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{driver}: {error}"));
    let verdicts = report["verdicts"].as_array().expect("verdicts");
    let of = |outcome: &str| {
        verdicts
            .iter()
            .filter(|one| one["outcome"] == outcome)
            .collect::<Vec<_>>()
    };
    assert!(of("failed").is_empty(), "{driver}: {:#?}", of("failed"));
    // The last of them has all that come before it.
    for case in ["wire.cdi-files", "wire.unprepare"] {
        assert!(
            of("passed").iter().any(|one| one["id"] == case),
            "{driver}: {case} in {report:#}"
        );
    }
    assert!(output.status.success(), "{driver}: {error}");
}

#[tokio::test]
async fn the_driver_in_every_language_conforms() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = directory.path().join("machine");
    Recorded::new(&machine, &[]).file("sys/devices/system/cpu/online", "0-3");
    let grant = examples().join(GOLDEN).join(format!("{GOLDEN}.grant.yaml"));
    let file = directory.path().join(GOLDEN_FILE);
    for golden in ALL {
        let what = format!(
            "the conformance of the driver in {} ({})",
            golden.language, golden.build
        );
        let Some(bytes) = golden.bytes() else {
            skip(&what, "`cargo xtask golden` did not build it");
            continue;
        };
        std::fs::write(&file, bytes).expect("it is written");
        passes(
            &what,
            &file,
            CASES,
            &["--grant", text(&grant), "--hardware", text(&machine)],
        )
        .await;
    }
}
