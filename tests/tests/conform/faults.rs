//! Each fault of the faulty driver is found by the case that is about it, and by no other.

use std::collections::BTreeSet;
use std::sync::Arc;

use nodedock_tests::places::beside;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{all_pass, conform, of, outcomes, text};

/// Runs at once: they wait most of the time.
const AT_ONCE: usize = 12;
/// Runs without a fault.
const CLEAN_RUNS: usize = 5;

/// The command line of the driver.
fn command(fault: Option<&str>) -> String {
    let program = beside("faulty-driver");
    let mut command =
        format!("{} --registry {{registry}} --plugins {{plugins}} --cdi {{cdi}}", text(&program));
    command.push_str(" --state {state} --kubeconfig {kubeconfig} --node {node}");
    // Without it, the names of its sockets are always the same.
    if fault != Some("keeps-stale-sockets") {
        command.push_str(" --instance {instance}");
    }
    if let Some(fault) = fault {
        command.push_str(&format!(" --fault {fault}"));
    }
    command
}

fn args(command: &str) -> [&str; 10] {
    let devices = ["--device", "node-1/dev-0", "--device", "node-1/dev-1"];
    let [d, first, _, second] = devices;
    ["--exec", command, d, first, d, second, "--call-timeout", "5", "--start-timeout", "10"]
}

/// Each fault with its case.
async fn faults() -> Vec<(String, String)> {
    let output =
        tokio::process::Command::new(beside("faulty-driver")).arg("list").output().await.expect("it starts");
    let list = String::from_utf8(output.stdout).expect("text");
    let line = |line: &str| line.split_once(' ').map(|(fault, case)| (fault.to_owned(), case.to_owned()));
    list.lines().filter_map(line).collect()
}

#[tokio::test]
async fn each_fault_is_found_by_its_case_alone_and_a_driver_without_one_passes_every_time() {
    let faults = faults().await;
    assert!(faults.len() >= 30);
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let mut runs = JoinSet::new();
    let clean = (0..CLEAN_RUNS).map(|_| (None, None));
    for (fault, case) in clean.chain(faults.into_iter().map(|(fault, case)| (Some(fault), Some(case)))) {
        let turns = turns.clone();
        runs.spawn(async move {
            let _turn = turns.acquire_owned().await.expect("it is open");
            let command = command(fault.as_deref());
            let (outcomes, report) = outcomes(&args(&command)).await;
            (fault, case, outcomes, report)
        });
    }
    let mut wrong = Vec::new();
    let mut clean = BTreeSet::new();
    while let Some(run) = runs.join_next().await {
        let (fault, case, outcomes, report) = run.expect("a run");
        match (fault, case) {
            (Some(fault), Some(case)) => {
                let found = of(&outcomes, "failed");
                if found != [case.as_str()] {
                    let failed = report["verdicts"].as_array().expect("verdicts").iter();
                    let failed: Vec<_> = failed.filter(|one| one["outcome"] == "failed").collect();
                    wrong.push(format!("{fault}: {case} is to find it, and {found:?} do: {failed:#?}"));
                }
            }
            _ => {
                all_pass("the driver without a fault", &outcomes, &report);
                clean.insert(outcomes);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(clean.len(), 1, "five runs have one outcome");
}

#[tokio::test]
async fn a_failure_says_what_was_exchanged_and_the_reports_agree() {
    let directory = tempfile::tempdir().expect("a directory");
    let junit = directory.path().join("junit.xml");
    let command = command(Some("refuses-empty-calls"));
    let options = ["--exec", &command, "--only", "wire.empty", "--junit", text(&junit)];
    let output = conform(&options).await;
    let shown = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(1), "{shown}");
    for part in [
        "wire.empty                             FAIL",
        "prepare fails as a whole, InvalidArgument: there is no claim",
        "| → NodePrepareResources V1 []",
        "| ← InvalidArgument: there is no claim",
        "| API server: ",
        "3 passed, 1 failed, 0 not declared",
    ] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    let junit = std::fs::read_to_string(junit).expect("it is written");
    assert!(
        junit.contains(r#"<testsuite name="wire" tests="4" skipped="0" errors="0" failures="1">"#),
        "{junit}"
    );
}
