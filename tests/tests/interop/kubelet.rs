//! A kubelet by the official types in Go, to which the daemon's drivers are plugins as others are.

mod program;

use std::collections::BTreeSet;

use nodedock_tests::Daemon;
use nodedock_tests::cluster::{Cluster, NAMESPACE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use serde_json::{Value, json};

use program::GoKubelet;

const RESOURCE: &str = "example.com/gpu";
const GPUS: &str = "pools: [{name: gpus, count: 4, extendedResource: example.com/gpu}]\n";

/// A daemon of a cluster with simulated GPUs, on the directories of a kubelet.
async fn daemon(cluster: &Cluster) -> Daemon {
    let daemon = cluster.daemon().await;
    daemon.install_gpus(GPUS);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
}

fn claim(uid: &str, name: &str) -> Value {
    json!({"namespace": NAMESPACE, "uid": uid, "name": name})
}

/// The one claim of an answer.
fn of<'a>(answer: &'a Value, uid: &str) -> &'a Value {
    let claims = answer["claims"]
        .as_object()
        .unwrap_or_else(|| panic!("no claims: {answer}"));
    assert_eq!(claims.len(), 1, "{answer}");
    claims
        .get(uid)
        .unwrap_or_else(|| panic!("{uid} is not answered: {answer}"))
}

fn devices(event: &Value) -> BTreeSet<(String, String)> {
    let list = event["devices"].as_array().into_iter().flatten();
    let text = |device: &Value, key: &str| device[key].as_str().unwrap_or_default().to_owned();
    list.map(|device| (text(device, "ID"), text(device, "health")))
        .collect()
}

#[tokio::test]
async fn registered_driver_prepares_by_both_versions() {
    let Some(program) = program::build() else {
        return;
    };
    let cluster = Cluster::start().await;
    let daemon = daemon(&cluster).await;
    let mut kubelet = GoKubelet::start(&program, &daemon.kubelet()).await;
    let registered = kubelet.registered(MOCK_GPU_NAME).await;
    let versions: Vec<_> = registered["versions"]
        .as_array()
        .into_iter()
        .flatten()
        .collect();
    for wanted in [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ] {
        assert!(
            versions.iter().any(|version| *version == wanted),
            "{registered}"
        );
    }
    for (version, device) in [("v1", "gpu-0"), ("v1beta1", "gpu-1")] {
        let name = format!("claim-{version}");
        let uid = cluster.gpu_claim(&name, &[&format!("gpus/{device}")]);
        let asked = |what: &str| json!({"do": what, "driver": MOCK_GPU_NAME, "version": version, "claims": [claim(&uid, &name)]});
        let first = kubelet.ask(asked("prepare")).await.expect("it is prepared");
        let prepared = of(&first, &uid);
        assert_eq!(prepared["error"], Value::Null, "{first}");
        let device_of_claim = &prepared["devices"][0];
        assert_eq!(
            (
                &device_of_claim["pool_name"],
                &device_of_claim["device_name"]
            ),
            (&json!("node-1/gpus"), &json!(device))
        );
        let cdi = device_of_claim["cdi_device_ids"][0]
            .as_str()
            .expect("a CDI device");
        assert!(
            daemon.only_cdi_file().devices().contains(&cdi.to_owned()),
            "{cdi}"
        );
        assert_eq!(
            kubelet.ask(asked("prepare")).await.as_ref(),
            Ok(&first),
            "again is the same"
        );
        let unprepared = kubelet
            .ask(asked("unprepare"))
            .await
            .expect("it is unprepared");
        assert_eq!(of(&unprepared, &uid)["error"], Value::Null, "{unprepared}");
        assert!(daemon.cdi_files().is_empty());
        assert!(
            kubelet.ask(asked("unprepare")).await.is_ok(),
            "again is no error"
        );
    }
}

#[tokio::test]
async fn failed_prepare_is_answered_with_reason() {
    let Some(program) = program::build() else {
        return;
    };
    let cluster = Cluster::start().await;
    let daemon = daemon(&cluster).await;
    let mut kubelet = GoKubelet::start(&program, &daemon.kubelet()).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    let good = cluster.gpu_claim("good", &["gpus/gpu-0"]);
    let claims = [
        claim(&good, "good"),
        claim("0b5fa9d5-5bd8-4f7a-8e0e-000000000000", "absent"),
    ];
    let asked = json!({"do": "prepare", "driver": MOCK_GPU_NAME, "claims": claims});
    let answer = kubelet.ask(asked).await.expect("the call itself succeeds");
    assert_eq!(
        answer["claims"].as_object().map(serde_json::Map::len),
        Some(2),
        "{answer}"
    );
    assert_eq!(answer["claims"][&good]["error"], Value::Null, "{answer}");
    let refused = answer["claims"]["0b5fa9d5-5bd8-4f7a-8e0e-000000000000"]["error"].as_str();
    assert!(
        refused.is_some_and(|words| words.contains("default/absent")),
        "{answer}"
    );
}

