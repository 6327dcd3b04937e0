//! The kubelet's pod-resources API on a socket of its own: which pod has which devices, for monitoring agents and network plugins.
//!
//! Answers from the managers, whose records are those of the checkpoint, so the answers survive a restart. CPUs and memory are left out, and
//! so are pods without claims and resources.

mod assemble;

use std::sync::Arc;

use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_server as server;
use nodedock_proto::kubelet::pod_resources::v1alpha1::pod_resources_lister_server as server_v1alpha1;
use nodedock_proto::kubelet::pod_resources::{v1, v1alpha1};
use nodedock_proto::unix;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::net::UnixListener;
use tokio::time::Instant;
use tonic::service::InterceptorLayer;
use tonic::{Request, Response, Status};

use nodedock_base::error::chain;
use nodedock_base::grpc::begin;
use nodedock_base::rate::TokenBucket;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_core::pools::NodePools;
use nodedock_model::{ObjectName, limit};

/// The service, in both versions of the API.
#[derive(Clone)]
pub struct PodResources {
    pub manager: Arc<Manager>,
    pub pools: NodePools,
    pub counters: Arc<Counters>,
    pub tasks: Tasks,
}

/// Calls since the start.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) list: Counter,
    pub(super) list_v1alpha1: Counter,
    pub(super) get_allocatable: Counter,
    pub(super) get: Counter,
    pub(super) get_errors: Counter,
    rejected: Counter,
}

/// Serves until the tasks stop; calls in flight are answered first.
pub async fn serve(api: PodResources, listener: UnixListener) {
    let (counters, stopped) = (api.counters.clone(), api.tasks.stopped());
    let v1 = server::PodResourcesListerServer::new(api.clone())
        .max_encoding_message_size(limit::POD_RESOURCES_MESSAGE_BYTES_MAX);
    let v1alpha1 = server_v1alpha1::PodResourcesListerServer::new(api)
        .max_encoding_message_size(limit::POD_RESOURCES_MESSAGE_BYTES_MAX);
    let server = tonic::transport::Server::builder()
        .layer(InterceptorLayer::new(limiter(counters.clone())))
        .add_service(v1)
        .add_service(v1alpha1);
    if let Err(error) = server
        .serve_with_incoming_shutdown(unix::incoming(listener), stopped)
        .await
    {
        tracing::error!(error = chain(&error), "the pod resources api ended");
    }
    let Counters {
        list,
        list_v1alpha1,
        get_allocatable,
        get,
        get_errors,
        rejected,
    } = &*counters;
    tracing::info!(
        list = list.get(),
        list_v1alpha1 = list_v1alpha1.get(),
        get_allocatable = get_allocatable.get(),
        get = get.get(),
        get_errors = get_errors.get(),
        rejected = rejected.get(),
        "pod resources served"
    );
}

/// Limits the rate of all methods together, as a kubelet does.
fn limiter(
    counters: Arc<Counters>,
) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone {
    let (per_second, burst) = (limit::POD_RESOURCES_PER_SECOND, limit::POD_RESOURCES_BURST);
    let bucket = Arc::new(Mutex::new(TokenBucket::full(
        per_second,
        burst,
        Instant::now(),
    )));
    move |request| {
        let taken = bucket.lock().take(Instant::now(), 0);
        taken.map(|()| request).map_err(|_| {
            count(&counters.rejected, "rejected");
            Status::resource_exhausted("rejected by rate limit")
        })
    }
}

fn count(counter: &Counter, what: &'static str) {
    let count = counter.inc() + 1;
    tracing::debug!(what, count, "pod resources");
}

type RpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl server::PodResourcesLister for PodResources {
    async fn list(
        &self,
        request: Request<v1::ListPodResourcesRequest>,
    ) -> RpcResult<v1::ListPodResourcesResponse> {
        begin("PodResources.v1.List", &request);
        count(&self.counters.list, "list");
        let pod_resources = self
            .manager
            .pods
            .list()
            .iter()
            .map(|view| assemble::pod(view, &self.pools))
            .collect();
        Ok(Response::new(v1::ListPodResourcesResponse {
            pod_resources,
        }))
    }

    async fn get_allocatable_resources(
        &self,
        request: Request<v1::AllocatableResourcesRequest>,
    ) -> RpcResult<v1::AllocatableResourcesResponse> {
        begin("PodResources.v1.GetAllocatableResources", &request);
        count(&self.counters.get_allocatable, "get allocatable");
        Ok(Response::new(assemble::allocatable(
            &self.manager.devices.capacity(),
        )))
    }

    async fn get(
        &self,
        request: Request<v1::GetPodResourcesRequest>,
    ) -> RpcResult<v1::GetPodResourcesResponse> {
        begin("PodResources.v1.Get", &request);
        count(&self.counters.get, "get");
        let v1::GetPodResourcesRequest {
            pod_name,
            pod_namespace,
        } = request.into_inner();
        let names = ObjectName::new(&pod_namespace)
            .ok()
            .zip(ObjectName::new(&pod_name).ok());
        let pods = names
            .map(|(namespace, name)| self.manager.pods.named(namespace, name))
            .unwrap_or_default();
        let found = assemble::staying(&pods).ok_or_else(|| {
            count(&self.counters.get_errors, "get error");
            Status::not_found(format!(
                "pod {pod_name} in namespace {pod_namespace} not found"
            ))
        })?;
        Ok(Response::new(v1::GetPodResourcesResponse {
            pod_resources: Some(assemble::pod(found, &self.pools)),
        }))
    }
}

#[tonic::async_trait]
impl server_v1alpha1::PodResourcesLister for PodResources {
    async fn list(
        &self,
        request: Request<v1alpha1::ListPodResourcesRequest>,
    ) -> RpcResult<v1alpha1::ListPodResourcesResponse> {
        begin("PodResources.v1alpha1.List", &request);
        count(&self.counters.list_v1alpha1, "list");
        let pod_resources = self
            .manager
            .pods
            .list()
            .iter()
            .map(assemble::pod_v1alpha1)
            .collect();
        Ok(Response::new(v1alpha1::ListPodResourcesResponse {
            pod_resources,
        }))
    }
}
