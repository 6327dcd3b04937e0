//! The controller of one resource: its registered plugin, which is connected again whenever it is lost.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::location::Location;
use super::{EndpointsState, PluginSink, Registration, stopping};
use crate::grpc::{DevicePlugin, Following};
use crate::grpc::{RECONNECT_MAX, RECONNECT_MIN};
use nodedock_base::backoff::Backoff;
use nodedock_base::request;
use nodedock_core::manager::devices::is_of_list;
use nodedock_model::{ExtendedResource, Problem, ProblemCode, limit};

/// Time without a list after which a device plugin is logged.
const FIRST_LIST_WAIT: Duration = Duration::from_secs(30);

/// Backoff after a list that is not used, because of its size or its form: a plugin lists the same devices again, and only a new registration
/// makes the next try immediate.
const FAULTY_LIST_RETRY_MIN: Duration = Duration::from_secs(1);
const FAULTY_LIST_RETRY_MAX: Duration = Duration::from_secs(300);

/// Age after which a device plugin's stream does not count as flapping: when it ends, the first reconnect is immediate.
const DEVICE_STREAM_STEADY: Duration = Duration::from_secs(10);

/// The newest registration, while its plugin is connected. The plugin before it serves on.
struct Pending {
    registration: Registration,
    plugin: BoxFuture<'static, Result<DevicePlugin, Problem>>,
}

pub(super) struct ResourceController<S: PluginSink> {
    shared: Arc<EndpointsState<S>>,
    resource: ExtendedResource,
    registered: Option<Location>,
    serving: Option<Serving<S::Id>>,
    /// Number of registrations that succeeded.
    registrations: u64,
    backoff: Backoff,
    /// Delays after lists that were not used.
    faulty_lists: Backoff,
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
    /// True if a missing list was logged.
    complained: bool,
}

impl<S: PluginSink> ResourceController<S> {
    pub(super) fn new(shared: Arc<EndpointsState<S>>, resource: ExtendedResource) -> Self {
        Self {
            shared,
            resource,
            registered: None,
            serving: None,
            registrations: 0,
            backoff: Backoff::new(RECONNECT_MIN, RECONNECT_MAX),
            faulty_lists: Backoff::new(FAULTY_LIST_RETRY_MIN, FAULTY_LIST_RETRY_MAX),
            next_try: Instant::now(),
            missing_since: None,
            complained: false,
        }
    }

    /// Runs until there is no plugin left.
    pub(super) async fn run(mut self, changed: Arc<Notify>) {
        let mut pending = None;
        loop {
            tokio::select! {
                biased;
                // Safe to drop: a notification that is not received stays.
                () = changed.notified() => {}
                // Safe to drop: the registration continues at the next call.
                connected = connected(pending.as_mut()) => {
                    if let Some(Pending { registration, .. }) = pending.take() {
                        self.conclude(registration, connected);
                    }
                }
                // Safe to drop: the next call continues from `serving` and `next_try`; a dial starts again.
                () = self.advance() => {}
            }
            self.reconcile(&mut pending);
            if self.registered.is_none()
                && pending.is_none()
                && self.shared.end_if_idle(&self.resource)
            {
                return;
            }
        }
    }

    /// Begins the newest registration, and ends those whose registration socket is gone. If none is left, one of the plugins that were
    /// accepted takes over.
    fn reconcile(&mut self, pending: &mut Option<Pending>) {
        let mut slots = self.shared.slots();
        let Some(slot) = slots.get_mut(&self.resource) else {
            return;
        };
        let is_gone = |location: &Location| match location {
            Location::At {
                endpoint,
                registration,
            } => slot.accepted.get(registration) != Some(endpoint),
            Location::Beside { .. } => false,
        };
        let next = slot.next.take().filter(|next| !is_gone(&next.location));
        pending.take_if(|pending| is_gone(&pending.registration.location));
        let is_ended = self
            .registered
            .take_if(|location| is_gone(location))
            .is_some();
        let is_idle = self.registered.is_none() && pending.is_none();
        let other =
            slot.accepted
                .last_key_value()
                .filter(|_| is_idle)
                .map(|(registration, endpoint)| {
                    let (endpoint, registration) = (endpoint.clone(), registration.clone());
                    Registration {
                        location: Location::At {
                            endpoint,
                            registration,
                        },
                        done: None,
                    }
                });
        drop(slots);
        if is_ended {
            let message = format!(
                "the registration socket of device plugin {} is gone",
                self.resource
            );
            self.leave(&Problem::unavailable(
                ProblemCode::DriverNotRegistered,
                message,
            ));
        }
        if let Some(registration) = next.or(other) {
            *pending = Some(self.begin(registration));
        }
    }

