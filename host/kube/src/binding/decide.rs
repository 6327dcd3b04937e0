//! Next step for a claim for which a scheduler may wait, decided from one observation of it. Pure.
//!
//! ```text
//! open ──► prepared ──► the kubelet's, or released
//!   │ ▲        │
//!   ▼ │        ▼
//! failed    released (kept for a while, so that its condition is removed)
//! ```
//!
//! Each allocation starts again. A claim that was prepared early is never leaked: it is forgotten only when a kubelet has requested it, or
//! when it is released.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use crate::claims::ScheduledClaim;
use crate::events::camel_case;
use nodedock_base::backoff::Backoff;
use nodedock_model::{
    AllocatedDevice, Allocation, Claim, ClaimStatuses, Condition, DeviceStatus, DriverName,
    Problem, ReportedDevice, Uid,
};

/// A claim that cannot be prepared for so long counts as refused: half of the time that a scheduler waits by default (600 s), so that it
/// learns of the failure.
pub(crate) const EARLY_PREPARE_MAX: Duration = Duration::from_secs(300);

/// A claim whose pod is not nominated any more stays prepared for so long: a scheduler that failed for another reason tries again
/// within seconds.
pub(crate) const WITHDRAWN_GRACE: Duration = Duration::from_secs(60);

/// A failure is reported, and a released claim remembered, for so long.
pub(crate) const OUTCOME_KEPT: Duration = Duration::from_secs(600);

/// Interval of looks at a claim about which nothing is to be done.
pub(crate) const IDLE_LOOK: Duration = Duration::from_secs(15);

/// Backoff of looks at a claim that may be allocated at any moment, and of prepares. A scheduler nominates a pod milliseconds before it
/// allocates, but one that preempts others does so for the time that these take to end.
const LOOK_MIN: Duration = Duration::from_millis(250);
const LOOK_MAX: Duration = Duration::from_secs(30);

/// Observation of a claim.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ClaimObservation {
    /// Pods that name it and are nominated to this node.
    pub(super) nominated: BTreeSet<Uid>,
    pub(super) claim: ClaimSeen,
    pub(super) held: Held,
    pub(super) consumers: Consumers,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum ClaimSeen {
    /// It could not be read.
    Unknown,
    Gone,
    /// Not allocated, or allocated to another node.
    NotHere,
    Here(Box<ScheduledClaim>),
}

/// State of the claim with this name on this node.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Held {
    Free,
    Early {
        uid: Uid,
        allocation: Allocation,
    },
    /// A kubelet has requested it.
    Kubelet,
}

/// State of the consumers of a claim that was prepared early, if no scheduler waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Consumers {
    /// Also if it did not matter.
    Unknown,
    /// One is bound to this node: its kubelet will request the claim.
    Bound,
    /// One is not bound.
    Waiting,
    Gone,
}

/// Why a claim that was prepared early is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Gone,
    NotAllocated,
    OtherAllocation,
    Refused,
    NoPods,
    Withdrawn,
}

impl Why {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Gone => "its ResourceClaim is gone",
            Self::NotAllocated => "it is not allocated to this node any more",
            Self::OtherAllocation => "it was allocated again",
            Self::Refused => "it cannot be prepared",
            Self::NoPods => "its consumers are gone",
            Self::Withdrawn => "its pod is not nominated to this node any more",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    Prepare,
    /// The claim that was prepared early.
    Release(Uid, Why),
    /// Nothing; to be looked at again after this time at the latest.
    Wait(Duration),
    Forget,
}

/// A claim that a nominated pod names, or that was prepared early.
#[derive(Debug)]
pub(super) struct Tracked {
    attempt: Option<Attempt>,
    /// Time since which it is prepared without a nominated pod.
    withdrawn_since: Option<Instant>,
    looks: Backoff,
}

/// The preparation of one allocation.
#[derive(Debug)]
struct Attempt {
    claim: ScheduledClaim,
    since: Instant,
    state: BindingState,
}

#[derive(Debug)]
enum BindingState {
    Open {
        retry_at: Instant,
    },
    Prepared,
    Failed {
        driver: DriverName,
        problem: Problem,
        at: Instant,
    },
    Released {
        at: Instant,
    },
}

impl Default for Tracked {
    fn default() -> Self {
        Self {
            attempt: None,
            withdrawn_since: None,
            looks: Backoff::new(LOOK_MIN, LOOK_MAX),
        }
    }
}

impl Tracked {
    /// Something about the claim may have changed just now.
    pub(super) fn hurry(&mut self) {
        self.looks.reset();
    }

