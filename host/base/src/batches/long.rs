//! Batches that take long.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::{BatchServer, Serve};
use crate::error::chain;
use crate::ticker::{Ticker, Ticking};

/// Time after which a batch takes long. A good disk syncs in less; other requests wait that long at most if all other threads of the
/// runtime were idle when the batch began, since tokio leaves its sockets and timers to the thread that has run last.
pub const LONG: Duration = Duration::from_millis(2);

/// Batches under way in this process.
static UNDER_WAY: Mutex<Begun> = Mutex::new(Begun {
    next: 0,
    batches: Vec::new(),
});

/// Looks for batches that take long.
static CLOCK: LazyLock<Option<Ticker>> = LazyLock::new(|| {
    let started = Ticker::start("long-batches", LONG, || UNDER_WAY.lock().report_long());
    let reported = started.inspect_err(|error| {
        tracing::error!(error = chain(error), "a disk that hangs is not noticed");
    });
    // no error: it is in the log
    reported.ok()
});

struct Begun {
    /// The number of the next batch.
    next: u64,
    batches: Vec<Batch>,
}

struct Batch {
    number: u64,
    server: Arc<dyn TakesLong>,
    /// The runtime whose thread it blocks. `None`: it blocks a thread of its caller's own.
    runtime: Option<Handle>,
    began: Instant,
    is_reported: bool,
}

trait TakesLong: Send + Sync {
    fn takes_long(&self);
}

impl<S: Serve> TakesLong for BatchServer<S> {
    fn takes_long(&self) {
        self.server.takes_long();
    }
}

/// A batch that is carried out until this is dropped.
pub(super) struct UnderWay {
    number: u64,
    _ticking: Option<Ticking>,
}

impl UnderWay {
    pub(super) fn begin<S: Serve>(server: Arc<BatchServer<S>>) -> Self {
        // Before the clock starts, so that its first tick finds this batch long.
        let began = Instant::now();
        let ticking = CLOCK.as_ref().map(Ticker::begin);
        let mut begun = UNDER_WAY.lock();
        let number = begun.next;
        begun.next += 1;
        begun.batches.push(Batch {
            number,
            server,
            // no error: without a runtime there is nothing to wake
            runtime: Handle::try_current().ok(),
            began,
            is_reported: false,
        });
        Self {
            number,
            _ticking: ticking,
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut begun = UNDER_WAY.lock();
        begun.batches.retain(|batch| batch.number != self.number);
    }
}

impl Begun {
    /// Reports the batches that take long, each once.
    fn report_long(&mut self) {
        for batch in &mut self.batches {
            if batch.is_reported || batch.began.elapsed() < LONG {
                continue;
            }
            batch.is_reported = true;
            batch.server.takes_long();
            if let Some(runtime) = &batch.runtime {
                // Whichever thread runs it looks for other work afterwards, and then waits for sockets and timers.
                drop(runtime.spawn(async {}));
            }
        }
    }
}
