//! The device manager of a kubelet as a device plugin sees it: `kubelet.sock`, and calls of the plugin.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use nodedock_proto::kubelet::device_plugin::v1beta1::registration_server::{
    Registration, RegistrationServer,
};
use nodedock_proto::kubelet::device_plugin::v1beta1::{Empty, RegisterRequest};
use nodedock_proto::unix;
use nodedock_stand_ins::kubelet::authority;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

use crate::wire::Log;

/// Deadline for connecting to a socket that has to exist.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(1);

const SOCKET: &str = "kubelet.sock";

/// The registrations of device plugins on a `kubelet.sock`.
#[derive(Debug)]
pub(crate) struct Registrations {
    directory: PathBuf,
    newest: Arc<Mutex<Option<RegisterRequest>>>,
    log: Log,
    serving: Option<JoinHandle<()>>,
}

impl Registrations {
    pub(crate) fn new(directory: &Path, log: &Log) -> Self {
        Self {
            directory: directory.to_owned(),
            newest: Arc::default(),
            log: log.clone(),
            serving: None,
        }
    }

    /// Removes the sockets of the directory and makes `kubelet.sock`, as a kubelet does at its start. Forgets what registered.
    pub(crate) async fn serve(&mut self) -> Result<()> {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            // Its listener is closed then.
            let _ = serving.await;
        }
        // The directory stays: plugins watch it.
        for entry in
            std::fs::read_dir(&self.directory).context("read the directory of device plugins")?
        {
            let entry = entry?;
            if entry.file_type()?.is_socket() {
                std::fs::remove_file(entry.path()).context("remove a plugin's socket")?;
            }
        }
        self.forget();
        let path = self.directory.join(SOCKET);
        let listener =
            UnixListener::bind(&path).with_context(|| format!("make {}", path.display()))?;
        let service = RegistrationServer::new(Registering {
            newest: self.newest.clone(),
            log: self.log.clone(),
        });
        let server = Server::builder().add_service(service);
        self.serving = Some(tokio::spawn(async move {
            let _ = server.serve_with_incoming(unix::incoming(listener)).await;
        }));
        Ok(())
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Option<RegisterRequest>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what registered until now.
    pub(crate) fn forget(&self) {
        *self.seen() = None;
    }

    /// The newest request, if there is one.
    pub(crate) fn newest(&self) -> Option<RegisterRequest> {
        self.seen().clone()
    }

    /// Connects to the plugin of a request.
    pub(crate) async fn dial(
        &self,
        request: &RegisterRequest,
    ) -> Result<DevicePluginClient<Channel>> {
        if request.endpoint.is_empty() || request.endpoint.contains('/') {
            bail!(
                "the endpoint {:?} is no name of a socket in the directory",
                request.endpoint
            );
        }
        let path = self.directory.join(&request.endpoint);
        let stream = authority::dial(&path, AT_ONCE).await;
        let stream =
            stream.map_err(|why| anyhow!("the plugin does not listen on its endpoint: {why}"))?;
        let channel = authority::channel(stream, None)
            .await
            .map_err(|why| anyhow!("{why}"))?;
        Ok(DevicePluginClient::new(channel.0))
    }
}

impl Drop for Registrations {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

struct Registering {
    newest: Arc<Mutex<Option<RegisterRequest>>>,
    log: Log,
}

#[tonic::async_trait]
impl Registration for Registering {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        self.log.add(format!("Register: {request:?}"));
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(request);
        Ok(Response::new(Empty {}))
    }
}
