//! Finishes interrupted unprepares and releases without requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::machine::UnprepareRequest;
use super::prepare_retry::DriverRevision;
use super::table::Undo;
use super::unprepare_retry::Serving;
use crate::manager::Manager;
use nodedock_model::{ClaimRecord, DriverName, Uid};

/// Delay after the start before an interrupted release is completed without all drivers of the claim: installed drivers are loaded by then.
pub(crate) const RELEASE_GRACE: Duration = Duration::from_secs(15);

impl Manager {
    /// Finishes unprepares that a crash, an absent driver or an error interrupted: at the start, whenever a driver begins to serve, and
    /// for each claim after its backoff. A release is finished when all of the claim's drivers serve, and some time after the start
    /// without the others.
    pub(crate) async fn resume_unprepares(&self) {
        self.resume_values().await;
        let mut serving = self.registry.serving_changes();
        loop {
            serving.mark_unchanged();
            let now = Instant::now();
            let (due, later): (Vec<_>, Vec<_>) = self
                .open_unprepares(now)
                .into_iter()
                .partition(|(_, at)| *at <= now);
            if !due.is_empty() {
                self.finish_unprepares(due.into_iter().map(|(uid, _)| uid))
                    .await;
                if self.tasks.is_stopping() {
                    return;
                }
                continue;
            }
            let next = later.into_iter().map(|(_, at)| at).min();
            tokio::select! {
                // Nothing is lost by stopping: the intents are durable.
                () = self.tasks.stopped() => return,
                // A change that is not seen here is seen in the next round.
                changed = serving.changed() => if changed.is_err() { return },
                // The permit stays until it is consumed.
                () = self.unprepare_failed.notified() => {}
                () = sleep_until(next.unwrap_or(now)), if next.is_some() => {}
            }
        }
    }

    /// Claims that wait for an unprepare, with the time of the next attempt.
    fn open_unprepares(&self, now: Instant) -> Vec<(Uid, Instant)> {
        let open: Vec<_> = self
            .table()
            .claims()
            .filter(|record| record.is_leaving())
            .cloned()
            .collect();
        let next =
            |record: Arc<ClaimRecord>| Some((record.id.uid.clone(), self.next_try(&record, now)?));
        open.into_iter().filter_map(next).collect()
    }

    /// Those drivers of the parts to unprepare that serve now.
    pub(super) fn serving_of(&self, record: &ClaimRecord) -> Serving {
        let revision = |name: &DriverName| {
            Some((
                name.clone(),
                DriverRevision::of(&self.registry.serving(name).ok()?),
            ))
        };
        record
            .leaving()
            .filter_map(|(driver, _)| revision(driver))
            .collect()
    }

    /// When an unprepare is retried. None: when a driver of the claim serves.
    fn next_try(&self, record: &ClaimRecord, now: Instant) -> Option<Instant> {
        if !record.is_leaving() {
            return None;
        }
        let serving = self.serving_of(record);
        if record.releasing.is_some() {
            return Some(self.next_release(record, &serving, now));
        }
        self.unprepare_retries.lock().next(record, &serving, now)
    }

    /// When a release that was begun is finished. At a start no driver serves yet: those that come are waited for, for some time.
    fn next_release(&self, record: &ClaimRecord, serving: &Serving, now: Instant) -> Instant {
        let next = self
            .unprepare_retries
            .lock()
            .again(&record.id.uid)
            .unwrap_or(now);
        let all_serve = serving.len() == record.drivers.len();
        if all_serve {
            next
        } else {
            next.max(self.started + RELEASE_GRACE)
        }
    }

    /// The drivers to call if the claim is retried now.
    pub(super) fn due_drivers(&self, record: &ClaimRecord) -> Vec<DriverName> {
        let serving = self.serving_of(record);
        self.unprepare_retries
            .lock()
            .drivers(record, &serving, Instant::now())
    }

    /// Finishes unprepares: claims of one driver one after the other, drivers in parallel, so that a driver that hangs delays no other's.
    pub(super) async fn finish_unprepares(&self, uids: impl Iterator<Item = Uid>) {
        let mut groups: BTreeMap<Option<DriverName>, Vec<Uid>> = BTreeMap::new();
        for uid in uids {
            let first = |record: &Arc<ClaimRecord>| {
                record.leaving().next().map(|(driver, _)| driver.clone())
            };
            let driver = self.table().claim(uid.as_str()).and_then(first);
            groups.entry(driver).or_default().push(uid);
        }
        let groups = groups.into_values().map(|uids| async move {
            for uid in uids {
                if self.tasks.is_stopping() {
                    return;
                }
                self.finish_one(&uid).await;
            }
        });
        futures::future::join_all(groups).await;
    }

    async fn finish_one(&self, uid: &Uid) {
        let begun =
            |record: &Arc<ClaimRecord>| Some((record.id.clone(), record.releasing.clone()?));
        let release = self.table().claim(uid.as_str()).and_then(begun);
        if let Some((claim, by)) = release {
            return self.finish_release(&claim, by).await;
        }
        let pods = self.finish_unprepare(uid).await;
        // After the claim's lock was dropped: pods are locked before claims.
        let _pods = self.pod_locks.take(pods.iter().cloned()).await;
        if !pods.is_empty()
            && let Err(problem) = self.forget(&[], &pods, Vec::new(), Undo::default()).await
        {
            tracing::warn!(%problem, "pods without claims stay in the checkpoint");
        }
    }

    /// Returns the pods that held the claim and hold nothing now, if it is gone.
    async fn finish_unprepare(&self, uid: &Uid) -> BTreeSet<Uid> {
        let _claim = self.claim_locks.take([uid.clone()]).await;
        let now = Instant::now();
        let is_due = |record: &Arc<ClaimRecord>| {
            record.releasing.is_none() && self.next_try(record, now).is_some_and(|at| at <= now)
        };
        let record = self.table().claim(uid.as_str()).cloned();
        let Some(record) = record.filter(is_due) else {
            return BTreeSet::new();
        };
        let request_id = format!("resume-{uid}").into();
        match self
            .unprepare_locked_claim(uid, UnprepareRequest::Retry, request_id)
            .await
        {
            Ok(()) => {
                tracing::info!(claim = %record.id, "finished an interrupted unprepare");
                self.empty_pods(&record)
            }
            Err(problem) => {
                tracing::warn!(claim = %record.id, %problem, "an interrupted unprepare is still open");
                BTreeSet::new()
            }
        }
    }

    /// Those of a claim's pods that have a record and no claim: a request of theirs was under way when the claim was removed.
    fn empty_pods(&self, record: &ClaimRecord) -> BTreeSet<Uid> {
        let (table, pods) = (self.table(), record.pods.keys().cloned().collect());
        let empty = table.pods_with_nothing_but(&pods, &[]).into_iter();
        empty
            .filter(|pod| table.pod(pod.as_str()).is_some())
            .cloned()
            .collect()
    }
}
