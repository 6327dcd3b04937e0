//! Chooses the devices of a container, as a kubelet's device manager does, but the same ones each time. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::affinity::{self, Split};
use super::{DeviceNodes, Want};
use nodedock_model::{ExtendedResource, PluginDevice, Problem, ProblemCode};

/// The devices of a resource, and which of them are taken.
pub struct Stock<'a> {
    pub devices: &'a BTreeMap<String, PluginDevice>,
    pub taken: &'a BTreeSet<String>,
}

impl<'a> Stock<'a> {
    /// Healthy devices that are not taken.
    pub fn available(&self) -> impl Iterator<Item = &'a PluginDevice> + use<'a> {
        let Self { devices, taken } = *self;
        devices
            .values()
            .filter(|device| device.healthy && !taken.contains(&device.id))
    }
}

/// The result of a choice.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Chosen(BTreeSet<String>),
    /// The source of the devices may prefer some of them.
    Open(Open),
}

/// Arguments of a preferred allocation.
#[derive(Debug, PartialEq, Eq)]
pub struct Question {
    /// Ascending.
    pub available: Vec<String>,
    /// Ascending; among the available.
    pub must_include: Vec<String>,
    pub size: usize,
}

impl Question {
    /// Returns the fault of a preference, or `None` if it is valid.
    pub fn fault(&self, preferred: &[String]) -> Option<String> {
        let unknown = preferred
            .iter()
            .find(|id| self.available.binary_search(id).is_err());
        let named: BTreeSet<_> = preferred.iter().collect();
        match unknown {
            Some(id) => Some(format!("{id:?} was not offered")),
            None if named.len() < preferred.len() => Some("a device is named twice".to_owned()),
            None if named.len() > self.size => Some(format!(
                "{} devices are named, {} are wanted",
                named.len(),
                self.size
            )),
            None => None,
        }
    }
}

/// A choice of which a part is left to preference.
#[derive(Debug, PartialEq, Eq)]
pub struct Open {
    taken: Taken,
    /// Devices that may be preferred.
    choice: BTreeSet<String>,
    /// Devices that are taken without a preference, in this order.
    rest: Vec<String>,
}

impl Open {
    pub fn question(&self) -> Question {
        let available: BTreeSet<_> = self.choice.union(&self.taken.ids).cloned().collect();
        let must_include = self.taken.ids.iter().cloned().collect();
        Question {
            available: available.into_iter().collect(),
            must_include,
            size: self.taken.count,
        }
    }

    /// Takes preferred devices first; those that are not available, or too many, are ignored.
    pub fn finish(mut self, preferred: &[String]) -> BTreeSet<String> {
        let preferred = preferred
            .iter()
            .filter(|id| self.choice.contains(*id))
            .cloned();
        if !self.taken.take(preferred) {
            self.taken.take(self.rest);
        }
        self.taken.ids
    }
}

/// Chooses devices. `held`: devices that were chosen for the container before. `reusable`: devices of the pod's init containers that are
/// free again.
pub fn choose(
    stock: &Stock<'_>,
    want: &Want,
    held: Option<&DeviceNodes>,
    reusable: &BTreeSet<String>,
) -> Result<Step, Problem> {
    check_count(want, held)?;
    if !stock.devices.values().any(|device| device.healthy) {
        return Err(no_healthy(&want.resource));
    }
    if let Some(held) = held {
        return keep(stock, want, held);
    }
    let mut taken = Taken::new(want.count);
    if taken.take(healthy_of(stock, want, reusable)) {
        return Ok(Step::Chosen(taken.ids));
    }
    let available: Vec<_> = stock.available().collect();
    if available.len() < taken.needed() {
        return Err(too_few(want, taken.needed(), available.len()));
    }
    let split = affinity::split(
        &available,
        &want.affinity,
        affinity::has_topology(stock.devices.values()),
    );
    Ok(from_available(taken, split))
}

