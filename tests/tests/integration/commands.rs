//! The commands that look: inspect, grant, explain, completion, watch.

use std::process::Stdio;

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{
    DEVICE_NODES, Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, side_file, wasm,
};
use nodedock_tests::{DEADLINE, Daemon, Root};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::with_gpus;

#[tokio::test]
async fn inspect_works_without_a_daemon() {
    let root = Root::new();
    for (form, word) in [(Form::Core, "core module"), (Form::Component, "component")] {
        let file = root.write(MOCK_GPU_FILE, wasm(MOCK_GPU, form));
        let file = file.to_str().unwrap();
        let found = root
            .cli(&["driver", "inspect", file, "-o", "json"])
            .await
            .json();
        assert_eq!(
            (&found["form"], &found["name"]),
            (&json!(word), &json!(MOCK_GPU_NAME))
        );
        assert_eq!(
            (&found["contract"], &found["error"]),
            (&json!("nodedock:driver@0.2.0"), &json!(null))
        );
        assert_eq!(
            found["facets"],
            json!(["configuration", "health", "left-out"])
        );
        assert_eq!(
            found["missingGrants"].as_array().unwrap().len(),
            1,
            "{found}"
        );
        root.cli(&["driver", "inspect", file])
            .await
            .done_with(&["would be blocked", "MOCK_GPU_*"]);

        let grant = root.write("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
        root.cli(&["driver", "inspect", file])
            .await
            .done_with(&["would serve"]);
        std::fs::remove_file(grant).unwrap();
    }
    let bad = root.write("bad.wasm", "not a driver");
    root.cli(&["driver", "inspect", bad.to_str().unwrap()])
        .await
        .failed_with(1, &["cannot be loaded", "not WebAssembly"]);
    root.cli(&["driver", "inspect", "/nowhere.wasm"])
        .await
        .failed_with(1, &["/nowhere.wasm"]);
}

#[tokio::test]
async fn printed_grant_covers_driver_needs() {
    let root = Root::new();
    let file = root.write("device-nodes.wasm", wasm(DEVICE_NODES, Form::Core));
    let file = file.to_str().unwrap();
    let grant = root
        .cli(&["driver", "grant", file])
        .await
        .done_with(&["kind: DriverGrant", "/dev/fuse"]);
    root.write("device-nodes.grant.yaml", &grant);
    root.cli(&["driver", "inspect", file])
        .await
        .done_with(&["would serve"]);

    root.write(
        "device-nodes.grant.yaml",
        grant.replace("/dev/fuse", "/dev/null"),
    );
    root.cli(&["driver", "inspect", file])
        .await
        .done_with(&["would be blocked", "/dev/fuse"]);
    root.write("device-nodes.grant.yaml", "kind: Wrong\n");
    root.cli(&["driver", "inspect", file])
        .await
        .failed_with(1, &["device-nodes.grant.yaml"]);
    let bad = root.write("bad.wasm", "");
    root.cli(&["driver", "grant", bad.to_str().unwrap()])
        .await
        .failed_with(1, &["cannot be loaded", "empty"]);
}

/// What a claim of an hour ago had, and why it ended, was lost with it.
#[tokio::test]
async fn ended_claims_are_listed_after_restart() {
    let mut daemon = with_gpus().await;
    let none = daemon.cli(&["get", "claims", "--ended"]).await;
    none.done_with(&["no claims were unprepared"]);
    let claim = || request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]);
    daemon.prepared(claim()).await;
    daemon.unprepare(&pod("one")).await;
    daemon.crash().await;
    let device = format!("{MOCK_GPU_NAME}/");
    for name in ["a", "default/a", "claim-a"] {
        daemon
            .cli(&["get", "claims", name, "--ended"])
            .await
            .done_with(&["default", "one", &device, "gpus/gpu-0"]);
        daemon.cli(&["explain", "claim", name]).await.done_with(&[
            "was unprepared on",
            "last in use by pod default/one",
            "prepared by driver",
            "given up by driver",
        ]);
    }
    let ended = daemon
        .cli(&["get", "claims", "--ended", "-o", "json"])
        .await
        .json();
    assert_eq!(ended[0]["uid"], json!("claim-a"), "{ended}");
    daemon
        .cli(&["get", "claims", "b", "--ended"])
        .await
        .failed_with(1, &["no claim \"b\""]);
    daemon
        .cli(&["get", "pods", "--ended"])
        .await
        .failed_with(2, &["--ended is of claims alone"]);

    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.prepared(claim()).await;
    let live = daemon.cli(&["explain", "claim", "a"]).await.done();
    assert!(!live.contains("was unprepared"), "{live}");
}

