//! Which drivers a kubelet is offered. Pure.
//!
//! A driver is offered from the first time that it serves, or from our start when it was offered before. It stays while anything of
//! it is here, whatever its state: only when its file or its registration is gone for a while is it offered no more. What a kubelet
//! still holds of it prolongs that: without a driver's socket it could not even learn that an operator released the claim.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use nodedock_core::registry::DriverNames;
use nodedock_model::{DriverName, limit};

/// For how long drivers are offered that are not here.
#[derive(Debug, Clone, Copy)]
pub struct OfferTimes {
    /// One that went away: its file may be on its way back.
    pub gone: Duration,
    /// One of which a kubelet holds claims, from when it holds none.
    pub held: Duration,
    /// One that was offered before our start: it may take so long to load.
    pub remembered: Duration,
}

impl Default for OfferTimes {
    fn default() -> Self {
        Self {
            gone: limit::BRIDGE_GONE_GRACE,
            held: limit::BRIDGE_HELD_GRACE,
            remembered: limit::BRIDGE_REMEMBERED_GRACE,
        }
    }
}

/// The drivers that are offered.
pub(super) struct Offers {
    times: OfferTimes,
    offered: BTreeMap<DriverName, Offered>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Offered {
    /// Something of it is here.
    Here,
    /// Nothing of it is here.
    Until(Instant),
}

impl Offers {
    pub(super) fn new(
        times: OfferTimes,
        remembered: impl IntoIterator<Item = DriverName>,
        now: Instant,
    ) -> Self {
        let until = Offered::Until(now + times.remembered);
        Self { times, offered: remembered.into_iter().map(|name| (name, until)).collect() }
    }

    /// Who is offered now. `held` tells of which drivers a kubelet holds claims, and is asked only if that decides something.
    pub(super) fn turn(
        &mut self,
        here: &DriverNames,
        held: impl FnOnce() -> BTreeSet<DriverName>,
        now: Instant,
    ) -> BTreeSet<DriverName> {
        for name in &here.serving {
            self.offered.insert(name.clone(), Offered::Here);
        }
        let is_here = |name: &DriverName| here.serving.contains(name) || here.known.contains(name);
        if self.offered.keys().any(|name| !is_here(name)) {
            let (held, times) = (held(), self.times);
            self.offered.retain(|name, offered| {
                *offered = match *offered {
                    _ if is_here(name) => Offered::Here,
                    Offered::Here => Offered::Until(now + times.gone),
                    until => until,
                };
                match offered {
                    Offered::Here => true,
                    Offered::Until(until) => {
                        if held.contains(name) {
                            *until = (*until).max(now + times.held);
                        }
                        now < *until
                    }
                }
            });
        } else {
            self.offered.values_mut().for_each(|offered| *offered = Offered::Here);
        }
        self.offered.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: OfferTimes = OfferTimes {
        gone: Duration::from_secs(5),
        held: Duration::from_secs(100),
        remembered: Duration::from_secs(50),
    };

    struct Scene {
        offers: Offers,
        start: Instant,
    }

    fn names(words: &str) -> BTreeSet<DriverName> {
        words.split_whitespace().map(|name| DriverName::new(name).unwrap()).collect()
    }

    impl Scene {
        fn new(remembered: &str) -> Self {
            let start = Instant::now();
            Self { offers: Offers::new(TIMES, names(remembered), start), start }
        }

        /// Who is offered so many seconds after the start, where some serve, some are here without serving, and some are held.
        fn at(&mut self, seconds: u64, serving: &str, known: &str, held: &str) -> String {
            let here = DriverNames { serving: names(serving), known: names(known) };
            let now = self.start + Duration::from_secs(seconds);
            let offered = self.offers.turn(&here, || names(held), now);
            offered.iter().map(DriverName::as_str).collect::<Vec<_>>().join(" ")
        }
    }

    #[test]
    fn a_driver_is_offered_from_when_it_first_serves_for_as_long_as_anything_of_it_is_here() {
        let mut scene = Scene::new("");
        assert_eq!(scene.at(0, "", "a b", ""), "", "blocked or loading");
        assert_eq!(scene.at(1, "a", "a b", ""), "a");
        assert_eq!(scene.at(1000, "", "a b", ""), "a", "failed, lost or replaced");
        assert_eq!(scene.at(1001, "", "b", ""), "a", "a file that is replaced is gone for a moment");
        assert_eq!(scene.at(1005, "", "", ""), "a");
        assert_eq!(scene.at(1006, "", "", ""), "");
        assert_eq!(scene.at(1007, "", "a", ""), "", "it begins anew");
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
    fn a_driver_of_before_is_offered_at_once_and_given_up_if_it_never_comes() {
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
