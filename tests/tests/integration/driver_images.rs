//! Drivers in directories of their own, such as mounted images: what is read of them, what is not, and what they do to other drivers.

use std::path::{Path, PathBuf};

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{
    DEVICE_NODES, DEVICE_NODES_FILE, Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, digest,
    side_file, version, wasm,
};
use nodedock_tests::{Daemon, Options, Root, assert_parts};

/// A directory of the root for an image.
fn image(root: &Root, name: &str) -> PathBuf {
    let directory = root.path().join("images").join(name);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// A daemon with an image of each name.
async fn daemon_with(root: Root, names: &[&str]) -> Daemon {
    let entry = |name: &&str| {
        let directory = root.path().join("images").join(name);
        format!("- {{name: {name}, directory: {}}}\n", directory.display())
    };
    let entries: String = names.iter().map(entry).collect();
    let options = Options::default().config(&format!("driverImages:\n{entries}"));
    Daemon::start_on(root, options).await
}

/// Grant and config of the simulated GPUs beside the daemon's config.
fn write_side_files(root: &Root, name: &str) {
    for side in ["grant", "config"] {
        root.write(&format!("{name}.{side}.yaml"), side_file(MOCK_GPU, side));
    }
}

fn put(directory: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(directory.join(name), bytes).unwrap();
}

#[tokio::test]
async fn grant_of_image_has_no_effect() {
    let root = Root::new();
    let directory = image(&root, "gpu");
    // The driver is known by the name in the config, regardless of its file's name.
    put(&directory, "driver.wasm", wasm(MOCK_GPU, Form::Core));
    for name in ["gpu", "driver"] {
        put(
            &directory,
            &format!("{name}.grant.yaml"),
            side_file(MOCK_GPU, "grant"),
        );
        put(&directory, &format!("{name}.config.yaml"), "pools: []\n");
    }
    let daemon = daemon_with(root, &["gpu"]).await;
    let blocked = daemon.until_state("gpu.wasm", "blocked").await;
    assert_eq!(blocked.name, MOCK_GPU_NAME);
    assert!(
        blocked
            .missing_grants
            .iter()
            .any(|missing| missing.contains("MOCK_GPU_*")),
        "{blocked:?}"
    );

    write_side_files(&daemon, "gpu");
    daemon
        .until_driver("gpu.wasm", |driver| {
            driver.state == "serving" && driver.devices == 11
        })
        .await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    std::fs::remove_file(daemon.path().join("gpu.grant.yaml")).unwrap();
    daemon.until_state("gpu.wasm", "blocked").await;
    write_side_files(&daemon, "gpu");
    daemon.until_serving("gpu.wasm").await;
    assert_eq!(
        daemon.unprepare(&pod("one")).await,
        [("a".to_owned(), "unprepared".to_owned())]
    );
    daemon
        .cli(&["driver", "reload", MOCK_GPU_NAME])
        .await
        .done_with(&["gpu.wasm", "serving, 11 devices"]);
}

/// An entry took effect at the next start alone.
#[tokio::test]
async fn entries_take_effect_at_once() {
    let root = Root::new();
    let (old, new) = (
        wasm(MOCK_GPU, Form::Core),
        version(wasm(MOCK_GPU, Form::Core), "2"),
    );
    put(&image(&root, "old"), MOCK_GPU_FILE, &old);
    put(&image(&root, "new"), MOCK_GPU_FILE, &new);
    write_side_files(&root, "gpu");
    let daemon = Daemon::start_on(root, Options::default().config("{}\n")).await;
    let configure = |text: &str| {
        let file = daemon.write("nodedock.yaml.new", text);
        std::fs::rename(file, daemon.path().join("nodedock.yaml")).unwrap();
    };
    let entry = |directory: &str| {
        let directory = daemon.path().join("images").join(directory);
        format!(
            "driverImages: [{{name: gpu, directory: {}}}]\n",
            directory.display()
        )
    };
    configure(&entry("old"));
    let served = daemon.until_serving("gpu.wasm").await;
    assert_eq!(served.digest, digest(&old));
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    // Another directory, as of another digest.
    configure(&entry("new"));
    daemon
        .until_driver("gpu.wasm", |driver| {
            driver.digest == digest(&new) && driver.state == "serving"
        })
        .await;
    // Without its entry the driver ends, and its claim stays.
    configure("{}\n");
    daemon.until_gone("gpu.wasm").await;
    assert_eq!(daemon.only_claim().await.state, "prepared");
    configure(&entry("new"));
    daemon.until_serving("gpu.wasm").await;
    assert_eq!(
        daemon.unprepare(&pod("one")).await,
        [("a".to_owned(), "unprepared".to_owned())]
    );
    daemon.until_conditions(&[]).await;
}

#[tokio::test]
async fn config_map_grants_reload_on_change() {
    let root = Root::new();
    put(
        &image(&root, "gpu"),
        MOCK_GPU_FILE,
        wasm(MOCK_GPU, Form::Core),
    );
    let narrow = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n".to_owned();
    for (directory, grant) in [("..1", &side_file(MOCK_GPU, "grant")), ("..2", &narrow)] {
        std::fs::create_dir(root.path().join(directory)).unwrap();
        root.write(&format!("{directory}/gpu.grant.yaml"), grant);
        root.write(
            &format!("{directory}/gpu.config.yaml"),
            side_file(MOCK_GPU, "config"),
        );
    }
    let link =
        |to: &str, from: &str| std::os::unix::fs::symlink(to, root.path().join(from)).unwrap();
    link("..1", "..data");
    link("..data/gpu.grant.yaml", "gpu.grant.yaml");
    link("..data/gpu.config.yaml", "gpu.config.yaml");
    let daemon = daemon_with(root, &["gpu"]).await;
    daemon.until_serving("gpu.wasm").await;
    std::os::unix::fs::symlink("..2", daemon.path().join("..data_tmp")).unwrap();
    std::fs::rename(
        daemon.path().join("..data_tmp"),
        daemon.path().join("..data"),
    )
    .unwrap();
    daemon.until_state("gpu.wasm", "blocked").await;
}

#[tokio::test]
async fn image_without_one_driver_fails_alone() {
    let root = Root::new();
    let bytes = wasm(MOCK_GPU, Form::Core);
    for name in [
        "empty",
        "two",
        "directory",
        "pipe",
        "link",
        "dangling",
        "text",
    ] {
        image(&root, name);
    }
    let at = |path: &str| root.path().join("images").join(path);
    put(&at("empty"), ".hidden.wasm", &bytes);
    put(&at("empty"), "README.md", "no driver");
    put(&at("two"), "b.wasm", &bytes);
    put(&at("two"), "a.wasm", &bytes);
    std::fs::create_dir(at("directory/x.wasm")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("pipe/x.wasm"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let outside = root.write("outside", &bytes);
    std::os::unix::fs::symlink(&outside, at("link/x.wasm")).unwrap();
    std::os::unix::fs::symlink("nothing", at("dangling/x.wasm")).unwrap();
    put(&at("text"), "x.wasm", "hello, I am a text");
    // The name of a file that is no directory.
    root.write("images/file", "");
    root.install(DEVICE_NODES, Form::Core);
    put(&image(&root, "good"), MOCK_GPU_FILE, &bytes);
    write_side_files(&root, "good");

    let names = [
        "empty",
        "two",
        "directory",
        "pipe",
        "link",
        "dangling",
        "text",
        "file",
        "missing",
        "good",
    ];
    let daemon = daemon_with(root, &names).await;
    for (name, parts) in [
        (
            "empty",
            &["driver image empty", "/images/empty has no file *.wasm"][..],
        ),
        (
            "two",
            &[
                "driver image two",
                "/images/two has more than one",
                "a.wasm and b.wasm",
            ],
        ),
        (
            "directory",
            &["/images/directory/x.wasm", "not a regular file"],
        ),
        ("pipe", &["/images/pipe/x.wasm", "not a regular file"]),
        (
            "link",
            &["/images/link/x.wasm", "leads out of its directory"],
        ),
        ("dangling", &["/images/dangling/x.wasm", "No such file"]),
        ("text", &["not WebAssembly"]),
        (
            "file",
            &[
                "driver image file",
                "/images/file cannot be listed",
                "Not a directory",
            ],
        ),
        (
            "missing",
            &[
                "driver image missing",
                "/images/missing cannot be listed",
                "No such file",
            ],
        ),
    ] {
        daemon.until_failed(&format!("{name}.wasm"), parts).await;
    }
    daemon.until_serving("good.wasm").await;
    daemon.until_serving(DEVICE_NODES_FILE).await;
    daemon.run_node_program(&["probe", "ready"]).await.done();
    let of_each = vec!["driver-not-serving"; names.len() - 1];
    daemon.until_conditions(&of_each).await;
}

#[tokio::test]
async fn broken_image_change_keeps_old_serving() {
    let root = Root::new();
    let directory = image(&root, "gpu");
    let bytes = wasm(MOCK_GPU, Form::Core);
    put(&directory, MOCK_GPU_FILE, &bytes);
    write_side_files(&root, "gpu");
    let daemon = daemon_with(root, &["gpu"]).await;
    daemon.until_serving("gpu.wasm").await;

    put(&directory, "second.wasm", &bytes);
    let broken = daemon
        .until_driver("gpu.wasm", |driver| !driver.reason.is_empty())
        .await;
    assert_eq!(broken.state, "serving");
    assert_parts(
        &broken.reason,
        &[
            "continues to serve",
            "driver image gpu",
            "mock-gpu.wasm and second.wasm",
        ],
    );
    std::fs::rename(&directory, directory.with_extension("away")).unwrap();
    let gone = daemon
        .until_driver("gpu.wasm", |driver| {
            driver.reason.contains("cannot be listed")
        })
        .await;
    assert_eq!(
        gone.state, "serving",
        "an image is removed by its entry in the config"
    );
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;

    let new = version(bytes, "2");
    std::fs::create_dir(&directory).unwrap();
    put(&directory, "renamed.wasm", &new);
    let is_new = |driver: &nodedock_proto::node::v1::Driver| driver.digest == digest(&new);
    let served = daemon
        .until_driver("gpu.wasm", |driver| {
            is_new(driver) && driver.reason.is_empty()
        })
        .await;
    assert_eq!(served.state, "serving");
}

#[tokio::test]
async fn image_takes_precedence_over_equal_file() {
    let root = Root::new();
    let (of_image, of_file) = (wasm(MOCK_GPU, Form::Component), wasm(MOCK_GPU, Form::Core));
    put(&image(&root, MOCK_GPU), MOCK_GPU_FILE, &of_image);
    write_side_files(&root, MOCK_GPU);
    root.install_gpus("pools:\n- {name: gpus, count: 1}\n");
    let daemon = Daemon::start_on(root, Options::default()).await;
    assert_eq!(
        daemon.until_serving(MOCK_GPU_FILE).await.digest,
        digest(&of_file)
    );
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;

    let mut daemon = daemon;
    let directory = daemon.path().join("images").join(MOCK_GPU);
    let config = format!(
        "driverImages: [{{name: {MOCK_GPU}, directory: {}}}]\n",
        directory.display()
    );
    let options = std::mem::take(daemon.options());
    *daemon.options() = options.config(&config);
    daemon.restart().await;
    // The name has claims, and is the file's until an operator moves it.
    daemon
        .until_failed(
            MOCK_GPU_FILE,
            &[
                "the driver image mock-gpu",
                "belongs to the driver file mock-gpu.wasm",
            ],
        )
        .await;
    daemon
        .cli(&["driver", "assign", MOCK_GPU_NAME, MOCK_GPU])
        .await
        .done();
    let served = daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(
        (served.digest.as_str(), served.devices),
        (digest(&of_image).as_str(), 11)
    );
    let [condition] = daemon
        .until_conditions(&["driver-file-shadowed"])
        .await
        .try_into()
        .unwrap();
    assert_eq!(
        condition.subject,
        daemon.driver_path(MOCK_GPU_FILE).display().to_string()
    );
    assert_parts(
        &condition.problem.unwrap().message,
        &["driverImages", "remove the file"],
    );
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_conditions(&[]).await;
    assert_eq!(
        daemon.until_serving(MOCK_GPU_FILE).await.digest,
        digest(&of_image)
    );
    assert_eq!(
        daemon.unprepare(&pod("one")).await,
        [("a".to_owned(), "unprepared".to_owned())]
    );
}

/// An update as a DaemonSet does it: the new pod has another image and the same directories of the node.
#[tokio::test]
async fn image_update_keeps_claims_without_reload() {
    let root = Root::new();
    let (old_bytes, new_bytes) = (wasm(MOCK_GPU, Form::Core), wasm(MOCK_GPU, Form::Component));
    put(&image(&root, "old"), MOCK_GPU_FILE, &old_bytes);
    put(&image(&root, "new"), MOCK_GPU_FILE, &new_bytes);
    write_side_files(&root, "gpu");
    let options = |directory: &str, uid: &str| {
        let directory = root.path().join("images").join(directory);
        let config = format!(
            "driverImages: [{{name: gpu, directory: {}}}]\n",
            directory.display()
        );
        Options::default()
            .config(&config)
            .arg("--instance-uid", uid)
    };
    let (of_old, of_new) = (options("old", "old"), options("new", "new"));
    let old = Daemon::start_on(root, of_old).await;
    assert_eq!(
        old.until_serving("gpu.wasm").await.digest,
        digest(&old_bytes)
    );
    old.prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;

    let new = old.beside(of_new).await;
    assert_eq!(
        new.until_serving("gpu.wasm").await.digest,
        digest(&new_bytes)
    );
    assert_eq!(
        new.unprepare(&pod("one")).await,
        [("a".to_owned(), "unprepared".to_owned())]
    );
    new.prepared(request(&pod("two"), &[&gpu_claim("b", &["gpus/gpu-0"])]))
        .await;
}
