//! Sharing and exclusion of devices between claims.

use nodedock_tests::compose::{gpu_claim, pod, request, with_parameters};
use nodedock_tests::{Daemon, Options, own_pool};

const SHORT_WAIT: &str = "claims: {exclusiveWaitMs: 200}\n";
const TIME_SLICING: &str = r#"{"sharing": {"strategy": "TimeSlicing"}}"#;
const EXCLUSIVE: &str = r#"{"sharing": {"strategy": "Exclusive"}}"#;

#[tokio::test]
async fn shared_device_serves_agreeing_claims() {
    let daemon = Daemon::with_gpus(Options::default().config(SHORT_WAIT)).await;
    for name in ["a", "b", "c"] {
        let claim = with_parameters(gpu_claim(name, &["shared/gpu-4"]), TIME_SLICING);
        daemon.prepared(request(&pod(name), &[&claim])).await;
    }
    let shared = daemon
        .devices()
        .await
        .into_iter()
        .find(|device| device.name == "gpu-4")
        .unwrap();
    assert_eq!(shared.claims.len(), 3);

    let alone = with_parameters(gpu_claim("alone", &["shared/gpu-4"]), EXCLUSIVE);
    daemon
        .refused_as(
            request(&pod("alone"), &[&alone]),
            "conflict",
            "sharing-mismatch",
        )
        .await;
    for name in ["a", "b", "c"] {
        daemon.unprepare(&pod(name)).await;
    }
    daemon.prepared(request(&pod("alone"), &[&alone])).await;
}

#[tokio::test]
async fn whole_device_excludes_its_parts() {
    let daemon = Daemon::with_gpus(Options::default().config(SHORT_WAIT)).await;
    let devices = daemon.devices().await;
    let parts: Vec<_> = devices
        .iter()
        .filter(|d| own_pool(&d.pool) == "split" && d.name != "gpu-6")
        .collect();
    let [first, second, ..] = parts.as_slice() else {
        panic!("{devices:?}")
    };
    let (first, second) = (
        format!("split/{}", first.name),
        format!("split/{}", second.name),
    );
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("one", &[&first])]))
        .await;
    daemon
        .prepared(request(&pod("two"), &[&gpu_claim("two", &[&second])]))
        .await;
    let problem = daemon
        .refused(request(
            &pod("whole"),
            &[&gpu_claim("whole", &["split/gpu-6"])],
        ))
        .await;
    assert_eq!(problem.code, "counter-exceeded", "{problem:?}");
    for part in [
        "split#gpu-6/memory",
        "default/one",
        "default/two",
        "of 80Gi",
    ] {
        assert!(problem.message.contains(part), "{part}: {problem:?}");
    }
}
