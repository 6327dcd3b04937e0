//! A native plugin of the DRA API before `v1beta1`, which lists its devices: the host publishes them, and a kubelet of today gets its claims
//! prepared.

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::Stream;
use nodedock_proto::kubelet::dra::v1alpha3::node_server::{Node as Old, NodeServer};
use nodedock_proto::kubelet::dra::v1alpha3::*;
use nodedock_proto::kubelet::registration::registration_server::{
    Registration, RegistrationServer,
};
use nodedock_proto::kubelet::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use nodedock_proto::unix;
use nodedock_stand_ins::api_server::Allocated;
use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions};
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

const DRIVER: &str = "old.example.com";

/// The plugin, which has a CDI name for each device.
struct Plugin {
    endpoint: String,
    devices: watch::Receiver<Vec<String>>,
    /// True if it answers calls for its identity.
    answers: watch::Sender<bool>,
    unprepared: Mutex<Vec<String>>,
}

#[derive(Clone)]
struct Service(Arc<Plugin>);

type Lists = Pin<Box<dyn Stream<Item = Result<NodeListAndWatchResourcesResponse, Status>> + Send>>;

fn listed(devices: Vec<String>) -> NodeListAndWatchResourcesResponse {
    let instance = |name| NamedResourcesInstance {
        name,
        attributes: Vec::new(),
    };
    let instances = devices.into_iter().map(instance).collect();
    let named_resources = Some(NamedResources { instances });
    NodeListAndWatchResourcesResponse {
        resources: vec![ResourceModel { named_resources }],
    }
}

#[tonic::async_trait]
impl Old for Service {
    type NodeListAndWatchResourcesStream = Lists;

    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let prepared = |claim: Claim| {
            let results = claim
                .structured_resource_handle
                .into_iter()
                .flat_map(|handle| handle.results);
            let model =
                |result: DriverAllocationResult| result.allocation_result_model?.named_resources;
            let names = results
                .filter_map(model)
                .map(|of| format!("{DRIVER}/d={}", of.name).into_bytes());
            (
                claim.uid,
                NodePrepareResourceResponse {
                    devices: names.collect(),
                    error: String::new(),
                },
            )
        };
        Ok(Response::new(
            request
                .into_inner()
                .claims
                .into_iter()
                .map(prepared)
                .collect(),
        ))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let uids: Vec<_> = request
            .into_inner()
            .claims
            .into_iter()
            .map(|claim| claim.uid)
            .collect();
        self.0
            .unprepared
            .lock()
            .expect("no call has failed")
            .extend(uids.clone());
        let answers = uids
            .into_iter()
            .map(|uid| (uid, NodeUnprepareResourceResponse::default()))
            .collect();
        Ok(Response::new(answers))
    }

    async fn node_list_and_watch_resources(
        &self,
        _: Request<NodeListAndWatchResourcesRequest>,
    ) -> Result<Response<Lists>, Status> {
        let mut devices = self.0.devices.clone();
        devices.mark_changed();
        let next = async |mut devices: watch::Receiver<Vec<String>>| {
            devices.changed().await.ok()?;
            let list = listed(devices.borrow_and_update().clone());
            Some((Ok(list), devices))
        };
        Ok(Response::new(Box::pin(futures::stream::unfold(
            devices, next,
        ))))
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let mut answers = self.0.answers.subscribe();
        answers
            .wait_for(|answers| *answers)
            .await
            .map_err(|ended| Status::aborted(ended.to_string()))?;
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.0.endpoint.clone(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Serves it until the test ends.
fn start(directory: &Path, registry: &Path, devices: watch::Receiver<Vec<String>>) -> Arc<Plugin> {
    let endpoint = directory.join("old-dra.sock");
    let listen = |path: &Path| UnixListener::bind(path).expect("the socket is made");
    let plugin = Arc::new(Plugin {
        endpoint: endpoint.to_str().expect("UTF-8").to_owned(),
        devices,
        answers: watch::Sender::new(true),
        unprepared: Mutex::default(),
    });
    let service = Server::builder().add_service(NodeServer::new(Service(plugin.clone())));
    tokio::spawn(service.serve_with_incoming(unix::incoming(listen(&endpoint))));
    let registration =
        Server::builder().add_service(RegistrationServer::new(Service(plugin.clone())));
    let socket = registry.join("old-reg.sock");
    tokio::spawn(registration.serve_with_incoming(unix::incoming(listen(&socket))));
    plugin
}

#[tokio::test]
async fn old_plugin_devices_are_in_slices() {
    let cluster = Cluster::start().await;
    let mut daemon = cluster.daemon().await;
    let kubelet = Kubelet::start(&daemon.kubelet(), KubeletOptions::default()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let (sender, devices) = watch::channel(vec!["dev-0".to_owned(), "dev-1".to_owned()]);
    let plugin = start(
        directory.path(),
        &daemon.state().join("plugins_registry"),
        devices,
    );
    kubelet.registered(DRIVER).await;
    let pool = format!("{NODE}/resources");
    let names = |count: usize| {
        let pool = pool.clone();
        move |state: &nodedock_stand_ins::api_server::State| {
            let slices = state.slices(DRIVER);
            let devices = slices
                .iter()
                .map(|slice| slice["spec"]["devices"].as_array().map_or(0, Vec::len));
            slices
                .iter()
                .all(|slice| slice["spec"]["pool"]["name"] == pool.as_str())
                && devices.sum::<usize>() == count
        }
    };
    cluster.api.wait_until("two devices", names(2)).await;
    let claim = Allocated::new(NAMESPACE, "one")
        .node(NODE)
        .reserved_for("pod", "pod-uid");
    let claim = claim.device("device", DRIVER, &pool, "dev-1");
    let claim = ClaimRef::new(NAMESPACE, "one", &cluster.api.allocate_claim(claim));
    for _ in 0..2 {
        let mut answer = kubelet
            .driver(DRIVER)
            .prepare(std::slice::from_ref(&claim))
            .await
            .expect("an answer");
        let devices = answer.remove(&claim.uid).expect("the claim is answered");
        assert_eq!(
            (
                devices[0].pool_name.as_str(),
                devices[0].device_name.as_str()
            ),
            (pool.as_str(), "dev-1")
        );
        assert_eq!(devices[0].cdi_device_ids, [format!("{DRIVER}/d=dev-1")]);
        // After a crash the daemon answers from its checkpoint before it knows the plugin again.
        plugin.answers.send_replace(false);
        daemon.crash().await;
        kubelet.registered(DRIVER).await;
    }
    plugin.answers.send_replace(true);
    // The slices are there all the time.
    daemon.until_serving(DRIVER).await;
    cluster.api.wait_until("two devices again", names(2)).await;
    kubelet
        .driver(DRIVER)
        .unprepare(std::slice::from_ref(&claim))
        .await
        .expect("it is unprepared");
    assert_eq!(
        *plugin.unprepared.lock().expect("no call has failed"),
        [claim.uid]
    );
    sender.send_replace(vec!["dev-0".to_owned()]);
    cluster.api.wait_until("one device", names(1)).await;
}
