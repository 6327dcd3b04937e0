//! Native plugins: a worker for each registration socket, which registers the plugin as a kubelet does, and takes the
//! registration back when the socket goes.
//!
//! Is given sockets by discovery. One operation at a time for a socket, sockets side by side. Never deletes a socket.

mod offer;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::device_plugins::DevicePlugins;
use crate::grpc::StepTimes;
use crate::sockets::SocketEvent;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::Registry;
use nodedock_model::{DriverKind, limit};
use worker::{Order, Worker};

/// Orders that may wait for a worker: it carries out the last, and each takes some bytes.
const ORDERS_WAITING_MAX: usize = 64;

/// When a registration is given up, and tried again.
#[derive(Debug, Clone, Copy)]
pub struct PluginTimes {
    pub steps: StepTimes,
    pub retry_min: Duration,
    pub retry_max: Duration,
}

impl Default for PluginTimes {
    fn default() -> Self {
        Self {
            steps: StepTimes::default(),
            retry_min: limit::PLUGIN_RETRY_MIN,
            retry_max: limit::PLUGIN_RETRY_MAX,
        }
    }
}

/// What the workers stand on.
#[derive(Clone)]
pub struct Plugins {
    pub registry: Registry,
    /// Where device plugins wait for the device manager.
    pub device_plugins: DevicePlugins,
    pub times: PluginTimes,
    pub tasks: Tasks,
}

impl Plugins {
    /// Carries out what discovery and operators ask, until the tasks stop.
    pub async fn run(self, mut events: mpsc::Receiver<SocketEvent>) {
        let Some(mut reloads) = self.registry.take_reloads(DriverKind::Grpc) else { return };
        let mut workers: HashMap<PathBuf, mpsc::Sender<Order>> = HashMap::new();
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                // The sockets are there at the next start.
                () = &mut stopped => return,
                // What is not received stays in its channel, for both.
                event = events.recv() => match event {
                    None => return,
                    Some(SocketEvent::Appeared(socket)) => {
                        let worker = workers.entry(socket.clone()).or_insert_with(|| self.worker(socket));
                        // An error means that the worker stopped with the tasks.
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
        self.tasks.spawn("plugin-socket", Worker::new(self.clone(), socket).run(inbox));
        orders
    }
}
