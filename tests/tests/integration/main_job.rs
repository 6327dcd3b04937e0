//! The main job: a driver arrives, a pod's claims are prepared, runtimes find the devices, nothing stays behind.

use crate::with_gpus;
use nodedock_tests::drivers::{
    DEVICE_NODES, DEVICE_NODES_FILE, Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME,
};
use nodedock_tests::{Daemon, Output, own_pool};
use serde_json::{Value, json};

/// Two claims, one by its name and one from a template; two containers, each with its own request of the first.
const MANIFEST: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: something-else}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: pair, namespace: default, uid: 11111111-aaaa}
spec:
  devices:
    requests:
      - {name: left, exactly: {deviceClassName: gpu}}
      - {name: right, exactly: {deviceClassName: gpu}}
status:
  reservedFor: [{resource: pods, name: two, uid: pod-two}]
  allocation:
    devices:
      results:
        - {request: left, driver: mock-gpu.nodedock.dev, pool: gpus, device: gpu-0}
        - {request: right, driver: mock-gpu.nodedock.dev, pool: gpus, device: gpu-1}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: two-slice-x7k2p
  namespace: default
  uid: 22222222-bbbb
  ownerReferences: [{apiVersion: v1, kind: Pod, name: two, uid: pod-two, controller: true}]
spec: {}
status:
  reservedFor: [{resource: pods, name: two, uid: pod-two}]
  allocation:
    devices:
      results:
        - {request: slice, driver: mock-gpu.nodedock.dev, pool: shared, device: gpu-4,
           consumedCapacity: {memory: 2Gi}, shareID: 33333333-cccc}
      config:
        - source: FromClaim
          requests: [slice]
          opaque:
            driver: mock-gpu.nodedock.dev
            parameters: {sharing: {strategy: TimeSlicing, timeSlicing: {interval: Short}}}
---
apiVersion: v1
kind: Pod
metadata: {name: two, namespace: default, uid: pod-two}
spec:
  resourceClaims:
    - {name: both, resourceClaimName: pair}
    - {name: slice, resourceClaimTemplateName: slice-template}
  containers:
    - {name: one, resources: {claims: [{name: both, request: left}]}}
    - {name: two, resources: {claims: [{name: both, request: right}, {name: slice}]}}
status:
  resourceClaimStatuses: [{name: slice, resourceClaimName: two-slice-x7k2p}]
"#;

const FORMS: [Form; 2] = [Form::Core, Form::Component];

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

async fn prepare(daemon: &Daemon, file: &str) -> Output {
    daemon.cli(&["prepare", "-f", file, "-o", "json"]).await
}

#[tokio::test]
async fn composed_pod_gets_and_frees_device() {
    for form in FORMS {
        let daemon = Daemon::start().await;
        daemon.install(MOCK_GPU, form);
        daemon.until_serving(MOCK_GPU_FILE).await;
        let device = format!("{MOCK_GPU_NAME}/gpus/gpu-0");
        let args = [
            "prepare", "--pod", "demo", "--device", &device, "-o", "json",
        ];
        let answer = daemon.cli(&args).await.done();
        assert_eq!(
            daemon.cli(&args).await.done(),
            answer,
            "a repeat gives the same bytes"
        );

        let answer: Value = serde_json::from_str(&answer).unwrap();
        let claim = answer["claims"][0].clone();
        let uid = claim["uid"].as_str().unwrap();
        let cdi = format!("{MOCK_GPU_NAME}/claim={uid}-gpu-0");
        assert_eq!(keys(&answer), ["claims", "containers", "pod"]);
        assert_eq!(keys(&answer["pod"]), ["name", "namespace", "uid"]);
        assert_eq!(
            keys(&claim),
            ["name", "namespace", "outcome", "problem", "uid"]
        );
        assert_eq!(
            (&claim["outcome"], &claim["problem"]),
            (&json!("prepared"), &Value::Null)
        );
        let container = json!({
            "name": "main", "cdiDevices": [cdi], "env": {}, "mounts": [], "deviceNodes": [], "annotations": {},
        });
        assert_eq!(answer["containers"], json!([container]));

        let file = daemon.only_cdi_file();
        assert_eq!(file.claim_uid(), uid);
        assert_eq!(file.identity["driver"], json!(MOCK_GPU_NAME));
        assert_eq!(file.identity["pods"], json!([answer["pod"]]));
        assert_eq!(file.devices(), [cdi]);
        assert!(
            file.env()
                .iter()
                .any(|variable| variable.starts_with("MOCK_GPU_0=GPU-")),
            "{file:?}"
        );
        assert!(
            file.env()
                .contains(&"MOCK_GPU_0_SHARING=Exclusive".to_owned()),
            "{file:?}"
        );
        let held = daemon
            .cli(&["get", "devices", "gpus/gpu-0", "-o", "json"])
            .await
            .json();
        assert_eq!(held[0]["claims"][0]["uid"], json!(uid));

        let answer = daemon
            .cli(&["unprepare", "default/demo", "-o", "json"])
            .await
            .json();
        assert_eq!(keys(&answer), ["claims", "pod"]);
        assert_eq!(
            (&answer["claims"][0]["outcome"], &answer["claims"][0]["uid"]),
            (&json!("unprepared"), &json!(uid))
        );
        assert_eq!(
            daemon.cli(&["get", "claims", "-o", "json"]).await.json(),
            json!([])
        );
        assert_eq!(
            daemon.cli(&["get", "pods", "-o", "json"]).await.json(),
            json!([])
        );
        assert_eq!(daemon.cdi_files(), []);
        daemon
            .cli(&["unprepare", "default/demo"])
            .await
            .failed_with(1, &["no pod \"default/demo\"", "--ignore-not-found"]);
        let again = [
            "unprepare",
            "default/demo",
            "--ignore-not-found",
            "-o",
            "json",
        ];
        let again = daemon.cli(&again).await.json();
        assert_eq!(again["claims"], json!([]));
    }
}

