//! A claim that a new version of a driver does not unprepare is unprepared by the version that prepared it, as long as that is stored.

use nodedock_tests::Daemon;
use nodedock_tests::compose::{pod, request};
use nodedock_tests::versions::{FILE, claim, script, with_unprepare};
use scripted::Command;

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
    assert_eq!(
        daemon.unprepare(&pod(name)).await,
        [(name.to_owned(), "unprepared".to_owned())]
    );
}

#[tokio::test]
async fn refusal_or_trap_uses_previous_version() {
    let (daemon, old) = with_claim("device-0").await;
    prepare(&daemon, "device-1").await;
    let refuses = with_unprepare(script(2), &["device-0"], Command::RefusePermanent);
    let new = daemon
        .swap("v2", &with_unprepare(refuses, &["device-1"], Command::Die))
        .await;
    daemon.until_kept(&[&old, &new]).await;
    unprepared(&daemon, "device-0").await;
    unprepared(&daemon, "device-1").await;
    let log = daemon.log();
    let unprepared = log
        .lines()
        .filter(|line| line.contains(UNPREPARED) && line.contains(&old));
    assert_eq!(unprepared.count(), 2, "{log}");
    daemon.until_kept(&[&new]).await;
}

#[tokio::test]
async fn damaged_previous_version_is_reported() {
    let (daemon, old) = with_claim("device-0").await;
    let code = daemon
        .kept_drivers()
        .join(format!("{}.wasm", old.trim_start_matches("sha256:")));
    let refuses = with_unprepare(script(2), &["device-0"], Command::RefusePermanent);
    daemon.swap("v2", &refuses).await;
    std::fs::write(&code, "not what it was").unwrap();
    let kept = daemon
        .unprepare_pod(&pod("device-0"))
        .await
        .claims
        .remove(0);
    let problem = kept.problem.expect("it is refused");
    assert_eq!(
        problem.code, "driver-refused",
        "the serving version's word comes first"
    );
    let said = |problem: &nodedock_proto::node::v1::Problem, code: &str| {
        assert_eq!(
            problem.details.get("predecessor-code").map(String::as_str),
            Some(code),
            "{problem:?}"
        );
        assert!(problem.details["predecessor"].contains(&old), "{problem:?}");
    };
    said(&problem, "predecessor-damaged");
    daemon
        .cli(&["explain", "claim", "device-0"])
        .await
        .done_with(&["is damaged"]);

    std::fs::remove_file(&code).unwrap();
    daemon
        .swap(
            "v3",
            &with_unprepare(script(3), &["device-0"], Command::RefusePermanent),
        )
        .await;
    let code = |claims: &[nodedock_proto::node::v1::ClaimStatus]| {
        let problem = claims.first().and_then(|claim| claim.problem.clone());
        problem.is_some_and(|problem| {
            problem
                .details
                .get("predecessor-code")
                .is_some_and(|code| code == "predecessor-missing")
        })
    };
    daemon
        .until_claims("the missing code is reported", code)
        .await;
    daemon.swap("v4", &script(4)).await;
    daemon
        .until_claims("it is unprepared", <[_]>::is_empty)
        .await;
}

#[tokio::test]
async fn unneeded_previous_versions_are_removed() {
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