    pub(super) fn step(&mut self, seen: &ClaimObservation, now: Instant) -> Step {
        match &seen.claim {
            ClaimSeen::Unknown => Step::Wait(self.looks.delay()),
            _ if seen.held == Held::Kubelet => self.idle(seen),
            ClaimSeen::Gone => self.end(seen, Why::Gone),
            ClaimSeen::NotHere => self.end(seen, Why::NotAllocated),
            ClaimSeen::Here(claim) => self.step_here(seen, claim, now),
        }
    }

    /// The claim has no allocation here.
    fn end(&mut self, seen: &ClaimObservation, why: Why) -> Step {
        (self.attempt, self.withdrawn_since) = (None, None);
        match &seen.held {
            Held::Early { uid, .. } => Step::Release(uid.clone(), why),
            Held::Free | Held::Kubelet => self.look_again(seen),
        }
    }

    /// A scheduler may allocate the claim for a nominated pod at any moment.
    fn look_again(&mut self, seen: &ClaimObservation) -> Step {
        if seen.nominated.is_empty() {
            Step::Forget
        } else {
            Step::Wait(self.looks.delay())
        }
    }

    fn idle(&mut self, seen: &ClaimObservation) -> Step {
        (self.attempt, self.withdrawn_since) = (None, None);
        if seen.nominated.is_empty() {
            Step::Forget
        } else {
            Step::Wait(IDLE_LOOK)
        }
    }

    fn step_here(&mut self, seen: &ClaimObservation, claim: &ScheduledClaim, now: Instant) -> Step {
        let held = match &seen.held {
            Held::Early { uid, .. } if *uid != claim.claim.id.uid => {
                return Step::Release(uid.clone(), Why::Gone);
            }
            Held::Early { uid, allocation }
                if Some(allocation) != claim.claim.allocation.as_ref() =>
            {
                return Step::Release(uid.clone(), Why::OtherAllocation);
            }
            Held::Early { uid, .. } => Some(uid),
            Held::Free | Held::Kubelet => None,
        };
        if held.is_none() && claim.awaited.is_empty() {
            return self.idle(seen);
        }
        if !self
            .attempt
            .as_ref()
            .is_some_and(|attempt| is_same(&attempt.claim, claim))
        {
            let state = BindingState::Open { retry_at: now };
            self.attempt = Some(Attempt {
                claim: claim.clone(),
                since: now,
                state,
            });
        }
        match is_wanted(&claim.claim, &seen.nominated) {
            true => self.step_wanted(claim, held, now),
            false => self.step_unwanted(seen, held, now),
        }
    }

    /// A scheduler waits.
    fn step_wanted(&mut self, claim: &ScheduledClaim, held: Option<&Uid>, now: Instant) -> Step {
        self.withdrawn_since = None;
        let Some(attempt) = &mut self.attempt else {
            return Step::Wait(IDLE_LOOK);
        };
        // A driver that loads is not known yet.
        if claim.awaited.is_empty() {
            return Step::Wait(IDLE_LOOK);
        }
        // The devices of a driver that came later count as well.
        attempt.claim.awaited.clone_from(&claim.awaited);
        match (&attempt.state, held) {
            (BindingState::Failed { .. }, Some(uid)) => Step::Release(uid.clone(), Why::Refused),
            (BindingState::Failed { .. }, None) | (BindingState::Prepared, Some(_)) => {
                Step::Wait(IDLE_LOOK)
            }
            (BindingState::Open { retry_at }, _) if *retry_at > now => Step::Wait(*retry_at - now),
            (BindingState::Open { .. }, _) => Step::Prepare,
            (BindingState::Prepared | BindingState::Released { .. }, _) => {
                (attempt.since, attempt.state) = (now, BindingState::Open { retry_at: now });
                Step::Prepare
            }
        }
    }

    fn step_unwanted(&mut self, seen: &ClaimObservation, held: Option<&Uid>, now: Instant) -> Step {
        let Some(uid) = held else {
            let at = match self.attempt.as_ref().map(|attempt| &attempt.state) {
                Some(BindingState::Failed { at, .. } | BindingState::Released { at }) => Some(*at),
                _ => None,
            };
            return match at.is_some_and(|at| now < at + OUTCOME_KEPT) {
                true => Step::Wait(IDLE_LOOK),
                false => self.look_again(seen),
            };
        };
        match seen.consumers {
            Consumers::Unknown => Step::Wait(self.looks.delay()),
            Consumers::Gone if seen.nominated.is_empty() => Step::Release(uid.clone(), Why::NoPods),
            Consumers::Bound => {
                self.withdrawn_since = None;
                Step::Wait(IDLE_LOOK)
            }
            // A scheduler may reserve the claim for a nominated pod.
            Consumers::Waiting | Consumers::Gone => {
                let until = *self.withdrawn_since.get_or_insert(now) + WITHDRAWN_GRACE;
                if until <= now {
                    return Step::Release(uid.clone(), Why::Withdrawn);
                }
                Step::Wait((until - now).min(IDLE_LOOK))
            }
        }
    }

