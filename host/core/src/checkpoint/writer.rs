//! The writer thread. Takes requests in order, commits waiting ones together, and responds to each. After a failed
//! commit it closes the file and opens it again for the next one: redb refuses writes after an IO error until then.
//! The next successful commit undoes what the failed one may have left in the file.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use redb::{Database, ReadableTable, Table as OpenTable, WriteTransaction};
use tokio::sync::{mpsc, oneshot};

use super::CommitError;
use super::format::{self, META, META_PROBED, META_RECOVERED, Precious, Table, UNREADABLE};
use super::status::Status;
use nodedock_base::clock;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::Uid;

/// Changes of one commit: bounds its latency.
const CHECKPOINT_BATCH_MAX: usize = 256;

/// Opens the same file again after a failure.
pub(super) type Opener = Box<dyn Fn() -> Result<Database, redb::Error> + Send>;

/// A put (with a value) or a delete of one record, in bytes.
pub(super) struct Write {
    pub(super) table: Table,
    pub(super) key: Uid,
    pub(super) value: Option<Vec<u8>>,
}

pub(super) enum Message {
    /// Commit of changes; without changes, a test.
    Commit {
        writes: Vec<Write>,
        done: oneshot::Sender<Result<(), CommitError>>,
    },
    /// Only a response.
    Ask(oneshot::Sender<()>),
    Close(oneshot::Sender<()>),
}

pub(super) struct Writer {
    /// `None`: the last commit failed.
    database: Option<Database>,
    opener: Opener,
    precious: Precious,
    /// Keys that failed commits wrote, with their values before the first failure, from which the callers continued.
    doubtful: Values,
    status: Arc<Status>,
}

/// Values by key; `None` for a missing key.
type Values = HashMap<(Table, Uid), Option<Vec<u8>>>;

/// Requests that are committed together.
#[derive(Default)]
struct Batch {
    writes: Vec<Write>,
    waiting: Vec<oneshot::Sender<Result<(), CommitError>>>,
    asking: Vec<oneshot::Sender<()>>,
    close: Option<oneshot::Sender<()>>,
}

impl Batch {
    fn add(&mut self, message: Message) {
        match message {
            Message::Commit { writes, done } => {
                self.writes.extend(writes);
                self.waiting.push(done);
            }
            Message::Ask(done) => self.asking.push(done),
            Message::Close(done) => self.close = Some(done),
        }
    }

    fn is_full(&self) -> bool {
        self.close.is_some() || self.writes.len() >= CHECKPOINT_BATCH_MAX
    }
}

impl Writer {
    pub(super) fn new(database: Database, opener: Opener, precious: Precious, status: Arc<Status>) -> Self {
        Self { database: Some(database), opener, precious, doubtful: Values::new(), status }
    }

    /// Runs until it is closed or every handle is dropped.
    pub(super) fn run(mut self, mut inbox: mpsc::Receiver<Message>) {
        while let Some(first) = inbox.blocking_recv() {
            let mut batch = Batch::default();
            batch.add(first);
            while !batch.is_full() {
                let Ok(next) = inbox.try_recv() else { break };
                batch.add(next);
            }
            if !batch.waiting.is_empty() {
                self.serve(&batch.writes, std::mem::take(&mut batch.waiting));
            }
            for done in batch.asking {
                // The caller may have been cancelled.
                done.send(()).ok();
            }
            if let Some(done) = batch.close {
                self.settle();
                self.abandon();
                // The caller may have been cancelled.
                done.send(()).ok();
                refuse_the_rest(inbox);
                return;
            }
        }
        self.settle();
        self.abandon();
    }

    /// Makes the last attempt to undo what failed commits may have left in the file.
    fn settle(&mut self) {
        if !self.doubtful.is_empty()
            && let Err(failure) = self.commit(&[])
        {
            let error = chain(&failure);
            tracing::warn!(error, "closed the checkpoint, which may contain changes that failed");
        }
    }

    fn serve(&mut self, writes: &[Write], waiting: Vec<oneshot::Sender<Result<(), CommitError>>>) {
        let started = Instant::now();
        self.status.begin();
        let outcome = self.commit(writes);
        match &outcome {
            Ok(()) => {
                let value_bytes = writes.iter().filter_map(|write| Some(write.value.as_ref()?.len())).sum();
                self.status.succeeded(writes.len(), value_bytes, started.elapsed());
            }
            Err(failure) => {
                self.status.failed(failure);
                self.abandon();
            }
        }
        for done in waiting {
            // A cancelled caller gets no response; its changes stay.
            done.send(outcome.clone()).ok();
        }
    }

    fn commit(&mut self, writes: &[Write]) -> Result<(), CommitError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => guarded("open", || (self.opener)())?,
        };
        let database = self.database.insert(database);
        let mut before = Values::new();
        // Without changes, a test whether the disk accepts writes.
        let time = writes.is_empty().then_some(META_PROBED);
        let step = || apply(database, &self.doubtful, &self.precious, writes, time, &mut before);
        let outcome = guarded("write", step);
        match outcome {
            Ok(()) => self.doubtful.clear(),
            Err(failure) => {
                for (key, value) in before {
                    self.doubtful.entry(key).or_insert(value);
                }
                return Err(failure);
            }
        }
        if !self.precious.unreadable.is_empty() {
            for write in writes {
                self.precious.unreadable.remove(&(write.table, write.key.as_str().to_owned()));
            }
        }
        Ok(())
    }

    /// Closes the file. Data that redb cannot write any more is left to the repair at the next open.
    fn abandon(&mut self) {
        let database = self.database.take();
        if catch_unwind(AssertUnwindSafe(|| drop(database))).is_err() {
            tracing::warn!("the checkpoint's storage engine failed during the close");
        }
    }
}

