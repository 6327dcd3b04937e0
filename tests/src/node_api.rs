//! The node API of a daemon: a client, and its calls with what tests expect of them.

use std::ops::Deref;
use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use nodedock_proto::node::v1;
use nodedock_proto::node::v1::node_client::NodeClient;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::{DEADLINE, Root};

/// A client of the node API.
pub type Client = NodeClient<Channel>;

/// The node API of the daemon on a root.
pub struct NodeApi {
    client: Client,
    root: Root,
}

impl Deref for NodeApi {
    type Target = Root;

    fn deref(&self) -> &Root {
        &self.root
    }
}

impl NodeApi {
    pub(crate) fn new(root: Root) -> Self {
        Self {
            client: connect(root.socket()),
            root,
        }
    }

    /// Has the next call made on a new connection.
    pub(crate) fn connect(&mut self) {
        self.client = connect(self.root.socket());
    }

    /// Takes the root out. The new one only satisfies the daemon's Drop.
    pub(crate) fn take_root(&mut self) -> Root {
        std::mem::take(&mut self.root)
    }

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A connection for other services than the node API.
    pub fn channel(&self) -> Channel {
        channel(self.socket())
    }

    /// A connection to the pod-resources API.
    pub fn pod_resources_channel(&self) -> Channel {
        channel(self.pod_resources())
    }

    pub async fn prepare(&self, request: v1::PreparePodRequest) -> v1::PreparePodResponse {
        let answer = self.client().prepare_pod(request).await;
        answer
            .unwrap_or_else(|status| panic!("prepare: {status}\n{}", self.log()))
            .into_inner()
    }

    /// Prepares, and expects every claim to be prepared.
    pub async fn prepared(&self, request: v1::PreparePodRequest) -> v1::PreparePodResponse {
        let answer = self.prepare(request).await;
        let prepared = answer
            .claims
            .iter()
            .all(|claim| claim.outcome == "prepared");
        assert!(prepared, "{answer:#?}\n{}", self.log());
        answer
    }

    /// Prepares, and expects the only claim to be refused.
    pub async fn refused(&self, request: v1::PreparePodRequest) -> v1::Problem {
        let answer = self.prepare(request).await;
        let [claim] = answer.claims.as_slice() else {
            panic!("one claim is wanted: {answer:#?}")
        };
        assert_eq!(claim.outcome, "refused", "{answer:#?}");
        assert!(
            answer.containers.is_empty(),
            "a refused pod gets no devices: {answer:#?}"
        );
        claim.problem.clone().expect("a refusal has a problem")
    }

    /// Prepares, and expects the only claim to be refused with this kind and code of problem.
    pub async fn refused_as(
        &self,
        request: v1::PreparePodRequest,
        kind: &str,
        code: &str,
    ) -> v1::Problem {
        let problem = self.refused(request).await;
        assert_eq!(
            (problem.kind.as_str(), problem.code.as_str()),
            (kind, code),
            "{problem:?}"
        );
        problem
    }

    /// Expects that the daemon has neither claims nor pods nor CDI files.
    pub async fn assert_empty(&self) {
        assert_eq!(
            (self.claims().await, self.pods().await, self.cdi_files()),
            (vec![], vec![], vec![])
        );
    }

    /// Unprepares a pod's claims: the outcomes by claim name.
    pub async fn unprepare(&self, pod: &v1::ObjectRef) -> Vec<(String, String)> {
        let answer = self.unprepare_pod(pod).await;
        let name = |claim: v1::ClaimOutcome| (claim.id.unwrap_or_default().name, claim.outcome);
        answer.claims.into_iter().map(name).collect()
    }

    pub async fn unprepare_pod(&self, pod: &v1::ObjectRef) -> v1::UnpreparePodResponse {
        let request = v1::UnpreparePodRequest {
            pod: Some(pod.clone()),
        };
        let answer = self.client().unprepare_pod(request).await;
        answer
            .unwrap_or_else(|status| panic!("unprepare: {status}\n{}", self.log()))
            .into_inner()
    }

    pub async fn pod_devices(&self, pod: &v1::ObjectRef) -> Result<v1::PreparePodResponse, Status> {
        let request = v1::GetPodDevicesRequest {
            pod: Some(pod.clone()),
        };
        self.client()
            .get_pod_devices(request)
            .await
            .map(tonic::Response::into_inner)
    }

    pub async fn claims(&self) -> Vec<v1::ClaimStatus> {
        let request = v1::ListClaimsRequest {
            with_timeline: true,
            ..Default::default()
        };
        self.client()
            .list_claims(request)
            .await
            .expect("list claims")
            .into_inner()
            .claims
    }

    /// The only claim that is known.
    pub async fn only_claim(&self) -> v1::ClaimStatus {
        let mut claims = self.claims().await;
        assert_eq!(claims.len(), 1, "{claims:#?}");
        claims.remove(0)
    }

    pub async fn pods(&self) -> Vec<v1::PodStatus> {
        self.client()
            .list_pods(v1::ListPodsRequest {})
            .await
            .expect("list pods")
            .into_inner()
            .pods
    }

    pub async fn node(&self) -> v1::NodeStatus {
        self.client()
            .get_node(v1::GetNodeRequest {})
            .await
            .expect("get the node")
            .into_inner()
    }

    pub async fn devices(&self) -> Vec<v1::Device> {
        let request = v1::ListDevicesRequest::default();
        self.client()
            .list_devices(request)
            .await
            .expect("list devices")
            .into_inner()
            .devices
    }

    pub async fn drivers(&self) -> Vec<v1::Driver> {
        let request = v1::ListDriversRequest::default();
        self.client()
            .list_drivers(request)
            .await
            .expect("list drivers")
            .into_inner()
            .drivers
    }
}

fn connect(socket: PathBuf) -> Client {
    // As of the commands: a list of a plugin's devices may be long.
    NodeClient::new(channel(socket)).max_decoding_message_size(64 << 20)
}

/// A connection to a socket, made when it is first used.
pub fn channel(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The address is for the protocol only; the connector knows the socket. The timeout covers the start of an answer: a stream may last
    // longer.
    Endpoint::from_static("http://localhost")
        .timeout(DEADLINE * 2)
        .connect_with_connector_lazy(connector)
}
