//! Putting values back: in the turns of all their paths, within a deadline, and told to the auditor.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::{Instant, timeout_at};

use super::book::Book;
use super::{Values, change_of};
use crate::driver::Call;
use crate::driver::values::Audited;
use crate::sysfs::Fate;
use crate::sysfs::blocking::write_stuck;
use nodedock_base::error::chain;
use nodedock_base::locks::Held;
use nodedock_model::limit::SYSFS_WRITE_WALL;
use nodedock_model::{DriverName, KeptValue, ObjectRef, Problem, PutBack, Uid};

/// What to do with values that are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::claims) enum Doing {
    Look,
    PutBack,
}

/// What became of values. Whoever keeps the turns of their paths until the end of the claim is durable keeps others from deciding
/// about them in between: a claim that ends then would hand down to one that has put back already.
#[derive(Default)]
pub(in crate::claims) struct PutBacks {
    pub(in crate::claims) ends: Vec<PutBack>,
    pub(in crate::claims) turns: Turns,
}

/// By path.
pub(in crate::claims) type Turns = BTreeMap<String, Vec<Held<String>>>;

/// For which call values are put back, and until when: one deadline for all claims of a call.
pub(in crate::claims) struct Errand<'a> {
    request: &'a str,
    until: Instant,
}

impl<'a> Errand<'a> {
    /// One that may take as long as a call of a driver.
    pub(in crate::claims) fn of(call: &'a Call) -> Self {
        Self { request: &call.request_id, until: Instant::now() + call.deadline }
    }
}

impl Values {
    /// Puts back what drivers changed for a claim, the newest first, or says what would become of it; what it has not come to at the
    /// deadline is left. What other drivers have changed since that stay with the claim is theirs.
    pub(in crate::claims) async fn put_back(
        &self,
        claim: &ObjectRef,
        drivers: impl Fn(&DriverName) -> bool,
        stays: impl Fn(&DriverName) -> bool,
        doing: Doing,
        errand: &Errand<'_>,
    ) -> PutBacks {
        let (turns, values) = self.take_turns(&claim.uid, &drivers, errand.until).await;
        if values.is_empty() {
            return PutBacks::default();
        }
        if doing == Doing::PutBack {
            self.intend_put_back(&claim.uid, &drivers).await;
        }
        let mut ends = Vec::with_capacity(values.len());
        for (driver, kept) in values {
            let hindrance = if turns.contains_key(&kept.path) {
                self.hindrance(claim, &kept, &stays, errand.until)
            } else {
                Some(write_stuck())
            };
            let fate = match hindrance {
                Some(problem) => Fate::left(None, problem),
                None => self.0.tree.put_back(&kept, doing == Doing::Look).await,
            };
            let end = put_back(driver, kept, fate);
            if doing == Doing::PutBack {
                audit(&end, claim, errand.request);
            }
            ends.push(end);
        }
        PutBacks { ends, turns }
    }

    /// The turns of all paths, in ascending order, which is what keeps two claims from waiting for each other, and the values as they
    /// are then. A path that somebody keeps, such as a write that hangs in the kernel, is given up after a while.
    async fn take_turns(
        &self,
        uid: &Uid,
        drivers: impl Fn(&DriverName) -> bool,
        until: Instant,
    ) -> (Turns, Vec<(DriverName, KeptValue)>) {
        let values = || self.book().newest_first(uid, &drivers);
        let paths: BTreeSet<_> = values().into_iter().map(|(_, kept)| kept.path).collect();
        let until = until.min(Instant::now() + SYSFS_WRITE_WALL);
        let mut turns = Turns::new();
        for path in paths {
            // One that is free is had whatever the time.
            if let Ok(turn) = timeout_at(until, self.0.turns.take([path.clone()])).await {
                turns.insert(path, turn);
            }
        }
        (turns, values())
    }

    /// Makes it durable that values are about to be put back: after a crash they may stand as before or as they were left.
    async fn intend_put_back(&self, uid: &Uid, drivers: impl Fn(&DriverName) -> bool) {
        let intend = |book: &mut Book| {
            let changed = book.intend_put_back(uid, drivers);
            changed.then(|| change_of(book, uid.clone())).into_iter().collect()
        };
        // It is put back all the same: a crash as well, and at this moment, would be needed to lose a value.
        if let Err(error) = self.commit(Vec::new(), intend).await {
            tracing::warn!(claim_uid = %uid, error = chain(&error), "that values are put back is not in the checkpoint");
        }
    }

    fn hindrance(
        &self,
        claim: &ObjectRef,
        kept: &KeptValue,
        stays: &dyn Fn(&DriverName) -> bool,
        until: Instant,
    ) -> Option<Problem> {
        let is_over = Instant::now() >= until;
        self.others_value(claim, kept, stays).or_else(|| is_over.then(|| out_of_time(kept)))
    }

    fn others_value(
        &self,
        claim: &ObjectRef,
        kept: &KeptValue,
        stays: &dyn Fn(&DriverName) -> bool,
    ) -> Option<Problem> {
        let (path, book) = (&kept.path, self.book());
        let (other, driver) = book.successor(&claim.uid, kept, stays)?;
        if other.uid == claim.uid {
            let message =
                format!("/sys/{path} was written by driver {driver} as well, which has the claim still");
            return Some(Problem::conflict("value-of-another-driver", message).with("driver", driver));
        }
        let message = format!("/sys/{path} was written for claim {other} as well, which still stands");
        Some(Problem::conflict("value-of-another-claim", message).with("claim", other))
    }
}

fn out_of_time(kept: &KeptValue) -> Problem {
    let message = format!("/sys/{} was not come to in time: other values took too long", kept.path);
    Problem::unavailable("put-back-out-of-time", message)
}

fn put_back(driver: DriverName, kept: KeptValue, fate: Fate) -> PutBack {
    let Fate { end, found, problem } = fate;
    PutBack { driver, path: kept.path, before: kept.before, found, end, problem }
}

fn audit(end: &PutBack, claim: &ObjectRef, request: &str) {
    let line = Audited {
        driver: end.driver.as_str(),
        claims: std::slice::from_ref(claim),
        request,
        path: &end.path,
        before: end.found.as_deref(),
        after: end.before.as_deref(),
        outcome: end.end.as_str(),
        problem: end.problem.as_ref(),
    };
    line.tell(0);
}
