//! What a Kubernetes node has besides: what is awaited of it before it is ready.

use tokio::sync::watch;

use super::paths;
use nodedock_kube::bridge::Bridge;
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::client::{KubeClient, Reachability};
use nodedock_kube::events::Events;
use nodedock_kube::reconcile::Reconcile;
use nodedock_kube::slices::SliceReport;
use nodedock_kube::status::Statuses;
use nodedock_model::limit;

/// The parts of the daemon that face a cluster.
#[derive(Clone)]
pub struct Cluster {
    pub bridge: Bridge,
    pub client: KubeClient,
    pub claims: ApiClaims,
    pub slices: SliceReport,
    pub statuses: Statuses,
    pub events: Events,
    pub reconcile: Reconcile,
    /// What was there at the start has been looked at.
    pub settled: watch::Receiver<bool>,
}

impl Cluster {
    /// Returns when the kubelet has said of everything that is offered what it makes of it.
    pub async fn known_to_kubelet(&self) {
        // An error: the tasks end, and nobody waits for long.
        let _ = self.settled.clone().wait_for(|settled| *settled).await;
        while !paths::awaited(&self.bridge).is_empty() || !self.resources_awaited().is_empty() {
            tokio::time::sleep(limit::KUBELET_LOOK).await;
        }
    }

    fn resources_awaited(&self) -> Vec<String> {
        let unknown = self.bridge.resources().into_iter().filter(|status| !status.registration.is_settled());
        unknown
            .map(|status| format!("resource {} is not registered with the kubelet yet", status.resource))
            .collect()
    }

    /// What it waits for, a line each.
    pub(super) fn awaited(&self) -> Vec<String> {
        let mut awaited = paths::awaited(&self.bridge);
        awaited.extend(self.resources_awaited());
        match &*self.client.reachability().borrow() {
            Reachability::Reachable => {}
            Reachability::Unknown => awaited.push("no request to the API server has ended yet".to_owned()),
            Reachability::Unreachable { message, .. } => awaited.push(message.clone()),
        }
        let unwritten = self.slices.pools().into_iter().filter(|(_, pool)| {
            // One with a problem is a condition, and is not waited for.
            pool.written_ms.is_none() && !pool.is_current && pool.problem.is_none()
        });
        awaited.extend(
            unwritten
                .map(|(key, _)| format!("the slices of {}/{} are not written yet", key.driver, key.pool)),
        );
        awaited
    }
}
