//! The checkpoint: the durable state of claims and pods, the sources that drivers' names belong to, and how devices are offered.
//!
//! Owns one SQLite file with its log. Given changes, it responds when they are durable. Requests that
//! wait during a commit are committed together, with one sync. Never decides the next state of a claim,
//! and never deletes or overwrites a file that it cannot read. `docs/checkpoint-format.md` describes the format.

mod carry;
mod database;
mod error;
mod file;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
#[path = "checkpoint/testing/fuzz.rs"]
pub mod fuzz;
mod inspect;
mod monitor;
mod outage;
mod record;
mod status;
mod stored;
mod upgrade;
mod writer;

#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use nodedock_base::batches::Batches;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    AdapterRecord, ApiObject, ClaimRecord, ClaimValues, DriverOffer, EndedRecord, MechanismsRecord,
    NameRecord, NodeRecord, PodRecord, ReleaseRecord, ResourceOffer, Uid,
};

pub use database::StoreError;
pub use error::{CommitError, OpenError, ReadError};
pub use format::{Dump, FORMAT_VERSION, Meta, Skipped};
pub use inspect::{Integrity, Report, read, verify};
pub use record::Table;
pub use status::{CommitMetrics, Health};
pub use stored::{StoredRecord, StoredRecords};

use database::{Database, Write};
use format::META_RECOVERED;
use upgrade::{UPGRADES, Upgrades};
use writer::{CHECKPOINT_BATCH_MAX, Work, Writer};

/// Duration after which a commit is reported as slow: a healthy disk syncs in milliseconds, a busy one within a second.
const CHECKPOINT_SLOW: Duration = Duration::from_secs(5);

/// A change of one record. The changes of one commit are durable together or not at all.
#[derive(Debug, Clone)]
pub enum Change {
    PutClaim(Arc<ClaimRecord>),
    DeleteClaim(Uid),
    PutPod(Arc<PodRecord>),
    DeletePod(Uid),
    PutReleased(Arc<ReleaseRecord>),
    DeleteReleased(Uid),
    PutEnded(Arc<EndedRecord>),
    DeleteEnded(Uid),
    PutValues(Arc<ClaimValues>),
    DeleteValues(Uid),
    PutObject(Arc<ApiObject>),
    DeleteObject(Uid),
    PutName(Arc<NameRecord>),
    DeleteName(Uid),
    PutNode(Arc<NodeRecord>),
    PutAdapter(Arc<AdapterRecord>),
    DeleteAdapter(Uid),
    PutMechanisms(Arc<MechanismsRecord>),
    PutDriverOffer(Arc<DriverOffer>),
    DeleteDriverOffer(Uid),
    PutResourceOffer(Arc<ResourceOffer>),
    DeleteResourceOffer(Uid),
}

/// Handle to the checkpoint. Clones write to the same file, which is closed when the last one is dropped.
#[derive(Clone)]
pub struct Checkpoint {
    writer: Batches<Writer>,
}

/// An open checkpoint, and its content.
pub struct Opened {
    pub checkpoint: Checkpoint,
    /// Unreadable records in it stay in the file; when their key is written again, they move to the table `unreadable`.
    pub dump: Dump,
    /// An unreadable file that was set aside and replaced by a new one.
    pub set_aside: Option<SetAside>,
}

/// A file that was renamed, unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Its new path.
    pub path: PathBuf,
    pub reason: String,
}

/// Opens the checkpoint, or creates a new one. Blocks as long as a read of the whole file takes.
///
/// A damaged file, and another program's, is set aside, never deleted or overwritten. A file of a newer format, one
/// that another daemon has locked, and one that the system does not allow to open are errors, and the file stays unchanged.
pub fn open(path: &Path) -> Result<Opened, OpenError> {
    open_with(path, &UPGRADES)
}

