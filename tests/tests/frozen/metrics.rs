//! Families of metrics: names, types, units, names of labels, and the values of labels that are words of ours.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions};
use nodedock_tests::Root;
use nodedock_tests::cluster::{Cluster, NAMESPACE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::metrics::Family;

use crate::assert_frozen;
use crate::scene::{GPU, NIC, POOLS, Scene, write_pod};

/// Labels that have every value from the beginning.
const CLOSED: [&str; 2] = ["le", "limit"];

/// Type, and labels with the values of those that are closed, by family.
type Families = BTreeMap<String, (String, BTreeMap<String, BTreeSet<String>>)>;

async fn add(families: &mut Families, root: &Root) {
    for Family {
        name,
        kind,
        samples,
    } in root.metrics().await.families
    {
        let labels = &mut families
            .entry(name)
            .or_insert_with(|| (kind, BTreeMap::new()))
            .1;
        for (label, value) in samples.into_keys().flat_map(|(_, labels)| labels) {
            let is_closed = CLOSED.contains(&label.as_str());
            labels
                .entry(label)
                .or_default()
                .extend(is_closed.then_some(value));
        }
    }
}

/// Adds the metrics of a node without Kubernetes.
async fn alone(families: &mut Families) {
    let scene = Scene::start().await;
    let claims = [
        ("gpu", "mock-gpu.nodedock.dev/gpus/gpu-0"),
        ("null", "null.example.com/null/null-0"),
    ];
    let pod = write_pod(&scene.daemon, "one", &claims, &[GPU, NIC]);
    scene.daemon.cli(&["prepare", "-f", &pod]).await.done();
    let mut client = PodResourcesListerClient::new(scene.daemon.pod_resources_channel());
    client
        .list(ListPodResourcesRequest {})
        .await
        .expect("an answer");
    add(families, &scene.daemon).await;
}

/// Adds the metrics of a Kubernetes node on which a kubelet has a claim and a device.
async fn in_cluster(families: &mut Families) {
    let cluster = Arc::new(Cluster::start().await);
    let daemon = cluster.daemon().await;
    let kubelet = Kubelet::start(&daemon.kubelet(), KubeletOptions::default()).await;
    daemon.install_gpus(POOLS);
    daemon.until_serving(MOCK_GPU_FILE).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    kubelet.devices(GPU, 2).await;
    kubelet.allocate(GPU, 1).await.expect("there are two");
    let claim = ClaimRef::new(NAMESPACE, "one", &cluster.gpu_claim("one", &["gpus/gpu-0"]));
    kubelet
        .driver(MOCK_GPU_NAME)
        .prepare(&[claim])
        .await
        .expect("it is prepared");
    daemon.until_log("slices written").await;
    add(families, &daemon).await;
}

#[tokio::test]
async fn metric_families_are_unchanged() {
    let mut families = Families::new();
    alone(&mut families).await;
    in_cluster(&mut families).await;
    let label = |(name, values): (&String, &BTreeSet<String>)| match values.is_empty() {
        true => format!(" {name}"),
        false => format!(
            " {name}={}",
            Vec::from_iter(values.iter().map(String::as_str)).join("|")
        ),
    };
    let lines = families.iter().map(|(name, (kind, labels))| {
        // The parser refuses units: no family has one.
        format!(
            "{name} {kind} unit={}\n",
            labels.iter().map(label).collect::<String>()
        )
    });
    assert_frozen("metrics.txt", &lines.collect::<String>());
}
