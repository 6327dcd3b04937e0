//! Drivers that are offered to a kubelet. Pure.
//!
//! A driver is offered from the first time that it serves, or from the start if it was offered before. The state of the driver does not
//! matter: the offer ends only when the driver's file or registration has been gone for a while. Claims that the kubelet prepared with the
//! driver prolong the offer: without the driver's socket the kubelet could not learn that an operator released the claim.

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
    fn driver_is_offered_while_it_exists() {
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
    fn driver_returning_in_time_stays_offered() {
        let mut scene = Scene::new("");
        scene.at(0, "a", "a", "");
        assert_eq!(scene.at(1, "", "", ""), "a");
        assert_eq!(scene.at(4, "", "a", ""), "a");
        assert_eq!(scene.at(60, "", "a", ""), "a");
    }

    #[test]
    fn offer_before_restart_expires_without_driver() {
        let mut scene = Scene::new("a b");
        assert_eq!(scene.at(0, "", "", ""), "a b");
        assert_eq!(scene.at(49, "a", "a", ""), "a b");
        assert_eq!(scene.at(50, "a", "a", ""), "a");
    }

    #[test]
    fn prepared_claims_prolong_a_drivers_offer() {
        let mut scene = Scene::new("b");
        scene.at(0, "a", "a", "a b");
        assert_eq!(scene.at(1000, "", "", "a b"), "a b");
        assert_eq!(scene.at(1099, "", "", ""), "a b");
        assert_eq!(scene.at(1100, "", "", ""), "");
    }
}
