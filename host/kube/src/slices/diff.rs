//! The writes that make one pool's slices as desired. Pure.
//!
//! Given the desired content and the observed slices, it returns the writes in their order: obsolete slices are deleted first, then
//! differing ones updated, then missing ones created. After all of them, or after any of them and a new diff, the pool is complete: each
//! device once, every slice of one generation and with the right count.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::api::ObjectMeta;

use super::assign::{assign, fit_one_slice};
use super::slice::{self, Content, Slice, SlicePool, SliceSpec};
use crate::facts::NodeFacts;
use crate::pools::PoolKey;
use nodedock_model::DriverName;

/// Bytes of the generated prefix of a slice's name: an API server truncates a longer one, and appends five letters.
pub(crate) const SLICE_PREFIX_BYTES_MAX: usize = 58;

/// Place of a pool's counter sets that the server accepts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum CounterPlacement {
    /// Slice of their own: Kubernetes 1.35 and later.
    #[default]
    OwnSlice,
    /// Slice of the devices that consume them: before 1.35.
    WithDevices,
}

/// A pool as it is to be.
pub(super) struct DesiredPool<'a> {
    pub(super) key: &'a PoolKey,
    /// The owner of the slices.
    pub(super) node: &'a NodeFacts,
    /// Empty: the pool is to have no slices.
    pub(super) content: &'a Content,
    pub(super) counters: CounterPlacement,
    pub(super) known: &'a KnownPool,
}

#[derive(Debug)]
pub(super) enum Write {
    Delete(Arc<Slice>),
    Update(Slice),
    Create(Slice),
}

/// The writes for a pool, and what it has after them.
#[derive(Debug)]
pub(super) struct Diff {
    pub(super) writes: Vec<Write>,
    pub(super) generation: i64,
    pub(super) slices: usize,
}

fn device_names(slice: &Slice) -> BTreeSet<String> {
    slice.spec.content.devices.keys().cloned().collect()
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "an API server before Kubernetes 1.35 takes devices with shared counters in one slice only, and the {devices} devices of the \
     pool do not fit in one"
)]
pub(super) struct DoesNotFit {
    devices: usize,
}

/// Known state of a pool's slices, including deleted ones.
#[derive(Debug, Default)]
pub(super) struct KnownPool {
    /// Times at which taints were added, by device and taint.
    taint_times: BTreeMap<(String, String), String>,
    /// The devices of each slice, by the index in its name: a deleted slice is created again with the devices that it had.
    layout: BTreeMap<u32, BTreeSet<String>>,
    generation: i64,
}

impl KnownPool {
    /// Takes the observed slices, and forgets taints that are no longer desired.
    pub(super) fn observe(&mut self, slices: &[Arc<Slice>], desired: &Content) {
        let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
        self.generation = newest.unwrap_or(self.generation).max(0);
        for (name, device) in slices.iter().flat_map(|slice| &slice.spec.content.devices) {
            let known = device
                .taints()
                .filter_map(|(taint, time)| Some((taint, time?.to_owned())));
            self.taint_times
                .extend(known.map(|(taint, time)| ((name.clone(), taint), time)));
        }
        let devices = desired.devices.iter();
        let desired: BTreeSet<_> = devices
            .flat_map(|(name, device)| device.taints().map(move |(t, _)| (name.clone(), t)))
            .collect();
        self.taint_times.retain(|taint, _| desired.contains(taint));
    }

    /// Takes the slices after all writes of a diff.
    pub(super) fn written(&mut self, slices: &[Arc<Slice>], desired: &Content, generation: i64) {
        self.observe(slices, desired);
        self.generation = generation;
        self.layout = slices
            .iter()
            .filter_map(|slice| Some((index_of(slice::name(slice))?, device_names(slice))))
            .collect();
    }

    fn apply_times(&self, content: &mut Content) {
        for (name, device) in &mut content.devices {
            *device =
                device.with_times(|taint| self.taint_times.get(&(name.clone(), taint)).cloned());
        }
    }
}

/// A slice of the result, and the observed one that it continues.
struct Target<'a> {
    observed: Option<&'a Arc<Slice>>,
    content: Content,
}

impl Target<'_> {
    /// Returns whether the content differs, or the slice does not exist.
    fn is_changed(&self) -> bool {
        self.observed
            .is_none_or(|slice| !slice.spec.holds(&self.content))
    }
}

