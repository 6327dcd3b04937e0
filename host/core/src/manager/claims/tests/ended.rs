//! Claims that ended: their history stays for a day, over a restart.

use crate::manager::claims::fixtures::{driver, permanent};
use crate::manager::tests::scene::{Daemon, Reply, ends, with_claim, with_prepared};

/// Names of the ended claims.
fn listed(daemon: &Daemon) -> Vec<String> {
    let ended = daemon.manager.records.ended_claims().into_iter();
    ended.map(|claim| claim.id.name.to_string()).collect()
}

#[tokio::test]
async fn ended_claim_keeps_its_history() {
    for is_pure in [false, true] {
        let (home, daemon, a, gpu) = with_claim();
        if is_pure {
            gpu.become_pure();
        }
        daemon.prepare(&a, &["one"]).await;
        assert!(listed(&daemon).is_empty(), "it is in use");
        let before = daemon.commits();
        daemon.unprepare(&a).await;
        let commits = if is_pure { 1 } else { 2 };
        assert_eq!(daemon.commits() - before, commits, "and none of its own");
        let ended = daemon.manager.records.ended_claims();
        daemon.stop().await;

        let daemon = home.start();
        assert_eq!(daemon.manager.records.ended_claims(), ended);
        let claim = &ended[0];
        assert!(claim.at_ms > 0 && claim.pods.contains_key(&a.uid));
        assert_eq!(claim.devices[&driver("gpu")], ["pool/0"]);
        let history: Vec<_> = claim.timeline.iter().map(|it| it.what.as_str()).collect();
        let expected = [
            "preparing",
            "prepared by driver",
            "prepared",
            "unpreparing",
            "given up by driver",
            "unprepared",
        ];
        assert_eq!(history, expected);
    }
}

#[tokio::test]
async fn repeated_claim_is_listed_once() {
    let (_home, daemon, a, _gpu) = with_prepared().await;
    daemon.unprepare(&a).await;
    assert_eq!(listed(&daemon), ["one"]);
    daemon.prepare(&a, &["one"]).await;
    assert!(listed(&daemon).is_empty(), "it is here again");
    daemon.unprepare(&a).await;
    assert_eq!(listed(&daemon), ["one"]);
}

#[tokio::test]
async fn refused_claim_has_not_ended() {
    let (_home, daemon, a, gpu) = with_claim();
    gpu.reply("uid-one", Reply::Refuse(permanent()));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["bad-parameters"]
    );
    assert!(daemon.is_empty() && listed(&daemon).is_empty());
}

#[tokio::test]
async fn failed_unprepare_ends_no_claim() {
    let (home, daemon, a, _gpu) = with_prepared().await;
    daemon.crash().await;
    assert!(daemon.unprepare(&a).await[0].is_err());
    assert!(listed(&daemon).is_empty());
    drop(daemon);
    assert!(listed(&home.start()).is_empty());
}
