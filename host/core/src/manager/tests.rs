//! Requests of pods for claims and extended resources together.

pub(crate) mod scene;

use std::sync::Arc;

use super::pods::CHOICES_MAX;
use super::{PodOutcome, ResourceState};
use crate::manager::claims::PodSelector;
use crate::manager::claims::fixtures::{claim, driver, pod};
use crate::manager::devices::fixtures::{device, resource};
use nodedock_model::{
    ClaimState, ContainerAllocation, ContainerKind, Device, DeviceName, ObjectRef, PodRequest,
    Pool, PooledClaim, Problem, Uid,
};

use scene::{Daemon, FakeDriver, FakePlugin, Home, Reply, container, ends, request, settle};

/// Resources of a device plugin, and of a pool of the driver `gpu`.
const PLUGIN: (&str, u32) = ("nic", 1);
const POOL: (&str, u32) = ("gpu", 1);

/// A daemon with the driver `gpu`, whose pool has so many devices of the resource `gpu`, and a plugin of the resource `nic`.
struct Node {
    home: Home,
    daemon: Daemon,
    gpu: Arc<FakeDriver>,
    nic: Arc<FakePlugin>,
}

impl Node {
    async fn start(devices: usize) -> Self {
        let devices =
            (0..devices).map(|n| (DeviceName::new(n.to_string()).unwrap(), Device::default()));
        let pool = Pool {
            devices: devices.collect(),
            extended_resource: Some(resource("gpu")),
            ..Pool::default()
        };
        let (home, gpu) = (Home::new(), FakeDriver::with_pool(driver("gpu"), pool));
        Self::start_in(home, gpu, FakePlugin::wanting_pre_start()).await
    }

    async fn start_in(home: Home, gpu: Arc<FakeDriver>, nic: Arc<FakePlugin>) -> Self {
        let daemon = home.start_with("boot-1", std::time::Duration::ZERO);
        daemon.starts.devices();
        daemon.serve(&gpu);
        let listed: Vec<_> = (0..8).map(|n| device(&format!("nic-{n}"), &[1])).collect();
        daemon.plug("nic", &nic, &listed);
        daemon
            .until(|daemon| daemon.view("gpu").is_some_and(|view| view.active))
            .await;
        Self {
            home,
            daemon,
            gpu,
            nic,
        }
    }

    async fn restart(self) -> Self {
        let Self {
            home,
            daemon,
            gpu,
            nic,
        } = self;
        daemon.stop().await;
        Self::start_in(home, gpu, nic).await
    }

    /// Prepares a pod with claims of the source and resources of the container `main`.
    async fn prepare(
        &self,
        pod: &ObjectRef,
        claims: &[&str],
        resources: &[(&str, u32)],
    ) -> PodOutcome {
        self.daemon
            .prepare_request(wanted(pod, claims, resources), vec![])
            .await
    }

    fn put(&self, name: &str, device: &str, pod: &ObjectRef) {
        self.daemon.source.put(claim(name, &[device], &[pod]));
    }

    /// Prepares a claim of another pod for a device.
    async fn take(&self, device: &str) {
        let (name, other) = (format!("taken-{device}"), pod(&format!("other-{device}")));
        let taken = claim(&name, &[&format!("gpu/{device}")], &[&other]);
        let outcome = self
            .daemon
            .prepare_request(request(&other, &[&name]), vec![taken])
            .await;
        assert_eq!(ends(&outcome), ["prepared"]);
    }

    async fn start_container(
        &self,
        pod: &ObjectRef,
        name: &str,
    ) -> Result<super::ContainerAnswer, Problem> {
        self.daemon
            .manager
            .pods
            .start_container(pod.uid.clone(), name.to_owned(), "test".into())
            .await
    }

    fn state_of(&self, pod: &str) -> Option<ClaimState> {
        self.daemon.manager.pods.get(pod).map(|view| view.state())
    }
}

