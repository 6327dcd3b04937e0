//! The devices that pods use, as the kubelet lists them (`v1.PodResourcesLister/List`), and the release of claims that no pod uses.

use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::pod_resources::v1 as wire;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Request;
use wire::pod_resources_lister_client::PodResourcesListerClient;

use super::unused::ClaimUsage;
use crate::bridge::claims::DeviceClaim;
use crate::bridge::convert::PodDevices;
use crate::bridge::device_plugins::IN_USE_DEADLINE;
use crate::bridge::plugin_claim;
use crate::bridge::{BridgeTimes, Context, convert};
use nodedock_base::backoff::spread;
use nodedock_base::clock::now_ms;
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets};
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_base::socket::connect;
use nodedock_model::{Problem, ProblemCode, limit};

/// Time without a successful read after which it is reported.
pub(crate) const IN_USE_UNKNOWN: Duration = Duration::from_secs(180);

const MESSAGE_BYTES_MAX: usize = 512;

impl PodDevices {
    /// Returns whether pods use devices of a claim, under the name of its resource: a claim's name identifies its resource.
    pub(super) fn use_any(&self, of: &DeviceClaim) -> bool {
        self.in_use.iter().any(|(resource, ids)| {
            !ids.is_disjoint(&of.devices)
                && plugin_claim::id(&of.driver, resource, &of.devices)
                    .is_ok_and(|id| id.uid == of.claim.uid)
        })
    }
}

/// Lists the devices that pods use. The error says why that is not known.
pub(super) async fn list(context: &Context, deadline: Duration) -> Result<PodDevices, String> {
    let listed = tokio::time::timeout(deadline, complete_list(context, deadline)).await;
    let listed = listed.unwrap_or_else(|_| {
        Err(format!(
            "list the devices of pods within {} s",
            deadline.as_secs()
        ))
    });
    context
        .metrics
        .looked(if listed.is_ok() { "answered" } else { "failed" });
    listed
}

/// A kubelet that has just started lists fewer pods than it has: a list without pods, or without the pod of this daemon, is refused.
async fn complete_list(context: &Context, deadline: Duration) -> Result<PodDevices, String> {
    let listed = any_list(context, deadline).await?;
    match missing(context, &listed) {
        None => Ok(listed),
        Some(named) => Err(format!(
            "the kubelet does not know of its pods yet: it names {named}"
        )),
    }
}

/// Returns what a list names instead of this daemon's pod, or of any pod.
pub(super) fn missing(context: &Context, listed: &PodDevices) -> Option<&'static str> {
    let own = context
        .parts
        .own_pod
        .as_ref()
        .map(|(namespace, name)| (namespace.to_string(), name.to_string()));
    match own {
        _ if listed.pods.is_empty() => Some("no pod"),
        Some(own) if !listed.pods.contains(&own) => Some("others, and not that of this daemon"),
        _ => None,
    }
}

/// Lists the devices that pods use, of a kubelet that may not know all its pods yet.
pub(super) async fn any_list(context: &Context, deadline: Duration) -> Result<PodDevices, String> {
    let channel = connect(&context.directories.pod_resources)
        .await
        .map_err(|error| chain(&error))?;
    let client = PodResourcesListerClient::new(channel);
    let mut client = client.max_decoding_message_size(limit::POD_RESOURCES_MESSAGE_BYTES_MAX);
    let mut request = Request::new(wire::ListPodResourcesRequest {});
    request.set_timeout(deadline);
    Ok(convert::pod_devices(
        client
            .list(request)
            .await
            .map_err(|status| {
                let message = one_line(status.message(), MESSAGE_BYTES_MAX);
                format!("list the devices of pods: {:?}: {message}", status.code())
            })?
            .into_inner(),
    ))
}

/// Releases claims whose devices no pod uses any more.
pub(super) struct UnusedClaims {
    context: Arc<Context>,
    /// Sockets in the kubelet's directory.
    sockets: watch::Receiver<Arc<Sockets>>,
    usage: ClaimUsage,
    /// The kubelet that listed last.
    kubelet: Option<SocketId>,
    failing_since: Option<Instant>,
}

impl UnusedClaims {
    pub(super) fn new(context: Arc<Context>, sockets: watch::Receiver<Arc<Sockets>>) -> Self {
        let usage = ClaimUsage::new(context.parts.times);
        Self {
            context,
            sockets,
            usage,
            kubelet: None,
            failing_since: None,
        }
    }

