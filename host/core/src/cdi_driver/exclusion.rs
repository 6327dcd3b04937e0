//! Which devices of CDI specs no two claims have at once. Pure.
//!
//! Devices with hardware in common exclude each other, except for partitions of one parent: each has nodes of its own beside those of the
//! parent. The answer is the identity strings of each device, of which a claim holds all: two devices that exclude each other have one in common,
//! and others have none.

use std::collections::{BTreeMap, BTreeSet};

use super::merge::CdiDevice;
use nodedock_model::limit::IDENTITIES_MAX;

/// The identity strings of each device, in its order; an error says why there are none.
pub(super) fn identities(
    devices: &[CdiDevice],
    functions: &[Option<String>],
) -> Vec<Result<Vec<String>, String>> {
    let users = users(devices);
    let is_exclusive = |of: usize, path: &String| {
        let mut others = users[path.as_str()].iter();
        others.all(|other| *other == of || excludes(&devices[of], &devices[*other]))
    };
    let of_device = |(at, device): (usize, &CdiDevice)| {
        let mut needed = BTreeSet::new();
        for other in in_the_way(devices, &users, at) {
            let mut common = device
                .hardware
                .intersection(&devices[other].hardware)
                .filter(|path| is_exclusive(at, path) && is_exclusive(other, path));
            needed.insert(match common.next() {
                Some(path) => of_hardware(path),
                None => of_pair(device, &devices[other]),
            });
        }
        if needed.len() > IDENTITIES_MAX {
            let (count, max) = (needed.len(), IDENTITIES_MAX);
            return Err(format!(
                "it overlaps with other devices in {count} ways, and at most {max} can be kept from other claims: leave its kind out of `cdiDriver.kinds`"
            ));
        }
        let mut identities: Vec<_> = needed.into_iter().collect();
        // Others of the function that may be in use at the same time are parts of it.
        let function = functions[at].iter().filter(|function| {
            let mut others =
                (0..devices.len()).filter(|other| functions[*other].as_ref() == Some(*function));
            others.all(|other| other == at || excludes(device, &devices[other]))
        });
        let exclusive = device.hardware.iter().filter(|path| is_exclusive(at, path));
        let more = function
            .map(|function| format!("pci:{function}"))
            .chain(exclusive.map(of_hardware));
        for identity in more {
            if identities.len() < IDENTITIES_MAX && !identities.contains(&identity) {
                identities.push(identity);
            }
        }
        Ok(identities)
    };
    devices.iter().enumerate().map(of_device).collect()
}

/// Devices by hardware that they have.
fn users(devices: &[CdiDevice]) -> BTreeMap<&str, Vec<usize>> {
    let mut users: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, device) in devices.iter().enumerate() {
        for path in &device.hardware {
            users.entry(path).or_default().push(at);
        }
    }
    users
}

/// Devices that a device excludes.
fn in_the_way(
    devices: &[CdiDevice],
    users: &BTreeMap<&str, Vec<usize>>,
    of: usize,
) -> BTreeSet<usize> {
    let device = &devices[of];
    let by_hardware = device
        .hardware
        .iter()
        .flat_map(|path| users[path.as_str()].iter().copied());
    let is_relative = |other: &usize| {
        device.is_parent_of(&devices[*other]) || devices[*other].is_parent_of(device)
    };
    let by_name = (0..devices.len()).filter(is_relative);
    by_hardware
        .chain(by_name)
        .filter(|other| *other != of && excludes(device, &devices[*other]))
        .collect()
}

fn excludes(one: &CdiDevice, other: &CdiDevice) -> bool {
    if one.is_parent_of(other) || other.is_parent_of(one) {
        return true;
    }
    let are_parts = one.kind == other.kind
        && one.is_partition()
        && other.is_partition()
        && !one.hardware.is_subset(&other.hardware)
        && !other.hardware.is_subset(&one.hardware);
    !are_parts && !one.hardware.is_disjoint(&other.hardware)
}

/// An interface is itself an identity, and the host finds the hardware of a node by its path.
fn of_hardware(path: &String) -> String {
    if path.starts_with('/') {
        format!("dev:{path}")
    } else {
        path.clone()
    }
}

fn of_pair(one: &CdiDevice, other: &CdiDevice) -> String {
    let mut pair = [one.qualified(), other.qualified()];
    pair.sort();
    format!("cdi:{}", pair.join(","))
}
