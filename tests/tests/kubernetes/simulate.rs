//! Virtual nodes: the scheduler allocates their devices, and the simulation prepares the claims.

use std::process::Stdio;

use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::recorded::Recorded;
use nodedock_tests::{Root, places};
use serde_json::{Value, json};

use crate::api::Api;
use crate::scene::{SCRIPTED_NAME, SLICES, deploy, path, pod, request};
use crate::server::server;

const NAMESPACE: &str = "simulated";

#[tokio::test]
async fn simulated_devices_are_allocated_and_prepared() {
    let Some(server) = server().await else { return };
    let admin = std::fs::read_to_string(&server.admin).expect("the kubeconfig is there");
    let api = Api::of(&admin).await;
    deploy(&api).await;
    api.post(
        "/api/v1/namespaces",
        &json!({"metadata": {"name": NAMESPACE}}),
    )
    .await
    .done();
    let account = json!({"metadata": {"name": "default"}});
    api.post(&path(NAMESPACE, "serviceaccounts"), &account)
        .await
        .done();
    let root = Root::new();
    root.drop_in("scripted.grant.yaml", side_file("scripted", "grant"));
    root.drop_in("scripted.config.yaml", "report: true\n");
    root.drop_in("scripted.wasm", wasm("scripted", Form::Core));
    let machine = Recorded::new(&root.path().join("machine"), &[]);
    let mut simulation = tokio::process::Command::new(places::nodedock());
    simulation
        .args([
            "simulate",
            "--nodes",
            "2",
            "--name-prefix",
            "simulated",
            "--hardware",
        ])
        .arg(machine.path());
    simulation
        .arg("--drivers")
        .arg(root.drivers())
        .arg("--kubeconfig")
        .arg(&server.admin);
    let _simulation = simulation
        .kill_on_drop(true)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program starts");
    let of_driver = format!("{SLICES}?fieldSelector=spec.driver%3D{SCRIPTED_NAME}");
    let nodes = |slices: &[Value]| {
        let mut nodes: Vec<_> = slices
            .iter()
            .filter_map(|slice| slice["spec"]["nodeName"].as_str())
            .collect();
        nodes.retain(|node| node.starts_with("simulated-"));
        nodes.sort_unstable();
        nodes.dedup();
        if nodes == ["simulated-0", "simulated-1"] {
            Ok(())
        } else {
            Err(format!("{nodes:?}"))
        }
    };
    api.until("both nodes are published", &of_driver, nodes)
        .await;

    let requests = json!([request("device", SCRIPTED_NAME, 1)]);
    let claim = json!({"metadata": {"name": "claim"}, "spec": {"devices": {"requests": requests}}});
    api.post(&path(NAMESPACE, "resourceclaims"), &claim)
        .await
        .done();
    let claims = json!([{"name": "claim", "resourceClaimName": "claim"}]);
    let mut pod = pod(
        "simulated-1",
        "pod",
        claims,
        json!({"resources": {"claims": [{"name": "claim"}]}}),
    );
    // No controller says that the node is ready.
    pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
    let pods = path(NAMESPACE, "pods");
    api.post(&pods, &pod).await.done();
    let reported = |claims: &[Value]| match &claims[0]["status"]["devices"][0] {
        Value::Null => Err(format!("{claims:#?}")),
        device => Ok(device.clone()),
    };
    let path = path(NAMESPACE, "resourceclaims");
    let device = api.until("the claim has a status", &path, reported).await;
    assert_eq!(device["pool"], "simulated-1/script");
    assert_eq!(device["networkData"]["interfaceName"], "net1");
    api.delete_at_once(&pods).await.done();
}
