//! The worker of one registration socket.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::Plugins;
use super::offer::{self, DraOffer, Invalid, Offer, OfferError};
use crate::device_plugins::DevicePluginEndpoint;
use crate::grpc::{Connection, DraPlugin, Health, PluginInfo, Registrar, RegistrarError, Rpcs};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Driver, DriverIdentity};
use nodedock_core::registry::{DriverState, DriverView, Reloaded};
use nodedock_core::registry::{Native, Taken};
use nodedock_model::{DriverKind, DriverName, Problem};

pub(super) enum Order {
    /// The socket is new or was replaced.
    Register,
    /// An operator requests a new registration; completes the sender when done.
    Again(oneshot::Sender<Reloaded>),
    Gone,
}

pub(super) struct Worker {
    shared: Plugins,
    socket: PathBuf,
    /// The socket's path in the state.
    source: String,
    backoff: Backoff,
    registered: Option<Registered>,
    /// Why the last attempt failed, and when the next one is.
    waiting: Option<Waiting>,
}

/// State of a registered plugin.
struct Registered {
    /// `None`: a device plugin, which this module does not connect to.
    dra: Option<DraInstance>,
}

struct DraInstance {
    name: DriverName,
    endpoint: PathBuf,
    connection: Connection,
    /// Tasks of the connection.
    tasks: Tasks,
    health_tasks: Tasks,
}

impl Registered {
    fn stop(&self) {
        if let Some(dra) = &self.dra {
            dra.tasks.stop();
            dra.health_tasks.stop();
        }
    }
}

