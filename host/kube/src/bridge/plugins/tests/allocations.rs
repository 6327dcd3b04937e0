//! Allocates of a kubelet: repeated, of one pod's containers, after pods that are gone, refused and abandoned.

use std::time::Duration;

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tokio::sync::Semaphore;

use super::super::in_use::{InUse, InUseError, InUseSource};
use super::*;
use nodedock_model::limit;

pub(super) fn request(letters: &str) -> wire::AllocateRequest {
    let container = wire::ContainerAllocateRequest { devices_ids: ids(letters).into_iter().collect() };
    wire::AllocateRequest { container_requests: vec![container] }
}

/// Devices that pods have; none: the kubelet does not tell.
#[derive(Default)]
pub(super) struct PlayedPods(pub(super) Mutex<Option<String>>);

#[async_trait]
impl InUseSource for PlayedPods {
    async fn list(&self, _: Duration) -> Result<InUse, InUseError> {
        let letters = self.0.lock().unwrap().clone();
        let letters = letters.ok_or(InUseError::Incomplete("no pod"))?;
        Ok(InUse(BTreeMap::from([(resource("gpu"), ids(&letters))])))
    }
}

/// Allocations without sockets.
pub(super) struct Play {
    pub(super) pools: Arc<Pools>,
    pub(super) claims: Arc<PlayedClaims>,
    pub(super) pods: Arc<PlayedPods>,
    pub(super) allocations: Arc<Allocations>,
    pub(super) tasks: Tasks,
}

impl Play {
    pub(super) fn new() -> Self {
        let (claims, pods, tasks) =
            (Arc::<PlayedClaims>::default(), Arc::<PlayedPods>::default(), Tasks::new());
        let pools = Arc::new(Pools::new());
        let allocations =
            Allocations::new(claims.clone(), pools.clone(), pods.clone(), Arc::default(), tasks.clone());
        Self { pools, claims, pods, allocations: Arc::new(allocations), tasks }
    }

    /// The devices that are answered, as letters.
    pub(super) async fn allocate(&self, letters: &str) -> Result<String, Problem> {
        let offer = Arc::new(offer("gpu", "abcdefgh"));
        let answer = self.allocations.allocate(&resource("gpu"), offer, ids(letters), "r-1".into()).await?;
        let names = answer.cdi_devices;
        let (all, own): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name.ends_with("=all"));
        assert_eq!(all.len(), 1, "each name is answered once");
        Ok(own.iter().map(|name| name.trim_start_matches("example.com/gpu=")).collect())
    }
}

fn old() -> Duration {
    limit::ADMISSION + Duration::from_secs(1)
}