fn wanted(pod: &ObjectRef, claims: &[&str], resources: &[(&str, u32)]) -> PodRequest {
    let mut request = request(pod, claims);
    request.containers[0].resources = container("main", ContainerKind::App, resources).resources;
    request
}

/// The outcome of each claim and each resource, or the code of its problem.
fn all_ends(outcome: &PodOutcome) -> (Vec<&str>, Vec<&str>) {
    let resources = outcome.resources.iter();
    let resources = resources.map(|r| r.end.as_ref().map_or_else(|p| p.code.as_str(), |_| "ok"));
    (ends(outcome), resources.collect())
}

/// The UID of the pool claim of the container `main`.
fn pool_claim(pod: &ObjectRef) -> ObjectRef {
    PooledClaim::named(pod, "main", &resource("gpu"), &driver("gpu")).id
}

fn cdi(claim: &Uid, device: &str) -> String {
    format!("gpu.example.com/claim={claim}-{device}")
}

fn refusal() -> Problem {
    Problem::unavailable("plugin-broken", "the plugin is broken")
}

fn response() -> ContainerAllocation {
    let text = str::to_owned;
    ContainerAllocation {
        env: [(text("NIC"), text("0"))].into(),
        annotations: [(text("by"), text("plugin")), (text("only"), text("plugin"))].into(),
        cdi_devices: vec![text("nic.example.com/nic=0")],
        ..ContainerAllocation::default()
    }
}

#[tokio::test]
async fn answer_combines_claims_pools_and_plugins() {
    let (node, a) = (Node::start(2).await, pod("a"));
    node.put("one", "gpu/1", &a);
    node.gpu.reply("uid-one", Reply::Annotation("by", "claim"));
    node.nic.answer(response());
    let both = wanted(&a, &["one"], &[PLUGIN, POOL]);
    let outcome = node.daemon.prepare_request(both.clone(), vec![]).await;
    assert_eq!(all_ends(&outcome), (vec!["prepared"], vec!["ok", "ok"]));
    assert_eq!(outcome.resources[1].end.as_ref().unwrap()["nic-0"], [1]);
    let [main] = outcome.containers.as_slice() else {
        panic!("{outcome:#?}")
    };
    let names = [
        cdi(&Uid::new("uid-one").unwrap(), "1"),
        cdi(&pool_claim(&a).uid, "0"),
        "nic.example.com/nic=0".to_owned(),
    ];
    assert_eq!(
        main.allocation.cdi_devices, names,
        "claims come before plugins"
    );
    assert_eq!(main.allocation.env["NIC"], "0");
    let annotations: Vec<_> = main
        .allocation
        .annotations
        .values()
        .map(String::as_str)
        .collect();
    assert_eq!(annotations, ["claim", "plugin"], "the first counts");
    assert!(
        main.conflicts.len() == 1 && main.conflicts[0].contains("annotation by"),
        "{:?}",
        main.conflicts
    );

    assert_eq!(node.daemon.prepare_request(both, vec![]).await, outcome);
    let manager = &node.daemon.manager;
    let view = manager.pods.get("uid-a").unwrap();
    assert_eq!(
        (view.claims.len(), view.resources.len()),
        (1, 2),
        "a pool claim is a resource"
    );
    assert_eq!(
        (&view.containers, view.state()),
        (&outcome.containers, ClaimState::Prepared)
    );
    assert!(
        view.resources
            .iter()
            .all(|resource| resource.state == ResourceState::Allocated)
    );
    assert_eq!((manager.pods.list().len(), manager.pods.count()), (1, 1));

    let outcome = &node.daemon.unprepare_outcomes(&a).await[0];
    assert_eq!(all_ends(outcome), (vec!["unprepared"], vec!["ok", "ok"]));
    assert!(node.daemon.is_empty() && !manager.pods.might_need_unprepare("uid-a"));
    assert!(
        node.daemon.unprepare_outcomes(&a).await.is_empty(),
        "an unknown pod is success"
    );
}

