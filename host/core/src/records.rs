//! The records of claims and pods: the table in memory, the locks by which requests take turns, and the commits to the checkpoint.
//!
//! Is given the table and the recorded sysfs values, with which records are committed. Reports each change of a claim, and each time that a
//! claim may have freed devices. Never calls a driver and never touches a file of a claim.

mod change_log;
pub(crate) mod ended;
mod index;
pub(crate) mod statuses;
pub mod table;
pub mod values;

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::MutexGuard;

use crate::checkpoint::{Change, CommitError};
use crate::resources::pools::split_id;
pub use change_log::ClaimChanges;
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::error::chain;
use nodedock_base::locks::{LockGuard, Locks};
use nodedock_base::signal::{Listener, Signal};
use nodedock_model::{
    ChangedKind, ClaimRecord, DriverName, EndedRecord, ObjectName, ObjectRef, Problem,
    ReleaseRecord, Uid,
};
use statuses::has_status;
pub use statuses::statuses;
pub use table::SharedClaimTable;
use table::{ClaimTable, Undo};
pub use values::RecordedValues;

/// The owner of the records of claims and pods.
pub struct RecordStore {
    table: Arc<SharedClaimTable>,
    /// Commits records, and with them what they mean for recorded sysfs values.
    values: Arc<RecordedValues>,
    /// One request at a time for a pod.
    pod_locks: Locks<Uid>,
    /// One operation at a time for a claim.
    claim_locks: Locks<Uid>,
    changes: Changes,
    /// Changes when a claim may have freed devices: prepares that wait for one decide again.
    freed: Signal,
    /// Changes when the statuses that drivers report for a kubelet's claims may have changed.
    statuses_changed: Signal,
}

