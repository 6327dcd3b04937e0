//! A DRA driver that behaves as the test says.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodedock_proto::kubelet::dra::{v1, v1beta1};
use nodedock_proto::kubelet::dra_health::{v1 as health, v1alpha1 as old_health};
use nodedock_proto::kubelet::registration::registration_server::{Registration, RegistrationServer};
use nodedock_proto::kubelet::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::kubelet::{Kubelet, KubeletOptions};

/// What a driver does.
#[derive(Clone, Debug)]
pub(super) struct Behaviour {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) versions: Vec<&'static str>,
    pub(super) get_info_takes: Duration,
    /// Answers to `NotifyRegistrationStatus(true)` that are errors.
    pub(super) notify_fails: usize,
    /// The error of every claim.
    pub(super) claim_error: String,
    /// Claims that the answer leaves out, and UIDs that it makes up.
    pub(super) skips: usize,
    pub(super) makes_up: Vec<String>,
    pub(super) prepare_takes: Duration,
    /// Whether it serves the authority of Go's clients.
    pub(super) tolerant: bool,
}

impl Behaviour {
    pub(super) fn of(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: "DRAPlugin",
            versions: vec!["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth"],
            get_info_takes: Duration::ZERO,
            notify_fails: 0,
            claim_error: String::new(),
            skips: 0,
            makes_up: vec![],
            prepare_takes: Duration::ZERO,
            tolerant: true,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) statuses: Vec<(bool, String)>,
    /// The service, the call and the claims' UIDs.
    pub(super) calls: Vec<(&'static str, &'static str, Vec<String>)>,
}

#[derive(Clone, Debug)]
struct Service {
    behaviour: Arc<Mutex<Behaviour>>,
    seen: Arc<Mutex<Seen>>,
    endpoint: PathBuf,
}

/// A driver that serves on two sockets until it is dropped; the files stay.
#[derive(Debug)]
pub(super) struct Plugin {
    pub(super) behaviour: Arc<Mutex<Behaviour>>,
    pub(super) seen: Arc<Mutex<Seen>>,
    pub(super) registration: PathBuf,
    pub(super) endpoint: PathBuf,
    /// Of its own, so that with it every connection ends, as those of a process do.
    runtime: Option<Runtime>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Plugin {
    /// `instance` tells the sockets of one from another.
    pub(super) fn start(root: &Path, instance: &str, behaviour: Behaviour) -> Self {
        let name = behaviour.name.clone();
        let dir = root.join("plugins").join(&name);
        std::fs::create_dir_all(&dir).unwrap();
        let endpoint = dir.join(format!("dra{instance}.sock"));
        let registration = root.join("plugins_registry").join(format!("{name}{instance}-reg.sock"));
        let tolerant = behaviour.tolerant;
        let service = Service {
            behaviour: Arc::new(Mutex::new(behaviour)),
            seen: Arc::default(),
            endpoint: endpoint.clone(),
        };
        let (behaviour, seen) = (Arc::clone(&service.behaviour), Arc::clone(&service.seen));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().ok();
        let plugin = Self { behaviour, seen, registration, endpoint, runtime };
        let runtime = plugin.runtime.as_ref().unwrap();
        let _inside = runtime.enter();
        plugin.serve_dra(service.clone());
        let _ = std::fs::remove_file(&plugin.registration);
        let listener = UnixListener::bind(&plugin.registration).unwrap();
        let server = Server::builder().add_service(RegistrationServer::new(service));
        tokio::spawn(async move {
            let _ = if tolerant {
                server.serve_with_incoming(unix::incoming(listener)).await
            } else {
                server.serve_with_incoming(UnixListenerStream::new(listener)).await
            };
        });
        plugin
    }

    fn serve_dra(&self, service: Service) {
        let _ = std::fs::remove_file(&self.endpoint);
        let listener = UnixListener::bind(&self.endpoint).unwrap();
        let server = Server::builder()
            .add_service(v1::dra_plugin_server::DraPluginServer::new(service.clone()))
            .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(service.clone()))
            .add_service(health::dra_resource_health_server::DraResourceHealthServer::new(service.clone()))
            .add_service(old_health::dra_resource_health_server::DraResourceHealthServer::new(service));
        tokio::spawn(async move {
            let _ = server.serve_with_incoming(unix::incoming(listener)).await;
        });
    }

