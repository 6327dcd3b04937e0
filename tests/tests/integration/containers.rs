//! Other people's software: a container that podman and runc start sees what was prepared.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nodedock_tests::cdi::CdiFile;
use nodedock_tests::drivers::{
    DEVICE_NODES, DEVICE_NODES_FILE, Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME,
};
use nodedock_tests::machine::{is_root, or_skip, program, skip};
use nodedock_tests::{Daemon, Options, Root, own_pool};
use serde_json::Value;

/// Directory that podman reads; its version here takes no other.
pub(crate) const CDI_DIR: &str = "/var/run/cdi";

pub(crate) struct Podman {
    podman: PathBuf,
    pub(crate) runtime: PathBuf,
    /// Options of podman, and of its command `run`.
    pub(crate) options: [Vec<String>; 2],
}

impl Podman {
    pub(crate) fn find() -> Result<Self, String> {
        let podman = program("podman").ok_or("podman is not installed")?;
        let runtime = program("runc").ok_or("runc is not installed")?;
        if !is_root() {
            return Err("it needs root".to_owned());
        }
        let busybox = Command::new("/bin/busybox")
            .arg("true")
            .stdin(Stdio::null())
            .status();
        if !busybox.is_ok_and(|status| status.success()) {
            return Err("there is no /bin/busybox".to_owned());
        }
        Ok(Self {
            podman,
            runtime,
            options: Default::default(),
        })
    }

    /// Returns podman and its arguments before a command.
    fn program(&self, root: &Root) -> Vec<String> {
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let storage = |name: &str| text(&root.path().join("podman").join(name));
        let mut arguments = vec![text(&self.podman), "--root".to_owned(), storage("root")];
        arguments.extend([
            "--runroot".to_owned(),
            storage("run"),
            "--tmpdir".to_owned(),
            storage("tmp"),
        ]);
        arguments.extend([
            "--storage-driver=vfs".to_owned(),
            "--runtime".to_owned(),
            text(&self.runtime),
        ]);
        let [of_podman, _] = &self.options;
        arguments.extend(["--cgroup-manager=cgroupfs", "--events-backend=none"].map(str::to_owned));
        arguments.extend_from_slice(of_podman);
        arguments
    }

    /// Ends and removes every container of a root, with what is mounted for it.
    pub(crate) async fn remove_all(&self, root: &Root) {
        let mut words = self.program(root).into_iter();
        let mut command = tokio::process::Command::new(words.next().expect("the program"));
        command
            .args(words)
            .args(["rm", "--all", "--force", "--time", "0"]);
        // A monitor that was killed makes the first removal fail, and not the second.
        for _ in 0..2 {
            let removed = command.stdin(Stdio::null()).output();
            let removed = tokio::time::timeout(nodedock_tests::DEADLINE, removed).await;
            if removed.expect("podman ends").unwrap().status.success() {
                return;
            }
        }
        panic!("containers stay");
    }

    /// Returns the arguments that run a shell command in a container, on a directory with nothing but busybox.
    pub(crate) fn arguments(&self, root: &Root, script: &str) -> Vec<String> {
        let rootfs = root.path().join("rootfs");
        fill(&rootfs);
        let mut arguments = self.program(root);
        let [_, of_run] = &self.options;
        let fixed = ["run", "--rm", "--network=none"].map(str::to_owned);
        arguments.extend(fixed.into_iter().chain(of_run.iter().cloned()));
        let limits = [
            "--ulimit",
            "nofile=16384:16384",
            "--ulimit",
            "nproc=32768:32768",
            "--rootfs",
        ];
        arguments.extend(limits.map(str::to_owned));
        arguments.push(rootfs.to_str().expect("UTF-8").to_owned());
        arguments.extend(["/bin/busybox", "sh", "-c", script].map(str::to_owned));
        arguments
    }

    /// Runs a shell command in a container with the devices, on a directory with nothing but busybox.
    pub(crate) async fn run(
        &self,
        root: &Root,
        devices: &[&str],
        script: &str,
    ) -> Result<String, String> {
        let mut arguments = self.arguments(root, script).into_iter();
        let mut command = tokio::process::Command::new(arguments.next().expect("the program"));
        for argument in arguments {
            let is_run = argument == "run";
            command.arg(argument);
            if is_run {
                command.args(devices.iter().flat_map(|device| ["--device", device]));
            }
        }
        let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
        let output = tokio::time::timeout(nodedock_tests::DEADLINE, output)
            .await
            .map_err(|_| "podman hangs")?;
        let output = output.map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    }
}

fn fill(rootfs: &Path) {
    for dir in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        std::fs::create_dir_all(rootfs.join(dir)).unwrap();
    }
    // A container may run it.
    let busybox = rootfs.join("bin/busybox");
    if !busybox.exists() {
        std::fs::copy("/bin/busybox", busybox).unwrap();
    }
}

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
    let directories = metadata
        .iter()
        .map(|(path, _)| path.parent().unwrap().to_owned());
    leftovers.0.extend(directories.collect::<Vec<_>>());
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
