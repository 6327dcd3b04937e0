//! Owner and mode of the drivers directory and of what is in it.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, wasm};
use nodedock_tests::{Root, assert_parts};

use super::keys::{Configure, Signer, trust};
use super::{SIGNATURE, daemon_with};

fn chmod(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn enforce_loads_nothing_from_writable_directory() {
    let bytes = wasm(MOCK_GPU, Form::Core);
    let key = ("release", Signer::P256(1), "");
    let daemon = daemon_with(&trust("warn", &[key], "")).await;
    let dir = Root::drivers(&daemon);
    daemon.drop_in(SIGNATURE, key.1.sign(&bytes));
    chmod(&dir, 0o777);
    let [condition] = daemon
        .until_conditions(&["drivers-folder-open"])
        .await
        .try_into()
        .unwrap();
    let message = condition.problem.unwrap().message;
    assert_parts(
        &message,
        &[
            "mode 0777",
            "owner ",
            &format!("chmod go-w {}", dir.display()),
        ],
    );
    daemon.drop_in(MOCK_GPU_FILE, &bytes);
    daemon.until_serving(MOCK_GPU_FILE).await;

    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    daemon.put_config(&trust("enforce", &[key], ""));
    daemon.until_log("the trust in driver files changed").await;
    daemon.drop_in(MOCK_GPU_FILE, &bytes);
    daemon
        .until_failed(MOCK_GPU_FILE, &["others may change it", "chmod go-w"])
        .await;
    chmod(&dir, 0o700);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_conditions(&[]).await;

    // What serves was verified when it was loaded.
    chmod(&dir, 0o777);
    daemon.until_conditions(&["drivers-folder-open"]).await;
    assert_eq!(
        daemon
            .until_serving(MOCK_GPU_FILE)
            .await
            .trust
            .unwrap()
            .verdict,
        "trusted"
    );
}

#[tokio::test]
async fn enforce_does_not_load_writable_file() {
    let bytes = wasm(MOCK_GPU, Form::Core);
    let key = ("release", Signer::P256(1), "");
    let daemon = daemon_with(&trust("off", &[key], "")).await;
    daemon.drop_in(SIGNATURE, key.1.sign(&bytes));
    let grant = daemon.driver_path("mock-gpu.grant.yaml");
    chmod(&grant, 0o666);
    daemon.drop_in(MOCK_GPU_FILE, &bytes);
    daemon.until_serving(MOCK_GPU_FILE).await;
    let [condition] = daemon
        .until_conditions(&["driver-file-open"])
        .await
        .try_into()
        .unwrap();
    assert_eq!(condition.subject, grant.display().to_string());
    chmod(&grant, 0o644);
    daemon.until_conditions(&[]).await;

    daemon.put_config(&trust("enforce", &[key], ""));
    daemon
        .until_driver(MOCK_GPU_FILE, |d| {
            d.trust.as_ref().is_some_and(|t| t.mode == "enforce")
        })
        .await;
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    chmod(&grant, 0o666);
    daemon.drop_in(MOCK_GPU_FILE, &bytes);
    daemon
        .until_failed(MOCK_GPU_FILE, &["mock-gpu.grant.yaml (owner"])
        .await;
    chmod(&grant, 0o644);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_conditions(&[]).await;
}
