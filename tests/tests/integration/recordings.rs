//! A driver's calls are recorded, leave the node in a file, and are replayed elsewhere.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{
    DEVICE_NODES, Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, version, wasm,
};
use nodedock_tests::{Daemon, Options, Output, Root};

const CONFIG: &str = "recording: {drivers: [mock-gpu.nodedock.dev], maxBytes: 1048576}\n";

async fn used(options: Options) -> Daemon {
    let daemon = Daemon::with_gpus(options).await;
    let pod_of = pod("one");
    daemon
        .prepared(request(&pod_of, &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    daemon.unprepare_pod(&pod_of).await;
    daemon
}

#[tokio::test]
async fn recorded_driver_replays_without_daemon() {
    use std::os::unix::fs::PermissionsExt;
    let mut daemon = used(Options::default().config(CONFIG)).await;
    let directory = daemon.state().join("recordings").join(MOCK_GPU_NAME);
    for entry in std::fs::read_dir(&directory).unwrap() {
        assert_eq!(
            entry.unwrap().metadata().unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
    let file = daemon.path().join("gpu.nodedock-recording");
    let path = file.to_str().unwrap();
    daemon
        .cli(&["record", MOCK_GPU_NAME, "--out", path])
        .await
        .done_with(&["calls, 1 driver files, not redacted: it may have secrets"]);
    assert_eq!(
        std::fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    // What is recorded outlives the daemon.
    daemon.restart().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    let redacted = daemon.path().join("redacted");
    let redacted = redacted.to_str().unwrap();
    let args = ["record", MOCK_GPU_NAME, "--redact", "--out", redacted];
    daemon
        .cli(&args)
        .await
        .done_with(&["calls, 1 driver files, redacted"]);

    let elsewhere = Root::new();
    elsewhere
        .cli(&["replay", path])
        .await
        .done_with(&["calls replayed, all equal"]);
    // A discovery reads files, and a prepare gives environment variables to containers: each call may have secrets.
    elsewhere
        .cli(&["replay", redacted])
        .await
        .failed_with(1, &["no call is replayed", "calls are redacted"]);
    let printed = elsewhere.cli(&["replay", redacted, "--print"]).await.done();
    assert!(
        printed.contains("MOCK_GPU_0") && printed.contains("***"),
        "{printed}"
    );
    let printed = elsewhere.cli(&["replay", path, "--print"]).await.done();
    for part in [
        "driver mock-gpu.nodedock.dev",
        "prepare, request",
        "unprepare, request",
        "discover, request",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let same = elsewhere.write("same.wasm", version(wasm(MOCK_GPU, Form::Core), "2"));
    elsewhere
        .cli(&["replay", path, "--driver", same.to_str().unwrap()])
        .await
        .done_with(&["all equal"]);
    let other = elsewhere.write("other.wasm", wasm(DEVICE_NODES, Form::Core));
    elsewhere
        .cli(&["replay", path, "--driver", other.to_str().unwrap()])
        .await
        .failed_with(
            1,
            &["the file is driver device-nodes.nodedock.dev, and the recording is of mock-gpu"],
        );
}

#[tokio::test]
async fn invalid_recording_is_refused() {
    let root = Root::new();
    let file = root.write("x", "something else");
    let refused = root
        .cli(&["replay", file.to_str().unwrap()])
        .await
        .failed_with(1, &["it is not a recording"]);
    assert_eq!(refused.trim().lines().count(), 1, "{refused}");
    root.cli(&["replay", "/nowhere"])
        .await
        .failed_with(1, &["/nowhere"]);
}

/// Records the driver while it is loaded again and again.
async fn record_reloads(daemon: &Daemon, path: &str, seconds: &str) -> Output {
    let args = ["record", MOCK_GPU_NAME, "--seconds", seconds, "--out", path];
    let reloads = async {
        loop {
            let reload = daemon.cli(&["driver", "reload", MOCK_GPU_NAME]);
            reload.await.done();
        }
    };
    tokio::select! {
        output = daemon.cli(&args) => output,
        () = reloads => unreachable!("it has no end"),
    }
}

#[tokio::test]
async fn unnamed_driver_is_recorded_temporarily() {
    let daemon = Daemon::with_gpus(Options::default()).await;
    let file = daemon.path().join("x");
    let path = file.to_str().unwrap();
    daemon
        .cli(&["record", MOCK_GPU_NAME, "--out", path])
        .await
        .failed_with(
            1,
            &["mock-gpu.nodedock.dev is not recorded", "recording.drivers"],
        );
    daemon
        .cli(&["record", "../x", "--seconds", "1", "--out", path])
        .await
        .failed_with(1, &["cannot be the name"]);
    // Refused at once: an hour would be waited for in vain.
    daemon
        .cli(&[
            "record",
            "mock-gpus.nodedock.dev",
            "--seconds",
            "3600",
            "--out",
            path,
        ])
        .await
        .failed_with(
            1,
            &[
                "no driver or device plugin \"mock-gpus.nodedock.dev\"",
                "get drivers",
            ],
        );
    assert!(!file.exists());
    let mut output = record_reloads(&daemon, path, "1").await;
    if output.code != Some(0) {
        // On a busy machine no call comes in a second.
        output = record_reloads(&daemon, path, "60").await;
    }
    output.done_with(&["calls, 1 driver files"]);
    daemon
        .cli(&["replay", path])
        .await
        .done_with(&["all equal"]);
    daemon
        .cli(&["record", MOCK_GPU_NAME, "--out", path])
        .await
        .failed_with(1, &["is not recorded"]);
}

#[tokio::test]
async fn recording_without_calls_is_not_written() {
    // The config names a driver that may come later.
    let daemon =
        Daemon::start_with(Options::default().config("recording: {drivers: [late.example.com]}\n"))
            .await;
    let file = daemon.path().join("x");
    let args = [
        "record",
        "late.example.com",
        "--out",
        file.to_str().unwrap(),
    ];
    daemon
        .cli(&args)
        .await
        .failed_with(1, &["no call of late.example.com is recorded", "--seconds"]);
    assert!(!file.exists());
}

/// Less than 100 KB that are lists in lists without compression, of which each takes 32 bytes when it is a value: 600 MB.
#[tokio::test]
async fn expanding_recording_needs_bounded_memory() {
    use nodedock_core::recording::file::{self, FORMAT, Header};
    use nodedock_core::recording::{Kind, Line, Raw, Revision};
    const KIB_MAX: &str = "393216";
    let root = Root::new();
    let header = Header {
        format: FORMAT.to_owned(),
        driver: "a.example.com".to_owned(),
        nodedock: "0.1.0".to_owned(),
        is_redacted: false,
    };
    let revision = Revision {
        kind: Kind::Wasm,
        ..Revision::native("a.example.com")
    };
    let revision = serde_json::to_vec(&Line::<Raw>::Revision(revision)).unwrap();
    let lists = format!("[{}[]]", "[],".repeat(3 << 20));
    let call = format!(
        r#"{{"call":{{"operation":"prepare","request":"r","atMs":1,"arguments":{lists},"host":[],"answer":{{"returned":0}}}}}}"#
    );
    let lines = std::iter::once(revision.as_slice()).chain(std::iter::repeat_n(call.as_bytes(), 6));
    let mut bytes = Vec::new();
    file::write(&header, lines, &mut bytes).unwrap();
    assert!(bytes.len() < 100_000, "{}", bytes.len());
    let file = root.write("bomb", bytes);
    let limited = |args: &str| {
        let mut command = tokio::process::Command::new("sh");
        let script = format!("ulimit -d {KIB_MAX} && exec \"$0\" replay \"$1\" {args}");
        command
            .arg("-c")
            .arg(script)
            .arg(nodedock_tests::places::nodedock())
            .arg(&file);
        command
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        command
    };
    let output = limited("").output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(1) && text.contains("nodedock:driver"),
        "{:?} {text}",
        output.status
    );
    let output = limited("--print > /dev/null").output().await.unwrap();
    assert!(
        output.status.success(),
        "{:?} {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}
