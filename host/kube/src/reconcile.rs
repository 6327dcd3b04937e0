//! Claims that are held for a kubelet and that nobody needs any more are given up.
//!
//! A kubelet unprepares what it prepared. What it forgot (its records are gone, the claim was removed by force) is found here: the
//! claim's object is gone by UID, or no pod of this node needs it. Given what is held; asks the API server for the node's pods, once a
//! round, and for claims that none of them uses; emits `give_up` for what was seen abandoned for minutes, each time that was looked.
//! While the API server is away, or no kubelet is there, nothing is given up.

mod decide;
mod look;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

pub use self::decide::Why;
use self::decide::{NodePod, OtherPod, Patience, Sight, Verdict, is_used_here, unseen, verdict};
use self::look::Look;
use super::exchange::Exchange;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::{KubeletClaim, ObjectName, Problem, Uid, limit};

/// The claims that are held for a kubelet.
#[async_trait]
pub trait HeldClaims: Send + Sync {
    /// Those of the API server only: claims that we made up ourselves have no object there.
    fn held(&self) -> Vec<KubeletClaim>;

    /// Whether a kubelet is there. One that is not runs pods of which the API server may know nothing any more.
    fn kubelet_is_here(&self) -> bool;

    async fn give_up(&self, claim: &Uid, why: &str) -> Result<(), Problem>;
}

#[derive(Debug, Default)]
pub struct ReconcileCounts {
    pub rounds: AtomicU64,
    /// Rounds in which the API server did not say what has to be known.
    pub blind: AtomicU64,
    pub given_up: AtomicU64,
}

/// Handle to the reconcile.
#[derive(Clone)]
pub struct Reconcile {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    news: Notify,
    counts: ReconcileCounts,
}

impl Reconcile {
    /// Starts the task.
    pub fn start(
        tasks: &Tasks,
        api: Arc<dyn Exchange>,
        node: ObjectName,
        claims: Arc<dyn HeldClaims>,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let rounds = Rounds {
            look: Look { api, node },
            claims,
            shared: Arc::clone(&shared),
            patience: Patience::new(limit::RECONCILE_DELAY, limit::RECONCILE_LOOKS_MIN),
        };
        let stop = tasks.clone();
        tasks.spawn("reconcile", rounds.run(stop));
        Self { shared }
    }

    /// Something happened that may have left a claim behind: the next round is soon.
    pub fn look_soon(&self) {
        self.shared.news.notify_one();
    }

    pub fn counts(&self) -> &ReconcileCounts {
        &self.shared.counts
    }
}

struct Rounds {
    look: Look,
    claims: Arc<dyn HeldClaims>,
    shared: Arc<Shared>,
    patience: Patience,
}

impl Rounds {
    async fn run(mut self, tasks: Tasks) {
        let mut said = false;
        loop {
            let began = Instant::now();
            let round = tokio::select! {
                // A claim whose giving up is cut off here is the manager's business, which records its intent first.
                () = tasks.stopped() => return,
                round = self.round() => round,
            };
            let counts = &self.shared.counts;
            counts.rounds.fetch_add(1, Relaxed);
            match round {
                Ok(()) => said = false,
                Err(why) => {
                    self.patience.forget();
                    counts.blind.fetch_add(1, Relaxed);
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(
                            why,
                            "whether held claims are still needed is not known, and they are kept"
                        );
                    }
                }
            }
            let period = if self.patience.is_empty() {
                limit::RECONCILE_PERIOD
            } else {
                limit::RECONCILE_PERIOD_PENDING
            };
            let soon = async {
                self.shared.news.notified().await;
                // However often something happens.
                sleep_until(began + limit::RECONCILE_PERIOD_MIN).await;
            };
            tokio::select! {
                () = tasks.stopped() => return,
                () = soon => {}
                () = sleep_until(began + period) => {}
            }
        }
    }

    /// Error: why it could not see.
    async fn round(&mut self) -> Result<(), String> {
        let held = self.claims.held();
        if held.is_empty() {
            self.patience.forget();
            return Ok(());
        }
        if !self.claims.kubelet_is_here() {
            return Err("no kubelet is connected".to_owned());
        }
        let pods = self.look.pods().await.map_err(|error| chain(&error))?;
        let mut abandoned = BTreeMap::new();
        let mut asks = limit::RECONCILE_ASKS_MAX;
        for claim in held.iter().filter(|claim| !is_used_here(claim, &pods)) {
            if let Verdict::Abandoned(why) = self.judge(claim, &pods, &mut asks).await {
                abandoned.insert(claim.claim.uid.clone(), why);
            }
        }
        let uids: Vec<_> = abandoned.keys().cloned().collect();
        let over = self.patience.learn(&uids, Instant::now());
        for uid in over {
            let (Some(why), Some(seen)) =
                (abandoned.get(&uid), held.iter().find(|claim| claim.claim.uid == uid))
            else {
                continue;
            };
            // The look may be long past: each claim was asked for, and drivers take their time. A pod that came meanwhile, to which the
            // kubelet gives what it has, is not asked for by it.
            let mut asks = limit::RECONCILE_ASKS_MAX;
            match self.judge(seen, &pods, &mut asks).await {
                Verdict::Abandoned(_) => self.give_up(seen, *why).await,
                Verdict::Used => {
                    tracing::debug!(claim = %seen.claim, "a claim was left behind, and is used again")
                }
            }
        }
        Ok(())
    }

    /// What is not asked because a round has asked enough counts as use.
    async fn judge(&self, claim: &KubeletClaim, pods: &[NodePod], asks: &mut usize) -> Verdict {
        let Some(left) = asks.checked_sub(1) else { return Verdict::Used };
        *asks = left;
        let sight = self.look.claim(&claim.claim).await;
        let mut others: BTreeMap<Uid, OtherPod> = BTreeMap::new();
        if sight == Sight::Unknown {
            return Verdict::Used;
        }
        for pod in unseen(&sight, pods) {
            let Some(left) = asks.checked_sub(1) else { return Verdict::Used };
            *asks = left;
            let what = self.look.other_pod(&claim.claim.namespace, pod).await;
            others.insert(pod.uid.clone(), what);
            if what == OtherPod::Possible {
                break;
            }
        }
        verdict(claim, &sight, pods, &others)
    }

    async fn give_up(&self, seen: &KubeletClaim, why: Why) {
        // A kubelet that asked for it since we looked has a pod that needs it.
        let now = self.claims.held();
        if now.iter().find(|claim| claim.claim.uid == seen.claim.uid) != Some(seen) {
            return;
        }
        let claim = &seen.claim;
        match self.claims.give_up(&claim.uid, why.words()).await {
            Ok(()) => {
                self.shared.counts.given_up.fetch_add(1, Relaxed);
                tracing::warn!(%claim, uid = %claim.uid, why = why.words(), "a claim that the kubelet left behind is given up");
            }
            Err(problem) => {
                tracing::warn!(%claim, uid = %claim.uid, %problem, "a claim that the kubelet left behind is not given up yet");
            }
        }
    }
}
