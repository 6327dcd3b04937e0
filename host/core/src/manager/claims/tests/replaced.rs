//! Pods that are deleted by force, claims that are replaced, and pods that share a claim in any order.

use std::time::Duration;

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, pod, uid};
use crate::manager::tests::scene::{ends, with_gpu, with_prepared};
use nodedock_model::{ClaimState, ObjectRef};

#[tokio::test(start_paused = true)]
async fn replacement_of_stuck_claim_is_refused() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    daemon.retire(&gpu);
    assert!(daemon.unprepare(&a).await[0].is_err());
    daemon
        .source
        .put(claim("one@uid-newer", &["gpu/0"], &[&pod("b")]));
    let refused = daemon.prepare(&pod("b"), &["one"]).await;
    let problem = refused.claims[0].end.as_ref().unwrap_err();
    assert_eq!(problem.code, "claim-replaced");
    assert!(
        problem.message.contains("uid-one is still unpreparing"),
        "{problem}"
    );
}

#[tokio::test]
async fn force_deleted_pod_is_unprepared() {
    for replaced in [true, false] {
        let ((home, daemon, a, gpu), b) = (with_prepared().await, pod("b"));
        daemon.stop().await;

        // The source of the next daemon never knew the claim.
        let daemon = home.start();
        daemon.serve(&gpu);
        if replaced {
            daemon.source.put(claim("one@uid-newer", &["gpu/1"], &[&b]));
        }
        assert_eq!(daemon.unprepare(&b).await, [], "it holds nothing");
        assert_eq!(daemon.state("uid-one"), Some(ClaimState::Prepared));
        assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
        let live = gpu.calls().unprepare.remove(0).remove(0);
        assert_eq!(
            (live.claim.id.uid.as_str(), live.memo.as_slice()),
            ("uid-one", b"call 1".as_slice())
        );
    }
}

/// A pod that is replaced under its name asks while the old one still leaves.
#[tokio::test]
async fn same_named_pod_stays_prepared() {
    let (_home, daemon, old, gpu) = with_gpu();
    let new = ObjectRef {
        uid: uid("uid-a-again"),
        ..old.clone()
    };
    daemon.source.put(claim("one", &["gpu/0"], &[&old, &new]));
    daemon.prepare(&old, &["one"]).await;
    let (joined, left) = tokio::join!(daemon.prepare(&new, &["one"]), daemon.unprepare(&old));
    assert_eq!(
        (ends(&joined), left),
        (vec!["prepared"], vec![Ok(ClaimEnd::Kept)])
    );
    assert_eq!(gpu.counts(), (1, 0));
    assert_eq!(daemon.unprepare(&new).await, [Ok(ClaimEnd::Unprepared)]);
}

#[tokio::test]
async fn sharing_pods_join_in_any_order() {
    const ORDERS: [[usize; 3]; 6] = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    let ((_home, daemon, _, gpu), pods) = (with_gpu(), ["a", "b", "c"].map(pod));
    daemon
        .source
        .put(claim("one", &["gpu/0"], &pods.each_ref()));
    for (round, order) in ORDERS.into_iter().enumerate() {
        let asked = order.map(|index| daemon.prepare(&pods[index], &["one"]));
        let answers = futures::future::join_all(asked).await;
        assert!(
            answers
                .iter()
                .all(|answer| answer.containers == answers[0].containers),
            "{answers:?}"
        );
        assert_eq!(gpu.counts(), (round + 1, round));
        let left = order.map(|index| daemon.unprepare(&pods[index]));
        let mut left: Vec<_> = futures::future::join_all(left)
            .await
            .into_iter()
            .flatten()
            .map(Result::unwrap)
            .collect();
        left.sort_by_key(|end| end.as_str());
        assert_eq!(left, [ClaimEnd::Kept, ClaimEnd::Kept, ClaimEnd::Unprepared]);
        assert_eq!(gpu.counts(), (round + 1, round + 1));
    }
    assert!(daemon.manager.records.claims().is_empty() && daemon.cdi_files().is_empty());
    assert!(daemon.tasks().drain(Duration::from_secs(1)).await);
}
