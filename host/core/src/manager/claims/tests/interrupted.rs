//! Crashes, reboots, absent drivers, callers that go away, and a checkpoint that takes nothing.

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, driver, transient, uid};
use crate::manager::tests::scene::{Reply, ends, with_claim, with_prepared};
use nodedock_model::ClaimState;

#[tokio::test]
async fn a_claim_of_a_driver_that_is_gone_is_kept_and_unprepared_when_it_serves_again() {
    let (home, daemon, a, gpu) = with_prepared().await;
    daemon.start_tasks();
    daemon.retire(&gpu);
    let problem = daemon.unprepare(&a).await.remove(0).unwrap_err();
    assert!(problem.message.contains("kept until its driver is back"), "{problem}");
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
    daemon.serve(&gpu);
    gpu.called(|calls| calls.unprepare.len() == 1).await;
    daemon.stop().await;
    let daemon = home.start();
    assert!(daemon.is_empty());
}

#[tokio::test]
async fn a_crash_during_a_call_leaves_an_intent_that_a_retry_or_an_unprepare_takes_up() {
    for retry in [true, false] {
        let (home, daemon, a, gpu) = with_claim();
        gpu.shut(true);
        let crash = async {
            gpu.called(|calls| calls.prepare.len() == 1).await;
            daemon.crash().await;
            gpu.shut(false);
        };
        let (lost, ()) = tokio::join!(daemon.prepare(&a, &["one"]), crash);
        assert_eq!(ends(&lost), ["checkpoint-unavailable"], "nothing is answered that is not durable");

        let daemon = home.start();
        daemon.serve(&gpu);
        assert_eq!(daemon.state("uid-one"), Some(ClaimState::Preparing));
        if retry {
            daemon.source.put(claim("one", &["gpu/0"], &[&a]));
            assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
            assert_eq!(gpu.counts(), (2, 0));
        }
        assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
        assert!(daemon.cdi_files().is_empty());
    }
}

#[tokio::test]
async fn an_unprepare_that_a_crash_interrupts_is_finished_at_the_next_start() {
    let (home, daemon, a, gpu) = with_prepared().await;
    gpu.shut(true);
    let crash = async {
        gpu.called(|calls| calls.unprepare.len() == 1).await;
        daemon.crash().await;
        gpu.shut(false);
    };
    let (lost, ()) = tokio::join!(daemon.unprepare(&a), crash);
    assert_eq!(lost[0].as_ref().unwrap_err().code, "checkpoint-unavailable");
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing), "the device is not free yet");

    let daemon = home.start();
    daemon.serve(&gpu);
    daemon.start_tasks();
    gpu.called(|calls| calls.unprepare.len() == 2).await;
    daemon.stop().await;
    let daemon = home.start();
    assert!(daemon.is_empty());
}

/// A claim that was finished without a request took the record of its pod with it, also in the middle of a request of that pod,
/// whose containers were then answered without devices.
#[tokio::test]
async fn a_pod_with_a_request_under_way_keeps_its_record_until_that_ends() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    gpu.reply_unprepare(Reply::Refuse(transient()));
    assert!(daemon.unprepare(&a).await[0].is_err());
    daemon.serve(&gpu);
    let inner = &daemon.manager;
    let held = inner.pod_locks.take([a.uid.clone()]).await;
    let request = async {
        daemon.gone("uid-one").await;
        assert_eq!(daemon.manager.pods_count(), 1);
        drop(held);
    };
    tokio::join!(inner.finish_unprepares([uid("uid-one")].into_iter()), request);
    assert!(daemon.manager.pods().is_empty() && daemon.manager.claims().is_empty());
}

#[tokio::test]
async fn no_driver_is_called_while_the_checkpoint_accepts_nothing() {
    let (_home, daemon, a, gpu) = with_claim();
    daemon.crash().await;
    let outcome = daemon.prepare(&a, &["one"]).await;
    assert_eq!(ends(&outcome), ["checkpoint-unavailable"]);
    assert!(outcome.claims[0].end.as_ref().unwrap_err().retry_after_ms.is_some());
    assert_eq!(gpu.counts(), (0, 0));
    assert!(daemon.is_empty());
    assert!(daemon.manager.users_of_device(&driver("gpu"), "pool", "0").is_empty());
}

#[tokio::test]
async fn a_file_of_a_claim_that_is_just_being_prepared_is_no_orphan() {
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
