//! Why a claim was not allocated: a sentence for the claim, and a reason for each request and device.

use std::collections::BTreeMap;

use nodedock_model::quantity;

use super::demand::Shortage;
use super::inventory::{Inventory, Offered};
use super::request::Slot;
use super::search::{Refusal, Search, Stop};
use super::usable::Status;
use super::{Bounds, Excluded, NotAllocated, NotAllocatedKind};

/// Pools that a message names.
const POOLS_NAMED_MAX: usize = 3;

impl NotAllocated {
    /// A claim that no devices can fulfil as it is.
    pub(super) fn invalid(message: String) -> Self {
        Self {
            kind: NotAllocatedKind::Invalid,
            message,
            devices: Vec::new(),
            more: false,
        }
    }
}

/// An `All` request cannot be answered while a pool may have more devices than are known.
pub(super) fn pool_not_ready(slot: &Slot<'_>, inventory: &Inventory) -> NotAllocated {
    let message = format!(
        "request {:?} asks for all devices{}",
        slot.name,
        refused_pools(inventory)
    );
    NotAllocated {
        kind: NotAllocatedKind::PoolNotReady,
        message,
        devices: Vec::new(),
        more: false,
    }
}

/// Names the pools that cannot be used, as the end of a sentence.
fn refused_pools(inventory: &Inventory) -> String {
    let named = inventory.refused.iter().take(POOLS_NAMED_MAX);
    let mut text: String = named
        .map(|refused| {
            format!(
                "; pool {:?} of driver {:?} cannot be used: {}",
                refused.pool, refused.driver, refused.reason
            )
        })
        .collect();
    if inventory.refused.len() > POOLS_NAMED_MAX {
        text += &format!("; {} pools cannot be used in all", inventory.refused.len());
    }
    text
}

/// Explains a shortage that was found before the search.
pub(super) fn shortage(
    search: &mut Search<'_, '_>,
    shortage: &Shortage,
    bounds: &Bounds,
) -> NotAllocated {
    let requests = search.requests;
    let names: Vec<String> = shortage
        .slots
        .iter()
        .filter_map(|slot| requests.slot(*slot))
        .map(|slot| format!("{:?}", slot.name))
        .collect();
    let message = match shortage
        .slots
        .first()
        .filter(|_| names.len() == 1)
        .and_then(|slot| requests.slot(*slot))
    {
        Some(slot) => {
            let needed = devices(shortage.needed);
            format!(
                "request {:?} needs {needed}, and {}{}",
                slot.name,
                shortage.usable,
                tally(search, slot)
            )
        }
        None => {
            let needed = devices(shortage.needed);
            format!(
                "requests {} need {needed}, and {} can be used by them",
                names.join(", "),
                shortage.usable
            )
        }
    };
    explained(search, NotAllocatedKind::Unsatisfiable, message, bounds)
}

fn devices(count: usize) -> String {
    if count == 1 {
        "1 device".to_owned()
    } else {
        format!("{count} devices")
    }
}

/// Returns of how many devices how many were left out and why, as the end of a sentence.
fn tally(search: &mut Search<'_, '_>, slot: &Slot<'_>) -> String {
    let inventory = search.checks.inventory;
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for device in &inventory.devices {
        let why = match search.checks.status(slot, device) {
            Status::Usable | Status::SelectorSteps => continue,
            Status::SelectorFailed(_) | Status::Selector(_) => "not matched by selectors",
            Status::CapacityFailed(_) | Status::Defect | Status::NoCapacity(_) => {
                "without the capacity"
            }
            Status::CapacityPolicy(_) => "not allowing the amount",
            Status::InUse => "in use",
            Status::Held => "with hardware that is in use",
            Status::OtherNode => "on other nodes",
            Status::Capacity(_) => "short of capacity",
            Status::Taint(_) => "with taints that are not tolerated",
            Status::Counter(_) => "short of counters",
        };
        *counts.entry(why).or_default() += 1;
    }
    let counts: Vec<String> = counts
        .iter()
        .map(|(why, count)| format!("{count} {why}"))
        .collect();
    let why = if counts.is_empty() {
        String::new()
    } else {
        format!(": {}", counts.join(", "))
    };
    format!(" of {} can be used{why}", devices(inventory.len()))
}

