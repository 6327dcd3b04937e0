//! A Kubernetes node: what is awaited before it is ready, and whether the path of each driver is open, from its socket in the kubelet's
//! directory through the service behind it and back.
//!
//! A path is checked by a prepare of no claims, which calls no driver: a bad driver must not make the daemon look dead.

use std::io::ErrorKind;
use std::path::Path;

use futures::StreamExt;
use nodedock_proto::kubelet::dra::v1::NodePrepareResourcesRequest;
use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use tokio::time::timeout;

use crate::admin::LIVE_DEADLINE;
use nodedock_base::error::chain;
use nodedock_base::socket::{ConnectError, connect};
use nodedock_kube::bridge::{Bridge, Registration};
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::client::{KubeClient, Reachability};
use nodedock_kube::events::Events;
use nodedock_kube::extended_resources::ExtendedResources;
use nodedock_kube::reconcile::Reconcile;
use nodedock_kube::slices::SliceReport;
use nodedock_kube::status::Statuses;
use nodedock_kube::taints::DeviceTaints;

/// Sockets of drivers that are checked concurrently: there may be a thousand.
const LIVE_PATHS_AT_ONCE: usize = 32;

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
    pub taints: DeviceTaints,
    pub extended_resources: ExtendedResources,
}

impl Cluster {
    /// Drivers and resources that the kubelet has neither registered nor refused, a line each.
    fn unregistered(&self) -> Vec<String> {
        let drivers = self
            .bridge
            .drivers()
            .into_iter()
            .filter(|status| status.problem.is_none());
        let drivers = drivers.filter_map(|status| {
            let why = match status.registration {
                Registration::Offered => "it did not ask yet",
                Registration::Asked => "it asked, and did not say yet",
                Registration::Registered | Registration::Refused(_) => return None,
            };
            Some(format!(
                "driver {} is not registered with the kubelet: {why}",
                status.driver
            ))
        });
        let resources = self.bridge.resources().into_iter();
        let resources = resources.filter(|status| !status.registration.is_settled());
        let resources = resources.map(|status| {
            format!(
                "resource {} is not registered with the kubelet yet",
                status.resource
            )
        });
        drivers.chain(resources).collect()
    }

    /// Returns the conditions that the node waits for before it is ready, a line each.
    pub(super) fn awaited(&self) -> Vec<String> {
        let mut awaited = self.unregistered();
        match &*self.client.reachability().borrow() {
            Reachability::Reachable => {}
            Reachability::Unknown => {
                awaited.push("no request to the API server has ended yet".to_owned())
            }
            Reachability::Unreachable { message } => awaited.push(message.clone()),
        }
        let unwritten = self.slices.pools().into_iter().filter(|(_, pool)| {
            // A pool with a problem is a condition and is not awaited.
            pool.written_ms.is_none() && !pool.is_current && pool.problem.is_none()
        });
        let unwritten = unwritten.map(|(key, _)| {
            format!(
                "the slices of {}/{} are not written yet",
                key.driver, key.pool
            )
        });
        awaited.extend(unwritten);
        awaited
    }

    /// Drivers whose path does not respond, a line each. A socket that is not open is not checked: the bridge makes it again, and a
    /// restart of the daemon would do no more.
    pub(super) async fn broken_paths(&self) -> Vec<String> {
        let open = self
            .bridge
            .drivers()
            .into_iter()
            .filter(|status| status.is_open);
        let sockets = open.map(|status| (status.driver, status.sockets.service));
        let checks = futures::stream::iter(sockets).map(|(driver, socket)| async move {
            match timeout(LIVE_DEADLINE, prepare_nothing(&socket)).await {
                Ok(answered) => Some(format!(
                    "the path of driver {driver} is broken: {}",
                    answered.err()?
                )),
                Err(_) => {
                    let deadline = LIVE_DEADLINE;
                    Some(format!(
                        "the path of driver {driver} did not answer within {deadline:?}"
                    ))
                }
            }
        });
        checks
            .buffer_unordered(LIVE_PATHS_AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await
    }
}

async fn prepare_nothing(socket: &Path) -> Result<(), String> {
    let channel = match connect(socket).await {
        // It was removed just now, and the bridge makes it again.
        Err(ConnectError::Connect { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(());
        }
        channel => channel.map_err(|error| chain(&error))?,
    };
    let mut client = DraPluginClient::new(channel);
    let answered = client
        .node_prepare_resources(NodePrepareResourcesRequest::default())
        .await;
    answered.map(drop).map_err(|status| chain(&status))
}
