//! Devices of containers by the name of a class: the claim belongs to the container, whatever is killed.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use nodedock_tests::machine::or_skip;
use nodedock_tests::places::nodedock;
use nodedock_tests::podman::{CDI_DIR, Podman, User};
use nodedock_tests::{Daemon, Options, Root};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{api, machine_with, users};

/// A script that shows the variables of the devices.
const SHOW: &str = "busybox env | busybox grep '^MOCK_GPU_[0-9]*='";

/// A member of the group that may have claims, with subordinate users that are no other user's.
const USER: User = User {
    uid: 59_003,
    group: users::GROUP,
    first_subordinate: 2_100_000_000,
};

/// Number of the next class.
static CLASSES: AtomicU32 = AtomicU32::new(0);

/// A machine with four GPUs, its own class for each of them, and podman; classes have names that no other daemon has, because all of them write to
/// the directory that podman reads.
async fn gpus(what: &str) -> Option<(Daemon, Podman, [String; 2])> {
    let podman = or_skip(what, Podman::find())?;
    let (daemon, kinds) = machine_for_podman(Options::default().flag("--local-api")).await;
    Some((daemon, podman, kinds))
}

async fn machine_for_podman(options: Options) -> (Daemon, [String; 2]) {
    let daemon = machine_with(options.arg("--cdi-dir", CDI_DIR)).await;
    let number = CLASSES.fetch_add(1, Ordering::Relaxed);
    let name = format!("gpu-{}-{number}", std::process::id());
    let class = |name: &str, rest: &str| {
        let selector = format!(r#"device.driver == "mock-gpu.nodedock.dev"{rest}"#);
        let class = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": name },
            "spec": { "selectors": [{ "cel": { "expression": selector } }] },
        });
        class.to_string()
    };
    let first = format!("{name}.first");
    let index = r#" && device.attributes["mock-gpu.nodedock.dev"].index == 0"#;
    let classes = format!("{}\n---\n{}", class(&name, ""), class(&first, index));
    let file = daemon.write("classes.yaml", classes);
    daemon
        .cli(&["claim", "create", "-f", file.to_str().unwrap()])
        .await
        .done();
    let cdi = |class: &str| format!("nodedock.dev/{}", class.replace('.', "_"));
    let kinds = [cdi(&name), cdi(&first)];
    for kind in &kinds {
        until_file(kind).await;
    }
    (daemon, kinds)
}

/// Waits until a file of podman's directory has devices of a kind.
async fn until_file(kind: &str) {
    until_words(&[kind]).await;
}

