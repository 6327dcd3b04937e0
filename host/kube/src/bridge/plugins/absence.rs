//! When devices that a kubelet gave are given up: nobody tells that a pod ends, so it is concluded from looks at the devices that pods
//! have. Pure.
//!
//! A kubelet's list (`v1.PodResourcesLister/List`) has the devices of containers and sidecars of pods that are not over. It never has
//! those of init containers: devices that no other container of their pod has are given up `limit::UNSEEN` after they were given,
//! whether the init container runs or not. A later Allocate takes them back at any time.

use std::collections::BTreeMap;

use tokio::time::Instant;

use nodedock_model::{ObjectRef, Uid, limit};

/// A claim at a look.
#[derive(Debug, Clone)]
pub(super) struct Looked {
    pub(super) claim: ObjectRef,
    /// When a kubelet asked for it last; after our start, that.
    pub(super) asked: Instant,
}

#[derive(Debug)]
struct Track {
    asked: Instant,
    /// A pod had some of its devices since then.
    seen: bool,
    /// Since when no pod has any, and how many looks said so.
    absent: Option<(Instant, u32)>,
}

/// What was seen of claims.
#[derive(Debug, Default)]
pub(super) struct Absences(BTreeMap<Uid, Track>);

impl Absences {
    /// The claims that are to be given up after a look; `in_use`: whether a pod has any of a claim's devices.
    pub(super) fn look(
        &mut self,
        claims: &[Looked],
        in_use: impl Fn(&Looked) -> bool,
        now: Instant,
    ) -> Vec<Looked> {
        self.0.retain(|uid, _| claims.iter().any(|claim| claim.claim.uid == *uid));
        let mut over = Vec::new();
        for claim in claims {
            let fresh = || Track { asked: claim.asked, seen: false, absent: None };
            let track = self.0.entry(claim.claim.uid.clone()).or_insert_with(fresh);
            if track.asked != claim.asked {
                *track = fresh();
            }
            if in_use(claim) {
                (track.seen, track.absent) = (true, None);
            } else if track.is_over(now) {
                over.push(claim.clone());
            }
        }
        over
    }

    /// Another kubelet: it may not know of its pods yet, so what was seen counts no more.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }
}

impl Track {
    fn is_over(&mut self, now: Instant) -> bool {
        let (since, looks) = self.absent.get_or_insert((now, 0));
        *looks += 1;
        let wait = if self.seen { limit::UNUSED } else { limit::UNSEEN };
        *looks >= limit::UNUSED_LOOKS && now >= *since + wait
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn looked(asked: Instant) -> Looked {
        Looked { claim: ObjectRef::new("nodedock", "c", "u").unwrap(), asked }
    }

    /// Looks at one claim, each after so many seconds; when it is given up.
    fn history(looks: &[(u64, bool)]) -> Option<u64> {
        let (start, mut absences) = (Instant::now(), Absences::default());
        looks.iter().find_map(|(second, used)| {
            let now = start + Duration::from_secs(*second);
            let over = absences.look(&[looked(start)], |_| *used, now);
            (!over.is_empty()).then_some(*second)
        })
    }

    #[test]
    fn devices_of_a_pod_that_ended_go_after_a_minute_and_others_after_five() {
        let (yes, no) = (true, false);
        assert_eq!(history(&[(0, yes), (30, no), (60, no), (90, no)]), Some(90));
        assert_eq!(history(&[(0, yes), (30, no), (60, yes), (90, no), (120, no), (151, no)]), Some(151));
        assert_eq!(
            history(&[(0, yes), (30, no), (500, no)]),
            Some(500),
            "two looks are enough if time has passed"
        );
        assert_eq!(history(&[(0, yes), (500, no)]), None, "one look is not");
        assert_eq!(history(&[(0, no), (30, no), (290, no), (300, no)]), Some(300));
    }

    #[test]
    fn a_claim_that_is_asked_for_again_or_meets_another_kubelet_begins_anew() {
        let (start, mut absences) = (Instant::now(), Absences::default());
        let at = |second| start + Duration::from_secs(second);
        absences.look(&[looked(start)], |_| true, start);
        absences.look(&[looked(start)], |_| false, at(30));
        assert!(absences.look(&[looked(at(31))], |_| false, at(95)).is_empty());
        absences.look(&[looked(at(31))], |_| true, at(100));
        absences.look(&[looked(at(31))], |_| false, at(130));
        absences.forget();
        assert!(absences.look(&[looked(at(31))], |_| false, at(200)).is_empty());
        assert!(absences.look(&[looked(at(31))], |_| false, at(400)).is_empty());
        assert_eq!(absences.look(&[looked(at(31))], |_| false, at(500)).len(), 1);
        absences.look(&[], |_| false, at(501));
        assert!(absences.0.is_empty());
    }

    proptest! {
        #[test]
        fn nothing_is_given_up_that_was_in_use_within_the_minute(
            looks in prop::collection::vec((1u64..200, prop::bool::weighted(0.3)), 1..60),
        ) {
            let (start, mut absences) = (Instant::now(), Absences::default());
            let (mut second, mut used_at, mut absent_looks) = (0, None, 0);
            for (after, used) in looks {
                second += after;
                let over = absences.look(&[looked(start)], |_| used, start + Duration::from_secs(second));
                absent_looks = if used { 0 } else { absent_looks + 1 };
                if used {
                    used_at = Some(second);
                }
                if !over.is_empty() {
                    prop_assert!(!used && absent_looks >= 2);
                    let idle = second - used_at.unwrap_or(0);
                    let wait = if used_at.is_some() { 60 } else { 300 };
                    prop_assert!(idle >= wait);
                }
            }
        }
    }
}
