//! One resource at the kubelet: its socket in the kubelet's directory, and its registration.
//!
//! The kubelet deletes every socket of the directory when it starts, and then makes its own: the resource's socket is made again before
//! each registration if it is gone. The directory's watch only wakes the controller, which then looks at the sockets itself.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Request};
use wire::device_plugin_server::DevicePluginServer;
use wire::registration_client::RegistrationClient;

use super::registration::{PluginRegistration, RegistrationState, Step};
use super::service::DevicePluginService;
use crate::bridge::paths::newer_sockets;
use crate::bridge::sockets::{ServedSocket, server};
use crate::bridge::{Context, convert};
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets, socket_id};
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_base::socket::connect;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, Problem, limit};

/// A kubelet does not take a resource, by the resource.
const REFUSED: &str = "device-plugin-refused";
/// No kubelet takes registrations, by its socket.
const AWAY: &str = "kubelet-away";
/// Bytes of a kubelet's message that are kept.
const MESSAGE_BYTES_MAX: usize = 512;

/// An attempt to register that failed.
struct Failure {
    /// The socket that was dialled, if one was there.
    kubelet: Option<SocketId>,
    status: PluginRegistration,
}

pub(super) struct ResourceController {
    context: Arc<Context>,
    resource: ExtendedResource,
    /// Of the resource's socket.
    name: String,
    directory: PathBuf,
    service: DevicePluginService,
    /// In the kubelet's directory.
    sockets: watch::Receiver<Arc<Sockets>>,
    tasks: Tasks,
    state: RegistrationState,
    status: Arc<Mutex<PluginRegistration>>,
    socket: Option<ServedSocket>,
}

impl ResourceController {
    pub(super) fn new(
        service: DevicePluginService,
        sockets: watch::Receiver<Arc<Sockets>>,
        status: Arc<Mutex<PluginRegistration>>,
    ) -> Self {
        let (context, resource) = (service.context.clone(), service.resource.clone());
        let (name, directory) =
            (context.directories.of_resource(&resource), context.directories.device_plugins());
        let (tasks, state) = (service.tasks.clone(), RegistrationState::default());
        Self { context, resource, name, directory, service, sockets, tasks, state, status, socket: None }
    }

    /// Until its tasks stop, which ends the lists and takes the socket away.
    pub(super) async fn run(mut self) {
        let stopped = self.tasks.stopped();
        tokio::select! {
            // A kubelet that took a registration meanwhile sees the end of the list.
            () = stopped => {}
            () = self.keep_registered() => {}
        }
        self.end().await;
    }

    async fn keep_registered(&mut self) {
        let mut following = self.service.following.subscribe();
        loop {
            self.sockets.mark_unchanged();
            let (lists, now) = (*following.borrow_and_update(), Instant::now());
            self.state.follows(lists, now);
            let kubelet = self.kubelet();
            let superseded = self.is_superseded(kubelet.as_ref(), lists).await;
            self.state.observe(kubelet.as_ref(), lists, superseded, now);
            self.publish_status();
            let until = match self.state.step(kubelet.as_ref(), superseded, now) {
                Step::Register => {
                    let (mut sockets, path) = (self.sockets.clone(), self.kubelet_path());
                    tokio::select! {
                        () = another_socket(&mut sockets, &path, kubelet) => {}
                        () = self.register() => {}
                    }
                    continue;
                }
                Step::Wait(at) => Some(at),
                Step::Rest => None,
            };
            let away = self.state.away_at().filter(|at| *at > Instant::now());
            tokio::select! {
                // Whichever it was, the next round looks at everything.
                changed = self.sockets.changed() => if changed.is_err() { return },
                changed = following.changed() => if changed.is_err() { return },
                () = sleep_until([until, away].into_iter().flatten().min()) => {}
            }
        }
    }

    fn kubelet_path(&self) -> PathBuf {
        self.directory.join(KUBELET_SOCKET)
    }

    fn kubelet(&self) -> Option<SocketId> {
        socket_id(&self.kubelet_path())
    }

    async fn is_superseded(&self, kubelet: Option<&SocketId>, lists: usize) -> bool {
        let Some(socket) = &self.socket else { return false };
        if lists > 0 || !self.state.is_registered_at(kubelet) {
            return false;
        }
        let newer = newer_sockets(&self.sockets.borrow(), &self.resource, (&self.name, socket.id()));
        for name in newer {
            let connect = UnixStream::connect(self.directory.join(name));
            if matches!(tokio::time::timeout(limit::LIST_LOST, connect).await, Ok(Ok(_))) {
                return true;
            }
        }
        false
    }

    async fn register(&mut self) {
        match self.try_register().await {
            Ok(kubelet) => {
                let lists = *self.service.following.borrow();
                self.state.registered(kubelet, lists > 0, Instant::now());
                self.context.metrics.resource_registered(&self.resource, "registered");
                tracing::info!(resource = %self.resource, socket = self.name, "registered with the kubelet");
            }
            Err(Failure { kubelet, status }) => {
                if let PluginRegistration::Refused(_) = status {
                    self.context.metrics.resource_registered(&self.resource, "refused");
                }
                self.state.failed(kubelet, status, Instant::now());
            }
        }
        self.publish_status();
    }

