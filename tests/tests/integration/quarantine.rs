//! A driver that fails repeatedly is quarantined: the reports, the claims that stay prepared, and the end of the quarantine.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE};
use nodedock_tests::versions::{FILE, claim};
use nodedock_tests::{Daemon, Options, Root};
use scripted::{Command, POOL, Script};
use serde_json::json;

/// Small limits, so that a driver in an endless loop is stopped soon.
const GRANT: &str = "apiVersion: nodedock.dev/v1
kind: DriverGrant
env: [SCRIPTED_*]
sysfsWrite: [{glob: class/scripted/value, pattern: '[0-9]'}]
limits: {cpuMs: 50, memoryMiB: 16}
";
/// Number of failures after which a driver is quarantined.
const FAILURES: usize = 5;
const QUARANTINED: &str = "driver-quarantined";
/// Bad claims are from here on.
const BAD: usize = 10;

/// `command` is for the claims from `BAD` on. Unless it is `mended`, no look succeeds while the first claim is held, so that none ends a
/// quarantine.
fn script(command: Command, mended: bool) -> Script {
    let bad = (BAD..32)
        .map(|n| (format!("device-{n}"), command))
        .collect();
    let blinded_by = (!mended).then(|| "claim-device-0".to_owned());
    let generation = u32::from(mended);
    Script {
        generation,
        devices: 32,
        prepare: bad,
        blinded_by,
        ..Script::default()
    }
}

async fn with_driver(command: Command) -> Daemon {
    let root = Root::new();
    root.install_scripted(&script(command, false));
    root.drop_in("scripted.grant.yaml", GRANT);
    let daemon = Daemon::start_on(root, Options::default()).await;
    daemon.until_serving(FILE).await;
    daemon
}

/// A pod of its own with the claim for a device.
fn ask(n: usize) -> v1::PreparePodRequest {
    let name = format!("device-{n}");
    request(&pod(&name), &[&claim(&name)])
}

/// Prepares bad claims, from one on, until the driver is quarantined.
async fn into_quarantine(daemon: &Daemon, first: usize, codes: &[&str]) {
    for n in first..first + FAILURES {
        let problem = daemon.refused(ask(n)).await;
        assert!(codes.contains(&problem.code.as_str()), "{problem:?}");
    }
    daemon.until_state(FILE, "quarantined").await;
}

#[tokio::test]
async fn quarantine_keeps_claims_until_operator_resumes() {
    let daemon = with_driver(Command::Die).await;
    daemon.install(MOCK_GPU, Form::Core);
    let answer = daemon.prepared(ask(0)).await;
    daemon.prepared(ask(1)).await;
    into_quarantine(&daemon, BAD, &["driver-trapped"]).await;

    let problem = daemon.refused_as(ask(2), "unavailable", QUARANTINED).await;
    assert!(
        problem.retry_after_ms.is_some_and(|ms| ms > 0),
        "{problem:?}"
    );
    for part in [
        "since 2",
        "not before 2",
        "the driver trapped",
        "nodedock driver resume scripted.nodedock.dev",
    ] {
        assert!(problem.message.contains(part), "{part} in {problem:?}");
    }
    let conditions = daemon.until_conditions(&[QUARANTINED]).await;
    assert_eq!(conditions[0].subject, scripted::NAME);
    let shown = daemon.cli(&["get", "drivers", "-o", "json"]).await.json();
    let shown = shown
        .as_array()
        .unwrap()
        .iter()
        .find(|driver| driver["source"] == FILE)
        .unwrap();
    assert_eq!(shown["state"], json!("quarantined"), "{shown}");
    daemon
        .cli(&["explain", "driver", scripted::NAME])
        .await
        .done_with(&["is quarantined", "driver resume"]);

    assert_eq!(
        daemon.prepared(ask(0)).await,
        answer,
        "what is prepared needs no driver"
    );
    let left = daemon.unprepare_pod(&pod("device-1")).await;
    let problem = left.claims[0].problem.clone().unwrap();
    assert_eq!(
        (left.claims[0].outcome.as_str(), problem.code.as_str()),
        ("refused", QUARANTINED)
    );
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
        .prepared(request(&pod("gpu"), &[&gpu_claim("gpu", &["gpus/gpu-0"])]))
        .await;

    daemon
        .cli(&["driver", "resume", scripted::NAME])
        .await
        .done_with(&["(scripted.wasm) is over: it is serving"]);
    daemon.until_conditions(&[]).await;
    let is_gone = |claims: &[v1::ClaimStatus]| {
        claims
            .iter()
            .all(|claim| claim.id.as_ref().is_none_or(|id| id.name != "device-1"))
    };
    daemon
        .until_claims("the unprepare that waited is done", is_gone)
        .await;
    daemon.prepared(ask(2)).await;
}

#[tokio::test]
async fn quarantine_ends_when_polls_succeed() {
    let daemon = with_driver(Command::Spin).await;
    into_quarantine(&daemon, BAD, &["driver-cpu-limit"]).await;
    // Its poller tries it when the quarantine is over, and every poll succeeds.
    let back = daemon.until_serving(FILE).await;
    let states: Vec<_> = back
        .timeline
        .iter()
        .map(|entry| entry.what.as_str())
        .collect();
    assert!(states.ends_with(&["quarantined", "serving"]), "{states:?}");
    daemon.prepared(ask(1)).await;
}

#[tokio::test]
async fn new_config_ends_the_quarantine() {
    let daemon = with_driver(Command::Grow).await;
    daemon.prepared(ask(0)).await;
    into_quarantine(&daemon, BAD, &["driver-memory-limit"]).await;
    assert_eq!(
        daemon.unprepare_pod(&pod("device-0")).await.claims[0].outcome,
        "refused"
    );

    daemon.drop_in_script(&script(Command::Flood, true));
    daemon.until_device(POOL, "generation-1", true).await;
    daemon.until_conditions(&[]).await;
    assert_eq!(daemon.until_serving(FILE).await.reason, "");
    // The driver was asked once more, as it serves again.
    let held = |claims: &[v1::ClaimStatus]| claims.iter().any(|claim| claim.state == "unpreparing");
    daemon
        .until_claims("the first claim is gone", |claims| !held(claims))
        .await;
    daemon.prepared(ask(0)).await;
    into_quarantine(
        &daemon,
        BAD + FAILURES,
        &["driver-cpu-limit", "driver-trapped"],
    )
    .await;
}
