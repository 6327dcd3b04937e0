//! Requests of operators to read a driver's files again, with a queue for each task that executes them.

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use nodedock_model::{DriverKind, Problem, ProblemCode};

/// An operator's request to read a driver's files again.
pub struct ReloadRequest {
    pub source: String,
    pub done: oneshot::Sender<Reloaded>,
}

/// Outcome; an error if it was not executed.
pub type Reloaded = Result<(), Problem>;

impl ReloadRequest {
    /// Passes it to its worker as an order. With a full queue the operator gets an error to retry.
    pub fn hand_to<T>(
        self,
        worker: &mpsc::Sender<T>,
        order: impl FnOnce(oneshot::Sender<Reloaded>) -> T,
    ) {
        if let Some(place) = spare_place(worker) {
            place.send(order(self.done));
        } else if !worker.is_closed() {
            // The caller may have been cancelled.
            let _ = self.done.send(Err(too_many_reloads()));
        }
    }
}

/// Reserves a slot in a worker's queue for an optional order. Half of the slots stay free for changes, because the sender of changes
/// waits for slots of all workers in turn: a slow worker must not delay the others.
pub fn spare_place<T>(worker: &mpsc::Sender<T>) -> Option<mpsc::Permit<'_, T>> {
    let has_spare = worker.capacity() > worker.max_capacity() / 2;
    has_spare.then(|| worker.try_reserve().ok()).flatten()
}

fn too_many_reloads() -> Problem {
    Problem::unavailable(ProblemCode::TooManyReloads, "too many reloads wait already")
}

/// Queue of reloads; further ones get an error to retry.
pub(super) const RELOADS_WAITING_MAX: usize = 64;

/// The owner of the queues.
pub struct Reloads {
    wasm: Queue,
    native: Queue,
}

struct Queue {
    sender: mpsc::Sender<ReloadRequest>,
    inbox: Mutex<Option<mpsc::Receiver<ReloadRequest>>>,
}

impl Queue {
    fn new() -> Self {
        let (sender, inbox) = mpsc::channel(RELOADS_WAITING_MAX);
        Self {
            sender,
            inbox: Mutex::new(Some(inbox)),
        }
    }
}

impl Reloads {
    pub(super) fn new() -> Self {
        Self {
            wasm: Queue::new(),
            native: Queue::new(),
        }
    }

    /// Returns the requests, for the one task that executes them. `None` after the first call.
    pub fn take(&self, kind: DriverKind) -> Option<mpsc::Receiver<ReloadRequest>> {
        self.of(kind).inbox.lock().take()
    }

    /// Has a source's files read again, and waits for the outcome.
    pub(super) async fn request(&self, kind: DriverKind, source: &str) -> Reloaded {
        let (done, finished) = oneshot::channel();
        let request = ReloadRequest {
            source: source.to_owned(),
            done,
        };
        let sent = self.of(kind).sender.try_send(request);
        sent.map_err(|_| too_many_reloads())?;
        // no error: the source was removed meanwhile, or its worker ended, and its view says so
        finished.await.unwrap_or(Ok(()))
    }

    /// Waits until the task that executes requests for drivers of a kind has received one. Returns false if the task has ended.
    pub async fn answers(&self, kind: DriverKind) -> bool {
        let (done, taken) = oneshot::channel();
        // No source has this name, so the task drops the request as soon as it receives it.
        let request = ReloadRequest {
            source: String::new(),
            done,
        };
        let sender = &self.of(kind).sender;
        if sender.send(request).await.is_err() {
            return false;
        }
        // no error: the task drops the request, and that is its answer
        taken.await.ok();
        // A task that ends also drops waiting requests.
        !sender.is_closed()
    }

    fn of(&self, kind: DriverKind) -> &Queue {
        match kind {
            DriverKind::Wasm => &self.wasm,
            DriverKind::Grpc | DriverKind::Adapter | DriverKind::Cdi => &self.native,
        }
    }
}
