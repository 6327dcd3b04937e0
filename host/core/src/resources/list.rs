//! Checks the list of a plugin: devices that cannot be used are left out, other faults are mended, and both are reported. Pure.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_base::printable::one_line;
use nodedock_model::limit::{LEFT_OUT_NAME_BYTES_MAX, LEFT_OUT_SHOWN_MAX};
use nodedock_model::{
    ExtendedResource, LeftOut, LeftOutDevice, PluginDevice, Problem, ProblemCode, limit,
};

/// Bytes of a device's id, which is in the checkpoint and in every response: the longest in use have about 100.
const DEVICE_ID_BYTES_MAX: usize = 512;

/// Characters of an id in a message.
const ID_SHOWN_MAX: usize = 64;

/// Name of a device whose id is empty.
const NO_ID: &str = "(no ID)";

/// A list as the host uses it.
#[derive(Debug, Default)]
pub(crate) struct Screened {
    /// The usable devices by id.
    pub(crate) devices: BTreeMap<String, PluginDevice>,
    pub(crate) left_out: LeftOut,
    /// Faults of devices that are used.
    pub(crate) faults: Faults,
}

/// The faults of a list that cost no device.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    twice: usize,
    nodes: usize,
    /// One of the faulty devices.
    example: Option<String>,
}

impl Faults {
    fn note(&mut self, id: &str) {
        self.example
            .get_or_insert_with(|| id.chars().take(ID_SHOWN_MAX).collect());
    }

    /// None: the list has no faults.
    pub(crate) fn problem(&self, resource: &ExtendedResource) -> Option<Problem> {
        let counted = [
            (self.twice, "are listed again and count once"),
            (self.nodes, "name NUMA nodes that no machine has"),
        ];
        let found = counted.iter().filter(|(count, _)| *count > 0);
        let faults: Vec<_> = found
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if faults.is_empty() {
            return None;
        }
        let example = self
            .example
            .as_ref()
            .map(|id| format!(" (such as {id:?})"))
            .unwrap_or_default();
        let message = format!(
            "of the devices that the plugin of {resource} lists, {}{example}",
            faults.join(", ")
        );
        Some(Problem::invalid(ProblemCode::DeviceListFaulty, message))
    }
}

/// Devices that are not used: their number, and as many of them as are shown.
#[derive(Default)]
struct Unused {
    count: usize,
    devices: BTreeSet<LeftOutDevice>,
}

impl Unused {
    fn add(&mut self, id: &str, reason: &str) {
        self.count += 1;
        let name = if id.is_empty() { NO_ID } else { id };
        let name = one_line(name, LEFT_OUT_NAME_BYTES_MAX);
        self.devices.insert(LeftOutDevice::new(name, reason));
        if self.devices.len() > LEFT_OUT_SHOWN_MAX {
            self.devices.pop_last();
        }
    }
}

/// Checks a list, of which at most `max` devices are used. A device that is listed twice is healthy if both entries say so.
pub(crate) fn screen(listed: &[PluginDevice], max: usize) -> Screened {
    let mut devices: BTreeMap<String, PluginDevice> = BTreeMap::new();
    let (mut faults, mut unused) = (Faults::default(), Unused::default());
    for device in listed {
        if device.id.is_empty() {
            unused.add("", "the plugin lists it without an ID");
        } else if device.id.len() > DEVICE_ID_BYTES_MAX {
            let reason = format!(
                "its ID has {} bytes, and at most {DEVICE_ID_BYTES_MAX} are used",
                device.id.len()
            );
            unused.add(&device.id, &reason);
        } else if let Some(known) = devices.get_mut(&device.id) {
            known.healthy &= device.healthy;
            faults.twice += 1;
            faults.note(&device.id);
        } else {
            devices.insert(device.id.clone(), with_real_nodes(device, &mut faults));
        }
    }
    // By id, so that a plugin that lists in another order each time has the same devices each time.
    if let Some(first) = devices.keys().nth(max).cloned() {
        let reason = format!("only the first {max} devices by ID are used");
        for id in devices.split_off(&first).into_keys() {
            unused.add(&id, &reason);
        }
    }
    Screened {
        devices,
        left_out: LeftOut::counted(unused.count, unused.devices.into_iter().collect()),
        faults,
    }
}

fn with_real_nodes(device: &PluginDevice, faults: &mut Faults) -> PluginDevice {
    let mut device = device.clone();
    device.numa_nodes.sort_unstable();
    device.numa_nodes.dedup();
    let named = device.numa_nodes.len();
    device
        .numa_nodes
        .retain(|node| *node <= limit::NUMA_NODE_ID_MAX);
    device.numa_nodes.truncate(limit::NUMA_NODES_MAX);
    if device.numa_nodes.len() < named {
        faults.nodes += 1;
        faults.note(&device.id);
    }
    device
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::{device, resource, sick};

    fn words(faults: &Faults) -> String {
        faults
            .problem(&resource("gpu"))
            .map(|problem| problem.message)
            .unwrap_or_default()
    }

    #[test]
    fn good_list_is_accepted_unchanged() {
        let screened = screen(&[device("b", &[0]), sick("a")], 10);
        let devices = screened.devices;
        assert_eq!(
            (devices.len(), devices["a"].healthy, devices["b"].healthy),
            (2, false, true)
        );
        assert_eq!(screened.faults.problem(&resource("gpu")), None);
        assert_eq!(screened.left_out, LeftOut::default());
        assert_eq!(screen(&[], 10).devices.len(), 0);
    }

    #[test]
    fn faulty_entries_are_reported() {
        let long = "x".repeat(DEVICE_ID_BYTES_MAX + 1);
        let fits = "x".repeat(DEVICE_ID_BYTES_MAX);
        let Screened {
            devices,
            left_out,
            faults,
        } = screen(
            &[
                device("", &[]),
                device(&long, &[]),
                device(&fits, &[]),
                device("a", &[1, 0, 1, 5000]),
                sick("a"),
            ],
            10,
        );
        assert_eq!(devices.len(), 2);
        assert_eq!(
            (devices["a"].healthy, devices["a"].numa_nodes.clone()),
            (false, vec![0, 1])
        );
        let words = words(&faults);
        for said in ["1 are listed again", "1 name NUMA nodes"] {
            assert!(words.contains(said), "{words}");
        }
        assert!(words.len() < limit::PROBLEM_MESSAGE_BYTES_MAX, "{words}");
        let [empty, long] = left_out.devices() else {
            panic!("{left_out:?}")
        };
        assert_eq!(empty.name, NO_ID);
        assert!(empty.reason.contains("without an ID"), "{empty:?}");
        assert!(long.name.len() <= LEFT_OUT_NAME_BYTES_MAX, "{long:?}");
        assert!(long.reason.contains("513 bytes"), "{long:?}");
    }

    #[test]
    fn device_limit_ignores_list_order() {
        let mut listed: Vec<_> = (0..100_000)
            .map(|n| device(&format!("{n:06}"), &[n % 4]))
            .collect();
        let first = screen(&listed, 10_000);
        listed.reverse();
        let again = screen(&listed, 10_000);
        assert_eq!(again.devices, first.devices);
        assert_eq!(again.left_out, first.left_out);
        assert_eq!(first.devices.len(), 10_000);
        assert_eq!(first.devices.keys().next_back().unwrap(), "009999");
        let left_out = first.left_out;
        assert_eq!((left_out.count(), left_out.devices().len()), (90_000, 256));
        let beyond = &left_out.devices()[0];
        assert_eq!(beyond.name, "010000");
        assert!(beyond.reason.contains("first 10000 devices"), "{beyond:?}");
    }
}
