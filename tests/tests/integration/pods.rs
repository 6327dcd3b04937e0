//! A pod as a whole: the start of its containers, and extended resources as agents and operators ask for them.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options};
use serde_json::json;
use tonic::Code;

use crate::with_gpus;

/// A resource that no driver of the node has.
const NOWHERE: &str = "nowhere.example.com/gpu";

fn start(pod: &v1::ObjectRef, container: &str) -> v1::StartContainerRequest {
    v1::StartContainerRequest {
        pod: Some(pod.clone()),
        container: container.to_owned(),
    }
}

#[tokio::test]
async fn each_container_start_gets_pod_answer() {
    let (mut daemon, one) = (with_gpus().await, pod("one"));
    let might = async |daemon: &Daemon| {
        let request = v1::PodMightNeedUnprepareRequest {
            pod_uid: "pod-one".to_owned(),
        };
        daemon
            .client()
            .pod_might_need_unprepare(request)
            .await
            .expect("an answer")
            .into_inner()
            .might
    };
    let answer = daemon
        .prepared(request(&one, &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    for _ in 0..2 {
        let started = daemon
            .client()
            .start_container(start(&one, "main"))
            .await
            .expect("it may start");
        assert_eq!(started.into_inner(), answer.containers[0]);
        daemon.crash().await;
    }
    for (pod, container, code) in [
        (&one, "other", Code::NotFound),
        (&pod("two"), "main", Code::NotFound),
        (&one, "", Code::InvalidArgument),
    ] {
        let refused = daemon
            .client()
            .start_container(start(pod, container))
            .await
            .expect_err("it may not");
        assert_eq!(refused.code(), code, "{refused:?}");
    }
    daemon.until_serving(MOCK_GPU_FILE).await;
    assert!(might(&daemon).await);
    daemon.unprepare(&one).await;
    assert!(!might(&daemon).await);
    let refused = daemon
        .client()
        .start_container(start(&one, "main"))
        .await
        .expect_err("it holds nothing");
    assert!(
        refused.code() == Code::NotFound && refused.message().contains("pod-one"),
        "{refused:?}"
    );
}

#[tokio::test]
async fn node_without_extended_resources_says_so() {
    let daemon = with_gpus().await;
    assert_eq!(
        daemon.cli(&["get", "resources"]).await.done(),
        "no extended resources\n"
    );
    assert_eq!(
        daemon.cli(&["get", "resources", "-o", "json"]).await.json(),
        json!([])
    );
    daemon
        .cli(&["get", "resource", NOWHERE])
        .await
        .failed_with(1, &[NOWHERE]);
    let capacity = daemon
        .client()
        .get_capacity(v1::GetCapacityRequest {})
        .await
        .expect("an answer");
    assert_eq!(capacity.into_inner(), v1::GetCapacityResponse::default());
    let cover = v1::CoverAllocatedRequest {
        pod_uid: "uid-p".to_owned(),
        allocatable: [("cpu".to_owned(), 4), (NOWHERE.to_owned(), 0)].into(),
    };
    let covered = daemon
        .client()
        .cover_allocated(cover.clone())
        .await
        .expect("an answer")
        .into_inner();
    assert_eq!(
        covered.allocatable, cover.allocatable,
        "a pod that has nothing raises nothing"
    );
    let hints = v1::GetTopologyHintsRequest {
        pod: Some(pod("one")),
        containers: request(&pod("one"), &[]).containers,
        scope: "node".to_owned(),
    };
    let refused = daemon
        .client()
        .get_topology_hints(hints)
        .await
        .expect_err("there is no such scope");
    assert!(
        refused.code() == Code::InvalidArgument && refused.message().contains("scope"),
        "{refused:?}"
    );
}

#[tokio::test]
async fn command_line_announces_container_starts() {
    let daemon = Daemon::with_gpus(Options::default().env("NODEDOCK_LOG", "debug")).await;
    let device = format!("{MOCK_GPU_NAME}/gpus/gpu-0");
    assert!(!daemon.log().contains("StartContainer"));
    daemon
        .cli(&["prepare", "--pod", "demo", "--device", &device])
        .await
        .done();
    assert_eq!(daemon.log().matches("StartContainer").count(), 1);
    // Nothing is started of a pod that is refused.
    let other = [
        "prepare",
        "--pod",
        "other",
        "--device",
        &format!("{MOCK_GPU_NAME}/gpus/none"),
    ];
    daemon.cli(&other).await.failed(1);
    assert_eq!(daemon.log().matches("StartContainer").count(), 1);
}
