//! The one thread that writes. Takes requests in order, commits what waits together, and answers each. After a failed
//! commit it closes the file and opens it again for the next one: redb refuses writes after an IO error until then.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use redb::{Database, ReadableTable, Table as OpenTable, WriteTransaction};
use tokio::sync::{mpsc, oneshot};

use super::CommitError;
use super::format::{META, META_PROBED, Skipped, Table, UNREADABLE};
use super::status::{Size, Status};
use crate::base::clock;
use crate::model::{Uid, limit};

/// Opens the same file again after a failure.
pub(super) type Opener = Box<dyn Fn() -> Result<Database, redb::Error> + Send>;

/// A put (with a value) or a delete of one record, in bytes.
pub(super) struct Write {
    pub(super) table: Table,
    pub(super) key: Uid,
    pub(super) value: Option<Vec<u8>>,
}

pub(super) enum Message {
    /// Without writes: a probe.
    Commit {
        writes: Vec<Write>,
        done: oneshot::Sender<Result<(), CommitError>>,
    },
    Close(oneshot::Sender<()>),
}

pub(super) struct Writer {
    /// None: the last commit failed.
    database: Option<Database>,
    opener: Opener,
    /// Keys whose values could not be read; a write to one keeps the old value under `unreadable`.
    unreadable: HashSet<(Table, String)>,
    status: Arc<Status>,
}

/// Requests that are committed together.
#[derive(Default)]
struct Batch {
    writes: Vec<Write>,
    waiting: Vec<oneshot::Sender<Result<(), CommitError>>>,
    close: Option<oneshot::Sender<()>>,
}

impl Batch {
    fn add(&mut self, message: Message) {
        match message {
            Message::Commit { writes, done } => {
                self.writes.extend(writes);
                self.waiting.push(done);
            }
            Message::Close(done) => self.close = Some(done),
        }
    }

    fn is_full(&self) -> bool {
        self.close.is_some() || self.writes.len() >= limit::CHECKPOINT_BATCH_MAX
    }

    fn size(&self) -> Size {
        let bytes = |write: &Write| write.value.as_ref().map_or(0, |value| value.len() as u64);
        Size {
            requests: self.waiting.len() as u64,
            changes: self.writes.len() as u64,
            value_bytes: self.writes.iter().map(bytes).sum(),
        }
    }
}

impl Writer {
    pub(super) fn new(database: Database, opener: Opener, skipped: &[Skipped], status: Arc<Status>) -> Self {
        let unreadable = skipped.iter().map(|skipped| (skipped.table, skipped.key.clone())).collect();
        Self { database: Some(database), opener, unreadable, status }
    }

    /// Runs until it is told to close or every handle is gone.
    pub(super) fn run(mut self, mut inbox: mpsc::Receiver<Message>) {
        while let Some(first) = inbox.blocking_recv() {
            let mut batch = Batch::default();
            batch.add(first);
            while !batch.is_full() {
                let Ok(next) = inbox.try_recv() else { break };
                batch.add(next);
            }
            if !batch.waiting.is_empty() {
                self.serve(&batch.writes, batch.size(), std::mem::take(&mut batch.waiting));
            }
            if let Some(done) = batch.close {
                self.abandon();
                // Nobody waits where the caller has given up.
                done.send(()).ok();
                return;
            }
        }
        self.abandon();
    }

    fn serve(
        &mut self,
        writes: &[Write],
        size: Size,
        waiting: Vec<oneshot::Sender<Result<(), CommitError>>>,
    ) {
        let started = Instant::now();
        let outcome = self.commit(writes);
        match &outcome {
            Ok(()) => self.status.succeeded(&size, started.elapsed()),
            Err(failure) => {
                self.status.failed(failure);
                self.abandon();
            }
        }
        for done in waiting {
            // A caller that has given up does not hear it; its changes stand.
            done.send(outcome.clone()).ok();
        }
    }

    fn commit(&mut self, writes: &[Write]) -> Result<(), CommitError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => guarded("open", || (self.opener)())?,
        };
        let database = self.database.insert(database);
        let unreadable = &self.unreadable;
        guarded("write", || apply(database, writes, unreadable))?;
        if !self.unreadable.is_empty() {
            for write in writes {
                self.unreadable.remove(&(write.table, write.key.as_str().to_owned()));
            }
        }
        Ok(())
    }

    /// Closes the file. What redb cannot write any more it leaves to the repair at the next opening.
    fn abandon(&mut self) {
        let database = self.database.take();
        if catch_unwind(AssertUnwindSafe(|| drop(database))).is_err() {
            tracing::warn!("the checkpoint's storage engine failed while it closed the file");
        }
    }
}

/// Runs a step of the storage engine; a panic inside becomes an error. Sound: what it leaves behind is dropped and opened anew.
pub(super) fn guarded<T>(
    doing: &'static str,
    step: impl FnOnce() -> Result<T, redb::Error>,
) -> Result<T, CommitError> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(outcome) => outcome.map_err(|source| CommitError::Storage { doing, source: Arc::new(source) }),
        Err(panic) => Err(CommitError::Engine(panic_text(&*panic))),
    }
}

/// The words of a panic.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without words".to_owned())
}

/// One transaction with all the writes; a table is opened only if it is written.
fn apply(
    database: &Database,
    writes: &[Write],
    unreadable: &HashSet<(Table, String)>,
) -> Result<(), redb::Error> {
    // One-phase commits with checksums, redb's default: one sync. After a crash the file is read through once.
    let transaction = database.begin_write()?;
    for table in [Table::Claims, Table::Pods, Table::Allocations] {
        if writes.iter().any(|write| write.table == table) {
            apply_to(&transaction, table, writes, unreadable)?;
        }
    }
    if writes.is_empty() {
        let now = clock::rfc3339(clock::now_ms());
        transaction.open_table(META)?.insert(META_PROBED, now.as_str())?;
    }
    transaction.commit()?;
    Ok(())
}

fn apply_to(
    transaction: &WriteTransaction,
    table: Table,
    writes: &[Write],
    unreadable: &HashSet<(Table, String)>,
) -> Result<(), redb::Error> {
    let mut open = transaction.open_table(table.definition())?;
    let mut kept = HashSet::new();
    for Write { key, value, .. } in writes.iter().filter(|write| write.table == table) {
        let overwrites = !unreadable.is_empty() && unreadable.contains(&(table, key.as_str().to_owned()));
        if overwrites && kept.insert(key) {
            keep_unreadable(transaction, table, &open, key)?;
        }
        match value {
            Some(value) => open.insert(key.as_str(), value.as_slice())?,
            None => open.remove(key.as_str())?,
        };
    }
    Ok(())
}

/// Copies a value that nobody could read to a place where it is not overwritten.
fn keep_unreadable(
    transaction: &WriteTransaction,
    table: Table,
    open: &OpenTable<'_, &'static str, &'static [u8]>,
    key: &Uid,
) -> Result<(), redb::Error> {
    let Some(value) = open.get(key.as_str())? else { return Ok(()) };
    let name = format!("{table}/{key}/{}", clock::now_ms());
    transaction.open_table(UNREADABLE)?.insert(name.as_str(), value.value())?;
    Ok(())
}
