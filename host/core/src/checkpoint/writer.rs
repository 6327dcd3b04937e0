//! The order of commits. A request commits on its own thread if no other commits just then; requests that come meanwhile wait, and the first of
//! them commits all of them together. So a commit changes threads only if it waits, and one sync serves many requests.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;

use super::CommitError;
use super::database::{Database, StoreError, Write};
use super::format::META_PROBED;
use super::status::Status;
use nodedock_base::error::chain;

/// Changes of one commit: bounds its latency.
const CHECKPOINT_BATCH_MAX: usize = 256;

pub(super) struct Writer {
    queue: Mutex<Queue>,
    /// `None`: closed. Only the leader locks it.
    database: Mutex<Option<Database>>,
    pub(super) status: Status,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Request>,
    state: State,
}

#[derive(Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    /// A leader commits, and passes on when it is done.
    Led,
    Closed,
}

struct Request {
    work: Work,
    turn: oneshot::Sender<Turn>,
}

pub(super) enum Work {
    /// Without writes, a test whether the disk accepts writes.
    Commit(Vec<Write>),
    /// Only a response.
    Ask,
    Close,
}

/// What a waiting request receives.
enum Turn {
    Done(Result<(), CommitError>),
    /// It is the first of the waiting ones, and commits them.
    Lead(Leader),
}

/// A request that has its place in the order.
pub(super) enum Entered {
    First(Leader),
    Waiting(Waiting),
}

pub(super) struct Waiting(oneshot::Receiver<Turn>);

impl Entered {
    /// Commits, or waits until that is done.
    pub(super) async fn outcome(self) -> Result<(), CommitError> {
        match self {
            Self::First(leader) => leader.commit(),
            Self::Waiting(waiting) => waiting.outcome().await,
        }
    }
}

/// The right to commit, with the own request. A leader that is dropped, since its caller is gone, commits all the same.
pub(super) struct Leader {
    writer: Arc<Writer>,
    own: Option<Work>,
}

impl Writer {
    pub(super) fn new(database: Database) -> Arc<Self> {
        let database = Mutex::new(Some(database));
        Arc::new(Self { queue: Mutex::default(), database, status: Status::default() })
    }

    /// Gives a request its place in the order. Does not block.
    pub(super) fn enter(self: &Arc<Self>, work: Work) -> Result<Entered, CommitError> {
        let mut queue = self.queue.lock();
        match queue.state {
            State::Closed => Err(CommitError::Closed),
            State::Idle => {
                queue.state = State::Led;
                Ok(Entered::First(Leader { writer: self.clone(), own: Some(work) }))
            }
            State::Led => {
                let (turn, waiting) = oneshot::channel();
                queue.waiting.push_back(Request { work, turn });
                Ok(Entered::Waiting(Waiting(waiting)))
            }
        }
    }

    fn commit(&self, writes: &[Write]) -> Result<(), CommitError> {
        let started = Instant::now();
        let mut database = self.database.lock();
        let Some(database) = database.as_mut() else { return Err(CommitError::Closed) };
        self.status.begin();
        let time = writes.is_empty().then_some(META_PROBED);
        let outcome = database.commit(writes, time).map_err(|error| CommitError::Store(Arc::new(error)));
        match &outcome {
            Ok(()) => {
                let value_bytes = writes.iter().filter_map(|write| Some(write.value.as_ref()?.len())).sum();
                self.status.succeeded(writes.len(), value_bytes, started.elapsed());
            }
            Err(failure) => self.status.failed(failure),
        }
        outcome
    }

    fn is_log_long(&self) -> bool {
        self.database.lock().as_ref().is_some_and(Database::is_log_long)
    }

    pub(super) fn copy_log(&self) {
        let copied = self.database.lock().as_mut().map_or(Ok(()), Database::copy_log);
        warn_of(copied, "the log of the checkpoint is not copied into its file, and grows");
    }

    fn close(&self) {
        let waiting = {
            let mut queue = self.queue.lock();
            queue.state = State::Closed;
            mem::take(&mut queue.waiting)
        };
        let closed = self.database.lock().take().map_or(Ok(()), Database::close);
        warn_of(closed, "the checkpoint is closed with a log, which the next start reads");
        for request in waiting {
            // The caller may have been cancelled.
            request.turn.send(Turn::Done(Err(CommitError::Closed))).ok();
        }
    }
}

fn warn_of(outcome: Result<(), StoreError>, message: &'static str) {
    if let Err(error) = outcome {
        tracing::warn!(error = chain(&error), "{message}");
    }
}

impl Waiting {
    async fn outcome(self) -> Result<(), CommitError> {
        match self.0.await {
            Ok(Turn::Done(outcome)) => outcome,
            Ok(Turn::Lead(leader)) => leader.commit(),
            Err(_) => Err(CommitError::Closed),
        }
    }
}

impl Leader {
    /// Commits the own request and those that wait, and passes on. Blocks the thread; tokio moves the other tasks of a worker to another.
    pub(super) fn commit(mut self) -> Result<(), CommitError> {
        in_place(|| self.lead())
    }

    fn lead(&mut self) -> Result<(), CommitError> {
        let Some(own) = self.own.take() else { return Ok(()) };
        let outcome = match own {
            Work::Ask => Ok(()),
            Work::Close => {
                self.writer.close();
                return Ok(());
            }
            Work::Commit(writes) => self.commit_with_waiting(writes),
        };
        self.finish();
        outcome
    }

    fn commit_with_waiting(&self, mut writes: Vec<Write>) -> Result<(), CommitError> {
        let mut others = Vec::new();
        {
            let mut queue = self.writer.queue.lock();
            // A test is a commit of its own: its callers want to know about the disk.
            while writes.len() < CHECKPOINT_BATCH_MAX
                && let Some(Request { work: Work::Commit(_), .. }) = queue.waiting.front()
                && let Some(Request { work: Work::Commit(more), turn }) = queue.waiting.pop_front()
            {
                writes.extend(more);
                others.push(turn);
            }
        }
        let outcome = self.writer.commit(&writes);
        for turn in others {
            // A cancelled caller gets no response; its changes stay.
            turn.send(Turn::Done(outcome.clone())).ok();
        }
        outcome
    }

    /// Copies the log if it is long, after the callers have their answers, and passes on.
    fn finish(&self) {
        let writer = self.writer.clone();
        if !writer.is_log_long() {
            return pass_on(&writer);
        }
        let copy = move || {
            writer.copy_log();
            pass_on(&writer);
        };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(copy)),
            Err(_) => copy(),
        }
    }
}

/// Makes the first of the waiting requests the leader.
fn pass_on(writer: &Arc<Writer>) {
    let next = {
        let mut queue = writer.queue.lock();
        let next = queue.waiting.pop_front();
        if next.is_none() && queue.state == State::Led {
            queue.state = State::Idle;
        }
        next
    };
    if let Some(Request { work, turn }) = next {
        // A caller that is gone drops its leader, which commits.
        drop(turn.send(Turn::Lead(Leader { writer: writer.clone(), own: Some(work) })));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if self.own.is_some() {
            // The caller is gone: the outcome is in the status.
            self.lead().ok();
        }
    }
}

/// Runs a step that blocks for a sync of the disk. A disk that hangs then holds up no task but this one.
fn in_place<T>(step: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    if flavor.is_ok_and(|flavor| flavor == RuntimeFlavor::MultiThread) {
        tokio::task::block_in_place(step)
    } else {
        step()
    }
}
