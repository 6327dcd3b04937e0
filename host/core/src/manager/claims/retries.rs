//! Retries of claims: how often their drivers failed, and when they are called again.
//!
//! Receives the results of calls, and decides which calls are due. Wakes the task that retries unprepares.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use strum::IntoStaticStr;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::machine::{DriverResult, PrepareStep, UnprepareResult};
use super::prepare_retry::{
    self, CallAdmission, CalledDriver, DriverRevision, FailedPrepare, PrepareRetries, PrepareRetry,
};
use super::unprepare_retry::{COMMIT_RETRY_MAX, Serving, UNPREPARE_RETRY_MAX, UnprepareRetries};
use crate::records::RecordStore;
use crate::records::values::RecordedValues;
use crate::registry::Registry;
use nodedock_base::clock::now_ms;
use nodedock_base::woken;
use nodedock_model::{ClaimRecord, ClaimState, ClaimValues, DriverName, ObjectRef, Problem, Uid};

/// Time at which a driver is called again, or may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Retry {
    Now,
    /// Milliseconds since the Unix epoch.
    At(u64),
    /// The driver is called as soon as it serves.
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
    /// Time of the last refusal; milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub retry: RetryStatus,
}

/// A claim with the retry status of its drivers.
#[derive(Debug, Clone)]
pub struct ClaimView {
    pub record: Arc<ClaimRecord>,
    /// The sysfs values that its drivers changed.
    pub values: Option<ClaimValues>,
    /// Retry status of the drivers that are not done.
    pub retries: Vec<RetryStatus>,
}

/// Delay after the start before an interrupted release is completed without all drivers of the claim: installed drivers are loaded by then.
pub(crate) const RELEASE_GRACE: Duration = Duration::from_secs(15);

/// The owner of the failures of drivers, and of the times at which they are called again. In memory.
pub struct Retries {
    records: Arc<RecordStore>,
    registry: Registry,
    values: Arc<RecordedValues>,
    prepares: Mutex<PrepareRetries>,
    unprepares: Mutex<UnprepareRetries>,
    /// Wakes the task that retries unprepares.
    unprepare_failed: Notify,
    started: Instant,
}

impl Retries {
    pub(in crate::manager) fn new(
        records: Arc<RecordStore>,
        registry: Registry,
        values: Arc<RecordedValues>,
    ) -> Self {
        Self {
            records,
            registry,
            values,
            prepares: Mutex::default(),
            unprepares: Mutex::default(),
            unprepare_failed: Notify::new(),
            started: Instant::now(),
        }
    }