#[tokio::test(start_paused = true)]
async fn the_same_devices_are_the_same_claim_and_containers_of_a_pod_share() {
    let play = Play::new();
    assert_eq!(play.allocate("ab").await.unwrap(), "ab");
    assert_eq!(play.allocate("ab").await.unwrap(), "ab");
    assert_eq!(play.allocate("a").await.unwrap(), "a", "of an init container");
    assert_eq!(play.allocate("abc").await.unwrap(), "abc");
    let calls = play.claims.calls();
    assert_eq!(calls, ["prepare ab", "prepare ab", "prepare ab", "prepare ab", "prepare c"]);
    assert_eq!(play.claims.held().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_claim_of_a_pod_that_is_gone_is_given_up_before_its_devices_are_given_again() {
    let play = Play::new();
    *play.pods.0.lock().unwrap() = Some(String::new());
    play.allocate("ab").await.unwrap();
    play.allocate("c").await.unwrap();
    tokio::time::advance(old()).await;
    play.claims.calls();
    assert_eq!(play.allocate("bd").await.unwrap(), "bd");
    assert_eq!(play.claims.calls(), ["unprepare ab", "prepare bd"]);
    assert_eq!(play.allocate("c").await.unwrap(), "c");
    assert_eq!(
        play.claims.calls(),
        ["unprepare c", "prepare c"],
        "another pod's, though it has the same name"
    );

    // Where pods still have some of it, or nobody knows, nothing is given up.
    tokio::time::advance(old()).await;
    for pods in [Some("d".to_owned()), None] {
        *play.pods.0.lock().unwrap() = pods;
        assert_eq!(play.allocate("b").await.unwrap(), "b");
        assert_eq!(play.claims.calls(), ["prepare bd"]);
        tokio::time::advance(old()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_driver_does_not_give_up_is_told_and_waited_for_no_longer_than_it_helps() {
    let play = Play::new();
    *play.pods.0.lock().unwrap() = Some(String::new());
    play.allocate("ab").await.unwrap();
    tokio::time::advance(old()).await;
    *play.claims.refusal.lock().unwrap() = Some(Problem::unavailable("driver-away", "it is loading"));
    let problem = play.allocate("a").await.unwrap_err();
    assert_eq!(problem.code, "devices-not-given-up");
    assert!(problem.message.contains("p/a, p/b") && problem.message.ends_with("it is loading"), "{problem}");
    *play.claims.refusal.lock().unwrap() = None;
    *play.claims.gate.lock().unwrap() = Some(Arc::new(Semaphore::new(0)));
    let begun = tokio::time::Instant::now();
    let problem = play.allocate("a").await.unwrap_err();
    assert!(problem.message.ends_with("no answer within 15 s"), "{problem}");
    assert_eq!(begun.elapsed().as_secs(), limit::GIVE_UP_WAIT.as_secs());
    *play.claims.gate.lock().unwrap() = None;
    assert_eq!(play.allocate("a").await.unwrap(), "a");
}

#[tokio::test(start_paused = true)]
async fn an_allocate_goes_on_when_the_kubelet_goes_and_its_devices_wait_for_it() {
    let play = Play::new();
    let gate = Arc::new(Semaphore::new(0));
    *play.claims.gate.lock().unwrap() = Some(gate.clone());
    assert!(tokio::time::timeout(Duration::from_secs(1), play.allocate("ab")).await.is_err());
    assert_eq!(play.claims.prepared.load(Relaxed), 0);
    let again = play.allocate("b");
    tokio::pin!(again);
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut again).await.is_err());
    assert_eq!(play.claims.calls(), ["prepare ab"], "one at a time for a device");
    gate.add_permits(2);
    assert_eq!(again.await.unwrap(), "b");
    assert_eq!((play.claims.calls(), play.claims.prepared.load(Relaxed)), (vec!["prepare ab".to_owned()], 2));
    assert!(play.tasks.drain(PATIENCE).await);
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_loads_is_waited_for_and_one_that_does_not_come_is_not() {
    let play = Play::new();
    let away = Problem::unavailable("driver-unknown", "driver gpu.example.com is not here");
    let refuse = |problem| *play.claims.refusal.lock().unwrap() = problem;
    refuse(Some(away.clone()));
    play.pools.driver_is(DriverNow::Away);
    let allocated = play.allocate("a");
    tokio::pin!(allocated);
    let waited = tokio::time::timeout(Duration::from_secs(2), &mut allocated).await;
    assert!(waited.is_err(), "after a start everything may still come");
    play.pools.driver_is(DriverNow::Comes);
    refuse(None);
    assert!(tokio::time::timeout(Duration::from_secs(2), &mut allocated).await.is_err());
    play.pools.driver_is(DriverNow::Serves);
    assert_eq!(allocated.await.unwrap(), "a");
    assert_eq!(play.claims.calls(), ["prepare a", "prepare a"]);

    refuse(Some(away.clone()));
    let took = async |driver| {
        play.pools.driver_is(driver);
        let begun = tokio::time::Instant::now();
        assert_eq!(play.allocate("b").await.unwrap_err(), away);
        begun.elapsed().as_secs()
    };
    assert_eq!(took(DriverNow::Comes).await, limit::BRIDGE_DRIVER_WAIT.as_secs());
    assert_eq!(took(DriverNow::Away).await, 0);
    assert_eq!(took(DriverNow::Serves).await, 0, "it is not the driver that is missing");
}

#[tokio::test(start_paused = true)]
async fn a_container_may_have_more_devices_than_a_claim() {
    let play = Play::new();
    let all: BTreeSet<String> = (0..70).map(|n| format!("p/{n:02}")).collect();
    let device = |id: &String| PluginDevice { id: id.clone(), healthy: true, numa_nodes: vec![] };
    let offer = Arc::new(PoolOffer { driver: driver("gpu"), devices: all.iter().map(device).collect() });
    let gpu = resource("gpu");
    for _ in 0..2 {
        let allocated = play.allocations.allocate(&gpu, offer.clone(), all.clone(), "r".into());
        assert_eq!(allocated.await.unwrap().cdi_devices.len(), 71);
        let held = play.claims.held();
        assert_eq!(held.len(), 3, "the same again is the same claims");
        assert!(held.iter().all(|held| held.devices.len() <= limit::ALLOCATED_DEVICES_MAX));
    }
}

#[tokio::test]
async fn a_kubelet_is_told_in_words_why_not() {
    let bench = Bench::new();
    bench.pools.offer("ab");
    let mut kubelet = Kubelet::start(&bench.folder());
    let run = bench.run(None);
    let endpoint = kubelet.registered().await;
    let mut client = kubelet.client(&endpoint).await;
    let answer = client.allocate(request("ab")).await.unwrap().into_inner();
    let response = &answer.container_responses[0];
    let names: Vec<_> = response.cdi_devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["example.com/gpu=all", "example.com/gpu=a", "example.com/gpu=b"]);
    assert_eq!(response.annotations["example.com/first"], "ab");
    assert!(response.envs.is_empty() && response.devices.is_empty() && response.mounts.is_empty());

    let unknown = client.allocate(request("z")).await.unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    assert!(unknown.message().contains("\"p/z\" is no device of example.com/gpu"), "{}", unknown.message());
    *bench.claims.refusal.lock().unwrap() =
        Some(Problem::conflict("device-held", "claim default/c holds it"));
    let held = client.allocate(request("a")).await.unwrap_err();
    assert_eq!((held.code(), held.message()), (tonic::Code::FailedPrecondition, "claim default/c holds it"));
    let nothing = client.allocate(request("")).await.unwrap().into_inner();
    assert_eq!(nothing.container_responses, [wire::ContainerAllocateResponse::default()]);
    let counts = run.plugins.counts().resources.remove(0);
    assert_eq!((counts.allocations.count(), counts.failures), (4, 2));

    let container = wire::ContainerPreferredAllocationRequest {
        available_device_ids: ids("ab").into_iter().collect(),
        must_include_device_ids: vec!["p/b".to_owned()],
        allocation_size: 1,
    };
    let asked = wire::PreferredAllocationRequest { container_requests: vec![container] };
    let preferred = client.get_preferred_allocation(asked).await.unwrap().into_inner();
    assert_eq!(preferred.container_responses[0].device_ids, ["p/b"]);
    client.pre_start_container(wire::PreStartContainerRequest::default()).await.unwrap();
    run.stop().await;
}
