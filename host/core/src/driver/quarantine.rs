//! When a driver that fails again and again is left alone, for how long, and who may try it.
//!
//! Is told how calls begin and end; says whether the next one may begin. Streaks of failures are kept by function and counted
//! together: a success speaks for its own function only, so that a driver that answers every look cannot trap in every prepare
//! for ever. No clock, no lock, no task.

use std::time::Duration;

use tokio::time::Instant;

use crate::driver::Operation;
use nodedock_base::backoff::{Backoff, spread};
use nodedock_model::limit;

/// How a call came to be allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    Ordinary,
    /// The one try of a driver in quarantine, by its number.
    Probe(u64),
}

/// A driver's time in quarantine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    pub since: Instant,
    /// From then on one call at a time may try it.
    pub until: Instant,
    /// How many calls have failed.
    pub failures: u32,
    /// What became of the last one.
    pub why: String,
    probing: Option<u64>,
}

impl Hold {
    pub fn is_probed(&self) -> bool {
        self.probing.is_some()
    }
}

pub struct Quarantine {
    /// Failures in a row, by function.
    streaks: [u32; Operation::ALL.len()],
    backoff: Backoff,
    hold: Option<Hold>,
    /// Counts the probes.
    probes: u64,
}

impl Default for Quarantine {
    fn default() -> Self {
        Self {
            streaks: [0; Operation::ALL.len()],
            backoff: Backoff::new(limit::QUARANTINE_MIN, limit::QUARANTINE_MAX),
            hold: None,
            probes: 0,
        }
    }
}

impl Quarantine {
    pub fn hold(&self) -> Option<&Hold> {
        self.hold.as_ref()
    }

    /// Failures that no success of the same function has followed.
    pub fn failures(&self) -> u32 {
        self.streaks.iter().fold(0, |sum, streak| sum.saturating_add(*streak))
    }

    /// Whether a call may begin. Whoever gets an entry says how it ended by one of the three functions below.
    pub fn admit(&mut self, now: Instant) -> Result<Entry, &Hold> {
        let Some(hold) = &mut self.hold else { return Ok(Entry::Ordinary) };
        if now < hold.until || hold.is_probed() {
            return Err(hold);
        }
        self.probes += 1;
        hold.probing = Some(self.probes);
        Ok(Entry::Probe(self.probes))
    }

    /// The call ended well. After a probe the quarantine is over; the delays begin anew when every function that failed works.
    pub fn succeeded(&mut self, entry: Entry, operation: Operation) {
        self.streaks[operation as usize] = 0;
        if self.is_the_probe(entry) {
            self.hold = None;
        }
        if self.hold.is_none() && self.failures() == 0 {
            self.backoff.reset();
        }
    }

    /// The call failed. Of those that began before the quarantine none makes it longer. `chance` is any number.
    pub fn failed(
        &mut self,
        entry: Entry,
        operation: Operation,
        why: impl FnOnce() -> String,
        now: Instant,
        chance: u64,
    ) {
        let streak = &mut self.streaks[operation as usize];
        *streak = streak.saturating_add(1);
        let failures = self.failures();
        let since = match &self.hold {
            Some(hold) if self.is_the_probe(entry) => hold.since,
            Some(_) => return,
            None if failures >= limit::QUARANTINE_FAILURES => now,
            None => return,
        };
        let until = now + self.delay(chance);
        self.hold = Some(Hold { since, until, failures, why: why(), probing: None });
    }

    /// The call was given up, or said nothing of the driver: another may be the probe.
    pub fn left(&mut self, entry: Entry) {
        if self.is_the_probe(entry)
            && let Some(hold) = &mut self.hold
        {
            hold.probing = None;
        }
    }

    /// Ends the quarantine and forgets all failures. False: there was none.
    pub fn resume(&mut self) -> bool {
        self.streaks = [0; Operation::ALL.len()];
        self.backoff.reset();
        self.hold.take().is_some()
    }

    /// False also for a probe of a quarantine that is over.
    fn is_the_probe(&self, entry: Entry) -> bool {
        matches!((entry, &self.hold), (Entry::Probe(number), Some(hold)) if hold.probing == Some(number))
    }

    fn delay(&mut self, chance: u64) -> Duration {
        spread(self.backoff.delay(), chance)
    }
}

#[cfg(test)]
mod tests;
