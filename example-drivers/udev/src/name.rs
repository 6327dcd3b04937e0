//! Names of devices: stable over replugging, and unique in their pool.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_sdk::{dns_label, dns_label_hashed};

use crate::config::NameBy;
use crate::device::Candidate;

/// Names the devices of a pool.
///
/// By their serial numbers, a device that has none, or whose name would be that of another device of the pool, is named by its IDs and its
/// port. All devices of such a group are: no name passes from one device to another when a device is plugged in.
pub(crate) fn named(candidates: Vec<Candidate>, name_by: NameBy) -> BTreeMap<String, Candidate> {
    let mut names: Vec<String> = candidates
        .iter()
        .map(|candidate| preferred_name(candidate, name_by))
        .collect();
    if name_by == NameBy::Serial {
        rename_twins(&mut names, &candidates, by_ids_and_path);
    }
    // Texts that differ in signs only are one label.
    rename_twins(&mut names, &candidates, |candidate| {
        dns_label_hashed(&candidate.path())
    });
    // Nothing but the kernel's numbers distinguishes them.
    rename_twins(&mut names, &candidates, |candidate| {
        dns_label_hashed(&candidate.key())
    });
    names.into_iter().zip(candidates).collect()
}

fn preferred_name(candidate: &Candidate, name_by: NameBy) -> String {
    match name_by {
        NameBy::Serial => candidate
            .id()
            .map_or_else(|| by_ids_and_path(candidate), |id| dns_label(&id)),
        NameBy::Port => dns_label(&candidate.path()),
        NameBy::Node => dns_label(candidate.nodes[0].path.trim_start_matches("/dev/")),
    }
}

/// The IDs keep the name from a device of another type that is plugged into the same port.
fn by_ids_and_path(candidate: &Candidate) -> String {
    let path = candidate.path();
    match candidate.usb() {
        Some(usb) => dns_label(&format!("usb-{}-{}-{path}", usb.vendor, usb.product)),
        None => dns_label(&path),
    }
}

fn rename_twins(
    names: &mut [String],
    candidates: &[Candidate],
    other: impl Fn(&Candidate) -> String,
) {
    let mut seen = BTreeSet::new();
    let twice: BTreeSet<String> = names
        .iter()
        .filter(|name| !seen.insert((*name).clone()))
        .cloned()
        .collect();
    for (name, candidate) in names
        .iter_mut()
        .zip(candidates)
        .filter(|(name, _)| twice.contains(*name))
    {
        *name = other(candidate);
    }
}