    pub fn claim_view(&self, record: Arc<ClaimRecord>) -> ClaimView {
        let open = record
            .drivers
            .iter()
            .filter(|(driver, part)| match record.state {
                ClaimState::Prepared => record.is_part_leaving(driver),
                ClaimState::Preparing => record.is_part_leaving(driver) || part.current().is_none(),
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
            self.unprepares.lock().attempts(uid)
        } else {
            self.prepares
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
                self.unprepares
                    .lock()
                    .due(uid, driver, &revision)
                    .unwrap_or(now),
            ),
            Ok(revision) => {
                match self.prepares.lock().admission_of(
                    uid,
                    driver,
                    &revision,
                    || record.driver_claim(driver),
                    now,
                ) {
                    CallAdmission::Call => Retry::Now,
                    CallAdmission::Later { at, .. } => Retry::at(at),
                    CallAdmission::Never(_) => Retry::WhenChanged,
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
        let refused: Vec<PrepareRetry> = self.prepares.lock().iter().cloned().collect();
        let table = self.records.table();
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

    /// Decides whether the drivers may be called now or have to back off.
    pub(super) fn admit_calls(
        &self,
        record: Arc<ClaimRecord>,
        drivers: Vec<DriverName>,
    ) -> PrepareStep {
        let retries = self.prepares.lock();
        let now = Instant::now();
        let admissions = drivers.into_iter().map(|name| {
            let Ok(driver) = self.registry.serving(&name) else {
                return (name, CallAdmission::Call);
            };
            let revision = DriverRevision::of(&driver);
            let admission = retries.admission_of(
                &record.id.uid,
                &name,
                &revision,
                || record.driver_claim(&name),
                now,
            );
            (name, admission)
        });
        let admissions: Vec<_> = admissions.collect();
        prepare_retry::admission(record, admissions, now)
    }

    /// Notes which drivers failed, for the next request of the same claim.
    pub(super) fn note_results(
        &self,
        pod: Option<&ObjectRef>,
        record: &ClaimRecord,
        results: &[DriverResult],
        called: &[Option<CalledDriver>],
    ) {
        if record.is_of_plugin() {
            // Kubelets call a plugin again with the next try of the pod.
            return;
        }
        let mut retries = self.prepares.lock();
        for (
            DriverResult {
                driver, outcome, ..
            },
            called,
        ) in results.iter().zip(called)
        {
            match (outcome, called) {
                (Ok(_), _) => retries.clear(&record.id.uid, driver),
                (Err(problem), Some((revision, _))) => {
                    let request = &record.driver_claim(driver);
                    let failed = FailedPrepare {
                        pod,
                        request,
                        driver,
                        revision,
                        problem,
                    };
                    retries.note(&failed, Instant::now(), now_ms());
                }
                // The driver was not there to be called.
                (Err(_), None) => {}
            }
        }
    }

    /// Retries an unprepare that did not end. `is_disk`: because the checkpoint takes no writes.
    pub(super) fn retry_unprepare(
        &self,
        record: &ClaimRecord,
        results: &[UnprepareResult],
        is_disk: bool,
    ) {
        let delay_max = if is_disk {
            COMMIT_RETRY_MAX
        } else {
            UNPREPARE_RETRY_MAX
        };
        let problems = results
            .iter()
            .filter_map(|(driver, outcome, _)| Some((driver.clone(), outcome.clone().err()?)));
        let serving = self.serving_of(record);
        self.unprepares.lock().failed(
            &record.id.uid,
            serving,
            &problems.collect(),
            delay_max,
            Instant::now(),
        );
        woken::note();
        self.unprepare_failed.notify_one();
    }

    /// Those drivers of the parts to unprepare that serve now.
    pub(super) fn serving_of(&self, record: &ClaimRecord) -> Serving {
        let serving = record.leaving().filter_map(|(driver, _)| {
            let serving = self.registry.serving(driver).ok()?;
            Some((driver.clone(), DriverRevision::of(&serving)))
        });
        serving.collect()
    }

    /// Returns the time at which an unprepare is retried. None: when a driver of the claim serves.
    pub(super) fn next_try(&self, record: &ClaimRecord, now: Instant) -> Option<Instant> {
        if !record.is_leaving() {
            return None;
        }
        let serving = self.serving_of(record);
        if record.releasing.is_some() {
            return Some(self.next_release(record, &serving, now));
        }
        self.unprepares.lock().next(record, &serving, now)
    }

    /// Returns the time at which a release that was begun is finished. At a start no driver serves yet: the release waits for drivers for
    /// [`RELEASE_GRACE`].
    fn next_release(&self, record: &ClaimRecord, serving: &Serving, now: Instant) -> Instant {
        let next = self.unprepares.lock().again(&record.id.uid).unwrap_or(now);
        let all_serve = serving.len() == record.drivers.len();
        if all_serve {
            next
        } else {
            next.max(self.started + RELEASE_GRACE)
        }
    }

    /// The drivers to call if the claim is retried now.
    pub(super) fn due_drivers(&self, record: &ClaimRecord) -> Vec<DriverName> {
        let serving = self.serving_of(record);
        self.unprepares
            .lock()
            .drivers(record, &serving, Instant::now())
    }

    /// Returns how often a revision of a driver has failed to unprepare a claim since it began to serve.
    pub(super) fn unprepare_tries(
        &self,
        claim: &Uid,
        driver: &DriverName,
        revision: &DriverRevision,
    ) -> u32 {
        self.unprepares.lock().tries(claim, driver, revision)
    }

    /// Forgets that a claim was not unprepared.
    pub(super) fn clear_unprepare(&self, claim: &Uid) {
        self.unprepares.lock().clear(claim);
    }

    /// Forgets the failures of a driver to prepare a claim: the next prepare calls it.
    pub(super) fn clear_prepare(&self, claim: &Uid, driver: &DriverName) {
        self.prepares.lock().clear(claim, driver);
    }

    /// Forgets refused prepares by the pods that requested them.
    pub(in crate::manager) fn forget_pods(&self, is_gone: impl Fn(&ObjectRef) -> bool) {
        self.prepares
            .lock()
            .forget(|pod, _| pod.is_some_and(&is_gone));
    }

    /// Forgets all failures for a claim.
    pub(super) fn forget_claim(&self, claim: &Uid) {
        self.unprepares.lock().clear(claim);
        self.prepares.lock().forget(|_, of| of.uid == *claim);
    }

    /// Wakes the task that retries unprepares.
    pub(super) fn wake(&self) {
        woken::note();
        self.unprepare_failed.notify_one();
    }

    /// Resolves when a claim was not unprepared since the last time. The permit stays until it is consumed.
    pub(super) async fn woken(&self) {
        self.unprepare_failed.notified().await;
    }
}
