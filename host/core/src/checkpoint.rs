//! The checkpoint: what is durable of claims and pods.
//!
//! Owns one redb file and the one thread that writes it. Is given changes; answers when they are durable. Requests that
//! wait while a commit is under way are committed together, with one sync. Never decides what a claim's next state is,
//! and never deletes or overwrites a file that it cannot read. The format is described in `docs/checkpoint-format.md`.

mod carry;
mod error;
mod file;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod held;
mod inspect;
mod keeper;
mod status;
mod upgrade;
mod writer;

#[cfg(test)]
mod disk;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ClaimRecord, ClaimValues, PodAllocation, PodRecord, ReleaseRecord, Uid, limit};

pub use error::{CommitError, OpenError, ReadError};
pub use format::{FORMAT_VERSION, Meta, Skipped, Table};
pub use inspect::{Dump, Integrity, Report, read, verify};
pub use status::{Distributions, Health, Stats};

use format::{Contents, Precious};
use keeper::Keeper;
use status::Status;
use upgrade::{UPGRADES, Upgrades};
use writer::{Message, Write, Writer};

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

/// Handle to the checkpoint. Clones write to the same file; it is closed when the last one is gone.
#[derive(Clone)]
pub struct Checkpoint {
    inbox: mpsc::Sender<Message>,
    status: Arc<Status>,
}

/// What was found in the file.
pub struct Opened {
    pub checkpoint: Checkpoint,
    /// By UID, ascending.
    pub claims: Vec<ClaimRecord>,
    pub pods: Vec<PodRecord>,
    pub released: Vec<ReleaseRecord>,
    pub allocations: Vec<PodAllocation>,
    /// What drivers changed below `/sys` for claims.
    pub values: Vec<ClaimValues>,
    /// A file that could not be read and was replaced by a new one.
    pub set_aside: Option<SetAside>,
    /// Records that could not be read. They stay in the file; one that is written anew goes to the table `unreadable`.
    pub skipped: Vec<Skipped>,
}

impl Opened {
    /// Whether it has no record of anything: it is new, or every claim was given up.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
            && self.pods.is_empty()
            && self.allocations.is_empty()
            && self.skipped.is_empty()
    }

    /// UIDs of claims whose records could not be read.
    pub fn unreadable_claims(&self) -> BTreeSet<String> {
        let claims = self.skipped.iter().filter(|skipped| skipped.table == Table::Claims);
        claims.map(|skipped| skipped.key.clone()).collect()
    }
}

/// A file that was moved out of the way, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Where it is now.
    pub path: PathBuf,
    pub reason: String,
}

/// Opens the checkpoint, or makes a new one where there is none, and starts its writer thread. Blocks: for a file that was
/// not closed properly, as long as it takes to read it once.
///
/// A file that is damaged or somebody else's is set aside, never deleted or overwritten. A file of a newer format, one
/// that another daemon holds, and one that the system does not let us open are errors, and the file is left alone.
pub fn open(path: &Path) -> Result<Opened, OpenError> {
    open_with(path, &UPGRADES)
}

fn open_with(path: &Path, upgrades: &Upgrades) -> Result<Opened, OpenError> {
    let found = file::open(path, upgrades)?;
    let opener = file::reopener(path)?;
    let checkpoint = start(found.database, opener, found.contents.precious()).map_err(|source| {
        OpenError::Io { path: path.to_owned(), doing: "start the writer thread of", source }
    })?;
    let set_aside = found.set_aside;
    let Contents { claims, pods, released, allocations, values, skipped, .. } = found.contents;
    Ok(Opened { checkpoint, claims, pods, released, allocations, values, set_aside, skipped })
}

fn start(
    database: redb::Database,
    opener: writer::Opener,
    precious: Precious,
) -> std::io::Result<Checkpoint> {
    let (inbox, requests) = mpsc::channel(limit::CHECKPOINT_QUEUE);
    let status = Arc::new(Status::default());
    let writer = Writer::new(database, opener, precious, status.clone());
    std::thread::Builder::new().name("checkpoint".to_owned()).spawn(move || writer.run(requests))?;
    Ok(Checkpoint { inbox, status })
}

impl Checkpoint {
    /// Makes the changes durable, all of them or none. Dropping the future does not take them back.
    ///
    /// After an error the changes are not known to be durable: what a restart finds is the state before them or the one
    /// after. The same changes may be committed again.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), CommitError> {
        if changes.is_empty() {
            return Ok(());
        }
        self.request(encoded(changes)?).await
    }

    /// The same, with more changes that are taken from a state when they have their place in the order of commits. What `more`
    /// gives beside them, the lock of that state, is dropped behind that: states that follow one another are written so.
    pub async fn commit_in_order<L>(
        &self,
        changes: Vec<Change>,
        more: impl FnOnce() -> (L, Vec<Change>),
    ) -> Result<(), CommitError> {
        let mut writes = encoded(changes)?;
        let place = self.inbox.reserve().await.map_err(|_| CommitError::Closed)?;
        let outcome = {
            let (_lock, more) = more();
            writes.extend(encoded(more)?);
            if writes.is_empty() {
                return Ok(());
            }
            let (done, outcome) = oneshot::channel();
            place.send(Message::Commit { writes, done });
            outcome
        };
        outcome.await.unwrap_or(Err(CommitError::Closed))
    }

    /// Commits nothing but a time, durably: tells whether the disk takes writes again, and ends the degraded state if it does.
    pub async fn probe(&self) -> Result<(), CommitError> {
        self.request(Vec::new()).await
    }

    /// Whether the last commit succeeded.
    pub fn health(&self) -> Health {
        self.status.health()
    }

    /// Whether the last commit succeeded, and every change of that.
    pub fn takes_writes(&self) -> watch::Receiver<bool> {
        self.status.takes_writes()
    }

    /// Says under `subject` what is wrong with the writer, and tries again while commits fail, until the tasks stop.
    pub async fn keep(self, subject: String, conditions: Conditions, tasks: Tasks) {
        Keeper { status: self.status, inbox: self.inbox, conditions, subject }.run(tasks).await;
    }

    pub fn stats(&self) -> Stats {
        self.status.stats()
    }

    /// How large the commits were and how long they took.
    pub fn distributions(&self) -> Distributions {
        self.status.distributions()
    }

    /// Returns when the writer has done what was asked of it before. False: it has ended.
    pub async fn answers(&self) -> bool {
        let (done, taken) = oneshot::channel();
        self.inbox.send(Message::Ask(done)).await.is_ok() && taken.await.is_ok()
    }

    /// Commits what waits and closes the file. Later commits are refused; closing twice is harmless.
    pub async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.inbox.send(Message::Close(done)).await.is_ok() {
            // An error means that the writer has ended by another handle's close.
            closed.await.ok();
        }
    }

    async fn request(&self, writes: Vec<Write>) -> Result<(), CommitError> {
        let (done, outcome) = oneshot::channel();
        self.inbox.send(Message::Commit { writes, done }).await.map_err(|_| CommitError::Closed)?;
        outcome.await.unwrap_or(Err(CommitError::Closed))
    }
}

fn encoded(changes: Vec<Change>) -> Result<Vec<Write>, CommitError> {
    changes.into_iter().map(format::encode).collect()
}