/// A container's limits do not change while its pod lives.
pub fn check_count(want: &Want, held: Option<&DeviceNodes>) -> Result<(), Problem> {
    let Want {
        container,
        resource,
        count,
        ..
    } = want;
    let held = held.map_or(*count, BTreeMap::len);
    if held == *count {
        return Ok(());
    }
    let message = format!(
        "container {container} changed its request for {resource} from {held} to {count}: a pod's devices are final"
    );
    Err(Problem::invalid(ProblemCode::RequestChanged, message))
}

fn keep(stock: &Stock<'_>, want: &Want, held: &DeviceNodes) -> Result<Step, Problem> {
    let unhealthy = held
        .keys()
        .find(|id| stock.devices.get(*id).is_none_or(|device| !device.healthy));
    match unhealthy {
        None => Ok(Step::Chosen(held.keys().cloned().collect())),
        Some(id) => Err(lost(
            &format!("{id:?} of {}", want.resource),
            &want.container,
        )),
    }
}

/// The problem of devices that were chosen for a container and became unhealthy before they were allocated.
fn lost(what: &str, container: &str) -> Problem {
    let message =
        format!("{what} was chosen for container {container} before, and is not healthy any more");
    Problem::unavailable(ProblemCode::DevicesUnhealthy, message)
}

/// The healthy ones of reusable devices, aligned ones first.
fn healthy_of(stock: &Stock<'_>, want: &Want, reusable: &BTreeSet<String>) -> Vec<String> {
    let devices = reusable.iter().filter_map(|id| stock.devices.get(id));
    let devices: Vec<_> = devices.filter(|device| device.healthy).collect();
    let Split {
        aligned,
        unaligned,
        indifferent,
    } = affinity::split(
        &devices,
        &want.affinity,
        affinity::has_topology(stock.devices.values()),
    );
    [aligned, unaligned, indifferent].concat()
}

fn from_available(mut taken: Taken, split: Split) -> Step {
    let Split {
        aligned,
        unaligned,
        indifferent,
    } = split;
    // If the aligned devices are more than enough, the others are not offered.
    if taken.needed() < aligned.len() {
        return Step::Open(Open {
            taken,
            choice: aligned.iter().cloned().collect(),
            rest: aligned,
        });
    }
    let rest = [unaligned, indifferent].concat();
    let choice = aligned.iter().chain(&rest).cloned().collect();
    if taken.take(aligned) {
        return Step::Chosen(taken.ids);
    }
    Step::Open(Open {
        taken,
        choice,
        rest,
    })
}

/// Devices that are chosen, up to a number.
#[derive(Debug, PartialEq, Eq)]
struct Taken {
    ids: BTreeSet<String>,
    count: usize,
}

impl Taken {
    fn new(count: usize) -> Self {
        Self {
            ids: BTreeSet::new(),
            count,
        }
    }

    fn needed(&self) -> usize {
        self.count - self.ids.len()
    }

    /// True: there are enough now.
    fn take(&mut self, ids: impl IntoIterator<Item = String>) -> bool {
        for id in ids {
            if self.needed() == 0 {
                return true;
            }
            self.ids.insert(id);
        }
        self.needed() == 0
    }
}

pub fn unregistered(resource: &ExtendedResource) -> Problem {
    let message = format!("cannot allocate {resource}: no plugin or driver has registered it");
    Problem::unavailable(ProblemCode::ResourceUnknown, message)
}

fn no_healthy(resource: &ExtendedResource) -> Problem {
    let message = format!("cannot allocate {resource}: no device of it is healthy");
    Problem::unavailable(ProblemCode::NoHealthyDevice, message)
}

pub fn too_few(want: &Want, needed: usize, available: usize) -> Problem {
    let message = format!(
        "container {} needs {needed} more devices of {}, and {available} are available",
        want.container, want.resource
    );
    Problem::unavailable(ProblemCode::TooFewDevices, message)
        .with("requested", want.count)
        .with("available", available)
}
