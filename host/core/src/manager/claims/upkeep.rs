//! Finishes interrupted unprepares and releases without requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::machine::UnprepareRequest;
use super::release::Releases;
use super::retries::Retries;
use super::unprepare::{Unprepares, is_without_writes};
use crate::manager::claims::handles::Handles;
use crate::records::RecordStore;
use crate::records::table::Undo;
use crate::records::values::RecordedValues;
use crate::registry::Registry;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ClaimRecord, DriverName, Uid};

/// The owner of the task that finishes what was interrupted.
pub(crate) struct Unfinished {
    records: Arc<RecordStore>,
    unprepares: Arc<Unprepares>,
    releases: Arc<Releases>,
    retries: Arc<Retries>,
    values: Arc<RecordedValues>,
    registry: Registry,
    tasks: Tasks,
}

impl Unfinished {
    pub(in crate::manager) fn new(
        handles: &Handles,
        unprepares: Arc<Unprepares>,
        releases: Arc<Releases>,
    ) -> Self {
        Self {
            records: handles.records.clone(),
            unprepares,
            releases,
            retries: handles.retries.clone(),
            values: handles.values.clone(),
            registry: handles.registry.clone(),
            tasks: handles.tasks.clone(),
        }
    }

    /// Finishes unprepares that a crash, an absent driver or an error interrupted: at the start, whenever a driver begins to serve, and
    /// for each claim after its backoff. A release is finished when all of the claim's drivers serve, and some time after the start
    /// without the others.
    pub(crate) async fn resume_unprepares(self: Arc<Self>) {
        self.resume_values().await;
        let mut serving = self.registry.instances.changes();
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
                () = self.retries.woken() => {}
                () = sleep_until(next.unwrap_or(now)), if next.is_some() => {}
            }
        }
    }

    /// Claims that wait for an unprepare, with the time of the next attempt.
    fn open_unprepares(&self, now: Instant) -> Vec<(Uid, Instant)> {
        let open: Vec<_> = self
            .records
            .table()
            .claims()
            .filter(|record| record.is_leaving())
            .cloned()
            .collect();
        open.into_iter()
            .filter_map(|record| {
                Some((record.id.uid.clone(), self.retries.next_try(&record, now)?))
            })
            .collect()
    }

    /// Finishes unprepares: claims of one driver one after the other, drivers in parallel, so that a driver that hangs delays no other's.
    pub(super) async fn finish_unprepares(&self, uids: impl Iterator<Item = Uid>) {
        let mut groups: BTreeMap<Option<DriverName>, Vec<Uid>> = BTreeMap::new();
        for uid in uids {
            let table = self.records.table();
            let record = table.claim(uid.as_str());
            let leaving = record.and_then(|record| record.leaving().next());
            let driver = leaving.map(|(driver, _)| driver.clone());
            drop(table);
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
        let release = self
            .records
            .table()
            .claim(uid.as_str())
            .and_then(|record| Some((record.id.clone(), record.releasing.clone()?)));
        if let Some((claim, by)) = release {
            return self.releases.finish_release(&claim, by).await;
        }
        let pods = self.finish_unprepare(uid).await;
        // After the claim's lock was dropped: pods are locked before claims.
        let _pods = self.records.lock_pods(pods.iter().cloned()).await;
        if !pods.is_empty()
            && let Err(problem) = self
                .unprepares
                .forget(&[], &pods, Vec::new(), Undo::default())
                .await
        {
            tracing::warn!(%problem, "pods without claims stay in the checkpoint");
        }
    }

    /// Returns the pods that held the claim and hold nothing now, if it is gone.
    async fn finish_unprepare(&self, uid: &Uid) -> BTreeSet<Uid> {
        let _claim = self.records.lock_claims([uid.clone()]).await;
        let now = Instant::now();
        let record = self.records.table().claim(uid.as_str()).cloned();
        let due = record.filter(|record| {
            let next = self.retries.next_try(record, now);
            record.releasing.is_none() && next.is_some_and(|at| at <= now)
        });
        let Some(record) = due else {
            return BTreeSet::new();
        };
        let request_id = format!("resume-{uid}").into();
        match self
            .unprepares
            .unprepare_locked_claim(uid, UnprepareRequest::Retry, request_id)
            .await
        {
            Ok(()) => {
                tracing::info!(claim = %record.id, "finished an interrupted unprepare");
                self.empty_pods(&record)
            }
            Err(problem) => {
                // Each open claim is retried every few seconds, and the checkpoint reports that it takes no writes.
                if !is_without_writes(&problem) {
                    tracing::warn!(claim = %record.id, %problem, "an interrupted unprepare is still open");
                }
                BTreeSet::new()
            }
        }
    }

    /// Those of a claim's pods that have a record and no claim: a request of theirs was under way when the claim was removed.
    fn empty_pods(&self, record: &ClaimRecord) -> BTreeSet<Uid> {
        let (table, pods) = (self.records.table(), record.pods.keys().cloned().collect());
        let empty = table.pods_with_nothing_but(&pods, &[]).into_iter();
        empty
            .filter(|pod| table.pod(pod.as_str()).is_some())
            .cloned()
            .collect()
    }

    /// Removes values of earlier boots and of unknown claims, at the start of the daemon.
    pub(crate) async fn resume_values(&self) {
        if let Err(error) = self
            .values
            .tidy(|uid| self.records.table().is_known(uid.as_str()))
            .await
        {
            tracing::warn!(
                error = chain(&error),
                "sysfs values of another boot stay in the checkpoint"
            );
        }
    }
}
