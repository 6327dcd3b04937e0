//! The admin server: `GET /metrics`, `/livez` and `/readyz` by HTTP on a socket of its own, and on a TCP address if the config has one.
//!
//! Reads what the modules count and checks whether they respond. Changes nothing and calls no driver: a bad driver must not make the
//! daemon look dead.

mod cluster;
mod collect;
mod families;
pub(crate) mod http;
mod probes;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};

use crate::pod_resources;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_base::tcp::ListenAddress;
use nodedock_core::checkpoint::Checkpoint;
use nodedock_core::manager::Manager;
use nodedock_core::registry::Registry;
use nodedock_kube::local::LocalClaims;

pub use cluster::Cluster;
pub use http::Front;
pub use probes::AtStart;

/// Deadline of each part of the daemon in a liveness check: as long as a commit may take before it is reported.
const LIVE_DEADLINE: Duration = Duration::from_secs(5);

/// State that the admin server reads.
#[derive(Clone)]
pub struct Admin {
    pub registry: Registry,
    pub manager: Arc<Manager>,
    pub checkpoint: Checkpoint,
    pub conditions: Conditions,
    pub pod_resources: Arc<pod_resources::Counters>,
    /// Drivers and sockets that were found at the start and have to be loaded before the daemon is ready.
    pub at_start: Arc<AtStart>,
    /// Present on a Kubernetes node.
    pub cluster: Option<Cluster>,
    /// Present on a machine with the local API.
    pub local_claims: Option<LocalClaims>,
    /// Number of times that a parent process has started the daemon again, if it has one.
    pub restarts: Option<u64>,
    pub tasks: Tasks,
}

/// Serves metrics and probes. Safe to drop.
pub async fn serve(admin: Admin, socket: UnixListener, address: Option<ListenAddress>) {
    let (tasks, conditions, front) = (
        admin.tasks.clone(),
        admin.conditions.clone(),
        Front::new(""),
    );
    front.serve(admin);
    if let Some(address) = address {
        let (front, tasks_of_connections) = (front.clone(), tasks.clone());
        tasks.spawn_until_stopped("admin-address", async move {
            let listener = address.listener(&conditions).await;
            http::serve(
                front,
                TcpListenerStream::new(listener),
                tasks_of_connections,
            )
            .await;
        });
    }
    serve_front(front, socket, tasks).await;
}

/// Serves the probes of one instance. Safe to drop.
pub async fn serve_front(front: Front, socket: UnixListener, tasks: Tasks) {
    http::serve(front, UnixListenerStream::new(socket), tasks).await;
}
