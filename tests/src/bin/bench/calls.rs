//! Calls that are measured in several ways, each for a pod that comes and for one that goes.

use std::collections::HashMap;
use std::path::PathBuf;

use native_device_plugin::KUBELET_SOCKET;
use native_device_plugin::api::device_plugin_client::DevicePluginClient;
use native_device_plugin::api::{AllocateRequest, ContainerAllocateRequest};
use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use nodedock_proto::kubelet::dra::v1::{
    Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use nodedock_proto::node::v1;
use nodedock_stand_ins::api_server::Allocated;
use nodedock_stand_ins::kubelet::{Kubelet, KubeletOptions};
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::node_api::channel;
use nodedock_tests::{Client, Daemon};
use tonic::transport::Channel;

use crate::CdiOnTmpfs;
use crate::claims::measured;
use crate::devices;
use crate::kubelet::{files, unhurried};

/// Devices of each pool of a node of a cluster.
const DEVICES: usize = 512;
const RESOURCE: &str = "example.com/gpu";

/// The calls for pods with one claim or device each, by their numbers.
pub(crate) trait Calls {
    /// Name of the call for a pod that comes.
    const COME: &'static str;
    /// Name of the call for a pod that goes. `None`: there is none.
    const GO: Option<&'static str>;

    /// Makes what the calls for a pod need. It is not measured.
    fn make_ready(&mut self, _n: usize) {}

    async fn come(&mut self, n: usize);

    async fn go(&mut self, n: usize);
}

/// Prepare and unprepare through the node API, with the claim in the request.
pub(crate) struct NodeApi(pub(crate) Client);

impl Calls for NodeApi {
    const COME: &'static str = "prepare";
    const GO: Option<&'static str> = Some("unprepare");

    async fn come(&mut self, n: usize) {
        let answer = self.0.prepare_pod(measured(n)).await;
        let answer = answer.expect("prepare").into_inner();
        assert_eq!(answer.claims[0].outcome, "prepared", "{answer:?}");
    }

    async fn go(&mut self, n: usize) {
        unprepare(&mut self.0, measured(n).pod).await;
    }
}

/// A device of a native device plugin for a pod, through the node API: the work of a kubelet's device manager.
pub(crate) struct DeviceManager(pub(crate) Client);

impl Calls for DeviceManager {
    const COME: &'static str = "allocate a plugin's device";
    const GO: Option<&'static str> = Some("free a plugin's device");

    async fn come(&mut self, n: usize) {
        let request = devices::request(&format!("pod-{n}"), 1);
        let answer = self.0.prepare_pod(request).await;
        let answer = answer.expect("prepare").into_inner();
        assert_eq!(answer.resources[0].outcome, "allocated", "{answer:?}");
    }

    async fn go(&mut self, n: usize) {
        let pod = devices::request(&format!("pod-{n}"), 1).pod;
        unprepare(&mut self.0, pod).await;
    }
}

async fn unprepare(client: &mut Client, pod: Option<v1::ObjectRef>) {
    client
        .unprepare_pod(v1::UnpreparePodRequest { pod })
        .await
        .expect("unprepare");
}

/// A kubelet's calls on the socket of a DRA driver, each for a claim that is new in the API server.
pub(crate) struct Dra<'a> {
    client: DraPluginClient<Channel>,
    cluster: &'a Cluster,
    driver: &'static str,
    pool: String,
    /// UIDs of the claims in the API server.
    uids: HashMap<usize, String>,
}

impl<'a> Dra<'a> {
    pub(crate) fn new(
        socket: PathBuf,
        cluster: &'a Cluster,
        driver: &'static str,
        pool: &str,
    ) -> Self {
        let (client, pool) = (DraPluginClient::new(channel(socket)), pool.to_owned());
        Self {
            client,
            cluster,
            driver,
            pool,
            uids: HashMap::new(),
        }
    }

    fn name(&self, n: usize) -> String {
        format!("{}-{n}", self.driver)
    }

    fn claim(&self, n: usize) -> Claim {
        Claim {
            namespace: NAMESPACE.to_owned(),
            uid: self.uids[&n].clone(),
            name: self.name(n),
        }
    }
}

