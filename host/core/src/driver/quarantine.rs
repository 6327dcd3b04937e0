//! Decides when a driver that fails repeatedly is no longer called, for how long, and which call may probe it.
//!
//! Receives the begin and the result of each call; returns whether the next call may begin. Consecutive failures are counted by function
//! and added up: a success counts for its own function only, so that a driver that answers every discover cannot trap in every prepare for
//! ever. No clock, no lock, no task.

use std::time::Duration;

use tokio::time::Instant;

use crate::driver::Operation;
use nodedock_base::backoff::{Backoff, spread};

/// Failures in a row that lead to quarantine: one or two may be bad luck or one bad claim.
pub const FAILURES_MAX: u32 = 5;
/// The shortest and the longest quarantine; doubled while probes fail. Long enough that a driver that spins costs next to nothing, short
/// enough that a repaired one is soon called again.
pub const PERIOD_MIN: Duration = Duration::from_secs(5);
pub const PERIOD_MAX: Duration = Duration::from_secs(300);

/// Why a call may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admitted {
    Ordinary,
    /// The only call of a driver in quarantine, by its number.
    Probe(u64),
}

/// A period of quarantine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuarantinePeriod {
    pub since: Instant,
    /// End of the period, from which one call at a time may probe the driver.
    pub until: Instant,
    /// Calls that failed.
    pub failures: u32,
    /// The last failure.
    pub why: String,
    probing: Option<u64>,
}

impl QuarantinePeriod {
    pub fn is_probed(&self) -> bool {
        self.probing.is_some()
    }
}

pub struct Quarantine {
    /// Failures in a row, by function.
    streaks: [u32; Operation::ALL.len()],
    backoff: Backoff,
    period: Option<QuarantinePeriod>,
    /// Counts the probes.
    probes: u64,
}

impl Default for Quarantine {
    fn default() -> Self {
        Self {
            streaks: [0; Operation::ALL.len()],
            backoff: Backoff::new(PERIOD_MIN, PERIOD_MAX),
            period: None,
            probes: 0,
        }
    }
}

impl Quarantine {
    pub fn period(&self) -> Option<&QuarantinePeriod> {
        self.period.as_ref()
    }

    /// Failures since the last success of the same function.
    pub fn failures(&self) -> u32 {
        self.streaks
            .iter()
            .fold(0, |sum, streak| sum.saturating_add(*streak))
    }

    /// Decides whether a call may begin. Its end has to be reported by one of the three functions below.
    pub fn admit(&mut self, now: Instant) -> Result<Admitted, &QuarantinePeriod> {
        let Some(period) = &mut self.period else {
            return Ok(Admitted::Ordinary);
        };
        if now < period.until || period.is_probed() {
            return Err(period);
        }
        self.probes += 1;
        period.probing = Some(self.probes);
        Ok(Admitted::Probe(self.probes))
    }

    /// The call succeeded. After a probe the quarantine is over; the delays begin again with the shortest when every function that failed works.
    pub fn succeeded(&mut self, admission: Admitted, operation: Operation) {
        self.streaks[operation as usize] = 0;
        if self.is_the_probe(admission) {
            self.period = None;
        }
        if self.period.is_none() && self.failures() == 0 {
            self.backoff.reset();
        }
    }

    /// The call failed. Calls that began before the quarantine do not make it longer. `chance` is any number.
    pub fn failed(
        &mut self,
        admission: Admitted,
        operation: Operation,
        why: impl FnOnce() -> String,
        now: Instant,
        chance: u64,
    ) {
        let streak = &mut self.streaks[operation as usize];
        *streak = streak.saturating_add(1);
        let failures = self.failures();
        let since = match &self.period {
            Some(period) if self.is_the_probe(admission) => period.since,
            Some(_) => return,
            None if failures >= FAILURES_MAX => now,
            None => return,
        };
        let until = now + self.delay(chance);
        self.period = Some(QuarantinePeriod {
            since,
            until,
            failures,
            why: why(),
            probing: None,
        });
    }

    /// The call was cancelled, or says nothing about the driver: another may be the probe.
    pub fn cancelled(&mut self, admission: Admitted) {
        if self.is_the_probe(admission)
            && let Some(period) = &mut self.period
        {
            period.probing = None;
        }
    }

    /// Ends the quarantine and forgets all failures. False: there was none.
    pub fn resume(&mut self) -> bool {
        self.streaks = [0; Operation::ALL.len()];
        self.backoff.reset();
        self.period.take().is_some()
    }

    /// False also for a probe of a quarantine that is over.
    fn is_the_probe(&self, admission: Admitted) -> bool {
        matches!((admission, &self.period), (Admitted::Probe(number), Some(period)) if period.probing == Some(number))
    }

    fn delay(&mut self, chance: u64) -> Duration {
        spread(self.backoff.delay(), chance)
    }
}

#[cfg(test)]
mod tests;
