//! A native DRA plugin without hardware, which does only what every such plugin must do.
//!
//! A plugin serves two gRPC services on Unix sockets. On its registration socket, in a directory that the node's agent watches, it
//! returns its name and the path of its driver service. On the driver's socket it prepares claims. `Plugin::start` serves both. A
//! `Script` decides the answers, so that tests can make it answer wrongly, late or not at all.

pub mod incoming;
mod options;
mod script;
mod services;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use nodedock_proto::kubelet::dra::v1::dra_plugin_server::DraPluginServer as V1Server;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_server::DraPluginServer as V1beta1Server;
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1Server;
use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1alpha1Server;
use nodedock_proto::kubelet::registration::registration_server::RegistrationServer;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub use options::{Options, Versions};
pub use script::{Claim, Device, DeviceHealth, HealthState, Operation, Script, ScriptedOutcome};

use services::{Dra, Health, Registration};

/// An event of the plugin, for tests to wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The agent called GetInfo.
    Asked,
    /// The agent notified it of the outcome of its registration: registered, or the error.
    Notified(bool, String),
    /// A call, with its claims, request id and deadline.
    Called {
        operation: Operation,
        service: &'static str,
        claims: Vec<Claim>,
        request_id: String,
        deadline: Option<String>,
    },
    /// A client started to watch its devices' health.
    HealthWatched(&'static str),
}

/// Capacity of the event queue; further events are dropped.
const EVENTS_WAITING_MAX: usize = 1024;

/// A running plugin. Dropping it stops it.
pub struct Plugin {
    options: Options,
    shared: Arc<PluginState>,
    events: tokio::sync::Mutex<mpsc::Receiver<Event>>,
    service_stop: Mutex<CancellationToken>,
}

pub(crate) struct PluginState {
    pub(crate) options: Options,
    pub(crate) script: Mutex<Script>,
    pub(crate) health: watch::Sender<Vec<DeviceHealth>>,
    pub(crate) notify_error: Mutex<Option<String>>,
    events: mpsc::Sender<Event>,
    /// Connections to the driver's socket since the start.
    connections: AtomicUsize,
    /// Stops all tasks at once.
    pub(crate) died: CancellationToken,
}

impl PluginState {
    pub(crate) fn tell(&self, event: Event) {
        // The events need no receiver.
        let _ = self.events.try_send(event);
    }

    pub(crate) fn script(&self) -> Script {
        self.script
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Plugin {
    /// Serves the driver, then registers: in this order an agent that finds the registration also finds the driver.
    pub async fn start(options: Options, script: Script) -> io::Result<Self> {
        let plugin = Self::unregistered(options, script)?;
        plugin.register()?;
        Ok(plugin)
    }

    /// Serves the driver without a registration.
    pub fn unregistered(options: Options, script: Script) -> io::Result<Self> {
        let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
        let shared = Arc::new(PluginState {
            options: options.clone(),
            script: Mutex::new(script),
            health: watch::Sender::new(Vec::new()),
            notify_error: Mutex::new(None),
            events: sender,
            connections: AtomicUsize::new(0),
            died: CancellationToken::new(),
        });
        let events = tokio::sync::Mutex::new(events);
        let service_stop = Mutex::new(CancellationToken::new());
        let plugin = Self {
            options,
            shared,
            events,
            service_stop,
        };
        plugin.serve()?;
        Ok(plugin)
    }

    /// Serves the driver on its socket; replaces an earlier service.
    pub fn serve(&self) -> io::Result<()> {
        let stop = self.shared.died.child_token();
        let before = std::mem::replace(
            &mut *self
                .service_stop
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
            stop.clone(),
        );
        before.cancel();
        let shared = self.shared.clone();
        let incoming = incoming::listen(&self.options.endpoint, &stop)?.inspect(move |_| {
            shared.connections.fetch_add(1, Ordering::Relaxed);
        });
        let incoming = Box::pin(incoming);
        let dra = Dra(self.shared.clone());
        let health = Health(self.shared.clone());
        let versions = self.options.versions;
        let router = Server::builder()
            .add_optional_service(versions.v1.then(|| V1Server::new(dra.clone())))
            .add_optional_service(versions.v1beta1.then(|| V1beta1Server::new(dra)))
            .add_optional_service(
                versions
                    .health_v1
                    .then(|| HealthV1Server::new(health.clone())),
            )
            .add_optional_service(
                versions
                    .health_v1alpha1
                    .then(|| HealthV1alpha1Server::new(health)),
            );
        tokio::spawn(run(router, incoming, stop));
        Ok(())
    }

    /// Creates the registration socket; replaces an earlier one.
    pub fn register(&self) -> io::Result<()> {
        let stop = self.shared.died.child_token();
        let incoming = incoming::listen(&self.options.registration_socket(), &stop)?;
        let router = Server::builder()
            .add_service(RegistrationServer::new(Registration(self.shared.clone())));
        tokio::spawn(run(router, incoming, stop));
        Ok(())
    }

    /// Removes the registration socket, which deregisters the plugin.
    pub fn unregister(&self) -> io::Result<()> {
        std::fs::remove_file(self.options.registration_socket())
    }

    /// Stops the service with all its connections; the registration stays.
    pub fn disconnect(&self) {
        self.service_stop
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .cancel();
    }

    /// Stops everything as a crash does: connections break, socket files stay.
    pub fn die(&self) {
        self.shared.died.cancel();
    }

    pub fn set_script(&self, script: Script) {
        *self
            .shared
            .script
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = script;
    }

    /// Makes later notifications of the registration fail with this text.
    pub fn fail_notifications(&self, text: Option<&str>) {
        *self
            .shared
            .notify_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = text.map(str::to_owned);
    }

    /// Reports this health of its devices to all watchers.
    pub fn report_health(&self, devices: Vec<DeviceHealth>) {
        self.shared.health.send_replace(devices);
    }

    /// Waits for the next event.
    pub async fn event(&self) -> Event {
        match self.events.lock().await.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Waits for the next notification: registered, or the error.
    pub async fn notified(&self) -> (bool, String) {
        loop {
            if let Event::Notified(registered, error) = self.event().await {
                return (registered, error);
            }
        }
    }

    /// Returns the number of connections to the driver's socket.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    pub fn registration_socket(&self) -> PathBuf {
        self.options.registration_socket()
    }

    pub fn endpoint(&self) -> &Path {
        &self.options.endpoint
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.die();
    }
}

/// Time that a call in flight has when the plugin stops.
const STOP: Duration = Duration::from_secs(1);

async fn run(
    router: tonic::transport::server::Router,
    incoming: incoming::Incoming,
    stop: CancellationToken,
) {
    let served = router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    tokio::select! {
        served = served => if let Err(error) = served {
            eprintln!("native-null: {error}");
        },
        () = async { stop.cancelled().await; tokio::time::sleep(STOP).await } => {}
    }
}
