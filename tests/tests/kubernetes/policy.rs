//! What the deployment's role and admission policy let the daemon's token do.

use http::Method;
use nodedock_tests::drivers::MOCK_GPU_NAME;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::PATIENCE;
use crate::api::JSON;
use crate::scene::{SLICES, Scene};

fn slice(name: &str, place: (&str, Value)) -> Value {
    let mut slice = json!({
        "metadata": {"name": name},
        "spec": {
            "driver": MOCK_GPU_NAME,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0"}],
        },
    });
    slice["spec"][place.0] = place.1;
    slice
}

#[tokio::test]
async fn a_token_writes_slices_of_its_own_node_only() {
    let Some(scene) = Scene::start("policy").await else { return };
    let daemon = &scene.as_daemon;
    let elsewhere = slice("elsewhere", ("nodeName", json!("another-node")));
    let dry = format!("{SLICES}?dryRun=All");
    // A new policy is in force some moments after it was created.
    let in_force = async { while daemon.post(&dry, &elsewhere).await.code < 300 {} };
    timeout(PATIENCE, in_force).await.expect("the policy comes into force");

    let refused = daemon.post(SLICES, &elsewhere).await.refused(422);
    assert!(refused.contains("another-node") && refused.contains("policy"), "{refused}");
    let everywhere = slice("everywhere", ("allNodes", json!(true)));
    daemon.post(SLICES, &everywhere).await.refused(422);
    let own = slice("own", ("nodeName", json!("policy")));
    daemon.post(&dry, &own).await.done();
    let service = scene.as_service_of_node().await;
    service.post(SLICES, &elsewhere).await.refused(422);
    service.post(&dry, &own).await.done();

    scene.api.post(SLICES, &elsewhere).await.done();
    let foreign = format!("{SLICES}/elsewhere");
    daemon.delete(&foreign).await.refused(422);
    let mut changed = scene.api.get(&foreign).await.done();
    changed["spec"]["devices"] = json!([{"name": "gpu-1"}]);
    daemon.put(&foreign, &changed).await.refused(422);
    for version in ["v1beta1", "v1beta2"] {
        daemon.delete(&foreign.replace("/v1/", &format!("/{version}/"))).await.refused(422);
    }
    scene.api.delete(&foreign).await.done();

    daemon.send(Method::DELETE, SLICES, JSON, None).await.refused(403);
    daemon.get(&scene.path("secrets")).await.refused(403);
    daemon.post(&scene.path("pods"), &json!({"metadata": {"name": "p"}})).await.refused(403);
}