/// Explains an `All` request that can never have all of its devices.
pub(super) fn all_blocked(
    search: &mut Search<'_, '_>,
    slot: &Slot<'_>,
    bounds: &Bounds,
) -> Option<NotAllocated> {
    let inventory = search.checks.inventory;
    let list = search.all_of(slot).to_vec();
    if list.is_empty() {
        let message = format!(
            "request {:?} asks for all devices, and 0{}",
            slot.name,
            tally(search, slot)
        );
        return Some(explained(
            search,
            NotAllocatedKind::Unsatisfiable,
            message,
            bounds,
        ));
    }
    for device in list.iter().filter_map(|device| inventory.device(*device)) {
        let status = search.checks.status(slot, device);
        if !status.is_candidate() {
            let reason = reason(search, slot, device, status).unwrap_or_default();
            let message = format!(
                "request {:?} asks for all devices, and device {device} cannot be used: {reason}",
                slot.name
            );
            return Some(explained(
                search,
                NotAllocatedKind::Unsatisfiable,
                message,
                bounds,
            ));
        }
    }
    None
}

/// Explains a claim that needs more devices than a result can have.
pub(super) fn too_many(
    search: &mut Search<'_, '_>,
    fewest: usize,
    max: usize,
    bounds: &Bounds,
) -> NotAllocated {
    let message = format!(
        "the claim needs {}, and at most {max} fit into an allocation",
        devices(fewest)
    );
    explained(search, NotAllocatedKind::Unsatisfiable, message, bounds)
}

/// Explains a search that tried all combinations.
pub(super) fn exhausted(search: &mut Search<'_, '_>, bounds: &Bounds) -> NotAllocated {
    let requests = search.requests;
    let slots = requests.of_request(search.deepest);
    let message = match slots {
        [slot]
            if search
                .constraints
                .iter()
                .all(|constraint| constraint.refused == 0) =>
        {
            format!(
                "no devices are left for request {:?} in any combination",
                slot.name
            )
        }
        _ => {
            let name = slots.first().map_or("", |slot| slot.request_name);
            format!(
                "no combination of devices satisfies request {name:?} and those before it{}",
                refused_by_constraints(search)
            )
        }
    };
    explained(search, NotAllocatedKind::Unsatisfiable, message, bounds)
}

fn refused_by_constraints(search: &Search<'_, '_>) -> String {
    let refusing = search
        .constraints
        .iter()
        .filter(|constraint| constraint.refused > 0);
    refusing
        .map(|constraint| {
            format!(
                "; {} refused a device {} times",
                constraint.title(),
                constraint.refused
            )
        })
        .collect()
}

/// Explains a search that ended early.
pub(super) fn stopped(search: &mut Search<'_, '_>, stop: &Stop, bounds: &Bounds) -> NotAllocated {
    let (inventory, requests) = (search.checks.inventory, search.requests);
    let found = |slot: u32, device: u32| Some((requests.slot(slot)?, inventory.device(device)?));
    match stop {
        Stop::Steps => {
            let name = requests
                .of_request(search.deepest)
                .first()
                .map_or("", |slot| slot.request_name);
            let refused = refused_by_constraints(search);
            let message = format!(
                "the claim has too many combinations: no result after {} steps, in which the search came to request {name:?}{refused}",
                bounds.steps
            );
            explained(search, NotAllocatedKind::TooComplex, message, bounds)
        }
        Stop::SelectorSteps => {
            let message = format!(
                "the selectors of the claim took more than {} steps",
                bounds.selector_steps
            );
            explained(search, NotAllocatedKind::TooComplex, message, bounds)
        }
        Stop::Failed {
            slot,
            device,
            status,
        } => {
            let what = found(*slot, *device).map_or_else(String::new, |(slot, device)| {
                let reason = reason(search, slot, device, *status).unwrap_or_default();
                format!("request {:?}, device {device}: {reason}", slot.name)
            });
            explained(search, NotAllocatedKind::Invalid, what, bounds)
        }
        Stop::AllRefused {
            slot,
            device,
            refusal,
        } => {
            let what = found(*slot, *device).map_or_else(String::new, |(slot, device)| {
                let reason = refused(search, device, *refusal);
                format!(
                    "request {:?} asks for all devices, and device {device} cannot be added: {reason}",
                    slot.name
                )
            });
            explained(search, NotAllocatedKind::Unsatisfiable, what, bounds)
        }
    }
}

