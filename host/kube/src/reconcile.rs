//! Claims that are held for a kubelet and that no pod needs any more are unprepared.
//!
//! A kubelet unprepares what it prepared. What it forgot (its records are gone, the claim was removed by force) is found here: the
//! claim's object is gone by UID, or it is reserved for no consumer that may use it on this node. Given the held claims; lists the node's pods once a round, at the kubelet or else at the API server, and gets
//! the claims that none of them uses; emits `unprepare_abandoned` for claims that were seen abandoned for minutes, in each round.
//! While the API server is unreachable, or no kubelet is connected, nothing is unprepared.

pub(crate) mod decide;
mod kubelet_pods;
pub(crate) mod observe;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

pub use self::decide::Why;
use self::decide::{AbandonedClaims, NodePod, abandoned, is_used_here, unseen};
use self::observe::Observer;
use super::client::KubeClient;
use nodedock_base::tasks::Tasks;
use nodedock_model::{KubeletClaim, ObjectName, Problem};

/// Claims and pods that are read in one round: more than the claims of a node.
const RECONCILE_ASKS_MAX: usize = 512;

/// Interval of reconciliation of prepared claims: normally, while one seems unneeded, and the minimum.
const RECONCILE_PERIOD: Duration = Duration::from_secs(180);
const RECONCILE_PERIOD_PENDING: Duration = Duration::from_secs(60);
const RECONCILE_PERIOD_MIN: Duration = Duration::from_secs(15);

/// The claims that are held for a kubelet.
#[async_trait]
pub trait HeldClaims: Send + Sync {
    /// Those of the API server only: claims that we made up ourselves have no object there.
    fn held(&self) -> Vec<KubeletClaim>;

    /// Returns whether a kubelet is connected. One that is not may run pods that the API server does not know any more.
    fn kubelet_is_connected(&self) -> bool;

    /// Fails if the kubelet requested the claim again after it was seen.
    async fn unprepare_abandoned(&self, seen: &KubeletClaim, why: &str) -> Result<(), Problem>;
}

#[derive(Debug, Default)]
pub struct ReconcileCounts {
    /// Rounds in which the API server answered.
    pub seen: Counter,
    /// Rounds in which the API server did not answer.
    pub blind: Counter,
    pub unprepared: Counter,
}

/// Handle to the reconcile.
#[derive(Clone, Default)]
pub struct Reconcile {
    trigger: Arc<Notify>,
    pub counts: Arc<ReconcileCounts>,
}

impl Reconcile {
    /// Starts the task.
    pub fn start(
        tasks: &Tasks,
        client: &KubeClient,
        node: ObjectName,
        kubelet_root: &Path,
        claims: Arc<dyn HeldClaims>,
    ) -> Self {
        let reconcile = Self::default();
        let rounds = Rounds {
            observer: Observer::new(client.clone(), node, kubelet_root),
            claims,
            handle: reconcile.clone(),
            abandoned: AbandonedClaims::default(),
        };
        // The manager records its intent before it unprepares a claim.
        tasks.spawn_until_stopped("reconcile", rounds.run());
        reconcile
    }

    /// Runs the next round soon: an event may have left a claim behind.
    pub fn trigger(&self) {
        self.trigger.notify_one();
    }
}

struct Rounds {
    observer: Observer,
    claims: Arc<dyn HeldClaims>,
    handle: Reconcile,
    abandoned: AbandonedClaims,
}

impl Rounds {
    async fn run(mut self) {
        let mut logged = false;
        loop {
            let began = Instant::now();
            let round = self.round().await;
            let counts = &self.handle.counts;
            match round {
                Ok(()) => {
                    counts.seen.inc();
                    logged = false;
                }
                Err(why) => {
                    self.abandoned.forget();
                    counts.blind.inc();
                    if !std::mem::replace(&mut logged, true) {
                        tracing::warn!(
                            why,
                            "it is not known whether held claims are still needed, they are kept"
                        );
                    }
                }
            }
            let period = match self.abandoned.is_empty() {
                true => RECONCILE_PERIOD,
                false => RECONCILE_PERIOD_PENDING,
            };
            let triggered = async {
                self.handle.trigger.notified().await;
                // However often it is triggered.
                sleep_until(began + RECONCILE_PERIOD_MIN).await;
            };
            tokio::select! {
                () = triggered => {}
                () = sleep_until(began + period) => {}
            }
        }
    }

    /// Fails with the reason why the API server's state is not known.
    async fn round(&mut self) -> Result<(), String> {
        let held = self.claims.held();
        if held.is_empty() {
            self.abandoned.forget();
            return Ok(());
        }
        if !self.claims.kubelet_is_connected() {
            return Err("no kubelet is connected".to_owned());
        }
        let pods = self.observer.pods().await?;
        let mut abandoned = BTreeMap::new();
        let mut requests = RECONCILE_ASKS_MAX;
        for claim in held.iter().filter(|claim| !is_used_here(claim, &pods)) {
            if let Some(why) = self.judge(claim, &pods, &mut requests).await {
                abandoned.insert(claim.claim.uid.clone(), (claim, why));
            }
        }
        let uids: Vec<_> = abandoned.keys().cloned().collect();
        for uid in self.abandoned.learn(&uids, Instant::now()) {
            let Some((claim, why)) = abandoned.get(&uid) else {
                continue;
            };
            // The look may be long past: each claim took a request, and drivers take their time.
            let mut requests = RECONCILE_ASKS_MAX;
            match self.judge(claim, &pods, &mut requests).await {
                Some(_) => self.unprepare(claim, *why).await,
                None => tracing::debug!(claim = %claim.claim, "an abandoned claim is used again"),
            }
        }
        Ok(())
    }

    /// Returns why the claim is abandoned. What is not known because a round has made all its requests counts as use.
    async fn judge(
        &self,
        claim: &KubeletClaim,
        pods: &[NodePod],
        requests: &mut usize,
    ) -> Option<Why> {
        *requests = requests.checked_sub(1)?;
        let state = self.observer.claim(&claim.claim).await;
        let mut elsewhere = BTreeSet::new();
        for pod in unseen(&state, pods) {
            *requests = requests.checked_sub(1)?;
            if self.observer.may_be_here(&claim.claim.namespace, pod).await {
                return None;
            }
            elsewhere.insert(pod.uid.clone());
        }
        abandoned(claim, &state, pods, &elsewhere)
    }

    async fn unprepare(&self, seen: &KubeletClaim, why: Why) {
        let (claim, why) = (&seen.claim, why.words());
        match self.claims.unprepare_abandoned(seen, why).await {
            Ok(()) => {
                self.handle.counts.unprepared.inc();
                tracing::warn!(%claim, uid = %claim.uid, why, "a claim that the kubelet left behind is unprepared");
            }
            Err(problem) => {
                tracing::warn!(%claim, uid = %claim.uid, %problem, "a claim that the kubelet left behind is not unprepared yet");
            }
        }
    }
}
