//! Which refusals stand: whether a driver that refused a claim may be asked for it again, and when.
//!
//! Is told what drivers refused and when; says of the next request whether it is the same one and must wait. In memory: after a
//! restart a driver may be asked once more. No clock, no IO, no task.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::driver::{Driver, DriverIdentity, Published};
use nodedock_base::backoff::Backoff;
use nodedock_model::{DriverClaim, DriverKind, DriverName, ObjectRef, Problem, Uid, limit};

/// A driver as it stands: another version, grant, config, instance or inventory is another one.
#[derive(Debug, Clone)]
pub(super) struct DriverMark {
    kind: DriverKind,
    /// Of this loading or registration. A weak pointer keeps its address from being used again.
    instance: Weak<DriverIdentity>,
    published: Option<Weak<Published>>,
}

impl DriverMark {
    pub(super) fn of(driver: &Driver) -> Self {
        let published = driver.inventory.as_ref().map(|inventory| Arc::downgrade(&inventory.borrow()));
        Self { kind: driver.identity.kind, instance: Arc::downgrade(&driver.identity), published }
    }

    /// Whether it is the same loading or registration, whatever devices it has.
    pub(super) fn is_of_instance(&self, other: &Self) -> bool {
        self.instance.ptr_eq(&other.instance)
    }
}

impl PartialEq for DriverMark {
    fn eq(&self, other: &Self) -> bool {
        let published = match (&self.published, &other.published) {
            (Some(one), Some(other)) => one.ptr_eq(other),
            (one, other) => one.is_none() && other.is_none(),
        };
        self.is_of_instance(other) && published
    }
}

/// What a driver may be asked of a claim now.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    Ask,
    /// The driver wants time, or failed again and again.
    Later {
        at: Instant,
        problem: Problem,
    },
    /// The same answer would come until the request or the driver changes.
    Never(Problem),
}

/// What becomes of a claim some of whose drivers refused it before.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Admission {
    /// These may be asked; the others keep the problem that they had.
    Ask {
        drivers: Vec<DriverName>,
        held_back: Vec<(DriverName, Problem)>,
    },
    /// So little time is left that it is waited out.
    Wait {
        at: Instant,
        problem: Problem,
    },
    Refuse(Problem),
}

/// Puts the verdicts of a claim's drivers together. What one refuses for good is not asked of the others.
pub(super) fn admission(verdicts: Vec<(DriverName, Verdict)>, now: Instant) -> Admission {
    let (mut drivers, mut held_back, mut soonest) = (Vec::new(), Vec::new(), None::<(Instant, Problem)>);
    for (driver, verdict) in verdicts {
        match verdict {
            Verdict::Never(problem) => return Admission::Refuse(problem),
            Verdict::Ask => drivers.push(driver),
            Verdict::Later { at, problem } => {
                if soonest.as_ref().is_none_or(|(known, _)| at < *known) {
                    soonest = Some((at, problem.clone()));
                }
                held_back.push((driver, problem));
            }
        }
    }
    match soonest {
        Some((at, problem)) if at - now <= limit::PREPARE_RETRY_PATIENCE => Admission::Wait { at, problem },
        Some((_, problem)) if drivers.is_empty() => Admission::Refuse(problem),
        _ => Admission::Ask { drivers, held_back },
    }
}

/// A refusal that stands.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub(super) claim: ObjectRef,
    pub(super) driver: DriverName,
    pub(super) problem: Problem,
    /// How often the driver refused this request.
    pub(super) attempts: u32,
    /// When it refused last; milliseconds since the Unix epoch.
    pub(super) at_ms: u64,
    /// Before it nobody asks again. None: the request or the driver must change.
    pub(super) again: Option<Instant>,
    /// None: it was a kubelet that asked.
    pod: Option<ObjectRef>,
    request: u64,
    mark: DriverMark,
    backoff: Backoff,
    /// Its place among all refusals, by age.
    noted: u64,
}

impl Refusal {
    /// Whether the driver is still the one that refused.
    pub(super) fn is_of(&self, mark: &DriverMark) -> bool {
        self.mark == *mark
    }
}

/// A driver's refusal of a request, as it is noted.
pub(super) struct Refused<'a> {
    /// None: it was a kubelet that asked.
    pub(super) pod: Option<&'a ObjectRef>,
    pub(super) request: &'a DriverClaim,
    pub(super) driver: &'a DriverName,
    pub(super) mark: &'a DriverMark,
    pub(super) problem: &'a Problem,
}

