//! Requests and retries at the same time, and a checkpoint that takes nothing.

use crate::manager::claims::fixtures::{driver, transient, uid};
use crate::manager::tests::scene::{ends, with_claim, with_prepared};

/// A claim that was finished without a request took the record of its pod with it, also in the middle of a request of that pod,
/// whose containers were then answered without devices.
#[tokio::test]
async fn pod_record_outlives_running_request() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    gpu.refuse_unprepare(transient());
    assert!(daemon.unprepare(&a).await[0].is_err());
    daemon.serve(&gpu);
    let inner = &daemon.manager;
    let held = inner.records.lock_pods([a.uid.clone()]).await;
    let request = async {
        daemon.gone("uid-one").await;
        assert_eq!(daemon.manager.pods.count(), 1);
        drop(held);
    };
    tokio::join!(
        inner
            .unfinished
            .finish_unprepares([uid("uid-one")].into_iter()),
        request
    );
    assert!(daemon.manager.pods.list().is_empty() && daemon.manager.records.claims().is_empty());
}

#[tokio::test]
async fn unavailable_checkpoint_prevents_driver_calls() {
    let (_home, daemon, a, gpu) = with_claim();
    daemon.crash().await;
    let outcome = daemon.prepare(&a, &["one"]).await;
    assert_eq!(ends(&outcome), ["checkpoint-unavailable"]);
    assert!(
        outcome.claims[0]
            .end
            .as_ref()
            .unwrap_err()
            .retry_after_ms
            .is_some()
    );
    assert_eq!(gpu.counts(), (0, 0));
    assert!(daemon.is_empty());
    assert!(
        daemon
            .manager
            .records
            .users_of_device(&driver("gpu"), "pool", "0")
            .is_empty()
    );
}

#[tokio::test]
async fn sweep_keeps_file_of_preparing_claim() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    let file = daemon.cdi_files().remove(0);
    let bytes = std::fs::read(&file).unwrap();
    daemon.unprepare(&a).await;
    std::fs::write(file, bytes).unwrap();
    gpu.shut(true);
    let reconcile = async {
        gpu.called(|calls| calls.prepare.len() == 2).await;
        let done = daemon.sweep();
        gpu.shut(false);
        done.await;
    };
    let (outcome, ()) = tokio::join!(daemon.prepare(&a, &["one"]), reconcile);
    assert_eq!(ends(&outcome), ["prepared"]);
    assert_eq!(daemon.cdi_files().len(), 1);
}
