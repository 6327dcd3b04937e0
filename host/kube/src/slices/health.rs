//! Which devices have the taint of unhealthy ones. Pure.
//!
//! An unhealthy device has it at once, and keeps it until it was not said to be unhealthy for a while: a device that flaps is tainted
//! throughout. What is only unknown now was not said to be well. A taint that stands in a slice and that nobody remembers, since we
//! were started anew or another instance of ours wrote it, is taken for one that was added just now.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use nodedock_model::{DeviceName, HealthReport, HealthState, PoolName};

type Place = (PoolName, DeviceName);

/// The devices of one driver that were unhealthy of late.
#[derive(Debug, Clone, Default)]
pub(super) struct Sick {
    devices: BTreeMap<Place, Illness>,
}

#[derive(Debug, Clone, Copy)]
struct Illness {
    /// When it was unhealthy last; now, as long as it is.
    last: Instant,
    is_ill: bool,
    /// It is well again, and its slice still says otherwise.
    is_over: bool,
}

impl Sick {
    /// Takes what the driver says now, and which devices stand as unhealthy in slices.
    pub(super) fn look(
        &mut self,
        now: Instant,
        hold: Duration,
        report: &HealthReport,
        told: &BTreeSet<Place>,
    ) {
        for place in told {
            let adopted = Illness { last: now, is_ill: false, is_over: false };
            self.devices.entry(place.clone()).or_insert(adopted);
        }
        for illness in self.devices.values_mut() {
            illness.is_ill = false;
        }
        for (place, health) in report {
            match health.state {
                HealthState::Unhealthy => {
                    let illness = Illness { last: now, is_ill: true, is_over: false };
                    self.devices.insert(place.clone(), illness);
                }
                HealthState::Unknown => {
                    if let Some(illness) = self.devices.get_mut(place).filter(|illness| !illness.is_over) {
                        (illness.last, illness.is_ill) = (now, true);
                    }
                }
                HealthState::Healthy => {}
            }
        }
        for illness in self.devices.values_mut() {
            illness.is_over |= !illness.is_ill && now >= illness.last + hold;
        }
        self.devices.retain(|place, illness| !illness.is_over || told.contains(place));
    }

    /// Devices of a pool that are to have the taint.
    pub(super) fn of_pool(&self, pool: &PoolName) -> BTreeSet<DeviceName> {
        let standing = self.devices.iter().filter(|((of, _), illness)| of == pool && !illness.is_over);
        standing.map(|((_, device), _)| device.clone()).collect()
    }

    /// When the next one is over if nothing else is said.
    pub(super) fn due(&self, hold: Duration) -> Option<Instant> {
        let healing = self.devices.values().filter(|illness| !illness.is_ill && !illness.is_over);
        healing.map(|illness| illness.last + hold).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::DeviceHealth;

    const HOLD: Duration = Duration::from_secs(30);

    fn place() -> Place {
        (PoolName::new("p").unwrap(), DeviceName::new("d").unwrap())
    }

    fn report(state: HealthState) -> HealthReport {
        HealthReport::from([(place(), DeviceHealth { state, ..DeviceHealth::default() })])
    }

    fn is_tainted(sick: &Sick) -> bool {
        !sick.of_pool(&place().0).is_empty()
    }

    #[test]
    fn a_device_is_tainted_at_once_and_until_it_was_well_for_a_while() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        let start = Instant::now();
        let mut sick = Sick::default();
        let mut look = |at: u64, state| {
            sick.look(start + Duration::from_secs(at), HOLD, &report(state), &BTreeSet::new());
            (is_tainted(&sick), sick.due(HOLD).map(|due| (due - start).as_secs()))
        };
        for (at, state, expected) in [
            (0, Unknown, (false, None)),
            (1, Unhealthy, (true, None)),
            (50, Unhealthy, (true, None)),
            (51, Healthy, (true, Some(80))),
            (60, Unhealthy, (true, None)),
            (61, Healthy, (true, Some(90))),
            (70, Unknown, (true, None)),
            (99, Healthy, (true, Some(100))),
            (100, Healthy, (false, None)),
            (101, Unknown, (false, None)),
        ] {
            assert_eq!(look(at, state), expected, "at {at}");
        }
    }

    #[test]
    fn a_taint_that_nobody_remembers_is_kept_for_a_while_and_not_taken_up_again_while_it_is_removed() {
        let (start, told) = (Instant::now(), BTreeSet::from([place()]));
        let mut sick = Sick::default();
        let mut look = |at: u64, told: &BTreeSet<Place>| {
            sick.look(start + Duration::from_secs(at), HOLD, &report(HealthState::Healthy), told);
            is_tainted(&sick)
        };
        assert!(look(0, &told));
        assert!(look(29, &told));
        assert!(!look(30, &told), "it is over");
        assert!(!look(35, &told), "the slice was not written yet");
        assert!(!look(36, &BTreeSet::new()));
        assert!(look(40, &told), "somebody added it again");
    }

    #[test]
    fn what_a_driver_says_nothing_of_any_more_is_no_longer_ill_after_a_while() {
        let start = Instant::now();
        let mut sick = Sick::default();
        sick.look(start, HOLD, &report(HealthState::Unhealthy), &BTreeSet::new());
        sick.look(start + HOLD / 2, HOLD, &HealthReport::new(), &BTreeSet::new());
        assert!(is_tainted(&sick));
        sick.look(start + HOLD, HOLD, &HealthReport::new(), &BTreeSet::new());
        assert!(!is_tainted(&sick));
    }
}
