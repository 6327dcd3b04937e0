//! Restores values: with the locks of all their paths, within a deadline, and with a line in the audit log for each.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::{Instant, timeout_at};

use super::RecordedValues;
use crate::driver::Call;
use crate::driver::values::Audited;
use crate::sysfs::Fate;
use crate::sysfs::blocking::write_stuck;
use nodedock_base::error::chain;
use nodedock_base::locks::LockGuard;
use nodedock_model::limit::SYSFS_WRITE_WALL;
use nodedock_model::{
    DriverName, KeptValue, ObjectRef, Problem, ProblemCode, PutBack, PutBackEnd, Uid,
};

/// The outcome for values, with the locks of their paths. Keep the locks until the end of the claim is durable: another claim that ends
/// meanwhile would hand its value down to one that has been restored already.
#[derive(Default)]
pub(crate) struct Restored {
    pub(crate) values: Vec<PutBack>,
    pub(crate) locks: PathLocks,
}

/// Locks of values, by path.
pub(crate) type PathLocks = BTreeMap<String, Vec<LockGuard<String>>>;

/// Settings with which the values of all claims of a request are restored.
pub(crate) struct RestoreRequest<'a> {
    request: &'a str,
    deadline: Instant,
    /// Only finds out what would be restored.
    preview: bool,
}

impl<'a> RestoreRequest<'a> {
    /// Within the time that a call of a driver may take.
    pub(crate) fn of(call: &'a Call) -> Self {
        Self {
            request: &call.request_id,
            deadline: Instant::now() + call.deadline,
            preview: false,
        }
    }

    pub(crate) fn preview(call: &'a Call) -> Self {
        Self {
            preview: true,
            ..Self::of(call)
        }
    }
}

/// The one who has to restore the values of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restorer {
    /// The driver: it has unprepared what it had prepared. The host restores what it left.
    Driver,
    /// The host: no prepare of the driver succeeded, or it did not unprepare the claim.
    Host,
}

/// Drivers of a claim whose values are restored.
pub(crate) struct RestoredDrivers<R, S> {
    /// Returns who has to restore the values of a driver; `None`: its values are left.
    pub(crate) restorer: R,
    /// Returns whether a driver keeps the claim.
    pub(crate) stays: S,
}

impl RecordedValues {
    /// Restores the values that drivers changed for a claim, the newest first. Values that are not reached before the deadline, and
    /// those that other drivers which stay with the claim changed since, are left. Of a driver that had to restore its values itself, only those are
    /// returned that it left.
    pub(crate) async fn restore<R, S>(
        &self,
        claim: &ObjectRef,
        drivers: &RestoredDrivers<R, S>,
        request: &RestoreRequest<'_>,
    ) -> Restored
    where
        R: Fn(&DriverName) -> Option<Restorer>,
        S: Fn(&DriverName) -> bool,
    {
        let is_wanted = |driver: &DriverName| (drivers.restorer)(driver).is_some();
        let (locks, kept) = self
            .lock_paths(&claim.uid, is_wanted, request.deadline)
            .await;
        let mut fates = Vec::with_capacity(kept.len());
        for (_, kept) in &kept {
            let obstacle = match locks.contains_key(&kept.path) {
                true => self.other_owner(claim, kept, &drivers.stays),
                false => Some(write_stuck()),
            };
            fates.push(match obstacle {
                Some(problem) => Fate::left(None, problem),
                None => self.fate(kept, true, request.deadline).await,
            });
        }
        if !request.preview && fates.iter().any(|fate| fate.end == PutBackEnd::Possible) {
            self.intend_restore(&claim.uid, is_wanted).await;
            // One value may be as before, or changed, only until another one is restored.
            for ((_, kept), fate) in kept.iter().zip(&mut fates) {
                if !is_settled(fate) {
                    *fate = self.fate(kept, false, request.deadline).await;
                }
            }
        }
        let mut values = Vec::with_capacity(kept.len());
        for ((driver, kept), fate) in kept.into_iter().zip(fates) {
            let written = fate.written.clone();
            let value = match (drivers.restorer)(&driver) {
                Some(Restorer::Driver) => left_behind(driver, kept, fate),
                _ => Some(put_back(driver, kept, fate)),
            };
            let Some(value) = value else { continue };
            if !request.preview {
                if (drivers.restorer)(&value.driver) == Some(Restorer::Driver) {
                    self.left.count(&value);
                }
                audit(&value, written.as_deref(), claim, request.request);
            }
            values.push(value);
        }
        Restored { values, locks }
    }

    /// Restores a value, or (`dry`) finds out whether that is possible.
    async fn fate(&self, kept: &KeptValue, dry: bool, deadline: Instant) -> Fate {
        if Instant::now() >= deadline {
            return Fate::left(None, out_of_time(kept));
        }
        self.tree.restore(kept, dry).await
    }

