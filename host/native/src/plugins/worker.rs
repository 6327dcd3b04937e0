//! The worker of one registration socket.

use std::ops::ControlFlow;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::Plugins;
use super::offer::{self, DraOffer, Offer, OfferError};
use crate::endpoints::PluginSink;
use crate::grpc::{
    Caller, Connection, DraPlugin, DraService, Health, OldDraPlugin, PluginInfo, Registrar,
    RegistrarError, Rpcs, Tap, inventory,
};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::own_sockets;
use nodedock_base::signal::Listener;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{ClaimDriver, Driver, DriverIdentity};
use nodedock_core::registry::names::{BindError, NameRefusal, name_problem};
use nodedock_core::registry::{DriverState, DriverView, Reloaded};
use nodedock_core::registry::{Native, Taken};
use nodedock_model::{DriverKind, DriverName, ExtendedResource, NameSource, Problem, ProblemCode};

pub(super) enum Order {
    /// The socket is new or was replaced.
    Register,
    /// An operator requests a new registration; completes the sender when done.
    Again(oneshot::Sender<Reloaded>),
    Gone,
}

pub(super) struct Worker<S: PluginSink> {
    shared: Plugins<S>,
    socket: PathBuf,
    /// The socket's path in the state.
    source: String,
    backoff: Backoff,
    registered: Option<Registered>,
    /// Why the last attempt failed, and when the next one is.
    waiting: Option<Waiting>,
    /// The user of the plugin, once it was connected.
    user: Option<NameSource>,
    /// Changes when a name may belong to another source.
    names: Listener,
}

enum Registered {
    Dra(DraInstance),
    /// The endpoints connect to it.
    DevicePlugin,
}

struct DraInstance {
    name: DriverName,
    endpoint: PathBuf,
    connection: Connection,
    /// Tasks of the connection. Those of the health stream stop with them.
    tasks: Tasks,
    health_tasks: Tasks,
}

struct Waiting {
    until: Instant,
    reason: String,
    /// True if a freed name or endpoint triggers the retry.
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
    #[error("plugin registration failed with err: {}", name_problem(name, by, why))]
    Name {
        name: DriverName,
        by: String,
        why: NameRefusal,
    },
    #[error("plugin registration failed with err: the driver name {name}: {why}")]
    NameNotStored { name: DriverName, why: BindError },
    #[error("plugin registration failed with err: {0}")]
    TooMany(#[from] Problem),
}

impl<S: PluginSink> Worker<S> {
    pub(super) fn new(shared: Plugins<S>, socket: PathBuf) -> Self {
        let source = socket.display().to_string();
        let backoff = Backoff::new(shared.times.retry_min, shared.times.retry_max);
        let names = shared.registry.names.changes();
        Self {
            shared,
            socket,
            source,
            backoff,
            registered: None,
            waiting: None,
            user: None,
            names,
        }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Order>) {
        let mut freed = self.shared.registry.names.changes();
        while self.step(&mut inbox, &mut freed).await.is_continue() {}
    }