#[tokio::test]
async fn manifest_gives_containers_requested_devices() {
    let daemon = with_gpus().await;
    let file = daemon.write("pod.yaml", MANIFEST);
    let file = file.to_str().unwrap();
    let answer = prepare(&daemon, file).await.json();

    let claims: Vec<_> = answer["claims"]
        .as_array()
        .unwrap()
        .iter()
        .map(|claim| &claim["outcome"])
        .collect();
    assert_eq!(claims, ["prepared", "prepared"]);
    let left = format!("{MOCK_GPU_NAME}/claim=11111111-aaaa-gpu-0");
    let right = format!("{MOCK_GPU_NAME}/claim=11111111-aaaa-gpu-1");
    assert_eq!(answer["containers"][0]["name"], "one");
    assert_eq!(answer["containers"][0]["cdiDevices"], json!([left]));
    let second = answer["containers"][1]["cdiDevices"].as_array().unwrap();
    assert_eq!((second.len(), &second[0]), (2, &json!(right)));

    let files = daemon.cdi_files();
    let by_uid = |uid: &str| files.iter().find(|file| file.claim_uid() == uid).unwrap();
    assert_eq!(by_uid("11111111-aaaa").devices(), [left, right]);
    let slice = by_uid("22222222-bbbb");
    assert_eq!(json!(slice.devices()), json!([second[1]]));
    for variable in [
        "MOCK_GPU_4_SHARING=TimeSlicing",
        "MOCK_GPU_4_INTERVAL=Short",
        "MOCK_GPU_4_MEMORY=2Gi",
    ] {
        assert!(
            slice.env().contains(&variable.to_owned()),
            "{variable} in {:?}",
            slice.env()
        );
    }
    assert_eq!(prepare(&daemon, file).await.json(), answer);
    let pods = daemon.cli(&["get", "pods", "-o", "json"]).await.json();
    assert_eq!(
        (&pods[0]["state"], &pods[0]["containers"]),
        (&json!("prepared"), &answer["containers"])
    );

    daemon.cli(&["unprepare", "--uid", "pod-two"]).await.done();
    assert_eq!(daemon.cdi_files(), []);
    assert_eq!(daemon.claims().await, []);
}

#[tokio::test]
async fn pod_has_devices_of_two_drivers() {
    let daemon = Daemon::start().await;
    daemon.install(MOCK_GPU, Form::Component);
    // A tiny pool of a node that every machine has would do, but the driver offers useful nodes only.
    daemon.install(DEVICE_NODES, Form::Core);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_serving(DEVICE_NODES_FILE).await;
    let devices = daemon.devices().await;
    let Some(node) = devices
        .iter()
        .find(|device| own_pool(&device.pool) == "misc")
    else {
        return nodedock_tests::machine::skip(
            "a device node in a claim",
            "there is no fuse, kvm, tun or hwrng",
        );
    };
    let (node, gpu) = (
        format!("{}/misc/{}", node.driver, node.name),
        format!("{MOCK_GPU_NAME}/gpus/gpu-3"),
    );
    let args = [
        "prepare", "--pod", "mixed", "--device", &node, "--device", &gpu, "-o", "json",
    ];
    let answer = daemon.cli(&args).await.json();
    assert_eq!(
        answer["containers"][0]["cdiDevices"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let files = daemon.cdi_files();
    assert_eq!(files.len(), 2, "each driver has a file");
    let edits = &files[0].spec["devices"][0]["containerEdits"];
    let path = edits["deviceNodes"][0]["path"].as_str().unwrap();
    assert!(path.starts_with("/dev/"), "{edits}");
    daemon.cli(&["unprepare", "default/mixed"]).await.done();
    assert_eq!(daemon.cdi_files(), []);
}

#[tokio::test]
async fn pod_gets_only_its_group_claim() {
    let daemon = Daemon::start().await;
    daemon.install(MOCK_GPU, Form::Core);
    daemon.until_serving(MOCK_GPU_FILE).await;
    let group = "{apiGroup: scheduling.k8s.io, resource: podgroups, name: train, uid: uid-train}";
    let manifest = |of: &str| {
        let text = MANIFEST.replace(
            "[{resource: pods, name: two, uid: pod-two}]",
            &format!("[{group}]"),
        );
        text.replace(
            "\nspec:\n  resourceClaims:",
            &format!("\nspec:\n  schedulingGroup: {{podGroupName: {of}}}\n  resourceClaims:"),
        )
    };
    let file = daemon.path().join("pod.yaml");
    for (of, outcome) in [("eval", "refused"), ("train", "prepared")] {
        std::fs::write(&file, manifest(of)).unwrap();
        let output = prepare(&daemon, file.to_str().unwrap()).await;
        let answer: Value = serde_json::from_str(&output.stdout).unwrap();
        let claims = answer["claims"].as_array().unwrap();
        assert!(
            claims.iter().all(|claim| claim["outcome"] == outcome),
            "{answer}"
        );
        if outcome == "refused" {
            assert_eq!(
                (output.code, &claims[0]["problem"]["code"]),
                (Some(1), &json!("claim-not-reserved"))
            );
            assert!(
                output.stderr.contains("nor for its group eval"),
                "{output:?}"
            );
        }
    }
}
