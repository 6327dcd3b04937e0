//! Devices that a request can use by itself, beside the claims that are allocated and before any other device of its own claim is chosen.

use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

use super::in_use::{DeviceUse, Usage};
use super::inventory::{Inventory, Offered};
use super::request::Slot;
use super::selector_results::SelectorResult;
use super::table::Table;

/// Usability of a device for a request. Numbers are places in the lists of the request or of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) enum Status {
    #[default]
    Usable,
    /// A selector fails on it, which fails the allocation when the search comes to the device.
    SelectorFailed(u16),
    /// An amount cannot be computed, which fails the allocation in the same way.
    CapacityFailed(u16),
    /// The selectors of this allocation have taken all the steps that they may take.
    SelectorSteps,
    InUse,
    /// Another device of the same hardware is in use.
    Held,
    Selector(u16),
    OtherNode,
    /// A capacity of the device has no meaning.
    Defect,
    /// The device does not have a requested capacity.
    NoCapacity(u16),
    CapacityPolicy(u16),
    Capacity(u16),
    Taint(u16),
    Counter(u16),
}

impl Status {
    pub(super) fn is_failure(self) -> bool {
        matches!(
            self,
            Self::SelectorFailed(_) | Self::CapacityFailed(_) | Self::SelectorSteps
        )
    }

    /// Returns true if the search has to look at the device.
    pub(super) fn is_candidate(self) -> bool {
        self == Self::Usable || self.is_failure()
    }
}

/// Checks of devices against requests, with the steps that the selectors took.
pub(super) struct Checks<'a> {
    pub(super) inventory: &'a Inventory,
    pub(super) usage: Usage<'a>,
    /// Steps that selectors may still take.
    pub(super) selector_steps: u64,
}

impl Checks<'_> {
    /// Returns the first reason against a device, in the order in which the scheduler looks for them.
    pub(super) fn status(&mut self, slot: &Slot<'_>, device: &Offered) -> Status {
        let device_use = self.usage.devices.get(device.id);
        if !slot.admin_access
            && device_use.is_some_and(|device_use| takes_whole(device_use, device))
        {
            return Status::InUse;
        }
        if !slot.admin_access && self.usage.is_held(device) {
            return Status::Held;
        }
        let matching = self.matching(slot, device);
        if matching != Status::Usable {
            return matching;
        }
        let capacity = capacity_status(slot, device, device_use);
        if capacity != Status::Usable {
            return capacity;
        }
        if let Some(taint) = untolerated(slot, device) {
            return Status::Taint(taint);
        }
        self.counter_status(slot, device, device_use)
    }

    /// Returns what an `All` request makes of a device: it leaves out what does not match or is too small, and not what is in use.
    pub(super) fn status_for_all(&mut self, slot: &Slot<'_>, device: &Offered) -> Status {
        match self.matching(slot, device) {
            Status::Usable => capacity_status(slot, device, None),
            status => status,
        }
    }

    fn matching(&mut self, slot: &Slot<'_>, device: &Offered) -> Status {
        for (number, selector) in (0..).zip(&slot.selectors) {
            let (result, steps) = selector.column.result(device.id, &device.facts);
            self.selector_steps = match self.selector_steps.checked_sub(steps) {
                Some(left) => left,
                None => return Status::SelectorSteps,
            };
            match result {
                SelectorResult::Matches => {}
                SelectorResult::Differs => return Status::Selector(number),
                SelectorResult::Failed => return Status::SelectorFailed(number),
            }
        }
        if device.on_node {
            Status::Usable
        } else {
            Status::OtherNode
        }
    }

    fn counter_status(
        &self,
        slot: &Slot<'_>,
        device: &Offered,
        device_use: Option<&DeviceUse>,
    ) -> Status {
        if !consumes_counters(slot, device, device_use) {
            return Status::Usable;
        }
        let mut consumed = (0..).zip(&device.consumes);
        let exceeded = consumed.find(|(_, (counter, amount))| {
            let total = self
                .inventory
                .counter(*counter)
                .map_or(0, |counter| counter.total);
            self.usage.counters.get(*counter).saturating_add(*amount) > total
        });
        exceeded.map_or(Status::Usable, |(number, _)| Status::Counter(number))
    }
}

/// A device that became exclusive while claims had shares of it is in use as well.
fn takes_whole(device_use: &DeviceUse, device: &Offered) -> bool {
    device_use.exclusive_claim().is_some() || !device.is_shareable()
}

