//! Users of the machine who are not root: each has claims of its own, and nothing else.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nodedock_tests::machine::{is_root, or_skip, program};
use nodedock_tests::places::nodedock;
use nodedock_tests::{DEADLINE, Daemon, Options};
use tokio::time::timeout;

use super::{claim, create, machine_with};

pub(super) const GROUP: u32 = 4711;
pub(super) const CONFIG: &str = "localApi: {enabled: true, group: '4711', devicesPerUser: 3, devicesPerUserAndClass: {gpu: 2}}\n";
/// Two members of the group. Most machines have subordinate users above 100,000, which may not connect.
const ALICE: u32 = 59_001;
const BOB: u32 = 59_002;

/// A machine with four GPUs for root and for users.
async fn machine() -> Option<Daemon> {
    or_skip("claims of users", may_run())?;
    let daemon = machine_with(Options::default().config(CONFIG)).await;
    open(&daemon);
    Some(daemon)
}

/// Lets users reach the directory of their sockets.
pub(super) fn open(daemon: &Daemon) {
    for directory in [daemon.path(), &daemon.path().join("run")] {
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o711)).unwrap();
    }
}

/// Returns why a program of another user cannot be run.
pub(super) fn may_run() -> Result<(), String> {
    if !is_root() {
        return Err("the tests do not run as root".to_owned());
    }
    let program = nodedock();
    let closed = program.ancestors().find(|path| !is_open(path));
    closed.map_or(Ok(()), |path| {
        Err(format!("other users cannot read {}", path.display()))
    })
}

fn is_open(path: &Path) -> bool {
    let mode = std::fs::metadata(path).map(|found| found.permissions().mode());
    mode.is_ok_and(|mode| mode & 0o001 != 0)
}

#[tokio::test]
async fn users_have_claims_of_their_own() {
    let Some(daemon) = machine().await else {
        return;
    };
    let file = daemon.write("mine.yaml", claim("mine", "{deviceClassName: gpu}"));
    let file = file.to_str().unwrap();
    let create = ["claim", "create", "-f", file];
    for user in [ALICE, BOB] {
        let made = format!("claim user-{user}/mine");
        daemon
            .cli_as(user, GROUP, &create)
            .await
            .done_with(&[&made]);
    }
    let own = daemon.cli_as(ALICE, GROUP, &["claim", "get"]).await.done();
    assert!(
        own.contains("user-59001") && !own.contains("user-59002"),
        "{own}"
    );
    let show = [
        "run-with",
        "--class",
        "gpu",
        "--",
        "sh",
        "-c",
        "env | grep ^MOCK_GPU_.=",
    ];
    let shown = daemon.cli_as(ALICE, GROUP, &show).await.done();
    assert!(shown.starts_with("MOCK_GPU_2="), "{shown}");
    daemon.until_no_claims().await;
    // A user can neither see nor end anything of others.
    for (namespace, words) in [("user-59002", "cannot"), ("default", "cannot")] {
        let get = ["claim", "get", "-n", namespace];
        daemon
            .cli_as(ALICE, GROUP, &get)
            .await
            .failed_with(1, &[words]);
    }
    daemon
        .cli(&[
            "prepare",
            "--pod",
            "web",
            "--claim",
            "mine",
            "--namespace",
            "user-59002",
        ])
        .await
        .done();
    let taken = ["unprepare", "user-59002/web"];
    let refused = daemon.cli_as(ALICE, GROUP, &taken).await;
    refused.failed_with(1, &["not of the namespace user-59001"]);
    daemon.cli_as(BOB, GROUP, &taken).await.done();
    // A user prepares for pods of the own namespace, under no UID that another pod has.
    let own = ["prepare", "--pod", "web", "--claim", "mine"];
    daemon.cli_as(ALICE, GROUP, &own).await.done();
    daemon
        .cli_as(ALICE, GROUP, &["unprepare", "user-59001/web"])
        .await
        .done();
}

#[tokio::test]
async fn user_takes_no_pod_of_root() {
    let Some(daemon) = machine().await else {
        return;
    };
    create(&daemon, "of-root", "{deviceClassName: gpu}").await;
    let pod = |namespace: &str, claim: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, namespace: {namespace}, uid: the-uid}}\nspec:\n  resourceClaims: [{{name: c, resourceClaimName: {claim}}}]\n  containers: [{{name: main, image: none, resources: {{claims: [{{name: c}}]}}}}]\n"
        )
    };
    let of_root = daemon.write("root.yaml", pod("default", "of-root"));
    daemon
        .cli(&["prepare", "-f", of_root.to_str().unwrap()])
        .await
        .done();
    let file = daemon.write("mine.yaml", claim("mine", "{deviceClassName: gpu}"));
    let make = ["claim", "create", "-f", file.to_str().unwrap()];
    daemon.cli_as(ALICE, GROUP, &make).await.done();
    let file = daemon.write("user.yaml", pod("user-59001", "mine"));
    let prepare = ["prepare", "-f", file.to_str().unwrap()];
    let refused = daemon.cli_as(ALICE, GROUP, &prepare).await;
    refused.failed_with(1, &["has this UID"]);
    // The UID alone names no pod of another namespace.
    daemon
        .cli_as(ALICE, GROUP, &["unprepare", "--uid", "the-uid"])
        .await
        .failed_with(1, &["no pod \"the-uid\""]);
    assert_eq!(daemon.claims().await.len(), 1);
}