impl RecordStore {
    pub(crate) fn new(
        table: Arc<SharedClaimTable>,
        values: Arc<RecordedValues>,
        changes: Changes,
    ) -> Self {
        Self {
            table,
            values,
            pod_locks: Locks::default(),
            claim_locks: Locks::default(),
            changes,
            freed: Signal::new(),
            statuses_changed: Signal::new(),
        }
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, ClaimTable> {
        self.table.lock()
    }

    /// Locks pods. Taken before the locks of claims.
    pub(crate) async fn lock_pods(
        &self,
        pods: impl IntoIterator<Item = Uid>,
    ) -> Vec<LockGuard<Uid>> {
        self.pod_locks.take(pods).await
    }

    /// Locks a pod, unless a request has the lock.
    pub(crate) fn try_lock_pod(&self, pod: &Uid) -> Option<LockGuard<Uid>> {
        self.pod_locks.try_take(pod)
    }

    /// Locks claims, in the order of their UIDs.
    pub(crate) async fn lock_claims(
        &self,
        claims: impl IntoIterator<Item = Uid>,
    ) -> Vec<LockGuard<Uid>> {
        self.claim_locks.take(claims).await
    }

    /// Locks a claim, unless an operation has the lock.
    pub(crate) fn try_lock_claim(&self, claim: &Uid) -> Option<LockGuard<Uid>> {
        self.claim_locks.try_take(claim)
    }

    /// Every claim, by namespace and name.
    pub fn claims(&self) -> Vec<Arc<ClaimRecord>> {
        let mut claims: Vec<_> = self.table().claims().cloned().collect();
        claims.sort_by(|a, b| (&a.id.namespace, &a.id.name).cmp(&(&b.id.namespace, &b.id.name)));
        claims
    }

    /// The claim of a UID.
    pub fn claim(&self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        self.table().claim(uid.as_str()).cloned()
    }

    /// Claims of a namespace, by UID.
    pub fn claims_in(&self, namespace: &ObjectName) -> Vec<Arc<ClaimRecord>> {
        self.table().claims_in(namespace).cloned().collect()
    }

    /// Claims that have a device, by UID.
    pub fn claims_with_device(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> Vec<Arc<ClaimRecord>> {
        let table = self.table();
        table.users_of(driver, pool, device).cloned().collect()
    }

    /// Returns the claims that changed since a revision of an earlier answer; all claims, if there is none or it is too long ago.
    pub fn changes_since(&self, seen: Option<u64>) -> ClaimChanges {
        self.table().changes_since(seen)
    }

    /// Claims that operators released by force, the oldest first.
    pub fn released_claims(&self) -> Vec<Arc<ReleaseRecord>> {
        self.table().released()
    }

    /// Claims without a record that were unprepared within the last day, the oldest first.
    pub fn ended_claims(&self) -> Vec<Arc<EndedRecord>> {
        let table = self.table();
        let mut ended = table.ended().list(now_ms());
        ended.retain(|record| table.claim(record.id.uid.as_str()).is_none());
        ended
    }

    pub fn users_of_device(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<ObjectRef> {
        self.table()
            .users_of(driver, pool, device)
            .map(|record| record.id.clone())
            .collect()
    }

    /// Returns whether a claim has a device of a pool. `id`: the device's ID in the resource.
    pub fn is_claimed(&self, driver: &DriverName, id: &str) -> bool {
        split_id(id).is_some_and(|(pool, device)| {
            !self
                .users_of_device(driver, pool.as_str(), device.as_str())
                .is_empty()
        })
    }

    /// Returns whether a claim has devices of a driver. A claim whose record cannot be read may have them.
    pub(crate) fn has_part(&self, uid: &Uid, driver: &DriverName) -> bool {
        let table = self.table();
        match table.claim(uid.as_str()) {
            Some(claim) => claim.allocation.has_driver(driver),
            None => table.is_known(uid.as_str()),
        }
    }

    /// Puts records into the table, then makes them durable; restores the table if that fails.
    pub(crate) async fn commit_claims(
        &self,
        records: Vec<Arc<ClaimRecord>>,
    ) -> Result<(), Problem> {
        self.commit_with(records, Vec::new(), Undo::default()).await
    }

    /// The same with changes that are in the table already. `undo`: of these, if the commit fails.
    pub(crate) async fn commit_with(
        &self,
        records: Vec<Arc<ClaimRecord>>,
        mut changes: Vec<Change>,
        mut undo: Undo,
    ) -> Result<(), Problem> {
        {
            let mut table = self.table();
            records
                .iter()
                .for_each(|record| undo.put(&mut table, record));
        }
        changes.extend(records.iter().cloned().map(Change::PutClaim));
        self.commit(changes, undo).await?;
        self.report_claims(&records);
        Ok(())
    }

    /// Makes changes durable that are in the table already, and with them what they mean for recorded sysfs values; restores the
    /// table if that fails.
    pub(crate) async fn commit(&self, changes: Vec<Change>, undo: Undo) -> Result<(), Problem> {
        if changes.is_empty() {
            return Ok(());
        }
        let Err(error) = self.values.commit_claims(changes, Vec::new()).await else {
            return Ok(());
        };
        undo.restore(&mut self.table());
        // A request that was refused because of the restored claims decides again.
        self.report_freed();
        if matches!(error, CommitError::Store(_)) {
            // The checkpoint reports that it takes no writes, once for all requests.
            tracing::debug!(error = chain(&error), "commit to the checkpoint failed");
        } else {
            tracing::error!(error = chain(&error), "commit to the checkpoint failed");
        }
        Err(error.problem())
    }

    /// Removes claims, and those of `pods` that hold nothing else, durably and with more changes in the same commit; returns the claims.
    /// `Change::PutEnded` among the changes lists a claim as ended, and removes the oldest ones beyond the bounds.
    /// They leave the table after the commit: if it failed, a device that another claim took before would be in two claims. The caller has
    /// the pods' locks. `undo`: of changes that are in the table already, if the commit fails.
    pub(crate) async fn remove(
        &self,
        uids: &[Uid],
        pods: &BTreeSet<Uid>,
        changes: Vec<Change>,
        undo: Undo,
    ) -> Result<Vec<Arc<ClaimRecord>>, Problem> {
        let ended: Vec<_> = changes.iter().filter_map(ended_by).cloned().collect();
        let (pods, outdated) = {
            let table = self.table();
            (
                table.pods_with_nothing_but(pods, uids),
                table.ended().outdated(&ended, now_ms()),
            )
        };
        // The claims first: what is left of one takes the place of its record.
        let mut all: Vec<_> = uids.iter().cloned().map(Change::DeleteClaim).collect();
        all.extend(changes);
        all.extend(outdated.iter().cloned().map(Change::DeleteEnded));
        all.extend(pods.iter().map(|pod| Change::DeletePod((*pod).clone())));
        self.commit(all, undo).await?;
        let mut table = self.table();
        table.put_ended(ended, &outdated);
        pods.iter()
            .for_each(|pod| drop(table.remove_pod(pod.as_str())));
        Ok(uids.iter().filter_map(|uid| table.remove(uid)).collect())
    }

    pub(crate) fn report_claims(&self, records: &[Arc<ClaimRecord>]) {
        for record in records {
            self.changes
                .report(ChangedKind::Claim, &record.id, record.state.as_str());
        }
        self.report_statuses(records);
    }

    /// Reports a claim that is not in the table any more. `report_statuses` follows, for all of them.
    pub(crate) fn report_gone(&self, claim: &ObjectRef) {
        self.changes.report(ChangedKind::Claim, claim, "gone");
    }

    /// Reports that statuses may have changed, if these records have any.
    pub(crate) fn report_statuses(&self, records: &[Arc<ClaimRecord>]) {
        let mut records = records.iter();
        if records.any(|record| record.kubelet.is_some() && has_status(record)) {
            self.statuses_changed.send();
        }
    }

    /// Changes whenever the statuses of a kubelet's claims ([`statuses`]) may have changed.
    pub fn device_status_changes(&self) -> Listener {
        self.statuses_changed.subscribe()
    }

    /// Changes when a claim may have freed devices.
    pub(crate) fn freed(&self) -> Listener {
        self.freed.subscribe()
    }

    /// Reports that a claim may have freed devices.
    pub(crate) fn report_freed(&self) {
        self.freed.send();
    }
}

/// The claim that a change lists as ended.
fn ended_by(change: &Change) -> Option<&Arc<EndedRecord>> {
    if let Change::PutEnded(record) = change {
        Some(record)
    } else {
        None
    }
}