    /// Its process ends, and what it has in the directories is gone.
    pub(super) fn remove(self) {
        let _ = std::fs::remove_file(&self.registration);
        let _ = std::fs::remove_file(&self.endpoint);
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }

    pub(super) fn calls(&self) -> Vec<(&'static str, &'static str, Vec<String>)> {
        self.seen.lock().unwrap().calls.clone()
    }
}

/// With pauses that a test can wait for.
pub(super) fn quick() -> KubeletOptions {
    let short = Duration::from_millis(20);
    KubeletOptions {
        register_again: short,
        health_again: short,
        wipe_after: short,
        ..KubeletOptions::default()
    }
}

pub(super) async fn kubelet(options: KubeletOptions) -> (tempfile::TempDir, Kubelet) {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path(), options).await;
    (dir, kubelet)
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let behaviour = self.behaviour.lock().unwrap().clone();
        tokio::time::sleep(behaviour.get_info_takes).await;
        Ok(Response::new(PluginInfo {
            r#type: behaviour.kind.to_owned(),
            name: behaviour.name,
            endpoint: self.endpoint.display().to_string(),
            supported_versions: behaviour.versions.iter().map(ToString::to_string).collect(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        self.seen.lock().unwrap().statuses.push((status.plugin_registered, status.error));
        let mut behaviour = self.behaviour.lock().unwrap();
        if status.plugin_registered && behaviour.notify_fails > 0 {
            behaviour.notify_fails -= 1;
            return Err(Status::internal("no thanks"));
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

impl Service {
    /// The UIDs to answer for and the error of each.
    async fn claims(
        &self,
        service: &'static str,
        call: &'static str,
        uids: Vec<String>,
    ) -> (Vec<String>, String) {
        let behaviour = self.behaviour.lock().unwrap().clone();
        self.seen.lock().unwrap().calls.push((service, call, uids.clone()));
        tokio::time::sleep(behaviour.prepare_takes).await;
        let answered = uids.into_iter().skip(behaviour.skips).chain(behaviour.makes_up).collect();
        (answered, behaviour.claim_error)
    }
}

macro_rules! dra {
    ($version:ident, $name:literal, $($share:tt)*) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for Service {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let uids = request.into_inner().claims.into_iter().map(|claim| claim.uid).collect();
                let (answered, error) = self.claims($name, "prepare", uids).await;
                let one = |uid: String| {
                    let device = $version::Device {
                        request_names: vec!["gpu".to_owned()],
                        pool_name: "p".to_owned(),
                        device_name: "d-0".to_owned(),
                        cdi_device_ids: vec![format!("example.com/gpu={uid}")],
                        $($share)*
                    };
                    let answer = $version::NodePrepareResourceResponse { devices: vec![device], error: error.clone() };
                    (uid, answer)
                };
                Ok(Response::new(answered.into_iter().map(one).collect()))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$version::NodeUnprepareResourcesResponse>, Status> {
                let uids = request.into_inner().claims.into_iter().map(|claim| claim.uid).collect();
                let (answered, error) = self.claims($name, "unprepare", uids).await;
                let one = |uid| (uid, $version::NodeUnprepareResourceResponse { error: error.clone() });
                Ok(Response::new(answered.into_iter().map(one).collect()))
            }
        }
    };
}

dra!(v1, "v1", share_id: Some("share".to_owned()));
dra!(v1beta1, "v1beta1",);

macro_rules! health {
    ($version:ident, $name:literal) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Service {
            type NodeWatchResourcesStream =
                ReceiverStream<Result<$version::NodeWatchResourcesResponse, Status>>;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                let (sender, receiver) = tokio::sync::mpsc::channel(1);
                let device = |name: &str, health: $version::HealthStatus| $version::DeviceHealth {
                    device: Some($version::DeviceIdentifier {
                        pool_name: "p".to_owned(),
                        device_name: name.to_owned(),
                    }),
                    health: health.into(),
                    message: $name.to_owned(),
                    ..Default::default()
                };
                let devices = vec![
                    device("d-0", $version::HealthStatus::Healthy),
                    device("d-1", $version::HealthStatus::Unhealthy),
                ];
                let report = $version::NodeWatchResourcesResponse { devices };
                tokio::spawn(async move {
                    let _ = sender.send(Ok(report)).await;
                    sender.closed().await;
                });
                Ok(Response::new(ReceiverStream::new(receiver)))
            }
        }
    };
}

health!(health, "v1");
health!(old_health, "v1alpha1");
