//! Permissions of the daemon's token by the deployment's role and admission policy.

use http::Method;
use nodedock_tests::drivers::MOCK_GPU_NAME;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::PATIENCE;
use crate::api::{JSON, MERGE};
use crate::scene::{SLICES, Scene, gpus, path};

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
async fn token_writes_only_own_node_slices() {
    let Some(scene) = Scene::start("policy").await else {
        return;
    };
    let daemon = &scene.as_daemon;
    let elsewhere = slice("elsewhere", ("nodeName", json!("another-node")));
    let dry = format!("{SLICES}?dryRun=All");
    // A new policy is in force some moments after it was created.
    let in_force = async { while daemon.post(&dry, &elsewhere).await.code < 300 {} };
    timeout(PATIENCE, in_force)
        .await
        .expect("the policy comes into force");

    let refused = daemon.post(SLICES, &elsewhere).await.refused(422);
    assert!(
        refused.contains("another-node") && refused.contains("policy"),
        "{refused}"
    );
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
        daemon
            .delete(&foreign.replace("/v1/", &format!("/{version}/")))
            .await
            .refused(422);
    }
    scene.api.delete(&foreign).await.done();

    daemon
        .send(Method::DELETE, SLICES, JSON, None)
        .await
        .refused(403);
    daemon.get(&scene.path("secrets")).await.refused(403);
    daemon
        .post(&scene.path("pods"), &json!({"metadata": {"name": "p"}}))
        .await
        .refused(403);
}

/// A claim that is allocated on a node, as a scheduler writes it.
async fn allocated_claim(scene: &Scene, name: &str, node: &str) -> String {
    let claims = scene.path("resourceclaims");
    let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": gpus(1)}}});
    scene.api.post(&claims, &claim).await.done();
    let on_node = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    let result =
        json!({"request": "gpus", "driver": MOCK_GPU_NAME, "pool": node, "device": "gpu-0"});
    let allocation = json!({
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [on_node]}]},
    });
    let status = format!("{claims}/{name}/status");
    let body = json!({"status": {"allocation": allocation}});
    scene
        .api
        .send(Method::PATCH, &status, MERGE, Some(&body))
        .await
        .done();
    status
}

/// The API server's own rules, since 1.36: they know the node of a claim, and none of an Event.
#[tokio::test]
async fn token_writes_only_own_claim_status() {
    let Some(scene) = Scene::start("status").await else {
        return;
    };
    let own = allocated_claim(&scene, "own", "status").await;
    let elsewhere = allocated_claim(&scene, "elsewhere", "another-node").await;
    let report = |node: &str| {
        let device =
            json!({"driver": MOCK_GPU_NAME, "pool": node, "device": "gpu-0", "data": {"a": "b"}});
        json!({"status": {"devices": [device]}})
    };
    let allocation = json!({"status": {"allocation": null}});
    for daemon in [&scene.as_daemon, &scene.as_service_of_node().await] {
        let patch = async |path: &str, body: &Value| {
            daemon
                .send(
                    Method::PATCH,
                    &format!("{path}?dryRun=All"),
                    MERGE,
                    Some(body),
                )
                .await
        };
        // A new role is in force some moments after it was created.
        let in_force = async { while patch(&own, &report("status")).await.code == 403 {} };
        timeout(PATIENCE, in_force)
            .await
            .expect("the role comes into force");
        patch(&own, &report("status")).await.done();
        let refused = patch(&elsewhere, &report("another-node"))
            .await
            .refused(422);
        assert!(
            refused.contains("resourceclaims/driver") && refused.contains("arbitrary-node"),
            "{refused}"
        );
        for claim in [&own, &elsewhere] {
            let refused = patch(claim, &allocation).await.refused(422);
            assert!(refused.contains("resourceclaims/binding"), "{refused}");
        }
    }
}

/// A compromised node can do this: `docs/security.md` says so.
#[tokio::test]
async fn token_writes_events_about_any_object() {
    let Some(scene) = Scene::start("events").await else {
        return;
    };
    let pod = json!({"kind": "Pod", "apiVersion": "v1", "namespace": "kube-system", "name": "of-another-node"});
    let event = json!({
        "metadata": {"name": "of-another-node.1", "namespace": "kube-system"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "kubelet",
        "reportingInstance": "another-node",
        "action": "Binding",
        "reason": "Failed",
        "type": "Warning",
        "regarding": pod,
    });
    let events = format!("{}?dryRun=All", path("kube-system", "events"));
    let in_force = async { while scene.as_daemon.post(&events, &event).await.code == 403 {} };
    timeout(PATIENCE, in_force)
        .await
        .expect("the role comes into force");
    scene.as_daemon.post(&events, &event).await.done();
    let deleted = format!("{}/of-another-node.1", path("kube-system", "events"));
    scene.as_daemon.delete(&deleted).await.refused(403);
}