#[tokio::test]
async fn quota_refuses_claims_of_users() {
    let Some(daemon) = machine().await else {
        return;
    };
    let too_many = ["run-with", "--class", "gpu=3", "--", "true"];
    let refused = daemon.cli_as(ALICE, GROUP, &too_many).await;
    refused.failed_with(125, &["2 devices of class gpu", "ask for 3"]);
    daemon.cli(&too_many).await.done();
    let two = ["run-with", "--class", "gpu=2", "--", "true"];
    daemon.cli_as(ALICE, GROUP, &two).await.done();
}

#[tokio::test]
async fn quota_counts_claims_until_freed() {
    let Some(daemon) = machine().await else {
        return;
    };
    let request = "{deviceClassName: gpu, allocationMode: ExactCount, count: 2}";
    let file = daemon.write("mine.yaml", claim("mine", request));
    let create = ["claim", "create", "-f", file.to_str().unwrap()];
    daemon.cli_as(ALICE, GROUP, &create).await.done();
    let prepare = ["prepare", "--pod", "web", "--claim", "mine"];
    daemon.cli_as(ALICE, GROUP, &prepare).await.done();
    // The object of a prepared claim is what the quota counts: its user can neither delete it nor remove what protects it.
    let delete = ["claim", "delete", "mine", "--timeout", "1"];
    let in_use = daemon.cli_as(ALICE, GROUP, &delete).await;
    in_use.failed_with(1, &["claim user-59001/mine is in use"]);
    if let Some(curl) = or_skip(
        "writes of users",
        program("curl").ok_or("no curl".to_owned()),
    ) {
        for (kind, patch) in [
            ("merge-patch", r#"{"metadata": {"finalizers": null}}"#),
            (
                "json-patch",
                r#"[{"op": "remove", "path": "/metadata/finalizers"}]"#,
            ),
        ] {
            let refused = patched(&daemon, &curl, kind, patch).await;
            assert!(refused.contains("keeps its devices until"), "{refused}");
        }
    }
    let more = ["run-with", "--class", "gpu", "--", "true"];
    let refused = daemon.cli_as(ALICE, GROUP, &more).await;
    refused.failed_with(125, &["2 devices of class gpu", "ask for 3"]);
    let unprepare = ["unprepare", "user-59001/web"];
    daemon.cli_as(ALICE, GROUP, &unprepare).await.done();
    let gone = async {
        while daemon
            .cli_as(ALICE, GROUP, &["claim", "get", "mine"])
            .await
            .code
            == Some(0)
        {}
    };
    timeout(DEADLINE, gone).await.expect("the claim ends");
    daemon.cli_as(ALICE, GROUP, &more).await.done();
}

/// Patches the claim as its user, and returns the answer of the local API.
async fn patched(daemon: &Daemon, curl: &Path, kind: &str, patch: &str) -> String {
    let socket = daemon.path().join("run/nodedock-users/api.sock");
    let mut command = tokio::process::Command::new(curl);
    command
        .uid(ALICE)
        .gid(GROUP)
        .current_dir("/")
        .args(["--silent", "--max-time", "30", "--request", "PATCH"])
        .arg("--unix-socket")
        .arg(socket)
        .arg("--header")
        .arg(format!("Content-Type: application/{kind}+json"))
        .args(["--data", patch])
        .arg("http://local/apis/resource.k8s.io/v1/namespaces/user-59001/resourceclaims/mine");
    let output = command.kill_on_drop(true).output().await.unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn waiting_user_sees_no_other_names() {
    let Some(daemon) = machine().await else {
        return;
    };
    create(
        &daemon,
        "all",
        "{deviceClassName: gpu, allocationMode: ExactCount, count: 4}",
    )
    .await;
    let wait = ["run-with", "--class", "gpu", "--timeout", "0", "--", "true"];
    let refused = daemon.cli_as(ALICE, GROUP, &wait).await;
    let error = refused.failed_with(125, &["there are no devices", "claims of other users"]);
    assert!(!error.contains("default/all"), "{error}");
    let root = daemon.cli(&wait).await;
    root.failed_with(125, &["there are no devices", "default/all"]);
}

#[tokio::test]
async fn everything_else_is_refused_to_users() {
    let Some(daemon) = machine().await else {
        return;
    };
    for args in [
        &["get", "node"][..],
        &["get", "devices"],
        &["release", "claim", "a"],
    ] {
        let refused = daemon.cli_as(ALICE, GROUP, args).await;
        refused.failed_with(1, &["is for root alone"]);
    }
    let class = daemon.write(
        "other.yaml",
        super::CLASS.replace("name: gpu", "name: mine"),
    );
    let create = ["claim", "create", "-f", class.to_str().unwrap()];
    let refused = daemon.cli_as(ALICE, GROUP, &create).await;
    refused.failed_with(1, &["deviceclasses", "cannot"]);
    let stranger = daemon.cli_as(ALICE, 1, &["claim", "get"]).await;
    stranger.failed_with(3, &["Permission denied"]);
}
