//! Devices that get the taint of unhealthy ones, and its value. Pure.
//!
//! An unhealthy device gets it at once and keeps it until it was not reported unhealthy for a while, so that a flapping device stays
//! tainted. An unhealthy device whose health becomes unknown counts as unhealthy. A taint that is in a slice without a known reason, after
//! a restart or because another instance added it, counts as if the device had been unhealthy from the time of the taint until now.
//!
//! The taint keeps pods away. After a time that the operator sets it also evicts those that have the device.
//!
//! The value of a taint is the reason. It is that of the first message, or the value that is already in the slice: a message that changes
//! every second must not cause a write each time.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use nodedock_model::limit::LABEL_BYTES_MAX;
use nodedock_model::{DeviceName, DriverName, HealthReport, HealthState, PoolName, TaintEffect};

/// Time that a device keeps the taint after its last unhealthy report: flapping must not cause a write each time.
pub(crate) const SLICE_TAINT_HOLD: Duration = Duration::from_secs(30);

/// A device that became unhealthy, by the names that its driver gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnhealthyDevice {
    pub driver: DriverName,
    pub pool: PoolName,
    pub device: DeviceName,
    pub message: String,
}

/// The taint of an unhealthy device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct UnhealthyTaint {
    pub(super) value: String,
    /// `NoExecute` in place of `NoSchedule`.
    pub(super) evicts: bool,
}

impl UnhealthyTaint {
    pub(super) fn effect(&self) -> TaintEffect {
        if self.evicts {
            TaintEffect::NoExecute
        } else {
            TaintEffect::NoSchedule
        }
    }
}

/// Taints that slices have, each with the time since it was added.
pub(super) type ObservedTaints = BTreeMap<(PoolName, DeviceName), (UnhealthyTaint, Duration)>;

/// Devices by the names that their driver gives them, with their taints.
pub(super) type TaintedDevices = BTreeMap<(PoolName, DeviceName), UnhealthyTaint>;

/// The devices of one driver that were unhealthy recently.
#[derive(Debug, Clone, Default)]
pub(super) struct UnhealthyDevices {
    devices: BTreeMap<(PoolName, DeviceName), Illness>,
    /// Time for which a device has to be unhealthy until its pods are evicted; `None`: they are not.
    evict_after: Option<Duration>,
}

#[derive(Debug, Clone)]
struct Illness {
    taint: UnhealthyTaint,
    /// Time at which it was first seen unhealthy, without a recovery since then.
    since: Instant,
    /// Time for which it had already been unhealthy at `since`: the age of a taint from before a restart. It counts when the device is
    /// reported unhealthy.
    before: Duration,
    is_confirmed: bool,
    /// Last time at which the device was unhealthy; now, as long as it is.
    last: Instant,
    is_unhealthy: bool,
    /// The device recovered, and its slice still has the taint.
    is_over: bool,
}

impl UnhealthyDevices {
    #[cfg(test)]
    fn new(evict_after: Option<Duration>) -> Self {
        Self {
            devices: BTreeMap::new(),
            evict_after,
        }
    }

    /// Sets the time for which a device has to be unhealthy until its pods are evicted, from the next update on.
    pub(super) fn set_evict_after(&mut self, evict_after: Option<Duration>) {
        self.evict_after = evict_after;
    }

    /// Takes the driver's current report, and the taints in observed slices. Returns the devices that became unhealthy, and why.
    pub(super) fn update<'a>(
        &mut self,
        now: Instant,
        report: &'a HealthReport,
        tainted: &ObservedTaints,
    ) -> Vec<(&'a (PoolName, DeviceName), &'a str)> {
        let mut new = Vec::new();
        for (device, (taint, age)) in tainted {
            let illness = self
                .devices
                .entry(device.clone())
                .or_insert_with(|| Illness {
                    taint: taint.clone(),
                    since: now,
                    before: *age,
                    is_confirmed: false,
                    last: now,
                    is_unhealthy: false,
                    is_over: false,
                });
            illness.taint.value.clone_from(&taint.value);
        }
        self.devices
            .values_mut()
            .for_each(|illness| illness.is_unhealthy = false);
        for (device, health) in report {
            let known = self.devices.get(device).filter(|illness| !illness.is_over);
            let is_unhealthy = match health.state {
                HealthState::Unhealthy => true,
                HealthState::Unknown => known.is_some(),
                HealthState::Healthy => false,
            };
            if is_unhealthy {
                let observed = tainted.get(device).map(|(taint, _)| taint);
                let taint = known.map(|illness| &illness.taint).or(observed).cloned();
                if known.is_none() {
                    new.push((device, health.message.as_str()));
                }
                let taint = taint.unwrap_or_else(|| UnhealthyTaint {
                    value: taint_value(&health.message),
                    evicts: false,
                });
                let (since, before) = known.map_or((now, Duration::ZERO), |illness| {
                    (illness.since, illness.before)
                });
                let is_confirmed = health.state == HealthState::Unhealthy
                    || known.is_some_and(|known| known.is_confirmed);
                let (last, is_over) = (now, false);
                let mut illness = Illness {
                    taint,
                    since,
                    before,
                    is_confirmed,
                    last,
                    is_unhealthy,
                    is_over,
                };
                illness.taint.evicts |= self
                    .evict_after
                    .is_some_and(|after| now >= illness.due(after));
                self.devices.insert(device.clone(), illness);
            }
        }
        for illness in self.devices.values_mut() {
            illness.is_over |= !illness.is_unhealthy && now >= illness.last + SLICE_TAINT_HOLD;
            // The operator may have turned it off since the slice was written.
            illness.taint.evicts &= self.evict_after.is_some();
        }
        self.devices
            .retain(|device, illness| !illness.is_over || tainted.contains_key(device));
        new
    }

    /// Returns the devices that are to have the taint.
    pub(super) fn devices(&self) -> TaintedDevices {
        let tainted = self.devices.iter().filter(|(_, illness)| !illness.is_over);
        tainted
            .map(|(device, illness)| (device.clone(), illness.taint.clone()))
            .collect()
    }

    /// Returns when the next taint changes if no further report comes.
    pub(super) fn next_change(&self) -> Option<Instant> {
        let changes = self.devices.values().filter_map(|illness| {
            match (illness.is_unhealthy, self.evict_after) {
                (false, _) => (!illness.is_over).then(|| illness.last + SLICE_TAINT_HOLD),
                (true, Some(after)) => (!illness.taint.evicts).then(|| illness.due(after)),
                (true, None) => None,
            }
        });
        changes.min()
    }
}

