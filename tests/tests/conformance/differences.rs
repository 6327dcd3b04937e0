//! What the two kinds do not have in common, each with its reason.

use crate::kind::{Kind, Native, Wasm};
use crate::scene::Scene;

/// A kubelet does not compare a plugin's devices with the allocation, and there are plugins that name others. A WASM driver has no
/// such past: its answer is refused.
#[tokio::test]
async fn a_device_that_is_not_the_claims_is_taken_from_a_plugin_only() {
    let mut scene = Scene::<Native>::start().await;
    scene.prepare_to(&[("other-device", "prepared")]).await;
    let mut scene = Scene::<Wasm>::start().await;
    scene.prepare_to(&[("ok", "prepared"), ("other-device", "driver-answer-not-valid")]).await;
    scene.see(&[("ok", "prepared"), ("other-device", "preparing")]).await;
}

/// The kubelet's API has no word for a claim that can never be prepared: a plugin can only fail the call, for all its claims.
#[tokio::test]
async fn a_plugin_refuses_for_good_all_the_claims_of_a_call_or_none() {
    let mut scene = Scene::<Wasm>::start().await;
    scene.prepare_to(&[("ok", "prepared"), ("refuse-permanent", "driver-refused")]).await;
    scene.see(&[("ok", "prepared")]).await;
    let mut scene = Scene::<Native>::start().await;
    scene.prepare_to(&[("ok", "driver-refused"), ("refuse-permanent", "driver-refused")]).await;
    scene.see(&[]).await;
    scene.told(&["prepare ok,refuse-permanent", "unprepare ok,refuse-permanent"]);
}

/// A plugin that died keeps its registration, so its claims wait for the connection; a file that is gone is gone.
#[tokio::test]
async fn a_plugin_that_died_is_not_connected_rather_than_unknown() {
    let mut scene = Scene::<Native>::start().await;
    scene.prepare(&["die"]).await;
    scene.prepare_to(&[("ok", "driver-not-connected")]).await;
    scene.see(&[("die", "preparing"), ("ok", "preparing")]).await;
    scene.kind.revive(&scene.daemon).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
}
