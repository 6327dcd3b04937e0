//! Decides when the unprepare of a claim is retried, and which drivers are called then. A driver that begins to serve, or serves a new
//! revision, is called at once. In memory: after a restart each driver may be called once more. Pure: no clock, no IO, no task.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::prepare_retry::DriverRevision;
use crate::manager::claims::RETRY_AFTER_MAX;
use nodedock_base::backoff::Backoff;
use nodedock_model::{ClaimRecord, DriverName, Problem, Uid};

/// Backoff of unprepares that a driver refuses; doubled up to the second.
pub(crate) const UNPREPARE_RETRY_MIN: Duration = Duration::from_secs(1);
pub(crate) const UNPREPARE_RETRY_MAX: Duration = Duration::from_secs(60);

/// Longest delay after an attempt at which the checkpoint took no writes: a prepare that waits for the device gets it as soon as the disk takes
/// writes again.
pub(super) const COMMIT_RETRY_MAX: Duration = Duration::from_secs(2);

/// The drivers of a claim that serve now.
pub(super) type Serving = BTreeMap<DriverName, DriverRevision>;

/// Claims whose unprepare failed.
#[derive(Debug, Default)]
pub(crate) struct UnprepareRetries(BTreeMap<Uid, UnprepareRetry>);

#[derive(Debug)]
struct UnprepareRetry {
    attempts: u32,
    backoff: Backoff,
    at: Instant,
    /// Those that served at the last attempt.
    called: BTreeMap<DriverName, Called>,
}

#[derive(Debug)]
struct Called {
    revision: DriverRevision,
    /// Number of failures since the driver began to serve.
    tries: u32,
    /// The driver named a delay that ends then.
    not_before: Option<Instant>,
}

impl UnprepareRetry {
    /// Returns the time from which a driver that serves may be called. None: at once.
    fn due(&self, driver: &DriverName, revision: &DriverRevision) -> Option<Instant> {
        let called = self
            .called
            .get(driver)
            .filter(|called| called.revision == *revision)?;
        Some(
            called
                .not_before
                .map_or(self.at, |not_before| not_before.max(self.at)),
        )
    }
}

impl UnprepareRetries {
    /// Notes an attempt that did not finish the claim: the drivers that served at it, their problems, and the longest delay before the next one.
    pub(super) fn failed(
        &mut self,
        claim: &Uid,
        serving: Serving,
        problems: &BTreeMap<DriverName, Problem>,
        delay_max: Duration,
        now: Instant,
    ) {
        let mut before = self.0.remove(claim);
        let mut backoff = before.as_ref().map_or_else(
            || Backoff::new(UNPREPARE_RETRY_MIN, UNPREPARE_RETRY_MAX),
            |retry| retry.backoff.clone(),
        );
        let attempts = before
            .as_ref()
            .map_or(0, |retry| retry.attempts)
            .saturating_add(1);
        let called = serving.into_iter().map(|(driver, revision)| {
            let known = before
                .as_mut()
                .and_then(|retry| retry.called.remove(&driver));
            let known = known.filter(|known| known.revision.is_of_instance(&revision));
            let problem = problems.get(&driver);
            let tries = known
                .as_ref()
                .map_or(0, |known| known.tries)
                .saturating_add(problem.is_some().into());
            let earlier = known
                .filter(|known| known.revision == revision)
                .and_then(|known| known.not_before);
            let not_before = problem.map_or(earlier, |problem| not_before(problem, now));
            (
                driver,
                Called {
                    revision,
                    tries,
                    not_before,
                },
            )
        });
        let called = called.collect();
        let delay = backoff.delay();
        let retry = UnprepareRetry {
            attempts,
            at: now + delay.min(delay_max),
            backoff,
            called,
        };
        self.0.insert(claim.clone(), retry);
    }

    /// Forgets a claim that needs no retry any more.
    pub(super) fn clear(&mut self, claim: &Uid) {
        self.0.remove(claim);
    }

    pub(super) fn attempts(&self, claim: &Uid) -> u32 {
        self.0.get(claim).map_or(0, |retry| retry.attempts)
    }

    /// Returns how often a driver has failed since it was loaded. Attempts without it, and those of previous versions, do not count.
    pub(super) fn tries(&self, claim: &Uid, driver: &DriverName, revision: &DriverRevision) -> u32 {
        let called = self.0.get(claim).and_then(|retry| retry.called.get(driver));
        called
            .filter(|called| called.revision.is_of_instance(revision))
            .map_or(0, |called| called.tries)
    }

    /// Returns the time at which a claim is retried, regardless of the drivers that serve. None: it has not failed yet.
    pub(super) fn again(&self, claim: &Uid) -> Option<Instant> {
        self.0.get(claim).map(|retry| retry.at)
    }

    /// Returns the time at which a driver that serves is called again. None: at once.
    pub(super) fn due(
        &self,
        claim: &Uid,
        driver: &DriverName,
        revision: &DriverRevision,
    ) -> Option<Instant> {
        self.0.get(claim)?.due(driver, revision)
    }

    /// Returns the time at which a claim is retried. None: no driver of it serves.
    pub(super) fn next(
        &self,
        claim: &ClaimRecord,
        serving: &Serving,
        now: Instant,
    ) -> Option<Instant> {
        let needs_no_driver = claim.leaving().next().is_none();
        let Some(retry) = self.0.get(&claim.id.uid) else {
            return (needs_no_driver || !serving.is_empty()).then_some(now);
        };
        if needs_no_driver {
            return Some(retry.at);
        }
        serving
            .iter()
            .map(|(driver, revision)| retry.due(driver, revision).unwrap_or(now))
            .min()
    }

    /// The drivers to call in an attempt. A driver that does not serve is called until that is noted as its problem.
    pub(super) fn drivers(
        &self,
        claim: &ClaimRecord,
        serving: &Serving,
        now: Instant,
    ) -> Vec<DriverName> {
        let due = claim
            .leaving()
            .filter(|(driver, part)| match serving.get(*driver) {
                Some(revision) => self
                    .due(&claim.id.uid, driver, revision)
                    .is_none_or(|at| at <= now),
                None => part.problem.is_none(),
            });
        due.map(|(driver, _)| driver.clone()).collect()
    }
}

fn not_before(problem: &Problem, now: Instant) -> Option<Instant> {
    let delay = Duration::from_millis(problem.retry_after_ms?.into());
    Some(now + delay.min(RETRY_AFTER_MAX))
}
