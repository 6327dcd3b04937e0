//! Interrupted unprepares are finished without requests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use crate::model::{ClaimRecord, ClaimState, Uid, limit};

impl Inner {
    fn uids(&self, wanted: impl Fn(&ClaimRecord) -> bool) -> Vec<Uid> {
        let table = self.table.lock();
        table.claims().filter(|record| wanted(record)).map(|record| record.id.uid.clone()).collect()
    }

    /// Finishes unprepares that a crash, an absent driver or a refusal interrupted: at start, whenever a driver begins to
    /// serve, and again and again while a driver that serves does not give up a claim.
    pub(super) async fn resume_unprepares(&self) {
        let mut serving = self.registry.serving_changes();
        let mut wait = limit::UNPREPARE_RETRY_MIN;
        loop {
            serving.mark_unchanged();
            self.finish_unprepares(self.uids(|record| self.can_resume(record))).await;
            let retry = self.table.lock().claims().any(|record| self.can_resume(record));
            wait =
                if retry { (wait * 2).min(limit::UNPREPARE_RETRY_MAX) } else { limit::UNPREPARE_RETRY_MIN };
            tokio::select! {
                // Nothing is lost by stopping: the intents are durable.
                () = self.tasks.stopped() => return,
                // A change that is not seen here is seen at the next turn.
                changed = serving.changed() => if changed.is_err() { return },
                () = self.turn(wait, retry) => {}
            }
        }
    }

    /// Ends when it is time to come again for what is kept.
    async fn turn(&self, wait: Duration, retry: bool) {
        if !retry {
            self.kept.notified().await;
        }
        tokio::time::sleep(wait).await;
    }

    /// Whether it is being given up and somebody is there to do it.
    pub(super) fn can_resume(&self, record: &ClaimRecord) -> bool {
        let serves = |driver| self.registry.serving(driver).is_ok();
        record.state == ClaimState::Unpreparing
            && (record.drivers.is_empty() || record.drivers.keys().any(serves))
    }

    /// Finishes what was being given up when its driver, or the daemon, went away.
    async fn finish_unprepares(&self, uids: Vec<Uid>) {
        for uid in uids {
            if self.tasks.is_stopping() {
                return;
            }
            let pods = self.finish_unprepare(&uid).await;
            // After the claim's lock is given back: pods are locked before claims.
            let _held = self.pod_locks.take(pods.iter().cloned()).await;
            if !pods.is_empty()
                && let Err(problem) = self.forget(&[], &pods).await
            {
                tracing::warn!(%problem, "pods without claims stay in the checkpoint");
            }
        }
    }

    /// Gives the pods that held the claim, if it is gone.
    async fn finish_unprepare(&self, uid: &Uid) -> BTreeSet<Uid> {
        let _held = self.claim_locks.take([uid.clone()]).await;
        let Some(record) = self.table.lock().claim(uid.as_str()).cloned().filter(|r| self.can_resume(r))
        else {
            return BTreeSet::new();
        };
        match self.resume(&record).await {
            Ok(()) => {
                tracing::info!(claim = %record.id, "finished an interrupted unprepare");
                record.pods.keys().cloned().collect()
            }
            Err(problem) => {
                tracing::warn!(claim = %record.id, %problem, "an interrupted unprepare is still open");
                BTreeSet::new()
            }
        }
    }

    async fn resume(&self, record: &Arc<ClaimRecord>) -> Result<(), crate::model::Problem> {
        let uid = &record.id.uid;
        let request_id = format!("resume-{uid}").into();
        let call = crate::driver::Call { request_id, deadline: self.settings.call_deadline };
        let end = self.give_up(std::slice::from_ref(uid), None, &call).await.remove(uid);
        end.map_or(Ok(()), |end| end.map(drop))
    }
}