impl Illness {
    /// Returns the time at which the pods of the device are evicted.
    fn due(&self, after: Duration) -> Instant {
        let before = if self.is_confirmed {
            self.before
        } else {
            Duration::ZERO
        };
        self.since + after.saturating_sub(before)
    }
}

/// The first part of a message as the value of a taint: its words, joined by dashes.
fn taint_value(message: &str) -> String {
    let first = message
        .split([':', ';', ',', '('])
        .next()
        .unwrap_or_default();
    let words = first.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')));
    let words = words
        .map(|word| word.trim_matches(['-', '_', '.']))
        .filter(|word| !word.is_empty());
    let mut value = String::new();
    for word in words {
        let dash = if value.is_empty() { "" } else { "-" };
        if value.len() + dash.len() + word.len() > LABEL_BYTES_MAX {
            break;
        }
        value = value + dash + word;
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::DeviceHealth;

    fn device() -> (PoolName, DeviceName) {
        (PoolName::new("p").unwrap(), DeviceName::new("d").unwrap())
    }

    fn report(state: HealthState) -> HealthReport {
        because(state, "")
    }

    fn because(state: HealthState, message: &str) -> HealthReport {
        HealthReport::from([(
            device(),
            DeviceHealth {
                state,
                message: message.to_owned(),
            },
        )])
    }

    fn taint(value: &str, evicts: bool) -> UnhealthyTaint {
        UnhealthyTaint {
            value: value.to_owned(),
            evicts,
        }
    }

    fn tainted(value: &str) -> ObservedTaints {
        observed(taint(value, false), 0)
    }

    fn observed(taint: UnhealthyTaint, seconds: u64) -> ObservedTaints {
        ObservedTaints::from([(device(), (taint, Duration::from_secs(seconds)))])
    }

    fn none() -> ObservedTaints {
        ObservedTaints::new()
    }

    fn is_tainted(devices: &UnhealthyDevices) -> bool {
        !devices.devices().is_empty()
    }

    #[test]
    fn taint_lasts_until_device_stays_healthy() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        let start = Instant::now();
        let mut devices = UnhealthyDevices::default();
        let mut update = |at: u64, state| {
            devices.update(start + Duration::from_secs(at), &report(state), &none());
            (
                is_tainted(&devices),
                devices.next_change().map(|due| (due - start).as_secs()),
            )
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
    fn unexplained_taint_expires_once() {
        let (start, tainted) = (Instant::now(), tainted(""));
        let mut devices = UnhealthyDevices::default();
        let mut update = |at: u64, tainted: &ObservedTaints| {
            devices.update(
                start + Duration::from_secs(at),
                &report(HealthState::Healthy),
                tainted,
            );
            is_tainted(&devices)
        };
        assert!(update(0, &tainted));
        assert!(update(29, &tainted));
        assert!(!update(30, &tainted), "it is over");
        assert!(!update(35, &tainted), "the slice was not written yet");
        assert!(!update(36, &none()));
        assert!(update(40, &tainted), "it was added again");
    }

    #[test]
    fn unreported_device_recovers() {
        let start = Instant::now();
        let mut devices = UnhealthyDevices::default();
        devices.update(start, &report(HealthState::Unhealthy), &none());
        devices.update(start + SLICE_TAINT_HOLD / 2, &HealthReport::new(), &none());
        assert!(is_tainted(&devices));
        devices.update(start + SLICE_TAINT_HOLD, &HealthReport::new(), &none());
        assert!(!is_tainted(&devices));
    }

    #[test]
    fn taint_value_is_kept_until_recovery() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        let start = Instant::now();
        let mut devices = UnhealthyDevices::default();
        let mut update = |at: u64, state, message, tainted: &ObservedTaints| {
            let report = because(state, message);
            let new = devices.update(start + Duration::from_secs(at), &report, tainted);
            (
                new.len(),
                devices.devices().remove(&device()).map(|taint| taint.value),
            )
        };
        let value = |value: &str| Some(value.to_owned());
        assert_eq!(
            update(0, Unhealthy, "90 C: throttled", &none()),
            (1, value("90-C"))
        );
        let tainted_90 = tainted("90-C");
        assert_eq!(
            update(1, Unhealthy, "91 C", &tainted_90),
            (0, value("90-C"))
        );
        assert_eq!(update(2, Healthy, "", &tainted_90), (0, value("90-C")));
        assert_eq!(update(3, Unknown, "92 C", &tainted_90), (0, value("90-C")));
        assert_eq!(update(4, Healthy, "", &tainted_90), (0, value("90-C")));
        assert_eq!(update(40, Healthy, "", &tainted_90), (0, None));
        // It is unhealthy again before the slice was written: the slice stays as it is.
        assert_eq!(
            update(41, Unhealthy, "93 C", &tainted_90),
            (1, value("90-C"))
        );
        assert_eq!(update(60, Healthy, "", &tainted_90), (0, value("90-C")));
        assert_eq!(update(111, Healthy, "", &tainted_90), (0, None));
        assert_eq!(update(112, Unhealthy, "94 C", &none()), (1, value("94-C")));
        // What another instance wrote stays too, and is not new after a restart.
        assert_eq!(update(113, Unhealthy, "95 C", &tainted("")), (0, value("")));
        let mut devices = UnhealthyDevices::default();
        assert_eq!(
            devices.update(start, &because(Unhealthy, "96 C"), &tainted_90),
            []
        );
        assert_eq!(devices.devices()[&device()], taint("90-C", false));
    }

    #[test]
    fn long_unhealthy_device_evicts_pods() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        let start = Instant::now();
        let mut devices = UnhealthyDevices::new(Some(Duration::from_secs(60)));
        let mut update = |at: u64, state| {
            devices.update(start + Duration::from_secs(at), &report(state), &none());
            let evicts = devices
                .devices()
                .remove(&device())
                .map(|taint| taint.evicts);
            (
                evicts,
                devices.next_change().map(|due| (due - start).as_secs()),
            )
        };
        for (at, state, expected) in [
            (0, Unhealthy, (Some(false), Some(60))),
            (59, Unknown, (Some(false), Some(60))),
            (60, Unhealthy, (Some(true), None)),
            (70, Healthy, (Some(true), Some(90))),
            (89, Unhealthy, (Some(true), None)),
            (100, Healthy, (Some(true), Some(119))),
            (119, Healthy, (None, None)),
            (130, Unhealthy, (Some(false), Some(190))),
        ] {
            assert_eq!(update(at, state), expected, "at {at}");
        }
        // What a slice has stays over a restart, unless it is turned off.
        let evicted = observed(taint("x", true), 0);
        for (evict_after, evicts) in [(Some(Duration::from_secs(60)), true), (None, false)] {
            let mut devices = UnhealthyDevices::new(evict_after);
            devices.update(start, &report(Unhealthy), &evicted);
            assert_eq!(devices.devices()[&device()], taint("x", evicts));
        }
    }

    #[test]
    fn eviction_delay_survives_restart() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        let start = Instant::now();
        for (age, evicts, due) in [
            (0, false, Some(60)),
            (50, false, Some(10)),
            (60, true, None),
            (900, true, None),
        ] {
            let mut devices = UnhealthyDevices::new(Some(Duration::from_secs(60)));
            devices.update(start, &report(Unhealthy), &observed(taint("x", false), age));
            let next = devices.next_change().map(|next| (next - start).as_secs());
            assert_eq!(
                (devices.devices()[&device()].evicts, next),
                (evicts, due),
                "{age}"
            );
        }
        let mut devices = UnhealthyDevices::new(Some(Duration::from_secs(60)));
        devices.update(start, &report(Unknown), &observed(taint("x", false), 900));
        assert_eq!(
            devices.devices()[&device()],
            taint("x", false),
            "it is not known to be unhealthy still"
        );
        devices.update(start, &report(Healthy), &observed(taint("x", false), 900));
        assert_eq!(
            devices.devices()[&device()],
            taint("x", false),
            "a device that is healthy now evicts no pod"
        );
    }

    #[test]
    fn taint_value_is_a_label_value() {
        let long = "a".repeat(40);
        for (message, value) in [
            ("", ""),
            ("it is too hot", "it-is-too-hot"),
            ("ECC errors: 5 in 10 s", "ECC-errors"),
            ("-- _temp._ 93.5\u{b0}C / lost, ...", "temp-93.5-C-lost"),
            ("\u{fc}ber", "ber"),
            (&format!("{long} {long}"), &long),
            (&"a".repeat(64), ""),
            (": x", ""),
        ] {
            assert_eq!(taint_value(message), value, "{message}");
        }
    }
}
