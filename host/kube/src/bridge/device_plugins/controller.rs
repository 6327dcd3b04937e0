//! One resource at the kubelet: its socket in the kubelet's directory, and its registration.
//!
//! The kubelet deletes every socket of the directory when it starts, and then creates its own: the resource's socket is created again
//! before each registration if it is gone. The directory's watch only wakes the controller, which then checks the sockets itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;
use tonic::service::Routes;
use wire::device_plugin_server::DevicePluginServer;
use wire::registration_client::RegistrationClient;

use super::OfferedResource;
use super::registration::{PluginRegistration, RegistrationState};
use super::service::DevicePluginService;
use crate::bridge::sockets::ServedSocket;
use crate::bridge::{BRIDGE_LOOK_PERIOD, convert};
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets, socket_id};
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_base::socket::connect;
use nodedock_core::driver::DeviceOptions;
use nodedock_model::{Problem, ProblemCode, limit};

/// Deadline of a registration with a kubelet: it dials the plugin for 10 s, and calls it for its options meanwhile.
const REGISTER_DEADLINE: Duration = Duration::from_secs(20);

/// Bytes of a kubelet's message that are kept.
const MESSAGE_BYTES_MAX: usize = 512;

pub(super) struct ResourceController {
    resource: Arc<OfferedResource>,
    /// Name of the resource's socket.
    name: String,
    kubelet_path: PathBuf,
    /// Sockets in the kubelet's directory.
    sockets: watch::Receiver<Arc<Sockets>>,
    state: RegistrationState,
    /// Those that the kubelet has.
    registered_options: Option<DeviceOptions>,
    socket: Option<ServedSocket>,
}

impl ResourceController {
    pub(super) fn new(
        resource: Arc<OfferedResource>,
        sockets: watch::Receiver<Arc<Sockets>>,
    ) -> Self {
        let directories = &resource.context.directories;
        let (name, state) = (
            directories.of_resource(&resource.name),
            RegistrationState::default(),
        );
        let kubelet_path = directories.device_plugins.join(KUBELET_SOCKET);
        Self {
            resource,
            name,
            kubelet_path,
            sockets,
            state,
            registered_options: None,
            socket: None,
        }
    }

    /// Runs until the resource's tasks stop, which ends the lists and removes the socket. From a handover on nothing is registered.
    pub(super) async fn run(mut self) {
        let context = self.resource.context.clone();
        let stopped = self.resource.tasks.stopped();
        tokio::pin!(stopped);
        tokio::select! {
            // A kubelet that took a registration meanwhile sees the end of the list.
            () = &mut stopped => {}
            () = context.handover.changing.stopped() => stopped.await,
            () = self.keep_registered() => stopped.await,
        }
        self.resource.context.parts.conditions.clear(
            ProblemCode::DevicePluginRefused,
            self.resource.name.as_str(),
        );
        self.set_away(None);
        let Some(socket) = self.socket else { return };
        let leave = context.parts.listeners.outlive_a_stop() && context.parts.tasks.is_stopping();
        let closed = if leave {
            socket.leave()
        } else {
            socket.close()
        };
        if !closed.drain(limit::DRAIN).await {
            tracing::warn!(resource = %self.resource.name, "calls of the kubelet did not end in time");
        }
    }

