//! Differences between the two kinds, each with its reason.

use scripted::Command;

use crate::kind::{Kind, Native, Wasm};
use crate::scene::Scene;

/// A kubelet does not compare a plugin's devices with the allocation, and there are plugins that name others. A WASM driver has no
/// such past: its answer is refused.
#[tokio::test]
async fn only_plugins_may_return_other_devices() {
    let mut scene = Scene::<Native>::start().await;
    scene.prepare_to(&[("other-device", "prepared")]).await;
    let mut scene = Scene::<Wasm>::start().await;
    scene
        .prepare_to(&[
            ("ok", "prepared"),
            ("other-device", "driver-answer-not-valid"),
        ])
        .await;
    scene
        .see(&[("ok", "prepared"), ("other-device", "preparing")])
        .await;
}

/// The kubelet's API has no word for a claim that can never be prepared: a plugin can only fail the call, for all its claims.
#[tokio::test]
async fn plugin_refuses_permanently_for_whole_call() {
    let mut scene = Scene::<Wasm>::start().await;
    scene
        .prepare_to(&[("ok", "prepared"), ("refuse-permanent", "driver-refused")])
        .await;
    scene.see(&[("ok", "prepared")]).await;
    let mut scene = Scene::<Native>::start().await;
    scene
        .prepare_to(&[
            ("ok", "driver-refused"),
            ("refuse-permanent", "driver-refused"),
        ])
        .await;
    scene.see(&[]).await;
    scene.expect_calls(&[
        "prepare ok,refuse-permanent",
        "unprepare ok,refuse-permanent",
    ]);
}

/// A plugin that died keeps its registration, so its claims wait for the connection; a file that is gone is gone.
#[tokio::test]
async fn dead_plugin_is_reported_not_connected() {
    let mut scene = Scene::<Native>::start().await;
    scene.prepare(&["die"]).await;
    scene.prepare_to(&[("ok", "driver-not-connected")]).await;
    scene
        .see(&[("die", "preparing"), ("ok", "preparing")])
        .await;
    scene.kind.revive(&scene.daemon).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
}

/// A plugin refuses permanently by the status of a whole call, and kubelets retry regardless of the status: there are plugins that answer
/// "not found" while they wait for the API server.
#[tokio::test]
async fn permanent_plugin_refusal_is_retried() {
    let calls = ["prepare refuse-permanent", "unprepare refuse-permanent"];
    let mut scene = Scene::<Wasm>::start().await;
    let first = scene.prepare(&["refuse-permanent"]).await;
    assert_eq!(scene.prepare(&["refuse-permanent"]).await, first);
    scene.expect_calls(&calls);
    scene
        .daemon
        .cli(&["explain", "claim", "refuse-permanent"])
        .await
        .done_with(&["was refused", "until the request changes"]);
    let explained = scene
        .daemon
        .cli(&["explain", "claim", "refuse-permanent", "-o", "json"])
        .await
        .json();
    assert_eq!(
        (&explained["refused"][0]["attempts"], &explained["claims"]),
        (&1.into(), &serde_json::json!([]))
    );
    assert_eq!(explained["refused"][0]["retry"]["when"], "when-changed");

    let mut scene = Scene::<Native>::start().await;
    for _ in 0..2 {
        scene
            .prepare_to(&[("refuse-permanent", "driver-refused")])
            .await;
    }
    scene.expect_calls(&[calls, calls].concat());
}

/// A plugin has no word for the time that it needs.
#[tokio::test]
async fn requested_retry_delay_is_honoured() {
    let mut scene = Scene::<Wasm>::start().await;
    for _ in 0..3 {
        let answer = scene.prepare(&["refuse-an-hour"]).await;
        let problem = answer.claims[0].problem.as_ref().expect("it is refused");
        assert!(
            (3_500_000..=3_600_000).contains(&problem.retry_after_ms()),
            "{problem:?}"
        );
    }
    scene.expect_calls(&["prepare refuse-an-hour"]);
    let explained = scene
        .daemon
        .cli(&["explain", "claim", "refuse-an-hour", "-o", "json"])
        .await
        .json();
    let driver = &explained["claims"][0]["drivers"][0];
    assert_eq!(
        (&driver["attempts"], &driver["retry"]["when"]),
        (&1.into(), &"at".into()),
        "{explained}"
    );
    let text = scene
        .daemon
        .cli(&["explain", "claim", "refuse-an-hour"])
        .await
        .done();
    for part in [
        "is preparing since",
        "may be called again on",
        "1 failed attempt",
        "history:",
        "refused by driver",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    scene.set_prepare("refuse-an-hour", Command::Ok).await;
    scene.prepare_to(&[("refuse-an-hour", "prepared")]).await;
}
