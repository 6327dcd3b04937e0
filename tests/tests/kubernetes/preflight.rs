//! Checks of a node before the daemon runs on it.

use std::path::Path;

use serde_json::{Value, json};

use crate::scene::Scene;

/// The findings, by the name of the check, with its result.
async fn preflight(scene: &Scene, kubeconfig: &Path) -> (Option<i32>, Value) {
    let args = [
        "preflight",
        "--kubernetes",
        "--node-name",
        &scene.node,
        "-o",
        "json",
        "--kubeconfig",
    ];
    let output = scene
        .daemon
        .cli(&[&args[..], &[kubeconfig.to_str().unwrap()]].concat())
        .await;
    let checks: Vec<Value> =
        serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let each = checks.into_iter().map(|check| {
        let name = check["name"].as_str().unwrap().to_owned();
        (name, json!([check["verdict"], check["finding"]]))
    });
    (output.code, Value::Object(each.collect()))
}

#[tokio::test]
async fn preflight_needs_the_role() {
    let Some(scene) = Scene::start("preflight").await else {
        return;
    };
    let (code, checks) = preflight(&scene, &scene.kubeconfig).await;
    assert_eq!(code, Some(0), "{checks:#}");
    assert_eq!(
        checks["rights"],
        json!(["ok", "the account has all that it needs"]),
        "{checks:#}"
    );
    assert_eq!(checks["API server"][0], "ok");
    assert!(
        checks["API server"][1]
            .as_str()
            .unwrap()
            .ends_with("resource.k8s.io/v1"),
        "{checks:#}"
    );
    for name in [
        "Node object",
        "CDI directory",
        "CDI search path",
        "kubelet directories",
        "state directory",
        "/sys",
    ] {
        assert_eq!(checks[name][0], "ok", "{name}: {checks:#}");
    }

    let path = format!("{}/default/token", scene.path("serviceaccounts"));
    let token = scene.api.post(&path, &json!({"spec": {}})).await.done();
    let config = scene
        .server
        .kubeconfig(token["status"]["token"].as_str().unwrap());
    let kubeconfig = scene.daemon.write("other-kubeconfig", config);
    let (code, checks) = preflight(&scene, &kubeconfig).await;
    assert_eq!(
        (code, &checks["rights"][0]),
        (Some(1), &json!("failed")),
        "{checks:#}"
    );
    let finding = checks["rights"][1].as_str().unwrap();
    for right in [
        "get resourceclaims.resource.k8s.io",
        "patch resourceclaims/status.resource.k8s.io",
        "list pods",
    ] {
        assert!(finding.contains(right), "{finding}");
    }

    let kubeconfig = scene
        .daemon
        .write("wrong-kubeconfig", scene.server.kubeconfig("no-token"));
    let (code, checks) = preflight(&scene, &kubeconfig).await;
    assert_eq!(
        (code, &checks["API server"][0]),
        (Some(1), &json!("failed")),
        "{checks:#}"
    );
}
