//! Families of metrics: names, types, units, names of labels, and the values of labels that are words of ours.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions};
use nodedock_tests::Root;
use nodedock_tests::cluster::{Cluster, NAMESPACE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use regex::Regex;

use crate::assert_frozen;
use crate::scene::{GPU, NIC, POOLS, Scene, write_pod};

/// Labels that have every value from the beginning.
const CLOSED: [&str; 2] = ["le", "limit"];

/// By family: type, unit, and labels with the values of those that are closed.
type Families = BTreeMap<String, (String, String, BTreeMap<String, BTreeSet<String>>)>;

async fn add(families: &mut Families, root: &Root) {
    // The same text as a person sees, after it was looked at by the parser of the standard.
    root.metrics().await;
    let text = root.admin("GET", "/metrics").await.body;
    let label = Regex::new(r#"(\w+)="((?:[^"\\]|\\.)*)""#).expect("a regular expression");
    let mut family = String::new();
    for line in text.lines() {
        let words = Vec::from_iter(line.split(' '));
        match words.as_slice() {
            ["#", "TYPE", name, kind] => {
                family = (*name).to_owned();
                families.entry(family.clone()).or_default().0 = (*kind).to_owned();
            }
            ["#", "UNIT", name, unit] => {
                families.entry((*name).to_owned()).or_default().1 = (*unit).to_owned()
            }
            ["#", ..] => {}
            _ => {
                let labels = &mut families.entry(family.clone()).or_default().2;
                for found in label.captures_iter(line) {
                    let values = labels.entry(found[1].to_owned()).or_default();
                    values.extend(CLOSED.contains(&&found[1]).then(|| found[2].to_owned()));
                }
            }
        }
    }
}

/// On a node without Kubernetes.
async fn alone(families: &mut Families) {
    let scene = Scene::start().await;
    let claims = [("gpu", "mock-gpu.nodedock.dev/gpus/gpu-0"), ("null", "null.example.com/null/null-0")];
    let pod = write_pod(&scene.daemon, "one", &claims, &[GPU, NIC]);
    scene.daemon.cli(&["prepare", "-f", &pod]).await.done();
    let mut client = PodResourcesListerClient::new(scene.daemon.pod_resources_channel());
    client.list(ListPodResourcesRequest {}).await.expect("an answer");
    add(families, &scene.daemon).await;
}

/// On a Kubernetes node, where a kubelet has a claim and a device.
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
    kubelet.prepare(MOCK_GPU_NAME, &[claim]).await.expect("it is prepared");
    cluster.api.wait_until("the slices are written", |state| !state.slices(MOCK_GPU_NAME).is_empty()).await;
    add(families, &daemon).await;
}

#[tokio::test]
async fn families_of_metrics_are_those_that_are_recorded() {
    let mut families = Families::new();
    alone(&mut families).await;
    in_cluster(&mut families).await;
    let label = |(name, values): (&String, &BTreeSet<String>)| match values.is_empty() {
        true => format!(" {name}"),
        false => format!(" {name}={}", Vec::from_iter(values.iter().map(String::as_str)).join("|")),
    };
    let lines = families.iter().map(|(name, (kind, unit, labels))| {
        format!("{name} {kind} unit={unit}{}\n", labels.iter().map(label).collect::<String>())
    });
    assert_frozen("metrics.txt", &lines.collect::<String>());
}