#[tokio::test]
async fn own_claim_cannot_replace_pool_claim() {
    let (node, a) = (Node::start(1).await, pod("a"));
    let mut usurper = claim("usurper", &["gpu/7"], &[&a]);
    usurper.id = pool_claim(&a);
    let outcome = node
        .daemon
        .prepare_request(wanted(&a, &[], &[POOL]), vec![usurper])
        .await;
    assert_eq!(
        outcome.containers[0].allocation.cdi_devices,
        [cdi(&pool_claim(&a).uid, "0")]
    );
}

#[tokio::test]
async fn any_refusal_leaves_containers_unanswered() {
    let (node, a) = (Node::start(1).await, pod("a"));
    node.put("one", "gpu/0", &a);
    node.nic.refuse(refusal());
    let outcome = node.prepare(&a, &["one"], &[PLUGIN]).await;
    assert_eq!(
        all_ends(&outcome),
        (vec!["prepared"], vec!["plugin-broken"])
    );
    assert!(outcome.containers.is_empty());

    node.put("two", "gpu/0", &pod("b"));
    let outcome = node.prepare(&a, &["two"], &[PLUGIN]).await;
    assert_eq!(
        (all_ends(&outcome).1, outcome.containers.len()),
        (vec!["ok"], 0),
        "the claim is another's"
    );
    let outcome = node.prepare(&a, &["one"], &[PLUGIN]).await;
    assert_eq!(
        (all_ends(&outcome), outcome.containers.len()),
        ((vec!["prepared"], vec!["ok"]), 1)
    );
}

#[tokio::test]
async fn panicking_request_is_refused_whole() {
    let (node, a) = (Node::start(1).await, pod("a"));
    node.nic.panic();
    let outcome = node.prepare(&a, &["one"], &[PLUGIN]).await;
    assert_eq!(
        all_ends(&outcome),
        (vec!["interrupted"], vec!["interrupted"])
    );
    // What it had reserved is free with its claims, of which the plugin may have been called for one.
    node.daemon.unprepare(&a).await;
    let outcome = node.prepare(&pod("b"), &[], &[("nic", 8)]).await;
    assert_eq!(all_ends(&outcome).1, ["ok"]);
}

/// Each read of the pod's own claim comes after the choice of a device and before the prepare of the pool claim.
#[tokio::test]
async fn lost_race_causes_another_choice() {
    for (taken, end) in [(1, "ok"), (CHOICES_MAX, "device-held")] {
        let (node, a) = (Node::start(CHOICES_MAX + 1).await, pod("a"));
        node.put("own", &format!("gpu/{CHOICES_MAX}"), &a);
        node.daemon.source.shut(true);
        let race = async {
            for n in 0..taken {
                node.daemon.source.asked(n + 1).await;
                node.take(&n.to_string()).await;
                node.daemon.source.pass(n + 1);
            }
            node.daemon.source.shut(false);
        };
        let (outcome, ()) = tokio::join!(node.prepare(&a, &["own"], &[POOL]), race);
        assert_eq!(
            all_ends(&outcome),
            (vec!["prepared"], vec![end]),
            "{outcome:#?}"
        );
        if end == "ok" {
            assert!(
                outcome.resources[0]
                    .end
                    .as_ref()
                    .unwrap()
                    .contains_key("pool/1"),
                "{outcome:?}"
            );
            assert!(
                outcome.containers[0]
                    .allocation
                    .cdi_devices
                    .contains(&cdi(&pool_claim(&a).uid, "1"))
            );
        } else {
            assert!(outcome.containers.is_empty());
        }
    }
}

#[tokio::test]
async fn lost_race_without_alternative_is_refused() {
    let (node, a) = (Node::start(2).await, pod("a"));
    node.put("own", "gpu/1", &a);
    node.daemon.source.shut(true);
    let race = async {
        node.daemon.source.asked(1).await;
        node.take("0").await;
        node.daemon.source.shut(false);
    };
    let (outcome, ()) = tokio::join!(node.prepare(&a, &["own"], &[POOL]), race);
    assert_eq!(
        all_ends(&outcome),
        (vec!["prepared"], vec!["too-few-devices"])
    );
    assert!(outcome.containers.is_empty());
}

