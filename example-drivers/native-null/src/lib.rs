//! A native DRA plugin that has no hardware: what every such plugin must do, and nothing else.
//!
//! A plugin serves two gRPC services on Unix sockets. On its registration socket, which lies in a folder that the node's agent
//! watches, it says who it is and where its driver service is. On the driver's socket it prepares claims. `Plugin::start` does
//! both; what is answered to a claim is up to a `Script`, so that tests can make it answer wrongly, late or not at all.

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
pub use script::{Answer, Claim, Device, DeviceHealth, HealthState, Operation, Script};

use services::{Dra, Health, Registration};

/// What happened to the plugin, for tests to wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Somebody asked who it is.
    Asked,
    /// It was told what became of its registration: whether it is registered, and else why not.
    Notified(bool, String),
    /// A call, with the claims in it, the request id and the deadline that came with it.
    Called {
        operation: Operation,
        service: &'static str,
        claims: Vec<Claim>,
        request_id: String,
        deadline: Option<String>,
    },
    /// Somebody began to watch its devices' health.
    HealthWatched(&'static str),
}

/// Events that may wait; beyond that the newest are dropped.
const EVENTS_WAITING_MAX: usize = 1024;

/// A running plugin. It stops when it is dropped.
pub struct Plugin {
    options: Options,
    shared: Arc<Shared>,
    events: tokio::sync::Mutex<mpsc::Receiver<Event>>,
    service_stop: Mutex<CancellationToken>,
}

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) script: Mutex<Script>,
    pub(crate) health: watch::Sender<Vec<DeviceHealth>>,
    pub(crate) notify_error: Mutex<Option<String>>,
    events: mpsc::Sender<Event>,
    /// To the driver's socket, since the start.
    connections: AtomicUsize,
    /// Ends everything at once.
    pub(crate) died: CancellationToken,
}

impl Shared {
    pub(crate) fn tell(&self, event: Event) {
        // Nobody need look.
        let _ = self.events.try_send(event);
    }

    pub(crate) fn script(&self) -> Script {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Plugin {
    /// Serves the driver, then registers: in this order a caller of the one always finds the other.
    pub async fn start(options: Options, script: Script) -> io::Result<Self> {
        let plugin = Self::unregistered(options, script)?;
        plugin.register()?;
        Ok(plugin)
    }

    /// Serves the driver only.
    pub fn unregistered(options: Options, script: Script) -> io::Result<Self> {
        let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
        let shared = Arc::new(Shared {
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
        let plugin = Self { options, shared, events, service_stop };
        plugin.serve()?;
        Ok(plugin)
    }

    /// Serves the driver on its socket, anew if it was served before.
    pub fn serve(&self) -> io::Result<()> {
        let stop = self.shared.died.child_token();
        let before = std::mem::replace(
            &mut *self.service_stop.lock().unwrap_or_else(PoisonError::into_inner),
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
            .add_optional_service(versions.health_v1.then(|| HealthV1Server::new(health.clone())))
            .add_optional_service(versions.health_v1alpha1.then(|| HealthV1alpha1Server::new(health)));
        tokio::spawn(run(router, incoming, stop));
        Ok(())
    }

    /// Makes the registration socket, anew if it was there.
    pub fn register(&self) -> io::Result<()> {
        let stop = self.shared.died.child_token();
        let incoming = incoming::listen(&self.options.registration_socket(), &stop)?;
        let router =
            Server::builder().add_service(RegistrationServer::new(Registration(self.shared.clone())));
        tokio::spawn(run(router, incoming, stop));
        Ok(())
    }

    /// Takes the registration socket away, which is how a plugin says goodbye.
    pub fn unregister(&self) -> io::Result<()> {
        std::fs::remove_file(self.options.registration_socket())
    }

    /// Ends the service, with every connection to it; the registration stays.
    pub fn disconnect(&self) {
        self.service_stop.lock().unwrap_or_else(PoisonError::into_inner).cancel();
    }

    /// Ends everything as a crash does: connections break, socket files stay.
    pub fn die(&self) {
        self.shared.died.cancel();
    }

    pub fn set_script(&self, script: Script) {
        *self.shared.script.lock().unwrap_or_else(PoisonError::into_inner) = script;
    }

    /// Lets the next notifications that it is registered fail with this text.
    pub fn fail_notifications(&self, text: Option<&str>) {
        *self.shared.notify_error.lock().unwrap_or_else(PoisonError::into_inner) = text.map(str::to_owned);
    }

    /// Says this of its devices to whoever watches.
    pub fn report_health(&self, devices: Vec<DeviceHealth>) {
        self.shared.health.send_replace(devices);
    }

    /// The next that happened. It is waited for.
    pub async fn event(&self) -> Event {
        match self.events.lock().await.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Waits for the next notification: whether it is registered, and else why not.
    pub async fn notified(&self) -> (bool, String) {
        loop {
            if let Event::Notified(registered, error) = self.event().await {
                return (registered, error);
            }
        }
    }

    /// How often somebody connected to the driver's socket.
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

/// How long a call in flight may take once the plugin stops.
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