    /// Locks all paths in ascending order, which keeps two claims from waiting for each other, and returns the values as they are
    /// then. A path that stays locked, such as by a write that hangs in the kernel, is skipped after some time.
    async fn lock_paths(
        &self,
        uid: &Uid,
        drivers: impl Fn(&DriverName) -> bool,
        until: Instant,
    ) -> (PathLocks, Vec<(DriverName, KeptValue)>) {
        let values = || self.records.lock().newest_first(uid, &drivers);
        let paths: BTreeSet<_> = values().into_iter().map(|(_, kept)| kept.path).collect();
        let until = until.min(Instant::now() + SYSFS_WRITE_WALL);
        let mut locks = PathLocks::new();
        for path in paths {
            // A free path is locked even after the deadline.
            if let Ok(lock) = timeout_at(until, self.path_locks.take([path.clone()])).await {
                locks.insert(path, lock);
            }
        }
        (locks, values())
    }

    /// Makes it durable that values are about to be restored: after a crash they may be restored or not.
    async fn intend_restore(&self, uid: &Uid, drivers: impl Fn(&DriverName) -> bool) {
        // The values are restored all the same: to lose one, a crash would have to follow at this moment.
        if let Err(error) = self
            .commit(Vec::new(), |records| {
                let changed = records.intend_restore(uid, drivers);
                changed.then(|| uid.clone()).into_iter().collect()
            })
            .await
        {
            tracing::warn!(claim_uid = %uid, error = chain(&error), "the intent to restore values is not in the checkpoint");
        }
    }

    fn other_owner(
        &self,
        claim: &ObjectRef,
        kept: &KeptValue,
        stays: &dyn Fn(&DriverName) -> bool,
    ) -> Option<Problem> {
        let (path, records) = (&kept.path, self.records.lock());
        let (other, driver) = records.successor(&claim.uid, kept, stays)?;
        if other.uid == claim.uid {
            let message =
                format!("/sys/{path} was also written by driver {driver}, which keeps the claim");
            return Some(
                Problem::conflict(ProblemCode::ValueOfAnotherDriver, message)
                    .with("driver", driver),
            );
        }
        let message = format!("/sys/{path} was also written for claim {other}, which still exists");
        Some(Problem::conflict(ProblemCode::ValueOfAnotherClaim, message).with("claim", other))
    }
}

/// Returns whether another look changes nothing: the value is another's, or the kernel did not answer in time.
fn is_settled(fate: &Fate) -> bool {
    const SETTLED: [ProblemCode; 4] = [
        ProblemCode::PutBackOutOfTime,
        ProblemCode::SysfsStuck,
        ProblemCode::ValueOfAnotherClaim,
        ProblemCode::ValueOfAnotherDriver,
    ];
    has_code(fate, &SETTLED)
}

fn has_code(fate: &Fate, codes: &[ProblemCode]) -> bool {
    fate.problem
        .as_ref()
        .is_some_and(|problem| codes.iter().any(|code| problem.code == *code))
}

fn put_back(driver: DriverName, kept: KeptValue, fate: Fate) -> PutBack {
    PutBack {
        driver,
        path: kept.path,
        before: kept.before,
        found: fate.found,
        end: fate.end,
        problem: fate.problem,
    }
}

/// Returns a value that its driver had to restore and left. `None`: it restored the value, or there is nothing to restore.
fn left_behind(driver: DriverName, kept: KeptValue, fate: Fate) -> Option<PutBack> {
    /// Values that need not be restored: another claim or driver needs them, the attribute cannot be read, or its device is gone.
    const NOT_OWED: [ProblemCode; 5] = [
        ProblemCode::PathGone,
        ProblemCode::PathReplaced,
        ProblemCode::ValueOfAnotherClaim,
        ProblemCode::ValueOfAnotherDriver,
        ProblemCode::ValueUnknown,
    ];
    if fate.end == PutBackEnd::AsBefore || has_code(&fate, &NOT_OWED) {
        return None;
    }
    let mut value = put_back(driver, kept, fate);
    if value.end == PutBackEnd::PutBack {
        let (path, left) = (&value.path, value.found.as_deref().unwrap_or_default());
        let before = value.before.as_deref().unwrap_or_default();
        let mut message = format!(
            "driver {} unprepared the claim and left {left:?} in /sys/{path}; the host restored {before:?}",
            value.driver
        );
        if let Some(remark) = &value.problem {
            message.push_str("; ");
            message.push_str(&remark.message);
        }
        value.problem = Some(Problem::internal(ProblemCode::ValueLeft, message));
    }
    Some(value)
}

fn out_of_time(kept: &KeptValue) -> Problem {
    let message = format!(
        "/sys/{} was not reached in time: other values took too long",
        kept.path
    );
    Problem::unavailable(ProblemCode::PutBackOutOfTime, message)
}

/// Writes the audit line of a value. For a value that is not restored, the line has the value that the restore would have written, as the
/// line of a refused write has the refused value.
fn audit(value: &PutBack, written: Option<&str>, claim: &ObjectRef, request: &str) {
    let line = Audited {
        driver: value.driver.as_str(),
        claims: std::slice::from_ref(claim),
        request,
        path: &value.path,
        before: value.found.as_deref(),
        after: written.or(value.before.as_deref()),
        outcome: value.end.as_str(),
        problem: value.problem.as_ref(),
    };
    line.tell(0);
}
