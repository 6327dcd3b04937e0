//! A disk that becomes read-only: known claims are answered, new ones are refused with a clear error, and the daemon resumes by itself when
//! writes are possible again.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU};
use nodedock_tests::machine::{or_skip, remount, set_immutable};
use nodedock_tests::{Daemon, Options, Root};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const CODE: &str = "checkpoint-read-only";
const DISK_BYTES: u64 = 32 << 20;

fn asked(name: &str, device: &str) -> nodedock_proto::node::v1::PreparePodRequest {
    request(&pod(name), &[&gpu_claim(name, &[device])])
}

async fn health(daemon: &Daemon, service: &str) -> ServingStatus {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::new(daemon.channel()).check(request).await;
    answer
        .unwrap_or_else(|status| panic!("{service:?}: {status}"))
        .into_inner()
        .status()
}

/// The node API's health is published by a task of its own, which may be a moment behind the condition.
async fn until_health(daemon: &Daemon, wanted: ServingStatus) {
    let request = HealthCheckRequest {
        service: "nodedock.node.v1.Node".to_owned(),
    };
    let mut health = HealthClient::new(daemon.channel())
        .watch(request)
        .await
        .unwrap()
        .into_inner();
    let seen = async { while health.message().await.unwrap().unwrap().status() != wanted {} };
    let seen = tokio::time::timeout(nodedock_tests::DEADLINE, seen).await;
    assert!(seen.is_ok(), "the health never is {wanted:?}");
}

async fn healths(daemon: &Daemon) -> [ServingStatus; 2] {
    [
        health(daemon, "").await,
        health(daemon, "nodedock.node.v1.Node").await,
    ]
}

#[tokio::test]
async fn read_only_disk_refuses_new_claims() {
    let mut root = Root::new();
    let Some(()) = or_skip(
        "a disk that turns read-only",
        root.mounts.state_disk(DISK_BYTES),
    ) else {
        return;
    };
    let mut daemon = Daemon::start_on(root, Options::default()).await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    let known = daemon.prepared(asked("one", "gpus/gpu-0")).await;
    assert_eq!(healths(&daemon).await, [ServingStatus::Serving; 2]);

    // A file open for writing keeps its file system from being mounted read-only, except by the kernel after an error of the disk.
    let log = daemon.checkpoint().with_file_name("checkpoint.db-wal");
    let Some(()) = or_skip("a disk that turns read-only", set_immutable(&log, true)) else {
        return;
    };
    let problem = daemon
        .refused_as(asked("two", "gpus/gpu-1"), "unavailable", CODE)
        .await;
    assert!(
        problem
            .message
            .to_lowercase()
            .contains("operation not permitted"),
        "{problem:?}"
    );

    assert_eq!(
        daemon.prepared(asked("one", "gpus/gpu-0")).await,
        known,
        "it is prepared, and that is known"
    );
    assert_eq!(
        daemon.pod_devices(&pod("one")).await.unwrap().containers,
        known.containers
    );
    let kept = daemon.unprepare_pod(&pod("one")).await.claims.remove(0);
    assert_eq!(
        (kept.outcome.as_str(), kept.problem.unwrap().code.as_str()),
        ("refused", CODE)
    );
    assert_eq!(daemon.only_claim().await.state, "prepared");
    assert_eq!(daemon.cdi_files().len(), 1);

    let conditions = daemon.until_conditions(&[CODE]).await;
    assert_eq!(conditions[0].subject, daemon.checkpoint().to_str().unwrap());
    until_health(&daemon, ServingStatus::NotServing).await;
    assert_eq!(
        healths(&daemon).await,
        [ServingStatus::Serving, ServingStatus::NotServing]
    );
    daemon
        .cli(&["get", "node"])
        .await
        .done_with(&[CODE, "new work is refused"]);
    let warned = daemon.cli(&["get", "claims"]).await;
    assert_eq!(
        warned.stderr,
        "warning: the node has 1 problem: see nodedock get node\n"
    );

    set_immutable(&log, false).unwrap();
    daemon.until_conditions(&[]).await;
    until_health(&daemon, ServingStatus::Serving).await;
    assert_eq!(healths(&daemon).await, [ServingStatus::Serving; 2]);
    assert_eq!(daemon.cli(&["get", "claims"]).await.stderr, "");
    daemon.prepared(asked("two", "gpus/gpu-1")).await;
    assert_eq!(
        daemon.unprepare(&pod("one")).await,
        [("one".to_owned(), "unprepared".to_owned())]
    );
    daemon.crash().await;
    assert_eq!(daemon.only_claim().await.id.unwrap().name, "two");
}

#[tokio::test]
async fn start_on_read_only_disk_fails() {
    let mut root = Root::new();
    let Some(()) = or_skip(
        "a start on a read-only disk",
        root.mounts.state_disk(DISK_BYTES),
    ) else {
        return;
    };
    let daemon = Daemon::start_on(root, Options::default()).await;
    let root = daemon.into_root().await;
    remount(&root.state(), "ro").unwrap();
    let said = root
        .run_node_program(&["run"])
        .await
        .failed_with(1, &[root.checkpoint().to_str().unwrap()]);
    assert!(
        said.to_lowercase().contains("read-only file system"),
        "{said}"
    );
    remount(&root.state(), "rw").unwrap();
    Daemon::start_on(root, Options::default()).await;
}
