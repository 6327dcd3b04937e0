//! Devices that no pod has any more, on a paused clock; and the kubelet's list of them, on a socket.

use nodedock_proto::kubelet::pod_resources::v1 as wire;
use nodedock_proto::unix;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use wire::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};

use super::super::in_use::{InUseError, InUseSource, Lister};
use super::super::upkeep::{UNKNOWN, Upkeep};
use super::allocations::Play;
use super::*;
use nodedock_model::{ObjectName, limit};

/// Begins to look for what nobody uses.
fn begin(play: &Play) -> (Conditions, watch::Sender<Arc<nodedock_base::device_plugin_sockets::Sockets>>) {
    let (sender, seen) = watch::channel(Arc::default());
    let conditions = Conditions::default();
    let upkeep = Upkeep {
        allocations: play.allocations.clone(),
        counters: Arc::default(),
        conditions: conditions.clone(),
        subject: "pods".to_owned(),
        seen,
        tasks: play.tasks.clone(),
    };
    play.tasks.spawn("upkeep", upkeep.run());
    (conditions, sender)
}

/// How long it takes until the claim is given up.
async fn given_up(play: &Play) -> Duration {
    let begun = Instant::now();
    while !play.claims.calls().iter().any(|call| call.starts_with("unprepare")) {
        play.claims.called.notified().await;
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn devices_of_a_pod_that_ended_are_given_up_and_those_of_others_stay() {
    let play = Play::new();
    let _kept = begin(&play);
    play.allocate("a").await.unwrap();
    play.allocate("b").await.unwrap();
    *play.pods.0.lock().unwrap() = Some("ab".to_owned());
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(play.claims.calls(), ["prepare a", "prepare b"]);
    *play.pods.0.lock().unwrap() = Some("b".to_owned());
    let waited = given_up(&play).await;
    assert!((limit::UNUSED..limit::UNUSED + 3 * limit::IN_USE_PERIOD).contains(&waited), "{waited:?}");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((play.claims.calls().len(), play.claims.held().len()), (0, 1));
    assert!(play.tasks.drain(PATIENCE).await);
}

#[tokio::test(start_paused = true)]
async fn devices_that_no_pod_showed_are_given_up_later() {
    let play = Play::new();
    *play.pods.0.lock().unwrap() = Some(String::new());
    let _kept = begin(&play);
    play.allocate("a").await.unwrap();
    let waited = given_up(&play).await;
    assert!((limit::UNSEEN..limit::UNSEEN + 3 * limit::IN_USE_PERIOD).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn while_the_kubelet_does_not_tell_nothing_is_given_up_and_it_is_said() {
    let play = Play::new();
    let (conditions, _seen) = begin(&play);
    play.allocate("a").await.unwrap();
    tokio::time::sleep(limit::IN_USE_UNKNOWN / 2).await;
    assert!(conditions.list().is_empty());
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(play.claims.calls(), ["prepare a"]);
    let said: Vec<_> = conditions.list().into_iter().map(|known| known.problem.code).collect();
    assert_eq!(said, [UNKNOWN]);
    *play.pods.0.lock().unwrap() = Some(String::new());
    given_up(&play).await;
    assert!(conditions.list().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_is_away_is_asked_again() {
    let play = Play::new();
    *play.pods.0.lock().unwrap() = Some(String::new());
    let _kept = begin(&play);
    play.allocate("a").await.unwrap();
    *play.claims.refusal.lock().unwrap() = Some(Problem::unavailable("driver-away", "it is loading"));
    given_up(&play).await;
    *play.claims.refusal.lock().unwrap() = None;
    given_up(&play).await;
    assert!(play.claims.held().is_empty());
}

/// Answers what pods have.
struct Pods(wire::ListPodResourcesResponse);

#[tonic::async_trait]
impl PodResourcesLister for Pods {
    async fn list(
        &self,
        _: Request<wire::ListPodResourcesRequest>,
    ) -> Result<Response<wire::ListPodResourcesResponse>, Status> {
        Ok(Response::new(self.0.clone()))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<wire::AllocatableResourcesRequest>,
    ) -> Result<Response<wire::AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get(
        &self,
        _: Request<wire::GetPodResourcesRequest>,
    ) -> Result<Response<wire::GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

fn pod(name: &str, resource_name: &str, letters: &str) -> wire::PodResources {
    let entry = |id: &String| wire::ContainerDevices {
        resource_name: resource_name.to_owned(),
        device_ids: vec![id.clone()],
        topology: None,
    };
    let devices = ids(letters).iter().map(entry).collect();
    let container = wire::ContainerResources { name: "c".to_owned(), devices, ..Default::default() };
    wire::PodResources {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        containers: vec![container],
        ..Default::default()
    }
}

#[tokio::test]
async fn a_kubelets_list_is_read_and_one_that_is_not_complete_is_not_believed() {
    let list = async |pods: Vec<wire::PodResources>, own: Option<&str>| {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("kubelet.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let answer = wire::ListPodResourcesResponse { pod_resources: pods };
        let server =
            tonic::transport::Server::builder().add_service(PodResourcesListerServer::new(Pods(answer)));
        let name = |text: &str| ObjectName::new(text).unwrap();
        let own_pod = own.map(|own| OwnPod { namespace: name("default"), name: name(own) });
        let lister = Lister { socket, own_pod };
        tokio::select! {
            served = server.serve_with_incoming(unix::incoming(listener)) => panic!("{served:?}"),
            listed = lister.list(PATIENCE) => listed,
        }
    };
    let pods = || {
        vec![
            pod("one", "example.com/gpu", "ab"),
            pod("two", "example.com/gpu", "c"),
            pod("three", "cpu", "d"),
        ]
    };
    let in_use = list(pods(), Some("two")).await.unwrap();
    assert_eq!(in_use.0, BTreeMap::from([(resource("gpu"), ids("abc"))]));
    assert!(matches!(list(pods(), Some("own")).await, Err(InUseError::Incomplete(_))));
    assert!(matches!(list(Vec::new(), None).await, Err(InUseError::Incomplete(_))));
    let away = Lister { socket: PathBuf::from("/nowhere/kubelet.sock"), own_pod: None };
    assert!(matches!(away.list(PATIENCE).await, Err(InUseError::Dial(_))));
}

#[test]
fn a_claim_is_in_use_under_the_name_of_its_resource_only() {
    let claim = claim::id(&driver("gpu"), &resource("gpu"), &ids("ab")).unwrap();
    let held = HeldDevices { claim, driver: driver("gpu"), devices: ids("ab") };
    let of = |name: &str, letters: &str| in_use::InUse(BTreeMap::from([(resource(name), ids(letters))]));
    assert_eq!(of("gpu", "b").resource(&held), Some(&resource("gpu")));
    assert_eq!(of("gpu", "c").resource(&held), None);
    assert_eq!(of("nic", "ab").resource(&held), None);
}
