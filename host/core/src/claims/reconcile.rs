//! What is decided without a request: which claims that are being given up are tried again, when, and with which drivers. A driver
//! that begins to serve, or serves anew, is asked at once. In memory: after a restart every driver may be asked once more. No clock,
//! no IO, no task.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::refusals::DriverMark;
use nodedock_base::backoff::Backoff;
use nodedock_model::{ClaimRecord, DriverName, Problem, Uid, limit};

/// The drivers of a claim that serve now.
pub(super) type Serving = BTreeMap<DriverName, DriverMark>;

/// Claims that were tried in vain.
#[derive(Debug, Default)]
pub(super) struct Waits(BTreeMap<Uid, Wait>);

#[derive(Debug)]
struct Wait {
    attempts: u32,
    backoff: Backoff,
    at: Instant,
    /// Those that served at the last try.
    asked: BTreeMap<DriverName, Asked>,
}

#[derive(Debug)]
struct Asked {
    mark: DriverMark,
    /// Since it serves: how often it did not give the claim up.
    tries: u32,
    /// The driver wants to be left alone until then.
    not_before: Option<Instant>,
}

impl Wait {
    /// From when on a driver that serves may be asked. None: at once.
    fn due(&self, driver: &DriverName, mark: &DriverMark) -> Option<Instant> {
        let asked = self.asked.get(driver).filter(|asked| asked.mark == *mark)?;
        Some(asked.not_before.map_or(self.at, |not_before| not_before.max(self.at)))
    }
}

impl Waits {
    /// Notes a try that left the claim: the drivers that served at it, and what they said.
    pub(super) fn failed(
        &mut self,
        claim: &Uid,
        serving: Serving,
        problems: &BTreeMap<DriverName, Problem>,
        now: Instant,
    ) {
        let mut before = self.0.remove(claim);
        let first = || Backoff::new(limit::UNPREPARE_RETRY_MIN, limit::UNPREPARE_RETRY_MAX);
        let mut backoff = before.as_ref().map_or_else(first, |wait| wait.backoff.clone());
        let attempts = before.as_ref().map_or(0, |wait| wait.attempts).saturating_add(1);
        let mut ask = |(driver, mark): (DriverName, DriverMark)| {
            let known = before.as_mut().and_then(|wait| wait.asked.remove(&driver));
            let known = known.filter(|known| known.mark.is_of_instance(&mark));
            let problem = problems.get(&driver);
            let tries =
                known.as_ref().map_or(0, |known| known.tries).saturating_add(problem.is_some().into());
            let standing = known.filter(|known| known.mark == mark).and_then(|known| known.not_before);
            let not_before = problem.map_or(standing, |problem| not_before(problem, now));
            (driver, Asked { mark, tries, not_before })
        };
        let asked = serving.into_iter().map(&mut ask).collect();
        self.0.insert(claim.clone(), Wait { attempts, at: now + backoff.delay(), backoff, asked });
    }

    /// The claim is gone.
    pub(super) fn over(&mut self, claim: &Uid) {
        self.0.remove(claim);
    }

    /// Tries since the daemon started.
    pub(super) fn attempts(&self, claim: &Uid) -> u32 {
        self.0.get(claim).map_or(0, |wait| wait.attempts)
    }

    /// How often a driver as it was loaded did not give a claim up. Other drivers' failures, its absence and its predecessors' are none
    /// of its own.
    pub(super) fn tries(&self, claim: &Uid, driver: &DriverName, mark: &DriverMark) -> u32 {
        let asked = self.0.get(claim).and_then(|wait| wait.asked.get(driver));
        asked.filter(|asked| asked.mark.is_of_instance(mark)).map_or(0, |asked| asked.tries)
    }

    /// When a claim that was tried in vain is tried again, whoever serves.
    pub(super) fn again(&self, claim: &Uid) -> Option<Instant> {
        self.0.get(claim).map(|wait| wait.at)
    }

    /// When a driver of a claim is asked again; none: at once, or when it serves.
    pub(super) fn due(&self, claim: &Uid, driver: &DriverName, mark: &DriverMark) -> Option<Instant> {
        self.0.get(claim)?.due(driver, mark)
    }

    /// When a claim is tried again. None: no driver of it serves.
    pub(super) fn next(&self, claim: &ClaimRecord, serving: &Serving, now: Instant) -> Option<Instant> {
        let Some(wait) = self.0.get(&claim.id.uid) else {
            return (claim.leaving().next().is_none() || !serving.is_empty()).then_some(now);
        };
        if claim.leaving().next().is_none() {
            return Some(wait.at);
        }
        serving.iter().map(|(driver, mark)| wait.due(driver, mark).unwrap_or(now)).min()
    }

    /// The drivers to ask in a try. Those that are not there are asked, in vain, until it is known of them.
    pub(super) fn drivers(&self, claim: &ClaimRecord, serving: &Serving, now: Instant) -> Vec<DriverName> {
        let wait = self.0.get(&claim.id.uid);
        let is_due = |driver: &DriverName, mark| {
            wait.and_then(|wait| wait.due(driver, mark)).is_none_or(|at| at <= now)
        };
        let wanted = claim.leaving().filter(|(driver, part)| match serving.get(*driver) {
            Some(mark) => is_due(driver, mark),
            None => part.problem.is_none(),
        });
        wanted.map(|(driver, _)| driver.clone()).collect()
    }
}

fn not_before(problem: &Problem, now: Instant) -> Option<Instant> {
    let delay = Duration::from_millis(problem.retry_after_ms?.into());
    Some(now + delay.min(limit::RETRY_AFTER_MAX))
}
