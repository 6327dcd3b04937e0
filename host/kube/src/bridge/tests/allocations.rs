//! Allocates of a kubelet: repeated, of one pod's containers, after pods that are gone, refused and cancelled; and the release of devices
//! that no pod uses.

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use std::time::Duration;
use tonic::Code;
use wire::device_plugin_client::DevicePluginClient;

use nodedock_stand_ins::kubelet::Kubelet;

use super::resources::{directory, kubelet, listed, sockets};
use super::*;
use crate::bridge::device_plugins::in_use::IN_USE_UNKNOWN;
use crate::extended_resources::LocalPool;

fn request(letters: &str) -> wire::AllocateRequest {
    let devices_ids = letters
        .chars()
        .map(|letter| format!("p/{letter}"))
        .collect();
    wire::AllocateRequest {
        container_requests: vec![wire::ContainerAllocateRequest { devices_ids }],
    }
}

async fn client(node: &Node) -> DevicePluginClient<Channel> {
    let socket = directory(node).join(sockets(node).remove(0));
    DevicePluginClient::new(connect(&socket).await.unwrap())
}

/// A node with devices `a` to `f` that a kubelet knows.
struct Admission {
    node: Node,
    kubelet: Kubelet,
    client: DevicePluginClient<Channel>,
    running: Running,
    extended_resources: ExtendedResources,
}

impl Admission {
    /// Starts a bridge in which claims serve containers of one pod for `admission`, and unused claims are released after `unused`.
    async fn new(admission: Duration, unused: Duration) -> Self {
        let node = Node::with_grace(PATIENCE);
        node.offer("abcdef");
        let kubelet = kubelet(&node).await;
        let parts = node.parts();
        let extended_resources = parts.extended_resources.clone();
        let times = BridgeTimes {
            admission,
            unused,
            unseen: unused,
            ..parts.times
        };
        let running = Running::start(BridgeParts { times, ..parts });
        listed(&kubelet, "abcdef").await;
        let client = client(&node).await;
        Self {
            node,
            kubelet,
            client,
            running,
            extended_resources,
        }
    }

    fn allocating(&self, letters: &str) -> impl Future<Output = Result<String, Status>> + use<> {
        let (mut client, request) = (self.client.clone(), request(letters));
        async move {
            let answer = client
                .allocate(request)
                .await?
                .into_inner()
                .container_responses
                .remove(0);
            assert!(
                answer.envs.is_empty() && answer.devices.is_empty() && answer.mounts.is_empty()
            );
            let of_claim = |name: &wire::CdiDevice| name.name.rsplit('-').next().map(str::to_owned);
            assert!(
                answer
                    .cdi_devices
                    .iter()
                    .all(|device| of_claim(device).is_some())
            );
            Ok(format!(
                "{} of {}",
                answer.cdi_devices.len(),
                answer.annotations.len()
            ))
        }
    }

    /// Allocates devices. Returns the number of CDI devices in the answer, and of keys of annotations.
    async fn allocate(&self, letters: &str) -> Result<String, Status> {
        soon(self.allocating(letters)).await
    }

    fn calls(&self) -> Vec<String> {
        self.node.driver.calls()
    }
}

/// Returns the number of the kubelet's lists of pods with an outcome.
fn lists(running: &Running, outcome: &str) -> u64 {
    let labels = [("outcome", outcome.to_owned())];
    running
        .bridge
        .metrics()
        .in_use_looks
        .get_or_create(&labels)
        .get()
}

