//! Values below `/sys` that drivers change for claims: kept from before the first write to the end of the claim, and put back by the
//! host where the driver does not.
//!
//! Is given every write before it is made, and what became of claims; writes the checkpoint's values in the order of their changes;
//! puts values back (`putting_back`). Which values those are is decided in `book`.

mod book;
mod putting_back;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use self::book::{Book, Ended};
pub(super) use self::putting_back::{Doing, Errand, PutBacks};
use crate::checkpoint::{Change, Checkpoint, CommitError};
use crate::driver::values::{Journal, Write};
use crate::sysfs::SysfsTree;
use nodedock_base::locks::{Held, Locks};
use nodedock_model::{Caller, ClaimValues, DriverName, Problem, Uid};

/// Handle to the values of all claims. Clones are the same.
#[derive(Clone)]
pub struct Values(Arc<Inner>);

struct Inner {
    book: Mutex<Book>,
    checkpoint: Checkpoint,
    tree: SysfsTree,
    turns: Locks<String>,
}

impl Values {
    /// `records`: what the checkpoint has. Those of another boot than this mean nothing.
    pub fn new(records: Vec<ClaimValues>, boot_id: &str, checkpoint: Checkpoint, tree: SysfsTree) -> Self {
        let book = Mutex::new(Book::new(records, boot_id));
        Self(Arc::new(Inner { book, checkpoint, tree, turns: Locks::default() }))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What drivers changed for a claim.
    pub(super) fn of(&self, uid: &Uid) -> Option<ClaimValues> {
        self.book().get(uid).cloned()
    }

    /// Claims whose release was begun by an older release of this program, and by whom; told once.
    pub(super) fn take_releasing(&self) -> Vec<(Uid, Caller)> {
        self.book().take_releasing()
    }

    /// Removes what means nothing any more: of another boot, or of claims that are not known.
    pub(super) async fn tidy(&self, is_known: impl Fn(&Uid) -> bool) -> Result<(), CommitError> {
        let change = |book: &mut Book| {
            let lost: Vec<_> = book.claims().map(|record| record.id.uid.clone()).collect();
            let lost: Vec<_> = lost.into_iter().filter(|uid| !is_known(uid)).collect();
            let heirs: Vec<_> = lost.iter().flat_map(|uid| book.end(uid, None).heirs).collect();
            let changed: BTreeSet<_> = book.take_outlived().into_iter().chain(lost).chain(heirs).collect();
            // A claim may have been prepared anew since.
            changed.into_iter().map(|uid| change_of(book, uid)).collect()
        };
        self.commit(Vec::new(), change).await
    }

    /// Commits changes of records, together with what becomes of the values of their claims: those of claims that are written are
    /// made durable as they are now, those of claims that are deleted end.
    pub(super) async fn commit_changes(&self, changes: Vec<Change>) -> Result<(), CommitError> {
        let (mut written, mut deleted) = (Vec::new(), Vec::new());
        for change in &changes {
            match change {
                Change::PutClaim(record) => written.push(record.id.uid.clone()),
                Change::DeleteClaim(uid) => deleted.push((uid.clone(), None)),
                _ => {}
            }
        }
        self.commit_ends(changes, written, deleted).await
    }

    /// Ends what some drivers have of a claim.
    pub(super) async fn end_of_drivers(
        &self,
        uid: &Uid,
        drivers: Vec<DriverName>,
    ) -> Result<(), CommitError> {
        if self.book().get(uid).is_none() {
            return Ok(());
        }
        let ends = drivers.into_iter().map(|driver| (uid.clone(), Some(driver))).collect();
        self.commit_ends(Vec::new(), Vec::new(), ends).await
    }

    async fn commit_ends(
        &self,
        changes: Vec<Change>,
        written: Vec<Uid>,
        ends: Vec<(Uid, Option<DriverName>)>,
    ) -> Result<(), CommitError> {
        let mut before_all = Vec::new();
        let end = |book: &mut Book| {
            let mut changed: BTreeSet<Uid> =
                written.into_iter().filter(|uid| book.get(uid).is_some()).collect();
            for (uid, driver) in ends {
                let Ended { before, heirs } = book.end(&uid, driver.as_ref());
                changed.extend(before.is_some().then_some(uid));
                changed.extend(heirs);
                before_all.extend(before);
            }
            changed.into_iter().map(|uid| change_of(book, uid)).collect()
        };
        let outcome = self.commit(changes, end).await;
        if outcome.is_err() {
            let mut book = self.book();
            before_all.into_iter().rev().for_each(|before| book.restore(before));
        }
        outcome
    }

    /// What `more` gives is in the order in which it changes the book.
    async fn commit(
        &self,
        changes: Vec<Change>,
        more: impl FnOnce(&mut Book) -> Vec<Change>,
    ) -> Result<(), CommitError> {
        let more = || {
            let mut book = self.book();
            let more = more(&mut book);
            (book, more)
        };
        self.0.checkpoint.commit_in_order(changes, more).await
    }
}

/// A claim's values as they are to be in the checkpoint.
fn change_of(book: &Book, uid: Uid) -> Change {
    match book.get(&uid) {
        Some(record) => Change::PutValues(Arc::new(record.clone())),
        None => Change::DeleteValues(uid),
    }
}

#[async_trait]
impl Journal for Values {
    async fn turn(&self, path: &str) -> Vec<Held<String>> {
        self.0.turns.take([path.to_owned()]).await
    }

    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem> {
        let mut refused = None;
        let intend = |book: &mut Book| match book.intend(write) {
            Ok(()) => write.claims.iter().map(|claim| change_of(book, claim.uid.clone())).collect(),
            Err(problem) => {
                refused = Some(problem);
                Vec::new()
            }
        };
        let durable = self.commit(Vec::new(), intend).await;
        if let Some(problem) = refused {
            return Err(problem);
        }
        durable.map_err(|error| {
            self.book().settle(write, None);
            error.problem()
        })
    }

    fn settle(&self, write: &Write<'_>, stands: Option<String>) {
        self.book().settle(write, stands.as_deref());
    }
}
