//! Executes requests to the checkpoint: those that wait together are one commit. After each commit it reports to the status.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::CommitError;
use super::database::{Database, META_PROBED, StoreError, Write};
use super::status::Status;
use nodedock_base::batches::Serve;
use nodedock_base::error::chain;

/// Changes of one commit: bounds its latency.
pub(super) const CHECKPOINT_BATCH_MAX: usize = 256;

pub(super) struct Writer {
    /// `None`: closed. Never waited for, since batches come one after the other.
    database: Mutex<Option<Database>>,
    pub(super) status: Status,
}

pub(super) enum Work {
    /// Commits writes; without writes, tests whether the disk accepts writes.
    Commit(Vec<Write>),
    /// Only a response.
    Ask,
    Close,
}

impl Writer {
    pub(super) fn new(database: Database) -> Self {
        Self {
            database: Mutex::new(Some(database)),
            status: Status::default(),
        }
    }

    /// Commits the writes of so many requests, and adds their outcomes.
    fn commit(
        &self,
        writes: Vec<Write>,
        requests: usize,
        outcomes: &mut Vec<Result<(), CommitError>>,
    ) {
        if requests > 0 {
            let outcome = self.commit_one(&writes);
            outcomes.extend(std::iter::repeat_n(outcome, requests));
        }
    }

    fn commit_one(&self, writes: &[Write]) -> Result<(), CommitError> {
        let started = Instant::now();
        let mut database = self.database.lock();
        let Some(database) = database.as_mut() else {
            return Err(CommitError::Closed);
        };
        self.status.begin();
        let time = writes.is_empty().then_some(META_PROBED);
        let outcome = database
            .commit(writes, time)
            .map_err(|error| CommitError::Store(Arc::new(error)));
        match &outcome {
            Ok(()) => {
                let value_bytes = writes
                    .iter()
                    .filter_map(|write| Some(write.value.as_ref()?.len()))
                    .sum();
                self.status
                    .succeeded(writes.len(), value_bytes, started.elapsed());
            }
            Err(failure) => self.status.failed(failure),
        }
        outcome
    }

    fn close(&self) -> Result<(), CommitError> {
        let database = self.database.lock().take().ok_or(CommitError::Closed)?;
        warn_of(
            database.close(),
            "the checkpoint is closed with a log, which the next start reads",
        );
        Ok(())
    }
}

impl Serve for Writer {
    type Request = Work;
    type Outcome = Result<(), CommitError>;

    fn serve(&self, requests: Vec<Work>) -> Vec<Self::Outcome> {
        let (mut writes, mut commits) = (Vec::new(), 0);
        let mut outcomes = Vec::with_capacity(requests.len());
        for request in requests {
            if let Work::Commit(more) = request {
                writes.extend(more);
                commits += 1;
                continue;
            }
            self.commit(
                mem::take(&mut writes),
                mem::take(&mut commits),
                &mut outcomes,
            );
            outcomes.push(match request {
                Work::Close => self.close(),
                _ if self.database.lock().is_none() => Err(CommitError::Closed),
                _ => Ok(()),
            });
        }
        self.commit(writes, commits, &mut outcomes);
        outcomes
    }

    fn weight(request: &Work) -> usize {
        if let Work::Commit(writes) = request {
            writes.len()
        } else {
            0
        }
    }

    fn takes_long(&self) {
        self.status.takes_long();
    }

    fn wants_upkeep(&self) -> bool {
        self.database
            .lock()
            .as_ref()
            .is_some_and(Database::is_log_long)
    }

    /// Copies the log into the file.
    fn upkeep(&self) {
        let copied = self
            .database
            .lock()
            .as_ref()
            .map_or(Ok(()), Database::copy_log);
        warn_of(
            copied,
            "the log of the checkpoint is not copied into its file, and grows",
        );
    }
}

fn warn_of(outcome: Result<(), StoreError>, message: &'static str) {
    if let Err(error) = outcome {
        tracing::warn!(error = chain(&error), "{message}");
    }
}
