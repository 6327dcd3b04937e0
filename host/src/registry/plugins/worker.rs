//! One registration socket.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::Plugins;
use super::offer::{self, DraOffer, Invalid, Offer, OfferError};
use crate::base::backoff::Backoff;
use crate::base::error::chain;
use crate::base::tasks::Tasks;
use crate::driver::grpc::{Connection, DraPlugin, Health, PluginInfo, Registrar, RegistrarError};
use crate::driver::{Driver, DriverIdentity};
use crate::model::{DriverKind, DriverName, Problem};
use crate::registry::instances::{Native, Taken};
use crate::registry::{DriverState, DriverView};

pub(super) enum Order {
    /// The socket is new, or another one than before.
    Register,
    /// An operator wants it registered anew; tells when done.
    Again(oneshot::Sender<()>),
    Gone,
}

pub(super) struct Worker {
    shared: Plugins,
    socket: PathBuf,
    /// The socket's path as it is shown.
    source: String,
    backoff: Backoff,
    registered: Option<Registered>,
    /// Why the last try failed, and when the next is.
    waiting: Option<Waiting>,
}

struct Registered {
    /// What goes on for the instance; stopped with it.
    tasks: Tasks,
    /// None: a device plugin, to which nobody is connected here.
    dra: Option<(DriverName, Connection)>,
}

