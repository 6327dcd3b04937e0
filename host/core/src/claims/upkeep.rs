//! Interrupted unprepares and releases are finished without requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::Inner;
use super::reconcile::Serving;
use super::refusals::DriverMark;
use super::unprepare::Leaver;
use nodedock_model::{ClaimRecord, DriverName, Uid, limit};

impl Inner {
    fn uids(&self, wanted: impl Fn(&ClaimRecord) -> bool) -> Vec<Uid> {
        let table = self.table.lock();
        table.claims().filter(|record| wanted(record)).map(|record| record.id.uid.clone()).collect()
    }

    /// Finishes unprepares that a crash, an absent driver or a refusal interrupted: at start, whenever a driver begins to
    /// serve, and again and again while a driver that serves does not give up a claim, each claim at its own time. A release is
    /// finished when all of the claim's drivers serve, and a while after the start without those that do not.
    pub(super) async fn resume_unprepares(&self) {
        self.resume_values().await;
        let mut serving = self.registry.serving_changes();
        loop {
            serving.mark_unchanged();
            let now = Instant::now();
            let open = self.uids(ClaimRecord::is_leaving);
            let next = |uid: &Uid| self.next_try(self.table.lock().claim(uid.as_str())?, now);
            let (due, later): (Vec<_>, Vec<_>) = open
                .into_iter()
                .filter_map(|uid| next(&uid).map(|at| (uid, at)))
                .partition(|(_, at)| *at <= now);
            if !due.is_empty() {
                self.finish_unprepares(due.into_iter().map(|(uid, _)| uid)).await;
                if self.tasks.is_stopping() {
                    return;
                }
                continue;
            }
            let next = later.into_iter().map(|(_, at)| at).min();
            tokio::select! {
                // Nothing is lost by stopping: the intents are durable.
                () = self.tasks.stopped() => return,
                // A change that is not seen here is seen at the next turn.
                changed = serving.changed() => if changed.is_err() { return },
                // The permit stays until somebody takes it.
                () = self.kept.notified() => {}
                () = until(next) => {}
            }
        }
    }

    /// The drivers that serve now of those that are to give up something of a claim.
    pub(super) fn serving_of(&self, record: &ClaimRecord) -> Serving {
        let mark =
            |name: &DriverName| Some((name.clone(), DriverMark::of(&self.registry.serving(name).ok()?)));
        record.leaving().filter_map(|(driver, _)| mark(driver)).collect()
    }

    /// When a claim that is being given up is tried again; none: when a driver of it serves.
    fn next_try(&self, record: &ClaimRecord, now: Instant) -> Option<Instant> {
        if !record.is_leaving() {
            return None;
        }
        let serving = self.serving_of(record);
        if record.releasing.is_some() {
            return Some(self.next_release(record, &serving, now));
        }
        self.waits().next(record, &serving, now)
    }

    /// When a release that was begun is gone on with. At a start no driver serves yet, and those that come are to have their say: they
    /// are waited for a while.
    fn next_release(&self, record: &ClaimRecord, serving: &Serving, now: Instant) -> Instant {
        let next = self.waits().again(&record.id.uid).unwrap_or(now);
        let all_serve = serving.len() == record.drivers.len();
        if all_serve { next } else { next.max(self.started + limit::RELEASE_GRACE) }
    }

    /// The drivers to ask when the claim is tried again now.
    pub(super) fn due_drivers(&self, record: &ClaimRecord) -> Vec<DriverName> {
        let serving = self.serving_of(record);
        self.waits().drivers(record, &serving, Instant::now())
    }

    /// Finishes what was being given up when its driver, or the daemon, went away. Claims of one driver one after the other; a
    /// driver that hangs holds up no other's.
    pub(super) async fn finish_unprepares(&self, uids: impl Iterator<Item = Uid>) {
        let mut groups: BTreeMap<Option<DriverName>, Vec<Uid>> = BTreeMap::new();
        for uid in uids {
            let first = |record: &Arc<ClaimRecord>| record.leaving().next().map(|(driver, _)| driver.clone());
            let driver = self.table.lock().claim(uid.as_str()).and_then(first);
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
        let begun = |record: &Arc<ClaimRecord>| Some((record.id.clone(), record.releasing.clone()?));
        let release = self.table.lock().claim(uid.as_str()).and_then(begun);
        if let Some((claim, by)) = release {
            return self.finish_release(&claim, by).await;
        }
        let pods = self.finish_unprepare(uid).await;
        // After the claim's lock is given back: pods are locked before claims.
        let _held = self.pod_locks.take(pods.iter().cloned()).await;
        if !pods.is_empty()
            && let Err(problem) = self.forget(&[], &pods).await
        {
            tracing::warn!(%problem, "pods without claims stay in the checkpoint");
        }
    }

    /// Gives the pods that held the claim and are left with nothing, if it is gone.
    async fn finish_unprepare(&self, uid: &Uid) -> BTreeSet<Uid> {
        let _held = self.claim_locks.take([uid.clone()]).await;
        let now = Instant::now();
        let is_due = |record: &Arc<ClaimRecord>| {
            record.releasing.is_none() && self.next_try(record, now).is_some_and(|at| at <= now)
        };
        let record = self.table.lock().claim(uid.as_str()).cloned();
        let Some(record) = record.filter(is_due) else { return BTreeSet::new() };
        match self.resume(&record).await {
            Ok(()) => {
                tracing::info!(claim = %record.id, "finished an interrupted unprepare");
                self.idle_pods(&record)
            }
            Err(problem) => {
                tracing::warn!(claim = %record.id, %problem, "an interrupted unprepare is still open");
                BTreeSet::new()
            }
        }
    }

    /// Those of a claim's pods whose records stand without a claim: somebody was at work on them when it was forgotten.
    fn idle_pods(&self, record: &ClaimRecord) -> BTreeSet<Uid> {
        let (table, pods) = (self.table.lock(), record.pods.keys().cloned().collect());
        let idle = table.pods_with_nothing_but(&pods, &[]).into_iter();
        idle.filter(|pod| table.pod(pod.as_str()).is_some()).cloned().collect()
    }

    async fn resume(&self, record: &Arc<ClaimRecord>) -> Result<(), nodedock_model::Problem> {
        let uid = &record.id.uid;
        let request_id = format!("resume-{uid}").into();
        let call = crate::driver::Call { request_id, deadline: self.settings.call_deadline };
        let end = self.give_up(std::slice::from_ref(uid), Leaver::Nobody, &call).await.remove(uid);
        end.map_or(Ok(()), |end| end.map(drop))
    }
}

/// Ends at a time; never, if there is none.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
