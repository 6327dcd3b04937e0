//! Which devices a container is given: the decision of a kubelet's device manager, without its accidents. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::affinity::{self, Split};
use nodedock_model::{ExtendedResource, PluginDevice, Problem};

/// The code of a refusal because devices that were chosen before are not healthy any more.
pub(super) const HELD_UNHEALTHY: &str = "devices-unhealthy";
/// The code of a refusal because a container has another number of devices than it asks for.
pub(super) const REQUEST_CHANGED: &str = "request-changed";

/// A resource as a choice sees it.
pub(super) struct Stock<'a> {
    pub(super) devices: &'a BTreeMap<String, PluginDevice>,
    /// Devices that somebody has.
    pub(super) taken: &'a BTreeSet<String>,
}

/// What a container wants.
pub(super) struct Wish<'a> {
    pub(super) container: &'a str,
    pub(super) resource: &'a ExtendedResource,
    pub(super) count: usize,
    /// What it was to have already.
    pub(super) held: Option<&'a BTreeMap<String, Vec<u32>>>,
    /// What the pod's init containers have and need no more.
    pub(super) reusable: &'a BTreeSet<String>,
    pub(super) affinity: &'a [u32],
}

/// What a choice comes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Chosen(BTreeSet<String>),
    /// Whoever offers the devices may say which it prefers.
    Open(Open),
}

/// Arguments of a preferred allocation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// Ascending.
    pub(super) available: Vec<String>,
    /// Ascending; among the available.
    pub(super) must_include: Vec<String>,
    pub(super) size: usize,
}

/// A choice of which a part is left to preference.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Open {
    taken: Taken,
    /// What may be preferred.
    choice: BTreeSet<String>,
    /// What is taken without a preference, in this order.
    rest: Vec<String>,
}

impl Open {
    pub(super) fn question(&self) -> Question {
        let available: BTreeSet<_> = self.choice.union(&self.taken.ids).cloned().collect();
        let must_include = self.taken.ids.iter().cloned().collect();
        Question { available: available.into_iter().collect(), must_include, size: self.taken.count }
    }

    /// What of the preferred ones is not to be had, or is too much, is ignored.
    pub(super) fn finish(mut self, preferred: &[String]) -> BTreeSet<String> {
        let preferred = preferred.iter().filter(|id| self.choice.contains(*id)).cloned();
        if !self.taken.take(preferred) {
            self.taken.take(self.rest);
        }
        self.taken.ids
    }
}

/// Chooses.
pub(super) fn choose(stock: Option<&Stock<'_>>, wish: &Wish<'_>) -> Result<Step, Problem> {
    check_count(wish)?;
    let stock = stock.ok_or_else(|| unregistered(wish.resource))?;
    if !stock.devices.values().any(|device| device.healthy) {
        return Err(no_healthy(wish.resource));
    }
    if let Some(held) = wish.held {
        return keep(stock, wish, held);
    }
    let mut taken = Taken::new(wish.count);
    if taken.take(reusable(stock, wish)) {
        return Ok(Step::Chosen(taken.ids));
    }
    let is_free = |device: &&PluginDevice| device.healthy && !stock.taken.contains(&device.id);
    let available: Vec<_> = stock.devices.values().filter(is_free).collect();
    if available.len() < taken.needed() {
        return Err(too_few(wish, taken.needed(), available.len()));
    }
    let split = affinity::split(&available, wish.affinity, affinity::has_topology(stock.devices.values()));
    Ok(from_available(taken, split))
}

/// A container's limits do not change while its pod lives.
pub(super) fn check_count(wish: &Wish<'_>) -> Result<(), Problem> {
    let held = wish.held.map_or(wish.count, BTreeMap::len);
    if held == wish.count {
        return Ok(());
    }
    let Wish { container, resource, count, .. } = wish;
    let message = format!(
        "container {container} changed its request for {resource} from {held} to {count}: a pod's devices are final"
    );
    Err(Problem::invalid(REQUEST_CHANGED, message))
}

fn keep(stock: &Stock<'_>, wish: &Wish<'_>, held: &BTreeMap<String, Vec<u32>>) -> Result<Step, Problem> {
    let is_healthy = |id: &&String| stock.devices.get(*id).is_some_and(|device| device.healthy);
    match held.keys().find(|id| !is_healthy(id)) {
        None => Ok(Step::Chosen(held.keys().cloned().collect())),
        Some(id) => Err(lost(&format!("{id:?} of {}", wish.resource), wish.container)),
    }
}

/// What was chosen for a container, and not given to it yet, is not to be had any more.
pub(super) fn lost(what: &str, container: &str) -> Problem {
    let message = format!("{what} was chosen for container {container} before, and is not healthy any more");
    Problem::unavailable(HELD_UNHEALTHY, message)
}

/// Healthy devices that may be used again, those where the container should be first.
fn reusable(stock: &Stock<'_>, wish: &Wish<'_>) -> Vec<String> {
    let devices = wish.reusable.iter().filter_map(|id| stock.devices.get(id));
    let devices: Vec<_> = devices.filter(|device| device.healthy).collect();
    let Split { aligned, unaligned, indifferent } =
        affinity::split(&devices, wish.affinity, affinity::has_topology(stock.devices.values()));
    [aligned, unaligned, indifferent].concat()
}

fn from_available(mut taken: Taken, split: Split) -> Step {
    let Split { aligned, unaligned, indifferent } = split;
    // Where the aligned ones are more than enough, the others are not even shown.
    if taken.needed() < aligned.len() {
        return Step::Open(Open { taken, choice: aligned.iter().cloned().collect(), rest: aligned });
    }
    let rest = [unaligned, indifferent].concat();
    let choice = aligned.iter().chain(&rest).cloned().collect();
    if taken.take(aligned) {
        return Step::Chosen(taken.ids);
    }
    Step::Open(Open { taken, choice, rest })
}

/// Devices that are chosen, up to a number.
#[derive(Debug, PartialEq, Eq)]
struct Taken {
    ids: BTreeSet<String>,
    count: usize,
}

impl Taken {
    fn new(count: usize) -> Self {
        Self { ids: BTreeSet::new(), count }
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

pub(super) fn unregistered(resource: &ExtendedResource) -> Problem {
    Problem::unavailable("resource-unknown", format!("cannot allocate {resource}: nobody has registered it"))
}

fn no_healthy(resource: &ExtendedResource) -> Problem {
    Problem::unavailable(
        "no-healthy-device",
        format!("cannot allocate {resource}: no device of it is healthy"),
    )
}

fn too_few(wish: &Wish<'_>, needed: usize, available: usize) -> Problem {
    let message = format!(
        "container {} needs {needed} more devices of {}, and {available} are available",
        wish.container, wish.resource
    );
    Problem::unavailable("too-few-devices", message)
        .with("requested", wish.count)
        .with("available", available)
}
