//! Driver files that are signed, pinned, neither, or where others may write: who is loaded, who is not, and what is said of it.

mod config;
mod images;
mod inspect;
mod kept;
mod keys;
mod places;

use keys::{Signer, trust};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, side_file, wasm};
use nodedock_tests::{Daemon, Options};

use crate::compile::bombs;

const SIGNATURE: &str = "mock-gpu.wasm.sig";

/// A daemon with this `trust` section, and what the simulated GPUs need beside their file.
async fn daemon_with(section: &str) -> Daemon {
    let daemon = Daemon::start_with(Options::default().config(section).cold()).await;
    for side in ["grant", "config"] {
        daemon.drop_in(&format!("mock-gpu.{side}.yaml"), side_file(MOCK_GPU, side));
    }
    daemon
}

/// Names of the compiled drivers.
fn compiled(daemon: &Daemon) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![daemon.path().join("var/cache/nodedock")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            // A file is written under a temporary name, which may be gone again.
            let size = entry.metadata().map_or(0, |metadata| metadata.len());
            if entry.file_type().unwrap().is_dir() {
                dirs.push(entry.path());
            } else if size > 1024 {
                found.push(entry.path().display().to_string());
            }
        }
    }
    found
}

#[tokio::test]
async fn file_signed_by_known_key_serves() {
    let bytes = wasm(MOCK_GPU, Form::Core);
    for signer in [
        Signer::P256(1),
        Signer::Ed25519(2),
        Signer::Ed25519Prehashed(3),
    ] {
        let daemon = daemon_with(&trust("enforce", &[("release", signer, "")], "")).await;
        let signature = signer.sign(&bytes);
        let bundle = format!(
            r#"{{"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json","messageSignature":{{"signature":"{}"}}}}"#,
            signature.trim()
        );
        // A signature that comes first waits for its file.
        daemon.drop_in(SIGNATURE, bundle);
        daemon.drop_in(MOCK_GPU_FILE, &bytes);
        let served = daemon.until_serving(MOCK_GPU_FILE).await;
        let trust = served.trust.unwrap();
        assert_eq!(
            (
                trust.mode.as_str(),
                trust.verdict.as_str(),
                trust.key.as_str(),
                trust.reason.as_str()
            ),
            ("enforce", "trusted", "release", "")
        );
        daemon.drop_in(SIGNATURE, &signature);
        daemon
            .cli(&["explain", "driver", MOCK_GPU_NAME])
            .await
            .done_with(&["trust: trusted (mode enforce), signed by release"]);
        daemon
            .cli(&["get", "drivers", "-o", "yaml"])
            .await
            .done_with(&["verdict: trusted", "key: release"]);
    }
}

#[tokio::test]
async fn enforce_compiles_no_unsigned_file() {
    let daemon = daemon_with(&trust("enforce", &[("release", Signer::P256(1), "")], "")).await;
    // If their content were read, the reason would be another.
    let files = [
        ("bomb.wasm", bombs::slow(20)),
        ("text.wasm", b"not WebAssembly at all".to_vec()),
        (MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core)),
    ];
    for (file, bytes) in &files {
        daemon.drop_in(file, bytes);
    }
    for (file, _) in &files {
        let failed = daemon.until_state(file, "failed").await;
        assert!(
            failed.reason.starts_with("not trusted: it is not signed"),
            "{failed:?}"
        );
    }
    assert_eq!(compiled(&daemon), [""; 0]);
    daemon.drop_in(SIGNATURE, Signer::P256(1).sign(&files[2].1));
    daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(compiled(&daemon).len(), 1, "what is compiled is seen here");
}

#[tokio::test]
async fn swapped_file_is_loaded_as_verified() {
    let good = wasm(MOCK_GPU, Form::Core);
    let other = wasm(MOCK_GPU, Form::Component);
    let signer = Signer::P256(1);
    let daemon = daemon_with(&trust("enforce", &[("release", signer, "")], "")).await;
    daemon.drop_in(SIGNATURE, signer.sign(&good));
    for _ in 0..20 {
        daemon.drop_in(MOCK_GPU_FILE, &good);
        daemon.drop_in(MOCK_GPU_FILE, &other);
        // In place, so that it changes under who reads it.
        daemon.copy_in(MOCK_GPU_FILE, &good);
        daemon.copy_in(MOCK_GPU_FILE, &other);
    }
    daemon
        .until_driver(MOCK_GPU_FILE, |driver| {
            driver.reason.contains("no signature of this very file")
        })
        .await;
    daemon.drop_in(MOCK_GPU_FILE, &good);
    let served = daemon
        .until_driver(MOCK_GPU_FILE, |d| {
            d.state == "serving" && d.reason.is_empty()
        })
        .await;
    assert_eq!(served.trust.unwrap().verdict, "trusted");
    assert_eq!(
        compiled(&daemon).len(),
        1,
        "the other one was never compiled"
    );
}

#[tokio::test]
async fn unsigned_update_keeps_old_version_serving() {
    let (old, new) = (wasm(MOCK_GPU, Form::Core), wasm(MOCK_GPU, Form::Component));
    let signer = Signer::Ed25519(1);
    let daemon = daemon_with(&trust("enforce", &[("release", signer, "")], "")).await;
    daemon.drop_in(SIGNATURE, signer.sign(&old));
    daemon.drop_in(MOCK_GPU_FILE, &old);
    let first = daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.drop_in(MOCK_GPU_FILE, &new);
    let kept = daemon
        .until_driver(MOCK_GPU_FILE, |driver| {
            driver.reason.contains("not trusted")
        })
        .await;
    assert_eq!(
        (kept.state.as_str(), &kept.digest),
        ("serving", &first.digest)
    );
    assert_eq!(kept.trust.unwrap().verdict, "trusted", "of what serves");
    daemon.drop_in(SIGNATURE, signer.sign(&new));
    let second = daemon
        .until_driver(MOCK_GPU_FILE, |driver| driver.digest != first.digest)
        .await;
    assert_eq!(
        (second.state.as_str(), second.reason.as_str()),
        ("serving", "")
    );
}