/// Returns the writes for a pool of which `slices` are observed.
pub(super) fn diff(desired: &DesiredPool<'_>, slices: &[Arc<Slice>]) -> Result<Diff, DoesNotFit> {
    let mut sorted: Vec<&Arc<Slice>> = slices.iter().collect();
    sorted.sort_by_key(|slice| (order(slice), slice::name(slice)));
    let (terminating, present): (Vec<_>, Vec<_>) = sorted
        .iter()
        .copied()
        .partition(|slice| slice::is_terminating(slice));
    let targets = targets(desired, &present)?;
    let kept: BTreeSet<&str> = targets
        .iter()
        .filter_map(|target| Some(slice::name(target.observed?)))
        .collect();
    let obsolete: Vec<_> = present
        .iter()
        .copied()
        .filter(|slice| !kept.contains(slice::name(slice)))
        .collect();
    let generation = generation(desired, &present, &terminating, &targets, obsolete.len());
    let count = i64::try_from(targets.len()).expect("a bounded number of slices");
    let pool = SlicePool {
        name: desired.key.pool.clone(),
        generation,
        resource_slice_count: count,
    };
    let slice = |metadata: ObjectMeta, target: &Target<'_>| {
        let (driver, node_name) = (desired.key.driver.clone(), desired.node.name.to_string());
        let mut content = target.content.clone();
        desired.known.apply_times(&mut content);
        let spec = SliceSpec {
            driver,
            node_name,
            pool: pool.clone(),
            content,
            sent: None,
        };
        Slice {
            types: None,
            metadata,
            spec,
            status: None,
        }
    };
    let mut writes: Vec<Write> = obsolete.into_iter().cloned().map(Write::Delete).collect();
    for target in &targets {
        let outdated = target.observed.filter(|slice| {
            target.is_changed()
                || slice.spec.pool != pool
                || !slice::is_owned_by(slice, desired.node)
        });
        let metadata = outdated.map(|observed| slice::updated_metadata(observed, desired.node));
        writes.extend(metadata.map(|metadata| Write::Update(slice(metadata, target))));
    }
    let mut taken: BTreeSet<u32> = sorted
        .iter()
        .filter_map(|slice| index_of(slice::name(slice)))
        .collect();
    for target in targets.iter().filter(|target| target.observed.is_none()) {
        let index = (0..)
            .find(|index| !taken.contains(index))
            .expect("there are more indices than slices");
        taken.insert(index);
        let name_prefix = name_prefix(index, &desired.key.driver, desired.node.name.as_str());
        writes.push(Write::Create(slice(
            slice::new_metadata(name_prefix, desired.node),
            target,
        )));
    }
    Ok(Diff {
        writes,
        generation,
        slices: targets.len(),
    })
}

fn targets<'a>(
    desired: &DesiredPool<'_>,
    present: &[&'a Arc<Slice>],
) -> Result<Vec<Target<'a>>, DoesNotFit> {
    let Content {
        devices,
        shared_counters,
        ..
    } = desired.content;
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    if !shared_counters.is_empty() && desired.counters == CounterPlacement::WithDevices {
        let bytes = shared_counters.values().map(|set| set.bytes + 1).sum();
        if !fit_one_slice(devices, bytes) {
            return Err(DoesNotFit {
                devices: devices.len(),
            });
        }
        return Ok(vec![Target {
            observed: present.first().copied(),
            content: desired.content.clone(),
        }]);
    }
    let mut rest = present.to_vec();
    let mut targets = Vec::new();
    if !shared_counters.is_empty() {
        let observed = rest
            .iter()
            .position(|slice| !slice.spec.content.shared_counters.is_empty())
            .map(|index| rest.remove(index));
        let content = Content {
            shared_counters: shared_counters.clone(),
            ..Content::default()
        };
        targets.push(Target { observed, content });
    }
    targets.extend(device_targets(desired, present, &rest));
    Ok(targets)
}