    async fn keep_registered(&mut self) {
        let mut lists = self.resource.lists.subscribe();
        // The instance before still has the kubelet's list, and forwards what the kubelet calls to this socket.
        let mut alone = self.resource.context.alone.subscribe();
        while !*alone.borrow_and_update() {
            let served = self.serve().await;
            if let Err(why) = &served {
                tracing::warn!(resource = %self.resource.name, why, "the instance before cannot forward calls");
            }
            tokio::select! {
                // An error means that the tasks end.
                _ = alone.changed() => {}
                () = tokio::time::sleep(BRIDGE_LOOK_PERIOD), if served.is_err() => {}
            }
        }
        let mut offers = self.resource.offer.subscribe();
        loop {
            self.sockets.mark_unchanged();
            offers.mark_unchanged();
            if self
                .registered_options
                .is_some_and(|options| options != self.options())
            {
                // A kubelet asks for them when a plugin registers.
                self.state.forget();
            }
            let (open_lists, kubelet) = (*lists.borrow_and_update(), self.kubelet());
            let now = Instant::now();
            self.state.observe(kubelet, open_lists, now);
            self.publish_status();
            let due = self.state.due(kubelet, now);
            if due.is_some_and(|at| at <= now) {
                let (mut sockets, path) = (self.sockets.clone(), self.kubelet_path.clone());
                tokio::select! {
                    () = another_socket(&mut sockets, &path, kubelet) => {}
                    () = self.register() => {}
                }
                continue;
            }
            let away = self.state.away_at().filter(|at| *at > Instant::now());
            let wake = [due, away].into_iter().flatten().min();
            tokio::select! {
                // Whichever it was, the next round checks everything.
                changed = self.sockets.changed() => if changed.is_err() { return },
                changed = lists.changed() => if changed.is_err() { return },
                changed = offers.changed() => if changed.is_err() { return },
                Some(()) = OptionFuture::from(wake.map(tokio::time::sleep_until)) => {}
            }
        }
    }

    fn options(&self) -> DeviceOptions {
        self.resource.offer.borrow().source.options()
    }

    fn kubelet(&self) -> Option<SocketId> {
        socket_id(&self.kubelet_path)
    }

    /// Registers with the kubelet that listens now. Its socket is the one that was dialled: another may be there before and after, and a
    /// kubelet that took the registration must not be called again.
    async fn register(&mut self) {
        let served = self.serve().await;
        let (kubelet, options) = (self.kubelet(), self.options());
        let outcome = match (served, kubelet) {
            (Err(why), _) => Err(PluginRegistration::Waiting(why)),
            (Ok(()), None) => Err(PluginRegistration::Waiting("no socket is there".to_owned())),
            (Ok(()), Some(kubelet)) => {
                let call = tokio::time::timeout(REGISTER_DEADLINE, self.call(kubelet));
                match call.await {
                    Ok(answer) => answer.map(|()| kubelet),
                    Err(_) => {
                        let why = format!("no answer within {} s", REGISTER_DEADLINE.as_secs());
                        Err(PluginRegistration::Waiting(why))
                    }
                }
            }
        };
        let (metrics, resource) = (&self.resource.context.metrics, &self.resource.name);
        match outcome {
            Ok(kubelet) => {
                let is_listed = *self.resource.lists.borrow() > 0;
                self.state.registered(kubelet, is_listed, Instant::now());
                self.registered_options = Some(options);
                metrics.resource_registered(resource, "registered");
                tracing::info!(%resource, socket = self.name, "registered with the kubelet");
                self.remove_stale();
            }
            Err(status) => {
                if let PluginRegistration::Refused(_) = status {
                    metrics.resource_registered(resource, "refused");
                }
                self.state.failed(kubelet, status, Instant::now());
            }
        }
        self.publish_status();
    }

    /// Removes sockets of the resource that earlier starts have left.
    fn remove_stale(&self) {
        let Some((of_resource, _)) = self.name.rsplit_once('-') else {
            return;
        };
        let names = self.sockets.borrow().keys().cloned().collect::<Vec<_>>();
        let stale = names.into_iter().filter(|name| {
            let before = name.rsplit_once('-').map(|(before, _)| before);
            *name != self.name && before == Some(of_resource)
        });
        for name in stale {
            tracing::info!(socket = name, "removed: a process that ended has left it");
            // It may be gone by now.
            let _ = std::fs::remove_file(self.kubelet_path.with_file_name(name));
        }
    }

