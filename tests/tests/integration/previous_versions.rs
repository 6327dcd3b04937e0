//! A claim that a new version of a driver does not unprepare is unprepared by the version that prepared it, as long as that is stored.

use nodedock_tests::Daemon;
use nodedock_tests::compose::{pod, request};
use nodedock_tests::versions::{FILE, claim, script, with_unprepare};

/// Failures after which a driver is left alone.
const FAILURES: usize = 5;
const UNPREPARED: &str = "claim unprepared by the version that prepared it";

/// A daemon on which version `v1` has prepared a claim for a pod of the same name.
async fn with_claim(name: &str) -> (Daemon, String) {
    let daemon = Daemon::start().await;
    daemon.drop_in_script(&script(1));
    let digest = daemon.swap("v1", &script(1)).await;
    prepare(&daemon, name).await;
    (daemon, digest)
}

async fn prepare(daemon: &Daemon, name: &str) {
    daemon.prepared(request(&pod(name), &[&claim(name)])).await;
}

async fn unprepared(daemon: &Daemon, name: &str) {
    assert_eq!(daemon.unprepare(&pod(name)).await, [(name.to_owned(), "unprepared".to_owned())]);
}

#[tokio::test]
async fn a_refusal_and_a_trap_lead_to_the_version_that_prepared_the_claim() {
    let (daemon, old) = with_claim("device-0").await;
    prepare(&daemon, "device-1").await;
    let refuses = with_unprepare(script(2), &["device-0"], "refuse-permanent");
    let new = daemon.swap("v2", &with_unprepare(refuses, &["device-1"], "die")).await;
    daemon.until_kept(&[&old, &new]).await;
    unprepared(&daemon, "device-0").await;
    unprepared(&daemon, "device-1").await;
    let log = daemon.log();
    let unprepared = log.lines().filter(|line| line.contains(UNPREPARED) && line.contains(&old));
    assert_eq!(unprepared.count(), 2, "{log}");
    daemon.until_kept(&[&new]).await;
}

#[tokio::test]
async fn a_version_that_traps_in_every_unprepare_keeps_no_claim_by_its_quarantine() {
    let (daemon, old) = with_claim("device-0").await;
    let names: Vec<_> = (0..FAILURES + 2).map(|n| format!("device-{n}")).collect();
    for name in &names[1..] {
        prepare(&daemon, name).await;
    }
    let claims: Vec<_> = names.iter().map(String::as_str).collect();
    let mut traps = with_unprepare(script(2), &claims, "die");
    // No look ends the quarantine.
    traps["blinded_by"] = "claim-device-20".into();
    daemon.swap("v2", &traps).await;
    prepare(&daemon, "device-20").await;
    for name in &names[..FAILURES] {
        unprepared(&daemon, name).await;
    }
    daemon.until_state(FILE, "quarantined").await;
    for name in &names[FAILURES..] {
        let held = daemon.unprepare_pod(&pod(name)).await.claims.remove(0);
        let problem = held.problem.expect("the previous version was not called yet");
        assert_eq!((held.outcome.as_str(), problem.code.as_str()), ("refused", "driver-quarantined"));
        assert!(!problem.details.contains_key("predecessor"), "{problem:?}");
    }
    daemon.until_claims("the previous version was called", |claims| claims.len() == 1).await;
    let log = daemon.log();
    let unprepared = log.lines().filter(|line| line.contains(UNPREPARED) && line.contains(&old));
    assert_eq!(unprepared.count(), names.len(), "{log}");
}

#[tokio::test]
async fn every_generation_is_asked_for_its_own_also_after_a_crash() {
    let (mut daemon, first) = with_claim("device-0").await;
    let second = daemon.swap("v2", &script(2)).await;
    prepare(&daemon, "device-1").await;
    let refuses = with_unprepare(script(3), &["device-0", "device-1"], "refuse-permanent");
    let third = daemon.swap("v3", &refuses).await;
    daemon.crash().await;
    daemon.until_serving(FILE).await;
    assert_eq!(daemon.kept().len(), 3);
    unprepared(&daemon, "device-0").await;
    daemon.until_kept(&[&second, &third]).await;
    unprepared(&daemon, "device-1").await;
    daemon.until_kept(&[&third]).await;
    let log = daemon.log();
    for digest in [&first, &second] {
        assert!(log.lines().any(|line| line.contains(UNPREPARED) && line.contains(digest)), "{log}");
    }
}

