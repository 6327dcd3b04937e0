//! Each fault of the faulty driver is found by the case that is about it, and by no other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use nodedock_tests::machine::skip;
use nodedock_tests::places::beside;
use nodedock_tests::recorded::Recorded;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{all_pass, conform, listed, of, outcomes, text};

const DRIVER: &str = "faulty-driver";
const PLUGIN: &str = "faulty-device-plugin";
/// Runs at once, and cases of each run: they wait most of the time. A run whose fault makes many cases wait holds no others up.
const AT_ONCE: usize = 3;
const JOBS: &str = "4";
/// Seconds for a call and for a start. Much is running beside it, and only a driver that does not answer takes all of it.
const CALL_TIMEOUT: &str = "30";
const START_TIMEOUT: &str = "60";
/// Seconds until slices are there.
const SLICES_TIMEOUT: &str = "30";
/// Runs without a fault.
const CLEAN_RUNS: usize = 5;
/// Cases whose times are printed.
const SLOWEST: usize = 15;

/// The command line of the driver, or of the device plugin.
fn command(program: &str, fault: Option<&str>) -> String {
    if program == PLUGIN {
        let fault = fault
            .map(|fault| format!(" --fault {fault}"))
            .unwrap_or_default();
        return format!(
            "{} --device-plugins {{device-plugins}}{fault}",
            text(&beside(program))
        );
    }
    let program = beside(program);
    let mut command = format!(
        "{} --registry {{registry}} --plugins {{plugins}} --cdi {{cdi}}",
        text(&program)
    );
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

fn args<'a>(command: &'a str, fault: Option<&str>) -> Vec<&'a str> {
    let mut args = vec!["--exec", command, "--admin-access", "--jobs", JOBS];
    args.extend(["--call-timeout", CALL_TIMEOUT]);
    args.extend(["--start-timeout", START_TIMEOUT]);
    args.extend(["--slices-timeout", SLICES_TIMEOUT]);
    // Its pool has another name in each boot.
    if fault != Some("pool-of-the-boot") {
        args.extend(["--device", "node-1/dev-0", "--device", "node-1/dev-1"]);
    }
    args
}

/// Each fault: its program, its name and its case.
async fn faults() -> Vec<(&'static str, String, String)> {
    let mut faults = Vec::new();
    for program in [DRIVER, PLUGIN] {
        let output = tokio::process::Command::new(beside(program))
            .arg("list")
            .output()
            .await;
        let list = String::from_utf8(output.expect("it starts").stdout).expect("text");
        let line = |line: &str| {
            line.split_once(' ')
                .map(|(name, case)| (program, name.to_owned(), case.to_owned()))
        };
        faults.extend(list.lines().filter_map(line));
    }
    faults
}

/// Cases without a fault: the stand-in of the API server refuses a taint that the case would find, and a server in Rust cannot see the
/// fields that it does not know.
const WITHOUT_FAULT: [&str; 2] = ["features.taints", "wire.unknown-fields"];

#[tokio::test]
async fn every_case_finds_some_fault() {
    let faults = faults().await;
    let listed = listed().await;
    let is_excepted = |id: &str| WITHOUT_FAULT.contains(&id);
    let unproven: Vec<_> = listed
        .iter()
        .filter(|id| !is_excepted(id) && !faults.iter().any(|(_, _, case)| case == *id))
        .filter(|id| !OF_DAEMON.iter().any(|(_, case)| case == id))
        .collect();
    assert!(unproven.is_empty() && faults.len() >= 30, "{unproven:?}");
}