/// Returns true if the next use of a device consumes its counters: the first share does, further ones and admin access do not.
pub(super) fn consumes_counters(
    slot: &Slot<'_>,
    device: &Offered,
    device_use: Option<&DeviceUse>,
) -> bool {
    let has_share = device.is_shareable() && device_use.is_some_and(DeviceUse::is_shared);
    !slot.admin_access && !has_share
}

fn capacity_status(slot: &Slot<'_>, device: &Offered, device_use: Option<&DeviceUse>) -> Status {
    let Ok(capacities) = &device.capacities else {
        return Status::Defect;
    };
    for (number, (name, _)) in (0..).zip(&slot.capacities) {
        if capacities.iter().all(|capacity| capacity.name != *name) {
            return Status::NoCapacity(number);
        }
    }
    // A failure fails the allocation, so all are looked at before the first reason that only leaves out the device.
    if let Some((number, _)) = (0..)
        .zip(capacities)
        .find(|(_, capacity)| capacity.consumed(slot.requested(&capacity.name)).is_err())
    {
        return Status::CapacityFailed(number);
    }
    for (number, capacity) in (0..).zip(capacities) {
        let Ok(amount) = capacity.consumed(slot.requested(&capacity.name)) else {
            continue;
        };
        if !capacity.policy_allows(&amount) {
            return Status::CapacityPolicy(number);
        }
        let consumed = device_use.map_or(0, |device_use| device_use.consumed(&capacity.name));
        if consumed.saturating_add(amount.nanos) > capacity.value.nanos {
            return Status::Capacity(number);
        }
    }
    Status::Usable
}

/// Returns the place of the first taint that keeps a request from a device.
pub(super) fn untolerated(slot: &Slot<'_>, device: &Offered) -> Option<u16> {
    let taints = device.device().taints.as_deref().unwrap_or_default();
    let mut numbered = (0..).zip(taints);
    let untolerated = numbered.find(|(_, taint)| {
        let mut tolerations = slot.tolerations.into_iter().flatten();
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
            && !tolerations.any(|toleration| tolerates(toleration, taint))
    });
    untolerated.map(|(number, _)| number)
}

fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if (!effect.is_empty() && effect != taint.effect) || (!key.is_empty() && key != taint.key) {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => {
            toleration.value.as_deref().unwrap_or_default()
                == taint.value.as_deref().unwrap_or_default()
        }
        "Exists" => true,
        _ => false,
    }
}

/// The devices that the search looks at for one slot, found as far as it needs them.
#[derive(Default)]
pub(super) struct Scan {
    found: Vec<Candidate>,
    next: u32,
    failures: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) device: u32,
    pub(super) status: Status,
}

impl Scan {
    /// Returns the candidate at a place in the list, counted from zero.
    pub(super) fn get(
        &mut self,
        place: usize,
        slot: &Slot<'_>,
        checks: &mut Checks<'_>,
    ) -> Option<Candidate> {
        let inventory = checks.inventory;
        while self.found.len() <= place {
            let device = inventory.device(self.next)?;
            self.next += 1;
            let status = checks.status(slot, device);
            if status.is_candidate() {
                self.failures += usize::from(status.is_failure());
                self.found.push(Candidate {
                    device: device.id,
                    status,
                });
            }
        }
        self.found.get(place).copied()
    }

    /// Returns true if it is certain that fewer than `count` devices are left from a place on, and that no failure is among them.
    pub(super) fn is_short(
        &mut self,
        place: usize,
        count: usize,
        slot: &Slot<'_>,
        checks: &mut Checks<'_>,
    ) -> bool {
        let last = place.saturating_add(count.saturating_sub(1));
        count > 0 && self.get(last, slot, checks).is_none() && self.failures == 0
    }

    pub(super) fn has_failures(&self) -> bool {
        self.failures > 0
    }
}

/// Returns the devices that an `All` request has to have, or the first device on which a selector or an amount fails.
pub(super) fn all_devices(
    slot: &Slot<'_>,
    checks: &mut Checks<'_>,
) -> Result<Vec<u32>, (u32, Status)> {
    let inventory = checks.inventory;
    let mut devices = Vec::new();
    for device in &inventory.devices {
        match checks.status_for_all(slot, device) {
            Status::Usable => devices.push(device.id),
            status if status.is_failure() => return Err((device.id, status)),
            _ => {}
        }
    }
    Ok(devices)
}

/// A mark for each device that some `All` request has to have.
pub(super) fn marked(lists: &[Option<Vec<u32>>], devices: usize) -> Table<bool> {
    let mut marks = Table::new(devices);
    lists
        .iter()
        .flatten()
        .flatten()
        .for_each(|device| marks.set(*device, true));
    marks
}