struct Waiting {
    until: Instant,
    reason: String,
    /// Whether a freed name or endpoint triggers the retry.
    until_freed: bool,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Step(#[from] RegistrarError),
    #[error(transparent)]
    Offer(#[from] OfferError),
    #[error("plugin registration failed with err: {0}")]
    Taken(#[from] Taken),
}

/// Next step of a worker.
enum Next {
    Order(Option<Order>),
    Retry,
    LinkChanged,
}

impl Worker {
    pub(super) fn new(shared: Plugins, socket: PathBuf) -> Self {
        let source = socket.display().to_string();
        let backoff = Backoff::new(shared.times.retry_min, shared.times.retry_max);
        Self { shared, socket, source, backoff, registered: None, waiting: None }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Order>) {
        let stopped = self.shared.tasks.stopped();
        tokio::pin!(stopped);
        let mut freed = self.shared.registry.freed_changes();
        loop {
            let next = tokio::select! {
                // Safe to drop: the plugin detects the daemon's end and registers with the next one.
                () = &mut stopped => return,
                // Safe to drop: an order that is not received stays in the channel.
                order = inbox.recv() => Next::Order(order),
                () = retry(self.waiting.as_ref(), &mut freed) => Next::Retry,
                () = link_changed(self.registered.as_mut()) => Next::LinkChanged,
            };
            tokio::select! {
                // Safe to drop: a registration in progress starts again at the next start.
                () = &mut stopped => return,
                goes_on = self.step(next, inbox.is_empty(), &mut freed) => if !goes_on { return },
            }
        }
    }

    async fn step(&mut self, next: Next, is_last: bool, freed: &mut watch::Receiver<u64>) -> bool {
        match next {
            Next::Order(Some(Order::Register)) => {
                self.backoff.reset();
                // A later order has the newer state of the socket.
                if is_last {
                    self.register("socket", freed).await;
                }
            }
            Next::Order(Some(Order::Again(done))) => {
                self.register("reload", freed).await;
                // The caller may have been cancelled.
                let _ = done.send(Ok(()));
            }
            Next::Order(Some(Order::Gone)) => {
                self.leave();
                return false;
            }
            Next::Order(None) => return false,
            Next::Retry => self.register("retry", freed).await,
            Next::LinkChanged => {
                if let Some(dra) = self.instance() {
                    self.shared.registry.settle(&dra.name);
                }
            }
        }
        true
    }

    fn instance(&self) -> Option<&DraInstance> {
        self.registered.as_ref().and_then(|registered| registered.dra.as_ref())
    }

    fn show(&self, change: impl FnOnce(&mut DriverView)) {
        self.shared.registry.update(DriverKind::Grpc, &self.source, change);
    }

    /// Registers from the first step. The previous registration of the socket stays until the new one succeeds, so that a plugin
    /// that is replaced under the same names stays available; a kubelet removes it first. If a step fails it is removed.
    async fn register(&mut self, cause: &str, freed: &mut watch::Receiver<u64>) {
        if self.registered.is_none() && self.waiting.is_none() {
            self.show(|view| view.state = DriverState::Seen);
        }
        // A name or endpoint that becomes free from here on triggers a retry.
        freed.mark_unchanged();
        let started = std::time::Instant::now();
        match self.shake_hands().await {
            Ok(info) => {
                self.waiting = None;
                self.backoff.reset();
                let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
                tracing::info!(plugin = info, socket = self.source, duration_us, "plugin registered");
                self.show(|view| {
                    view.problem = None;
                    view.note("registered", cause, duration_us, None);
                });
            }
            Err(refusal) => {
                self.dismiss();
                self.failed(&refusal, cause);
            }
        }
    }

    /// Returns the plugin's name. After a failure the caller must remove `registered`.
    async fn shake_hands(&mut self) -> Result<String, Refusal> {
        let mut registrar = Registrar::dial(&self.socket, self.shared.times.steps).await?;
        let info = registrar.info().await?;
        let name = info.name.clone();
        if let Err(refusal) = self.admit(info).await {
            let notified = registrar.refuse(&format!("{refusal} at socket {}", self.source)).await;
            if let Err(error) = notified {
                tracing::debug!(
                    socket = self.source,
                    error = chain(&error),
                    "cannot notify the plugin of its refusal"
                );
            }
            return Err(refusal);
        }
        registrar.accept().await?;
        Ok(name)
    }

    async fn admit(&mut self, info: PluginInfo) -> Result<(), Refusal> {
        let offer = offer::read(info, &self.socket)?;
        let endpoint = resolve(offer.endpoint()).await.map_err(OfferError::from)?;
        match offer {
            Offer::Dra(offer) => self.admit_dra(offer, endpoint)?,
            Offer::DevicePlugin(offer) => self.admit_device_plugin(offer),
        }
        Ok(())
    }

    fn admit_device_plugin(&mut self, offer: DevicePluginEndpoint) {
        self.dismiss();
        self.show(|view| {
            view.name = None;
            view.state = DriverState::Described;
            view.summary = format!("device plugin for {}", offer.resource);
            view.reason = "registered; the device manager connects to it".to_owned();
            view.version = "v1beta1".to_owned();
        });
        self.shared.device_plugins.put(&self.source, offer);
        self.registered = Some(Registered { dra: None });
    }

    fn admit_dra(&mut self, offer: DraOffer, resolved: PathBuf) -> Result<(), Taken> {
        let DraOffer { name, endpoint, service, health, services } = offer;
        self.show(|view| {
            view.name = Some(name.clone());
            view.version = service.version().to_owned();
            view.summary = format!("native DRA plugin at {}", endpoint.display());
        });
        let (connection, tasks) = self.connect(&endpoint);
        let health_tasks = tasks.child();
        let plugin =
            DraPlugin { name: name.clone(), service, connection: connection.clone(), rpcs: Rpcs::default() };
        let identity = DriverIdentity {
            name: name.clone(),
            kind: DriverKind::Grpc,
            version: service.version().to_owned(),
            digest: String::new(),
            source: self.source.clone(),
            summary: String::new(),
        };
        let (identity, claims) = (Arc::new(identity), Some(Arc::new(plugin) as _));
        let driver = Driver { identity, claims, inventory: None };
        let health =
            health.map(|service| Health::follow(name.clone(), service, connection.clone(), &health_tasks));
        let link = connection.clone();
        let native = Native {
            endpoint: resolved,
            services,
            link: Box::new(move || link.link()),
            health: health.map(|health| Box::new(move || health.now()) as _),
        };
        let now = Registered { dra: Some(DraInstance { name, endpoint, connection, tasks, health_tasks }) };
        if let Err(taken) = self.shared.registry.serve_instance(&self.source, driver, native) {
            now.stop();
            return Err(taken);
        }
        self.shared.device_plugins.remove(&self.source);
        self.replace(now);
        Ok(())
    }

    /// Returns the connection to an endpoint: the existing one, dialled again, if the endpoint is unchanged.
    fn connect(&self, endpoint: &Path) -> (Connection, Tasks) {
        match self.instance() {
            Some(before) if before.endpoint == endpoint => {
                before.connection.redial();
                (before.connection.clone(), before.tasks.clone())
            }
            _ => {
                let tasks = self.shared.tasks.child();
                (Connection::open(endpoint.to_owned(), &tasks), tasks)
            }
        }
    }

    /// Stops unused parts of the previous registration.
    fn replace(&mut self, now: Registered) {
        let endpoint = |registered: &Registered| registered.dra.as_ref().map(|dra| dra.endpoint.clone());
        let is_kept = |before: &Registered| endpoint(before) == endpoint(&now);
        if let Some(before) = self.registered.take() {
            match &before.dra {
                Some(dra) if is_kept(&before) => dra.health_tasks.stop(),
                _ => before.stop(),
            }
        }
        self.registered = Some(now);
    }

    fn failed(&mut self, refusal: &Refusal, cause: &str) {
        let delay = self.backoff.delay();
        let reason = chain(refusal);
        let until_freed = matches!(refusal, Refusal::Taken(_));
        let is_new = self.waiting.as_ref().is_none_or(|waiting| waiting.reason != reason);
        if is_new {
            tracing::warn!(socket = self.source, reason, "plugin not registered, retrying");
        }
        self.show(|view| {
            view.state = DriverState::Failed;
            view.reason = reason.clone();
            let problem = Problem::unavailable("plugin-not-registered", &reason).retry_after(delay);
            view.problem = Some(problem.clone());
            if is_new {
                view.note("failed", cause, 0, Some(problem));
            }
        });
        self.waiting = Some(Waiting { until: Instant::now() + delay, reason, until_freed });
    }

    /// Removes the registration without notifying the plugin, as a kubelet does; calls in flight continue.
    fn dismiss(&mut self) {
        let Some(registered) = self.registered.take() else { return };
        self.shared.registry.retire(&self.source);
        self.shared.device_plugins.remove(&self.source);
        registered.stop();
    }

    /// Handles the removal of the socket; claims stay.
    fn leave(&mut self) {
        if self.registered.is_some() {
            tracing::info!(socket = self.source, "registration socket gone, the plugin's claims are kept");
        }
        self.dismiss();
        self.shared.registry.remove(&self.source);
    }
}

/// Resolves when the next attempt is due, or when the name or endpoint that it waits for is free.
async fn retry(waiting: Option<&Waiting>, freed: &mut watch::Receiver<u64>) {
    let Some(waiting) = waiting else { return std::future::pending().await };
    let due = tokio::time::sleep_until(waiting.until);
    if !waiting.until_freed {
        return due.await;
    }
    tokio::select! {
        () = due => {}
        // Safe to drop: the next call sees the change.
        _ = freed.changed() => {}
    }
}

async fn link_changed(registered: Option<&mut Registered>) {
    match registered.and_then(|registered| registered.dra.as_mut()) {
        Some(dra) => dra.connection.changed().await,
        None => std::future::pending().await,
    }
}

/// Returns the endpoint with its links resolved. It must be a socket: connecting to a file would be retried forever.
async fn resolve(endpoint: &Path) -> Result<PathBuf, Invalid> {
    let invalid = |why: String| Invalid::EndpointFile { endpoint: endpoint.display().to_string(), why };
    let io = |error: std::io::Error| invalid(error.to_string());
    let found = tokio::fs::metadata(endpoint).await.map_err(io)?;
    if !found.file_type().is_socket() {
        return Err(invalid("it is not a socket".to_owned()));
    }
    tokio::fs::canonicalize(endpoint).await.map_err(io)
}
