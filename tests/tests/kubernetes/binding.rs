//! Devices with binding conditions: the scheduler binds a pod when the daemon has prepared its device.

use nodedock_tests::drivers::MOCK_GPU_NAME;
use serde_json::json;

use crate::scene::{Scene, gpus};

#[tokio::test]
async fn scheduler_waits_for_prepared_device() {
    let config = format!("kubernetes:\n  bindingConditions: [{{driver: {MOCK_GPU_NAME}}}]\n");
    let pools = "pools: [{name: gpus, count: 2}]\n";
    let scene = Scene::with_gpus_and("binding", pools, |options| options.config(&config)).await;
    let Some(scene) = scene else { return };
    scene.pod_with_claim("one", gpus(1)).await;
    // The kubelet knows the pod as soon as it is bound.
    assert_eq!(scene.prepared("one").await.len(), 1);
    let claim = scene
        .api
        .get(&format!("{}/one", scene.path("resourceclaims")))
        .await
        .done();
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    assert_eq!(
        result["bindingConditions"],
        json!(["nodedock.dev/prepared"]),
        "the scheduler had to wait"
    );
    let condition = &claim["status"]["devices"][0]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["status"]),
        (&json!("nodedock.dev/prepared"), &json!("True"))
    );
    let history = scene.daemon.cli(&["explain", "claim", "one"]).await.done();
    assert!(history.contains("before the pod is bound"), "{history}");
    assert_eq!(
        history.matches("prepared by driver").count(),
        1,
        "the driver is called once: {history}"
    );
    scene.unprepared("one").await;
    scene.daemon.assert_empty().await;
    scene.removed("one").await;
    scene.assert_nothing_forbidden();
}
