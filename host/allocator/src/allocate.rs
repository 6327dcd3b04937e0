//! Allocation of a node's devices to a claim: the scheduler's structured allocation for one node and one claim. Pure: the same input has
//! the same output, and the work is bounded by counted steps.

mod capacity;
mod constraint;
mod demand;
mod explain;
mod in_use;
mod inventory;
mod node;
mod outcome;
mod request;
mod search;
mod selector_results;
mod table;
#[cfg(test)]
mod tests;
mod usable;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim};
use nodedock_model::limit::ALLOCATED_DEVICES_MAX;

pub use capacity::{api_capacity, consumed};
pub use in_use::{DeviceHolds, InUse};
pub use inventory::Inventory;
pub use node::NodeRef;

use request::Requests;
use search::{Outcome, Search, Stop};
use usable::Checks;

/// Limits of one allocation. They are counted, so that the same claim ends the same way on every machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    /// Devices that the search may try.
    pub steps: u64,
    /// Steps that all selectors together may take.
    pub selector_steps: u64,
    /// Devices that an explanation lists. Each request has the same part of them.
    pub excluded: usize,
}

impl Default for Bounds {
    /// Far more than a claim with an answer takes. A search without one ends within a fraction of a second.
    fn default() -> Self {
        Self {
            steps: 1_000_000,
            selector_steps: 10_000_000,
            excluded: 1_024,
        }
    }
}

/// A claim that got no devices, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NotAllocated {
    pub kind: NotAllocatedKind,
    /// One sentence about the claim.
    pub message: String,
    /// Devices that a request could not use, in the order of requests and devices; at most [`Bounds::excluded`].
    pub devices: Vec<Excluded>,
    /// True if further devices were left out of `devices`.
    pub more: bool,
}

/// Kind of change that is needed before the claim can be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NotAllocatedKind {
    /// The claim, its class or a selector is wrong. The same claim fails until one of them, or a device, changes.
    Invalid,
    /// The devices that are there and free do not suffice.
    Unsatisfiable,
    /// The devices that are there do not suffice, were all of them free. Only [`allocate_or_never`] finds it.
    Never,
    /// A request asks for all devices while a pool is being updated or is invalid.
    PoolNotReady,
    /// A bound was reached before all combinations were tried.
    TooComplex,
}

/// Why a request cannot use a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excluded {
    /// `request` or `request/sub-request`.
    pub request: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    /// The reason as text, for example `taint example.com/broken:NoSchedule is not tolerated`.
    pub reason: String,
    /// UID of a claim that has the device, or its hardware.
    pub claim: Option<String>,
}

/// Allocates devices like [`allocate`], and tries a claim that gets none once more as if no other claim had any: its kind is
/// [`NotAllocatedKind::Never`] if it gets none then either.
///
/// # Errors
///
/// As [`allocate`].
pub fn allocate_or_never(
    inventory: &Inventory,
    in_use: &InUse,
    classes: &impl Fn(&str) -> Option<Arc<DeviceClass>>,
    claim: &ResourceClaim,
    now: Timestamp,
    share_ids: &mut dyn FnMut() -> String,
) -> Result<AllocationResult, NotAllocated> {
    let bounds = Bounds::default();
    let result = allocate(inventory, in_use, classes, claim, &bounds, now, share_ids);
    let Err(refusal) = &result else {
        return result;
    };
    if refusal.kind != NotAllocatedKind::Unsatisfiable {
        return result;
    }
    let free = InUse::default();
    let alone = allocate(inventory, &free, classes, claim, &bounds, now, share_ids);
    match alone {
        Err(alone) if alone.kind == NotAllocatedKind::Unsatisfiable => Err(NotAllocated {
            kind: NotAllocatedKind::Never,
            ..refusal.clone()
        }),
        _ => result,
    }
}

