//! Which drivers are offered to a kubelet. Pure.
//!
//! A driver is offered from the first time that it serves, or from the start when it was offered before. It stays while anything of it
//! is here, whatever its state: only when its file or its registration is gone for a while is it offered no more. Claims that the
//! kubelet prepared with it prolong that: without the driver's socket it could not even learn that an operator released the claim.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::bridge::BridgeTimes;
use nodedock_core::registry::DriverNames;
use nodedock_model::DriverName;

/// The drivers that are offered; those of which nothing is here, until when.
pub(super) struct OfferedNames {
    times: BridgeTimes,
    offered: BTreeMap<DriverName, Option<Instant>>,
}

impl OfferedNames {
    pub(super) fn new(
        times: BridgeTimes,
        remembered: impl IntoIterator<Item = DriverName>,
        now: Instant,
    ) -> Self {
        let until = Some(now + times.remembered);
        Self {
            times,
            offered: remembered.into_iter().map(|name| (name, until)).collect(),
        }
    }

    /// The drivers that are offered now. `prepared` gives those with prepared claims, and is called only if that decides something.
    pub(super) fn update(
        &mut self,
        here: &DriverNames,
        prepared: impl FnOnce() -> BTreeSet<DriverName>,
        now: Instant,
    ) -> BTreeSet<DriverName> {
        self.offered
            .extend(here.serving.iter().map(|name| (name.clone(), None)));
        let is_here = |name: &DriverName| here.serving.contains(name) || here.known.contains(name);
        let all_here = self.offered.keys().all(is_here);
        let (prepared, times) = (
            if all_here {
                BTreeSet::new()
            } else {
                prepared()
            },
            self.times,
        );
        self.offered.retain(|name, until| {
            if is_here(name) {
                *until = None;
                return true;
            }
            let end = until.get_or_insert(now + times.gone);
            if prepared.contains(name) {
                *end = (*end).max(now + times.prepared);
            }
            now < *end
        });
        self.offered.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Scene {
        offers: OfferedNames,
        start: Instant,
    }

    fn names(words: &str) -> BTreeSet<DriverName> {
        words
            .split_whitespace()
            .map(|name| DriverName::new(name).unwrap())
            .collect()
    }

    impl Scene {
        fn new(remembered: &str) -> Self {
            let (start, seconds) = (Instant::now(), Duration::from_secs);
            let times = BridgeTimes {
                gone: seconds(5),
                prepared: seconds(100),
                remembered: seconds(50),
                ..BridgeTimes::default()
            };
            Self {
                offers: OfferedNames::new(times, names(remembered), start),
                start,
            }
        }

        /// The drivers that are offered so many seconds after the start.
        fn at(&mut self, seconds: u64, serving: &str, known: &str, prepared: &str) -> String {
            let here = DriverNames {
                serving: names(serving),
                known: names(known),
            };
            let now = self.start + Duration::from_secs(seconds);
            let offered = self.offers.update(&here, || names(prepared), now);
            offered
                .iter()
                .map(DriverName::as_str)
                .collect::<Vec<_>>()
                .join(" ")
        }
    }

    #[test]
    fn a_driver_is_offered_from_when_it_first_serves_for_as_long_as_anything_of_it_is_here() {
        let mut scene = Scene::new("");
        assert_eq!(scene.at(0, "", "a b", ""), "", "blocked or loading");
        assert_eq!(scene.at(1, "a", "a b", ""), "a");
        assert_eq!(
            scene.at(1000, "", "a b", ""),
            "a",
            "failed, lost or replaced"
        );
        assert_eq!(
            scene.at(1001, "", "b", ""),
            "a",
            "a file that is replaced is gone for a moment"
        );
        assert_eq!(scene.at(1005, "", "", ""), "a");
        assert_eq!(scene.at(1006, "", "", ""), "");
        assert_eq!(scene.at(1007, "", "a", ""), "", "it begins again");
        assert_eq!(scene.at(1008, "a", "a", ""), "a");
    }

    #[test]
    fn a_driver_that_comes_back_in_time_was_never_gone() {
        let mut scene = Scene::new("");
        scene.at(0, "a", "a", "");
        assert_eq!(scene.at(1, "", "", ""), "a");
        assert_eq!(scene.at(4, "", "a", ""), "a");
        assert_eq!(scene.at(60, "", "a", ""), "a");
    }

    #[test]
    fn a_driver_of_before_a_restart_is_offered_at_once_and_withdrawn_if_it_never_comes() {
        let mut scene = Scene::new("a b");
        assert_eq!(scene.at(0, "", "", ""), "a b");
        assert_eq!(scene.at(49, "a", "a", ""), "a b");
        assert_eq!(scene.at(50, "a", "a", ""), "a");
    }

    #[test]
    fn claims_that_a_kubelet_holds_keep_a_gone_driver_and_a_while_beyond() {
        let mut scene = Scene::new("b");
        scene.at(0, "a", "a", "a b");
        assert_eq!(scene.at(1000, "", "", "a b"), "a b");
        assert_eq!(scene.at(1099, "", "", ""), "a b");
        assert_eq!(scene.at(1100, "", "", ""), "");
    }
}
