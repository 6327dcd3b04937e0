//! Decides when a driver that failed to prepare a claim may be called for it again.
//!
//! Records failed prepares, and decides whether the next request is the same one and has to wait. In memory: after a restart each driver
//! may be called once more. Pure: no clock, no IO, no task.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::machine::{self, PrepareStep};
use crate::driver::{Driver, DriverIdentity, Published};
use crate::manager::claims::RETRY_AFTER_MAX;
use nodedock_base::backoff::Backoff;
use nodedock_model::{ClaimRecord, DriverClaim, DriverKind, DriverName, ObjectRef, Problem, Uid};

/// Recorded refusals, by claim and driver: many times the pods of a node, in about a MiB. The oldest is dropped first.
pub(crate) const REFUSALS_MAX: usize = 4096;

/// Backoff of prepares that a driver refused temporarily, from the second retry on; doubled up to the second. The first is short for a
/// person who retries, the second is close to a kubelet's interval.
pub(crate) const PREPARE_RETRY_MIN: Duration = Duration::from_millis(250);
pub(crate) const PREPARE_RETRY_MAX: Duration = Duration::from_secs(60);

/// Longest rest of such a delay that a request waits for: the caller hardly notices it.
const PREPARE_RETRY_PATIENCE: Duration = Duration::from_millis(500);

/// A driver as it serves: another version, grant, config, instance or inventory is another revision.
#[derive(Debug, Clone)]
pub(crate) struct DriverRevision {
    kind: DriverKind,
    /// Identity of this loading or registration. A weak pointer keeps its address from being used again.
    instance: Weak<DriverIdentity>,
    published: Option<Weak<Published>>,
}

/// A driver that was called, as it served. Holding the identity keeps the driver's file until the results are durable, though no claim
/// names it yet.
pub(super) type CalledDriver = (DriverRevision, Arc<DriverIdentity>);

impl DriverRevision {
    pub(super) fn of(driver: &Driver) -> Self {
        let published = driver
            .inventory
            .as_ref()
            .map(|inventory| Arc::downgrade(&inventory.borrow()));
        Self {
            kind: driver.identity.kind,
            instance: Arc::downgrade(&driver.identity),
            published,
        }
    }

    /// Returns whether both are of the same loading or registration, regardless of their devices.
    pub(super) fn is_of_instance(&self, other: &Self) -> bool {
        self.instance.ptr_eq(&other.instance)
    }
}

impl PartialEq for DriverRevision {
    fn eq(&self, other: &Self) -> bool {
        let published = match (&self.published, &other.published) {
            (Some(one), Some(other)) => one.ptr_eq(other),
            (one, other) => one.is_none() && other.is_none(),
        };
        self.is_of_instance(other) && published
    }
}

/// Decision whether a driver may be called for a claim now.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum CallAdmission {
    Call,
    /// The driver named a delay, or failed several times.
    Later {
        at: Instant,
        problem: Problem,
    },
    /// The driver would answer the same until the request or the driver changes.
    Never(Problem),
}

/// Combines the admissions of the drivers that an intent calls: those that may not be called yet keep their problem. If one of them never
/// prepares the claim, the others are not called.
pub(super) fn admission(
    record: Arc<ClaimRecord>,
    admissions: Vec<(DriverName, CallAdmission)>,
    now: Instant,
) -> PrepareStep {
    let (mut drivers, mut postponed, mut soonest) =
        (Vec::new(), Vec::new(), None::<(Instant, Problem)>);
    for (driver, admission) in admissions {
        match admission {
            CallAdmission::Never(problem) => return PrepareStep::Refuse(problem),
            CallAdmission::Call => drivers.push(driver),
            CallAdmission::Later { at, problem } => {
                if soonest.as_ref().is_none_or(|(known, _)| at < *known) {
                    soonest = Some((at, problem.clone()));
                }
                postponed.push((driver, problem));
            }
        }
    }
    match soonest {
        Some((at, problem)) if at - now <= PREPARE_RETRY_PATIENCE => PrepareStep::Wait {
            at: Some(at),
            problem,
        },
        Some((_, problem)) if drivers.is_empty() => PrepareStep::Refuse(problem),
        _ => PrepareStep::Call {
            record: machine::postpone(record, postponed),
            drivers,
        },
    }
}

/// A prepare that failed, and when it may be repeated.
#[derive(Debug, Clone)]
pub(super) struct PrepareRetry {
    pub(super) claim: ObjectRef,
    pub(super) driver: DriverName,
    pub(super) problem: Problem,
    /// Number of times that the driver failed this request.
    pub(super) attempts: u32,
    /// Time of the last failure; milliseconds since the Unix epoch.
    pub(super) at_ms: u64,
    /// The driver is not called before. None: the request or the driver must change.
    pub(super) again: Option<Instant>,
    /// None: a kubelet requested the claim.
    pod: Option<ObjectRef>,
    request: u64,
    /// Revision of the driver that failed.
    pub(super) revision: DriverRevision,
    backoff: Backoff,
    /// Its place among all failures, by age.
    noted: u64,
}

