//! Device plugins with a registration socket: they are registered when the socket's worker accepts them, and end with the socket.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{Attempt, Endpoints, Location, PluginSink};
use crate::grpc::{RECONNECT_MAX, RECONNECT_MIN};
use nodedock_base::backoff::Backoff;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ExtendedResource, ProblemCode};

/// Accepted plugins by registration socket.
pub(super) type Accepted = BTreeMap<String, AcceptedPlugin>;

pub(super) struct AcceptedPlugin {
    resource: ExtendedResource,
    endpoint: PathBuf,
    /// The task that registers it.
    tasks: Tasks,
}

impl<S: PluginSink> Endpoints<S> {
    /// Registers a plugin that was accepted on a registration socket. It replaces another plugin of the socket; the same plugin again
    /// changes nothing.
    pub fn accept(&self, socket: &str, resource: ExtendedResource, endpoint: PathBuf) {
        let mut accepted = self.0.accepted();
        let is_same = |known: &AcceptedPlugin| known.resource == resource && known.endpoint == endpoint;
        if accepted.get(socket).is_some_and(is_same) {
            return;
        }
        self.end_accepted(socket, &mut accepted);
        let tasks = self.begin(socket.to_owned(), resource.clone(), endpoint.clone());
        accepted.insert(socket.to_owned(), AcceptedPlugin { resource, endpoint, tasks });
    }

    /// Ends the plugin that was accepted on a registration socket, if there is one.
    pub fn withdraw(&self, socket: &str) {
        self.end_accepted(socket, &mut self.0.accepted());
    }

    /// Another plugin that is accepted for the resource takes over.
    fn end_accepted(&self, socket: &str, accepted: &mut Accepted) {
        let Some(gone) = accepted.remove(socket) else { return };
        gone.tasks.stop();
        if !self.end(&gone.resource, socket) {
            return;
        }
        for (socket, other) in accepted.iter_mut().filter(|(_, other)| other.resource == gone.resource) {
            other.tasks.stop();
            other.tasks = self.begin(socket.clone(), other.resource.clone(), other.endpoint.clone());
        }
    }

    fn begin(&self, socket: String, resource: ExtendedResource, endpoint: PathBuf) -> Tasks {
        let tasks = self.0.tasks.child();
        let (endpoints, stopped) = (self.clone(), tasks.stopped());
        self.0.tasks.spawn("device-plugin-socket", async move {
            tokio::select! {
                // A registration in progress ends with its socket.
                () = stopped => {}
                () = endpoints.register_accepted(socket, resource, endpoint) => {}
            }
        });
        tasks
    }

    /// Retries until the registration succeeds or a newer one exists.
    async fn register_accepted(&self, socket: String, resource: ExtendedResource, endpoint: PathBuf) {
        let location = Location::At { endpoint, registration: socket.clone() };
        let mut backoff = Backoff::new(RECONNECT_MIN, RECONNECT_MAX);
        let (mut attempt, mut complained) = (None, false);
        loop {
            // One registration for all attempts: a later attempt is no newer registration.
            let begun = attempt.take().map_or_else(|| Attempt::begin(&self.0, &resource), Ok);
            let problem = match begun {
                Err(problem) => problem,
                Ok(begun) => match self.try_register(attempt.insert(begun), &location).await {
                    Ok(()) => return,
                    Err(problem) if problem.code == ProblemCode::RegistrationSuperseded => return,
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
