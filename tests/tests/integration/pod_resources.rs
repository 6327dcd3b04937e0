//! The pod-resources API on its own socket.

use std::os::unix::fs::PermissionsExt;

use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_proto::kubelet::pod_resources::v1::{
    AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest, PodResources,
};
use nodedock_proto::kubelet::pod_resources::v1alpha1;
use nodedock_tests::Daemon;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use tonic::Code;
use tonic::transport::Channel;

use crate::with_gpus;

fn client(daemon: &Daemon) -> PodResourcesListerClient<Channel> {
    PodResourcesListerClient::new(daemon.pod_resources_channel())
}

async fn list(daemon: &Daemon) -> Vec<PodResources> {
    let answer = client(daemon).list(ListPodResourcesRequest {}).await;
    answer.expect("an answer").into_inner().pod_resources
}

/// `CONTAINER CLAIM DRIVER/POOL/DEVICE CDI` of each device.
fn devices(pod: &PodResources) -> Vec<String> {
    let mut lines = Vec::new();
    for container in &pod.containers {
        for claim in &container.dynamic_resources {
            for r in &claim.claim_resources {
                let cdi: Vec<_> = r
                    .cdi_devices
                    .iter()
                    .map(|device| device.name.as_str())
                    .collect();
                let device = format!("{}/{}/{}", r.driver_name, r.pool_name, r.device_name);
                lines.push(format!(
                    "{} {} {device} {}",
                    container.name,
                    claim.claim_name,
                    cdi.join(",")
                ));
            }
        }
    }
    lines
}

#[tokio::test]
async fn pods_are_listed_after_crash() {
    let mut daemon = with_gpus().await;
    assert!(list(&daemon).await.is_empty());
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let before = list(&daemon).await;
    let [one] = before.as_slice() else {
        panic!("{before:#?}")
    };
    assert_eq!(
        (one.name.as_str(), one.namespace.as_str()),
        ("one", "default")
    );
    let cdi = format!("{MOCK_GPU_NAME}/claim=claim-a-gpu-0");
    assert_eq!(
        devices(one),
        [format!(
            "main a {MOCK_GPU_NAME}/{}/gpus/gpu-0 {cdi}",
            daemon.node().await.name
        )]
    );
    daemon.crash().await;
    assert_eq!(list(&daemon).await, before);
    daemon.restart().await;
    assert_eq!(list(&daemon).await, before);

    let request = GetPodResourcesRequest {
        pod_name: "one".to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let got = client(&daemon)
        .get(request.clone())
        .await
        .expect("an answer")
        .into_inner();
    assert_eq!(got.pod_resources.as_ref(), Some(one));
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.unprepare(&pod("one")).await;
    let refused = client(&daemon).get(request).await.expect_err("it is gone");
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::NotFound, "pod one in namespace default not found")
    );
    assert!(list(&daemon).await.is_empty());
}

#[tokio::test]
async fn old_agents_see_no_claims() {
    let daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let mut old = v1alpha1::pod_resources_lister_client::PodResourcesListerClient::new(
        daemon.pod_resources_channel(),
    );
    let answer = old
        .list(v1alpha1::ListPodResourcesRequest {})
        .await
        .expect("an answer")
        .into_inner();
    let [one] = answer.pod_resources.as_slice() else {
        panic!("{answer:#?}")
    };
    let [main] = one.containers.as_slice() else {
        panic!("{one:#?}")
    };
    assert_eq!(
        (one.name.as_str(), main.name.as_str(), main.devices.len()),
        ("one", "main", 0)
    );
    let answer = client(&daemon)
        .get_allocatable_resources(AllocatableResourcesRequest {})
        .await;
    assert!(answer.expect("an answer").into_inner().devices.is_empty());
}

#[tokio::test]
async fn stale_socket_is_replaced_and_private() {
    let mut daemon = with_gpus().await;
    let path = daemon.pod_resources();
    for _ in 0..2 {
        let mode = std::fs::metadata(&path)
            .expect("the socket is there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        let dir = std::fs::read_dir(path.parent().expect("a directory")).expect("it can be read");
        assert_eq!(dir.count(), 1, "no temporary name is left");
        assert!(list(&daemon).await.is_empty());
        daemon.crash().await;
    }
}

#[tokio::test]
async fn calls_beyond_the_limit_are_refused() {
    let daemon = with_gpus().await;
    // So many on one connection that a busy machine does not serve them below the limit.
    let client = client(&daemon);
    let calls = (0..1000).map(|_| {
        let mut client = client.clone();
        async move { client.list(ListPodResourcesRequest {}).await }
    });
    let answers = futures::future::join_all(calls).await;
    let refused: Vec<_> = answers
        .iter()
        .filter_map(|answer| answer.as_ref().err())
        .collect();
    assert!(answers.len() - refused.len() >= 10, "a burst is answered");
    assert!(!refused.is_empty());
    for status in refused {
        assert_eq!(
            (status.code(), status.message()),
            (Code::ResourceExhausted, "rejected by rate limit")
        );
    }
}
