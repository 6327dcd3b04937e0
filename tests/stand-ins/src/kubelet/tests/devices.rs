//! Device plugins, and what the pod-resources socket reports of them.

use std::path::Path;
use std::pin::Pin;

use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_server::{
    DevicePlugin, DevicePluginServer,
};
use nodedock_proto::kubelet::device_plugin::v1beta1::registration_client::RegistrationClient;
use nodedock_proto::kubelet::device_plugin::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
};
use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_proto::unix;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::plugin::{kubelet, quick};
use crate::kubelet::authority;

const RESOURCE: &str = "example.com/gpu";

/// It prefers its last devices.
struct Devices(watch::Receiver<Vec<Device>>);

#[tonic::async_trait]
impl DevicePlugin for Devices {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let options =
            DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true };
        Ok(Response::new(options))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.0.clone()).map(|devices| Ok(ListAndWatchResponse { devices }));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let wanted = request.into_inner().container_requests.remove(0);
        let size = usize::try_from(wanted.allocation_size).unwrap();
        let device_ids = wanted.available_device_ids.into_iter().rev().take(size).collect();
        let container_responses = vec![ContainerPreferredAllocationResponse { device_ids }];
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let ids = request.into_inner().container_requests.remove(0).devices_ids;
        let mut one = ContainerAllocateResponse::default();
        one.envs.insert("GPUS".to_owned(), ids.join(","));
        Ok(Response::new(AllocateResponse { container_responses: vec![one] }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

fn devices(healths: &[&str]) -> Vec<Device> {
    let device = |(index, health): (usize, &&str)| Device {
        id: format!("gpu-{index}"),
        health: health.to_string(),
        topology: None,
    };
    healths.iter().enumerate().map(device).collect()
}

fn serve(dir: &Path, list: &watch::Sender<Vec<Device>>) -> JoinHandle<()> {
    let path = dir.join("gpu.sock");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::builder().add_service(DevicePluginServer::new(Devices(list.subscribe())));
    tokio::spawn(async move {
        let _ = server.serve_with_incoming(unix::incoming(listener)).await;
    })
}

async fn register(dir: &Path, version: &str, resource: &str) -> Result<(), Status> {
    let stream = UnixStream::connect(dir.join("kubelet.sock")).await.unwrap();
    // As a plugin in Go dials it.
    let channel = authority::channel_by_path(&dir.join("kubelet.sock"), stream).await.unwrap();
    let request = RegisterRequest {
        version: version.to_owned(),
        endpoint: "gpu.sock".to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    };
    RegistrationClient::new(channel).register(request).await.map(drop)
}

#[tokio::test]
async fn devices_of_a_plugin_are_allocated() {
    let (_root, kubelet) = kubelet(quick()).await;
    let dir = kubelet.device_plugins();
    let list = watch::Sender::new(devices(&["Healthy", "Healthy", "Healthy", "Unhealthy"]));
    let _serving = serve(&dir, &list);
    let why = kubelet.allocate(RESOURCE, 1).await.unwrap_err();
    assert_eq!(why, "cannot allocate unregistered device example.com/gpu");
    register(&dir, "v1beta1", RESOURCE).await.unwrap();
    assert_eq!(kubelet.devices(RESOURCE, 4).await.healthy(), ["gpu-0", "gpu-1", "gpu-2"]);
    let first = kubelet.allocate(RESOURCE, 2).await.unwrap();
    assert_eq!(first.answer.envs["GPUS"], "gpu-1,gpu-2");
    kubelet.pre_start(&first).await.unwrap();
    let why = kubelet.allocate(RESOURCE, 2).await.unwrap_err();
    assert_eq!(
        why,
        "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1"
    );

    let stream = UnixStream::connect(kubelet.root().join("pod-resources/kubelet.sock")).await.unwrap();
    let mut client = PodResourcesListerClient::new(authority::channel(stream).await.unwrap());
    let pods = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources;
    assert_eq!(pods[0].containers[0].devices[0].device_ids, ["gpu-1", "gpu-2"]);

    kubelet.free(&first);
    kubelet.allocate(RESOURCE, 3).await.unwrap();
    list.send_replace(devices(&["Unhealthy"]));
    kubelet.devices(RESOURCE, 1).await;
    let why = kubelet.allocate(RESOURCE, 1).await.unwrap_err();
    assert_eq!(why, "no healthy devices present; cannot allocate unhealthy devices example.com/gpu");
}

#[tokio::test]
async fn what_is_no_device_plugin_is_refused() {
    let (_root, kubelet) = kubelet(quick()).await;
    let dir = kubelet.device_plugins();
    for (version, resource, part) in [
        ("v1alpha", RESOURCE, "v1beta1"),
        ("v1beta1", "gpu", "is invalid"),
        ("v1beta1", "kubernetes.io/gpu", "is invalid"),
        ("v1beta1", "requests.example.com/gpu", "is invalid"),
    ] {
        let why = register(&dir, version, resource).await.unwrap_err();
        assert!(why.message().contains(part), "{why}");
    }
}

#[tokio::test]
async fn a_plugin_that_ends_leaves_unhealthy_devices_until_it_registers_again() {
    let (_root, mut kubelet) = kubelet(quick()).await;
    let dir = kubelet.device_plugins();
    let list = watch::Sender::new(devices(&["Healthy", "Healthy"]));
    let serving = serve(&dir, &list);
    register(&dir, "v1beta1", RESOURCE).await.unwrap();
    kubelet.devices(RESOURCE, 2).await;
    serving.abort();
    // With the list every stream of it ends.
    drop(list);
    kubelet.wait_until("the end", |view| view.resource(RESOURCE).is_some_and(|found| !found.running)).await;
    let found = kubelet.wait_for("devices", |view| view.resource(RESOURCE)).await;
    assert_eq!((found.devices.len(), found.healthy().len()), (2, 0));

    let list = watch::Sender::new(devices(&["Healthy"]));
    let _serving = serve(&dir, &list);
    register(&dir, "v1beta1", RESOURCE).await.unwrap();
    assert_eq!(kubelet.devices(RESOURCE, 1).await.healthy(), ["gpu-0"]);

    std::fs::write(dir.join("kept"), "").unwrap();
    kubelet.restart().await;
    assert!(!dir.join("gpu.sock").exists() && dir.join("kept").exists());
    let empty = |found: crate::kubelet::Resource| found.devices.is_empty();
    kubelet.wait_until("nothing", |view| view.resource(RESOURCE).is_some_and(empty)).await;
    let _serving = serve(&dir, &list);
    register(&dir, "v1beta1", RESOURCE).await.unwrap();
    kubelet.devices(RESOURCE, 1).await;
}
