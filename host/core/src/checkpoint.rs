//! The checkpoint: the durable state of claims and pods.
//!
//! Owns one redb file and the one thread that writes it. Given changes, it responds when they are durable. Requests that
//! wait during a commit are committed together, with one sync. Never decides the next state of a claim,
//! and never deletes or overwrites a file that it cannot read. `docs/checkpoint-format.md` describes the format.

mod buffered;
mod carry;
mod error;
mod file;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
#[path = "checkpoint/testing/fuzz.rs"]
pub mod fuzz;
mod inspect;
mod monitor;
mod status;
mod upgrade;
mod writer;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{ClaimRecord, ClaimValues, PodAllocation, PodRecord, ReleaseRecord, Uid};

pub use error::{CommitError, OpenError, ReadError};
pub use format::{Dump, FORMAT_VERSION, Meta, Skipped, Table};
pub use inspect::{Integrity, Report, read, verify};
pub use status::{CommitMetrics, Health};

use format::Precious;
use status::Status;
use upgrade::{UPGRADES, Upgrades};
use writer::{Message, Write, Writer};

/// Duration after which a commit is reported as slow: a healthy disk syncs in milliseconds, a busy one within a second.
const CHECKPOINT_SLOW: Duration = Duration::from_secs(5);

/// Queue of the checkpoint's writer; further requests wait for a slot.
const CHECKPOINT_QUEUE: usize = 1024;

/// A change of one record. The changes of one commit are durable together or not at all.
#[derive(Debug, Clone)]
pub enum Change {
    PutClaim(Arc<ClaimRecord>),
    DeleteClaim(Uid),
    PutPod(Arc<PodRecord>),
    DeletePod(Uid),
    PutReleased(Arc<ReleaseRecord>),
    DeleteReleased(Uid),
    PutAllocation(Arc<PodAllocation>),
    DeleteAllocation(Uid),
    PutValues(Arc<ClaimValues>),
    DeleteValues(Uid),
}

/// Handle to the checkpoint. Clones write to the same file, which is closed when the last one is dropped.
#[derive(Clone)]
pub struct Checkpoint {
    inbox: mpsc::Sender<Message>,
    status: Arc<Status>,
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

/// Opens the checkpoint, or creates a new one, and starts its writer thread. Blocks: for a file that was
/// not closed properly, as long as a read of the whole file takes.
///
/// A damaged file, and another program's, is set aside, never deleted or overwritten. A file of a newer format, one
/// that another daemon has locked, and one that the system does not allow to open are errors, and the file stays unchanged.
pub fn open(path: &Path) -> Result<Opened, OpenError> {
    open_with(path, &UPGRADES)
}

/// The same. A checkpoint without a record is filled with the claims that `recover` returns, if no start has done that before: its records
/// were lost, and are not deleted ones.
pub fn open_or_recover<E: From<OpenError> + From<CommitError>>(
    path: &Path,
    recover: impl FnOnce() -> Result<Vec<ClaimRecord>, E>,
) -> Result<Opened, E> {
    let (database, mut dump, set_aside) = file::open(path, &UPGRADES)?;
    failpoint::pass(Point::CheckpointOpened);
    if !dump.meta.is_recovered {
        let claims = if dump.is_empty() { recover()? } else { Vec::new() };
        let changes = claims.iter().map(|claim| Change::PutClaim(Arc::new(claim.clone())));
        match writer::recover(&database, &encoded(changes.collect())?) {
            // A disk that takes no writes is reported by the first commit, and the next start marks the file.
            Err(error) if claims.is_empty() => {
                tracing::warn!(error = chain(&error), "the checkpoint is not marked as recovered");
            }
            done => done?,
        }
        dump.claims.extend(claims);
    }
    Ok(run(path, database, dump, set_aside)?)
}

fn open_with(path: &Path, upgrades: &Upgrades) -> Result<Opened, OpenError> {
    let (database, dump, set_aside) = file::open(path, upgrades)?;
    run(path, database, dump, set_aside)
}

fn run(
    path: &Path,
    database: redb::Database,
    dump: Dump,
    set_aside: Option<SetAside>,
) -> Result<Opened, OpenError> {
    let opener = file::reopener(path)?;
    let checkpoint = start(database, opener, dump.precious()).map_err(|source| OpenError::Io {
        path: path.to_owned(),
        doing: "start the writer thread of",
        source,
    })?;
    Ok(Opened { checkpoint, dump, set_aside })
}

fn start(
    database: redb::Database,
    opener: writer::Opener,
    precious: Precious,
) -> std::io::Result<Checkpoint> {
    let (inbox, requests) = mpsc::channel(CHECKPOINT_QUEUE);
    let status = Arc::new(Status::default());
    let writer = Writer::new(database, opener, precious, status.clone());
    std::thread::Builder::new().name("checkpoint".to_owned()).spawn(move || writer.run(requests))?;
    Ok(Checkpoint { inbox, status })
}

impl Checkpoint {
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
        let permit = self.inbox.reserve().await.map_err(|_| CommitError::Closed)?;
        let outcome = {
            let (_lock, more) = more();
            writes.extend(encoded(more)?);
            if writes.is_empty() {
                return Ok(());
            }
            let (done, outcome) = oneshot::channel();
            permit.send(Message::Commit { writes, done });
            outcome
        };
        outcome.await.unwrap_or(Err(CommitError::Closed))
    }

    pub fn health(&self) -> Health {
        self.status.health()
    }

    /// Returns a watch on whether the last commit succeeded.
    pub fn takes_writes(&self) -> watch::Receiver<bool> {
        self.status.takes_writes()
    }

    pub fn metrics(&self) -> &CommitMetrics {
        &self.status.metrics
    }

    /// Waits until the writer has processed all earlier requests. Returns false if it has ended.
    pub async fn answers(&self) -> bool {
        let (done, taken) = oneshot::channel();
        self.inbox.send(Message::Ask(done)).await.is_ok() && taken.await.is_ok()
    }

    /// Commits the waiting requests and closes the file. Later commits are refused; closing twice is harmless.
    pub async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.inbox.send(Message::Close(done)).await.is_ok() {
            // An error means that the writer has ended by another handle's close.
            closed.await.ok();
        }
    }
}

fn encoded(changes: Vec<Change>) -> Result<Vec<Write>, CommitError> {
    changes.into_iter().map(format::encode).collect()
}