/// The refusals that stand, by claim and driver.
pub(super) struct Refusals {
    known: BTreeMap<(Uid, DriverName), Refusal>,
    hasher: RandomState,
    notes: u64,
    max: usize,
}

impl Default for Refusals {
    fn default() -> Self {
        Self::bounded(limit::REFUSALS_MAX)
    }
}

impl Refusals {
    /// With room for `max` refusals.
    pub(super) fn bounded(max: usize) -> Self {
        Self { known: BTreeMap::new(), hasher: RandomState::new(), notes: 0, max }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub(super) fn get(&self, claim: &Uid, driver: &DriverName) -> Option<&Refusal> {
        self.known.get(&(claim.clone(), driver.clone()))
    }

    /// By claim and driver.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Refusal> {
        self.known.values()
    }

    /// Whether a driver may be asked. `request` is made only if there is something to compare it with.
    pub(super) fn verdict(
        &self,
        claim: &Uid,
        driver: &DriverName,
        mark: &DriverMark,
        request: impl FnOnce() -> DriverClaim,
        now: Instant,
    ) -> Verdict {
        let Some(refusal) = self.get(claim, driver).filter(|refusal| refusal.is_of(mark)) else {
            return Verdict::Ask;
        };
        if refusal.request != self.hasher.hash_one(request()) {
            return Verdict::Ask;
        }
        match refusal.again {
            None => Verdict::Never(refusal.problem.clone()),
            Some(at) if at <= now => Verdict::Ask,
            Some(at) => {
                let problem = refusal.problem.clone().retry_after(round_up(at - now));
                Verdict::Later { at, problem }
            }
        }
    }

    /// Notes what a driver refused.
    pub(super) fn note(&mut self, refused: &Refused<'_>, now: Instant, at_ms: u64) {
        let request = self.hasher.hash_one(refused.request);
        let key = (refused.request.id.uid.clone(), refused.driver.clone());
        let before = self.known.remove(&key);
        let same = before.filter(|known| known.mark == *refused.mark && known.request == request);
        let first = Backoff::new(limit::PREPARE_RETRY_MIN, limit::PREPARE_RETRY_MAX);
        let (attempts, mut backoff) =
            same.map_or_else(|| (0, first), |known| (known.attempts, known.backoff));
        let again = match refused.problem.retry_after_ms {
            _ if lasts(refused) => None,
            Some(ms) => Some(now + Duration::from_millis(ms.into()).min(limit::RETRY_AFTER_MAX)),
            // Whoever asks again at once often succeeds.
            None if attempts == 0 => Some(now),
            None => Some(now + backoff.delay()),
        };
        self.make_room();
        self.notes += 1;
        let refusal = Refusal {
            claim: refused.request.id.clone(),
            driver: refused.driver.clone(),
            problem: refused.problem.clone(),
            attempts: attempts.saturating_add(1),
            at_ms,
            again,
            pod: refused.pod.cloned(),
            request,
            mark: refused.mark.clone(),
            backoff,
            noted: self.notes,
        };
        self.known.insert(key, refusal);
    }

    /// The oldest goes where there is no room for one more.
    fn make_room(&mut self) {
        while self.known.len() >= self.max {
            let oldest = self.known.iter().min_by_key(|(_, refusal)| refusal.noted);
            let Some(key) = oldest.map(|(key, _)| key.clone()) else { return };
            self.known.remove(&key);
        }
    }

    /// The driver took the claim, or whoever asked for its part wants it no more.
    pub(super) fn taken(&mut self, claim: &Uid, driver: &DriverName) {
        self.known.remove(&(claim.clone(), driver.clone()));
    }

    /// Forgets what was refused to pods that leave, and of claims that are given up.
    pub(super) fn forget(&mut self, given_up: impl Fn(Option<&ObjectRef>, &ObjectRef) -> bool) {
        self.known.retain(|_, refusal| !given_up(refusal.pod.as_ref(), &refusal.claim));
    }
}

/// Whether only a change helps. A native plugin's word for that is the status of a whole call, and kubelets come again whatever it
/// is: plugins answer so while they wait for the API server.
fn lasts(refused: &Refused<'_>) -> bool {
    refused.mark.kind == DriverKind::Wasm && refused.problem.kind.is_permanent()
}

/// Whole milliseconds, so that who waits for them does not come too early.
fn round_up(delay: Duration) -> Duration {
    Duration::from_millis(u64::try_from(delay.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
}
