//! The daemon's directories, files and addresses: no other user enters its directories, none that others may write is used, and an address
//! that another program has is tried again.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::machine::own_listener;
use nodedock_tests::metrics::ask;
use nodedock_tests::wait::until_path;
use nodedock_tests::{Daemon, Options, Root, places};
use tokio::net::TcpStream;

use crate::with_gpus;

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

fn chmod(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

const OWN: [&str; 10] = [
    "var/lib/nodedock",
    "var/lib/nodedock/drivers",
    "var/lib/nodedock/plugins_registry",
    "var/lib/nodedock/device-plugins",
    "var/lib/nodedock/kept-drivers",
    "var/lib/nodedock/claims",
    "var/lib/nodedock/deviceclasses",
    "var/cache/nodedock",
    "run/nodedock",
    "run/nodedock/pod-resources",
];

/// A umask of 0 gave the directories mode 0777, and a driver of a local user served as root's.
#[tokio::test]
async fn directories_are_private_under_any_umask() {
    let root = Root::new();
    let dock = root.path().join("dock");
    let log = root.path().join("log");
    let (program, shown) = (places::nodedockd(), dock.display());
    let run = format!(
        "umask 0; exec {} --root {shown} run 2> {}",
        program.display(),
        log.display()
    );
    let mut daemon = tokio::process::Command::new("sh")
        .args(["-c", &run])
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let is_ready = || match std::fs::read_to_string(&log) {
        Ok(text) if text.contains("ready") => Ok(()),
        found => Err(format!("{found:?}")),
    };
    until_path(root.path(), "the daemon is ready", is_ready).await;
    for own in OWN {
        assert_eq!(mode(&dock.join(own)), 0o700, "{own}");
    }
    for other in ["", "var", "var/lib", "var/run/cdi"] {
        assert_eq!(mode(&dock.join(other)), 0o755, "{other}");
    }
    for file in [
        "var/lib/nodedock/checkpoint.db",
        "var/lib/nodedock/cache.key",
        "run/nodedock/nodedock.sock",
    ] {
        assert_eq!(mode(&dock.join(file)), 0o600, "{file}");
    }
    daemon.kill().await.unwrap();
}

#[tokio::test]
async fn writable_directory_prevents_the_start() {
    let mut daemon = Daemon::start().await;
    daemon.terminate().await;
    let root = daemon.into_root().await;
    let root_path = root.path().canonicalize().unwrap();
    for directory in OWN.iter().chain(&["var/lib", "run"]) {
        let path = root_path.join(directory);
        let before = mode(&path);
        chmod(&path, 0o777);
        let command = format!("chmod go-w {}", path.display());
        root.run_node_program(&["run"])
            .await
            .failed_with(1, &[&command]);
        root.cli(&["preflight"]).await.failed_with(1, &[&command]);
        chmod(&path, before);
    }
    // Others could enter, and could write nothing.
    chmod(&root_path.join("var/lib/nodedock"), 0o755);
    let daemon = Daemon::start_on(root, Options::default()).await;
    assert_eq!(mode(&root_path.join("var/lib/nodedock")), 0o700);
    drop(daemon);
}

#[tokio::test]
async fn cdi_file_mode_follows_config() {
    let daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let files = |daemon: &Daemon| {
        let entries = std::fs::read_dir(daemon.path().join("var/run/cdi")).unwrap();
        let files = entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file());
        files.map(|path| mode(&path)).collect::<Vec<_>>()
    };
    assert_eq!(files(&daemon), [0o644]);
    let root = daemon.into_root().await;
    let daemon = Daemon::start_on(
        root,
        Options::default().config("cdiFiles: {mode: \"0600\"}\n"),
    )
    .await;
    assert_eq!(files(&daemon), [0o600]);
    for (config, part) in [
        ("mode: \"0666\"", "cdiFiles.mode"),
        ("group: no-such-group", "cdiFiles.group"),
    ] {
        let other = Root::new();
        let file = other.write("bad.yaml", format!("cdiFiles: {{{config}}}\n"));
        let failed = other
            .run_node_program(&["run", "--config", file.to_str().unwrap()])
            .await;
        let code = if part == "cdiFiles.mode" { 1 } else { 2 };
        failed.failed_with(code, &[part]);
    }
}

/// Each first start warned of the directory of DeviceClasses, and of directories of CDI specs that no other program had made yet.
#[tokio::test]
async fn fresh_machine_has_no_directory_warning() {
    let root = Root::new();
    let absent = root.path().join("etc/cdi");
    assert!(!absent.exists());
    let config = format!(
        "cdiDriver: {{enabled: true, directories: [{}]}}\n",
        absent.display()
    );
    let mut daemon =
        Daemon::start_on(root, Options::default().config(&config).flag("--local-api")).await;
    // Such a directory is found once it is there.
    std::fs::create_dir_all(&absent).unwrap();
    let spec = r#"{"cdiVersion": "0.6.0", "kind": "example.com/thing", "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}]}"#;
    std::fs::write(absent.join("example.json"), spec).unwrap();
    daemon.until_device("example.com/thing", "a", true).await;
    assert!(!daemon.log().contains("cannot watch"), "{}", daemon.log());
    daemon.terminate().await;
}

/// The daemon ended.
#[tokio::test]
async fn occupied_addresses_are_reported_and_retried() {
    let occupied = [(); 2].map(|()| own_listener());
    let [admin, api] = occupied
        .each_ref()
        .map(|listener| listener.local_addr().unwrap());
    let config =
        format!("admin: {{listen: \"{admin}\"}}\nlocalApi: {{enabled: true, listen: \"{api}\"}}\n");
    let daemon = Daemon::start_with(Options::default().config(&config)).await;
    let conditions = daemon
        .until_conditions(&["listen-failed", "listen-failed"])
        .await;
    for (condition, (key, address)) in conditions
        .iter()
        .zip([("admin.listen", admin), ("localApi.listen", api)])
    {
        assert_eq!(condition.subject, key);
        let message = &condition.problem.as_ref().unwrap().message;
        assert!(message.contains(&address.to_string()), "{message}");
    }
    drop(occupied);
    daemon.until_conditions(&[]).await;
    let answer = ask(TcpStream::connect(admin).await.unwrap(), "GET", "/livez").await;
    assert_eq!(answer.status, 200);
    TcpStream::connect(api).await.unwrap();
    let kubeconfig = daemon.path().join("kubeconfig");
    daemon
        .cli(&["kubeconfig", "--output", kubeconfig.to_str().unwrap()])
        .await
        .done();
    assert_eq!(mode(&kubeconfig), 0o600);
    assert!(
        std::fs::read_to_string(&kubeconfig)
            .unwrap()
            .contains(&format!("https://{api}"))
    );
}
