//! `nodedock runtime` with a runtime that only records: containers that race, and wrappers that are killed at any moment.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nodedock_tests::machine::write_script;
use nodedock_tests::{DEADLINE, Daemon, Options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::{api, machine_with};

const CONTAINERS: usize = 64;
/// Wrappers that are killed, and the pause between two of them: together they reach every step of a start, which takes some 50 ms.
const KILLED: u32 = 40;
const STEP: Duration = Duration::from_millis(3);
/// Deadline for the end of their claims: with a wrapper ends its claim, and no other limit is waited for.
const SOON: Duration = Duration::from_secs(30);
/// Deadline for all of them together, on a busy machine.
const LONG: Duration = Duration::from_secs(240);

/// Fails if another container has its device too. `LOCKS`: the directory of locks.
const RECORDS: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do test "$1" = --bundle && bundle=$2; shift; done
device=$(grep -o 'MOCK_GPU_[0-9]=' "$bundle/config.json" | head -n 1)
test -n "$device" || exit 8
mkdir "$LOCKS/$device" || exit 9
echo "$device" >> "$LOCKS/given"
rmdir "$LOCKS/$device"
"#;

/// The file of a class, once the daemon has written it.
async fn class_file(daemon: &Daemon) -> Value {
    loop {
        let files = std::fs::read_dir(daemon.cdi()).unwrap().flatten();
        // The file of a default class goes at any time.
        let texts = files.filter_map(|file| std::fs::read(file.path()).ok());
        let mut specs = texts.filter_map(|text| serde_json::from_slice::<Value>(&text).ok());
        if let Some(spec) = specs.find(|spec| spec["kind"] == "nodedock.dev/gpu") {
            return spec;
        }
        tokio::task::yield_now().await;
    }
}

/// The bundle of a container that names one device of the class.
fn bundle(daemon: &Daemon, class: &Value, name: &str) -> PathBuf {
    let device = class["devices"].as_array().unwrap();
    let device = device
        .iter()
        .find(|device| device["name"] == "any")
        .unwrap();
    let hook = &device["containerEdits"]["hooks"][0];
    let hook = json!({ "path": hook["path"], "args": hook["args"] });
    let config = json!({
        "ociVersion": "1.0.2", "process": { "env": ["PATH=/bin"] }, "linux": {},
        "hooks": { "createRuntime": [hook] },
    });
    let bundle = daemon.path().join("bundles").join(name);
    std::fs::create_dir_all(&bundle).unwrap();
    std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    bundle
}

/// Starts `nodedock runtime create` for a bundle.
fn create(daemon: &Daemon, settings: &Path, bundle: &Path) -> Child {
    let mut command: Command = daemon.command();
    command
        .env("NODEDOCK_RUNTIME_CONFIG", settings)
        .env("LOCKS", daemon.path().join("locks"))
        .args(["runtime", "--log"])
        .arg(bundle.join("log.json"))
        .args(["create", "--bundle"])
        .arg(bundle)
        .arg("container");
    command.spawn().unwrap()
}

/// Settings with a script as the other runtime.
fn settings(daemon: &Daemon, script: &str) -> PathBuf {
    settings_with(daemon, script, "waitSeconds: 200\n")
}

fn settings_with(daemon: &Daemon, script: &str, more: &str) -> PathBuf {
    let path = daemon.path().join("records.sh");
    write_script(&path, script);
    let text = format!("runtime: {}\n{more}", path.display());
    daemon.write("runtime.yaml", text)
}

async fn until_free(daemon: &Daemon) {
    daemon.until_no_claims().await;
    while !api(daemon).await.claims(None).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn racing_containers_share_no_device() {
    let mut daemon = machine_with(Options::default().flag("--local-api")).await;
    let class = class_file(&daemon).await;
    let settings = settings(&daemon, RECORDS);
    std::fs::create_dir(daemon.path().join("locks")).unwrap();
    let mut containers = Vec::new();
    for number in 0..CONTAINERS {
        let bundle = bundle(&daemon, &class, &format!("c{number}"));
        containers.push(create(&daemon, &settings, &bundle));
    }
    let given = daemon.path().join("locks/given");
    let count = || std::fs::read_to_string(&given).map_or(0, |text| text.lines().count());
    // A daemon that is away is waited for.
    for crash in 1..=3 {
        while count() < crash * CONTAINERS / 4 {
            tokio::task::yield_now().await;
        }
        daemon.crash().await;
    }
    for (number, container) in containers.iter_mut().enumerate() {
        let status = timeout(LONG, container.wait()).await.unwrap().unwrap();
        let log = daemon.path().join(format!("bundles/c{number}/log.json"));
        let log = std::fs::read_to_string(log).unwrap_or_default();
        assert!(status.success(), "{status}: {log}");
    }
    assert_eq!(count(), CONTAINERS);
    until_free(&daemon).await;
}

#[tokio::test]
async fn killed_runtimes_keep_no_device() {
    let daemon = machine_with(Options::default().flag("--local-api")).await;
    let class = class_file(&daemon).await;
    let settings = settings(&daemon, "#!/bin/sh\nexec tail -f /dev/null\n");
    for number in 0..KILLED {
        let bundle = bundle(&daemon, &class, &format!("c{number}"));
        let mut container = create(&daemon, &settings, &bundle);
        // The step that is reached by then differs from one to the next: the point of the test.
        tokio::time::sleep(STEP * number).await;
        let pid = i32::try_from(container.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        container.wait().await.unwrap();
    }
    timeout(SOON, until_free(&daemon)).await.expect("free soon");
}

#[tokio::test]
async fn created_hook_waits_as_configured() {
    let mut daemon = machine_with(Options::default().flag("--local-api")).await;
    let class = class_file(&daemon).await;
    let script = "#!/bin/sh\nexec tail -f /dev/null\n";
    let settings = settings_with(&daemon, script, "daemonWaitSeconds: 1\n");
    let bundle = bundle(&daemon, &class, "c");
    let mut container = create(&daemon, &settings, &bundle);
    let args = timeout(DEADLINE, created_args(&bundle)).await.unwrap();
    daemon.kill9().await;
    let state = json!({ "id": "container", "pid": container.id() }).to_string();
    // It ends long before the 30 s of a container without settings; how long it takes is not measured.
    assert!(
        args.contains(&"--daemon-wait-seconds=1".to_owned()),
        "{args:?}"
    );
    let mut hook = daemon.command();
    hook.args(&args[1..])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut hook = hook.spawn().unwrap();
    let mut input = hook.stdin.take().unwrap();
    input.write_all(state.as_bytes()).await.unwrap();
    drop(input);
    let output = timeout(DEADLINE, hook.wait_with_output());
    let output = output.await.expect("it ends in time").unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("is not reachable"),
        "{error}"
    );
    container.kill().await.unwrap();
    daemon.run().await;
    timeout(DEADLINE, until_free(&daemon))
        .await
        .expect("the claim ends");
}

/// Waits for the hook by which the claim belongs to the container, and returns its arguments.
async fn created_args(bundle: &Path) -> Vec<String> {
    loop {
        let config = std::fs::read(bundle.join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let args = config["hooks"]["createRuntime"][0]["args"]
            .as_array()
            .unwrap();
        let args: Vec<_> = args
            .iter()
            .map(|arg| arg.as_str().unwrap().to_owned())
            .collect();
        if args.contains(&"created".to_owned()) {
            return args;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn refused_container_says_who_has_devices() {
    let daemon = machine_with(Options::default().flag("--local-api")).await;
    let class = class_file(&daemon).await;
    let request = "{deviceClassName: gpu, allocationMode: ExactCount, count: 4}";
    super::create(&daemon, "all", request).await;
    let bundle = bundle(&daemon, &class, "late");
    let settings = daemon.write("none.yaml", "runtime: /bin/false\n");
    let mut command = daemon.command();
    command.env("NODEDOCK_RUNTIME_CONFIG", settings);
    command
        .args(["runtime", "--log"])
        .arg(bundle.join("log.json"));
    let output = command
        .args(["create", "-b"])
        .arg(&bundle)
        .arg("late")
        .output();
    let output = output.await.unwrap();
    assert!(!output.status.success());
    let log = std::fs::read_to_string(bundle.join("log.json")).unwrap();
    let line: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    let message = line["msg"].as_str().unwrap();
    assert!(
        message.contains("there are no devices") && message.contains("default/all"),
        "{message}"
    );
    assert_eq!(line["level"], "error");
    let config: Value =
        serde_json::from_slice(&std::fs::read(bundle.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        config["hooks"]["createRuntime"].as_array().unwrap().len(),
        1
    );
    // A broken config of the wrapper is named, and one of the container.
    for (file, text, words) in [
        ("none.yaml", "runtimes: x\n", "none.yaml"),
        ("bundles/late/config.json", "{", "config.json"),
    ] {
        daemon.write(file, text);
        let mut command = daemon.command();
        command.env("NODEDOCK_RUNTIME_CONFIG", daemon.path().join("none.yaml"));
        let output = command
            .args(["runtime", "create", "-b"])
            .arg(&bundle)
            .arg("late")
            .output();
        let error = String::from_utf8(output.await.unwrap().stderr).unwrap();
        assert!(error.contains(words), "{error}");
        daemon.write("none.yaml", "runtime: /bin/false\n");
    }
}