/// Waits until a file has these strings.
async fn until_words(words: &[&str]) {
    let has = |path: PathBuf| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        words
            .iter()
            .all(|word| text.contains(&format!("\"{word}\"")))
    };
    let found = async {
        loop {
            let entries = std::fs::read_dir(CDI_DIR).unwrap();
            if entries.flatten().any(|entry| has(entry.path())) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(nodedock_tests::DEADLINE, found)
        .await
        .expect("the daemon writes it");
}

/// Lets podman use `nodedock runtime`, by a link to the program.
fn with_runtime(daemon: &Daemon, podman: &mut Podman) {
    podman.runtime = daemon.path().join("nodedock-runtime");
    symlink(nodedock(), &podman.runtime).unwrap();
}

async fn until_free(daemon: &Daemon) {
    daemon.until_no_claims().await;
    let api = api(daemon).await;
    for claim in api.claims(None).await.unwrap() {
        let field = |name: &str| claim["metadata"][name].as_str().unwrap().to_owned();
        let (namespace, name, uid) = (field("namespace"), field("name"), field("uid"));
        let gone = api.until_gone(&namespace, &name, &uid, nodedock_tests::DEADLINE);
        assert!(gone.await, "{claim}");
    }
}

/// The processes in the annotations of the only claim, by the keys.
async fn owners(root: &Root) -> Vec<(String, i32)> {
    let claims = api(root).await.claims(None).await.unwrap();
    let [claim] = &claims[..] else {
        panic!("{claims:#?}")
    };
    let annotations = claim["metadata"]["annotations"].as_object().unwrap();
    let processes = annotations.iter().filter_map(|(key, value)| {
        let process: Value = serde_json::from_str(value.as_str()?).ok()?;
        let pid = i32::try_from(process["pid"].as_i64()?).ok()?;
        Some((key.clone(), pid))
    });
    processes.collect()
}

fn kill(pid: i32) {
    // It may have ended.
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

#[tokio::test]
async fn container_gets_devices_of_its_class() {
    let Some((daemon, mut podman, [gpu, _])) = gpus("containers with devices of a class").await
    else {
        return;
    };
    with_runtime(&daemon, &mut podman);
    for (count, device) in [(1, "any"), (2, "2"), (4, "4")] {
        let name = format!("{gpu}={device}");
        let shown = podman.run(&daemon, &[&name], SHOW).await.unwrap();
        assert_eq!(shown.lines().count(), count, "{shown}");
        until_free(&daemon).await;
    }
    let name = format!("{gpu}=5");
    let refused = podman.run(&daemon, &[&name], SHOW).await.unwrap_err();
    assert!(refused.contains("there are no devices"), "{refused}");
    until_free(&daemon).await;
    // Without a device it is any other container.
    assert_eq!(podman.run(&daemon, &[], "echo x").await.unwrap(), "x\n");
}

#[tokio::test]
async fn unmarked_runtime_starts_no_container() {
    let Some((daemon, podman, [gpu, _])) = gpus("containers of another runtime").await else {
        return;
    };
    let name = format!("{gpu}=any");
    let refused = podman.run(&daemon, &[&name], SHOW).await.unwrap_err();
    assert!(refused.contains("hook"), "{refused}");
    assert!(api(&daemon).await.claims(None).await.unwrap().is_empty());
    podman.remove_all(&daemon).await;
}

#[tokio::test]
async fn precreate_hook_gives_devices() {
    let Some((daemon, mut podman, [gpu, _])) = gpus("devices by a hook of podman").await else {
        return;
    };
    let hooks = daemon.path().join("hooks");
    std::fs::create_dir(&hooks).unwrap();
    let hook = json!({
        "version": "1.0.0", "when": { "always": true }, "stages": ["precreate"],
        "hook": { "path": nodedock(), "args": ["nodedock", "container", "precreate"] },
    });
    std::fs::write(hooks.join("nodedock.json"), hook.to_string()).unwrap();
    podman.options[0] = vec!["--hooks-dir".to_owned(), hooks.to_str().unwrap().to_owned()];
    let name = format!("{gpu}=2");
    let shown = podman.run(&daemon, &[&name], SHOW).await.unwrap();
    assert_eq!(shown.lines().count(), 2, "{shown}");
    until_free(&daemon).await;
}

#[tokio::test]
async fn claim_follows_its_container() {
    let Some((mut daemon, mut podman, [_, first])) = gpus("claims of containers").await else {
        return;
    };
    with_runtime(&daemon, &mut podman);
    podman.options[1] = vec!["--detach".to_owned()];
    let name = format!("{first}=any");
    podman
        .run(&daemon, &[&name], "exec busybox tail -f /dev/null")
        .await
        .unwrap();
    // The container alone owns it by now.
    let owners = owners(&daemon).await;
    let [(key, container)] = &owners[..] else {
        panic!("{owners:?}")
    };
    assert_eq!(*key, format!("process.nodedock.dev/{container}"));
    let monitor = parent_of(*container);
    kill(monitor);
    daemon.crash().await;
    podman.options[1].clear();
    let refused = podman.run(&daemon, &[&name], SHOW).await.unwrap_err();
    assert!(refused.contains("there are no devices"), "{refused}");
    daemon.kill9().await;
    kill(*container);
    daemon.run().await;
    until_free(&daemon).await;
    let shown = podman.run(&daemon, &[&name], SHOW).await.unwrap();
    assert!(shown.starts_with("MOCK_GPU_0="), "{shown}");
    until_free(&daemon).await;
    podman.remove_all(&daemon).await;
}

fn parent_of(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    parent.unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn named_claim_outlives_its_containers() {
    let Some((daemon, mut podman, [gpu, _])) = gpus("claims that were made before").await else {
        return;
    };
    with_runtime(&daemon, &mut podman);
    let class = gpu.strip_prefix("nodedock.dev/").unwrap();
    let request = format!("{{deviceClassName: {class}}}");
    let [device] = &super::create(&daemon, "mine", &request).await[..] else {
        panic!("one device")
    };
    let index = device.strip_prefix("gpu-").unwrap();
    until_words(&[&gpu, "claim-mine"]).await;
    let name = format!("{gpu}=claim-mine");
    for _ in 0..2 {
        let shown = podman.run(&daemon, &[&name], SHOW).await.unwrap();
        assert!(shown.starts_with(&format!("MOCK_GPU_{index}=")), "{shown}");
        daemon.until_no_claims().await;
    }
    let claims = api(&daemon).await.claims(None).await.unwrap();
    assert_eq!(claims.len(), 1, "{claims:?}");
}

#[tokio::test]
async fn detached_container_outlives_run_with() {
    let Some((daemon, mut podman, [gpu, _])) = gpus("detached containers of run-with").await else {
        return;
    };
    podman.options[1] = vec!["--detach".to_owned()];
    let class = gpu.strip_prefix("nodedock.dev/").unwrap();
    let mut arguments = vec![
        "run-with".to_owned(),
        "--class".to_owned(),
        class.to_owned(),
    ];
    arguments.push("--".to_owned());
    arguments.extend(podman.arguments(&daemon, &[], "exec busybox tail -f /dev/null"));
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    daemon.cli(&arguments).await.done();
    assert_eq!(daemon.claims().await.len(), 1);
    let containers: Vec<_> = owners(&daemon).await;
    for (_, pid) in containers {
        kill(pid);
    }
    until_free(&daemon).await;
    podman.remove_all(&daemon).await;
}

#[tokio::test]
async fn rootless_container_has_users_claim() {
    let what = "containers of a user";
    let podman = Podman::find().and_then(|podman| podman.rootless(USER));
    let podman = podman.and_then(|podman| users::may_run().map(|()| podman));
    let Some(mut podman) = or_skip(what, podman) else {
        return;
    };
    let options = Options::default().config(users::CONFIG);
    let (daemon, [gpu, _]) = machine_for_podman(options).await;
    users::open(&daemon);
    let _pause = podman.pause(&daemon);
    with_runtime(&daemon, &mut podman);
    let (one, three) = (format!("{gpu}=any"), format!("{gpu}=3"));
    let shown = podman.run(&daemon, &[&one], SHOW).await.unwrap();
    assert_eq!(shown.lines().count(), 1, "{shown}");
    until_free(&daemon).await;
    // The claim follows the container, and counts against the quota of the user.
    podman.options[1] = vec!["--detach".to_owned()];
    let stays = "exec busybox tail -f /dev/null";
    podman.run(&daemon, &[&three], stays).await.unwrap();
    let [claim] = &api(&daemon).await.claims(None).await.unwrap()[..] else {
        panic!("one claim")
    };
    assert_eq!(claim["metadata"]["namespace"], "user-59003");
    let owners = owners(&daemon).await;
    let [(_, container)] = owners[..] else {
        panic!("{owners:?}")
    };
    podman.options[1].clear();
    let refused = podman.run(&daemon, &[&one], SHOW).await.unwrap_err();
    assert!(refused.contains("may ask for 3 devices"), "{refused}");
    kill(container);
    until_free(&daemon).await;
    let shown = podman.run(&daemon, &[&one], SHOW).await.unwrap();
    assert_eq!(shown.lines().count(), 1, "{shown}");
    until_free(&daemon).await;
    podman.remove_all(&daemon).await;
}