/// The same. A checkpoint without a record is filled with the claims that `recover` returns, if no start has done that before: its records
/// were lost, and are not deleted ones. `settle` decides on the node's name, and returns what it changed in the content; its error changes
/// nothing in the file.
pub fn open_or_recover<E: From<OpenError> + From<CommitError>>(
    path: &Path,
    recover: impl FnOnce() -> Result<Vec<ClaimRecord>, E>,
    settle: impl FnOnce(&mut Dump) -> Result<Vec<Change>, E>,
) -> Result<Opened, E> {
    let (mut database, mut dump, set_aside) = file::open(path, &UPGRADES)?;
    failpoint::pass(Point::CheckpointOpened);
    let (mut changes, mark) = (
        Vec::new(),
        (!dump.meta.is_recovered).then_some(META_RECOVERED),
    );
    if mark.is_some() && dump.is_empty() {
        let claims = recover()?;
        changes.extend(
            claims
                .iter()
                .map(|claim| Change::PutClaim(Arc::new(claim.clone()))),
        );
        dump.claims.extend(claims);
    }
    changes.extend(settle(&mut dump)?);
    if mark.is_some() || !changes.is_empty() {
        // What the next start finds again.
        let is_again = changes
            .iter()
            .all(|change| matches!(change, Change::PutNode(_)));
        match database.commit(&encoded(changes)?, mark) {
            // A disk that takes no writes is reported by the first commit.
            Err(error) if is_again => {
                tracing::warn!(
                    error = chain(&error),
                    "the checkpoint has no mark and name of this start"
                );
            }
            done => done.map_err(|error| CommitError::Store(Arc::new(error)))?,
        }
    }
    Ok(Opened {
        checkpoint: Checkpoint::new(database),
        dump,
        set_aside,
    })
}

fn open_with(path: &Path, upgrades: &Upgrades) -> Result<Opened, OpenError> {
    let (database, dump, set_aside) = file::open(path, upgrades)?;
    Ok(Opened {
        checkpoint: Checkpoint::new(database),
        dump,
        set_aside,
    })
}

impl Checkpoint {
    fn new(database: Database) -> Self {
        Self {
            writer: Batches::new(Writer::new(database), CHECKPOINT_BATCH_MAX),
        }
    }

    /// Makes the changes durable, all of them or none. Dropping the future does not undo them.
    ///
    /// After an error a restart finds the state before the changes or the one after them. The same changes may be committed again.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), CommitError> {
        self.commit_in_order(changes, || ((), Vec::new())).await
    }

    /// The same, with additional changes that are read from a state when their place in the order of commits is fixed. `more` also returns
    /// the lock guard of that state, which is dropped after that, so that successive states are written in order.
    pub async fn commit_in_order<L>(
        &self,
        changes: Vec<Change>,
        more: impl FnOnce() -> (L, Vec<Change>),
    ) -> Result<(), CommitError> {
        let mut writes = encoded(changes)?;
        let mut not_entered = None;
        let request = self.writer.request_in_order(|| {
            let (lock, more) = more();
            match encoded(more) {
                Ok(more) => writes.extend(more),
                Err(error) => not_entered = Some(Err(error)),
            }
            if writes.is_empty() {
                not_entered = not_entered.take().or(Some(Ok(())));
            }
            not_entered
                .is_none()
                .then_some((lock, Work::Commit(writes)))
        });
        let outcome = request.await;
        outcome.or(not_entered).unwrap_or(Err(CommitError::Closed))
    }

    pub fn health(&self) -> Health {
        self.writer.server().status.health()
    }

    /// Returns a watch on whether the last commit succeeded.
    pub fn takes_writes(&self) -> watch::Receiver<bool> {
        self.writer.server().status.takes_writes()
    }

    pub fn metrics(&self) -> &CommitMetrics {
        &self.writer.server().status.metrics
    }

    /// Waits until all earlier requests are processed. Returns false if the checkpoint is closed.
    pub async fn answers(&self) -> bool {
        self.enter(Work::Ask).await.is_ok()
    }

    /// Commits the waiting requests and closes the file. Later commits are refused; closing twice is harmless.
    pub async fn close(&self) {
        // no error: another handle has closed it.
        self.enter(Work::Close).await.ok();
    }

    async fn enter(&self, work: Work) -> Result<(), CommitError> {
        self.writer
            .enter(work)
            .outcome()
            .await
            .unwrap_or(Err(CommitError::Closed))
    }
}

fn encoded(changes: Vec<Change>) -> Result<Vec<Write>, CommitError> {
    changes.into_iter().map(format::encode).collect()
}
