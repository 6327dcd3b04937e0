//! The life of a driver file: what it needs before it serves, how it is replaced, what stays when it is gone.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, side_file, wasm};
use nodedock_tests::{Daemon, Options, Root};

use crate::with_gpus;

#[tokio::test]
async fn early_request_waits_for_its_driver() {
    // Compiles the driver, unless another test has: a request does not wait long enough for that on a busy machine.
    drop(with_gpus().await);
    let root = Root::new();
    root.install_gpus("pools:\n- {name: gpus, count: 1}\n");
    let daemon = Daemon::start_on(root, Options::default()).await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
}

#[tokio::test]
async fn driver_without_grant_is_blocked() {
    let daemon = Daemon::start().await;
    daemon.copy_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    let blocked = daemon.until_state(MOCK_GPU_FILE, "blocked").await;
    assert_eq!(blocked.name, MOCK_GPU_NAME);
    assert!(blocked.reason.contains("MOCK_GPU_*"), "{blocked:?}");
    assert!(
        blocked
            .missing_grants
            .iter()
            .any(|missing| missing.contains("MOCK_GPU_*")),
        "{blocked:?}"
    );
    let problem = daemon
        .refused_as(
            request(&pod("early"), &[&gpu_claim("early", &["gpus/gpu-0"])]),
            "unavailable",
            "driver-not-serving",
        )
        .await;
    assert!(problem.message.contains("blocked"), "{problem:?}");

    daemon.copy_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    let served = daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(
        (served.reason.as_str(), served.missing_grants.len()),
        ("", 0)
    );

    let (pod, another) = (pod("one"), pod("two"));
    daemon
        .prepared(request(&pod, &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    daemon.take_out("mock-gpu.grant.yaml");
    let stopped = daemon.until_state(MOCK_GPU_FILE, "blocked").await;
    assert!(
        stopped
            .missing_grants
            .iter()
            .any(|missing| missing.contains("MOCK_GPU_*")),
        "{stopped:?}"
    );
    daemon.until_device("gpus", "gpu-0", false).await;
    let problem = daemon
        .refused(request(&another, &[&gpu_claim("b", &["gpus/gpu-1"])]))
        .await;
    assert_eq!(problem.code, "driver-not-serving", "{problem:?}");
    let kept = daemon.unprepare_pod(&pod).await.claims.remove(0);
    assert_eq!(
        kept.outcome, "refused",
        "what was taken back cannot be used to give a claim up either"
    );

    daemon.copy_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
        .until_claims("the open unprepare is finished", <[_]>::is_empty)
        .await;
}

#[tokio::test]
async fn withdrawn_grant_applies_despite_bad_files() {
    let daemon = with_gpus().await;
    daemon.drop_in(MOCK_GPU_FILE, "hello, I am a text");
    let kept = daemon
        .until_driver(MOCK_GPU_FILE, |driver| !driver.reason.is_empty())
        .await;
    assert_eq!(kept.state, "serving", "{kept:?}");
    // A grant that cannot be read takes nothing back.
    daemon.drop_in("mock-gpu.grant.yaml", "env: [\"");
    let kept = daemon
        .until_driver(MOCK_GPU_FILE, |driver| {
            driver.reason.contains("mock-gpu.grant.yaml")
        })
        .await;
    assert_eq!(kept.state, "serving", "{kept:?}");
    daemon.drop_in(
        "mock-gpu.grant.yaml",
        "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n",
    );
    let stopped = daemon
        .until_failed(MOCK_GPU_FILE, &["not WebAssembly"])
        .await;
    let stop = stopped
        .timeline
        .iter()
        .find(|entry| entry.what == "stopped")
        .expect("it was stopped");
    let problem = stop.problem.as_ref().expect("with the reason");
    assert!(
        problem.code == "grant-revoked" && problem.message.contains("MOCK_GPU_*"),
        "{problem:?}"
    );
}

#[tokio::test]
async fn broken_side_file_names_its_position() {
    let grant = |line: &str| format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{line}\n");
    let cases = [
        (
            "config",
            "pools:\n  - {name: gpus, count: [}\n".to_owned(),
            &["mock-gpu.config.yaml", "line 2"][..],
        ),
        (
            "config",
            "pools: [{name: gpus, cuont: 4}]\n".to_owned(),
            &["cuont"],
        ),
        (
            "grant",
            grant("envv: [X_*]"),
            &["mock-gpu.grant.yaml", "envv", "line 3"],
        ),
    ];
    let daemon = Daemon::start().await;
    for (kind, broken, expected) in cases {
        let file = format!("mock-gpu.{kind}.yaml");
        for side in ["grant", "config"] {
            daemon.drop_in(&format!("mock-gpu.{side}.yaml"), side_file(MOCK_GPU, side));
        }
        daemon.drop_in(&file, &broken);
        daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
        daemon.until_failed(MOCK_GPU_FILE, expected).await;
        daemon.drop_in(&file, side_file(MOCK_GPU, kind));
        daemon.until_serving(MOCK_GPU_FILE).await;
        daemon.take_out(MOCK_GPU_FILE);
        daemon.until_gone(MOCK_GPU_FILE).await;
    }
}

#[tokio::test]
async fn second_file_takes_over_without_claims() {
    let daemon = with_gpus().await;
    daemon.copy_in("copy.grant.yaml", side_file(MOCK_GPU, "grant"));
    daemon.copy_in("copy.wasm", wasm(MOCK_GPU, Form::Component));
    daemon
        .until_failed("copy.wasm", &[MOCK_GPU_FILE, MOCK_GPU_NAME])
        .await;
    assert_eq!(daemon.until_serving(MOCK_GPU_FILE).await.devices, 11);

    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    assert_eq!(
        daemon.unprepare(&pod("one")).await,
        [("a".to_owned(), "unprepared".to_owned())]
    );
    daemon.take_out(MOCK_GPU_FILE);
    let taken_over = daemon.until_serving("copy.wasm").await;
    assert_eq!(
        (taken_over.name.as_str(), taken_over.reason.as_str()),
        (MOCK_GPU_NAME, "")
    );
}

#[tokio::test]
async fn reload_rereads_files_and_reports_result() {
    let daemon = with_gpus().await;
    daemon
        .cli(&["driver", "reload", MOCK_GPU_NAME])
        .await
        .done_with(&["serving, 11 devices"]);
    daemon
        .cli(&["driver", "reload", "unknown.example"])
        .await
        .failed_with(1, &["unknown.example"]);
}