    /// Takes the outcome of a prepare. Returns when the claim is to be looked at again.
    pub(super) fn prepared(
        &mut self,
        outcome: Result<(), (DriverName, Problem)>,
        now: Instant,
    ) -> Duration {
        let Some(attempt) = &mut self.attempt else {
            return IDLE_LOOK;
        };
        match outcome {
            Ok(()) => {
                attempt.state = BindingState::Prepared;
                self.looks.reset();
                IDLE_LOOK
            }
            Err((driver, problem))
                if problem.kind.is_permanent() || now >= attempt.since + EARLY_PREPARE_MAX =>
            {
                attempt.state = BindingState::Failed {
                    driver,
                    problem,
                    at: now,
                };
                // What a driver has begun is to be released.
                Duration::ZERO
            }
            Err(_) => {
                let delay = self.looks.delay();
                attempt.state = BindingState::Open {
                    retry_at: now + delay,
                };
                delay
            }
        }
    }

    /// The claim was released. A failure stays one.
    pub(super) fn released(&mut self, now: Instant) {
        self.withdrawn_since = None;
        if let Some(attempt) = &mut self.attempt
            && !matches!(attempt.state, BindingState::Failed { .. })
        {
            attempt.state = BindingState::Released { at: now };
        }
    }

    /// The devices that are prepared now.
    pub(super) fn prepared_devices(&self) -> impl Iterator<Item = &AllocatedDevice> {
        let attempt = self
            .attempt
            .iter()
            .filter(|attempt| matches!(attempt.state, BindingState::Prepared));
        attempt.flat_map(Attempt::awaited_devices)
    }

    /// The claim, while it is allocated here.
    pub(super) fn claim(&self) -> Option<&Claim> {
        self.attempt.as_ref().map(|attempt| &attempt.claim.claim)
    }

    /// The driver that cannot prepare the claim, its devices, and why.
    pub(super) fn failure(&self) -> Option<(&DriverName, Vec<&AllocatedDevice>, &Problem)> {
        let attempt = self.attempt.as_ref()?;
        let BindingState::Failed {
            driver, problem, ..
        } = &attempt.state
        else {
            return None;
        };
        let devices = attempt
            .awaited_devices()
            .filter(|device| device.driver == *driver);
        Some((driver, devices.collect(), problem))
    }

    /// Returns the status to publish beside those of the claim's drivers: the failure, and the time of the allocation, which shows that the
    /// claim was allocated again.
    pub(super) fn statuses(&self) -> Option<ClaimStatuses> {
        let attempt = self.attempt.as_ref()?;
        let failed = self
            .failure()
            .into_iter()
            .flat_map(|(_, devices, problem)| {
                devices
                    .into_iter()
                    .filter_map(|device| failed(device, problem))
            });
        let claim = attempt.claim.claim.id.clone();
        Some(ClaimStatuses {
            claim,
            allocated_ms: attempt.claim.allocated_ms,
            devices: failed.collect(),
        })
    }
}

impl Attempt {
    fn awaited_devices(&self) -> impl Iterator<Item = &AllocatedDevice> {
        let devices = self
            .claim
            .claim
            .allocation
            .iter()
            .flat_map(|allocation| &allocation.devices);
        devices.filter(|device| {
            !device.binding.is_empty() && self.claim.awaited.contains(&device.driver)
        })
    }
}

/// Returns whether a scheduler waits for a claim: it is reserved for a nominated pod that names it, or for a consumer that may be the group
/// of such a pod.
pub(super) fn is_wanted(claim: &Claim, nominated: &BTreeSet<Uid>) -> bool {
    !nominated.is_empty()
        && claim
            .reserved_for
            .iter()
            .any(|consumer| !consumer.is_pod() || nominated.contains(&consumer.uid))
}

/// Returns whether two states of a claim belong to one allocation.
fn is_same(before: &ScheduledClaim, now: &ScheduledClaim) -> bool {
    (
        &before.claim.id,
        before.allocated_ms,
        &before.claim.allocation,
    ) == (&now.claim.id, now.allocated_ms, &now.claim.allocation)
}

fn failed(device: &AllocatedDevice, problem: &Problem) -> Option<ReportedDevice> {
    let condition = Condition {
        kind: device.binding.failure()?.clone(),
        status: Some(true),
        reason: camel_case(&problem.code),
        message: problem.message.clone(),
    };
    Some(ReportedDevice {
        driver: device.driver.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share_id.clone(),
        status: DeviceStatus {
            conditions: vec![condition],
            ..DeviceStatus::default()
        },
    })
}

/// Returns whether a problem is about the device, so that another device may work. Wrong parameters of a claim fail on every device, and
/// must not take one device after the other out of use.
pub(super) fn is_of_device(problem: &Problem) -> bool {
    !problem.kind.is_permanent()
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
