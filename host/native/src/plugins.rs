//! Native plugins: a worker for each registration socket, which registers the plugin as a kubelet does, and removes the registration when
//! the socket is removed.
//!
//! Receives sockets from the watcher. Runs one operation at a time for a socket, and sockets concurrently. Never deletes a socket.
//!
//! # Life of a plugin's socket
//!
//! `seen → described → serving ⇄ lost`; `draining` while a newer instance serves; `failed` with the reason and a retry (0.5 s, doubled, at
//! most 2 min).
//!
//! - One worker for each registration socket takes the steps of a kubelet, one at a time: dial, GetInfo, checks, add the instance, NotifyRegistrationStatus.
//! - A socket that is created again is registered again, and the previous registration stays until then, so that a plugin that is replaced under the same names stays available. A removed socket removes its own instance and no other.
//! - Calls go to the newest connected instance of a driver. Without a connected one they go to the newest, and wait two seconds for its reconnect.
//!
//! Differences from a kubelet: `v1` is preferred to `v1beta1` regardless of the plugin's order; renames and lost events are detected; a
//! registration that waits for a name or an endpoint is retried as soon as that is free; a device listed twice in a response is one device.

mod offer;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokio::sync::mpsc;

use crate::endpoints::{Endpoints, PluginSink};
use crate::grpc::PluginTimes;
use crate::sockets::SocketEvent;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_core::recording::Recordings;
use nodedock_core::registry::Registry;
use nodedock_model::DriverKind;
use worker::{Order, Worker};

/// Queue of orders for a worker, which executes only the last one.
const ORDERS_WAITING_MAX: usize = 64;

/// State that the workers share.
#[derive(Clone)]
pub struct Plugins<S: PluginSink> {
    pub registry: Registry,
    /// This node's name.
    pub node: String,
    /// Registrations of accepted device plugins.
    pub endpoints: Endpoints<S>,
    pub times: PluginTimes,
    pub recordings: Recordings,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

impl<S: PluginSink> Plugins<S> {
    /// Executes the requests of the watcher and of operators. Safe to drop: the sockets exist at the next start.
    pub async fn run(self, mut events: mpsc::Receiver<SocketEvent>) {
        let Some(mut reloads) = self.registry.reloads.take(DriverKind::Grpc) else {
            return;
        };
        let mut workers: HashMap<PathBuf, mpsc::Sender<Order>> = HashMap::new();
        loop {
            tokio::select! {
                // Safe to drop, for both: unreceived requests stay in their channels.
                event = events.recv() => match event {
                    None => return,
                    Some(SocketEvent::Appeared(socket)) => {
                        let worker = workers.entry(socket.clone()).or_insert_with(|| self.worker(socket));
                        // An error means that the worker has stopped with the tasks.
                        worker.send(Order::Register).await.ok();
                    }
                    Some(SocketEvent::Gone(socket)) => {
                        if let Some(worker) = workers.remove(&socket) {
                            worker.send(Order::Gone).await.ok();
                        }
                    }
                },
                Some(request) = reloads.recv() => {
                    if let Some(worker) = workers.get(Path::new(&request.source)) {
                        request.hand_to(worker, Order::Again);
                    }
                }
            }
        }
    }

    fn worker(&self, socket: PathBuf) -> mpsc::Sender<Order> {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        // Safe to drop: the plugin detects the daemon's end, and a registration in progress starts again with the next daemon.
        self.tasks.spawn_until_stopped(
            "plugin-socket",
            Worker::new(self.clone(), socket).run(inbox),
        );
        orders
    }
}