#[tokio::test]
async fn code_that_is_damaged_or_gone_is_reported_and_the_claim_waits_for_a_version_that_unprepares_it() {
    let (daemon, old) = with_claim("device-0").await;
    let code = daemon.kept_drivers().join(format!("{}.wasm", old.trim_start_matches("sha256:")));
    let refuses = with_unprepare(script(2), &["device-0"], "refuse-permanent");
    daemon.swap("v2", &refuses).await;
    std::fs::write(&code, "not what it was").unwrap();
    let kept = daemon.unprepare_pod(&pod("device-0")).await.claims.remove(0);
    let problem = kept.problem.expect("it is refused");
    assert_eq!(problem.code, "driver-refused", "the serving version's word comes first");
    let said = |problem: &nodedock_proto::node::v1::Problem, code: &str| {
        assert_eq!(problem.details.get("predecessor-code").map(String::as_str), Some(code), "{problem:?}");
        assert!(problem.details["predecessor"].contains(&old), "{problem:?}");
    };
    said(&problem, "predecessor-damaged");
    let explained = daemon.cli(&["explain", "claim", "device-0"]).await.done();
    assert!(explained.contains("is damaged"), "{explained}");

    std::fs::remove_file(&code).unwrap();
    daemon.swap("v3", &with_unprepare(script(3), &["device-0"], "refuse-permanent")).await;
    let code = |claims: &[nodedock_proto::node::v1::ClaimStatus]| {
        let problem = claims.first().and_then(|claim| claim.problem.clone());
        problem.is_some_and(|problem| {
            problem.details.get("predecessor-code").is_some_and(|code| code == "predecessor-missing")
        })
    };
    daemon.until_claims("the missing code is reported", code).await;
    daemon.swap("v4", &script(4)).await;
    daemon.until_claims("it is unprepared", <[_]>::is_empty).await;
}

#[tokio::test]
async fn a_claim_that_no_version_can_unprepare_is_released_by_an_operator() {
    let (daemon, old) = with_claim("device-0").await;
    let new = daemon.swap("v2", &with_unprepare(script(2), &["device-0"], "refuse-permanent")).await;
    std::fs::remove_file(daemon.kept_drivers().join(format!("{}.wasm", &old["sha256:".len()..]))).unwrap();
    assert_eq!(daemon.unprepare(&pod("device-0")).await[0].1, "refused");
    daemon.cli(&["release", "claim", "device-0", "--yes"]).await.done();
    assert_eq!(daemon.claims().await, []);
    daemon.until_kept(&[&new]).await;
}

#[tokio::test]
async fn a_driver_that_was_taken_out_is_not_asked_though_its_code_is_kept() {
    let (mut daemon, old) = with_claim("device-0").await;
    daemon.take_out(FILE);
    daemon.until_gone(FILE).await;
    for _ in 0..2 {
        assert_eq!(daemon.unprepare(&pod("device-0")).await[0].1, "refused");
        daemon.until_kept(&[&old]).await;
        daemon.restart().await;
    }
    daemon.swap("v1", &script(1)).await;
    daemon.until_claims("it is unprepared", <[_]>::is_empty).await;
}

#[tokio::test]
async fn what_no_claim_needs_is_cleared_away_at_the_start() {
    let (mut daemon, old) = with_claim("device-0").await;
    daemon.kill9().await;
    let stray = format!("{:064x}", 7);
    for end in ["wasm", "json"] {
        std::fs::write(daemon.kept_drivers().join(format!("{stray}.{end}")), "{}").unwrap();
    }
    daemon.run().await;
    daemon.until_kept(&[&old]).await;
    daemon.until_serving(FILE).await;
    unprepared(&daemon, "device-0").await;
}
