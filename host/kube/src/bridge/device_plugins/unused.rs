//! Release of claims for devices that a kubelet allocated. A kubelet does not report that a pod ends, so the end is concluded from its
//! lists of the devices that pods use. Pure.
//!
//! Such a list (`v1.PodResourcesLister/List`) has the devices of containers and sidecars of pods that have not ended: those that a list
//! had once stay in it until their pod ends, and two lists without them are its end. It never has those of init containers: devices that no
//! list had are released five minutes after they were allocated, even if the init container still runs. A later Allocate takes them again
//! at any time. So that short pods are seen, the kubelet is called more often in the first seconds of a claim.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::bridge::BridgeTimes;
use crate::bridge::claims::DeviceClaim;
use nodedock_model::Uid;

/// Number of lists without a use of a claim's devices before they are released, regardless of the time that has passed.
const UNUSED_LOOKS: u32 = 2;

/// Time after the request for a claim in which a list is expected to have its devices: a kubelet lists them once their pod is admitted.
const EXPECTED_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Usage {
    /// A pod used some of the devices since they were requested.
    seen: bool,
    /// Time since which no pod uses any of the devices, and number of lists that showed it.
    absent: Option<(Instant, u32)>,
}

/// Use of claims in the lists so far.
#[derive(Debug)]
pub(super) struct ClaimUsage {
    /// Usage by claim and time of its last request: each new request starts a new usage.
    claims: BTreeMap<(Uid, Instant), Usage>,
    times: BridgeTimes,
}

impl ClaimUsage {
    pub(super) fn new(times: BridgeTimes) -> Self {
        Self {
            claims: BTreeMap::new(),
            times,
        }
    }

    /// Takes a list of devices in use. Returns the claims that are to be released; `in_use`: whether a pod uses any of a claim's devices.
    pub(super) fn observe(
        &mut self,
        claims: &[DeviceClaim],
        in_use: impl Fn(&DeviceClaim) -> bool,
        now: Instant,
    ) -> Vec<DeviceClaim> {
        let keys: BTreeSet<_> = claims.iter().map(key).collect();
        self.claims.retain(|known, _| keys.contains(known));
        let mut unused = Vec::new();
        for claim in claims {
            let usage = self.claims.entry(key(claim)).or_default();
            if in_use(claim) {
                (usage.seen, usage.absent) = (true, None);
                continue;
            }
            let (since, looks) = usage.absent.get_or_insert((now, 0));
            *looks += 1;
            let wait = if usage.seen {
                self.times.unused
            } else {
                self.times.unseen
            };
            if *looks >= UNUSED_LOOKS && now >= *since + wait {
                unused.push(claim.clone());
            }
        }
        unused
    }

    /// Returns the time from `now` to the next list: short while one more decides about a claim, or while a new claim has been in none.
    pub(super) fn next_list(&self, now: Instant) -> Duration {
        let is_close = |((_, requested), usage): (&(Uid, Instant), &Usage)| {
            // A driver that does not unprepare is called at the period.
            let is_ending = usage.absent.is_some_and(|(_, looks)| looks <= UNUSED_LOOKS);
            (usage.seen && is_ending) || (!usage.seen && now < *requested + EXPECTED_WITHIN)
        };
        match self.claims.iter().any(is_close) {
            true => self.times.in_use_period.min(self.times.in_use_pace),
            false => self.times.in_use_period,
        }
    }

    /// The lists are another kubelet's, which may not know its pods yet: earlier ones count no more.
    pub(super) fn reset(&mut self) {
        self.claims.clear();
    }
}