/// Adds the reasons for each request and device, and the pools that cannot be used.
fn explained(
    search: &mut Search<'_, '_>,
    kind: NotAllocatedKind,
    mut message: String,
    bounds: &Bounds,
) -> NotAllocated {
    let (inventory, requests) = (search.checks.inventory, search.requests);
    message += &refused_pools(inventory);
    let per_slot = (bounds.excluded / requests.slots.len().max(1)).max(1);
    let mut excluded = NotAllocated {
        kind,
        message,
        devices: Vec::new(),
        more: false,
    };
    for slot in &requests.slots {
        let mut listed = 0;
        for device in &inventory.devices {
            let status = search.checks.status(slot, device);
            let refusal = search.refusals.get(&(slot.number, device.id)).copied();
            let reason = reason(search, slot, device, status)
                .or_else(|| refusal.map(|refusal| refused(search, device, refusal)));
            let Some(reason) = reason else { continue };
            if listed == per_slot || excluded.devices.len() >= bounds.excluded {
                excluded.more = true;
                break;
            }
            listed += 1;
            excluded.devices.push(Excluded {
                request: slot.name.clone(),
                driver: device.driver().to_owned(),
                pool: device.pool().to_owned(),
                device: device.device().name.clone(),
                reason,
                claim: holder(search, device, status),
            });
        }
    }
    excluded
}

/// Returns the claim because of which a request cannot use a device.
fn holder(search: &Search<'_, '_>, device: &Offered, status: Status) -> Option<String> {
    let usage = &search.checks.usage;
    match status {
        Status::InUse | Status::Capacity(_) => {
            let device = usage.devices.get(device.id)?;
            Some(
                device
                    .exclusive_claim()
                    .unwrap_or_else(|| device.first_claim())
                    .to_owned(),
            )
        }
        Status::Held => {
            let name = &device.device().name;
            let (claim, _) = usage.in_use.holder(device.driver(), device.pool(), name)?;
            Some(claim.to_owned())
        }
        _ => None,
    }
}

