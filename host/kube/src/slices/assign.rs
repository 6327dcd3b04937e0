//! Distribution of a pool's devices over slices. Pure.
//!
//! A device stays in its slice as long as it fits there, so that a changed device changes one slice. A device without a slice goes to the
//! first one with room, or to a new one. A slice that is too full, because devices grew or one of them became heavy, is halved. All
//! devices are distributed again only if that takes fewer than half the slices.

use std::collections::{BTreeMap, BTreeSet};

use super::entry::Entry;
use nodedock_model::limit;

/// Bytes of a slice's devices as JSON: an API server stores objects of at most 1.5 MiB.
const SLICE_BYTES_MAX: usize = 1 << 20;

/// The devices of one desired slice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Assignment {
    /// Index of the given slice that it continues.
    pub(super) slice: Option<usize>,
    pub(super) devices: BTreeSet<String>,
}

/// Fill level of a slice.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    devices: usize,
    heavy: usize,
    bytes: usize,
}

impl Load {
    fn of<'a>(devices: impl Iterator<Item = &'a Entry>) -> Self {
        devices.fold(Self::default(), Self::with)
    }

    fn with(self, device: &Entry) -> Self {
        Self {
            devices: self.devices + 1,
            heavy: self.heavy + usize::from(device.is_heavy()),
            bytes: self.bytes + device.bytes + 1,
        }
    }

    /// A single device always fits.
    fn fits(self) -> bool {
        let max = if self.heavy > 0 {
            limit::SLICE_HEAVY_DEVICES_MAX
        } else {
            limit::SLICE_DEVICES_MAX
        };
        self.devices <= max && (self.bytes <= SLICE_BYTES_MAX || self.devices <= 1)
    }
}

/// Returns whether all devices and `more_bytes` fit into one slice.
pub(super) fn fit_one_slice(devices: &BTreeMap<String, Entry>, more_bytes: usize) -> bool {
    let load = Load::of(devices.values());
    Load {
        bytes: load.bytes + more_bytes,
        ..load
    }
    .fits()
}

/// Distributes all devices. `slices` are the devices of the present slices, in the order in which they are filled.
pub(super) fn assign(
    devices: &BTreeMap<String, Entry>,
    slices: &[BTreeSet<String>],
) -> Vec<Assignment> {
    let mut unassigned: BTreeSet<&String> = devices.keys().collect();
    let (mut assigned, mut halved) = (Vec::new(), BTreeSet::new());
    for (index, present) in slices.iter().enumerate() {
        let mut kept: Vec<&String> = present
            .iter()
            .filter_map(|name| unassigned.take(name))
            .collect();
        while !Load::of(kept.iter().map(|name| &devices[*name])).fits() {
            unassigned.extend(kept.split_off(kept.len().div_ceil(2)));
            halved.insert(index);
        }
        assigned.push(Assignment {
            slice: Some(index),
            devices: kept.into_iter().cloned().collect(),
        });
    }
    fill(devices, unassigned.into_iter(), &halved, &mut assigned);
    assigned.retain(|slice| !slice.devices.is_empty());
    let fresh = assign_afresh(devices, slices.len());
    if assigned.len() > 2 * fresh.len() {
        fresh
    } else {
        assigned
    }
}

/// Puts each device into the first slice with room that is not closed, or into a new one.
fn fill<'a>(
    devices: &BTreeMap<String, Entry>,
    unassigned: impl Iterator<Item = &'a String>,
    closed: &BTreeSet<usize>,
    assigned: &mut Vec<Assignment>,
) {
    let mut loads: Vec<Load> = assigned
        .iter()
        .map(|slice| Load::of(slice.devices.iter().map(|name| &devices[name])))
        .collect();
    for name in unassigned {
        let device = &devices[name];
        let mut open = loads
            .iter()
            .enumerate()
            .filter(|(index, _)| !closed.contains(index));
        let index = open
            .find(|(_, load)| load.with(device).fits())
            .map(|(index, _)| index);
        let index = index.unwrap_or_else(|| {
            assigned.push(Assignment::default());
            loads.push(Load::default());
            loads.len() - 1
        });
        loads[index] = loads[index].with(device);
        assigned[index].devices.insert(name.clone());
    }
}

