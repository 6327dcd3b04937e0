//! Drivers as plugins of the kubelet's plugin manager.

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};
use serde_json::Value;

use crate::scene::{Scene, gpus};

#[tokio::test]
async fn registration_follows_serving_state() {
    let Some(scene) = Scene::start("plugins").await else {
        return;
    };
    for _ in 0..2 {
        scene.daemon.serve(MOCK_GPU, Form::Core).await;
        let registered = scene.kubelet.registered(MOCK_GPU_NAME).await;
        let versions: Vec<_> = registered["versions"]
            .as_array()
            .into_iter()
            .flatten()
            .collect();
        for wanted in ["v1.DRAPlugin", "v1beta1.DRAPlugin"] {
            assert!(
                versions.iter().any(|version| *version == wanted),
                "{registered}"
            );
        }
        let devices = scene.daemon.devices().await.len();
        scene.until_devices(MOCK_GPU_NAME, devices).await;
        scene.daemon.take_out(MOCK_GPU_FILE);
        scene.kubelet.deregistered(MOCK_GPU_NAME).await;
        scene.until_devices(MOCK_GPU_NAME, 0).await;
    }
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn restarted_kubelet_has_driver_and_claims() {
    let Some(scene) = Scene::start("kubelets").await else {
        return;
    };
    scene.daemon.serve(MOCK_GPU, Form::Core).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    let devices = scene.daemon.devices().await.len();
    scene.until_devices(MOCK_GPU_NAME, devices).await;
    scene.pod_with_claim("kept", gpus(1)).await;
    let names = scene.prepared("kept").await;
    let before = scene.api.get(&scene.slices_of(MOCK_GPU_NAME)).await.done();
    let uids = |slices: &[Value]| -> Vec<_> {
        slices
            .iter()
            .map(|slice| slice["metadata"]["uid"].to_string())
            .collect()
    };
    let before = uids(before["items"].as_array().expect("a list"));

    scene.kubelet.restart().await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    let are_others = |slices: &[Value]| match uids(slices).iter().find(|uid| before.contains(uid)) {
        None => Ok(()),
        Some(old) => Err(format!("the kubelet has not deleted {old}")),
    };
    let path = scene.slices_of(MOCK_GPU_NAME);
    scene
        .api
        .until("the kubelet has deleted the slices", &path, are_others)
        .await;
    scene.until_devices(MOCK_GPU_NAME, devices).await;
    assert_eq!(scene.prepared_again("kept", MOCK_GPU_NAME).await, names);
    scene.unprepared_again("kept", MOCK_GPU_NAME).await;
    scene.daemon.assert_empty().await;
    scene.removed("kept").await;
    scene.assert_nothing_forbidden();
}
