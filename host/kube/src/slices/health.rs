//! Which devices get the taint of unhealthy ones. Pure.
//!
//! An unhealthy device gets it at once and keeps it until it was not reported unhealthy for a while, so that a flapping device stays
//! tainted. An unhealthy device whose health becomes unknown counts as unhealthy. A taint that is in a slice without a known reason, after
//! a restart or because another instance added it, counts as if the device had been unhealthy until now.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use nodedock_model::{DeviceName, HealthReport, HealthState, PoolName};

/// Time that a device keeps the taint after its last unhealthy report: flapping must not cause a write each time.
pub(crate) const SLICE_TAINT_HOLD: Duration = Duration::from_secs(30);

/// Devices, by the names that their driver gives them.
pub(super) type Devices = BTreeSet<(PoolName, DeviceName)>;

/// The devices of one driver that were unhealthy recently.
#[derive(Debug, Clone, Default)]
pub(super) struct UnhealthyDevices(BTreeMap<(PoolName, DeviceName), Illness>);

#[derive(Debug, Clone, Copy)]
struct Illness {
    /// When the device was unhealthy last; now, as long as it is.
    last: Instant,
    is_unhealthy: bool,
    /// The device recovered, and its slice still has the taint.
    is_over: bool,
}

impl UnhealthyDevices {
    /// Takes the driver's current report, and which devices have the taint in observed slices.
    pub(super) fn update(&mut self, now: Instant, report: &HealthReport, tainted: &Devices) {
        let recovered = Illness { last: now, is_unhealthy: false, is_over: false };
        let unhealthy = Illness { is_unhealthy: true, ..recovered };
        for device in tainted {
            self.0.entry(device.clone()).or_insert(recovered);
        }
        self.0.values_mut().for_each(|illness| illness.is_unhealthy = false);
        for (device, health) in report {
            let known = self.0.get(device).is_some_and(|illness| !illness.is_over);
            if health.state == HealthState::Unhealthy || (health.state == HealthState::Unknown && known) {
                self.0.insert(device.clone(), unhealthy);
            }
        }
        for illness in self.0.values_mut() {
            illness.is_over |= !illness.is_unhealthy && now >= illness.last + SLICE_TAINT_HOLD;
        }
        self.0.retain(|device, illness| !illness.is_over || tainted.contains(device));
    }

    /// Returns the devices that are to have the taint.
    pub(super) fn devices(&self) -> Devices {
        let tainted = self.0.iter().filter(|(_, illness)| !illness.is_over);
        tainted.map(|(device, _)| device.clone()).collect()
    }

    /// Returns when the next device recovers if no further report comes.
    pub(super) fn next_recovery(&self) -> Option<Instant> {
        let recovering = self.0.values().filter(|illness| !illness.is_unhealthy && !illness.is_over);
        recovering.map(|illness| illness.last + SLICE_TAINT_HOLD).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::DeviceHealth;

    fn device() -> (PoolName, DeviceName) {
        (PoolName::new("p").unwrap(), DeviceName::new("d").unwrap())
    }

    fn report(state: HealthState) -> HealthReport {
        HealthReport::from([(device(), DeviceHealth { state, ..DeviceHealth::default() })])
    }

    fn is_tainted(devices: &UnhealthyDevices) -> bool {
        !devices.devices().is_empty()
    }

    #[test]
    fn a_device_is_tainted_at_once_and_until_it_was_healthy_for_a_while() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        let start = Instant::now();
        let mut devices = UnhealthyDevices::default();
        let mut update = |at: u64, state| {
            devices.update(start + Duration::from_secs(at), &report(state), &BTreeSet::new());
            (is_tainted(&devices), devices.next_recovery().map(|due| (due - start).as_secs()))
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
            assert_eq!(update(at, state), expected, "at {at}");
        }
    }

    #[test]
    fn a_taint_without_a_known_reason_is_kept_for_a_while_and_not_adopted_again_while_it_is_removed() {
        let (start, tainted) = (Instant::now(), BTreeSet::from([device()]));
        let mut devices = UnhealthyDevices::default();
        let mut update = |at: u64, tainted: &Devices| {
            devices.update(start + Duration::from_secs(at), &report(HealthState::Healthy), tainted);
            is_tainted(&devices)
        };
        assert!(update(0, &tainted));
        assert!(update(29, &tainted));
        assert!(!update(30, &tainted), "it is over");
        assert!(!update(35, &tainted), "the slice was not written yet");
        assert!(!update(36, &BTreeSet::new()));
        assert!(update(40, &tainted), "it was added again");
    }

    #[test]
    fn a_device_that_is_no_longer_reported_recovers_after_a_while() {
        let start = Instant::now();
        let mut devices = UnhealthyDevices::default();
        devices.update(start, &report(HealthState::Unhealthy), &BTreeSet::new());
        devices.update(start + SLICE_TAINT_HOLD / 2, &HealthReport::new(), &BTreeSet::new());
        assert!(is_tainted(&devices));
        devices.update(start + SLICE_TAINT_HOLD, &HealthReport::new(), &BTreeSet::new());
        assert!(!is_tainted(&devices));
    }
}
