//! Drivers as OCI images: what `nodedock driver package` writes, and how tools of others read it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, side_file, wasm};
use nodedock_tests::machine::{is_root, or_skip, program, run, sha256};
use nodedock_tests::{Daemon, Options, Root};
use serde_json::Value;

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of the tests are UTF-8")
}

/// The simulated GPUs as a layout in the root, and the digest that the command printed.
async fn package(root: &Root, name: &str) -> (PathBuf, String) {
    let (file, layout) = (
        root.write(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core)),
        root.path().join(name),
    );
    let grant = root.write("grant", side_file(MOCK_GPU, "grant"));
    let config = root.write("config", side_file(MOCK_GPU, "config"));
    let signature = root.write("signature", [7; 64]);
    let mut args = vec!["driver", "package", text(&file), "--output", text(&layout)];
    args.extend([
        "--grant",
        text(&grant),
        "--config",
        text(&config),
        "--signature",
        text(&signature),
    ]);
    let printed = root.cli(&args).await.done_with(&[
        MOCK_GPU_NAME,
        "mock-gpu.wasm, mock-gpu.grant.yaml, mock-gpu.config.yaml, mock-gpu.wasm.sig",
        &format!(
            "skopeo copy --all --preserve-digests oci:{} docker://REGISTRY/{MOCK_GPU_NAME}:",
            text(&layout)
        ),
        &format!("image     REGISTRY/{MOCK_GPU_NAME}@sha256:"),
    ]);
    let digest = printed
        .lines()
        .find_map(|line| line.strip_prefix("digest"))
        .unwrap()
        .trim()
        .to_owned();
    (layout, digest)
}

#[tokio::test]
async fn packages_are_reproducible_with_printed_digest() {
    let root = Root::new();
    let (first, digest) = package(&root, "first").await;
    let index = std::fs::read(first.join("index.json")).unwrap();
    let parsed: Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(parsed["manifests"][0]["digest"], digest);
    let blob = std::fs::read(first.join("blobs").join(digest.replace(':', "/"))).unwrap();
    assert_eq!(format!("sha256:{}", sha256(&blob)), digest);
    // Once more, over the first and beside it.
    assert_eq!(package(&root, "first").await.1, digest);
    let (second, again) = package(&root, "second").await;
    assert_eq!(
        (again, std::fs::read(second.join("index.json")).unwrap()),
        (digest, index)
    );
}

#[tokio::test]
async fn unrelated_files_are_not_packaged() {
    let root = Root::new();
    let driver = root.write(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    let driver = text(&driver);
    let bad = root.write("bad.wasm", "not a driver");
    let unnamed = root.write("driver", wasm(MOCK_GPU, Form::Core));
    let narrow = root.write("narrow", "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n");
    let list = root.write("list", "- a\n");
    let output = root.path().join("layout");
    let full = root.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("notes.txt"), "keep me").unwrap();
    for (args, parts) in [
        (
            &[text(&bad)][..],
            &["bad.wasm cannot be loaded", "not WebAssembly"][..],
        ),
        (&["/nowhere.wasm"], &["/nowhere.wasm"]),
        (&[text(&unnamed)], &["driver is not named NAME.wasm"]),
        (
            &[driver, "--grant", text(&narrow)],
            &["narrow lacks what", "MOCK_GPU_*"],
        ),
        (&[driver, "--grant", text(&list)], &["grant ", "list"]),
        (
            &[driver, "--config", text(&list)],
            &["config ", "list", "mapping"],
        ),
        (
            &[driver, "--signature", text(&list)],
            &["signature ", "list", "no signature"],
        ),
    ] {
        let args = [&["driver", "package", "--output", text(&output)], args].concat();
        root.cli(&args).await.failed_with(1, parts);
        assert!(!output.exists(), "{args:?}");
    }
    root.cli(&["driver", "package", driver, "--output", text(&full)])
        .await
        .failed_with(1, &["full has notes.txt", "choose an empty directory"]);
    assert_eq!(
        std::fs::read_to_string(full.join("notes.txt")).unwrap(),
        "keep me"
    );
    root.cli(&["driver", "package", driver])
        .await
        .failed_with(2, &["--output"]);
}

#[tokio::test]
async fn skopeo_copies_image_with_same_digest() {
    let found = program("skopeo").ok_or_else(|| "skopeo is not installed".to_owned());
    let Some(skopeo) = or_skip("a packaged driver as skopeo reads it", found) else {
        return;
    };
    let root = Root::new();
    let (layout, digest) = package(&root, "layout").await;
    let of_layout = format!("oci:{}", text(&layout));
    let said = |args: &[&str]| {
        let output = Command::new(&skopeo)
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        output.stdout
    };
    let raw = said(&["inspect", "--raw", &of_layout]);
    assert_eq!(format!("sha256:{}", sha256(&raw)), digest);
    let inspected: Value = serde_json::from_slice(&said(&["inspect", &of_layout])).unwrap();
    assert_eq!(
        (
            &inspected["Os"],
            inspected["Layers"].as_array().unwrap().len()
        ),
        (&"linux".into(), 1)
    );
    let copy = root.path().join("copy");
    said(&[
        "--insecure-policy",
        "copy",
        "--all",
        "--preserve-digests",
        &of_layout,
        &format!("oci:{}", text(&copy)),
    ]);
    let index: Value =
        serde_json::from_slice(&std::fs::read(copy.join("index.json")).unwrap()).unwrap();
    assert_eq!(index["manifests"][0]["digest"], digest);
}

/// An image that a container runtime unpacks is a driver image for the daemon.
#[tokio::test]
async fn runtime_unpacks_image_served_by_daemon() {
    let found = match program("podman") {
        Some(podman) if is_root() => Ok(podman),
        Some(_) => Err("podman needs root to mount an image".to_owned()),
        None => Err("podman is not installed".to_owned()),
    };
    let Some(podman) = or_skip("a packaged driver in a container runtime", found) else {
        return;
    };
    let root = Root::new();
    package(&root, "layout").await;
    let storage = root.path().join("podman");
    let command = || {
        let mut command = Command::new(&podman);
        command
            .arg("--root")
            .arg(storage.join("root"))
            .arg("--runroot")
            .arg(storage.join("run"));
        command
            .arg("--tmpdir")
            .arg(storage.join("tmp"))
            .args(["--storage-driver=vfs", "--events-backend=none"]);
        // The image is named after the path, which must be in lower case.
        command.current_dir(root.path()).stdin(Stdio::null());
        command
    };
    let output = command()
        .args(["pull", "--quiet", "oci:layout"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let id = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    let output = command().args(["image", "mount", &id]).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mounted = String::from_utf8(output.stdout).unwrap().trim().to_owned();

    for side in ["grant", "config"] {
        root.write(&format!("gpu.{side}.yaml"), side_file(MOCK_GPU, side));
    }
    let config = format!("driverImages: [{{name: gpu, directory: {mounted}}}]\n");
    let daemon = Daemon::start_on(root.beside(), Options::default().config(&config)).await;
    let served = daemon.until_serving("gpu.wasm").await;
    assert_eq!((served.name.as_str(), served.devices), (MOCK_GPU_NAME, 11));
    run(command().args(["image", "unmount", &id])).unwrap();
}
