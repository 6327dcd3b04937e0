//! A disk that does not answer: what needs no write is answered, what needs one waits, and nothing is lost.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU};
use nodedock_tests::machine::{Frozen, or_skip};
use nodedock_tests::{Daemon, Options, Root};

#[tokio::test]
async fn frozen_disk_delays_only_new_claims() {
    let mut root = Root::new();
    let Some(()) = or_skip(
        "a disk that does not answer",
        root.mounts.state_disk(32 << 20),
    ) else {
        return;
    };
    let mut daemon = Daemon::start_on(root, Options::default()).await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    let asked = |name: &str, device: &str| request(&pod(name), &[&gpu_claim(name, &[device])]);
    let known = daemon.prepared(asked("one", "gpus/gpu-0")).await;
    let Some(frozen) = or_skip(
        "a disk that does not answer",
        Frozen::freeze(&daemon.state()),
    ) else {
        return;
    };
    let (mut client, second) = (daemon.client(), asked("two", "gpus/gpu-1"));
    let waiting = tokio::spawn(async move { client.prepare_pod(second).await });

    let conditions = daemon.until_conditions(&["checkpoint-slow"]).await;
    assert_eq!(conditions[0].subject, daemon.checkpoint().to_str().unwrap());
    assert!(
        !waiting.is_finished(),
        "it is not answered before it is durable"
    );
    assert_eq!(
        daemon.prepared(asked("one", "gpus/gpu-0")).await,
        known,
        "it needs no write"
    );
    assert_eq!(
        daemon.pod_devices(&pod("one")).await.unwrap().containers,
        known.containers
    );
    assert_eq!(
        (
            daemon.drivers().await.len(),
            daemon.devices().await.is_empty()
        ),
        (1, false)
    );
    assert!(
        daemon
            .cli(&["get", "node"])
            .await
            .done()
            .contains("checkpoint-slow")
    );

    drop(frozen);
    let answer = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(answer.claims[0].outcome, "prepared", "{answer:?}");
    daemon.until_conditions(&[]).await;
    daemon.crash().await;
    let claims = daemon.claims().await;
    let mut known: Vec<_> = claims
        .iter()
        .map(|claim| {
            (
                claim.id.as_ref().unwrap().name.as_str(),
                claim.state.as_str(),
            )
        })
        .collect();
    known.sort_unstable();
    assert_eq!(known, [("one", "prepared"), ("two", "prepared")]);
}