#[tokio::test]
async fn explain_shows_claim_and_driver_history() {
    let daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    for name in ["a", "default/a", "claim-a"] {
        daemon.cli(&["explain", "claim", name]).await.done_with(&[
            "is prepared",
            "default/one",
            "gpus/gpu-0",
            MOCK_GPU_NAME,
            "prepared by driver",
        ]);
    }
    for name in [MOCK_GPU_NAME, MOCK_GPU_FILE, "mock-gpu"] {
        daemon.cli(&["explain", "driver", name]).await.done_with(&[
            "is serving",
            "11 devices",
            "sha256:",
            "Simulated GPUs",
        ]);
    }
    daemon
        .cli(&["explain", "claim", "unknown"])
        .await
        .failed_with(1, &["no claim \"unknown\""]);
    daemon
        .cli(&["explain", "driver", "unknown"])
        .await
        .failed_with(1, &["no driver \"unknown\""]);

    daemon.copy_in("bad.wasm", "nonsense");
    daemon.until_failed("bad.wasm", &["not WebAssembly"]).await;
    daemon
        .cli(&["explain", "driver", "bad.wasm"])
        .await
        .done_with(&["is failed", "not WebAssembly"]);
}

#[tokio::test]
async fn missing_name_fails_empty_list_succeeds() {
    let daemon = with_gpus().await;
    for what in ["drivers", "devices", "claims", "pods", "resources"] {
        daemon
            .cli(&["get", what, "unknown"])
            .await
            .failed_with(1, &["unknown"]);
    }
    assert_eq!(daemon.cli(&["get", "claims"]).await.done(), "no claims\n");
    for format in ["table", "wide", "yaml", "json"] {
        daemon
            .cli(&["get", "driver", "-o", format])
            .await
            .done_with(&[MOCK_GPU_NAME]);
    }
}

#[tokio::test]
async fn watched_list_is_printed_on_change() {
    let daemon = with_gpus().await;
    let mut command = daemon.command();
    command
        .args(["get", "claims", "--watch"])
        .stdout(Stdio::piped());
    let mut watching = command.spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    assert_eq!(
        lines.next_line().await.unwrap().as_deref(),
        Some("no claims")
    );
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    loop {
        let line = lines.next_line().await.unwrap().expect("the watch goes on");
        if line.contains("prepared") && line.contains("default/one") {
            break;
        }
    }
    daemon.unprepare(&pod("one")).await;
    while lines.next_line().await.unwrap().expect("the watch goes on") != "no claims" {}
    watching.kill().await.unwrap();
}

#[tokio::test]
async fn completion_is_printed_for_each_shell() {
    let root = Root::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = root.cli(&["completion", shell]).await.done();
        assert!(script.contains("NODEDOCK_COMPLETE"), "{shell}: {script}");
    }
    let version = root.cli(&["--version"]).await.done();
    assert!(version.starts_with("nodedock "), "{version}");
}

/// What completes the last of the words.
async fn completed(root: &Root, words: &[&str]) -> Vec<String> {
    let path = root.path().to_str().unwrap();
    let mut command = root.command();
    command
        .env("NODEDOCK_COMPLETE", "fish")
        .args(["--", "nodedock", "--root", path])
        .args(words);
    let output = command.output().await.unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(str::to_owned).collect()
}

/// Completes until a name is offered: a shell waits only a moment for the daemon, which may be longer on a busy machine.
async fn offered(daemon: &Daemon, words: &[&str], wanted: impl Fn(&str) -> bool) {
    let offers = async {
        while !completed(daemon, words)
            .await
            .iter()
            .any(|name| wanted(name))
        {}
    };
    let found = tokio::time::timeout(DEADLINE, offers).await;
    assert!(found.is_ok(), "{words:?} does not offer the name");
}

