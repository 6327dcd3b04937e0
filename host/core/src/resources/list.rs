//! Checks the list of a plugin: faulty devices are dropped and reported. Pure.

use std::collections::BTreeMap;

use nodedock_model::{ExtendedResource, PluginDevice, Problem, ProblemCode, limit};

/// Bytes of a device's id, which is in the checkpoint and in every response: the longest in use have about 100.
const DEVICE_ID_BYTES_MAX: usize = 512;

/// Characters of an id in a message.
const ID_SHOWN_MAX: usize = 64;

/// The faults of a list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    empty: usize,
    long: usize,
    twice: usize,
    nodes: usize,
    beyond: usize,
    /// So many devices are used at most.
    max: usize,
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
            (self.empty, "without an id are dropped".to_owned()),
            (
                self.long,
                format!(
                    "with an id of more than {} bytes are dropped",
                    DEVICE_ID_BYTES_MAX
                ),
            ),
            (self.twice, "are listed again and count once".to_owned()),
            (self.nodes, "name NUMA nodes that no machine has".to_owned()),
            (
                self.beyond,
                format!("beyond the first {} by id are dropped", self.max),
            ),
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

/// The usable devices of a list, by id, at most `max`. A device that is listed twice is healthy if both entries say so.
pub(crate) fn screen(
    listed: &[PluginDevice],
    max: usize,
) -> (BTreeMap<String, PluginDevice>, Faults) {
    let mut devices: BTreeMap<String, PluginDevice> = BTreeMap::new();
    let mut faults = Faults {
        max,
        ..Faults::default()
    };
    for device in listed {
        if device.id.is_empty() {
            faults.empty += 1;
        } else if device.id.len() > DEVICE_ID_BYTES_MAX {
            faults.long += 1;
            faults.note(&device.id);
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
        faults.beyond = devices.split_off(&first).len();
        faults.note(&first);
    }
    (devices, faults)
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
        let (devices, faults) = screen(&[device("b", &[0]), sick("a")], 10);
        assert_eq!(
            (devices.len(), devices["a"].healthy, devices["b"].healthy),
            (2, false, true)
        );
        assert_eq!(faults.problem(&resource("gpu")), None);
        assert_eq!(screen(&[], 10).0.len(), 0);
    }

    #[test]
    fn faulty_entries_are_dropped_and_reported() {
        let long = "x".repeat(DEVICE_ID_BYTES_MAX + 1);
        let fits = "x".repeat(DEVICE_ID_BYTES_MAX);
        let (devices, faults) = screen(
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
        for said in [
            "1 without an id",
            "1 with an id of more",
            "1 are listed again",
            "1 name NUMA nodes",
        ] {
            assert!(words.contains(said), "{words}");
        }
        assert!(words.len() < limit::PROBLEM_MESSAGE_BYTES_MAX, "{words}");
    }

    #[test]
    fn device_limit_ignores_list_order() {
        let mut listed: Vec<_> = (0..100_000)
            .map(|n| device(&format!("{n:06}"), &[n % 4]))
            .collect();
        let (first, faults) = screen(&listed, 10_000);
        listed.reverse();
        assert_eq!(screen(&listed, 10_000).0, first);
        assert_eq!((first.len(), faults.beyond), (10_000, 90_000));
        assert_eq!(first.keys().next_back().unwrap(), "009999");
        assert!(
            words(&faults).contains("90000 beyond the first 10000"),
            "{}",
            words(&faults)
        );
    }
}
