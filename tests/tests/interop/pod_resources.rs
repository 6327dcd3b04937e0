//! The pod-resources API, called by a client in Go on Kubernetes' own types that uses the socket's path as its authority.

use std::path::{Path, PathBuf};

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{DEADLINE, Daemon, Options};
use serde_json::{Value, json};

use crate::{lines, programs};

/// The client's program, or nothing and a line that says what is left out.
fn program() -> Option<PathBuf> {
    or_skip(
        "pod resources asked by a program in Go",
        programs::go("pod-resources"),
    )
}

/// Returns the answer that the client received.
pub(crate) async fn ask(daemon: &Daemon, program: &Path, command: &str, args: &[&str]) -> Value {
    let socket = daemon.pod_resources();
    let args = [&[command, socket.to_str().expect("UTF-8")], args].concat();
    let lines = lines(program, &args).await;
    let [line] = lines.as_slice() else {
        panic!("one line: {lines:?}")
    };
    serde_json::from_str(line).expect("JSON")
}

/// `pair` with two GPUs, in both containers of the pod `one`.
async fn with_a_pod() -> Daemon {
    let daemon = Daemon::with_gpus(Options::default()).await;
    let mut request = request(
        &pod("one"),
        &[&gpu_claim("pair", &["gpus/gpu-0", "gpus/gpu-1"])],
    );
    let mut others = ["init", "sidecar"].map(|kind| {
        let mut container = request.containers[0].clone();
        (container.name, container.kind) = (kind.to_owned(), kind.to_owned());
        container
    });
    others[0].claims.clear();
    request.containers.splice(0..0, others);
    daemon.prepared(request).await;
    daemon
}

/// The pod `one` as it has to be reported.
fn pod_one(node: &str) -> Value {
    let device = |name: &str| {
        json!({
            "cdi_devices": [{"name": format!("{MOCK_GPU_NAME}/claim=claim-pair-{name}")}],
            "driver_name": MOCK_GPU_NAME, "pool_name": format!("{node}/gpus"), "device_name": name,
        })
    };
    let claim = json!({
        "claim_name": "pair", "claim_namespace": "default",
        "claim_resources": [device("gpu-0"), device("gpu-1")],
    });
    let container = |name: &str| json!({"name": name, "dynamic_resources": [claim]});
    json!({"name": "one", "namespace": "default", "containers": [container("sidecar"), container("main")]})
}

#[tokio::test]
async fn go_agent_sees_claims_after_crash() {
    let Some(program) = program() else { return };
    let mut daemon = with_a_pod().await;
    let node = daemon.node().await.name;
    for _ in 0..2 {
        assert_eq!(
            ask(&daemon, &program, "list", &[]).await,
            json!({"pod_resources": [pod_one(&node)]})
        );
        let one = ask(&daemon, &program, "get", &["default", "one"]).await;
        assert_eq!(one, json!({"pod_resources": pod_one(&node)}));
        // The old version knows no claims.
        let old = json!({"name": "one", "namespace": "default", "containers": [{"name": "main"}]});
        assert_eq!(
            ask(&daemon, &program, "old-list", &[]).await,
            json!({"pod_resources": [old]})
        );
        daemon.crash().await;
    }
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.unprepare(&pod("one")).await;
    assert_eq!(ask(&daemon, &program, "list", &[]).await, json!({}));
}

#[tokio::test]
async fn go_agent_gets_not_found_answers() {
    let Some(program) = program() else { return };
    let daemon = with_a_pod().await;
    for (namespace, name) in [("default", "two"), ("other", "one")] {
        let answer = ask(&daemon, &program, "get", &[namespace, name]).await;
        let words = format!("pod {name} in namespace {namespace} not found");
        assert_eq!(answer, json!({"code": "NotFound", "error": words}));
    }
    // Devices of claims are no extended resources.
    assert_eq!(ask(&daemon, &program, "allocatable", &[]).await, json!({}));
}

#[tokio::test]
async fn go_agent_is_throttled_and_recovers() {
    let Some(program) = program() else { return };
    let daemon = with_a_pod().await;
    let answer = ask(&daemon, &program, "flood", &[]).await;
    let answered = answer["answered"].as_u64().expect("a count");
    let refused = answer["refused"].as_object().expect("an object");
    let words: Vec<_> = refused.keys().map(String::as_str).collect();
    assert_eq!(
        words,
        ["ResourceExhausted: rejected by rate limit"],
        "{answer}"
    );
    assert!(answered >= 10, "a burst is answered: {answer}");
    let later = async {
        loop {
            let answer = ask(&daemon, &program, "list", &[]).await;
            if answer["code"] != "ResourceExhausted" {
                break answer;
            }
        }
    };
    let answer = tokio::time::timeout(DEADLINE, later)
        .await
        .expect("a call is answered after a while");
    assert_eq!(
        answer,
        json!({"pod_resources": [pod_one(&daemon.node().await.name)]})
    );
}
