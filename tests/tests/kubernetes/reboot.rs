//! A node that boots again while a pod has a claim.

use std::path::Path;
use std::time::{Duration, Instant};

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options, Root};
use serde_json::Value;
use tokio::time::timeout;

use crate::PATIENCE;
use crate::kubelet::Failure;
use crate::scene::{Scene, cdi_devices, gpus};
use crate::server::{Server, newest_dra_manager, server};

/// The longest time from the registration of a driver until a kubelet syncs the pods of its claims.
const WOKEN: Duration = Duration::from_secs(5);

fn boot(id: &'static str) -> impl FnOnce(Options) -> Options {
    move |options| options.arg("--boot-id", id)
}

/// Ends a daemon as a reboot does, which loses what is in memory.
async fn lose_power(daemon: Daemon) -> Root {
    let root = daemon.into_root().await;
    for dir in [root.cdi(), root.path().join("run")] {
        std::fs::remove_dir_all(&dir).unwrap();
        std::fs::create_dir_all(&dir).unwrap();
    }
    root
}

#[tokio::test]
async fn kubelet_prepares_claim_again_after_reboot() {
    let Some(mut scene) = Scene::start_with("reboot", boot("boot-1")).await else {
        return;
    };
    scene.daemon.serve(MOCK_GPU, Form::Core).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    scene.pod_with_claim("kept", gpus(2)).await;
    let names = scene.prepared("kept").await;
    assert_eq!(scene.daemon.only_cdi_file().identity["bootId"], "boot-1");

    scene.kubelet.stop().await;
    let options = scene.same_instance();
    let root = lose_power(scene.daemon).await;
    scene.daemon = Daemon::start_on(root, boot("boot-2")(options)).await;
    scene.kubelet.run().await;
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    assert!(scene.daemon.only_claim().await.stale_boot);
    assert_eq!(scene.prepared_again("kept", MOCK_GPU_NAME).await, names);
    assert!(!scene.daemon.only_claim().await.stale_boot);
    assert_eq!(scene.daemon.only_cdi_file().identity["bootId"], "boot-2");
    scene.unprepared_again("kept", MOCK_GPU_NAME).await;
    scene.daemon.assert_empty().await;
    scene.removed("kept").await;
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn reboot_wakes_pods_of_kubelet() {
    let Some(server) = server().await else {
        return;
    };
    assert_pod_is_woken(server, &server.program, "woken").await;
}

#[tokio::test]
async fn reboot_wakes_pods_of_newest_kubelet() {
    let (Some(server), Some(manager)) = (server().await, newest_dra_manager().await) else {
        return;
    };
    assert_pod_is_woken(server, &manager, "woken-newest").await;
}

/// After a reboot a kubelet starts pods before the daemon runs, and would try them again after a minute or more. It syncs a pod at once when
/// the health of one of its devices changes.
async fn assert_pod_is_woken(server: &'static Server, kubelet: &Path, node: &str) {
    let mut scene = Scene::start_on(server, kubelet, node, boot("boot-1")).await;
    scene.daemon.serve(MOCK_GPU, Form::Core).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    scene.pod_with_claim("kept", gpus(2)).await;
    let names = scene.prepared("kept").await;
    let path = format!("{}/kept", scene.path("pods"));
    let pod = scene.api.get(&path).await.done();
    let uid = pod["metadata"]["uid"].as_str().expect("a pod has a UID");
    // The kubelet remembers it, so the same health is no change.
    let remembered = scene.daemon.kubelet().join("dra_health_state");
    let is_healthy = async || {
        while !std::fs::read_to_string(&remembered).is_ok_and(|text| text.contains("\"Healthy\"")) {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, is_healthy())
        .await
        .expect("the kubelet stores the health of devices");

    scene.kubelet.stop().await;
    let options = scene.same_instance();
    let root = lose_power(scene.daemon).await;
    scene.kubelet.run().await;
    let early = scene.kubelet.ask("prepare", &scene.node, "kept", "").await;
    assert!(matches!(early, Err(Failure::Refused(_))), "{early:?}");
    scene.daemon = Daemon::start_on(root, boot("boot-2")(options)).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    let registered = Instant::now();
    let wakes = |event: &Value| {
        let pods = event["pods"].as_array();
        event["event"] == "health" && pods.is_some_and(|pods| pods.iter().any(|pod| pod == uid))
    };
    scene
        .kubelet
        .event("the kubelet syncs the pod", wakes)
        .await;
    let waited = registered.elapsed();
    assert!(waited < WOKEN, "{waited:?}");

    // The sync succeeds. A kubelet that was started again has the devices twice.
    let prepared = scene.prepare("kept").await;
    let prepared = prepared.unwrap_or_else(|why| panic!("{why:?}\n{}", scene.daemon.log()));
    let mut again = cdi_devices(&prepared.result);
    again.dedup();
    assert_eq!(again, names);
    assert_eq!(scene.daemon.only_cdi_file().identity["bootId"], "boot-2");
    scene.unprepared("kept").await;
    scene.daemon.assert_empty().await;
    scene.removed("kept").await;
    scene.assert_nothing_forbidden();
}