/// Allocates devices of a node to a claim, as the Kubernetes scheduler would.
///
/// `classes` returns a DeviceClass by name. `share_ids` returns a new UID for each share of a device that several claims can have. The
/// claim's own earlier allocation, if it has one, must not be in `in_use`.
///
/// Three things differ from the scheduler: admin access needs no counters, as the API documents; only the newest generation of a pool
/// counts, even if an older one is complete for this node; and a counter of which more is consumed than there is now withholds the devices that
/// consume it, where the scheduler withholds all of the pool that consume any counter.
///
/// # Errors
///
/// [`NotAllocated`] says which requests could not be fulfilled, and why each device was left out.
pub fn allocate(
    inventory: &Inventory,
    in_use: &InUse,
    classes: &impl Fn(&str) -> Option<Arc<DeviceClass>>,
    claim: &ResourceClaim,
    bounds: &Bounds,
    now: Timestamp,
    share_ids: &mut dyn FnMut() -> String,
) -> Result<AllocationResult, NotAllocated> {
    let requests = Requests::parse(claim, inventory, classes).map_err(NotAllocated::invalid)?;
    let constraints = claim
        .spec
        .devices
        .as_ref()
        .and_then(|devices| devices.constraints.as_deref())
        .unwrap_or_default();
    let constraints =
        constraint::parse(constraints, &requests, inventory).map_err(NotAllocated::invalid)?;
    let usage = in_use::Usage::of(in_use, inventory);
    let mut checks = Checks {
        inventory,
        usage,
        selector_steps: bounds.selector_steps,
    };
    let (all, failed) = all_devices(&requests, &mut checks)?;
    let mut search = Search::new(&requests, checks, constraints, all, bounds);
    if let Some(stop) = failed {
        return Err(explain::stopped(&mut search, &stop, bounds));
    }
    check_demand(&mut search, bounds)?;
    match search.request(0) {
        Ok(Outcome::Found) => {
            outcome::build(claim, &requests, inventory, &search.chosen, now, share_ids)
                .map_err(NotAllocated::invalid)
        }
        Ok(Outcome::NotFound | Outcome::TooMany) => Err(explain::exhausted(&mut search, bounds)),
        Err(stop) => Err(explain::stopped(&mut search, &stop, bounds)),
    }
}

type AllDevices = Vec<Option<Vec<u32>>>;

/// Returns the devices of each slot that asks for all. A selector that fails ends it.
fn all_devices(
    requests: &Requests<'_>,
    checks: &mut Checks<'_>,
) -> Result<(AllDevices, Option<Stop>), NotAllocated> {
    let mut lists = Vec::new();
    for slot in &requests.slots {
        if slot.count.is_some() {
            lists.push(None);
            continue;
        }
        if !checks.inventory.refused.is_empty() {
            return Err(explain::pool_not_ready(slot, checks.inventory));
        }
        match usable::all_devices(slot, checks) {
            Ok(devices) => lists.push(Some(devices)),
            Err((_, usable::Status::SelectorSteps)) => {
                return Ok((lists, Some(Stop::SelectorSteps)));
            }
            Err((device, status)) => {
                return Ok((
                    lists,
                    Some(Stop::Failed {
                        slot: slot.number,
                        device,
                        status,
                    }),
                ));
            }
        }
    }
    Ok((lists, None))
}

/// Fails if it can be seen without a search that there are not enough devices, or more than a result can have.
fn check_demand(search: &mut Search<'_, '_>, bounds: &Bounds) -> Result<(), NotAllocated> {
    let requests = search.requests;
    let fewest =
        requests.fewest_devices(|slot| slot.count.unwrap_or_else(|| search.all_of(slot).len()));
    if fewest > ALLOCATED_DEVICES_MAX {
        return Err(explain::too_many(
            search,
            fewest,
            ALLOCATED_DEVICES_MAX,
            bounds,
        ));
    }
    let exact = requests.slots.iter().filter(|slot| !slot.is_sub_request);
    for slot in exact.filter(|slot| slot.count.is_none()) {
        if let Some(blocked) = explain::all_blocked(search, slot, bounds) {
            return Err(blocked);
        }
    }
    match search.shortage() {
        Some(shortage) => Err(explain::shortage(search, &shortage, bounds)),
        None => Ok(()),
    }
}
