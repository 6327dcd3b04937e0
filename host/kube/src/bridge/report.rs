//! What a driver tells of its devices' health, as a list for a kubelet. Pure.

use crate::slices::PoolNames;
use nodedock_base::printable::cut;
use nodedock_core::driver::Published;
use nodedock_model::limit::{HEALTH_MESSAGE_BYTES_MAX, PLUGIN_ANSWER_BYTES_MAX};
use nodedock_model::{DeviceHealth, DeviceName, HealthReport, HealthState, PoolName};

/// One device in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) pool: PoolName,
    pub(super) device: DeviceName,
    pub(super) state: HealthState,
    pub(super) message: String,
}

/// What is known of a driver's health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    /// It cannot be asked now, or has told no health so far.
    NotYet,
    /// All its devices, by pool and name.
    Devices(Vec<Line>),
}

/// Bytes of a device in a message beside its words: names of 253 and 63 bytes, numbers, tags and lengths.
const LINE_BYTES: usize = 400;

/// Of a driver that publishes its devices with us: each is in the list, and of which nothing was said it is unknown. Pools have the
/// names that claims have. A pool whose name would be too long is in no slice, and so in no list.
pub(super) fn published(published: &Published, names: &PoolNames) -> Told {
    let Published { inventory, health } = published;
    let count = inventory.device_count();
    if health.is_empty() {
        return Told::NotYet;
    }
    let devices = inventory
        .pools
        .iter()
        .flat_map(|(pool, listed)| listed.devices.keys().map(move |device| (pool.clone(), device.clone())));
    let line = |key: (PoolName, DeviceName)| {
        let said = health.get(&key).cloned().unwrap_or_default();
        Some(line((names.published(&key.0).ok()?, key.1), said, count))
    };
    Told::Devices(devices.filter_map(line).collect())
}

/// Of a plugin that publishes its devices itself. None: it has no health service.
pub(super) fn native(report: Option<HealthReport>) -> Told {
    match report {
        Some(report) if !report.is_empty() => {
            let count = report.len();
            Told::Devices(report.into_iter().map(|(key, said)| line(key, said, count)).collect())
        }
        _ => Told::NotYet,
    }
}

/// The words are cut to what a kubelet keeps, and shorter where so many devices would not fit into a message that a kubelet takes.
fn line((pool, device): (PoolName, DeviceName), said: DeviceHealth, devices: usize) -> Line {
    let room = (PLUGIN_ANSWER_BYTES_MAX / devices.max(1)).saturating_sub(LINE_BYTES);
    let message = cut(&said.message, room.min(HEALTH_MESSAGE_BYTES_MAX));
    Line { pool, device, state: said.state, message }
}

#[cfg(test)]
mod tests {
    use nodedock_proto::prost::Message;

    use super::*;
    use nodedock_model::limit::DEVICES_MAX;
    use nodedock_model::{Device, Inventory, Pool};

    fn inventory(pool: &str, devices: usize) -> Inventory {
        let names = (0..devices).map(|n| DeviceName::new(format!("{n:0>63}")).unwrap());
        let devices = names.map(|name| (name, Device::default())).collect();
        let pool = (PoolName::new(pool).unwrap(), Pool { devices, ..Pool::default() });
        Inventory { pools: [pool].into() }
    }

    fn said(pool: &str, device: usize, words: &str) -> ((PoolName, DeviceName), DeviceHealth) {
        let key = (PoolName::new(pool).unwrap(), DeviceName::new(format!("{device:0>63}")).unwrap());
        (key, DeviceHealth { state: HealthState::Unhealthy, message: words.into() })
    }

    #[test]
    fn every_device_of_the_inventory_is_listed_and_no_other() {
        let health = [said("p", 0, "hot"), said("gone", 0, "")].into();
        let Told::Devices(lines) =
            published(&Published { inventory: inventory("p", 2), health }, &PoolNames::Plain)
        else {
            panic!("it tells health")
        };
        let states: Vec<_> = lines.iter().map(|line| (line.state, line.message.as_str())).collect();
        assert_eq!(states, [(HealthState::Unhealthy, "hot"), (HealthState::Unknown, "")]);
    }

    #[test]
    fn of_a_driver_that_tells_no_health_nothing_is_told() {
        let of = |devices| {
            published(
                &Published { inventory: inventory("p", devices), health: HealthReport::new() },
                &PoolNames::Plain,
            )
        };
        assert_eq!((of(0), of(1)), (Told::NotYet, Told::NotYet));
        assert_eq!(native(None), Told::NotYet);
        assert_eq!(native(Some(HealthReport::new())), Told::NotYet);
        let Told::Devices(lines) = native(Some([said("p", 7, "hot")].into())) else { panic!("it does") };
        assert_eq!((lines.len(), lines[0].message.as_str()), (1, "hot"));
    }

    #[test]
    fn as_many_devices_as_there_can_be_with_the_longest_words_fit_into_a_message() {
        let pool = ["a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(61)].join(".");
        assert_eq!(pool.len(), 253);
        let words = "é".repeat(HEALTH_MESSAGE_BYTES_MAX);
        for devices in [1, 2000, DEVICES_MAX] {
            let health = (0..devices).map(|n| said(&pool, n, &words)).collect();
            let told =
                published(&Published { inventory: inventory(&pool, devices), health }, &PoolNames::Plain);
            let Told::Devices(lines) = told else { panic!("it tells health") };
            let message = super::super::convert::health::v1::message(&lines, i64::MAX);
            assert!(message.encoded_len() <= PLUGIN_ANSWER_BYTES_MAX, "{}", message.encoded_len());
            assert!(lines[0].message.len() >= 600, "{}", lines[0].message.len());
            assert!(lines[0].message.len() <= HEALTH_MESSAGE_BYTES_MAX);
        }
    }
}
