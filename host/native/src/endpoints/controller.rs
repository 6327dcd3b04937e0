//! The controller of one resource: its registered plugin, which is connected again whenever it is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::location::Location;
use super::{PluginSink, Shared, stopping};
use crate::grpc::{DevicePlugin, Following};
use crate::grpc::{RECONNECT_MAX, RECONNECT_MIN};
use nodedock_base::backoff::Backoff;
use nodedock_base::request;
use nodedock_model::{ExtendedResource, Problem, ProblemCode, limit};

/// Time without a list after which a device plugin is logged.
const FIRST_LIST_WAIT: Duration = Duration::from_secs(30);

/// Age after which a device plugin's stream does not count as flapping: when it ends, the first reconnect is immediate.
const DEVICE_STREAM_STEADY: Duration = Duration::from_secs(10);

pub(super) enum Order {
    /// A newer registration, already connected.
    Take { location: Location, plugin: Arc<DevicePlugin>, number: u64, taken: oneshot::Sender<()> },
    /// The registration socket is gone.
    End,
    /// Check whether there is still work.
    Look,
}

pub(super) struct ResourceController<S: PluginSink> {
    shared: Arc<Shared<S>>,
    resource: ExtendedResource,
    registered: Option<Location>,
    serving: Option<Serving<S::Id>>,
    backoff: Backoff,
    next_try: Instant,
    /// Time since when the socket is missing.
    missing_since: Option<Instant>,
    complained: bool,
}

/// A connected plugin and its stream of lists.
struct Serving<Id> {
    id: Id,
    following: Following,
    since: Instant,
    has_listed: bool,
    /// Whether a missing list was logged.
    complained: bool,
}

impl<S: PluginSink> ResourceController<S> {
    pub(super) fn new(shared: Arc<Shared<S>>, resource: ExtendedResource) -> Self {
        Self {
            shared,
            resource,
            registered: None,
            serving: None,
            backoff: Backoff::new(RECONNECT_MIN, RECONNECT_MAX),
            next_try: Instant::now(),
            missing_since: None,
            complained: false,
        }
    }

    /// Runs until there is no plugin left, or the tasks stop.
    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Order>) {
        let stopped = self.shared.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                biased;
                // Safe to drop: plugins register with the next daemon.
                () = &mut stopped => return,
                // Safe to drop: an order that is not received stays in the channel.
                order = inbox.recv() => match order {
                    Some(order) => self.carry_out(order),
                    None => return,
                },
                // Safe to drop: the next call continues from `serving` and `next_try`; a dial starts again.
                () = self.advance() => {}
            }
            if self.registered.is_none() && self.shared.end_if_idle(&self.resource, &inbox) {
                return;
            }
        }
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            Order::Take { location, plugin, number, taken } => {
                let (resource, socket) = (&self.resource, location.path());
                tracing::info!(%resource, socket = %socket.display(), registrations = number, "device plugin registered");
                self.registered = Some(location);
                self.backoff.reset();
                self.serve(plugin);
                // The caller may have been cancelled.
                let _ = taken.send(());
            }
            Order::End => {
                self.registered = None;
                let message = format!("the registration socket of device plugin {} is gone", self.resource);
                self.leave(&Problem::unavailable(ProblemCode::DriverNotRegistered, message));
            }
            Order::Look => {}
        }
    }

    /// Reports a plugin and starts to watch it. It replaces the previous one.
    fn serve(&mut self, plugin: Arc<DevicePlugin>) {
        let Some(location) = &self.registered else { return };
        let following = plugin.follow(request::new_id());
        let (resource, source) = (self.resource.clone(), location.path());
        let id = self.shared.sink.plugin_arrived(resource, source, plugin);
        (self.missing_since, self.complained) = (None, false);
        self.serving =
            Some(Serving { id, following, since: Instant::now(), has_listed: false, complained: false });
    }

    fn leave(&mut self, why: &Problem) {
        if let Some(serving) = self.serving.take() {
            self.shared.sink.plugin_left(&serving.id, why);
        }
    }

    /// Takes the next step: watches the plugin to its end, or connects again.
    async fn advance(&mut self) {
        let Some(location) = self.registered.clone() else { return std::future::pending().await };
        if let Some(serving) = &mut self.serving {
            let why = follow(&self.shared.sink, &self.resource, serving).await;
            return self.lost(&why);
        }
        tokio::time::sleep_until(self.next_try).await;
        match self.shared.connect(&self.resource, &location).await {
            Ok(plugin) => self.serve(Arc::new(plugin)),
            Err(problem) => self.failed(&problem),
        }
    }

    fn lost(&mut self, why: &Problem) {
        let is_steady = |serving: &Serving<_>| serving.since.elapsed() >= DEVICE_STREAM_STEADY;
        if self.serving.as_ref().is_some_and(is_steady) {
            self.backoff.reset();
        }
        self.leave(why);
        self.next_try = Instant::now() + self.backoff.delay();
    }

    /// Handles a failed attempt. Removes a plugin whose socket has been missing for long, unless it has a registration socket.
    fn failed(&mut self, problem: &Problem) {
        self.next_try = Instant::now() + self.backoff.delay();
        let resource = &self.resource;
        if !std::mem::replace(&mut self.complained, true) {
            tracing::warn!(%resource, %problem, "device plugin not connected, retrying");
        }
        if problem.code != ProblemCode::EndpointMissing {
            self.missing_since = None;
            return;
        }
        let since = *self.missing_since.get_or_insert_with(Instant::now);
        let called = |location: &mut Location| matches!(location, Location::Beside { .. });
        if since.elapsed() >= limit::RESOURCE_GRACE && self.registered.take_if(called).is_some() {
            tracing::warn!(%resource, "removed a device plugin whose socket is gone; it may register again");
        }
    }
}

/// Reports the plugin's lists until they end, and returns the reason.
async fn follow<S: PluginSink>(
    sink: &S,
    resource: &ExtendedResource,
    serving: &mut Serving<S::Id>,
) -> Problem {
    loop {
        tokio::select! {
            biased;
            // Safe to drop: a list that is not received is the newest at the next call.
            changed = serving.following.lists.changed() => {
                if changed.is_err() {
                    return (&mut serving.following.end).await.unwrap_or_else(|_| stopping());
                }
                let list = serving.following.lists.borrow_and_update().clone();
                let list = list.as_deref().unwrap_or_default();
                if !std::mem::replace(&mut serving.has_listed, true) {
                    tracing::info!(%resource, devices = list.len(), "device plugin listed its devices");
                }
                sink.plugin_listed(&serving.id, list);
            }
            () = tokio::time::sleep_until(serving.since + FIRST_LIST_WAIT), if !(serving.has_listed || serving.complained) => {
                serving.complained = true;
                tracing::warn!(%resource, "device plugin has not listed its devices yet");
            }
        }
    }
}
