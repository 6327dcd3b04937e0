//! The pod-resources socket.

use std::sync::Arc;

use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use nodedock_proto::kubelet::pod_resources::v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices,
    ContainerResources, GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources,
};
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::device_plugin::Allocation;
use super::state::Shared;

/// # Panics
///
/// If the socket cannot be made.
pub(super) fn serve(shared: &Arc<Shared>, end: &CancellationToken, tasks: &TaskTracker) {
    let dir = shared.root.join("pod-resources");
    // Under another name first, so that no client finds it before it answers.
    let (made, path) = (dir.join(".kubelet.sock"), dir.join("kubelet.sock"));
    let _ = std::fs::remove_file(&made);
    let listener = UnixListener::bind(&made).expect("the pod-resources socket can be made");
    std::fs::rename(&made, &path).expect("the pod-resources socket can be named");
    let server = Server::builder().add_service(PodResourcesListerServer::new(Listing {
        shared: Arc::clone(shared),
    }));
    let end = end.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = end.cancelled() => {}
            _ = server.serve_with_incoming(unix::incoming(listener)) => {}
        }
    });
}

struct Listing {
    shared: Arc<Shared>,
}

/// Each allocation of devices is a pod of its own.
fn pod(held: &Allocation) -> PodResources {
    let (resource_name, device_ids) = (held.resource.clone(), held.ids.clone());
    let devices = ContainerDevices {
        resource_name,
        device_ids,
        ..Default::default()
    };
    let main = ContainerResources {
        name: "main".to_owned(),
        devices: vec![devices],
        ..Default::default()
    };
    let name = held.pod();
    PodResources {
        name,
        namespace: "default".to_owned(),
        containers: vec![main],
        ..Default::default()
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Listing {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.shared.note_quietly("List", "");
        Ok(Response::new(ListPodResourcesResponse {
            pod_resources: self
                .shared
                .look(|state| state.allocations.iter().map(pod).collect()),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("no driver calls this"))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("no driver calls this"))
    }
}
