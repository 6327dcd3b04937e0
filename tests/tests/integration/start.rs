//! Starts that cannot succeed say why and end with 1; a stale socket is no obstacle; commands without a daemon end with 3.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use nodedock_tests::machine::{Tmpfs, or_skip};
use nodedock_tests::{Daemon, Root, assert_parts};
use serde_json::json;

#[tokio::test]
async fn second_daemon_on_root_is_refused() {
    let daemon = Daemon::start().await;
    let said = daemon
        .run_node_program(&["run"])
        .await
        .failed_with(1, &["another daemon has locked the checkpoint"]);
    assert!(said.contains(daemon.path().to_str().unwrap()), "{said}");
    let drivers = daemon.cli(&["get", "drivers", "-o", "json"]).await;
    assert_eq!(
        drivers.json(),
        json!([]),
        "the first one's socket is still there"
    );
}

#[tokio::test]
async fn second_daemon_on_socket_is_refused() {
    let (daemon, other) = (Daemon::start().await, Root::new());
    let socket = daemon.socket();
    other
        .run_node_program(&["run", "--socket", socket.to_str().unwrap()])
        .await
        .failed_with(1, &["another process listens on", socket.to_str().unwrap()]);
    assert_eq!(
        daemon.cli(&["get", "drivers", "-o", "json"]).await.json(),
        json!([])
    );
}

#[tokio::test]
async fn stale_socket_of_daemon_is_replaced() {
    let mut daemon = Daemon::start().await;
    daemon.kill9().await;
    let left = std::fs::symlink_metadata(daemon.socket()).unwrap();
    assert!(left.file_type().is_socket());
    daemon.cli(&["get", "drivers"]).await.failed(3);
    daemon.run().await;
    daemon.cli(&["get", "drivers"]).await.done();
}

#[tokio::test]
async fn obstacles_are_named_and_unchanged() {
    let root = Root::new();
    let file = root.write("in-the-way", "precious");
    root.run_node_program(&["run", "--root", file.to_str().unwrap()])
        .await
        .failed_with(1, &["in-the-way", "--root"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

    std::fs::create_dir_all(root.socket().parent().unwrap()).unwrap();
    std::fs::write(root.socket(), "precious").unwrap();
    root.run_node_program(&["run"])
        .await
        .failed_with(1, &["nodedock.sock exists and is not a socket"]);
    assert_eq!(std::fs::read_to_string(root.socket()).unwrap(), "precious");

    let long = root.path().join("x".repeat(120));
    root.run_node_program(&["run", "--root", long.to_str().unwrap()])
        .await
        .failed_with(1, &["107"]);
}

#[tokio::test]
async fn unwritable_root_is_named() {
    let root = Root::new();
    let dir = root.path().join("read-only");
    std::fs::create_dir(&dir).unwrap();
    let Some(_mounted) = or_skip("a read-only root", Tmpfs::mount(&dir, "ro,size=64k")) else {
        return;
    };
    root.run_node_program(&["run", "--root", dir.to_str().unwrap()])
        .await
        .failed_with(1, &["read-only/var/lib/nodedock", "--root"]);
}

#[tokio::test]
async fn newer_checkpoint_format_is_refused() {
    let (root, fixtures) = (
        Root::new(),
        concat!(env!("CARGO_MANIFEST_DIR"), "/../host/tests/fixtures"),
    );
    let bytes = std::fs::read(Path::new(fixtures).join("checkpoint-newer.db")).unwrap();
    let path = root.checkpoint();
    std::fs::write(&path, &bytes).unwrap();
    let said = root.run_node_program(&["run"]).await.failed(1);
    let parts = [
        path.to_str().unwrap(),
        "has format 9",
        "start the release that wrote it (nodedock 9.8.7)",
    ];
    assert_parts(&said, &parts);
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let names = std::fs::read_dir(root.state())
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name());
    let checkpoints = names.filter(|name| name.to_string_lossy().starts_with("checkpoint"));
    assert_eq!(
        checkpoints.collect::<Vec<_>>(),
        [path.file_name().unwrap()],
        "nothing is set aside or made"
    );
    root.cli(&["checkpoint", "verify"])
        .await
        .failed_with(1, &["has format 9"]);
}

#[tokio::test]
async fn invalid_config_names_line_and_column() {
    let root = Root::new();
    let cases = [
        ("nodeName: n\nnodName: n\n", &["nodName", "line 2"][..]),
        ("claims:\n  exclusiveWaitMs: soon\n", &["line 2"]),
        (
            "claims: {exclusiveWaitMs: 999999}\n",
            &["999999 is out of range", "line 1"],
        ),
        ("nodeName: [\n", &["line"]),
        (
            "trust:\n  keys:\n  - {name: release, file: gone.pem}\n",
            &["line 3", "key release", "gone.pem"],
        ),
    ];
    for (text, expected) in cases {
        let file = root.write("nodedock.yaml", text);
        let said = root
            .run_node_program(&["run", "--config", file.to_str().unwrap()])
            .await
            .failed(1);
        for part in expected.iter().chain(&["nodedock.yaml"]) {
            assert!(said.contains(part), "{part} in {said}");
        }
    }
    root.run_node_program(&["run", "--config", "/nowhere.yaml"])
        .await
        .failed_with(1, &["/nowhere.yaml"]);
}

#[tokio::test]
async fn missing_daemon_gives_exit_code_3() {
    let root = Root::new();
    let commands: [&[&str]; 6] = [
        &["get", "drivers"],
        &["get", "claims", "--watch"],
        &["prepare", "--pod", "p", "--device", "d.example/pool/device"],
        &["unprepare", "default/p"],
        &["explain", "claim", "c"],
        &["driver", "reload", "d"],
    ];
    for command in commands {
        root.cli(command)
            .await
            .failed_with(3, &[root.socket().to_str().unwrap(), "hint:"]);
    }
}

#[tokio::test]
async fn wrong_usage_gives_exit_code_2() {
    let root = Root::new();
    let commands: [(&[&str], &str); 8] = [
        (&[], "Usage"),
        (&["fly"], "fly"),
        (&["get", "unicorns"], "unicorns"),
        (&["get", "drivers", "-o", "xml"], "xml"),
        (&["prepare"], "--filename"),
        (&["prepare", "--device", "d.example/p/d"], "--pod"),
        (
            &["prepare", "--pod", "p", "--device", "gpu-0"],
            "DRIVER/POOL/DEVICE",
        ),
        (&["unprepare"], "NAMESPACE/POD"),
    ];
    for (command, expected) in commands {
        let said = root.cli(command).await.failed(2);
        assert!(said.contains(expected), "{expected} in {said}");
    }
}
