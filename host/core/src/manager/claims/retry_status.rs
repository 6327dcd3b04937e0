//! The retry status of claims: how often their drivers failed, and when they are called again.

use std::sync::Arc;

use strum::IntoStaticStr;
use tokio::time::Instant;

use super::prepare_retry::{DriverRevision, PrepareRetry, Verdict};
use crate::manager::Manager;
use nodedock_base::clock::now_ms;
use nodedock_model::{ClaimRecord, ClaimState, ClaimValues, DriverName, ObjectRef, Problem};

/// When a driver is called again, or may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
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
        self.into()
    }

    pub fn at_ms(self) -> u64 {
        if let Self::At(at_ms) = self { at_ms } else { 0 }
    }

    fn at(at: Instant) -> Self {
        let left = at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Self::Now;
        }
        Self::At(now_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX)))
    }
}

/// The next step of one driver of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryStatus {
    pub driver: DriverName,
    /// Failed attempts since the daemon started.
    pub attempts: u32,
    pub retry: Retry,
}

/// A claim that a driver refused and that has no record any more.
#[derive(Debug, Clone, PartialEq)]
pub struct RefusedClaim {
    pub claim: ObjectRef,
    pub problem: Problem,
    /// When it was refused last; milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub retry: RetryStatus,
}

/// A claim with the retry status of its drivers.
#[derive(Debug, Clone)]
pub struct ClaimView {
    pub record: Arc<ClaimRecord>,
    /// The sysfs values that its drivers changed.
    pub values: Option<ClaimValues>,
    /// Of the drivers that are not done.
    pub retries: Vec<RetryStatus>,
}

impl Manager {
    pub fn claim_view(&self, record: Arc<ClaimRecord>) -> ClaimView {
        let leaving = |driver: &DriverName| record.is_part_leaving(driver);
        let open = record
            .drivers
            .iter()
            .filter(|(driver, part)| match record.state {
                ClaimState::Prepared => leaving(driver),
                ClaimState::Preparing => leaving(driver) || part.current().is_none(),
                ClaimState::Unpreparing => true,
            });
        let retries = open
            .map(|(driver, _)| self.retry_status(&record, driver))
            .collect();
        ClaimView {
            values: self.values.of(&record.id.uid),
            retries,
            record,
        }
    }

    fn retry_status(&self, record: &ClaimRecord, driver: &DriverName) -> RetryStatus {
        let (uid, now) = (&record.id.uid, Instant::now());
        let is_leaving = record.is_part_leaving(driver);
        let attempts = if is_leaving {
            self.unprepare_retries.lock().attempts(uid)
        } else {
            self.prepare_retries
                .lock()
                .get(uid, driver)
                .map_or(0, |retry| retry.attempts)
        };
        let retry = match self
            .registry
            .serving(driver)
            .map(|driver| DriverRevision::of(&driver))
        {
            Err(_) => Retry::WhenServing,
            Ok(revision) if is_leaving => Retry::at(
                self.unprepare_retries
                    .lock()
                    .due(uid, driver, &revision)
                    .unwrap_or(now),
            ),
            Ok(revision) => {
                let request = || record.driver_claim(driver);
                match self
                    .prepare_retries
                    .lock()
                    .verdict(uid, driver, &revision, request, now)
                {
                    Verdict::Call => Retry::Now,
                    Verdict::Later { at, .. } => Retry::at(at),
                    Verdict::Never(_) => Retry::WhenChanged,
                }
            }
        };
        RetryStatus {
            driver: driver.clone(),
            attempts,
            retry,
        }
    }

    /// Claims that were refused and rolled back, by UID. They are listed until they are requested again.
    pub fn refused_claims(&self) -> Vec<RefusedClaim> {
        let refused: Vec<PrepareRetry> = self.prepare_retries.lock().iter().cloned().collect();
        let table = self.table();
        let unknown = refused
            .into_iter()
            .filter(|retry| table.claim(retry.claim.uid.as_str()).is_none());
        unknown.map(|retry| self.refused_claim(retry)).collect()
    }

    fn refused_claim(&self, refused: PrepareRetry) -> RefusedClaim {
        let retry = match self.registry.serving(&refused.driver) {
            Err(_) => Retry::WhenServing,
            Ok(driver) if refused.revision != DriverRevision::of(&driver) => Retry::Now,
            Ok(_) => refused.again.map_or(Retry::WhenChanged, Retry::at),
        };
        let retry = RetryStatus {
            driver: refused.driver,
            attempts: refused.attempts,
            retry,
        };
        RefusedClaim {
            claim: refused.claim,
            problem: refused.problem,
            at_ms: refused.at_ms,
            retry,
        }
    }
}