const LONG: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn repeated_allocate_reuses_the_claim() {
    let admission = Admission::new(LONG, LONG).await;
    for letters in ["ab", "ab"] {
        assert_eq!(admission.allocate(letters).await.unwrap(), "2 of 1");
    }
    assert_eq!(
        admission.allocate("a").await.unwrap(),
        "1 of 1",
        "of an init container"
    );
    assert_eq!(
        admission.allocate("abc").await.unwrap(),
        "3 of 1",
        "the first of a key counts"
    );
    assert_eq!(
        admission.calls(),
        ["prepare ab", "prepare c"],
        "repeated ones are answered from the record"
    );
    assert_eq!(admission.node.manager.records.claims().len(), 2);
    assert_eq!(admission.allocate("").await.unwrap(), "0 of 0");

    let unknown = admission.allocate("z").await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    assert!(
        unknown
            .message()
            .contains("\"p/z\" is no device of example.com/gpu"),
        "{unknown:?}"
    );
    admission.node.driver.refuse(Some(Problem::conflict(
        "device-held",
        "claim default/c holds it",
    )));
    let held = admission.allocate("d").await.unwrap_err();
    assert_eq!(held.code(), Code::FailedPrecondition);
    assert!(
        held.message().contains("claim default/c holds it"),
        "{held:?}"
    );
    let failures = [("resource", "example.com/gpu".to_owned())];
    assert_eq!(
        admission
            .running
            .bridge
            .metrics()
            .allocation_failures
            .get_or_create(&failures)
            .get(),
        2
    );

    let mut client = admission.client.clone();
    let container = wire::ContainerPreferredAllocationRequest {
        available_device_ids: vec!["p/a".to_owned(), "p/b".to_owned()],
        must_include_device_ids: vec!["p/b".to_owned()],
        allocation_size: 1,
    };
    let asked = wire::PreferredAllocationRequest {
        container_requests: vec![container],
    };
    let preferred = client
        .get_preferred_allocation(asked)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(preferred.container_responses[0].device_ids, ["p/b"]);
    client
        .pre_start_container(wire::PreStartContainerRequest::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn withdrawn_pool_keeps_only_allocated_devices() {
    let admission = Admission::new(LONG, LONG).await;
    admission.allocate("ab").await.unwrap();
    admission.node.driver.shut.send_replace(true);
    let under_way = tokio::spawn(admission.allocating("c"));
    while admission.node.driver.call().await != "prepare c" {}

    let extended_resources = &admission.extended_resources;
    extended_resources.set_fixed(Mechanism::Dra, 7);
    let in_use = soon(extended_resources.lists_of(7)).await;
    let pool = LocalPool::new(&name(GPU), &"p".parse().unwrap());
    assert_eq!(in_use, [(pool, [Mechanism::DevicePlugin].into())].into());
    listed(&admission.kubelet, "ABC").await;
    let refused = admission.allocate("d").await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
    admission.node.driver.shut.send_replace(false);
    assert_eq!(soon(under_way).await.unwrap().unwrap(), "1 of 1");
    assert_eq!(
        admission.allocate("ab").await.unwrap(),
        "2 of 1",
        "a container starts again"
    );

    for claim in admission.node.manager.records.claims() {
        admission.node.unprepare(&claim.id).await;
    }
    admission
        .running
        .until("withdrawn", |running| running.bridge.resources().is_empty())
        .await;
    admission
        .running
        .until("free", |_| extended_resources.in_use().is_empty())
        .await;
    extended_resources.set_fixed(Mechanism::DevicePlugin, 8);
    listed(&admission.kubelet, "abcdef").await;
}

#[tokio::test]
async fn gone_pods_claim_is_released_first() {
    let admission = Admission::new(Duration::ZERO, LONG).await;
    // A kubelet that lists no pod does not know of them yet.
    for letters in ["cd", "d"] {
        admission.allocate(letters).await.unwrap();
    }
    assert_eq!(admission.calls(), ["prepare cd"]);
    let pod = admission
        .kubelet
        .allocate("example.com/gpu", 1)
        .await
        .unwrap();
    assert_eq!(pod.ids, ["p/a"]);
    admission.allocate("a").await.unwrap();
    assert_eq!(admission.calls(), ["prepare a"], "a pod uses it");
    assert_eq!(admission.allocate("bd").await.unwrap(), "2 of 1");
    assert_eq!(admission.calls(), ["unprepare cd", "prepare bd"]);

    admission
        .node
        .driver
        .refuse(Some(Problem::unavailable("driver-busy", "it is busy")));
    let refused = admission.allocate("b").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let message = refused.message();
    assert!(
        message.contains("p/b, p/d of a pod that is gone") && message.contains("it is busy"),
        "{message}"
    );
}

#[tokio::test]
async fn cancelled_allocate_completes_and_blocks_device() {
    let admission = Admission::new(LONG, LONG).await;
    admission.node.driver.shut.send_replace(true);
    let cancelled = tokio::spawn(admission.allocating("ab"));
    assert_eq!(admission.node.driver.call().await, "prepare ab");
    cancelled.abort();
    let again = tokio::spawn(admission.allocating("b"));
    admission.running.looked().await;
    assert!(
        !again.is_finished() && admission.calls().is_empty(),
        "one at a time for a device"
    );
    admission.node.driver.shut.send_replace(false);
    assert_eq!(soon(again).await.unwrap().unwrap(), "1 of 1");
    assert_eq!(
        admission.calls(),
        [""; 0],
        "it was prepared by the first call"
    );
    admission.running.drain().await;
}

#[tokio::test]
async fn allocate_waits_only_for_loading_driver() {
    let admission = Admission::new(LONG, LONG).await;
    let node = &admission.node;
    node.retire(GPU, DriverState::Compiled);
    let waiting = tokio::spawn(admission.allocating("a"));
    admission.running.looked().await;
    assert!(!waiting.is_finished());
    node.published.lock().unwrap().take();
    node.offer("abcdef");
    assert_eq!(soon(waiting).await.unwrap().unwrap(), "1 of 1");
    node.retire(GPU, DriverState::Failed);
    assert_eq!(
        admission.allocate("b").await.unwrap_err().code(),
        Code::Unavailable
    );
}

#[tokio::test]
async fn container_may_span_several_claims() {
    let node = Node::new();
    let ids = || (0..70).map(|n| format!("{n:02}"));
    node.publish(published(
        "p",
        Some(resource()),
        ids().map(|id| (id, None, "")),
    ));
    let kubelet = kubelet(&node).await;
    let _running = node.start();
    kubelet.devices("example.com/gpu", 70).await;
    let mut client = client(&node).await;
    let devices_ids = ids().map(|id| format!("p/{id}")).collect();
    let container_requests = vec![wire::ContainerAllocateRequest { devices_ids }];
    for _ in 0..2 {
        let request = wire::AllocateRequest {
            container_requests: container_requests.clone(),
        };
        let answer = soon(client.allocate(request)).await.unwrap().into_inner();
        assert_eq!(answer.container_responses[0].cdi_devices.len(), 70);
        assert_eq!(
            node.manager.records.claims().len(),
            3,
            "the same again is the same claims"
        );
    }
}

#[tokio::test]
async fn ended_pods_devices_are_released() {
    let admission = Admission::new(LONG, Duration::ZERO).await;
    let first = admission
        .kubelet
        .allocate("example.com/gpu", 1)
        .await
        .unwrap();
    admission
        .kubelet
        .allocate("example.com/gpu", 1)
        .await
        .unwrap();
    assert_eq!(admission.calls(), ["prepare a", "prepare b"]);
    let before = lists(&admission.running, "answered");
    admission
        .running
        .until("it looks", |running| {
            lists(running, "answered") > before + 3
        })
        .await;
    assert_eq!(admission.calls(), [""; 0]);
    admission
        .node
        .driver
        .refuse(Some(Problem::unavailable("driver-busy", "it is busy")));
    admission.kubelet.free(&first);
    assert_eq!(admission.node.driver.call().await, "unprepare a");
    admission.node.driver.refuse(None);
    admission
        .running
        .until("released", |running| {
            running.bridge.metrics().released.get() == 1
        })
        .await;
    assert_eq!(admission.node.manager.records.claims().len(), 1);
    assert!(admission.calls().iter().all(|call| call == "unprepare a"));
}

#[tokio::test]
async fn incomplete_pod_lists_release_nothing() {
    let node = Node::new();
    node.offer("a");
    let kubelet = kubelet(&node).await;
    let own = |text: &str| ObjectName::new(text).unwrap();
    let parts = node.parts();
    let running = Running::start(BridgeParts {
        own_pod: Some((own("default"), own("own"))),
        ..parts
    });
    listed(&kubelet, "a").await;
    kubelet.allocate("example.com/gpu", 1).await.unwrap();
    running
        .until("it looks", |running| lists(running, "failed") > 3)
        .await;
    assert_eq!(running.condition("pod-resources-away"), None);
    tokio::time::pause();
    tokio::time::advance(IN_USE_UNKNOWN).await;
    running.condition_comes("pod-resources-away").await;
    assert_eq!(node.driver.calls(), ["prepare a"]);
}
