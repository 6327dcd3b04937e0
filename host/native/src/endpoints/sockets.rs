//! Registers device plugins with a registration socket, as the registry accepts and removes them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Endpoints, Location, Origin, PluginSink, SUPERSEDED, Turn};
use crate::device_plugins::{DevicePluginEndpoint, DevicePlugins};
use nodedock_base::backoff::Backoff;
use nodedock_base::tasks::Tasks;
use nodedock_model::limit;

/// Accepted plugins by registration socket, with the task that registers each.
type Known = BTreeMap<String, (DevicePluginEndpoint, Tasks)>;

impl<S: PluginSink> Endpoints<S> {
    /// Registers plugins that are accepted on registration sockets, until the tasks stop.
    pub async fn follow(self, registered: DevicePlugins) {
        let mut accepted = registered.follow();
        let mut known = Known::new();
        let stopped = self.0.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            let now = accepted.borrow_and_update().clone();
            let freed = self.let_go(&now, &mut known);
            for (socket, endpoint) in now {
                // Another plugin that is accepted for a free resource takes over.
                if !known.contains_key(&socket) || freed.contains(endpoint.resource.as_str()) {
                    self.begin(socket, endpoint, &mut known);
                }
            }
            tokio::select! {
                // Safe to drop: the sockets exist at the next start.
                () = &mut stopped => return,
                changed = accepted.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Ends plugins that are no longer accepted. Returns the resources that lost their plugin.
    fn let_go(&self, now: &BTreeMap<String, DevicePluginEndpoint>, known: &mut Known) -> BTreeSet<String> {
        let is_gone = |socket: &String, (endpoint, _): &mut (_, _)| now.get(socket) != Some(endpoint);
        let mut freed = BTreeSet::new();
        for (socket, (endpoint, tasks)) in known.extract_if(.., is_gone) {
            tasks.stop();
            if self.end(&endpoint.resource, &socket) {
                freed.insert(endpoint.resource.to_string());
            }
        }
        freed
    }

    fn begin(&self, socket: String, endpoint: DevicePluginEndpoint, known: &mut Known) {
        let tasks = self.0.tasks.child();
        let before = known.insert(socket.clone(), (endpoint.clone(), tasks.clone()));
        if let Some((_, tasks)) = before {
            tasks.stop();
        }
        let (endpoints, stopped) = (self.clone(), tasks.stopped());
        self.0.tasks.spawn("device-plugin-socket", async move {
            tokio::select! {
                // A registration in progress ends with its socket.
                () = stopped => {}
                () = endpoints.take_up(socket, endpoint) => {}
            }
        });
    }

    /// Registers a plugin that was notified of its acceptance, with retries until it succeeds or a newer registration exists.
    async fn take_up(&self, socket: String, endpoint: DevicePluginEndpoint) {
        let DevicePluginEndpoint { resource, endpoint, .. } = endpoint;
        let (location, origin) = (Location::At(endpoint), Origin::RegistrationSocket(socket.clone()));
        let mut backoff = Backoff::new(limit::RECONNECT_MIN, limit::RECONNECT_MAX);
        let (mut turn, mut complained) = (None, false);
        loop {
            // One registration for all attempts: a later attempt is no newer registration.
            let begun = turn.take().map_or_else(|| Turn::begin(&self.0, &resource), Ok);
            let problem = match begun {
                Err(problem) => problem,
                Ok(begun) => match self.attempt(turn.insert(begun), &location, &origin).await {
                    Ok(()) => return,
                    Err(problem) if problem.code == SUPERSEDED => return,
                    Err(problem) => problem,
                },
            };
            if !std::mem::replace(&mut complained, true) {
                tracing::warn!(%resource, socket, %problem, "device plugin not connected, retrying");
            }
            tokio::time::sleep(backoff.delay()).await;
        }
    }
}