impl Calls for Dra<'_> {
    const COME: &'static str = "NodePrepareResources";
    const GO: Option<&'static str> = Some("NodeUnprepareResources");

    fn make_ready(&mut self, n: usize) {
        let device = format!("gpu-{}", n % DEVICES);
        let allocated = Allocated::new(NAMESPACE, &self.name(n))
            .node(NODE)
            .reserved_for("pod", "pod-uid")
            .device("device-0", self.driver, &self.pool, &device);
        let uid = self.cluster.api.allocate_claim(allocated);
        self.uids.insert(n, uid);
    }

    async fn come(&mut self, n: usize) {
        let claims = vec![self.claim(n)];
        let answer = self
            .client
            .node_prepare_resources(NodePrepareResourcesRequest { claims })
            .await;
        let answer = answer.expect("an answer").into_inner();
        let outcome = answer.claims.first().and_then(|entry| entry.value.as_ref());
        let is_prepared =
            outcome.is_some_and(|outcome| outcome.error.is_empty() && !outcome.devices.is_empty());
        assert!(is_prepared, "{answer:?}");
    }

    async fn go(&mut self, n: usize) {
        let claims = vec![self.claim(n)];
        let answer = self
            .client
            .node_unprepare_resources(NodeUnprepareResourcesRequest { claims })
            .await;
        let answer = answer.expect("an answer").into_inner();
        let outcome = answer.claims.first().and_then(|entry| entry.value.as_ref());
        assert!(
            outcome.is_some_and(|outcome| outcome.error.is_empty()),
            "{answer:?}"
        );
    }
}

/// A kubelet's Allocate on the socket of a resource of the daemon's, each time of a device that no pod has had.
pub(crate) struct Allocate {
    client: DevicePluginClient<Channel>,
    devices: Vec<String>,
    /// Has registered the resource.
    _kubelet: Kubelet,
}

impl Calls for Allocate {
    const COME: &'static str = "Allocate";
    const GO: Option<&'static str> = None;

    async fn come(&mut self, n: usize) {
        let container = ContainerAllocateRequest {
            devices_ids: vec![self.devices[n].clone()],
        };
        let request = AllocateRequest {
            container_requests: vec![container],
        };
        let answer = self.client.allocate(request).await;
        let answer = answer.expect("allocate").into_inner();
        assert_eq!(answer.container_responses.len(), 1, "{answer:?}");
    }

    async fn go(&mut self, _n: usize) {}
}

/// A daemon of a cluster, with simulated GPUs for claims and others for an extended resource.
pub(crate) struct ClusterNode {
    pub(crate) daemon: Daemon,
    pub(crate) cluster: Cluster,
    _cdi: CdiOnTmpfs,
}

impl ClusterNode {
    pub(crate) async fn start() -> Self {
        let (cluster, cdi) = (Cluster::start().await, CdiOnTmpfs::new());
        let daemon = cluster.daemon_with(cdi.with(unhurried(&cluster))).await;
        daemon.install_gpus(&format!(
            "pools:\n- {{name: gpus, count: {DEVICES}}}\n- {{name: extended, count: {DEVICES}, firstIndex: {DEVICES}, extendedResource: {RESOURCE}}}\n"
        ));
        daemon.until_serving(MOCK_GPU_FILE).await;
        Self {
            daemon,
            cluster,
            _cdi: cdi,
        }
    }

    /// The calls on the socket of its driver.
    pub(crate) fn dra(&self) -> Dra<'_> {
        let socket = files(&self.daemon.kubelet().join("plugins").join(MOCK_GPU_NAME)).pop();
        let socket = socket.expect("the driver is offered");
        Dra::new(
            socket,
            &self.cluster,
            MOCK_GPU_NAME,
            &format!("{NODE}/gpus"),
        )
    }

    /// The calls on the socket of its resource, which a kubelet has registered.
    pub(crate) async fn allocate(&self) -> Allocate {
        let kubelet = Kubelet::start(&self.daemon.kubelet(), KubeletOptions::default()).await;
        let resource = kubelet.devices(RESOURCE, DEVICES).await;
        let devices = resource.healthy().into_iter().map(str::to_owned).collect();
        let is_of_resource = |path: &PathBuf| path.file_name() != Some(KUBELET_SOCKET.as_ref());
        let sockets = files(&kubelet.device_plugins());
        let socket = sockets.into_iter().find(is_of_resource);
        let client = DevicePluginClient::new(channel(socket.expect("the resource is offered")));
        Allocate {
            client,
            devices,
            _kubelet: kubelet,
        }
    }
}
