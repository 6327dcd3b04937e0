//! Claims that an operator releases by force.

use std::sync::Arc;

use crate::manager::claims::ReleaseRequest;
use crate::manager::claims::fixtures::{claim, transient, uid};
use crate::manager::tests::scene::{
    Daemon, FakeDriver, Home, release_request, with_gpu, with_prepared,
};
use crate::records::table::RELEASED_MAX;
use nodedock_model::{ClaimRecord, ClaimState, ObjectRef};

/// A daemon with the claim `one` of a driver that is gone, whose pod is gone too.
async fn with_stuck() -> (Home, Daemon, ObjectRef, Arc<FakeDriver>) {
    let (home, daemon, a, gpu) = with_prepared().await;
    daemon.retire(&gpu);
    assert!(daemon.unprepare(&a).await[0].is_err());
    (home, daemon, a, gpu)
}

#[tokio::test]
async fn release_calls_serving_driver_once_more() {
    let (_home, daemon, a, gpu) = with_gpu();
    for (refuses, untold) in [(true, 1), (false, 0)] {
        daemon.serve(&gpu);
        daemon.source.put(claim("one", &["gpu/0"], &[&a]));
        daemon.prepare(&a, &["one"]).await;
        gpu.refuse_unprepare(transient());
        assert!(daemon.unprepare(&a).await[0].is_err());
        if refuses {
            gpu.refuse_unprepare(transient());
        }
        let before = gpu.counts().1;
        assert_eq!(daemon.release("one").await.unwrap().untold.len(), untold);
        assert_eq!(gpu.counts().1, before + 1);
        assert!(daemon.manager.records.claims().is_empty());
    }
    assert_eq!(
        daemon.manager.records.released_claims().len(),
        1,
        "the same claim once"
    );
}

#[tokio::test]
async fn claim_in_use_is_not_released() {
    let (_home, daemon, _a, gpu) = with_prepared().await;
    let problem = daemon.release("one").await.unwrap_err();
    assert_eq!(problem.code, "claim-in-use");
    for part in ["default/a", "nodedock unprepare"] {
        assert!(problem.message.contains(part), "{problem}");
    }
    assert_eq!(
        daemon
            .manager
            .releases
            .preview(&release_request("one"))
            .await,
        Err(problem)
    );
    assert_eq!(
        (daemon.state("uid-one"), gpu.counts()),
        (Some(ClaimState::Prepared), (1, 0))
    );
    assert_eq!(
        daemon.release("two").await.unwrap_err().code,
        "no-such-claim"
    );
    let other = ReleaseRequest {
        uid: Some(uid("uid-other")),
        ..release_request("one")
    };
    assert_eq!(
        daemon
            .manager
            .releases
            .preview(&other)
            .await
            .unwrap_err()
            .code,
        "no-such-claim"
    );
}

/// Two can only have come of a lost checkpoint: the older was never unprepared.
#[tokio::test]
async fn uid_selects_between_same_named_claims() {
    let (_home, daemon, _, _) = with_stuck().await;
    let mut newer = ClaimRecord::clone(&daemon.manager.records.claims()[0]);
    newer.id.uid = uid("uid-newer");
    daemon
        .manager
        .records
        .commit_claims(vec![newer.into()])
        .await
        .unwrap();
    let problem = daemon.release("one").await.unwrap_err();
    assert_eq!(problem.code, "claim-ambiguous");
    for part in [
        "default/one",
        "uid-one (unpreparing)",
        "uid-newer (unpreparing)",
    ] {
        assert!(problem.message.contains(part), "{problem}");
    }
    assert_eq!(
        (
            daemon.manager.records.claims().len(),
            daemon.manager.records.released_claims().len()
        ),
        (2, 0)
    );
    for (wanted, left) in [("uid-one", Some(uid("uid-newer"))), ("uid-newer", None)] {
        let of = |uid| ReleaseRequest {
            uid: Some(uid),
            ..release_request("one")
        };
        let released = daemon
            .manager
            .releases
            .release(of(uid(wanted)), "test".into())
            .await
            .unwrap();
        assert_eq!(released.id.uid, uid(wanted));
        let known: Vec<_> = daemon
            .manager
            .records
            .claims()
            .iter()
            .map(|record| record.id.uid.clone())
            .collect();
        assert_eq!(known, left.into_iter().collect::<Vec<_>>());
        let again = daemon
            .manager
            .releases
            .release(of(uid(wanted)), "test".into())
            .await
            .unwrap_err();
        assert_eq!(again.code, "no-such-claim");
    }
    assert!(
        daemon.manager.pods.list().is_empty(),
        "it goes with the last of its claims"
    );
}

/// A claim whose release failed halfway was not retried: it blocked others until the next start.
#[tokio::test]
async fn failed_release_is_finished_later() {
    let (_home, daemon, _a, _gpu) = with_prepared().await;
    let record = daemon.manager.records.claims().remove(0);
    let orphan = ClaimRecord {
        pods: Default::default(),
        ..ClaimRecord::clone(&record)
    };
    daemon
        .manager
        .records
        .commit_claims(vec![orphan.into()])
        .await
        .unwrap();
    daemon.starts.unprepares();
    // It has looked, and found nothing to do.
    tokio::task::yield_now().await;
    let (cdi, aside) = (daemon.cdi.clone(), daemon.cdi.with_extension("aside"));
    std::fs::rename(&cdi, &aside).unwrap();
    std::fs::write(&cdi, "").unwrap();
    assert_eq!(
        daemon.release("one").await.unwrap_err().code,
        "cdi-not-removed"
    );
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
    std::fs::remove_file(&cdi).unwrap();
    std::fs::rename(&aside, &cdi).unwrap();
    daemon.gone("uid-one").await;
}

#[tokio::test]
async fn the_newest_released_claims_are_kept() {
    let (home, daemon, a, gpu) = with_gpu();
    let several = RELEASED_MAX + 3;
    for n in 0..several {
        let one = format!("one@uid-{n:04}");
        daemon.source.put(claim(&one, &["gpu/0"], &[&a]));
        daemon.prepare(&a, &["one"]).await;
        gpu.refuse_unprepare(transient());
        daemon.unprepare(&a).await;
        daemon.release("one").await.unwrap();
    }
    let uids = |daemon: &Daemon| {
        daemon
            .manager
            .records
            .released_claims()
            .iter()
            .map(|r| r.id.uid.clone())
            .collect::<Vec<_>>()
    };
    let kept = uids(&daemon);
    assert_eq!(kept.len(), RELEASED_MAX);
    assert!(
        kept.contains(&uid(&format!("uid-{:04}", several - 1))) && !kept.contains(&uid("uid-0000"))
    );
    daemon.stop().await;
    assert_eq!(uids(&home.start()).len(), RELEASED_MAX);
}