    async fn call(&self, kubelet: SocketId) -> Result<(), PluginRegistration> {
        let channel = connect(&self.kubelet_path).await;
        let channel = channel.map_err(|error| PluginRegistration::Waiting(chain(&error)))?;
        if self.kubelet() != Some(kubelet) {
            return Err(PluginRegistration::Waiting(
                "the socket was replaced meanwhile".to_owned(),
            ));
        }
        let request = wire::RegisterRequest {
            version: convert::DEVICE_PLUGIN_VERSION.to_owned(),
            endpoint: self.name.clone(),
            resource_name: self.resource.name.to_string(),
            options: Some(convert::options(self.options())),
        };
        let client = RegistrationClient::new(channel);
        let mut client = client.max_decoding_message_size(limit::REGISTER_BYTES_MAX);
        let answer = client.register(request).await.map(drop);
        answer.map_err(|status| {
            let why = format!(
                "{:?}: {}",
                status.code(),
                one_line(status.message(), MESSAGE_BYTES_MAX)
            );
            match status.code() {
                // What tonic itself says of a connection that broke.
                Code::Unavailable | Code::Cancelled => PluginRegistration::Waiting(why),
                _ => PluginRegistration::Refused(why),
            }
        })
    }

    /// Makes sure that the resource's socket is there and served. The error says why it is not.
    async fn serve(&mut self) -> Result<(), String> {
        if self.socket.as_ref().is_some_and(ServedSocket::is_present) {
            return Ok(());
        }
        // A kubelet that was connected by the old socket is gone, or connects again by the new one.
        self.socket = None;
        let tasks = self.resource.tasks.child();
        let service = DevicePluginService {
            resource: self.resource.clone(),
            tasks: tasks.clone(),
        };
        let routes = Routes::new(DevicePluginServer::new(service));
        let (path, context) = (
            self.kubelet_path.with_file_name(&self.name),
            &self.resource.context,
        );
        let opened = ServedSocket::open(
            "device-plugin-service",
            &path,
            routes,
            Vec::new(),
            context.sockets(),
            tasks,
        )
        .await;
        self.socket = Some(opened.map_err(|error| chain(&error))?);
        Ok(())
    }

    /// Publishes the status, and keeps the conditions in step with it.
    fn publish_status(&self) {
        let (status, name) = (&self.state.status, &self.resource.name);
        // First: a condition is about this status.
        *self.resource.registration.lock() = status.clone();
        let code = ProblemCode::DevicePluginRefused;

        let is_away = self.state.away_at().is_some_and(|at| at <= Instant::now());
        let (refused, away) = match status {
            PluginRegistration::Refused(why) => {
                let message =
                    format!("the kubelet does not take the extended resource {name}: {why}");
                (Some(Problem::unavailable(code, message)), None)
            }
            PluginRegistration::Waiting(why) if is_away => (None, Some(why.as_str())),
            PluginRegistration::Waiting(_) | PluginRegistration::Followed => (None, None),
        };
        self.resource
            .context
            .parts
            .conditions
            .update(code, name.as_str(), refused);
        self.set_away(away);
    }

    /// The condition that no kubelet is there stays while any resource waits for one.
    fn set_away(&self, why: Option<&str>) {
        let (context, name) = (&self.resource.context, &self.resource.name);
        let (conditions, socket) = (
            &context.parts.conditions,
            self.kubelet_path.display().to_string(),
        );
        let mut waiting = context.waiting.lock();
        if let Some(why) = why {
            waiting.insert(name.clone());
            let message = format!(
                "no kubelet takes device plugins at {socket} ({why}): the extended resources of drivers are not offered to it"
            );
            conditions.set(
                &socket,
                Problem::unavailable(ProblemCode::KubeletAway, message),
            );
        } else if waiting.remove(name) && waiting.is_empty() {
            conditions.clear(ProblemCode::KubeletAway, &socket);
        }
    }
}

/// Resolves when the kubelet's socket is another than `tried`.
async fn another_socket(
    sockets: &mut watch::Receiver<Arc<Sockets>>,
    path: &Path,
    tried: Option<SocketId>,
) {
    while sockets.changed().await.is_ok() {
        if socket_id(path) != tried {
            return;
        }
    }
    std::future::pending().await
}
