//! A daemon on a Kubernetes node.

mod claims;
mod kubelet;
mod slices;
mod starts;
mod turns;

use nodedock_tests::Daemon;
use nodedock_tests::cluster::Cluster;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME};

/// A node with simulated GPUs, which are offered to its kubelet.
async fn node_with_gpus() -> (Cluster, Daemon) {
    let cluster = Cluster::start().await;
    let daemon = cluster.daemon().await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    daemon.until_offered(MOCK_GPU_NAME).await;
    (cluster, daemon)
}
