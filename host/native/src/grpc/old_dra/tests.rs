use std::pin::Pin;
use std::sync::Mutex;

use futures::Stream;
use nodedock_proto::kubelet::dra::v1alpha2::node_server::{
    Node as SingleNode, NodeServer as SingleServer,
};
use nodedock_proto::kubelet::dra::v1alpha3::node_server::{Node, NodeServer};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response};

use super::*;
use crate::grpc::{Connection, Rpcs, Tap};
use nodedock_model::OpaqueConfig;
use nodedock_model::{ConfigSource, ObjectRef};

const DRIVER: &str = "old.example.com";

/// Requests to a plugin of any old generation, and its answers.
#[derive(Default)]
struct Script {
    asked: Mutex<Vec<wire::Claim>>,
    unprepared: Mutex<Vec<String>>,
    /// Answer for each claim.
    answer: Mutex<wire::NodePrepareResourceResponse>,
    lists: Mutex<Option<mpsc::Receiver<Result<wire::NodeListAndWatchResourcesResponse, Status>>>>,
}

struct Batches(Arc<Script>);
struct Single(Arc<Script>);

type Lists =
    Pin<Box<dyn Stream<Item = Result<wire::NodeListAndWatchResourcesResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Node for Batches {
    type NodeListAndWatchResourcesStream = Lists;

    async fn node_prepare_resources(
        &self,
        request: Request<wire::NodePrepareResourcesRequest>,
    ) -> Result<Response<wire::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let answer = self.0.answer.lock().unwrap().clone();
        let answers = claims
            .iter()
            .map(|claim| (claim.uid.clone(), answer.clone()))
            .collect();
        self.0.asked.lock().unwrap().extend(claims);
        Ok(Response::new(answers))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<wire::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<wire::NodeUnprepareResourcesResponse>, Status> {
        let uids: Vec<_> = request
            .into_inner()
            .claims
            .into_iter()
            .map(|claim| claim.uid)
            .collect();
        let error = self.0.answer.lock().unwrap().error.clone();
        let answer = |uid: &String| {
            (
                uid.clone(),
                wire::NodeUnprepareResourceResponse {
                    error: error.clone(),
                },
            )
        };
        let answers = uids.iter().map(answer).collect();
        self.0.unprepared.lock().unwrap().extend(uids);
        Ok(Response::new(answers))
    }

    async fn node_list_and_watch_resources(
        &self,
        _: Request<wire::NodeListAndWatchResourcesRequest>,
    ) -> Result<Response<Lists>, Status> {
        let lists = self.0.lists.lock().unwrap().take();
        let lists = lists.ok_or_else(|| Status::unimplemented("it lists no devices"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(lists))))
    }
}

#[tonic::async_trait]
impl SingleNode for Single {
    async fn node_prepare_resource(
        &self,
        request: Request<v1alpha2::NodePrepareResourceRequest>,
    ) -> Result<Response<v1alpha2::NodePrepareResourceResponse>, Status> {
        let v1alpha2::NodePrepareResourceRequest {
            namespace,
            claim_uid: uid,
            claim_name: name,
            resource_handle,
            structured_resource_handle,
        } = request.into_inner();
        let claim = wire::Claim {
            namespace,
            uid,
            name,
            resource_handle,
            structured_resource_handle,
        };
        self.0.asked.lock().unwrap().push(claim);
        let wire::NodePrepareResourceResponse { devices, error } =
            self.0.answer.lock().unwrap().clone();
        if !error.is_empty() {
            return Err(Status::unknown(error));
        }
        let cdi_devices = devices
            .into_iter()
            .map(|name| String::from_utf8(name).unwrap())
            .collect();
        Ok(Response::new(v1alpha2::NodePrepareResourceResponse {
            cdi_devices,
        }))
    }