#[tokio::test]
async fn each_fault_fails_only_its_case() {
    let faults = faults().await;
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let mut runs = JoinSet::new();
    let clean = [DRIVER, PLUGIN]
        .repeat(CLEAN_RUNS)
        .into_iter()
        .map(|program| (program, None));
    let with_fault = faults
        .into_iter()
        .map(|(program, fault, case)| (program, Some((fault, case))));
    for (program, fault) in clean.chain(with_fault) {
        let turns = turns.clone();
        runs.spawn(async move {
            let _turn = turns.acquire_owned().await.expect("it is open");
            let name = fault.as_ref().map(|(fault, _)| fault.as_str());
            let command = command(program, name);
            let (outcomes, report) = outcomes(&args(&command, name)).await;
            (program, fault, outcomes, report)
        });
    }
    let mut wrong = Vec::new();
    let (mut clean, mut seconds) = (BTreeSet::new(), BTreeMap::new());
    while let Some(run) = runs.join_next().await {
        let (program, fault, outcomes, report) = run.expect("a run");
        add_seconds(&mut seconds, &report);
        match fault {
            Some((fault, case)) => {
                let found = of(&outcomes, "failed");
                let needs_mounts = matches!(
                    case.as_str(),
                    "crash.state-read-only"
                        | "crash.reboot"
                        | "crash.reboot-edits"
                        | "crash.reboot-unprepare"
                        | "slices.reboot-names"
                );
                if needs_mounts && outcomes[&case] == "not-declared" && found.is_empty() {
                    skip(
                        &format!("the fault {fault}"),
                        "its case needs mounts, which are not allowed here",
                    );
                } else if found != [case.as_str()] {
                    wrong.push(format!(
                        "{fault}: {case} is to find it, and {found:?} do: {:#?}",
                        reasons(&report)
                    ));
                }
            }
            None => {
                all_pass(program, &outcomes, &report);
                clean.insert(outcomes);
            }
        }
    }
    // Shown with `--nocapture`.
    let mut seconds: Vec<_> = seconds.into_iter().collect();
    seconds.sort_by(|one, other| other.1.total_cmp(&one.1));
    for (case, seconds) in &seconds[..SLOWEST] {
        println!("{seconds:8.1} s in all runs: {case}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(clean.len(), 2, "five runs of a program have one outcome");
}

/// Adds the seconds of each case of a run.
fn add_seconds(seconds: &mut BTreeMap<String, f64>, report: &serde_json::Value) {
    for verdict in report["verdicts"].as_array().expect("verdicts") {
        let case = verdict["id"].as_str().expect("an ID").to_owned();
        *seconds.entry(case).or_default() += verdict["seconds"].as_f64().expect("seconds");
    }
}

/// The cases that failed, each with its reason.
fn reasons(report: &serde_json::Value) -> Vec<String> {
    let verdicts = report["verdicts"].as_array().expect("verdicts").iter();
    verdicts
        .filter(|one| one["outcome"] == "failed")
        .map(|one| format!("{}: {}", one["id"], one["reason"]))
        .collect()
}

#[tokio::test]
async fn failure_shows_exchange_and_reports_agree() {
    let directory = tempfile::tempdir().expect("a directory");
    let junit = directory.path().join("junit.xml");
    let command = command(DRIVER, Some("refuses-empty-calls"));
    let options = [
        "--exec",
        &command,
        "--only",
        "wire.empty",
        "--junit",
        text(&junit),
    ];
    let output = conform(&options).await;
    let shown = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(1), "{shown}");
    for part in [
        "wire.empty                             FAIL",
        "prepare fails as a whole, InvalidArgument: there is no claim",
        "| → NodePrepareResources V1 []",
        "| ← InvalidArgument: there is no claim",
        "| API server: ",
        "3 passed, 1 failed, 0 not declared in ",
    ] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    let junit = std::fs::read_to_string(junit).expect("it is written");
    assert!(
        junit.contains(r#"<testsuite name="wire" tests="4" skipped="0" errors="0" failures="1">"#),
        "{junit}"
    );
}

/// Faults of the scripted driver that the host cannot repair. The host drops answers for claims that it did not request.
const WORDS: [&str; 12] = [
    "refuse-permanent",
    "refuse-transient",
    "refuse-an-hour",
    "die",
    "skip",
    "twice",
    "wrong-claim",
    "spin",
    "grow",
    "flood",
    "huge",
    "other-device",
];
/// Number of those that are about the outcome of a prepare.
const OF_PREPARE: usize = 2;

/// A fault of the scripted driver: its config, and the case that finds it.
struct Script {
    config: String,
    case: &'static str,
}

impl Script {
    fn new(config: String, case: &'static str) -> Self {
        Self { config, case }
    }
}

/// Config of the scripted driver, and the case that finds the fault: in the first claim of each case, or in the third of a call.
fn scripts() -> Vec<Script> {
    let of_unprepare = &WORDS[..WORDS.len() - OF_PREPARE];
    let prepare = WORDS
        .iter()
        .map(|word| Script::new(format!("prepare: {{claim-1: {word}}}"), "wire.prepare"));
    let unprepare = of_unprepare
        .iter()
        .map(|word| Script::new(format!("unprepare: {{claim-1: {word}}}"), "wire.unprepare"));
    let several = WORDS.iter().map(|word| {
        Script::new(
            format!("prepare: {{claim-3: {word}}}"),
            "wire.batch-independent",
        )
    });
    let others = OF_DAEMON.map(|(config, case)| Script::new(config.to_owned(), case));
    prepare
        .chain(unprepare)
        .chain(several)
        .chain(others)
        .collect()
}

/// Faults that only the daemon which runs the driver can show.
const OF_DAEMON: [(&str, &str); 7] = [
    (
        "write: {path: class/scripted/value, value: \"7\"}",
        "conduct.values-restored",
    ),
    ("fault: near-the-memory-limit", "conduct.memory-limit"),
    ("fault: devices-only-at-load", "slices.later-discovery"),
    ("fault: pool-of-the-boot", "slices.reboot-names"),
    ("fault: edits-of-the-boot", "crash.reboot-edits"),
    ("fault: only-the-first-of-a-call", "wire.driver-batch"),
    (
        "fault: one-refusal-fails-all\nprepare: {claim-4: refuse-permanent}",
        "wire.driver-batch-independent",
    ),
];

/// A machine with the attribute that the scripted driver may write.
fn machine(directory: &Path) -> Recorded {
    let machine = Recorded::new(directory, &[]);
    machine.file("sys/devices/scripted/value", "0");
    machine.link("sys/class/scripted", "../devices/scripted");
    machine
}

#[tokio::test]
async fn webassembly_faults_fail_only_their_case() {
    const GRANT: &str = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\nenv: [\"SCRIPTED_*\"]\nlimits: {wallMs: 20000, cpuMs: 500}\n\
                         sysfsWrite: [{glob: class/scripted/value, pattern: \"[0-9]\"}]\n";
    let directory = tempfile::tempdir().expect("a directory");
    let grant = directory.path().join("grant.yaml");
    std::fs::write(&grant, GRANT).expect("it is written");
    let driver = nodedock_tests::places::drivers().join("scripted.wasm");
    let hardware = tempfile::tempdir().expect("a directory");
    let hardware = Arc::new(machine(hardware.path()));
    let scripts = scripts();
    assert!(scripts.len() >= 30);
    let turns = Arc::new(Semaphore::new(2));
    let mut runs = JoinSet::new();
    for (number, script) in scripts.into_iter().enumerate() {
        let Script {
            config: script,
            case,
        } = script;
        let (turns, grant, driver) = (turns.clone(), grant.clone(), driver.clone());
        let hardware = hardware.clone();
        let config = directory.path().join(format!("{number}.yaml"));
        std::fs::write(&config, format!("devices: 4\n{script}\n")).expect("it is written");
        runs.spawn(async move {
            let _turn = turns.acquire_owned().await.expect("it is open");
            let devices =
                ["device-0", "device-1", "device-2"].map(|name| format!("node-1/script/{name}"));
            let mut args = vec![
                text(&driver),
                "--grant",
                text(&grant),
                "--config",
                text(&config),
            ];
            // Those of a fault of the driver itself are in its slices alone.
            if !script.starts_with("fault: ") {
                devices
                    .iter()
                    .for_each(|device| args.extend(["--device", device]));
            }
            args.extend(["--hardware", text(hardware.path())]);
            args.extend(["--slices-timeout", SLICES_TIMEOUT, "--jobs", JOBS]);
            args.extend(["--only", "wire", "--only", case]);
            let (outcomes, report) = outcomes(&args).await;
            (script, case, outcomes, report)
        });
    }
    let mut wrong = Vec::new();
    while let Some(run) = runs.join_next().await {
        let (script, case, outcomes, report) = run.expect("a run");
        if of(&outcomes, "failed") != [case] {
            let outcome = outcomes.get(case);
            wrong.push(format!(
                "{script}: {case} is {outcome:?}, and these fail: {:#?}",
                reasons(&report)
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