/// Returns why a request cannot use a device by itself; nothing if it can.
fn reason(
    search: &Search<'_, '_>,
    slot: &Slot<'_>,
    device: &Offered,
    status: Status,
) -> Option<String> {
    let usage = search.checks.usage.devices.get(device.id);
    let capacity = |number: u16| device.capacities.as_deref().ok()?.get(usize::from(number));
    let selector = |number: u16| {
        let selector = slot.selectors.get(usize::from(number))?;
        let class = selector
            .of_class
            .then(|| slot.class.metadata.name.clone().unwrap_or_default());
        let of = class.map_or_else(String::new, |class| format!(" of class {class:?}"));
        Some((selector, format!("selector {:?}{of}", selector.expression)))
    };
    match status {
        Status::Usable => None,
        Status::SelectorSteps => {
            Some("not looked at: the selectors took too many steps".to_owned())
        }
        Status::SelectorFailed(number) => selector(number)
            .map(|(selector, text)| format!("{text} {}", selector.column.failure(&device.facts))),
        Status::Selector(number) => selector(number).map(|(_, text)| format!("{text} is false")),
        Status::InUse => usage.map(|usage| {
            format!(
                "in use by claim {}",
                usage
                    .exclusive_claim()
                    .unwrap_or_else(|| usage.first_claim())
            )
        }),
        Status::Held => {
            let in_use = search.checks.usage.in_use;
            let holder = in_use.holder(device.driver(), device.pool(), &device.device().name);
            holder.map(|(claim, key)| {
                format!("its hardware is in use by claim {claim}, which holds {key}")
            })
        }
        Status::OtherNode => Some(format!(
            "not on node {:?}",
            search.checks.inventory.node.name
        )),
        Status::Defect => device.capacities.as_ref().err().cloned(),
        Status::NoCapacity(number) => slot
            .capacities
            .get(usize::from(number))
            .map(|(name, _)| format!("capacity {name}: the device does not have it")),
        Status::CapacityFailed(number) => capacity(number).map(|capacity| {
            let error = capacity
                .consumed(slot.requested(&capacity.name))
                .err()
                .unwrap_or_default();
            format!("capacity {}: {error}", capacity.name)
        }),
        Status::CapacityPolicy(number) => capacity(number).and_then(|capacity| {
            let amount = capacity.consumed(slot.requested(&capacity.name)).ok()?;
            Some(format!(
                "capacity {}: its request policy does not allow {}",
                capacity.name, amount.text
            ))
        }),
        Status::Capacity(number) => capacity(number).and_then(|capacity| {
            let amount = capacity.consumed(slot.requested(&capacity.name)).ok()?;
            let used = usage.map_or(0, |usage| usage.consumed(&capacity.name));
            Some(format!(
                "capacity {}: needs {}, {} left",
                capacity.name,
                amount.text,
                left(capacity.value.nanos, used)
            ))
        }),
        Status::Taint(number) => device
            .device()
            .taints
            .as_ref()?
            .get(usize::from(number))
            .map(|taint| {
                let value = taint.value.as_ref().filter(|value| !value.is_empty());
                let value = value.map_or_else(String::new, |value| format!("={value}"));
                format!(
                    "taint {}{value}:{} is not tolerated",
                    taint.key, taint.effect
                )
            }),
        Status::Counter(number) => {
            let (counter, amount) = device.consumes.get(usize::from(number))?;
            counter_short(search, *counter, *amount)
        }
    }
}

fn left(total: i128, used: i128) -> String {
    quantity::of_nanos(total.saturating_sub(used).max(0))
}

fn counter_short(search: &Search<'_, '_>, counter: u32, amount: i128) -> Option<String> {
    let total = search.checks.inventory.counter(counter)?;
    let left = left(total.total, search.checks.usage.counters.get(counter));
    Some(format!(
        "counter {} of set {}: needs {}, {left} left",
        total.name,
        total.set,
        quantity::of_nanos(amount)
    ))
}

/// Returns why a device that a request can use by itself was not chosen.
fn refused(search: &Search<'_, '_>, device: &Offered, refusal: Refusal) -> String {
    let inventory = search.checks.inventory;
    match refusal {
        Refusal::Chosen => "chosen for another request of the claim".to_owned(),
        Refusal::Counter(counter) => {
            inventory
                .counter(counter)
                .map_or_else(String::new, |counter| {
                    format!(
                        "counter {} of set {}: other devices of the claim need what is left",
                        counter.name, counter.set
                    )
                })
        }
        Refusal::Capacity(place) => {
            let capacity = device
                .capacities
                .as_deref()
                .ok()
                .and_then(|capacities| capacities.get(place));
            let name = capacity.map_or("", |capacity| capacity.name.as_str());
            format!("capacity {name}: other requests of the claim need what is left")
        }
        Refusal::Constraint(number, beside) => {
            search
                .constraints
                .get(number)
                .map_or_else(String::new, |constraint| {
                    constraint.refusal(device, beside.and_then(|beside| inventory.device(beside)))
                })
        }
    }
}