#[tokio::test]
async fn completion_offers_names_of_objects() {
    let daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    for (words, expected) in [
        (&["get", "drivers", ""][..], "mock-gpu.nodedock.dev"),
        (&["explain", "driver", "mock"], "mock-gpu.nodedock.dev"),
        (&["get", "claims", ""], "a"),
        (&["release", "claim", ""], "a"),
        (&["unprepare", ""], "default/one"),
    ] {
        offered(&daemon, words, |name| name == expected).await;
    }
    offered(&daemon, &["get", "devices", ""], |name| {
        name.ends_with("gpus/gpu-3")
    })
    .await;
    let commands = completed(&daemon, &["unprep"]).await;
    assert!(commands[0].starts_with("unprepare"), "{commands:?}");
    let other = completed(&daemon, &["get", "drivers", "none"]).await;
    assert!(other.is_empty(), "{other:?}");
}

#[tokio::test]
async fn closed_pipe_is_no_error() {
    let daemon = with_gpus().await;
    for args in [
        &["completion", "bash"][..],
        &["get", "devices", "-o", "json"],
        &["explain", "driver", "mock-gpu.nodedock.dev"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = daemon.command();
        command.args(args).stdout(writer).stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().await.unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{args:?}: {errors}");
        assert!(!errors.contains("panicked"), "{args:?}: {errors}");
    }
}

#[tokio::test]
async fn completion_without_daemon_is_silent() {
    let root = Root::new();
    for words in [["get", "claims", ""], ["explain", "driver", ""]] {
        let found = completed(&root, &words).await;
        assert!(found.iter().all(|word| word.starts_with('-')), "{found:?}");
    }
}

#[tokio::test]
async fn get_node_shows_identity_and_conditions() {
    let daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let node = daemon.cli(&["get", "node", "-o", "json"]).await.json();
    assert_eq!(
        (&node["driversServing"], &node["pods"]),
        (&json!(1), &json!(1)),
        "{node}"
    );
    assert_eq!(
        (&node["claims"], &node["conditions"]),
        (&json!({"prepared": 1}), &json!([])),
        "{node}"
    );
    let status = daemon.node().await;
    assert!(!status.recorded_hardware);
    assert_eq!(
        (&node["name"], &node["bootId"]),
        (&json!(status.name), &json!(status.boot_id))
    );
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(
        (status.boot_id.as_str(), status.version.as_str()),
        (boot_id.trim(), env!("CARGO_PKG_VERSION"))
    );
    assert!(
        status.started_ms > 0 && !status.name.is_empty(),
        "{status:?}"
    );

    daemon
        .cli(&["get", "node", &status.name])
        .await
        .done_with(&["1 prepared", "the node has no problems"]);
    let said = daemon.cli(&["get", "node", "another"]).await;
    assert!(said.stdout.is_empty(), "{said:?}");
    assert!(said.failed(1).contains("not the node \"another\""));
    assert_eq!(
        daemon.cli(&["get", "claims"]).await.stderr,
        "",
        "there is nothing to warn of"
    );
}

#[tokio::test]
async fn checkpoint_is_valid_after_a_crash() {
    let mut daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    for running in [true, false] {
        if !running {
            daemon.kill9().await;
        }
        let report = daemon
            .cli(&["checkpoint", "verify", "-o", "json"])
            .await
            .json();
        assert_eq!(
            (&report["claims"], &report["pods"]),
            (&json!(1), &json!(1)),
            "{report}"
        );
        let dump = daemon
            .cli(&["checkpoint", "dump", "-o", "json"])
            .await
            .json();
        assert_eq!(
            dump["claims"][0]["id"]["uid"],
            json!("claim-a"),
            "running: {running}"
        );
        assert_eq!(dump["claims"][0]["state"], json!("prepared"));
    }
    daemon
        .cli(&["checkpoint", "dump"])
        .await
        .done_with(&["default/a"]);
    let cut = daemon.write(
        "cut.db",
        &std::fs::read(daemon.checkpoint()).unwrap()[..3000],
    );
    daemon
        .cli(&["checkpoint", "verify", cut.to_str().unwrap()])
        .await
        .failed_with(1, &["cut.db"]);
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.restart().await;
    daemon
        .cli(&["checkpoint", "verify"])
        .await
        .done_with(&["1 claims"]);
}