#[tokio::test]
async fn removed_driver_is_deregistered() {
    let Some(program) = program::build() else {
        return;
    };
    let cluster = Cluster::start().await;
    let daemon = daemon(&cluster).await;
    let mut kubelet = GoKubelet::start(&program, &daemon.kubelet()).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    daemon.take_out(MOCK_GPU_FILE);
    kubelet
        .event("the driver is deregistered", |event| {
            event["event"] == "deregistered"
        })
        .await;
}

#[tokio::test]
async fn health_of_devices_arrives_and_changes() {
    let Some(program) = program::build() else {
        return;
    };
    let cluster = Cluster::start().await;
    let daemon = daemon(&cluster).await;
    let mut kubelet = GoKubelet::start(&program, &daemon.kubelet()).await;
    let has = |event: &Value, device: &str, health: &str| {
        let wanted = format!("node-1/gpus/{device} {health}");
        let devices = event["devices"].as_array().into_iter().flatten();
        event["event"] == "health"
            && devices.into_iter().any(|device| {
                device
                    .as_str()
                    .is_some_and(|d| d.eq_ignore_ascii_case(&wanted))
            })
    };
    kubelet
        .event("gpu-2 is healthy", |event| has(event, "gpu-2", "HEALTHY"))
        .await;
    daemon.install_gpus(
        "pools: [{name: gpus, count: 4, extendedResource: example.com/gpu, unhealthy: [{index: 2, message: too hot}]}]\n",
    );
    kubelet
        .event("gpu-2 is unhealthy", |event| {
            has(event, "gpu-2", "UNHEALTHY")
        })
        .await;
}

#[tokio::test]
async fn pool_registers_with_each_new_kubelet() {
    let Some(program) = program::build() else {
        return;
    };
    let cluster = Cluster::start().await;
    let daemon = daemon(&cluster).await;
    let mut kubelet = GoKubelet::start(&program, &daemon.kubelet()).await;
    let is_listed = |event: &Value| {
        event["event"] == "devices" && event["resource"] == RESOURCE && devices(event).len() == 4
    };
    for _ in 0..2 {
        let list = kubelet.event("four devices are listed", is_listed).await;
        assert!(
            devices(&list).iter().all(|(_, health)| health == "Healthy"),
            "{list}"
        );
        let ids: Vec<_> = devices(&list).into_iter().map(|(id, _)| id).collect();
        let asked = json!({"do": "prefer", "resource": RESOURCE, "devices": ids, "size": 2});
        let preferred = kubelet.ask(asked).await.expect("it has a preference");
        let preferred = &preferred["container_responses"][0]["deviceIDs"];
        assert_eq!(preferred.as_array().map(Vec::len), Some(2), "{preferred}");
        let asked = json!({"do": "allocate", "resource": RESOURCE, "devices": preferred});
        let allocated = kubelet.ask(asked.clone()).await.expect("it is allocated");
        let cdi = allocated["container_responses"][0]["cdi_devices"]
            .as_array()
            .expect("CDI devices")
            .clone();
        let names: BTreeSet<_> = cdi
            .iter()
            .filter_map(|device| device["name"].as_str())
            .map(str::to_owned)
            .collect();
        assert_eq!(
            names,
            BTreeSet::from_iter(daemon.only_cdi_file().devices()),
            "{allocated}"
        );
        assert_eq!(kubelet.ask(asked).await, Ok(allocated), "again is the same");
        kubelet.forget();
        kubelet
            .ask(json!({"do": "restart"}))
            .await
            .expect("it restarts");
    }
}

#[tokio::test]
async fn kubelet_finds_restarted_daemon() {
    let Some(program) = program::build() else {
        return;
    };
    let cluster = Cluster::start().await;
    let mut daemon = daemon(&cluster).await;
    let mut kubelet = GoKubelet::start(&program, &daemon.kubelet()).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    let uid = cluster.gpu_claim("held", &["gpus/gpu-0"]);
    let asked =
        |what: &str| json!({"do": what, "driver": MOCK_GPU_NAME, "claims": [claim(&uid, "held")]});
    let before = kubelet.ask(asked("prepare")).await.expect("it is prepared");
    kubelet.forget();
    daemon.crash().await;
    kubelet.registered(MOCK_GPU_NAME).await;
    assert_eq!(kubelet.ask(asked("prepare")).await, Ok(before));
    kubelet
        .ask(asked("unprepare"))
        .await
        .expect("it is unprepared");
    assert!(daemon.cdi_files().is_empty());
}
