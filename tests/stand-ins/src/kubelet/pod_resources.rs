//! The pod-resources socket.

use std::sync::Arc;

use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use nodedock_proto::kubelet::pod_resources::v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, CdiDevice, ClaimResource, ContainerDevices,
    ContainerResources, DynamicResource, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::state::{Inner, State};

/// # Panics
///
/// If the socket cannot be made.
pub(super) fn serve(inner: &Arc<Inner>, end: &CancellationToken, tasks: &TaskTracker) {
    let dir = inner.root.join("pod-resources");
    // Under another name first, so that no client finds it before it answers.
    let (made, path) = (dir.join(".kubelet.sock"), dir.join("kubelet.sock"));
    let _ = std::fs::remove_file(&made);
    let listener = UnixListener::bind(&made).expect("the pod-resources socket can be made");
    std::fs::rename(&made, &path).expect("the pod-resources socket can be named");
    let server =
        Server::builder().add_service(PodResourcesListerServer::new(Listing { inner: Arc::clone(inner) }));
    let end = end.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = end.cancelled() => {}
            _ = server.serve_with_incoming(unix::incoming(listener)) => {}
        }
    });
}

struct Listing {
    inner: Arc<Inner>,
}

/// Pods are known by the UIDs of those that use claims, and each allocation of devices is a pod of its own.
fn pods(state: &State) -> Vec<PodResources> {
    let of_claims = state.claims.values().flat_map(|cached| {
        let resources: Vec<ClaimResource> = cached
            .drivers
            .iter()
            .flat_map(|(driver, devices)| devices.iter().map(move |device| (driver, device)))
            .map(|(driver, device)| ClaimResource {
                cdi_devices: device.cdi.iter().map(|name| CdiDevice { name: name.clone() }).collect(),
                driver_name: driver.clone(),
                pool_name: device.pool.clone(),
                device_name: device.device.clone(),
                share_id: device.share.clone(),
            })
            .collect();
        cached.pods.iter().map(move |pod| {
            let claim = DynamicResource {
                claim_name: cached.claim.name.clone(),
                claim_namespace: cached.claim.namespace.clone(),
                claim_resources: resources.clone(),
            };
            let main = ContainerResources {
                name: "main".to_owned(),
                dynamic_resources: vec![claim],
                ..Default::default()
            };
            let namespace = cached.claim.namespace.clone();
            PodResources { name: pod.clone(), namespace, containers: vec![main], ..Default::default() }
        })
    });
    let of_plugins = state.allocations.iter().map(|held| {
        let devices = ContainerDevices {
            resource_name: held.resource.clone(),
            device_ids: held.ids.clone(),
            ..Default::default()
        };
        let main =
            ContainerResources { name: "main".to_owned(), devices: vec![devices], ..Default::default() };
        let name = format!("pod-{}", held.number);
        PodResources { name, namespace: "default".to_owned(), containers: vec![main], ..Default::default() }
    });
    of_claims.chain(of_plugins).collect()
}

#[tonic::async_trait]
impl PodResourcesLister for Listing {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.inner.note_quietly("List", "");
        Ok(Response::new(ListPodResourcesResponse { pod_resources: self.inner.look(pods) }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let devices = self.inner.look(|state| {
            let plugins = state.plugins.iter();
            plugins
                .map(|(resource, plugin)| ContainerDevices {
                    resource_name: resource.clone(),
                    device_ids: plugin.shown().healthy().into_iter().map(str::to_owned).collect(),
                    ..Default::default()
                })
                .collect()
        });
        Ok(Response::new(AllocatableResourcesResponse { devices, ..Default::default() }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        let found = self.inner.look(|state| {
            pods(state).into_iter().find(|pod| pod.name == pod_name && pod.namespace == pod_namespace)
        });
        let why = || Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found"));
        Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(found.ok_or_else(why)?) }))
    }
}
