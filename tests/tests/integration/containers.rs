//! Other people's software: a container that podman and runc start sees what was prepared.

use std::path::PathBuf;

use nodedock_tests::cdi::CdiFile;
use nodedock_tests::drivers::{
    DEVICE_NODES, DEVICE_NODES_FILE, Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME,
};
use nodedock_tests::machine::{or_skip, skip};
use nodedock_tests::podman::{CDI_DIR, Podman};
use nodedock_tests::{Daemon, Options, own_pool};
use serde_json::Value;

/// Removes what a failed test leaves in a directory that is not ours.
struct Leftovers(Vec<PathBuf>);

impl Drop for Leftovers {
    fn drop(&mut self) {
        for path in &self.0 {
            // Unprepare should have removed it.
            let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir_all(path));
            // The directory of this daemon's metadata, and not that of the machine's CDI files.
            let parent = path.parent().filter(|parent| parent.as_os_str() != CDI_DIR);
            let _ = parent.map(std::fs::remove_dir);
        }
    }
}

#[tokio::test]
async fn container_sees_prepared_devices_and_environment() {
    let Some(podman) = or_skip("devices in a real container", Podman::find()) else {
        return;
    };
    let daemon = Daemon::start_with(Options::default().arg("--cdi-dir", CDI_DIR)).await;
    daemon.install(DEVICE_NODES, Form::Core);
    daemon.install(MOCK_GPU, Form::Component);
    daemon.until_serving(DEVICE_NODES_FILE).await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    let devices = daemon.devices().await;
    let Some(node) = devices
        .iter()
        .find(|device| matches!(own_pool(&device.pool), "misc" | "loop"))
    else {
        return skip(
            "devices in a real container",
            "there is no device node to hand out",
        );
    };
    let attributes: Value = serde_json::from_str(&node.attributes_json).unwrap();
    let path = attributes["path"].as_str().unwrap();
    let (node, gpu) = (
        format!("{}/{}/{}", node.driver, node.pool, node.name),
        format!("{MOCK_GPU_NAME}/gpus/gpu-1"),
    );
    // A name that no other run of this test, or of a daemon, has.
    let pod = format!("container-{}", std::process::id());
    let args = [
        "prepare", "--pod", &pod, "--device", &node, "--device", &gpu, "-o", "json",
    ];
    let answer = daemon.cli(&args).await.json();
    let uid = answer["claims"][0]["uid"].as_str().unwrap();
    let entries = std::fs::read_dir(CDI_DIR)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let files: Vec<_> = entries
        .filter_map(|path| CdiFile::read(&path))
        .filter(|f| f.claim_uid() == uid)
        .collect();
    let mut leftovers = Leftovers(files.iter().map(|file| file.path.clone()).collect());
    let metadata: Vec<_> = files.iter().flat_map(CdiFile::mounts).collect();
    leftovers
        .0
        .extend(metadata.iter().map(|(path, _)| path.clone()));
    assert_eq!(files.len(), 2);

    let names = answer["containers"][0]["cdiDevices"].as_array().unwrap();
    let names: Vec<_> = names.iter().map(|name| name.as_str().unwrap()).collect();
    let seen = podman
        .run(
            &daemon,
            &names,
            &format!("busybox ls -l {path} && busybox env"),
        )
        .await
        .unwrap();
    let is_node = |line: &str| line.starts_with(['c', 'b']) && line.ends_with(path);
    assert!(seen.lines().any(is_node), "{path} in {seen}");
    for variable in files.iter().flat_map(CdiFile::env) {
        assert!(
            seen.lines().any(|line| line == variable),
            "{variable} in {seen}"
        );
    }
    assert!(seen.contains("MOCK_GPU_1=GPU-"), "{seen}");

    assert_eq!(metadata.len(), 2);
    for (on_node, in_container) in &metadata {
        let shown = in_container.display();
        let read = podman
            .run(&daemon, &names, &format!("busybox cat {shown}"))
            .await
            .unwrap();
        assert!(
            read == std::fs::read_to_string(on_node).unwrap() && read.contains(uid),
            "{read}"
        );
        let written = podman
            .run(&daemon, &names, &format!("echo x > {shown}"))
            .await
            .unwrap_err();
        assert!(written.contains("Read-only"), "{written}");
    }

    daemon
        .cli(&["unprepare", &format!("default/{pod}")])
        .await
        .done();
    assert!(leftovers.0.iter().all(|path| !path.exists()));
    let refused = podman.run(&daemon, &names[..1], "true").await.unwrap_err();
    assert!(
        refused.contains(names[0]),
        "unprepared devices are refused: {refused}"
    );
}