struct Waiting {
    until: Instant,
    reason: String,
    /// It can be tried as soon as something is free.
    for_somebody: bool,
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

/// What a worker does next.
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
                // The plugin sees the daemon go and registers with the next.
                () = &mut stopped => return,
                // An order that is not received stays in the channel.
                order = inbox.recv() => Next::Order(order),
                () = retry(self.waiting.as_ref(), &mut freed) => Next::Retry,
                () = link_changed(self.registered.as_mut()) => Next::LinkChanged,
            };
            tokio::select! {
                // A registration that is under way is begun anew at the next start.
                () = &mut stopped => return,
                goes_on = self.step(next, inbox.is_empty(), &mut freed) => if !goes_on { return },
            }
        }
    }

    async fn step(&mut self, next: Next, is_last: bool, freed: &mut watch::Receiver<u64>) -> bool {
        match next {
            Next::Order(Some(Order::Register)) => {
                self.backoff.reset();
                // A later order says what became of the socket since.
                if is_last {
                    self.register("socket", freed).await;
                }
            }
            Next::Order(Some(Order::Again(done))) => {
                self.register("reload", freed).await;
                // The operator may have gone away.
                let _ = done.send(());
            }
            Next::Order(Some(Order::Gone)) => {
                self.leave();
                return false;
            }
            Next::Order(None) => return false,
            Next::Retry => self.register("retry", freed).await,
            Next::LinkChanged => {
                if let Some((name, _)) =
                    self.registered.as_ref().and_then(|registered| registered.dra.as_ref())
                {
                    self.shared.registry.settle(name);
                }
            }
        }
        true
    }

    fn show(&self, change: impl FnOnce(&mut DriverView)) {
        self.shared.registry.update(DriverKind::Grpc, &self.source, change);
    }

    /// From the beginning, as a kubelet does for a socket that was made anew: what was registered is taken back first.
    async fn register(&mut self, cause: &str, freed: &mut watch::Receiver<u64>) {
        self.dismiss();
        if self.waiting.is_none() {
            self.show(|view| view.state = DriverState::Seen);
        }
        // What becomes free from here on is worth another try.
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

    /// Returns the plugin's name.
    async fn shake_hands(&mut self) -> Result<String, Refusal> {
        let mut registrar = Registrar::dial(&self.socket, self.shared.times.steps).await?;
        let info = registrar.info().await?;
        let name = info.name.clone();
        match self.admit(info).await {
            Ok(registered) => self.registered = Some(registered),
            Err(refusal) => {
                let told = registrar.refuse(&format!("{refusal} at socket {}", self.source)).await;
                if let Err(error) = told {
                    tracing::debug!(
                        socket = self.source,
                        error = chain(&error),
                        "the plugin was not told that it is refused"
                    );
                }
                return Err(refusal);
            }
        }
        registrar.accept().await?;
        Ok(name)
    }

    async fn admit(&self, info: PluginInfo) -> Result<Registered, Refusal> {
        let offer = offer::read(info, &self.socket)?;
        let endpoint = resolve(offer.endpoint()).await.map_err(OfferError::from)?;
        match offer {
            Offer::Dra(offer) => Ok(self.admit_dra(offer, endpoint)?),
            Offer::DevicePlugin(offer) => {
                self.show(|view| {
                    view.state = DriverState::Described;
                    view.summary = format!("device plugin for {}", offer.resource);
                    view.reason =
                        "registered; waits for the device manager, so its devices are not handed out"
                            .to_owned();
                    view.version = "v1beta1".to_owned();
                });
                self.shared.device_plugins.put(&self.source, offer);
                Ok(Registered { tasks: self.shared.tasks.child(), dra: None })
            }
        }
    }

    fn admit_dra(&self, offer: DraOffer, endpoint: PathBuf) -> Result<Registered, Taken> {
        let DraOffer { name, endpoint: path, service, health, services } = offer;
        self.show(|view| {
            view.name = Some(name.clone());
            view.version = service.version().to_owned();
            view.summary = format!("native DRA plugin at {}", path.display());
        });
        let tasks = self.shared.tasks.child();
        let connection = Connection::open(path, &tasks);
        let plugin = DraPlugin { name: name.clone(), service, connection: connection.clone() };
        let identity = DriverIdentity {
            name: name.clone(),
            kind: DriverKind::Grpc,
            version: service.version().to_owned(),
            digest: String::new(),
            source: self.source.clone(),
            summary: String::new(),
        };
        let (identity, claims) = (Arc::new(identity), Some(Arc::new(plugin) as _));
        let driver = Driver { identity, claims, devices: None, inventory: None };
        let health = health.map(|service| Health::follow(name.clone(), service, connection.clone(), &tasks));
        let native = Native { endpoint, services, connection: connection.clone(), health };
        if let Err(taken) = self.shared.registry.serve_instance(&self.source, driver, native) {
            tasks.stop();
            return Err(taken);
        }
        Ok(Registered { tasks, dra: Some((name, connection)) })
    }

    fn failed(&mut self, refusal: &Refusal, cause: &str) {
        let delay = self.backoff.delay();
        let reason = chain(refusal);
        let for_somebody = matches!(refusal, Refusal::Taken(_));
        let is_new = self.waiting.as_ref().is_none_or(|waiting| waiting.reason != reason);
        if is_new {
            tracing::warn!(socket = self.source, reason, "plugin not registered, it is tried again");
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
        self.waiting = Some(Waiting { until: Instant::now() + delay, reason, for_somebody });
    }

    /// Takes the registration back. The plugin is not told, as by a kubelet; calls in flight go on.
    fn dismiss(&mut self) {
        let Some(registered) = self.registered.take() else { return };
        self.shared.registry.retire(&self.source);
        self.shared.device_plugins.remove(&self.source);
        registered.tasks.stop();
    }

    /// The socket is gone: its claims stay.
    fn leave(&mut self) {
        if self.registered.is_some() {
            tracing::info!(socket = self.source, "registration socket gone, the plugin's claims are kept");
        }
        self.dismiss();
        self.shared.registry.remove(&self.source);
    }
}

/// Resolves when the next try is due, or something became free that it waits for.
async fn retry(waiting: Option<&Waiting>, freed: &mut watch::Receiver<u64>) {
    let Some(waiting) = waiting else { return std::future::pending().await };
    let due = tokio::time::sleep_until(waiting.until);
    if !waiting.for_somebody {
        return due.await;
    }
    tokio::select! {
        () = due => {}
        // A change that is not seen here is seen at the next call.
        _ = freed.changed() => {}
    }
}

async fn link_changed(registered: Option<&mut Registered>) {
    match registered.and_then(|registered| registered.dra.as_mut()) {
        Some((_, connection)) => connection.changed().await,
        None => std::future::pending().await,
    }
}

/// The endpoint with its links resolved. It must be a socket: a file would be opened for ever in vain.
async fn resolve(endpoint: &Path) -> Result<PathBuf, Invalid> {
    let invalid = |why: String| Invalid::EndpointFile { endpoint: endpoint.display().to_string(), why };
    let io = |error: std::io::Error| invalid(error.to_string());
    let found = tokio::fs::metadata(endpoint).await.map_err(io)?;
    if !found.file_type().is_socket() {
        return Err(invalid("it is not a socket".to_owned()));
    }
    tokio::fs::canonicalize(endpoint).await.map_err(io)
}
