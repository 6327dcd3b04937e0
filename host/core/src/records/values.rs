//! Sysfs values that drivers change for claims: recorded from before the first write to the end of the claim, and restored by the host if
//! the driver does not restore them.
//!
//! Receives every write before it is made, and the end of claims; writes the checkpoint's values in the order of their changes. Which
//! values those are is decided in `records`.

mod left;
mod records;
mod restoring;

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use parking_lot::Mutex;

pub use self::left::LeftValues;
use self::records::Records;
pub(crate) use self::restoring::{RestoreRequest, Restored, RestoredDrivers, Restorer};
use crate::checkpoint::{Change, Checkpoint, CommitError};
use crate::driver::values::{Journal, Write};
use crate::sysfs::SysfsTree;
use nodedock_base::locks::{LockGuard, Locks};
use nodedock_model::{ClaimValues, DriverName, ObjectRef, Problem, Uid};

pub struct RecordedValues {
    records: Mutex<Records>,
    checkpoint: Checkpoint,
    tree: SysfsTree,
    /// One write or restore of a path at a time.
    path_locks: Locks<String>,
    /// Values that drivers left behind.
    pub left: LeftValues,
}

impl RecordedValues {
    /// `records`: those of the checkpoint. Records of another boot are void.
    pub fn new(
        records: Vec<ClaimValues>,
        boot_id: &str,
        checkpoint: Checkpoint,
        tree: SysfsTree,
    ) -> Self {
        let records = Mutex::new(Records::new(records, boot_id));
        Self {
            records,
            checkpoint,
            tree,
            path_locks: Locks::default(),
            left: LeftValues::default(),
        }
    }

    pub(crate) fn of(&self, uid: &Uid) -> Option<ClaimValues> {
        self.records.lock().get(uid).cloned()
    }

    /// Returns the progress that a driver saved for the claim in a prepare that did not succeed; empty if there is none.
    pub(crate) fn progress_for(&self, uid: &Uid, driver: &DriverName) -> Vec<u8> {
        self.records.lock().progress(uid, driver)
    }

    /// Removes records of another boot, or of unknown claims.
    pub(crate) async fn tidy(&self, is_known: impl Fn(&Uid) -> bool) -> Result<(), CommitError> {
        let change = |records: &mut Records| {
            let unknown: Vec<_> = records
                .claims
                .keys()
                .filter(|uid| !is_known(uid))
                .cloned()
                .collect();
            let heirs: Vec<_> = unknown
                .iter()
                .flat_map(|uid| records.end(uid, None).heirs)
                .collect();
            // A claim with outlived values may have been prepared again since.
            std::mem::take(&mut records.outlived)
                .into_iter()
                .chain(unknown)
                .chain(heirs)
                .collect()
        };
        self.commit(Vec::new(), change).await
    }

    /// Commits changes, and with those of claims' records what they mean for values: values of written claims as they are now, and the
    /// end of deleted claims' values and of those of `drivers`. An end that does not become durable is undone.
    pub(crate) async fn commit_claims(
        &self,
        changes: Vec<Change>,
        drivers: Vec<(Uid, DriverName)>,
    ) -> Result<(), CommitError> {
        let (mut written, mut ends, mut prepared) = (BTreeSet::new(), Vec::new(), Vec::new());
        for change in &changes {
            match change {
                Change::PutClaim(record) => {
                    written.insert(record.id.uid.clone());
                    let current = record
                        .drivers
                        .iter()
                        .filter(|(_, part)| part.current().is_some());
                    prepared
                        .extend(current.map(|(driver, _)| (record.id.uid.clone(), driver.clone())));
                }
                Change::DeleteClaim(uid) => ends.push((uid.clone(), None)),
                _ => {}
            }
        }
        ends.extend(drivers.into_iter().map(|(uid, driver)| (uid, Some(driver))));
        let mut removed = Vec::new();
        let follow = |records: &mut Records| {
            written.retain(|uid| records.get(uid).is_some());
            removed.extend(
                prepared
                    .iter()
                    .filter_map(|(uid, driver)| records.drop_progress(uid, driver)),
            );
            for (uid, driver) in ends {
                let ended = records.end(&uid, driver.as_ref());
                written.extend(ended.before.is_some().then_some(uid));
                written.extend(ended.heirs);
                removed.extend(ended.before);
            }
            written
        };
        let outcome = self.commit(changes, follow).await;
        if outcome.is_err() {
            let mut records = self.records.lock();
            removed
                .into_iter()
                .rev()
                .for_each(|before| records.restore(before));
        }
        outcome
    }

    pub(crate) async fn end_of_drivers(
        &self,
        uid: &Uid,
        drivers: Vec<DriverName>,
    ) -> Result<(), CommitError> {
        if self.records.lock().get(uid).is_none() {
            return Ok(());
        }
        let drivers = drivers
            .into_iter()
            .map(|driver| (uid.clone(), driver))
            .collect();
        self.commit_claims(Vec::new(), drivers).await
    }

    /// Commits changes with the records of the claims that `change` returns, in the order in which the records are changed.
    async fn commit(
        &self,
        changes: Vec<Change>,
        change: impl FnOnce(&mut Records) -> BTreeSet<Uid>,
    ) -> Result<(), CommitError> {
        let more = || {
            let mut records = self.records.lock();
            let changed = change(&mut records);
            let changes = changed.into_iter().map(|uid| records.change(uid)).collect();
            (records, changes)
        };
        self.checkpoint.commit_in_order(changes, more).await
    }
}

#[async_trait]
impl Journal for RecordedValues {
    async fn lock_path(&self, path: &str) -> Vec<LockGuard<String>> {
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
        let durable = self.commit(Vec::new(), intend).await;
        if let Some(problem) = refused {
            return Err(problem);
        }
        durable.map_err(|error| {
            self.records.lock().settle(write, None);
            error.problem()
        })
    }

    fn before(
        &self,
        driver: &DriverName,
        claims: &[ObjectRef],
        path: &str,
    ) -> Option<(u64, String)> {
        self.records.lock().before(driver, claims, path)
    }

    async fn save_progress(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        progress: Vec<u8>,
    ) -> Result<(), Problem> {
        let mut before = Vec::new();
        let save = |records: &mut Records| {
            before = records.set_progress(claim, driver, progress);
            BTreeSet::from([claim.uid.clone()])
        };
        let durable = self.commit(Vec::new(), save).await;
        durable.map_err(|error| {
            self.records.lock().set_progress(claim, driver, before);
            error.problem()
        })
    }

    fn progress(&self, driver: &DriverName) -> BTreeMap<Uid, Vec<u8>> {
        self.records.lock().progress_of(driver)
    }

    fn settle(&self, write: &Write<'_>, stands: Option<String>) {
        self.records.lock().settle(write, stands.as_deref());
    }
}