fn key(claim: &DeviceClaim) -> (Uid, Instant) {
    (claim.claim.uid.clone(), claim.requested)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use nodedock_model::{DriverName, ObjectRef};

    fn claim(requested: Instant) -> DeviceClaim {
        let claim = ObjectRef::new("nodedock", "c", "u").unwrap();
        let driver = DriverName::new("gpu.example.com").unwrap();
        DeviceClaim {
            claim,
            driver,
            devices: ["p/a".to_owned()].into(),
            requested,
        }
    }

    /// Lists after so many seconds, and whether the claim is in use in each; when it is released.
    fn history(looks: &[(u64, bool)]) -> Option<u64> {
        let (start, mut usage) = (Instant::now(), ClaimUsage::new(BridgeTimes::default()));
        looks.iter().find_map(|(second, used)| {
            let now = start + Duration::from_secs(*second);
            let over = usage.observe(&[claim(start)], |_| *used, now);
            (!over.is_empty()).then_some(*second)
        })
    }

    #[test]
    fn unused_claims_are_released_after_delay() {
        let (yes, no) = (true, false);
        assert_eq!(history(&[(0, yes), (30, no), (31, no)]), Some(31));
        assert_eq!(
            history(&[(0, yes), (30, no), (31, yes), (90, no), (92, no)]),
            Some(92)
        );
        assert_eq!(history(&[(0, yes), (500, no)]), None, "one look is not");
        assert_eq!(
            history(&[(0, no), (30, no), (290, no), (300, no)]),
            Some(300)
        );
    }

    #[test]
    fn new_request_or_kubelet_restarts_timer() {
        let (start, mut usage) = (Instant::now(), ClaimUsage::new(BridgeTimes::default()));
        let at = |second| start + Duration::from_secs(second);
        usage.observe(&[claim(start)], |_| true, start);
        usage.observe(&[claim(start)], |_| false, at(30));
        assert!(
            usage
                .observe(&[claim(at(31))], |_| false, at(40))
                .is_empty()
        );
        usage.observe(&[claim(at(31))], |_| true, at(100));
        usage.observe(&[claim(at(31))], |_| false, at(130));
        usage.reset();
        assert!(
            usage
                .observe(&[claim(at(31))], |_| false, at(200))
                .is_empty()
        );
        assert!(
            usage
                .observe(&[claim(at(31))], |_| false, at(400))
                .is_empty()
        );
        assert_eq!(usage.observe(&[claim(at(31))], |_| false, at(500)).len(), 1);
        usage.observe(&[], |_| false, at(501));
        assert!(usage.claims.is_empty());
    }

    #[test]
    fn lists_are_close_around_claim_changes() {
        let (start, mut usage) = (Instant::now(), ClaimUsage::new(BridgeTimes::default()));
        let at = |second| start + Duration::from_secs(second);
        let BridgeTimes {
            in_use_period: period,
            in_use_pace: pace,
            ..
        } = BridgeTimes::default();
        let mut next = |second, used: bool| {
            usage.observe(&[claim(start)], |_| used, at(second));
            usage.next_list(at(second))
        };
        assert_eq!(next(0, false), pace, "a pod that is admitted");
        assert_eq!(next(11, false), period, "of an init container");
        assert_eq!(next(20, true), period);
        assert_eq!(next(25, false), pace, "a pod that ended");
        assert_eq!(next(26, false), pace);
        assert_eq!(next(27, false), period, "its driver does not unprepare");
        assert_eq!(next(32, true), period);
        assert_eq!(
            ClaimUsage::new(BridgeTimes::default()).next_list(start),
            period
        );
    }

    proptest! {
        #[test]
        fn recently_used_claims_are_not_released(
            looks in prop::collection::vec((1u64..200, prop::bool::weighted(0.3)), 1..60),
        ) {
            let (start, mut usage) = (Instant::now(), ClaimUsage::new(BridgeTimes::default()));
            let (mut second, mut used_at, mut absent_looks) = (0, None, 0);
            for (after, used) in looks {
                second += after;
                let over = usage.observe(&[claim(start)], |_| used, start + Duration::from_secs(second));
                absent_looks = if used { 0 } else { absent_looks + 1 };
                if used {
                    used_at = Some(second);
                }
                if !over.is_empty() {
                    prop_assert!(!used && absent_looks >= 2);
                    let idle = second - used_at.unwrap_or(0);
                    let wait = if used_at.is_some() { 1 } else { 300 };
                    prop_assert!(idle >= wait);
                }
            }
        }
    }
}
