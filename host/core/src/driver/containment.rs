//! The history of a driver's calls: its quarantine, and which of its functions are slow. Every call is admitted here, and reports how it
//! ended.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::driver::Operation;
use crate::driver::quarantine::{Admitted, Quarantine, QuarantinePeriod};
use nodedock_base::clock::{millis, now_ms, rfc3339};
use nodedock_model::limit::QUARANTINE_PROBE_WAIT;
use nodedock_model::{DriverName, Problem, ProblemCode};

/// Calls of a function that was slow start on the slow runtime for so long.
const SLOW_FOR: Duration = Duration::from_secs(60);

/// A driver's quarantine, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    driver: DriverName,
    pub period: QuarantinePeriod,
    /// Milliseconds since the Unix epoch.
    since_ms: u64,
    until_ms: u64,
}

impl Quarantined {
    fn new(driver: &DriverName, period: &QuarantinePeriod) -> Self {
        let (now, now_ms) = (Instant::now(), now_ms());
        Self {
            driver: driver.clone(),
            period: period.clone(),
            since_ms: now_ms.saturating_sub(millis(now.saturating_duration_since(period.since))),
            until_ms: now_ms.saturating_add(millis(period.until.saturating_duration_since(now))),
        }
    }

    /// A sentence without its subject.
    pub fn reason(&self) -> String {
        format!(
            "in quarantine since {} after {} failures, until a call succeeds, the next try not before {}; the last failure: {}; \
             nodedock driver resume {} ends it now",
            rfc3339(self.since_ms),
            self.period.failures,
            rfc3339(self.until_ms),
            self.period.why,
            self.driver,
        )
    }

    /// The problem of a refused call, with the time that is left.
    pub fn problem(&self) -> Problem {
        let left = self.period.until.saturating_duration_since(Instant::now());
        let wait = if left.is_zero() {
            QUARANTINE_PROBE_WAIT
        } else {
            left
        };
        // Rounded up, so that a caller that waits for it does not retry too early.
        let wait = wait + Duration::from_millis(1);
        let message = format!("driver {} is {}", self.driver, self.reason());
        Problem::unavailable(ProblemCode::DriverQuarantined, message).retry_after(wait)
    }
}

/// One driver's call history.
pub struct Containment {
    /// None until the driver has described itself: such a driver is called once.
    driver: Option<DriverName>,
    history: Mutex<History>,
    shown: watch::Sender<Option<Quarantined>>,
    chance: RandomState,
}

#[derive(Default)]
struct History {
    quarantine: Quarantine,
    /// Time until which each function counts as slow.
    slow_until: [Option<Instant>; Operation::ALL.len()],
    calls: u64,
}

impl Containment {
    pub fn new(driver: Option<DriverName>) -> Self {
        Self {
            driver,
            history: Mutex::default(),
            shown: watch::Sender::new(None),
            chance: RandomState::new(),
        }
    }

    /// The current quarantine, and each change of it.
    pub fn follow(&self) -> watch::Receiver<Option<Quarantined>> {
        self.shown.subscribe()
    }

    pub fn quarantined(&self) -> Option<Quarantined> {
        self.shown.borrow().clone()
    }

    /// Ends the quarantine, and forgets all failures. False: there is none.
    pub fn resume(&self) -> bool {
        let mut history = self.history.lock();
        let was_quarantined = history.quarantine.resume();
        self.show(&history);
        was_quarantined
    }

    /// Admits a call, or says why not.
    pub fn admit(self: &Arc<Self>, operation: Operation) -> Result<AdmittedCall, Problem> {
        let mut history = self.history.lock();
        match history.quarantine.admit(Instant::now()) {
            Ok(admission) => {
                if admission != Admitted::Ordinary {
                    self.show(&history);
                }
                Ok(AdmittedCall {
                    containment: Arc::clone(self),
                    admission,
                    operation,
                    ended: false,
                })
            }
            Err(period) => match &self.driver {
                Some(driver) => Err(Quarantined::new(driver, period).problem()),
                None => Err(Problem::unavailable(
                    ProblemCode::DriverQuarantined,
                    period.why.clone(),
                )),
            },
        }
    }

    /// Returns whether a call of the function is limited to the permits of slow and failing drivers.
    pub fn is_slow(&self, operation: Operation) -> bool {
        let history = self.history.lock();
        history.quarantine.failures() > 0
            || history.slow_until[operation as usize].is_some_and(|until| Instant::now() < until)
    }

    pub fn was_slow(&self, operation: Operation) {
        self.history.lock().slow_until[operation as usize] = Some(Instant::now() + SLOW_FOR);
    }

    /// Publishes the quarantine. Called with the lock held, so that the last published value is the current one.
    fn show(&self, history: &History) {
        let Some(driver) = &self.driver else { return };
        self.shown.send_if_modified(|shown| {
            let period = history.quarantine.period();
            if shown.as_ref().map(|known| &known.period) == period {
                return false;
            }
            *shown = period.map(|period| Quarantined::new(driver, period));
            true
        });
    }
}

/// Result of a call, as far as it says something about the driver.
pub enum CallResult {
    Succeeded,
    Failed(String),
    /// It says nothing about the driver: the call did not run.
    Unknown,
}

/// A running call. One that is dropped without a result was cancelled.
pub struct AdmittedCall {
    containment: Arc<Containment>,
    admission: Admitted,
    operation: Operation,
    ended: bool,
}

impl AdmittedCall {
    pub fn ended(mut self, result: CallResult) {
        self.ended = true;
        self.record(result);
    }

    fn record(&self, result: CallResult) {
        let mut history = self.containment.history.lock();
        history.calls += 1;
        let (admission, operation) = (self.admission, self.operation);
        match result {
            CallResult::Succeeded => history.quarantine.succeeded(admission, operation),
            CallResult::Unknown => history.quarantine.cancelled(admission),
            CallResult::Failed(why) => {
                let chance = self.containment.chance.hash_one(history.calls);
                history.quarantine.failed(
                    admission,
                    operation,
                    || format!("{}: {why}", operation.as_str()),
                    Instant::now(),
                    chance,
                );
            }
        }
        self.containment.show(&history);
    }
}

impl Drop for AdmittedCall {
    fn drop(&mut self) {
        if !self.ended {
            self.record(CallResult::Unknown);
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl Containment {
    pub fn fail(self: &Arc<Self>) {
        for _ in 0..crate::driver::quarantine::FAILURES_MAX {
            let call = self
                .admit(Operation::Prepare)
                .map_err(|problem| problem.message)
                .unwrap();
            call.ended(CallResult::Failed("it trapped".to_owned()));
        }
    }
}
