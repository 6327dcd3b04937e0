//! `nodedock driver inspect` with keys, and signatures that openssl makes.

use std::process::{Command, Stdio};

use nodedock_tests::Root;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, side_file, wasm};
use nodedock_tests::machine::skip;
use serde_json::json;

use super::keys::{Signer, trust};

#[tokio::test]
async fn inspect_shows_signature_by_key_config() {
    let (root, signer, bytes) = (Root::new(), Signer::Ed25519(1), wasm(MOCK_GPU, Form::Core));
    let file = root.write(MOCK_GPU_FILE, &bytes);
    let key = root.write("release.pub", signer.pem());
    root.write("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    let (file, key) = (file.to_str().unwrap(), key.to_str().unwrap());
    let text = root
        .cli(&["driver", "inspect", file, "--key", key])
        .await
        .failed_with(1, &["there is no mock-gpu.wasm.sig"]);
    assert!(
        text.contains("verdict   would be refused: not trusted"),
        "{text}"
    );

    root.write("mock-gpu.wasm.sig", signer.sign(&bytes));
    let text = root
        .cli(&["driver", "inspect", file, "--key", key])
        .await
        .done();
    let last: Vec<_> = text.lines().rev().take(3).collect();
    let grant = format!(
        "grant     {}",
        root.path().join("mock-gpu.grant.yaml").display()
    );
    let expected = [
        "verdict   would serve",
        "trust     trusted (mode enforce), signed by release",
        grant.as_str(),
    ];
    assert_eq!(last, expected, "{text}");
    assert!(text.contains("requests  env: MOCK_GPU_*\n"), "{text}");
    assert!(text.contains("limits    memory "), "{text}");

    let config = root.write(
        "d.yaml",
        trust("warn", &[("ci", signer, "[nic.example.com]")], ""),
    );
    let args = [
        "driver",
        "inspect",
        file,
        "--config",
        config.to_str().unwrap(),
        "-o",
        "json",
    ];
    let found = root.cli(&args).await.json();
    assert_eq!(
        (&found["trust"]["verdict"], &found["trust"]["key"]),
        (&json!("distrusted"), &json!("ci"))
    );
    assert_eq!(
        found["requests"],
        json!([{"request": "env: MOCK_GPU_*", "granted": true}])
    );
    assert!(
        found["limits"]["memoryMib"]["effective"].as_u64().unwrap() > 0,
        "{found}"
    );

    let bad = root.write("bad.pub", "nonsense");
    root.cli(&["driver", "inspect", file, "--key", bad.to_str().unwrap()])
        .await
        .failed_with(1, &["bad.pub", "BEGIN PUBLIC KEY"]);
    let pipe = root.path().join("pipe.wasm");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    root.cli(&["driver", "inspect", pipe.to_str().unwrap()])
        .await
        .failed_with(1, &["not a regular file"]);
}

/// Runs a script where openssl is; its directory is the root.
fn openssl(root: &Root, script: &str) {
    let status = Command::new("sh")
        .args(["-ec", script])
        .current_dir(root.path())
        .stderr(Stdio::null())
        .status();
    assert!(status.unwrap().success(), "{script}");
}

#[tokio::test]
async fn documented_recipes_make_valid_signatures() {
    if Command::new("openssl")
        .arg("version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        skip("signatures that openssl makes", "there is no openssl");
        return;
    }
    let root = Root::new();
    let file = root.write(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    root.write("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    let recipes = [
        "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem
         openssl pkey -in key.pem -pubout -out key.pub
         openssl dgst -sha256 -sign key.pem mock-gpu.wasm | base64 > mock-gpu.wasm.sig",
        "openssl genpkey -algorithm ed25519 -out key.pem
         openssl pkey -in key.pem -pubout -out key.pub
         openssl pkeyutl -sign -inkey key.pem -rawin -in mock-gpu.wasm | base64 > mock-gpu.wasm.sig",
        "openssl dgst -sha256 -sign ec.pem -out mock-gpu.wasm.sig mock-gpu.wasm",
    ];
    for recipe in recipes {
        if recipe.contains("ec.pem") {
            openssl(
                &root,
                "openssl ecparam -name prime256v1 -genkey -noout -out ec.pem; openssl ec -in ec.pem -pubout -out key.pub",
            );
        }
        openssl(&root, recipe);
        let key = root.path().join("key.pub");
        let args = [
            "driver",
            "inspect",
            file.to_str().unwrap(),
            "--key",
            key.to_str().unwrap(),
        ];
        let text = root.cli(&args).await.done();
        assert!(
            text.contains("trusted (mode enforce), signed by key"),
            "{recipe}: {text}"
        );
    }
}