/// Drops late requests, so that their callers get an error. Waits for callers that have reserved a slot in the queue: a request that is
/// sent to a dropped receiver would stay there as long as any handle lives.
fn refuse_the_rest(mut inbox: mpsc::Receiver<Message>) {
    inbox.close();
    while inbox.blocking_recv().is_some() {}
}

/// Runs a step of the storage engine and converts a panic to an error. Sound: the database is dropped and opened again.
pub(super) fn guarded<T>(
    doing: &'static str,
    step: impl FnOnce() -> Result<T, redb::Error>,
) -> Result<T, CommitError> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(outcome) => outcome.map_err(|source| CommitError::Storage { doing, source: Arc::new(source) }),
        Err(panic) => Err(CommitError::Engine(panic_text(&*panic))),
    }
}

pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}

/// Writes recovered claims, and in the same transaction that this was done.
pub(super) fn recover(database: &Database, writes: &[Write]) -> Result<(), CommitError> {
    let (none, precious, mut before) = (Values::new(), Precious::default(), Values::new());
    guarded("write", || apply(database, &none, &precious, writes, Some(META_RECOVERED), &mut before))
}

/// Executes one transaction that restores the keys in doubt, does the writes, and sets a time of `meta`; opens only tables that it writes.
/// `before` receives the values before the transaction, of keys that it has written.
fn apply(
    database: &Database,
    doubtful: &Values,
    precious: &Precious,
    writes: &[Write],
    time: Option<&'static str>,
    before: &mut Values,
) -> Result<(), redb::Error> {
    // One-phase commits with checksums, redb's default: one sync. After a crash redb reads the whole file once.
    let transaction = database.begin_write()?;
    for table in Table::ALL.iter().copied() {
        let is_doubtful = doubtful.keys().any(|(of, _)| *of == table);
        if is_doubtful || writes.iter().any(|write| write.table == table) {
            let mut open = transaction.open_table(table.definition())?;
            for ((_, key), value) in doubtful.iter().filter(|((of, _), _)| *of == table) {
                set(&mut open, key, value.as_deref())?;
            }
            for write in writes.iter().filter(|write| write.table == table) {
                apply_one(&transaction, &mut open, precious, write, before)?;
            }
        }
    }
    if let Some(time) = time {
        let now = clock::rfc3339(clock::now_ms());
        transaction.open_table(META)?.insert(time, now.as_str())?;
    }
    failpoint::pass(Point::CheckpointCommit);
    transaction.commit()?;
    failpoint::pass(Point::CheckpointCommitted);
    Ok(())
}

type Records<'a> = OpenTable<'a, &'static str, &'static [u8]>;

fn apply_one(
    transaction: &WriteTransaction,
    open: &mut Records<'_>,
    precious: &Precious,
    write: &Write,
    before: &mut Values,
) -> Result<(), redb::Error> {
    let whole = whole_value(open, write, &precious.partly)?;
    let replaced = set(open, &write.key, whole.as_deref().or(write.value.as_deref()))?;
    // A value that an earlier write of this transaction has set did not exist before it.
    let Entry::Vacant(first) = before.entry((write.table, write.key.clone())) else { return Ok(()) };
    match first.insert(replaced) {
        Some(value) if has(&precious.unreadable, write) => {
            keep_unreadable(transaction, write.table, &write.key, value)
        }
        _ => Ok(()),
    }
}

fn has(keys: &HashSet<(Table, String)>, write: &Write) -> bool {
    !keys.is_empty() && keys.contains(&(write.table, write.key.as_str().to_owned()))
}

/// Returns the value of a write with the unknown fields of the one that it replaces. `None`: there are none.
fn whole_value(
    open: &Records<'_>,
    write: &Write,
    partly: &HashSet<(Table, String)>,
) -> Result<Option<Vec<u8>>, redb::Error> {
    let (Some(new), true) = (&write.value, has(partly, write)) else { return Ok(None) };
    let Some(before) = open.get(write.key.as_str())? else { return Ok(None) };
    let whole = format::carry_over(write.table, before.value(), new);
    Ok(whole
        .inspect_err(|error| {
            tracing::warn!(key = %write.key, error, "lost fields of a newer release in a record");
        })
        .ok())
}

/// Sets or removes a value, and returns the previous one.
fn set(open: &mut Records<'_>, key: &Uid, value: Option<&[u8]>) -> Result<Option<Vec<u8>>, redb::Error> {
    let before = match value {
        Some(value) => open.insert(key.as_str(), value)?,
        None => open.remove(key.as_str())?,
    };
    Ok(before.map(|value| value.value().to_vec()))
}

fn keep_unreadable(
    transaction: &WriteTransaction,
    table: Table,
    key: &Uid,
    value: &[u8],
) -> Result<(), redb::Error> {
    let mut kept = transaction.open_table(UNREADABLE)?;
    // A failed commit that was undone may have copied it.
    let (from, to) = (format!("{table}/{key}/"), format!("{table}/{key}0"));
    for entry in kept.range(from.as_str()..to.as_str())? {
        if entry?.1.value() == value {
            return Ok(());
        }
    }
    let name = format!("{from}{}", clock::now_ms());
    kept.insert(name.as_str(), value)?;
    Ok(())
}
