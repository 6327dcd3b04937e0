//! A node that boots again while a pod has a claim.

use nodedock_tests::Daemon;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};

use crate::scene::{Scene, gpus};

#[tokio::test]
async fn kubelet_prepares_claim_again_after_reboot() {
    let boot =
        |id: &'static str| move |options: nodedock_tests::Options| options.arg("--boot-id", id);
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
    let root = scene.daemon.into_root().await;
    // Both are in memory.
    for dir in [root.cdi(), root.path().join("run")] {
        std::fs::remove_dir_all(&dir).unwrap();
        std::fs::create_dir_all(&dir).unwrap();
    }
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
