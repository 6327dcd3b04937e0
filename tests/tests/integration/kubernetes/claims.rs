//! Claims from the API server, prepared and unprepared through the sockets that a kubelet knows.

use native_null::{Answer, Device, Options as PluginOptions, Plugin, Script};
use nodedock_stand_ins::api_server::Allocated;
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE, gpu_claim};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};

use super::node_with_gpus;

const NATIVE: &str = "null.example.com";

#[tokio::test]
async fn a_claim_is_prepared_and_unprepared_for_the_kubelet() {
    let (cluster, daemon) = node_with_gpus().await;
    let uid = cluster.gpu_claim("one", &["gpus/gpu-0", "gpus/gpu-1"]);
    let devices = daemon.kubelet_prepared(MOCK_GPU_NAME, ("one", &uid)).await;
    let named: Vec<_> =
        devices.iter().map(|device| (device.pool_name.as_str(), device.device_name.as_str())).collect();
    assert_eq!(named, [("node-1/gpus", "gpu-0"), ("node-1/gpus", "gpu-1")], "as the API server has them");
    let file = daemon.only_cdi_file();
    for device in &devices {
        let [name] = device.cdi_device_ids.as_slice() else { panic!("{device:?}") };
        assert!(file.text.contains(name.rsplit_once('=').unwrap().1), "{name} in {}", file.text);
    }
    assert_eq!(daemon.only_claim().await.state, "prepared");
    let again = daemon.kubelet_prepared(MOCK_GPU_NAME, ("one", &uid)).await;
    assert_eq!(again, devices, "the same question has the same answer");

    daemon.kubelet_unprepares(MOCK_GPU_NAME, ("one", &uid)).await.unwrap();
    assert!(daemon.claims().await.is_empty() && daemon.cdi_files().is_empty());
    daemon.kubelet_unprepares(MOCK_GPU_NAME, ("one", &uid)).await.unwrap();

    // Another claim of the name has nothing to do with the old one.
    cluster.api.delete("resourceclaims", NAMESPACE, "one");
    let new = cluster.api.allocate_claim(gpu_claim("one", &["gpus/gpu-1"]).uid("another-uid"));
    daemon.kubelet_prepared(MOCK_GPU_NAME, ("one", &new)).await;
    daemon.kubelet_unprepares(MOCK_GPU_NAME, ("one", &uid)).await.unwrap();
    let refused = daemon.kubelet_refused(MOCK_GPU_NAME, ("one", &uid)).await;
    assert!(refused.contains("replaced"), "{refused}");
    assert_eq!(daemon.only_claim().await.id.unwrap().uid, new);
}

#[tokio::test]
async fn a_native_plugin_of_ours_is_one_of_the_kubelet_s_too() {
    let cluster = Cluster::start().await;
    let daemon = cluster.daemon().await;
    let plugins = daemon.path().join("native");
    let device = Device { pool: NODE.to_owned(), device: "null-0".to_owned(), ..Device::default() };
    let options = PluginOptions::new(NATIVE, &daemon.state().join("plugins_registry"), &plugins);
    let _plugin = Plugin::start(options, Script::prepare(Answer::Devices(vec![device]))).await.unwrap();
    daemon.until_offered(NATIVE).await;
    let claim = Allocated::new(NAMESPACE, "one").node(NODE).device("null", NATIVE, NODE, "null-0");
    let uid = cluster.api.allocate_claim(claim);
    let devices = daemon.kubelet_prepared(NATIVE, ("one", &uid)).await;
    assert_eq!((devices[0].pool_name.as_str(), devices[0].device_name.as_str()), (NODE, "null-0"));
    daemon.kubelet_unprepares(NATIVE, ("one", &uid)).await.unwrap();
    assert!(daemon.claims().await.is_empty());
}

#[tokio::test]
async fn known_claims_are_prepared_and_all_are_unprepared_while_the_api_server_is_unreachable() {
    let (cluster, mut daemon) = node_with_gpus().await;
    let known = cluster.gpu_claim("known", &["gpus/gpu-0"]);
    let other = cluster.gpu_claim("other", &["gpus/gpu-1"]);
    daemon.kubelet_prepared(MOCK_GPU_NAME, ("known", &known)).await;
    cluster.api.stop().await;
    let refused = daemon.kubelet_refused(MOCK_GPU_NAME, ("other", &other)).await;
    assert!(refused.contains("API server"), "{refused}");
    daemon.kubelet_prepared(MOCK_GPU_NAME, ("known", &known)).await;
    // Nor does it take the API server to start.
    daemon.crash().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.kubelet_prepared(MOCK_GPU_NAME, ("known", &known)).await;
    daemon.kubelet_unprepares(MOCK_GPU_NAME, ("known", &known)).await.unwrap();
    daemon.kubelet_unprepares(MOCK_GPU_NAME, ("other", &other)).await.unwrap();
    assert!(daemon.claims().await.is_empty());
    cluster.api.start_again().await;
    daemon.until_conditions(&[]).await;
    daemon.kubelet_prepared(MOCK_GPU_NAME, ("other", &other)).await;
}

#[tokio::test]
async fn what_is_not_for_this_node_or_not_allocated_is_refused_and_reported_on_the_claim() {
    let (cluster, daemon) = node_with_gpus().await;
    let elsewhere = cluster.api.allocate_claim(gpu_claim("elsewhere", &["gpus/gpu-0"]).node("node-2"));
    let refused = daemon.kubelet_refused(MOCK_GPU_NAME, ("elsewhere", &elsewhere)).await;
    assert!(refused.contains("node-2") || refused.contains("this node"), "{refused}");
    let unallocated = cluster.gpu_claim("unallocated", &["gpus/gpu-0"]);
    cluster.api.deallocate_claim(NAMESPACE, "unallocated");
    let refused = daemon.kubelet_refused(MOCK_GPU_NAME, ("unallocated", &unallocated)).await;
    assert!(refused.contains("not allocated"), "{refused}");
    for name in ["elsewhere", "unallocated"] {
        cluster
            .api
            .wait_until(&format!("an event on {name}"), |state| {
                state.objects("events").iter().any(|event| {
                    event["involvedObject"]["kind"] == "ResourceClaim"
                        && event["involvedObject"]["name"] == name
                })
            })
            .await;
    }
}
