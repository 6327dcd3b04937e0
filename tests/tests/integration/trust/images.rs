//! Signatures in driver images, and who may change their directories.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;

use nodedock_tests::drivers::{Form, MOCK_GPU, side_file, wasm};
use nodedock_tests::{Daemon, Options, Root, assert_parts};

use super::keys::{Signer, trust};

#[tokio::test]
async fn image_needs_signature_and_private_directory() {
    let root = Root::new();
    let bytes = wasm(MOCK_GPU, Form::Core);
    let signer = Signer::Ed25519(4);
    let directories = ["signed", "unsigned", "open"].map(|name| root.path().join(name));
    for directory in &directories {
        std::fs::create_dir(directory).unwrap();
        std::fs::write(directory.join("x.wasm"), &bytes).unwrap();
    }
    for directory in [&directories[0], &directories[2]] {
        std::fs::write(directory.join("x.wasm.sig"), signer.sign(&bytes)).unwrap();
    }
    set_permissions(&directories[2], Permissions::from_mode(0o777)).unwrap();
    // The key signs only this driver, which has the entry's name.
    let mut config = trust("enforce", &[("release", signer, "[\"mock-gpu.*\"]")], "");
    config.push_str("driverImages:\n");
    for (name, directory) in ["mock-gpu", "unsigned", "open"].iter().zip(&directories) {
        config.push_str(&format!(
            "- {{name: {name}, directory: {}}}\n",
            directory.display()
        ));
    }
    for side in ["grant", "config"] {
        root.write(&format!("mock-gpu.{side}.yaml"), side_file(MOCK_GPU, side));
    }
    let daemon = Daemon::start_on(root, Options::default().config(&config)).await;
    let served = daemon.until_serving("mock-gpu.wasm").await;
    let trust = served.trust.unwrap();
    assert_eq!(
        (trust.verdict.as_str(), trust.key.as_str()),
        ("trusted", "release")
    );
    daemon
        .until_failed("unsigned.wasm", &["not trusted", "it is not signed"])
        .await;
    let open = directories[2].display();
    daemon
        .until_failed(
            "open.wasm",
            &["others may change it", &format!("chmod go-w {open}")],
        )
        .await;
    let conditions = daemon
        .until_conditions(&[
            "driver-not-serving",
            "driver-not-serving",
            "drivers-folder-open",
        ])
        .await;
    let condition = conditions.last().unwrap();
    assert_parts(&condition.subject, &[&open.to_string()]);
}