    async fn node_unprepare_resource(
        &self,
        request: Request<v1alpha2::NodeUnprepareResourceRequest>,
    ) -> Result<Response<v1alpha2::NodeUnprepareResourceResponse>, Status> {
        self.0
            .unprepared
            .lock()
            .unwrap()
            .push(request.into_inner().claim_uid);
        Ok(Response::new(v1alpha2::NodeUnprepareResourceResponse {}))
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Generation {
    V1alpha3,
    V1alpha2,
    /// Neither service.
    Nothing,
}

struct Bench {
    script: Arc<Script>,
    driver: OldDraPlugin,
    tasks: Tasks,
    socket: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

impl Bench {
    async fn new(generation: Generation, lists: bool) -> Self {
        let (dir, script) = (tempfile::tempdir().unwrap(), Arc::new(Script::default()));
        let socket = dir.path().join("dra.sock");
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let batches =
            (generation == Generation::V1alpha3).then(|| NodeServer::new(Batches(script.clone())));
        let single =
            (generation == Generation::V1alpha2).then(|| SingleServer::new(Single(script.clone())));
        let server = Server::builder()
            .add_optional_service(batches)
            .add_optional_service(single);
        let tasks = Tasks::new();
        tasks.spawn_until_stopped("old-plugin", async move {
            server.serve_with_incoming(incoming).await.unwrap()
        });
        let connection = Connection::open(socket.clone(), &tasks);
        let name = DriverName::new(DRIVER).unwrap();
        let caller = Caller {
            name,
            connection,
            rpcs: Rpcs::default(),
            tap: Tap::default(),
        };
        let driver = OldDraPlugin {
            caller,
            node: "node-1".to_owned(),
            lists,
            is_single: AtomicBool::default(),
        };
        Self {
            script,
            driver,
            tasks,
            socket,
            _dir: dir,
        }
    }

    fn answer(&self, devices: &[&[u8]], error: &str) {
        let devices = devices.iter().map(|entry| entry.to_vec()).collect();
        *self.script.answer.lock().unwrap() = wire::NodePrepareResourceResponse {
            devices,
            error: error.to_owned(),
        };
    }

    async fn prepare(&self, uids: &[&str]) -> Vec<Result<PreparedClaim, Problem>> {
        let claims: Vec<_> = uids.iter().map(|uid| claim(uid)).collect();
        let mut outcomes = self.driver.prepare(&call(), &claims).await;
        assert_eq!(outcomes.len(), uids.len());
        uids.iter()
            .map(|uid| outcomes.remove(*uid).unwrap())
            .collect()
    }

    async fn unprepare(&self, uid: &str) -> Result<(), Problem> {
        let live = DriverClaimRecord {
            claim: claim(uid),
            prepared: true,
            memo: Vec::new(),
            driver_version: "v1alpha".to_owned(),
            boot_id: "b".to_owned(),
        };
        self.driver
            .unprepare(&call(), &[live])
            .await
            .remove(uid)
            .unwrap()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

fn call() -> Call {
    Call {
        request_id: "r".into(),
        deadline: Duration::from_secs(10),
    }
}

/// Two devices, parameters for the claim and for a request.
fn claim(uid: &str) -> DriverClaim {
    let device = |request: &str, device: &str| AllocatedDevice {
        request: request.to_owned(),
        driver: DRIVER.parse().unwrap(),
        pool: POOL.parse().unwrap(),
        device: device.parse().unwrap(),
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    };
    let config = |requests: &[&str], parameters: &str| OpaqueConfig {
        source: ConfigSource::Claim,
        requests: requests
            .iter()
            .map(|request| (*request).to_owned())
            .collect(),
        driver: DRIVER.parse().unwrap(),
        parameters: parameters.to_owned(),
    };
    DriverClaim {
        id: ObjectRef::new("default", &format!("claim-{uid}"), uid).unwrap(),
        devices: vec![device("a", "dev-0"), device("b/large", "dev-1")],
        configs: vec![config(&[], "{\"all\":1}"), config(&["b"], "{\"b\":2}")],
        annotations: BTreeMap::new(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

#[tokio::test]
async fn claims_are_batched_with_their_parameters() {
    let bench = Bench::new(Generation::V1alpha3, false).await;
    bench.answer(&[b"old.example.com/d=0", b"old.example.com/d=1"], "");
    let prepared = bench.prepare(&["c1", "c2"]).await;
    let asked = bench.script.asked.lock().unwrap().clone();
    assert_eq!(
        asked
            .iter()
            .map(|claim| claim.uid.as_str())
            .collect::<Vec<_>>(),
        ["c1", "c2"]
    );
    assert_eq!(
        (
            asked[0].resource_handle.as_str(),
            asked[0].structured_resource_handle.len()
        ),
        ("{\"all\":1}", 0)
    );
    let devices = &prepared[0].as_ref().unwrap().devices;
    let names = ["old.example.com/d=0", "old.example.com/d=1"]
        .map(str::to_owned)
        .to_vec();
    assert_eq!(
        (devices.len(), &devices[0].access),
        (1, &DeviceAccess::CdiDevices(names))
    );
    assert!(devices[0].requests.is_empty() && devices[0].device.as_str() == "dev-0");
    bench.unprepare("c1").await.unwrap();
    assert_eq!(*bench.script.unprepared.lock().unwrap(), ["c1"]);
}

#[tokio::test]
async fn v1alpha3_devices_are_read_like_v1() {
    let bench = Bench::new(Generation::V1alpha3, false).await;
    let device = v1::Device {
        request_names: vec!["b".to_owned()],
        pool_name: POOL.to_owned(),
        device_name: "dev-1".to_owned(),
        cdi_device_ids: vec!["old.example.com/d=1".to_owned()],
        ..v1::Device::default()
    };
    bench.answer(&[&device.encode_to_vec()], "");
    let prepared = bench.prepare(&["c"]).await.remove(0).unwrap();
    assert_eq!(
        (
            prepared.devices[0].requests.as_slice(),
            prepared.devices[0].device.as_str()
        ),
        (&["b".to_owned()][..], "dev-1")
    );
    bench.answer(&[], "");
    assert!(
        bench
            .prepare(&["c"])
            .await
            .remove(0)
            .unwrap()
            .devices
            .is_empty()
    );
}

#[tokio::test]
async fn single_claim_plugin_gets_single_calls() {
    let bench = Bench::new(Generation::V1alpha2, true).await;
    bench.answer(&[b"old.example.com/d=0"], "");
    for prepared in bench.prepare(&["c1", "c2"]).await {
        assert_eq!(prepared.unwrap().devices.len(), 1);
    }
    let asked = bench.script.asked.lock().unwrap().clone();
    let handle = &asked[1].structured_resource_handle[0];
    let of = |index: usize| {
        let result = &handle.results[index];
        let parameters = result
            .vendor_request_parameters
            .clone()
            .map(|raw| String::from_utf8(raw.raw).unwrap());
        let model = result.allocation_result_model.clone().unwrap();
        (model.named_resources.unwrap().name, parameters)
    };
    assert_eq!((asked.len(), handle.node_name.as_str()), (2, "node-1"));
    assert_eq!(
        [of(0), of(1)],
        [
            ("dev-0".to_owned(), None),
            ("dev-1".to_owned(), Some("{\"b\":2}".to_owned()))
        ]
    );
    assert!(bench.driver.is_single.load(Ordering::Relaxed));
    bench.unprepare("c1").await.unwrap();
    assert_eq!(*bench.script.unprepared.lock().unwrap(), ["c1"]);
    bench.answer(&[], "no more room");
    let refused = bench.prepare(&["c3"]).await.remove(0).unwrap_err();
    assert!(
        refused.message.contains("no more room") && refused.code == "driver-refused",
        "{refused}"
    );
}

/// A device whose name has a dot was left out of the pool.
#[tokio::test]
async fn encoded_device_name_is_decoded() {
    let bench = Bench::new(Generation::V1alpha3, true).await;
    let mut claim = claim("c");
    claim.devices[0].device = "gpu--2e0".parse().unwrap();
    // As a claim of the time before names were encoded may have it.
    claim.devices[1].device = "dev--x".parse().unwrap();
    let handle = bench.driver.handle(&claim);
    let models = handle
        .results
        .into_iter()
        .filter_map(|result| result.allocation_result_model);
    let names: Vec<_> = models
        .filter_map(|model| Some(model.named_resources?.name))
        .collect();
    assert_eq!(names, ["gpu.0", "dev--x"]);
}

#[test]
fn class_parameters_are_the_fallback() {
    let mut claim = claim("c");
    assert_eq!(parameters(&claim, None).as_deref(), Some("{\"all\":1}"));
    claim.configs.remove(0);
    assert_eq!(parameters(&claim, None).as_deref(), Some("{\"b\":2}"));
    claim.configs[0].requests = vec!["b/large".to_owned()];
    let of = |device: usize| parameters(&claim, Some(&claim.devices[device]));
    assert_eq!((of(0), of(1).as_deref()), (None, Some("{\"b\":2}")));
    claim.configs.clear();
    assert_eq!(parameters(&claim, None), None);
}

#[tokio::test]
async fn bad_answers_name_the_driver() {
    let bench = Bench::new(Generation::V1alpha3, false).await;
    for (devices, error, code) in [
        (&[][..], "busy", "driver-refused"),
        (&[&b"no-cdi-name"[..]][..], "", "driver-answer-not-valid"),
        (&[&b"\x0a\xff"[..]][..], "", "driver-answer-not-valid"),
        (
            &[&b"old.example.com/d=0"[..], &b"\x12\x01p"[..]][..],
            "",
            "driver-answer-not-valid",
        ),
        (&[&b"\xc3\x28"[..]][..], "", "driver-answer-not-valid"),
    ] {
        bench.answer(devices, error);
        let problem = bench.prepare(&["c"]).await.remove(0).unwrap_err();
        assert!(
            problem.code == code && problem.message.contains(DRIVER),
            "{problem}"
        );
    }
    bench.answer(&[], "busy");
    assert_eq!(
        bench.unprepare("c").await.unwrap_err().code,
        "driver-refused"
    );
    let bench = Bench::new(Generation::Nothing, false).await;
    assert_eq!(
        bench.prepare(&["c"]).await.remove(0).unwrap_err().code,
        "driver-without-service"
    );
    assert_eq!(
        bench.unprepare("c").await.unwrap_err().code,
        "driver-without-service"
    );
}

fn instance(
    name: &str,
    attributes: Vec<(&str, wire::NamedResourcesAttributeValue)>,
) -> wire::NamedResourcesInstance {
    let attribute =
        |(name, value): (&str, wire::NamedResourcesAttributeValue)| wire::NamedResourcesAttribute {
            name: name.to_owned(),
            value: Some(value),
        };
    wire::NamedResourcesInstance {
        name: name.to_owned(),
        attributes: attributes.into_iter().map(attribute).collect(),
    }
}

fn listed(instances: Vec<wire::NamedResourcesInstance>) -> wire::NodeListAndWatchResourcesResponse {
    let model = wire::ResourceModel {
        named_resources: Some(wire::NamedResources { instances }),
    };
    wire::NodeListAndWatchResourcesResponse {
        resources: vec![model, wire::ResourceModel::default()],
    }
}

#[tokio::test]
async fn listed_devices_become_a_pool() {
    let bench = Bench::new(Generation::V1alpha3, true).await;
    let (sender, lists) = mpsc::channel(4);
    *bench.script.lists.lock().unwrap() = Some(lists);
    type Value = wire::NamedResourcesAttributeValue;
    let text = |text: &str| Value {
        string: Some(text.to_owned()),
        ..Value::default()
    };
    let facts = vec![
        ("model", text("Z1")),
        (
            "cores",
            Value {
                int: Some(4),
                ..Value::default()
            },
        ),
        (
            "driver.example.com/fast",
            Value {
                bool: Some(true),
                ..Value::default()
            },
        ),
        (
            "firmware",
            Value {
                version: Some("1.2.3".to_owned()),
                ..Value::default()
            },
        ),
        (
            "memory",
            Value {
                quantity: Some(wire::Quantity {
                    string: "16Gi".to_owned(),
                }),
                ..Value::default()
            },
        ),
        ("not-an-identifier", text("a")),
        ("long", text(&"x".repeat(100))),
        (
            "odd",
            Value {
                version: Some("one".to_owned()),
                ..Value::default()
            },
        ),
    ];
    let (subdomain, long) = (
        instance("gpu.0", Vec::new()),
        instance(&"a.".repeat(32), Vec::new()),
    );
    sender
        .send(Ok(listed(vec![instance("dev-0", facts), subdomain, long])))
        .await
        .unwrap();
    let name = DriverName::new(DRIVER).unwrap();
    let announced = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = announced.clone();
    let announce = move || {
        count.fetch_add(1, Ordering::SeqCst);
    };
    let inventory = inventory(&name, &bench.socket, &bench.tasks, announce).await;
    let mut inventory = inventory.unwrap().unwrap();
    let published = inventory.borrow_and_update().clone();
    let (pool, devices) = published.inventory.pools.first_key_value().unwrap();
    let names: Vec<_> = devices.devices.keys().map(DeviceName::as_str).collect();
    assert_eq!((pool.as_str(), names), (POOL, vec!["dev-0", "gpu--2e0"]));
    let device = devices.devices.first_key_value().unwrap().1;
    let attributes: Vec<_> = device.attributes.keys().map(ToString::to_string).collect();
    assert_eq!(
        attributes,
        ["cores", "driver.example.com/fast", "firmware", "model"]
    );
    assert_eq!(device.capacities.values().next().unwrap().value, "16Gi");
    sender
        .send(Ok(listed(vec![instance("dev-1", Vec::new())])))
        .await
        .unwrap();
    inventory.changed().await.unwrap();
    while announced.load(Ordering::SeqCst) != 1 {
        tokio::task::yield_now().await;
    }
    let published = inventory.borrow_and_update().clone();
    assert_eq!(
        published
            .inventory
            .pools
            .values()
            .next()
            .unwrap()
            .devices
            .keys()
            .next()
            .unwrap()
            .as_str(),
        "dev-1"
    );
    // One without lists, and one that never answers, which is not registered.
    let bench = Bench::new(Generation::V1alpha3, false).await;
    assert!(
        super::inventory(&name, &bench.socket, &bench.tasks, || ())
            .await
            .unwrap()
            .is_none()
    );
    let (_sender, lists) = mpsc::channel(1);
    *bench.script.lists.lock().unwrap() = Some(lists);
    let late = super::inventory(&name, &bench.socket, &bench.tasks, || ())
        .await
        .unwrap_err();
    assert!(late.message.contains(DRIVER), "{late}");
}