    /// Waits for the next reason to act, and acts. Ends with the socket.
    async fn step(
        &mut self,
        inbox: &mut mpsc::Receiver<Order>,
        freed: &mut Listener,
    ) -> ControlFlow<()> {
        let is_dra = self.instance().is_some();
        tokio::select! {
            // Safe to drop: an order that is not received stays in the channel.
            order = inbox.recv() => match order {
                Some(Order::Register) => {
                    self.backoff.reset();
                    // A later order has the newer state of the socket.
                    if inbox.is_empty() {
                        self.register("socket", freed).await;
                    }
                }
                Some(Order::Again(done)) => {
                    self.register("reload", freed).await;
                    // The caller may have been cancelled.
                    let _ = done.send(Ok(()));
                }
                Some(Order::Gone) => {
                    self.leave();
                    return ControlFlow::Break(());
                }
                None => return ControlFlow::Break(()),
            },
            () = retry(self.waiting.as_ref(), freed) => self.register("retry", freed).await,
            // Safe to drop: the next call sees the change. An error means that the daemon ends.
            Ok(()) = self.names.changed(), if is_dra => self.leave_name(),
            () = link_changed(self.registered.as_mut()) => {
                if let Some(dra) = self.instance() {
                    self.shared.registry.instances.settle(&dra.name);
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Handles the removal of the socket; claims stay.
    fn leave(&mut self) {
        if self.registered.is_some() {
            tracing::info!(
                socket = self.source,
                "registration socket gone, the plugin's claims are kept"
            );
        }
        self.dismiss();
        self.shared
            .conditions
            .clear(ProblemCode::DriverNameTaken, &self.source);
        self.shared.registry.remove(&self.source);
    }

    fn instance(&self) -> Option<&DraInstance> {
        match &self.registered {
            Some(Registered::Dra(dra)) => Some(dra),
            Some(Registered::DevicePlugin) | None => None,
        }
    }

    fn show(&self, change: impl FnOnce(&mut DriverView)) {
        self.shared
            .registry
            .sources
            .update(DriverKind::Grpc, &self.source, change);
    }

    /// Registers from the first step. The previous registration of the socket stays until the new one succeeds, so that a plugin
    /// that is replaced under the same names stays available; a kubelet removes it first. If a step fails it is removed.
    async fn register(&mut self, cause: &str, freed: &mut Listener) {
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
                self.shared
                    .conditions
                    .clear(ProblemCode::DriverNameTaken, &self.source);
                let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
                tracing::info!(
                    plugin = info,
                    socket = self.source,
                    duration_us,
                    "plugin registered"
                );
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
        self.shared
            .registry
            .names
            .set_source(&self.source, self.user.clone());
        let mut registrar = Registrar::dial(&self.socket, self.shared.times).await?;
        self.user = Some(NameSource::plugin(registrar.uid()));
        self.shared
            .registry
            .names
            .set_source(&self.source, self.user.clone());
        let info = registrar.info().await?;
        let name = info.name.clone();
        if let Err(refusal) = self.admit(info).await {
            let message = format!("{refusal} at socket {}", self.source);
            if let Err(error) = registrar.notify(Err(&message)).await {
                let (socket, error) = (&self.source, chain(&error));
                tracing::debug!(socket, error, "cannot notify the plugin of its refusal");
            }
            return Err(refusal);
        }
        registrar.notify(Ok(())).await?;
        Ok(name)
    }

    async fn admit(&mut self, info: PluginInfo) -> Result<(), Refusal> {
        let offer = offer::read(info, &self.socket)?;
        let resolved = resolve(offer.endpoint()).await?;
        match offer {
            Offer::Dra(offer) => self.admit_dra(offer, resolved).await?,
            Offer::DevicePlugin { resource, endpoint } => {
                self.admit_device_plugin(&resource, endpoint)?
            }
        }
        Ok(())
    }

    fn admit_device_plugin(
        &mut self,
        resource: &ExtendedResource,
        endpoint: PathBuf,
    ) -> Result<(), Problem> {
        if self.instance().is_some() {
            self.dismiss();
        }
        self.shared.registry.names.forget_source(&self.source);
        self.shared
            .endpoints
            .accept(&self.source, resource, endpoint)?;
        self.show(|view| {
            view.name = None;
            view.state = DriverState::Described;
            view.summary = format!("device plugin for {resource}");
            view.reason = "registered; the device manager connects to it".to_owned();
            view.version = "v1beta1".to_owned();
        });
        self.registered = Some(Registered::DevicePlugin);
        Ok(())
    }

    async fn admit_dra(&mut self, offer: DraOffer, resolved: PathBuf) -> Result<(), Refusal> {
        let DraOffer {
            name,
            endpoint,
            service,
            health,
            services,
        } = offer;
        let registry = &self.shared.registry;
        registry.names.set_described(&self.source, &name);
        // Before the plugin is called for anything else.
        let reserved = registry.names.reserve(&self.source, &name).await;
        let reserved = reserved.map_err(|why| self.not_named(&name, why))?;
        let (connection, tasks) = self.connect(&endpoint);
        let health_tasks = tasks.child();
        let tap = Tap::new(&self.shared.recordings, name.as_str());
        let caller = Caller {
            name: name.clone(),
            connection: connection.clone(),
            rpcs: Rpcs::default(),
            tap: tap.clone(),
        };
        // A plugin of today publishes its devices itself.
        let inventory = match service {
            DraService::Alpha => {
                let (registry, of) = (self.shared.registry.clone(), name.clone());
                let announce = move || registry.sources.report_devices(&of);
                inventory(&name, &endpoint, &health_tasks, announce).await?
            }
            DraService::V1 | DraService::V1beta1 => None,
        };
        let is_listed = inventory.is_some();
        self.show(|view| {
            view.name = Some(name.clone());
            view.version = service.version().to_owned();
            view.summary = format!("native DRA plugin at {}", endpoint.display());
        });
        let claims: Arc<dyn ClaimDriver> = match service {
            DraService::Alpha => Arc::new(OldDraPlugin {
                caller,
                node: self.shared.node.clone(),
                lists: is_listed,
                is_single: false.into(),
            }),
            DraService::V1 | DraService::V1beta1 => Arc::new(DraPlugin { caller, service }),
        };
        let identity = DriverIdentity {
            name: name.clone(),
            kind: DriverKind::Grpc,
            version: service.version().to_owned(),
            digest: String::new(),
            source: self.source.clone(),
            summary: String::new(),
        };
        let driver = Driver {
            identity: identity.into(),
            claims: Some(claims),
            inventory,
        };
        let follow = |service| {
            Health::follow(
                name.clone(),
                service,
                connection.clone(),
                tap,
                &health_tasks,
            )
        };
        let health = health.map(follow);
        let link = connection.clone();
        let native = Native {
            endpoint: resolved,
            services,
            link: Box::new(move || link.link()),
            health: health.map(|health| Box::new(move || health.now()) as _),
        };
        let now = DraInstance {
            name,
            endpoint,
            connection,
            tasks,
            health_tasks,
        };
        if let Err(why) = reserved.bind().await {
            now.tasks.stop();
            return Err(self.not_bound(&now.name, why));
        }
        if let Err(taken) = self
            .shared
            .registry
            .serve_instance(&self.source, driver, native)
        {
            now.tasks.stop();
            return Err(taken.into());
        }
        if is_listed {
            self.shared.registry.sources.report_devices(&now.name);
        }
        self.shared.endpoints.withdraw(&self.source);
        if let Some(Registered::Dra(before)) = self.registered.take() {
            let is_reused = before.endpoint == now.endpoint;
            if is_reused {
                before.health_tasks.stop()
            } else {
                before.tasks.stop()
            }
        }
        self.registered = Some(Registered::Dra(now));
        Ok(())
    }

    fn not_named(&self, name: &DriverName, why: NameRefusal) -> Refusal {
        Refusal::Name {
            name: name.clone(),
            by: self.source.clone(),
            why,
        }
    }

    fn not_bound(&self, name: &DriverName, why: BindError) -> Refusal {
        match why {
            BindError::Refused(why) => self.not_named(name, why),
            why @ BindError::NotStored(_) => Refusal::NameNotStored {
                name: name.clone(),
                why,
            },
        }
    }

    /// Removes the registration if the name belongs to another source by now.
    fn leave_name(&mut self) {
        let Some(name) = self.instance().map(|dra| dra.name.clone()) else {
            return;
        };
        let owner = self
            .shared
            .registry
            .names
            .owner_of(&name)
            .filter(|owner| Some(owner) != self.user.as_ref());
        if let Some(owner) = owner {
            self.dismiss();
            self.failed(&self.not_named(&name, NameRefusal::Belongs(owner)), "name");
        }
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

    fn failed(&mut self, refusal: &Refusal, cause: &str) {
        let delay = self.backoff.delay();
        let reason = chain(refusal);
        let until_freed = matches!(refusal, Refusal::Taken(_) | Refusal::Name { .. });
        let of_name = match refusal {
            Refusal::Name { name, by, why } => Some(name_problem(name, by, why)),
            _ => None,
        };
        let conditions = &self.shared.conditions;
        conditions.update(ProblemCode::DriverNameTaken, &self.source, of_name.clone());
        let is_new = self
            .waiting
            .as_ref()
            .is_none_or(|waiting| waiting.reason != reason);
        if is_new {
            tracing::warn!(
                socket = self.source,
                reason,
                "plugin not registered, retrying"
            );
        }
        self.show(|view| {
            view.state = DriverState::Failed;
            view.reason = reason.clone();
            if of_name.is_some() {
                // Else those who look for the driver by its name would find this plugin.
                view.name = None;
            }
            let problem =
                Problem::unavailable(ProblemCode::PluginNotRegistered, &reason).retry_after(delay);
            view.problem = Some(problem.clone());
            if is_new {
                view.note("failed", cause, 0, Some(problem));
            }
        });
        self.waiting = Some(Waiting {
            until: Instant::now() + delay,
            reason,
            until_freed,
        });
    }

    /// Removes the registration without notifying the plugin, as a kubelet does; calls in flight continue.
    fn dismiss(&mut self) {
        let Some(registered) = self.registered.take() else {
            return;
        };
        self.shared.registry.retire(&self.source);
        self.shared.endpoints.withdraw(&self.source);
        if let Registered::Dra(dra) = registered {
            dra.tasks.stop();
        }
    }
}

/// Resolves when the next attempt is due, or when the name or endpoint that it waits for is free.
async fn retry(waiting: Option<&Waiting>, freed: &mut Listener) {
    let Some(waiting) = waiting else {
        return std::future::pending().await;
    };
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
    match registered {
        Some(Registered::Dra(dra)) => dra.connection.changed().await,
        Some(Registered::DevicePlugin) | None => std::future::pending().await,
    }
}

/// Returns the endpoint with its links resolved. It must be a socket: connecting to a file would be retried forever.
async fn resolve(endpoint: &Path) -> Result<PathBuf, OfferError> {
    let invalid = |why: String| OfferError::EndpointFile {
        endpoint: endpoint.display().to_string(),
        why,
    };
    let io = |error: std::io::Error| invalid(error.to_string());
    let found = tokio::fs::metadata(endpoint).await.map_err(io)?;
    if !found.file_type().is_socket() {
        return Err(invalid("it is not a socket".to_owned()));
    }
    if own_sockets::contains(found.dev(), found.ino()) {
        return Err(invalid("it is a socket of this daemon".to_owned()));
    }
    tokio::fs::canonicalize(endpoint).await.map_err(io)
}