pub(super) struct FailedPrepare<'a> {
    /// None: a kubelet requested the claim.
    pub(super) pod: Option<&'a ObjectRef>,
    pub(super) request: &'a DriverClaim,
    pub(super) driver: &'a DriverName,
    pub(super) revision: &'a DriverRevision,
    pub(super) problem: &'a Problem,
}

impl FailedPrepare<'_> {
    /// Returns whether only a change of the driver or the request helps. A native plugin reports such errors for whole calls, also while it
    /// waits for the API server, and kubelets retry them all.
    fn is_final(&self) -> bool {
        self.revision.kind == DriverKind::Wasm && self.problem.kind.is_permanent()
    }
}

/// Failed prepares, by claim and driver.
#[derive(Default)]
pub(crate) struct PrepareRetries {
    known: BTreeMap<(Uid, DriverName), PrepareRetry>,
    hasher: RandomState,
    notes: u64,
}

impl PrepareRetries {
    pub(super) fn get(&self, claim: &Uid, driver: &DriverName) -> Option<&PrepareRetry> {
        self.known.get(&(claim.clone(), driver.clone()))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PrepareRetry> {
        self.known.values()
    }

    /// Decides whether a driver may be called. `request` is computed only if there is something to compare it with.
    pub(super) fn admission_of(
        &self,
        claim: &Uid,
        driver: &DriverName,
        revision: &DriverRevision,
        request: impl FnOnce() -> DriverClaim,
        now: Instant,
    ) -> CallAdmission {
        let Some(retry) = self
            .get(claim, driver)
            .filter(|retry| retry.revision == *revision)
        else {
            return CallAdmission::Call;
        };
        if retry.request != self.hasher.hash_one(request()) {
            return CallAdmission::Call;
        }
        match retry.again {
            None => CallAdmission::Never(retry.problem.clone()),
            Some(at) if at <= now => CallAdmission::Call,
            Some(at) => {
                let problem = retry.problem.clone().retry_after(round_up(at - now));
                CallAdmission::Later { at, problem }
            }
        }
    }

    pub(super) fn note(&mut self, failed: &FailedPrepare<'_>, now: Instant, at_ms: u64) {
        let request = self.hasher.hash_one(failed.request);
        let key = (failed.request.id.uid.clone(), failed.driver.clone());
        let before = self.known.remove(&key);
        let same =
            before.filter(|known| known.revision == *failed.revision && known.request == request);
        let first = Backoff::new(PREPARE_RETRY_MIN, PREPARE_RETRY_MAX);
        let (attempts, mut backoff) =
            same.map_or_else(|| (0, first), |known| (known.attempts, known.backoff));
        let again = match failed.problem.retry_after_ms {
            _ if failed.is_final() => None,
            Some(ms) => Some(now + Duration::from_millis(ms.into()).min(RETRY_AFTER_MAX)),
            // The first retry often succeeds at once.
            None if attempts == 0 => Some(now),
            None => Some(now + backoff.delay()),
        };
        self.make_room();
        self.notes += 1;
        let retry = PrepareRetry {
            claim: failed.request.id.clone(),
            driver: failed.driver.clone(),
            problem: failed.problem.clone(),
            attempts: attempts.saturating_add(1),
            at_ms,
            again,
            pod: failed.pod.cloned(),
            request,
            revision: failed.revision.clone(),
            backoff,
            noted: self.notes,
        };
        self.known.insert(key, retry);
    }

    /// Removes the oldest if there is no room for one more.
    fn make_room(&mut self) {
        while self.known.len() >= REFUSALS_MAX {
            let oldest = self.known.iter().min_by_key(|(_, retry)| retry.noted);
            let Some(key) = oldest.map(|(key, _)| key.clone()) else {
                return;
            };
            self.known.remove(&key);
        }
    }

    /// Forgets the failures of a driver for a claim: it prepared the claim, or the kubelet does not want its part any more.
    pub(super) fn clear(&mut self, claim: &Uid, driver: &DriverName) {
        self.known.remove(&(claim.clone(), driver.clone()));
    }

    /// Forgets failures by their pod and claim.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(Option<&ObjectRef>, &ObjectRef) -> bool) {
        self.known
            .retain(|_, retry| !is_gone(retry.pod.as_ref(), &retry.claim));
    }
}

/// Rounds up to whole milliseconds, so that a client that waits for them is not too early.
fn round_up(delay: Duration) -> Duration {
    Duration::from_millis(u64::try_from(delay.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
}