    /// Calls the kubelet only while there are claims for devices.
    pub(super) async fn run(mut self) {
        let context = self.context.clone();
        let allocations = &context.allocations;
        loop {
            // The calls first: one that ends meanwhile has made its claim.
            let is_allocating = !allocations.devices_under_way().is_empty();
            let claims = context.device_claims();
            context.forget_all_but(&claims, Instant::now());
            if claims.is_empty() {
                self.usage.reset();
                self.set_listed(Ok(()));
            } else {
                self.round(&claims).await;
            }
            let BridgeTimes {
                in_use_period,
                in_use_pace,
                ..
            } = context.parts.times;
            if claims.is_empty() && !is_allocating {
                allocations.begun.notified().await;
            } else {
                let next = match claims.is_empty() {
                    true => in_use_pace.min(in_use_period),
                    false => self.usage.next_list(Instant::now()),
                };
                tokio::select! {
                    // A pod may end before the next list.
                    () = allocations.begun.notified() => {}
                    () = tokio::time::sleep(spread(next, now_ms() % 1000 * 7919)) => continue,
                }
            }
            tokio::time::sleep(in_use_pace.min(in_use_period)).await;
        }
    }

    async fn round(&mut self, claims: &[DeviceClaim]) {
        let before = self.current_kubelet();
        let listed = list(&self.context, IN_USE_DEADLINE).await;
        let kubelet = self.current_kubelet();
        if before != self.kubelet || before != kubelet {
            self.kubelet = kubelet;
            self.usage.reset();
        }
        match listed {
            Ok(pods) => {
                self.set_listed(Ok(()));
                self.release_unused(claims, &pods).await;
            }
            Err(error) => self.set_listed(Err(&error)),
        }
    }

    fn current_kubelet(&self) -> Option<SocketId> {
        self.sockets.borrow().get(KUBELET_SOCKET).copied()
    }

    async fn release_unused(&mut self, claims: &[DeviceClaim], pods: &PodDevices) {
        for unused in self
            .usage
            .observe(claims, |claim| pods.use_any(claim), Instant::now())
        {
            let DeviceClaim {
                driver,
                claim,
                devices,
                ..
            } = &unused;
            match self.context.release(&unused).await {
                Ok(false) => {}
                Ok(true) => {
                    self.context.metrics.released.inc();
                    let devices = devices.iter().cloned().collect::<Vec<_>>().join(", ");
                    tracing::info!(%driver, %claim, devices, "released devices that no pod uses");
                }
                // The claim manager retries by itself, and so does the next round.
                Err(problem) => {
                    tracing::debug!(%driver, %claim, %problem, "devices not released yet")
                }
            }
        }
    }

    fn set_listed(&mut self, listed: Result<(), &str>) {
        let (conditions, subject) = (
            &self.context.parts.conditions,
            self.context.directories.pod_resources.display().to_string(),
        );
        let Err(error) = listed else {
            self.failing_since = None;
            return conditions.clear(ProblemCode::PodResourcesAway, &subject);
        };
        tracing::debug!(error, "which devices pods use is not known");
        if self
            .failing_since
            .get_or_insert_with(Instant::now)
            .elapsed()
            >= IN_USE_UNKNOWN
        {
            let message = format!(
                "the kubelet does not list which devices pods use ({error}): devices of extended resources stay with pods that are gone"
            );
            conditions.set(
                &subject,
                Problem::unavailable(ProblemCode::PodResourcesAway, message),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nodedock_model::ExtendedResource;

    use super::*;
    use crate::bridge::plugin_claim::Ids;
    use nodedock_model::DriverName;

    #[test]
    fn claim_use_matches_its_resource_name() {
        let driver = DriverName::new("gpu.example.com").unwrap();
        let resource = |name: &str| ExtendedResource::new(format!("example.com/{name}")).unwrap();
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Ids>();
        let devices = ids(&["p/a", "p/b"]);
        let claim = plugin_claim::id(&driver, &resource("gpu"), &devices).unwrap();
        let claim = DeviceClaim {
            claim,
            driver,
            devices,
            requested: Instant::now(),
        };
        let is_used = |name: &str, used: &[&str]| {
            let in_use = BTreeMap::from([(resource(name), ids(used))]);
            PodDevices {
                in_use,
                ..PodDevices::default()
            }
            .use_any(&claim)
        };
        assert!(is_used("gpu", &["p/b"]));
        assert!(!is_used("gpu", &["p/c"]) && !is_used("nic", &["p/a", "p/b"]));
    }
}
