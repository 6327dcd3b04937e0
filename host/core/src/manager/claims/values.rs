//! Sysfs values that drivers change for claims: recorded from before the first write to the end of the claim, and restored by the host if
//! the driver does not restore them.
//!
//! Receives every write before it is made, and the end of claims; writes the checkpoint's values in the order of their changes. Which
//! values those are is decided in `records`.

mod records;
mod restoring;

use std::collections::BTreeSet;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};

use self::records::Records;
pub(super) use self::restoring::{RestoreRequest, Restored};
use crate::checkpoint::{Change, Checkpoint, CommitError};
use crate::driver::values::{Journal, Write};
use crate::sysfs::SysfsTree;
use nodedock_base::locks::{Held, Locks};
use nodedock_model::{Caller, ClaimValues, DriverName, Problem, Uid};

/// The recorded values of all claims.
pub struct RecordedValues {
    records: Mutex<Records>,
    checkpoint: Checkpoint,
    tree: SysfsTree,
    /// One write or restore of a path at a time.
    path_locks: Locks<String>,
}

/// Claims whose values, or (`Some`) the values of one driver, end.
type Ends = Vec<(Uid, Option<DriverName>)>;

/// Claims whose records change: those that are written, and those that are deleted.
pub(super) fn affected_claims(changes: &[Change]) -> (Vec<Uid>, Ends) {
    let (mut written, mut deleted) = (Vec::new(), Vec::new());
    for change in changes {
        match change {
            Change::PutClaim(record) => written.push(record.id.uid.clone()),
            Change::DeleteClaim(uid) => deleted.push((uid.clone(), None)),
            _ => {}
        }
    }
    (written, deleted)
}

impl RecordedValues {
    /// `records`: those of the checkpoint. Records of another boot are void.
    pub fn new(records: Vec<ClaimValues>, boot_id: &str, checkpoint: Checkpoint, tree: SysfsTree) -> Self {
        let records = Mutex::new(Records::new(records, boot_id));
        Self { records, checkpoint, tree, path_locks: Locks::default() }
    }

    /// The values that drivers changed for a claim.
    pub(super) fn of(&self, uid: &Uid) -> Option<ClaimValues> {
        self.records.lock().get(uid).cloned()
    }

    /// Claims whose release was begun by an older release of this program, and by whom; returned once.
    pub(super) fn take_releasing(&self) -> Vec<(Uid, Caller)> {
        self.records.lock().take_releasing()
    }

    /// Removes records of another boot, or of unknown claims.
    pub(super) async fn tidy(&self, is_known: impl Fn(&Uid) -> bool) -> Result<(), CommitError> {
        let change = |records: &mut Records| {
            let unknown: Vec<_> = records.claims().map(|record| record.id.uid.clone()).collect();
            let unknown: Vec<_> = unknown.into_iter().filter(|uid| !is_known(uid)).collect();
            let heirs: Vec<_> = unknown.iter().flat_map(|uid| records.end(uid, None).heirs).collect();
            // A claim with outlived values may have been prepared again since.
            records.take_outlived().into_iter().chain(unknown).chain(heirs).collect()
        };
        self.commit(change).await
    }

    /// The changes of values that belong to a commit of claims' records: values of written claims as they are now, and the end of
    /// others. `removed` receives the records before their end, for `restore_records` if the commit fails. The lock keeps the
    /// order of commits.
    pub(super) fn follow(
        &self,
        written: Vec<Uid>,
        ends: Ends,
        removed: &mut Vec<ClaimValues>,
    ) -> (MutexGuard<'_, Records>, Vec<Change>) {
        let mut records = self.records.lock();
        let mut changed: BTreeSet<Uid> =
            written.into_iter().filter(|uid| records.get(uid).is_some()).collect();
        for (uid, driver) in ends {
            let ended = records.end(&uid, driver.as_ref());
            changed.extend(ended.before.is_some().then_some(uid));
            changed.extend(ended.heirs);
            removed.extend(ended.before);
        }
        let changes = changed.into_iter().map(|uid| records.change(uid)).collect();
        (records, changes)
    }

    /// Restores records whose end did not become durable.
    pub(super) fn restore_records(&self, removed: Vec<ClaimValues>) {
        let mut records = self.records.lock();
        removed.into_iter().rev().for_each(|before| records.restore(before));
    }

    /// Ends the values of some drivers of a claim.
    pub(super) async fn end_of_drivers(
        &self,
        uid: &Uid,
        drivers: Vec<DriverName>,
    ) -> Result<(), CommitError> {
        if self.records.lock().get(uid).is_none() {
            return Ok(());
        }
        let ends = drivers.into_iter().map(|driver| (uid.clone(), Some(driver))).collect();
        let mut removed = Vec::new();
        let more = || self.follow(Vec::new(), ends, &mut removed);
        let outcome = self.checkpoint.commit_in_order(Vec::new(), more).await;
        if outcome.is_err() {
            self.restore_records(removed);
        }
        outcome
    }

    /// Commits the records of the claims that `change` returns, in the order in which the records are changed.
    async fn commit(&self, change: impl FnOnce(&mut Records) -> BTreeSet<Uid>) -> Result<(), CommitError> {
        let more = || {
            let mut records = self.records.lock();
            let changed = change(&mut records);
            let changes = changed.into_iter().map(|uid| records.change(uid)).collect();
            (records, changes)
        };
        self.checkpoint.commit_in_order(Vec::new(), more).await
    }
}

#[async_trait]
impl Journal for RecordedValues {
    async fn turn(&self, path: &str) -> Vec<Held<String>> {
        self.path_locks.take([path.to_owned()]).await
    }

    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem> {
        let mut refused = None;
        let intend = |records: &mut Records| match records.intend(write) {
            Ok(()) => write.claims.iter().map(|claim| claim.uid.clone()).collect(),
            Err(problem) => {
                refused = Some(problem);
                BTreeSet::new()
            }
        };
        let durable = self.commit(intend).await;
        if let Some(problem) = refused {
            return Err(problem);
        }
        durable.map_err(|error| {
            self.records.lock().settle(write, None);
            error.problem()
        })
    }

    fn settle(&self, write: &Write<'_>, stands: Option<String>) {
        self.records.lock().settle(write, stands.as_deref());
    }
}
