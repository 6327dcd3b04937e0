//! What is known of a driver's conduct: its quarantine, and which of its functions are slow. Every call asks here before it begins
//! and says how it ended.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::driver::Operation;
use crate::driver::quarantine::{Entry, Hold, Quarantine};
use nodedock_base::clock::{now_ms, rfc3339};
use nodedock_model::{DriverName, Problem, limit};

/// The code of a call that a quarantine held back, and of the node's condition.
pub const QUARANTINED: &str = "driver-quarantined";

/// A driver's quarantine, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    driver: DriverName,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
    pub until_ms: u64,
    /// From then on one call at a time may try it.
    pub until: Instant,
    pub failures: u32,
    /// What became of the last call.
    pub why: String,
    /// A call tries it now.
    pub is_probed: bool,
}

impl Quarantined {
    fn new(driver: &DriverName, hold: &Hold) -> Self {
        let (now, now_ms) = (Instant::now(), now_ms());
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            driver: driver.clone(),
            since_ms: now_ms.saturating_sub(ms(now.saturating_duration_since(hold.since))),
            until_ms: now_ms.saturating_add(ms(hold.until.saturating_duration_since(now))),
            until: hold.until,
            failures: hold.failures,
            why: hold.why.clone(),
            is_probed: hold.is_probed(),
        }
    }

    /// In a sentence without its subject.
    pub fn reason(&self) -> String {
        format!(
            "in quarantine since {} after {} failures, until a call succeeds, the next try not before {}; the last failure: {}; \
             nodedock driver resume {} ends it now",
            rfc3339(self.since_ms),
            self.failures,
            rfc3339(self.until_ms),
            self.why,
            self.driver,
        )
    }

    /// What a call is told, with the time that is left.
    pub fn problem(&self) -> Problem {
        let left = self.until.saturating_duration_since(Instant::now());
        let wait = if left.is_zero() { limit::QUARANTINE_PROBE_WAIT } else { left };
        // Whole milliseconds, so that who waits for them does not come too early.
        let wait = wait + Duration::from_millis(1);
        Problem::unavailable(QUARANTINED, format!("driver {} is {}", self.driver, self.reason()))
            .retry_after(wait)
    }
}

/// One driver's conduct.
pub struct Containment {
    /// None until it has said who it is: such a driver is asked once.
    driver: Option<DriverName>,
    conduct: Mutex<Conduct>,
    shown: watch::Sender<Option<Quarantined>>,
    chance: RandomState,
}

#[derive(Default)]
struct Conduct {
    quarantine: Quarantine,
    /// Until when a function counts as slow.
    slow_until: [Option<Instant>; Operation::ALL.len()],
    calls: u64,
}

impl Containment {
    pub fn new(driver: Option<DriverName>) -> Self {
        Self {
            driver,
            conduct: Mutex::default(),
            shown: watch::Sender::new(None),
            chance: RandomState::new(),
        }
    }

    /// The quarantine as it stands, and each change of it.
    pub fn follow(&self) -> watch::Receiver<Option<Quarantined>> {
        self.shown.subscribe()
    }

    pub fn quarantined(&self) -> Option<Quarantined> {
        self.shown.borrow().clone()
    }

    /// Ends the quarantine, and forgets what failed. False: there is none.
    pub fn resume(&self) -> bool {
        let mut conduct = self.conduct();
        let was_held = conduct.quarantine.resume();
        self.show(&conduct);
        was_held
    }

    /// Lets a call begin, or says why not.
    pub fn admit(self: &Arc<Self>, operation: Operation) -> Result<Pass, Problem> {
        let mut conduct = self.conduct();
        match conduct.quarantine.admit(Instant::now()) {
            Ok(entry) => {
                if entry != Entry::Ordinary {
                    self.show(&conduct);
                }
                Ok(Pass { containment: Arc::clone(self), entry, operation, ended: false })
            }
            Err(hold) => match &self.driver {
                Some(driver) => Err(Quarantined::new(driver, hold).problem()),
                None => Err(Problem::unavailable(QUARANTINED, hold.why.clone())),
            },
        }
    }

    /// Whether a call of the function has to be content with the share of those that are slow or fail.
    pub fn is_slow(&self, operation: Operation) -> bool {
        let conduct = self.conduct();
        let is_slow = |until: Instant| Instant::now() < until;
        conduct.quarantine.failures() > 0 || conduct.slow_until[operation as usize].is_some_and(is_slow)
    }

    /// A call of the function used more than is meant for the fast lane.
    pub fn was_slow(&self, operation: Operation) {
        self.conduct().slow_until[operation as usize] = Some(Instant::now() + limit::SLOW_FOR);
    }

    fn conduct(&self) -> MutexGuard<'_, Conduct> {
        self.conduct.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called with the lock held, so that what is shown last is what is true.
    fn show(&self, conduct: &Conduct) {
        let Some(driver) = &self.driver else { return };
        self.shown.send_if_modified(|shown| {
            let before = shown.as_ref().map(|known| (known.until, known.is_probed));
            let hold = conduct.quarantine.hold();
            if before == hold.map(|hold| (hold.until, hold.is_probed())) {
                return false;
            }
            *shown = hold.map(|hold| Quarantined::new(driver, hold));
            true
        });
    }
}

/// How a call ended, as far as it tells of the driver.
pub enum Ending {
    Well,
    Failed(String),
    /// Nothing of the driver: it had no turn.
    Untold,
}

/// A call that was let in. Dropped without an ending, it was given up.
pub struct Pass {
    containment: Arc<Containment>,
    entry: Entry,
    operation: Operation,
    ended: bool,
}

impl Pass {
    pub fn ended(mut self, ending: Ending) {
        self.ended = true;
        self.tell(ending);
    }

    fn tell(&self, ending: Ending) {
        let mut conduct = self.containment.conduct();
        conduct.calls += 1;
        let (entry, operation) = (self.entry, self.operation);
        match ending {
            Ending::Well => conduct.quarantine.succeeded(entry, operation),
            Ending::Untold => conduct.quarantine.left(entry),
            Ending::Failed(why) => {
                let chance = self.containment.chance.hash_one(conduct.calls);
                let why = || format!("{}: {why}", operation.as_str());
                conduct.quarantine.failed(entry, operation, why, Instant::now(), chance);
            }
        }
        self.containment.show(&conduct);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(Ending::Untold);
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl Containment {
    /// Of a driver whose calls a test plays.
    pub fn played(driver: DriverName) -> Arc<Self> {
        Arc::new(Self::new(Some(driver)))
    }

    /// As many calls fail as it takes.
    pub fn fail(self: &Arc<Self>) {
        for _ in 0..limit::QUARANTINE_FAILURES {
            let pass = self.admit(Operation::Prepare).map_err(|problem| problem.message).unwrap();
            pass.ended(Ending::Failed("it trapped".to_owned()));
        }
    }
}
