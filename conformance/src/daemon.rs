//! The daemon that runs a WebAssembly driver: what its node API says of the driver, and requests that a kubelet does not make.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nodedock_proto::node::v1;
use nodedock_proto::node::v1::node_client::NodeClient;
use nodedock_stand_ins::kubelet::{ClaimRef, authority};
use tonic::transport::Channel;

use crate::metrics;

/// Deadline for connecting to the daemon's sockets.
const DIAL: Duration = Duration::from_secs(5);
/// States of a driver that does not serve before its files change.
const UNUSABLE: [&str; 2] = ["blocked", "failed"];

/// Paths of a daemon's sockets below its root.
#[derive(Debug, Clone)]
pub struct DaemonSockets {
    /// It serves metrics by HTTP.
    pub metrics: PathBuf,
    pub node_api: PathBuf,
}

/// A daemon that answers.
pub(crate) struct Daemon {
    client: NodeClient<Channel>,
    metrics: PathBuf,
}

impl Daemon {
    pub(crate) async fn connect(root: &Path, sockets: &DaemonSockets) -> Result<Self> {
        Self::connect_within(root, sockets, DIAL).await
    }

    async fn connect_within(root: &Path, sockets: &DaemonSockets, time: Duration) -> Result<Self> {
        let path = root.join(&sockets.node_api);
        let stream = authority::dial(&path, time)
            .await
            .map_err(|why| anyhow!("{why}"))?;
        let (channel, _) = authority::channel(stream, None)
            .await
            .map_err(|why| anyhow!("{why}"))?;
        Ok(Self {
            client: NodeClient::new(channel),
            metrics: root.join(&sockets.metrics),
        })
    }

    /// Returns why the driver will not serve; `None`: it may, or the daemon does not answer yet.
    pub(crate) async fn refusal(root: &Path, sockets: &DaemonSockets) -> Option<String> {
        // no error: the daemon is starting, and the caller tries again
        let mut daemon = Self::connect_within(root, sockets, Duration::from_millis(1))
            .await
            .ok()?;
        let request = v1::ListDriversRequest::default();
        // no error: as above
        let drivers = daemon.client.list_drivers(request).await.ok()?.into_inner();
        let refused = drivers
            .drivers
            .into_iter()
            .find(|driver| UNUSABLE.contains(&driver.state.as_str()))?;
        let reason = match (&refused.reason, &refused.problem) {
            (reason, Some(problem)) if reason.is_empty() => &problem.message,
            (reason, _) => reason,
        };
        Some(format!("{} is {}: {reason}", refused.source, refused.state))
    }

    /// Has the driver discover its devices again.
    pub(crate) async fn discover(&mut self, driver: &str) -> Result<()> {
        let name = driver.to_owned();
        let request = v1::ReloadDriverRequest { name };
        let answer = self.client.reload_driver(request).await;
        answer
            .map(drop)
            .with_context(|| format!("have {driver} discover its devices"))
    }

    /// Prepares claims of the API server in one call, for a pod that they are reserved for. Returns the refusal of each that is refused.
    pub(crate) async fn prepare(
        &mut self,
        pod: &v1::ObjectRef,
        claims: &[ClaimRef],
    ) -> Result<Vec<(String, Option<String>)>> {
        let reference = |claim: &ClaimRef| v1::ClaimReference {
            pod_claim_name: claim.name.clone(),
            claim_name: claim.name.clone(),
            claim_uid: claim.uid.clone(),
        };
        let request = v1::PreparePodRequest {
            pod: Some(pod.clone()),
            claims: claims.iter().map(reference).collect(),
            ..Default::default()
        };
        let answer = self.client.prepare_pod(request).await;
        let answer = answer.context("prepare several claims in one call")?;
        let outcomes = answer.into_inner().claims.into_iter().map(|claim| {
            let name = claim.id.map(|id| id.name).unwrap_or_default();
            let refusal = (claim.outcome != "prepared").then(|| {
                let problem = claim.problem.map(|problem| problem.message);
                problem.unwrap_or(claim.outcome)
            });
            (name, refusal)
        });
        Ok(outcomes.collect())
    }

    /// Returns the sum of a metric's samples.
    pub(crate) async fn metric(&self, name: &str) -> Result<f64> {
        metrics::sum(&self.metrics, name).await
    }
}
