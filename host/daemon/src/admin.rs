//! The administrator's face: `GET /metrics`, `/livez` and `/readyz` by HTTP on a socket of its own, and on a TCP address if the config
//! says so.
//!
//! Reads what the managers counted and asks whether they answer. Changes nothing, and asks no driver: one that is bad must not make
//! the daemon look dead.

mod cluster;
mod collect;
mod families;
mod front;
mod http;
mod paths;
mod probes;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::net::{TcpListener, UnixListener};

use crate::pod_resources;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::Checkpoint;
use nodedock_core::manager::Manager;
use nodedock_core::registry::Registry;

pub use cluster::Cluster;
pub use front::{Front, serve_front};
pub use probes::AtStart;

/// What the face reads.
#[derive(Clone)]
pub struct Admin {
    pub registry: Registry,
    pub manager: Arc<Manager>,
    pub checkpoint: Checkpoint,
    pub conditions: Conditions,
    pub pod_resources: Arc<pod_resources::Counters>,
    /// What was found at the start and has to be loaded before the daemon is ready.
    pub at_start: Arc<AtStart>,
    /// Of a Kubernetes node.
    pub cluster: Option<Cluster>,
    pub tasks: Tasks,
}

/// Serves until the tasks stop.
pub async fn serve(admin: Admin, socket: UnixListener, address: Option<TcpListener>) {
    let tasks = admin.tasks.clone();
    let face = Arc::new(http::Face::new(admin));
    if let Some(listener) = address {
        tasks.spawn("admin-address", http::serve(face.clone(), listener, tasks.clone()));
    }
    http::serve(face, socket, tasks).await;
}