#[tokio::test]
async fn plugin_devices_are_freed_without_driver() {
    let (node, a) = (Node::start(2).await, pod("a"));
    node.put("one", "gpu/1", &a);
    node.prepare(&a, &["one"], &[PLUGIN, POOL]).await;
    node.daemon.retire(&node.gpu);
    // The allocation is gone after the first; the pool's device is still known by its claim.
    for resources in [2, 1] {
        let outcome = node.daemon.unprepare_outcomes(&a).await.remove(0);
        assert_eq!(
            (outcome.claims.len(), outcome.resources.len()),
            (1, resources),
            "{outcome:#?}"
        );
        assert!(
            outcome.claims[0].end.is_err() && outcome.resources[0].end.is_err(),
            "{outcome:#?}"
        );
        assert_eq!(outcome.resources[0].resource, resource("gpu"));
        assert!(
            outcome.resources[1..]
                .iter()
                .all(|resource| resource.end.is_ok()),
            "{outcome:#?}"
        );
    }
    let manager = &node.daemon.manager;
    let view = manager.pods.get("uid-a").unwrap();
    assert_eq!(
        (view.state(), view.claims.len()),
        (ClaimState::Unpreparing, 1)
    );
    let [gpu] = view.resources.as_slice() else {
        panic!("{view:#?}")
    };
    assert_eq!(
        (gpu.state, gpu.devices.contains_key("pool/0")),
        (ResourceState::Freeing, true)
    );
    assert!(manager.pods.might_need_unprepare("uid-a"));

    node.daemon.serve(&node.gpu);
    assert_eq!(
        all_ends(&node.daemon.unprepare_outcomes(&a).await[0]),
        (vec!["unprepared"], vec!["ok"])
    );
    assert!(manager.pods.get("uid-a").is_none() && !manager.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn unfreed_devices_are_freed_later() {
    let (node, a) = (Node::start(1).await, pod("a"));
    node.prepare(&a, &[], &[PLUGIN]).await;
    node.daemon.crash().await;
    assert_eq!(
        all_ends(&node.daemon.unprepare_outcomes(&a).await[0]).1,
        ["checkpoint-unavailable"]
    );
    assert!(node.daemon.manager.pods.might_need_unprepare("uid-a"));
    let node = node.restart().await;
    assert_eq!(
        all_ends(&node.daemon.unprepare_outcomes(&a).await[0]).1,
        ["ok"]
    );
    assert!(!node.daemon.manager.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn claimless_pods_are_found_by_name() {
    let node = Node::start(1).await;
    let (old, new) = (
        pod("a"),
        ObjectRef {
            uid: "uid-new".parse().unwrap(),
            ..pod("a")
        },
    );
    node.put("one", "gpu/0", &old);
    node.prepare(&old, &["one"], &[]).await;
    node.prepare(&new, &[], &[PLUGIN]).await;
    node.prepare(&pod("b"), &[], &[PLUGIN]).await;
    let manager = &node.daemon.manager;
    assert_eq!((manager.pods.list().len(), manager.pods.count()), (3, 3));
    let found = manager.pods.named(old.namespace.clone(), old.name.clone());
    assert_eq!(
        found.into_iter().map(|view| view.pod).collect::<Vec<_>>(),
        [old.clone(), new.clone()]
    );
    let named = PodSelector::Name(old.namespace.clone(), old.name.clone());
    let outcomes = manager.pods.unprepare(named, "test".into()).await.unwrap();
    let pods: Vec<_> = outcomes
        .iter()
        .map(|outcome| outcome.pod.uid.as_str())
        .collect();
    assert_eq!(pods, ["uid-a", "uid-new"]);
    let left: Vec<_> = manager
        .pods
        .list()
        .into_iter()
        .map(|view| view.pod)
        .collect();
    assert_eq!(left, [pod("b")]);
}

#[tokio::test]
async fn unprepare_waits_for_running_prepare() {
    let (node, a) = (Node::start(1).await, pod("a"));
    node.nic.shut(true);
    let mut prepare = Box::pin(node.prepare(&a, &[], &[PLUGIN]));
    assert!(futures::poll!(&mut prepare).is_pending());
    drop(prepare);
    node.nic.called(|calls| calls.allocate.len() == 1).await;
    let mut unprepare = Box::pin(node.daemon.unprepare_outcomes(&a));
    assert!(futures::poll!(&mut unprepare).is_pending());
    settle().await;
    node.nic.shut(false);
    assert_eq!(all_ends(&unprepare.await[0]).1, ["ok"]);
    assert!(!node.daemon.manager.pods.might_need_unprepare("uid-a"));
}

#[tokio::test]
async fn plugins_are_called_before_container_starts() {
    let (node, a) = (Node::start(1).await, pod("a"));
    node.put("one", "gpu/0", &a);
    let mut wanted = request(&a, &["one"]);
    wanted
        .containers
        .push(container("nic", ContainerKind::App, &[PLUGIN]));
    let outcome = node.daemon.prepare_request(wanted, vec![]).await;
    assert_eq!(
        node.start_container(&a, "main").await.unwrap(),
        outcome.containers[0]
    );
    assert!(node.nic.calls().pre_start.is_empty());
    for starts in [1, 2] {
        assert_eq!(
            node.start_container(&a, "nic").await.unwrap(),
            outcome.containers[1]
        );
        assert_eq!(node.nic.calls().pre_start.len(), starts);
    }
    let id = node.daemon.plug("nic", &node.nic, &[]);
    node.daemon.manager.devices.plugin_left(&id, &refusal());
    assert_eq!(
        node.start_container(&a, "nic").await.unwrap_err().code,
        "plugin-gone"
    );
    assert_eq!(
        node.start_container(&a, "other").await.unwrap_err().code,
        "no-such-container"
    );
    assert_eq!(
        node.start_container(&pod("b"), "main")
            .await
            .unwrap_err()
            .code,
        "no-such-pod"
    );
}

#[tokio::test]
async fn container_starts_only_once_prepared() {
    let (node, a) = (Node::start(1).await, pod("a"));
    node.nic.shut(true);
    let crash = async {
        node.nic.called(|calls| calls.allocate.len() == 1).await;
        node.daemon.crash().await;
        node.nic.shut(false);
    };
    tokio::join!(node.prepare(&a, &[], &[PLUGIN]), crash);
    let node = node.restart().await;
    let problem = node.start_container(&a, "main").await.unwrap_err();
    assert!(
        problem.code == "pod-not-prepared" && problem.message.contains("example.com/nic"),
        "{problem:?}"
    );
    assert_eq!(node.state_of("uid-a"), Some(ClaimState::Preparing));

    node.put("one", "gpu/0", &a);
    node.prepare(&a, &["one"], &[PLUGIN]).await;
    assert_eq!(node.state_of("uid-a"), Some(ClaimState::Prepared));
    node.daemon.retire(&node.gpu);
    node.daemon.unprepare(&a).await;
    let problem = node.start_container(&a, "main").await.unwrap_err();
    assert!(
        problem.code == "pod-not-prepared" && problem.message.contains("default/one"),
        "{problem:?}"
    );
    assert!(node.nic.calls().pre_start.is_empty());
}

#[tokio::test]
async fn containers_without_devices_need_nothing() {
    let (node, a) = (Node::start(1).await, pod("a"));
    let mut wanted = wanted(&a, &[], &[PLUGIN]);
    wanted
        .containers
        .push(container("plain", ContainerKind::App, &[]));
    let outcome = node.daemon.prepare_request(wanted, vec![]).await;
    assert_eq!(outcome.containers.len(), 2);
    assert_eq!(
        node.start_container(&a, "plain").await.unwrap(),
        outcome.containers[1]
    );
}