    fn begin(&self, registration: Registration) -> Pending {
        let (shared, resource) = (self.shared.clone(), self.resource.clone());
        let (location, is_repeated) = (registration.location.clone(), registration.done.is_none());
        let plugin = async move {
            let mut backoff = Backoff::new(RECONNECT_MIN, RECONNECT_MAX);
            let mut complained = false;
            loop {
                let permit = shared.at_once.acquire().await;
                let connected = shared.connect(&resource, &location).await;
                drop(permit);
                match connected {
                    Err(problem) if is_repeated => {
                        if !std::mem::replace(&mut complained, true) {
                            tracing::warn!(%resource, socket = %location.path().display(), %problem, "device plugin not connected, retrying");
                        }
                        tokio::time::sleep(backoff.delay()).await;
                    }
                    connected => return connected,
                }
            }
        };
        Pending {
            registration,
            plugin: plugin.boxed(),
        }
    }

    /// Handles the end of a registration. `None`: its caller was cancelled.
    fn conclude(
        &mut self,
        registration: Registration,
        connected: Option<Result<DevicePlugin, Problem>>,
    ) {
        let Registration { location, done } = registration;
        let Some(connected) = connected else { return };
        let outcome = connected.map(|plugin| {
            let (resource, socket) = (&self.resource, location.path());
            self.registrations += 1;
            let registrations = self.registrations;
            tracing::info!(%resource, socket = %socket.display(), registrations, "device plugin registered");
            self.registered = Some(location);
            self.backoff.reset();
            self.faulty_lists.reset();
            self.serve(Arc::new(plugin));
        });
        if let Some(done) = done {
            // The caller may have been cancelled.
            let _ = done.send(outcome);
        }
    }

    /// Reports a plugin and starts to watch it. It replaces the previous one.
    fn serve(&mut self, plugin: Arc<DevicePlugin>) {
        let Some(location) = &self.registered else {
            return;
        };
        let following = plugin.follow(request::new_id());
        let (resource, source) = (self.resource.clone(), location.path());
        let id = self.shared.sink.plugin_arrived(resource, source, plugin);
        (self.missing_since, self.complained) = (None, false);
        self.serving = Some(Serving {
            id,
            following,
            since: Instant::now(),
            has_listed: false,
            complained: false,
        });
    }

    fn leave(&mut self, why: &Problem) {
        if let Some(serving) = self.serving.take() {
            self.shared.sink.plugin_left(&serving.id, why);
        }
    }

    /// Takes the next step: watches the plugin to its end, or connects again.
    async fn advance(&mut self) {
        let Some(location) = self.registered.clone() else {
            return std::future::pending().await;
        };
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
        if self
            .serving
            .as_ref()
            .is_some_and(|serving| serving.since.elapsed() >= DEVICE_STREAM_STEADY)
        {
            self.backoff.reset();
            self.faulty_lists.reset();
        }
        self.leave(why);
        let backoff = match is_of_list(why) {
            true => &mut self.faulty_lists,
            false => &mut self.backoff,
        };
        self.next_try = Instant::now() + backoff.delay();
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
        if since.elapsed() >= limit::RESOURCE_GRACE
            && self
                .registered
                .take_if(|location| matches!(location, Location::Beside { .. }))
                .is_some()
        {
            tracing::warn!(%resource, "removed a device plugin whose socket is gone; it may register again");
        }
    }
}

/// Resolves when the plugin of a registration is connected or refused. `None`: the caller was cancelled.
async fn connected(pending: Option<&mut Pending>) -> Option<Result<DevicePlugin, Problem>> {
    let Some(Pending {
        registration,
        plugin,
    }) = pending
    else {
        return std::future::pending().await;
    };
    match &mut registration.done {
        Some(done) => tokio::select! {
            () = done.closed() => None,
            plugin = plugin => Some(plugin),
        },
        None => Some(plugin.await),
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
                    // no error: the tasks stop
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