/// Distributes the devices in the order of their names, into the present slices one after the other.
fn assign_afresh(devices: &BTreeMap<String, Entry>, slices: usize) -> Vec<Assignment> {
    let mut assigned: Vec<Assignment> = Vec::new();
    let mut load = Load::default();
    for (name, device) in devices {
        if assigned.is_empty() || !load.with(device).fits() {
            let slice = Some(assigned.len()).filter(|index| *index < slices);
            assigned.push(Assignment {
                slice,
                devices: BTreeSet::new(),
            });
            load = Load::default();
        }
        load = load.with(device);
        assigned
            .last_mut()
            .expect("one was pushed")
            .devices
            .insert(name.clone());
    }
    assigned
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plain(index: usize) -> (String, Entry) {
        let name = format!("d{index:04}");
        (name.clone(), Entry::from(json!({ "name": name })))
    }

    fn heavy(index: usize) -> (String, Entry) {
        let name = format!("d{index:04}");
        let taints = json!([{ "key": "k", "effect": "NoSchedule" }]);
        (
            name.clone(),
            Entry::from(json!({ "name": name, "taints": taints })),
        )
    }

    fn present(slices: &[Assignment]) -> Vec<BTreeSet<String>> {
        slices.iter().map(|slice| slice.devices.clone()).collect()
    }

    fn counts(slices: &[Assignment]) -> Vec<usize> {
        slices.iter().map(|slice| slice.devices.len()).collect()
    }

    #[test]
    fn slices_split_at_device_limits() {
        for (count, each, expected) in [
            (0, plain as fn(usize) -> _, vec![]),
            (1, plain, vec![1]),
            (128, plain, vec![128]),
            (129, plain, vec![128, 1]),
            (64, heavy, vec![64]),
            (129, heavy, vec![64, 64, 1]),
        ] {
            let devices = (0..count).map(each).collect();
            assert_eq!(counts(&assign(&devices, &[])), expected);
        }
    }

    #[test]
    fn replaced_device_moves_no_other() {
        let mut devices: BTreeMap<_, _> = (0..300).map(plain).collect();
        let before = assign(&devices, &[]);
        devices.remove("d0130");
        devices.extend([plain(1000)]);
        let after = assign(&devices, &present(&before));
        assert_eq!(counts(&after), [128, 128, 44]);
        assert!(after[1].devices.contains("d1000"));
        assert_eq!(
            (&after[0].devices, &after[2].devices),
            (&before[0].devices, &before[2].devices)
        );
    }

    #[test]
    fn heavy_device_halves_slice_once() {
        let mut devices: BTreeMap<_, _> = (0..128).map(plain).collect();
        let full = assign(&devices, &[]);
        devices.extend([heavy(100)]);
        let halved = assign(&devices, &present(&full));
        assert_eq!(
            (counts(&halved), halved[0].slice, halved[1].slice),
            (vec![64, 64], Some(0), None)
        );
        devices.extend([heavy(3), heavy(101)]);
        assert_eq!(
            present(&assign(&devices, &present(&halved))),
            present(&halved)
        );
        devices.extend((0..128).map(plain));
        assert_eq!(
            present(&assign(&devices, &present(&halved))),
            present(&halved)
        );
    }

    #[test]
    fn many_sparse_slices_become_few() {
        let all: BTreeMap<_, _> = (0..1024).map(plain).collect();
        let before = present(&assign(&all, &[]));
        let left: BTreeMap<_, _> = (0..1024).step_by(128).map(plain).collect();
        let after = assign(&left, &before);
        assert_eq!((counts(&after), after[0].slice), (vec![8], Some(0)));
        assert_eq!(counts(&assign(&left, &present(&after))), [8]);
    }

    #[test]
    fn large_devices_are_split_by_bytes() {
        let large = |index: usize| {
            let name = format!("d{index:04}");
            let texts = vec!["x".repeat(64); 4096];
            (
                name.clone(),
                Entry::from(json!({ "name": name, "attributes": { "a": { "strings": texts } } })),
            )
        };
        let devices: BTreeMap<_, _> = (0..10).map(large).collect();
        let slices = assign(&devices, &[]);
        assert_eq!(counts(&slices), [3, 3, 3, 1]);
        let together = vec![devices.keys().cloned().collect()];
        assert!(assign(&devices, &together).len() >= 4);
    }
}
