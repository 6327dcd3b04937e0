//! Which device stands in which slice. Pure.
//!
//! A device stays where it is as long as it fits there, so that a device that changes changes one slice. What finds no place goes to
//! the first slice with room, or to a new one. A slice that has too much, since its devices became larger or one of them a heavy one,
//! is cut in half. Only where the devices could do with fewer than half the slices are all of them placed anew.

use std::collections::{BTreeMap, BTreeSet};

use super::content::Entry;
use nodedock_model::limit;

/// A slice to be: the one of the given that it was, if any, and the names of its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Bin {
    pub(super) was: Option<usize>,
    pub(super) devices: BTreeSet<String>,
}

/// A slice's room.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    count: usize,
    heavy: usize,
    bytes: usize,
}

impl Load {
    fn of<'a>(devices: impl Iterator<Item = &'a Entry>) -> Self {
        devices.fold(Self::default(), Self::with)
    }

    fn with(self, device: &Entry) -> Self {
        Self {
            count: self.count + 1,
            heavy: self.heavy + usize::from(device.is_heavy()),
            bytes: self.bytes + device.bytes() + 1,
        }
    }

    /// A single device always fits.
    fn fits(self) -> bool {
        let max = if self.heavy > 0 { limit::SLICE_HEAVY_DEVICES_MAX } else { limit::SLICE_DEVICES_MAX };
        self.count <= max && (self.bytes <= limit::SLICE_BYTES_MAX || self.count <= 1)
    }
}

/// Whether all of them fit in one slice.
pub(super) fn fit_together(devices: &BTreeMap<String, Entry>, more_bytes: usize) -> bool {
    let load = Load::of(devices.values());
    Load { bytes: load.bytes + more_bytes, ..load }.fits()
}

/// Places all devices. `standing` are the devices of the slices that are there, in the order in which room is looked for.
pub(super) fn assign(devices: &BTreeMap<String, Entry>, standing: &[BTreeSet<String>]) -> Vec<Bin> {
    let mut homeless: BTreeSet<&String> = devices.keys().collect();
    let (mut bins, mut halved) = (Vec::new(), BTreeSet::new());
    for (index, stood) in standing.iter().enumerate() {
        let mut kept: Vec<&String> = stood.iter().filter_map(|name| homeless.take(name)).collect();
        while !Load::of(kept.iter().map(|name| &devices[*name])).fits() {
            homeless.extend(kept.split_off(kept.len().div_ceil(2)));
            halved.insert(index);
        }
        bins.push(Bin { was: Some(index), devices: kept.into_iter().cloned().collect() });
    }
    fill(devices, homeless.into_iter(), &halved, &mut bins);
    bins.retain(|bin| !bin.devices.is_empty());
    let anew = anew(devices, standing.len());
    if bins.len() > 2 * anew.len() { anew } else { bins }
}

/// Puts each device into the first bin with room that is not closed, making bins where there is none.
fn fill<'a>(
    devices: &BTreeMap<String, Entry>,
    homeless: impl Iterator<Item = &'a String>,
    closed: &BTreeSet<usize>,
    bins: &mut Vec<Bin>,
) {
    let mut loads: Vec<Load> =
        bins.iter().map(|bin| Load::of(bin.devices.iter().map(|name| &devices[name]))).collect();
    for name in homeless {
        let device = &devices[name];
        let mut open = loads.iter().enumerate().filter(|(place, _)| !closed.contains(place));
        let place = open.find(|(_, load)| load.with(device).fits()).map(|(place, _)| place);
        let place = place.unwrap_or_else(|| {
            bins.push(Bin::default());
            loads.push(Load::default());
            loads.len() - 1
        });
        loads[place] = loads[place].with(device);
        bins[place].devices.insert(name.clone());
    }
}

/// All devices in the order of their names, as if there were no slices; the slices that are there are used one after the other.
fn anew(devices: &BTreeMap<String, Entry>, standing: usize) -> Vec<Bin> {
    let mut bins: Vec<Bin> = Vec::new();
    let mut load = Load::default();
    for (name, device) in devices {
        if bins.is_empty() || !load.with(device).fits() {
            let was = Some(bins.len()).filter(|index| *index < standing);
            bins.push(Bin { was, devices: BTreeSet::new() });
            load = Load::default();
        }
        load = load.with(device);
        bins.last_mut().expect("one was made").devices.insert(name.clone());
    }
    bins
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plain(index: usize) -> (String, Entry) {
        let name = format!("d{index:04}");
        (name.clone(), Entry::new(json!({ "name": name })))
    }

    fn heavy(index: usize) -> (String, Entry) {
        let name = format!("d{index:04}");
        let taints = json!([{ "key": "k", "effect": "NoSchedule" }]);
        (name.clone(), Entry::new(json!({ "name": name, "taints": taints })))
    }

    fn standing(bins: &[Bin]) -> Vec<BTreeSet<String>> {
        bins.iter().map(|bin| bin.devices.clone()).collect()
    }

    fn counts(bins: &[Bin]) -> Vec<usize> {
        bins.iter().map(|bin| bin.devices.len()).collect()
    }

    #[test]
    fn devices_are_split_at_128_and_heavy_ones_at_64() {
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
    fn a_device_goes_and_another_takes_its_room_and_nothing_else_moves() {
        let mut devices: BTreeMap<_, _> = (0..300).map(plain).collect();
        let before = assign(&devices, &[]);
        devices.remove("d0130");
        devices.extend([plain(1000)]);
        let after = assign(&devices, &standing(&before));
        assert_eq!(counts(&after), [128, 128, 44]);
        assert!(after[1].devices.contains("d1000"));
        assert_eq!((&after[0].devices, &after[2].devices), (&before[0].devices, &before[2].devices));
    }

    #[test]
    fn a_full_slice_is_halved_once_when_a_device_becomes_heavy_and_not_again() {
        let mut devices: BTreeMap<_, _> = (0..128).map(plain).collect();
        let full = assign(&devices, &[]);
        devices.extend([heavy(100)]);
        let halved = assign(&devices, &standing(&full));
        assert_eq!((counts(&halved), halved[0].was, halved[1].was), (vec![64, 64], Some(0), None));
        devices.extend([heavy(3), heavy(101)]);
        assert_eq!(standing(&assign(&devices, &standing(&halved))), standing(&halved));
        devices.extend((0..128).map(plain));
        assert_eq!(standing(&assign(&devices, &standing(&halved))), standing(&halved));
    }

    #[test]
    fn many_sparse_slices_become_few() {
        let all: BTreeMap<_, _> = (0..1024).map(plain).collect();
        let before = standing(&assign(&all, &[]));
        let left: BTreeMap<_, _> = (0..1024).step_by(128).map(plain).collect();
        let after = assign(&left, &before);
        assert_eq!((counts(&after), after[0].was), (vec![8], Some(0)));
        assert_eq!(counts(&assign(&left, &standing(&after))), [8]);
    }

    #[test]
    fn large_devices_are_split_by_their_bytes() {
        let large = |index: usize| {
            let name = format!("d{index:04}");
            let texts = vec!["x".repeat(64); 4096];
            (name.clone(), Entry::new(json!({ "name": name, "attributes": { "a": { "strings": texts } } })))
        };
        let devices: BTreeMap<_, _> = (0..10).map(large).collect();
        let bins = assign(&devices, &[]);
        assert_eq!(counts(&bins), [3, 3, 3, 1]);
        let together = vec![devices.keys().cloned().collect()];
        assert!(assign(&devices, &together).len() >= 4);
    }
}
