//! Drivers that cannot change the node: their prepares have no intent in the checkpoint.

use std::sync::Arc;
use std::time::Duration;

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, transient};
use crate::manager::tests::scene::{
    Daemon, FakeDriver, Home, Reply, ends, with_claim, with_two_drivers,
};
use nodedock_model::{ChangedKind, ClaimState, ObjectRef};

fn with_pure() -> (Home, Daemon, ObjectRef, Arc<FakeDriver>) {
    let (home, daemon, a, gpu) = with_claim();
    gpu.become_pure();
    (home, daemon, a, gpu)
}

async fn restarted(home: &Home, daemon: Daemon) -> Daemon {
    daemon.stop().await;
    home.start()
}

#[tokio::test]
async fn prepare_is_one_durable_commit() {
    let (home, daemon, a, _gpu) = with_pure();
    let before = daemon.commits();
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    assert_eq!(daemon.commits() - before, 1);
    let claims = daemon.manager.records.claims();
    let daemon = restarted(&home, daemon).await;
    assert_eq!(
        (daemon.manager.records.claims(), daemon.manager.pods.count()),
        (claims, 1)
    );
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Prepared));
}

#[tokio::test]
async fn second_pod_joins_in_one_commit() {
    let (_home, daemon, a, _gpu) = with_pure();
    let b = pod("b");
    daemon.source.put(claim("one", &["gpu/0"], &[&a, &b]));
    daemon.source.put(claim("two", &["gpu/1"], &[&b]));
    daemon.prepare(&a, &["one"]).await;
    let before = daemon.commits();
    assert_eq!(
        ends(&daemon.prepare(&b, &["one", "two"]).await),
        ["prepared", "prepared"]
    );
    assert_eq!(daemon.commits() - before, 1);
    assert!(
        daemon
            .manager
            .records
            .claims()
            .iter()
            .all(|claim| claim.pods.contains_key(&b.uid))
    );
}

#[tokio::test]
async fn one_impure_driver_requires_an_intent() {
    let (_home, daemon, a, gpu, _nic) = with_two_drivers();
    gpu.become_pure();
    let before = daemon.commits();
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["prepared"]);
    assert_eq!(daemon.commits() - before, 2);
}

#[tokio::test]
async fn crash_during_call_leaves_no_claim() {
    let (home, gpu, a, b) = (
        Home::new(),
        FakeDriver::new(driver("gpu")),
        pod("a"),
        pod("b"),
    );
    let daemon = home.start_with("boot-1", Duration::ZERO);
    gpu.become_pure();
    daemon.serve(&gpu);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    gpu.shut(true);
    let crash = async {
        gpu.called(|calls| calls.prepare.len() == 1).await;
        assert_eq!(ends(&daemon.prepare(&b, &["two"]).await), ["device-held"]);
        daemon.crash().await;
        gpu.shut(false);
    };
    let mut changes = daemon.changes.listen();
    let (outcome, ()) = tokio::join!(daemon.prepare(&a, &["one"]), crash);
    let states = std::iter::from_fn(|| changes.try_recv().ok())
        .filter(|changed| changed.kind == ChangedKind::Claim);
    assert_eq!(states.last().unwrap().state, "gone");
    assert_eq!(ends(&outcome), ["checkpoint-unavailable"]);
    assert!(daemon.is_empty() && daemon.manager.pods.list().is_empty());
    assert!(daemon.cdi_files().is_empty());

    let daemon = home.start();
    assert!(daemon.is_empty() && daemon.manager.pods.list().is_empty());
    daemon.serve(&gpu);
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    assert_eq!(ends(&daemon.prepare(&b, &["two"]).await), ["prepared"]);
}

#[tokio::test]
async fn only_temporary_refusals_are_recorded() {
    let (home, daemon, a, gpu) = with_pure();
    daemon.source.put(claim("two", &["gpu/1"], &[&a]));
    gpu.reply("uid-one", Reply::Refuse(permanent()));
    gpu.reply("uid-two", Reply::Refuse(transient()));
    let refused = ends(&daemon.prepare(&a, &["one", "two"]).await).join(" ");
    assert_eq!(refused, "bad-parameters device-busy");
    let daemon = restarted(&home, daemon).await;
    assert_eq!(
        (daemon.state("uid-one"), daemon.state("uid-two")),
        (None, Some(ClaimState::Preparing))
    );
}

#[tokio::test]
async fn unprepare_is_one_commit_with_pod() {
    let (home, daemon, a, gpu) = with_pure();
    daemon.prepare(&a, &["one"]).await;
    let before = daemon.commits();
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!((daemon.commits() - before, gpu.counts()), (1, (1, 1)));
    assert!(
        daemon.is_empty() && daemon.manager.pods.list().is_empty() && daemon.cdi_files().is_empty()
    );
    let daemon = restarted(&home, daemon).await;
    assert!(daemon.is_empty() && daemon.manager.pods.list().is_empty());
}

#[tokio::test]
async fn refused_unprepare_is_durable_and_retried() {
    let (home, daemon, a, gpu) = with_pure();
    daemon.prepare(&a, &["one"]).await;
    gpu.refuse_unprepare(transient());
    assert_eq!(
        daemon.unprepare(&a).await.remove(0).unwrap_err().code,
        "device-busy"
    );
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
    let daemon = restarted(&home, daemon).await;
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
    daemon.serve(&gpu);
    daemon.starts.unprepares();
    daemon.gone("uid-one").await;
}

#[tokio::test]
async fn crash_during_unprepare_keeps_the_claim() {
    let (home, daemon, a, gpu) = with_pure();
    daemon.prepare(&a, &["one"]).await;
    let (claims, files) = (daemon.manager.records.claims(), daemon.cdi_files());
    gpu.shut(true);
    let crash = async {
        gpu.called(|calls| calls.unprepare.len() == 1).await;
        daemon.crash().await;
        gpu.shut(false);
    };
    let (ends, ()) = tokio::join!(daemon.unprepare(&a), crash);
    assert_eq!(ends[0].as_ref().unwrap_err().code, "checkpoint-unavailable");
    // Its file was removed, and is there again.
    assert_eq!(
        (daemon.manager.records.claims(), daemon.cdi_files()),
        (claims.clone(), files.clone())
    );
    assert_eq!(daemon.manager.pods.count(), 1);

    let daemon = home.start();
    assert_eq!(
        (daemon.manager.records.claims(), daemon.cdi_files()),
        (claims, files)
    );
    daemon.serve(&gpu);
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert!(daemon.is_empty() && daemon.cdi_files().is_empty());
}

/// The code that prepared the claim may have to be called, with rights of its own.
#[tokio::test]
async fn other_version_unprepares_with_an_intent() {
    let (_home, daemon, a, gpu) = with_pure();
    daemon.prepare(&a, &["one"]).await;
    daemon.serve_version(&gpu, "another");
    let before = daemon.commits();
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!(daemon.commits() - before, 2);
}