/// Distributes the devices over the slices in `rest` and those that were deleted since the last known layout.
fn device_targets<'a>(
    desired: &DesiredPool<'_>,
    present: &[&'a Arc<Slice>],
    rest: &[&'a Arc<Slice>],
) -> Vec<Target<'a>> {
    let mut slices: Vec<_> = rest
        .iter()
        .map(|slice| (order(slice), Some(*slice), device_names(slice)))
        .collect();
    // A device in an observed slice stays there, regardless of the last layout.
    let placed: BTreeSet<String> = slices
        .iter()
        .flat_map(|(.., names)| names)
        .cloned()
        .collect();
    let deleted = desired
        .known
        .layout
        .iter()
        .filter(|(index, _)| present.iter().all(|slice| order(slice) != **index));
    slices.extend(
        deleted.map(|(index, names)| (*index, None, names.difference(&placed).cloned().collect())),
    );
    slices.sort_by_key(|(index, ..)| *index);
    let names: Vec<_> = slices.iter().map(|(.., names)| names.clone()).collect();
    let assignments = assign(&desired.content.devices, &names).into_iter();
    let targets = assignments.map(|assignment| {
        let devices = assignment.devices.into_iter().map(|name| {
            let device = desired.content.devices[&name].clone();
            (name, device)
        });
        let pool_fields = desired.content.pool_fields.clone();
        let content = Content {
            devices: devices.collect(),
            pool_fields,
            ..Content::default()
        };
        Target {
            observed: assignment.slice.and_then(|index| slices[index].1),
            content,
        }
    });
    targets.collect()
}

/// Returns the generation for all slices of the pool.
///
/// Readers take the slices of the highest generation as the pool as soon as their number is the count that they state. So the generation
/// stays if at most one slice changes, or if a half-written generation, of which each written slice is as desired, can be completed.
/// Everything else starts a new generation.
fn generation(
    desired: &DesiredPool<'_>,
    present: &[&Arc<Slice>],
    terminating: &[&Arc<Slice>],
    targets: &[Target<'_>],
    obsolete: usize,
) -> i64 {
    let now = newest(present).unwrap_or(desired.known.generation.max(1));
    if let Some(terminating) = newest(terminating).filter(|generation| *generation >= now) {
        return next_generation(terminating);
    }
    let count = i64::try_from(targets.len()).unwrap_or(i64::MAX);
    let is_current = |slice: &Slice| {
        slice.spec.pool.generation == now && slice.spec.pool.resource_slice_count == count
    };
    let changed = targets.iter().filter(|target| target.is_changed()).count();
    let created = targets
        .iter()
        .filter(|target| target.observed.is_none())
        .count();
    let is_complete = present.iter().all(|slice| is_current(slice)) && created + obsolete == 0;
    let is_outdated = targets.iter().any(|target| {
        target.observed.is_some_and(|slice| {
            slice.spec.pool.generation == now && (!is_current(slice) || target.is_changed())
        })
    });
    let can_be_completed = !is_outdated && (obsolete == 0 || changed == 0);
    if (is_complete && changed <= 1) || can_be_completed {
        now
    } else {
        next_generation(now)
    }
}

fn next_generation(generation: i64) -> i64 {
    generation.checked_add(1).unwrap_or(1)
}

fn newest(slices: &[&Arc<Slice>]) -> Option<i64> {
    slices.iter().map(|slice| slice.spec.pool.generation).max()
}

/// Returns the start of a slice's name: its index, which orders the slices of a pool, then for people the driver and the node.
fn name_prefix(index: u32, driver: &DriverName, node: &str) -> String {
    // Letters of a driver's name may be upper-case, those of an object's name may not.
    let whole = format!("{index:05x}-{driver}-{node}").to_ascii_lowercase();
    let cut = &whole[..whole.len().min(SLICE_PREFIX_BYTES_MAX - 1)];
    format!("{}-", cut.trim_end_matches(['-', '.']))
}

/// Slices whose names have no index come last.
fn order(slice: &Slice) -> u32 {
    index_of(slice::name(slice)).unwrap_or(u32::MAX)
}

/// Returns the index in a slice's name, or `None` for a name that [`name_prefix`] did not start.
fn index_of(name: &str) -> Option<u32> {
    let (digits, _) = name.split_once('-')?;
    let is_index = (5..=8).contains(&digits.len())
        && digits
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    is_index
        .then(|| u32::from_str_radix(digits, 16).ok())
        .flatten()
        .filter(|index| *index < u32::MAX)
}
