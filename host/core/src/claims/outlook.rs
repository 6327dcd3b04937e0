//! What is said of a claim beside its record: how often its drivers were asked in vain, and when they are asked again.

use std::sync::Arc;

use tokio::time::Instant;

use super::Inner;
use super::refusals::{DriverMark, Refusal, Verdict};
use nodedock_base::clock::now_ms;
use nodedock_model::{ClaimRecord, ClaimState, ClaimValues, DriverName, ObjectRef, Problem};

/// When a driver is asked again, or may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    Now,
    /// Milliseconds since the Unix epoch.
    At(u64),
    /// As soon as the driver serves.
    WhenServing,
    /// Not until the request or the driver changes.
    WhenChanged,
}

impl Retry {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Now => "now",
            Self::At(_) => "at",
            Self::WhenServing => "when-serving",
            Self::WhenChanged => "when-changed",
        }
    }

    pub fn at_ms(self) -> u64 {
        if let Self::At(at_ms) = self { at_ms } else { 0 }
    }

    fn at(at: Instant, now: Instant) -> Self {
        let left = at.saturating_duration_since(now);
        if left.is_zero() {
            return Self::Now;
        }
        Self::At(now_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX)))
    }
}

/// What comes next of one driver of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverOutlook {
    pub driver: DriverName,
    /// How often it was asked in vain, since the daemon started.
    pub attempts: u32,
    pub retry: Retry,
}

/// A claim that a driver refused and of which no record is left.
#[derive(Debug, Clone, PartialEq)]
pub struct RefusedClaim {
    pub claim: ObjectRef,
    pub problem: Problem,
    /// When it was refused last; milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub outlook: DriverOutlook,
}

impl Inner {
    /// Of the drivers that have something to do still.
    pub(super) fn outlook(&self, record: &ClaimRecord) -> Vec<DriverOutlook> {
        let leaving = |driver: &DriverName| record.is_part_leaving(driver);
        let open = record.drivers.iter().filter(|(driver, part)| match record.state {
            ClaimState::Prepared => leaving(driver),
            ClaimState::Preparing => leaving(driver) || part.current().is_none(),
            ClaimState::Unpreparing => true,
        });
        open.map(|(driver, _)| self.driver_outlook(record, driver)).collect()
    }

    fn driver_outlook(&self, record: &ClaimRecord, driver: &DriverName) -> DriverOutlook {
        let (uid, now) = (&record.id.uid, Instant::now());
        let is_leaving = record.is_part_leaving(driver);
        let attempts = if is_leaving {
            self.waits().attempts(uid)
        } else {
            self.refusals().get(uid, driver).map_or(0, |refusal| refusal.attempts)
        };
        let retry = match self.registry.serving(driver) {
            Err(_) => Retry::WhenServing,
            Ok(serving) if is_leaving => {
                let at = self.waits().due(uid, driver, &DriverMark::of(&serving));
                Retry::at(at.unwrap_or(now), now)
            }
            Ok(serving) => {
                let (mark, request) = (DriverMark::of(&serving), || record.driver_claim(driver));
                retry(&self.refusals().verdict(uid, driver, &mark, request, now), now)
            }
        };
        DriverOutlook { driver: driver.clone(), attempts, retry }
    }

    /// Claims that were refused and rolled back. That nobody has asked for them again does not make them known.
    pub(super) fn refused(&self) -> Vec<RefusedClaim> {
        let refusals: Vec<Refusal> = self.refusals().iter().cloned().collect();
        let table = self.table.lock();
        let known = |refusal: &Refusal| table.claim(refusal.claim.uid.as_str()).is_some();
        refusals
            .into_iter()
            .filter(|refusal| !known(refusal))
            .map(|refusal| self.refused_claim(refusal))
            .collect()
    }

    fn refused_claim(&self, refusal: Refusal) -> RefusedClaim {
        let now = Instant::now();
        let retry = match self.registry.serving(&refusal.driver).map(|driver| DriverMark::of(&driver)) {
            Err(_) => Retry::WhenServing,
            Ok(mark) if !refusal.is_of(&mark) => Retry::Now,
            Ok(_) => refusal.again.map_or(Retry::WhenChanged, |at| Retry::at(at, now)),
        };
        let outlook = DriverOutlook { driver: refusal.driver, attempts: refusal.attempts, retry };
        RefusedClaim { claim: refusal.claim, problem: refusal.problem, at_ms: refusal.at_ms, outlook }
    }
}

fn retry(verdict: &Verdict, now: Instant) -> Retry {
    match verdict {
        Verdict::Ask => Retry::Now,
        Verdict::Later { at, .. } => Retry::at(*at, now),
        Verdict::Never(_) => Retry::WhenChanged,
    }
}

/// A claim with what is known of its drivers' next steps.
#[derive(Debug, Clone)]
pub struct ClaimView {
    pub record: Arc<ClaimRecord>,
    /// What its drivers changed below `/sys`.
    pub values: Option<ClaimValues>,
    pub outlook: Vec<DriverOutlook>,
}
