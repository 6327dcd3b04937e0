//! The `trust` section while the daemon runs.

use nodedock_tests::assert_parts;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, wasm};

use super::keys::{Configure, Signer, trust};
use super::{SIGNATURE, daemon_with};

#[tokio::test]
async fn stricter_mode_drains_a_serving_driver() {
    let bytes = wasm(MOCK_GPU, Form::Core);
    let keys = [("release", Signer::P256(1), "")];
    let daemon = daemon_with(&trust("off", &keys, "")).await;
    daemon.drop_in(MOCK_GPU_FILE, &bytes);
    let served = daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(served.trust.unwrap().verdict, "unchecked");
    let pod = pod("one");
    let request = request(&pod, &[&gpu_claim("a", &["gpus/gpu-0"])]);
    let answer = daemon.prepared(request.clone()).await;

    daemon.put_config(&trust("warn", &keys, ""));
    let [condition] = daemon
        .until_conditions(&["driver-distrusted"])
        .await
        .try_into()
        .unwrap();
    assert_eq!(condition.subject, MOCK_GPU_FILE);
    let warned = daemon
        .until_driver(MOCK_GPU_FILE, |d| {
            d.trust.as_ref().is_some_and(|t| t.mode == "warn")
        })
        .await;
    assert_eq!(warned.state, "serving");
    for command in [["get", "drivers"], ["explain", "driver"]] {
        let args: Vec<_> = command.iter().copied().chain([MOCK_GPU_NAME]).collect();
        daemon.cli(&args).await.done_with(&["it is not signed"]);
    }

    daemon.put_config(&trust("enforce", &keys, ""));
    daemon
        .until_failed(MOCK_GPU_FILE, &["not trusted: it is not signed"])
        .await;
    daemon.until_conditions(&["driver-not-serving"]).await;
    daemon.until_device("gpus", "gpu-0", false).await;
    assert_eq!(daemon.devices().await, []);
    assert_eq!(
        daemon.prepared(request).await,
        answer,
        "what is prepared needs no driver"
    );
    let refused = daemon.unprepare_pod(&pod).await;
    assert_eq!(refused.claims[0].outcome, "refused", "the claim is kept");

    daemon.drop_in(SIGNATURE, Signer::P256(1).sign(&bytes));
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
        .until_claims("the open unprepare is finished", <[_]>::is_empty)
        .await;
}

#[tokio::test]
async fn invalid_config_change_has_no_effect() {
    let bytes = wasm(MOCK_GPU, Form::Core);
    let key = ("release", Signer::P256(1), "");
    let daemon = daemon_with(&trust("enforce", &[key], "")).await;
    let rsa = "trust:\n  mode: off\n  keys:\n  - {name: old, pem: rubbish}\n";
    daemon.put_config(rsa);
    let [condition] = daemon
        .until_conditions(&["config-refused"])
        .await
        .try_into()
        .unwrap();
    let message = condition.problem.unwrap().message;
    assert_parts(
        &message,
        &["nodedock.yaml", "line 4", "key old", "stays in effect"],
    );
    daemon.drop_in(MOCK_GPU_FILE, &bytes);
    // `enforce` is still in effect.
    daemon.until_failed(MOCK_GPU_FILE, &["not signed"]).await;

    daemon.put_config(&format!(
        "{}claims: {{exclusiveWaitMs: 1}}\n",
        trust("off", &[key], "")
    ));
    daemon.until_serving(MOCK_GPU_FILE).await;
    let [condition] = daemon
        .until_conditions(&["config-needs-restart"])
        .await
        .try_into()
        .unwrap();
    assert!(
        condition
            .problem
            .unwrap()
            .message
            .starts_with("claims changed")
    );
    daemon.put_config(&trust("off", &[key], ""));
    daemon.until_conditions(&[]).await;
}
