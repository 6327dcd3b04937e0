//! Daemon and kubelet restart while pods come and go.

use std::time::Duration;

use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::machine::tell;

use crate::scene::Scene;
use crate::stream::Stream;

/// How often each of them happens.
const ROUNDS: usize = 2;
const ACTIONS: [&str; 3] = ["daemon stops and starts", "daemon is killed and starts", "kubelet starts again"];
const IN_FLIGHT: usize = 10;
const BETWEEN: usize = 15;
/// More than the pods that run need, since the scheduler learns some time later that a device is free.
const DEVICES: usize = 32;
/// The longest time from the first attempt to prepare a pod's claim to the success.
const WAIT_MAX: Duration = Duration::from_secs(60);

#[tokio::test]
async fn pods_come_and_go_while_daemon_and_kubelet_restart() {
    let Some(mut scene) = Scene::start("restarts").await else { return };
    scene.daemon.install_gpus(&format!("pools: [{{name: gpus, count: {DEVICES}}}]\n"));
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    let stream = Stream {
        api: &scene.api,
        kubelet: &scene.kubelet,
        node: &scene.node,
        driver: MOCK_GPU_NAME,
        in_flight: IN_FLIGHT,
        between: BETWEEN,
    };
    let actions = ACTIONS.repeat(ROUNDS);
    let report = stream.run(&actions, async |action| match action {
        "daemon stops and starts" => scene.daemon.restart().await,
        "daemon is killed and starts" => scene.daemon.crash().await,
        _ => scene.kubelet.restart().await,
    });
    let report = report.await;
    tell(&format!("claims of pods while daemon and kubelet restart:\n{report}"));
    for (action, tally) in report.tallies() {
        assert!(tally.longest_wait < WAIT_MAX, "{action}: {tally:#?}\n{}", scene.daemon.log());
    }
    scene.daemon.assert_empty().await;
    scene.until_devices(MOCK_GPU_NAME, DEVICES).await;
    scene.assert_nothing_forbidden();
}
