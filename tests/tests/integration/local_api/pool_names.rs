//! A pool has one name, `NODE/POOL`, wherever a user or an exporter sees it, and that name is an input everywhere.

use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_tests::drivers::MOCK_GPU_NAME;
use nodedock_tests::{Daemon, Root};
use serde_json::{Value, json};

use super::{api, claim, machine};

/// Makes a claim, and returns the name of its device as the command prints it.
async fn printed(root: &Root, name: &str) -> String {
    let file = root.write(
        &format!("{name}.yaml"),
        claim(name, "{deviceClassName: gpu}"),
    );
    let made = root
        .cli(&["claim", "create", "-f", file.to_str().unwrap()])
        .await
        .done();
    made.rsplit_once("allocated: ")
        .expect("it is allocated")
        .1
        .trim()
        .to_owned()
}

/// `DRIVER/POOL/DEVICE` of everything that the pod-resources API lists.
async fn exported(daemon: &Daemon) -> Vec<String> {
    let mut client = PodResourcesListerClient::new(daemon.pod_resources_channel());
    let listed = client
        .list(ListPodResourcesRequest {})
        .await
        .expect("an answer")
        .into_inner();
    let containers = listed
        .pod_resources
        .into_iter()
        .flat_map(|pod| pod.containers);
    let claims = containers.flat_map(|container| container.dynamic_resources);
    let devices = claims.flat_map(|claim| claim.claim_resources);
    devices
        .map(|of| format!("{}/{}/{}", of.driver_name, of.pool_name, of.device_name))
        .collect()
}

/// An exporter that joins what pods have with slices for the attributes of the devices found nothing: the pools had two names.
#[tokio::test]
async fn pod_resources_join_with_slices() {
    let daemon = machine().await;
    let device = printed(&daemon, "one").await;
    daemon
        .cli(&["prepare", "--pod", "web", "--claim", "one"])
        .await
        .done();
    assert_eq!(exported(&daemon).await, std::slice::from_ref(&device));
    let slices = api(&daemon).await.slices().await.unwrap();
    let published: Vec<_> = slices
        .iter()
        .flat_map(|slice| {
            slice["spec"]["devices"]
                .as_array()
                .unwrap()
                .iter()
                .map(move |of| (slice, of))
        })
        .map(|(slice, of)| {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let spec = &slice["spec"];
            [
                text(&spec["driver"]),
                text(&spec["pool"]["name"]),
                text(&of["name"]),
            ]
            .join("/")
        })
        .collect();
    assert!(published.contains(&device), "{device} {published:?}");
    let (driver, named) = device.split_once('/').unwrap();
    let (pool, _) = named.rsplit_once('/').unwrap();
    let listed = daemon.cli(&["get", "devices", "-o", "json"]).await.json();
    let pools: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|of| of["pool"].clone())
        .collect();
    assert_eq!(pools, vec![json!(pool); 4]);
    let claims = daemon.cli(&["get", "claims", "-o", "json"]).await.json();
    assert_eq!(
        (
            &claims[0]["drivers"][0]["driver"],
            &claims[0]["drivers"][0]["devices"]
        ),
        (&json!(driver), &json!([named]))
    );
    daemon
        .cli(&["explain", "claim", "one"])
        .await
        .done_with(&[named]);
    // A device is found by its name, with the node and without.
    for name in [
        &device,
        named,
        named.split_once('/').unwrap().1,
        pool,
        "gpus",
    ] {
        let found = daemon
            .cli(&["get", "devices", name, "-o", "json"])
            .await
            .json();
        assert!(
            found
                .as_array()
                .unwrap()
                .iter()
                .any(|of| of["claims"][0]["name"] == "one"),
            "{name}: {found}"
        );
    }
    daemon
        .cli(&["get", "devices", "elsewhere/gpus"])
        .await
        .failed(1);
}

#[tokio::test]
async fn printed_and_short_names_are_accepted() {
    let daemon = machine().await;
    let device = printed(&daemon, "one").await;
    daemon.cli(&["claim", "delete", "one"]).await.done();
    let prepare = |device: String| {
        let daemon = &daemon;
        async move {
            daemon
                .cli(&["prepare", "--pod", "web", "--device", &device, "-o", "json"])
                .await
                .json()
        }
    };
    let answer = prepare(device.clone()).await;
    assert_eq!(answer["claims"][0]["outcome"], "prepared", "{answer}");
    let node = daemon.node().await.name;
    let short = device.replacen(&format!("/{node}/"), "/", 1);
    assert_ne!(short, device);
    assert_eq!(
        prepare(short).await,
        answer,
        "the same request by the shorthand"
    );
    assert_eq!(exported(&daemon).await, [device]);
    daemon.cli(&["unprepare", "default/web"]).await.done();
    for (bad, code, part) in [
        (
            format!("{MOCK_GPU_NAME}/elsewhere/gpus/gpu-0"),
            1,
            "has no pool elsewhere/gpus",
        ),
        (
            format!("{MOCK_GPU_NAME}/{node}/none/gpu-0"),
            1,
            "has no pool none",
        ),
        (
            format!("{MOCK_GPU_NAME}/{node}//gpu-0"),
            2,
            "DRIVER/POOL/DEVICE, and a pool as NODE/POOL",
        ),
        (
            format!("{MOCK_GPU_NAME}//gpus/gpu-0"),
            2,
            "DRIVER/POOL/DEVICE, and a pool as NODE/POOL",
        ),
        (
            format!("{MOCK_GPU_NAME}/{node}/gpus/"),
            2,
            "DRIVER/POOL/DEVICE, and a pool as NODE/POOL",
        ),
    ] {
        daemon
            .cli(&["prepare", "--pod", "bad", "--device", &bad])
            .await
            .failed_with(code, &[part]);
    }
    daemon.assert_empty().await;
}

#[tokio::test]
async fn own_claim_is_prepared_from_file() {
    let daemon = machine().await;
    let device = printed(&daemon, "one").await;
    let mut claim = daemon
        .cli(&["claim", "get", "one", "-o", "json"])
        .await
        .json();
    claim["status"]["reservedFor"] =
        json!([{ "resource": "pods", "name": "web", "uid": "web-uid" }]);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web", "namespace": "default", "uid": "web-uid" },
        "spec": {
            "resourceClaims": [{ "name": "gpu", "resourceClaimName": "one" }],
            "containers": [{ "name": "main", "image": "none", "resources": { "claims": [{ "name": "gpu" }] } }],
        },
    });
    let file = daemon.write("both.yaml", format!("{claim}\n---\n{pod}\n"));
    let answer = daemon
        .cli(&["prepare", "-f", file.to_str().unwrap(), "-o", "json"])
        .await
        .json();
    assert_eq!(answer["claims"][0]["outcome"], "prepared", "{answer}");
    assert_eq!(exported(&daemon).await, [device]);
}