    /// Registers with the kubelet that listens now. Returns which socket was dialled: another may be there before and after, and a
    /// kubelet that took the registration must not be called again.
    async fn try_register(&mut self) -> Result<SocketId, Failure> {
        let waiting = |kubelet, why| Failure { kubelet, status: PluginRegistration::Waiting(why) };
        if let Err(why) = self.serve().await {
            return Err(waiting(self.kubelet(), why));
        }
        let Some(kubelet) = self.kubelet() else {
            return Err(waiting(None, "no socket is there".to_owned()));
        };
        let call = async {
            let channel = connect(&self.kubelet_path()).await;
            let channel = channel.map_err(|error| PluginRegistration::Waiting(chain(&error)))?;
            if self.kubelet() != Some(kubelet) {
                return Err(PluginRegistration::Waiting("the socket was replaced meanwhile".to_owned()));
            }
            let request = wire::RegisterRequest {
                version: convert::DEVICE_PLUGIN_VERSION.to_owned(),
                endpoint: self.name.clone(),
                resource_name: self.resource.to_string(),
                options: Some(convert::options()),
            };
            let client = RegistrationClient::new(channel);
            let mut client = client.max_decoding_message_size(limit::REGISTER_BYTES_MAX);
            client.register(Request::new(request)).await.map_err(|status| {
                let why = format!("{:?}: {}", status.code(), one_line(status.message(), MESSAGE_BYTES_MAX));
                match status.code() {
                    // What tonic itself says of a connection that broke.
                    Code::Unavailable | Code::Cancelled => PluginRegistration::Waiting(why),
                    _ => PluginRegistration::Refused(why),
                }
            })
        };
        match tokio::time::timeout(limit::REGISTER_DEADLINE, call).await {
            Ok(Ok(_)) => Ok(kubelet),
            Ok(Err(status)) => Err(Failure { kubelet: Some(kubelet), status }),
            Err(_) => {
                let why = format!("no answer within {} s", limit::REGISTER_DEADLINE.as_secs());
                Err(waiting(Some(kubelet), why))
            }
        }
    }

    /// Makes sure that the resource's socket is there and served. The error says why it is not.
    async fn serve(&mut self) -> Result<(), String> {
        if self.socket.as_ref().is_some_and(ServedSocket::is_present) {
            return Ok(());
        }
        // Whoever was connected by the old socket is gone, or connects again by the new one.
        self.socket = None;
        let tasks = self.tasks.child();
        let service = DevicePluginService { tasks: tasks.clone(), ..self.service.clone() };
        let router = server().add_service(DevicePluginServer::new(service));
        let path = self.directory.join(&self.name);
        let opened = ServedSocket::open("device-plugin-face", &path, router, Vec::new(), tasks).await;
        self.socket = Some(opened.map_err(|error| chain(&error))?);
        Ok(())
    }

    /// Shows the status, and keeps the conditions in step with it.
    fn publish_status(&self) {
        let (status, conditions) = (self.state.status(), &self.context.parts.conditions);
        match status {
            PluginRegistration::Refused(why) => {
                let message =
                    format!("the kubelet does not take the extended resource {}: {why}", self.resource);
                conditions.set(self.resource.as_str(), Problem::unavailable(REFUSED, message));
            }
            _ => conditions.clear(REFUSED, self.resource.as_str()),
        }
        match status {
            PluginRegistration::Waiting(why)
                if self.state.away_at().is_some_and(|at| at <= Instant::now()) =>
            {
                self.set_away(Some(why));
            }
            _ => self.set_away(None),
        }
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status.clone();
    }

    /// The condition that no kubelet is there stays while any resource waits for one.
    fn set_away(&self, why: Option<&str>) {
        let (conditions, socket) =
            (&self.context.parts.conditions, self.kubelet_path().display().to_string());
        let mut waiting = self.context.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = why {
            waiting.insert(self.resource.clone());
            let message = format!(
                "no kubelet takes device plugins at {socket} ({why}): the extended resources of drivers are not offered to it"
            );
            conditions.set(&socket, Problem::unavailable(AWAY, message));
        } else if waiting.remove(&self.resource) && waiting.is_empty() {
            conditions.clear(AWAY, &socket);
        }
    }

    /// Removes the socket, and waits for calls under way.
    async fn end(self) {
        self.context.parts.conditions.clear(REFUSED, self.resource.as_str());
        self.set_away(None);
        let Some(socket) = self.socket else { return };
        if !socket.close().drain(limit::DRAIN).await {
            tracing::warn!(resource = %self.resource, "calls of the kubelet did not end in time");
        }
    }
}

/// Resolves when the kubelet's socket is another than `tried`.
async fn another_socket(sockets: &mut watch::Receiver<Arc<Sockets>>, path: &Path, tried: Option<SocketId>) {
    while sockets.changed().await.is_ok() {
        if socket_id(path) != tried {
            return;
        }
    }
    std::future::pending().await
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
