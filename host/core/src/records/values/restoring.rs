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
use nodedock_model::{DriverName, KeptValue, ObjectRef, Problem, ProblemCode, PutBack, Uid};

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

impl RecordedValues {
    /// Restores the values that `drivers` changed for a claim, the newest first. Values that are not reached before the deadline, and
    /// those that other drivers which stay with the claim changed since, are left.
    pub(crate) async fn restore(
        &self,
        claim: &ObjectRef,
        drivers: impl Fn(&DriverName) -> bool,
        stays: impl Fn(&DriverName) -> bool,
        request: &RestoreRequest<'_>,
    ) -> Restored {
        let (locks, kept) = self
            .lock_paths(&claim.uid, &drivers, request.deadline)
            .await;
        if kept.is_empty() {
            return Restored::default();
        }
        if !request.preview {
            self.intend_restore(&claim.uid, &drivers).await;
        }
        let mut values = Vec::with_capacity(kept.len());
        for (driver, kept) in kept {
            let obstacle = if locks.contains_key(&kept.path) {
                let is_late = Instant::now() >= request.deadline;
                self.other_owner(claim, &kept, &stays)
                    .or_else(|| is_late.then(|| out_of_time(&kept)))
            } else {
                Some(write_stuck())
            };
            let Fate {
                end,
                found,
                written,
                problem,
            } = match obstacle {
                Some(problem) => Fate::left(None, problem),
                None => self.tree.restore(&kept, request.preview).await,
            };
            let value = PutBack {
                driver,
                path: kept.path,
                before: kept.before,
                found,
                end,
                problem,
            };
            if !request.preview {
                audit(&value, written.as_deref(), claim, request.request);
            }
            values.push(value);
        }
        Restored { values, locks }
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
