//! The search for devices: one request after the other, one device after the other, in the order of the inventory, with backtracking where
//! a combination cannot be completed. The first full combination is the result.
//!
//! It finds the combination that an exhaustive search in the same order finds, and skips a device if an equivalent one (no part of the
//! claim distinguishes the two) has failed in the same place.

use std::collections::HashMap;
use std::rc::Rc;

use nodedock_model::limit::ALLOCATED_DEVICES_MAX;

use super::Bounds;
use super::capacity::{Amount, Capacity};
use super::constraint::Constraint;
use super::demand::{self, Shortage};
use super::inventory::Offered;
use super::request::{Requests, Slot};
use super::table::Table;
use super::usable::{self, Checks, Scan, Status};

/// Refusals that are remembered for the explanation.
const REFUSALS_MAX: usize = 4_096;

/// A device that is chosen for a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) slot: u32,
    pub(super) device: u32,
    /// Amounts that the share of a shareable device consumes, in the order of its capacities.
    pub(super) share: Option<Vec<Amount>>,
    charged: bool,
}

/// Why the search ends before all combinations are tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stop {
    Steps,
    SelectorSteps,
    /// A selector or an amount fails on a device.
    Failed {
        slot: u32,
        device: u32,
        status: Status,
    },
    /// A constraint does not allow a device that an `All` request has to have.
    AllRefused {
        slot: u32,
        device: u32,
        refusal: Refusal,
    },
}

/// Why a device that a request can use by itself was not chosen in some combination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Numbers of the constraint and of a device that was chosen before.
    Constraint(usize, Option<u32>),
    Counter(u32),
    /// Place in the device's capacities.
    Capacity(usize),
    /// It was chosen for the claim before.
    Chosen,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Found,
    NotFound,
    /// More devices are needed than fit into a result. Other devices in their place do not help, only other sub-requests.
    TooMany,
}

type Searched = Result<Outcome, Stop>;

/// The shares of one device that are chosen for this claim.
#[derive(Debug, Default)]
struct Shares {
    uses: usize,
    charged: bool,
    consumed: Vec<i128>,
}

/// Traits that are equal in two devices which can replace each other in one place.
#[derive(PartialEq, Eq, Hash)]
struct Traits<'a> {
    statuses: Vec<Status>,
    values: Vec<Option<Rc<[u32]>>>,
    consumes: &'a [(u32, i128)],
    /// Capacities of a shareable device.
    capacities: Option<&'a [Capacity]>,
}

pub(super) struct Search<'r, 'a> {
    pub(super) requests: &'r Requests<'a>,
    pub(super) checks: Checks<'a>,
    pub(super) constraints: Vec<Constraint<'a>>,
    pub(super) scans: Vec<Scan>,
    /// The devices of each slot that asks for all.
    pub(super) all: Vec<Option<Vec<u32>>>,
    pub(super) refusals: HashMap<(u32, u32), Refusal>,
    /// The request that the search came to before it had to go back.
    pub(super) deepest: usize,
    pub(super) chosen: Vec<Chosen>,
    steps: u64,
    of_all: Table<bool>,
    taken: Table<bool>,
    counters: Table<i128>,
    shares: HashMap<u32, Shares>,
    traits: HashMap<Traits<'a>, u32>,
    /// Numbers of the traits of a device, from one. Zero: not looked at.
    trait_numbers: Table<u32>,
}

impl<'r, 'a> Search<'r, 'a> {
    pub(super) fn new(
        requests: &'r Requests<'a>,
        checks: Checks<'a>,
        constraints: Vec<Constraint<'a>>,
        all: Vec<Option<Vec<u32>>>,
        bounds: &Bounds,
    ) -> Self {
        let (devices, counters) = (checks.inventory.len(), checks.inventory.counters.len());
        Self {
            requests,
            constraints,
            scans: requests.slots.iter().map(|_| Scan::default()).collect(),
            refusals: HashMap::new(),
            deepest: 0,
            chosen: Vec::new(),
            steps: bounds.steps,
            of_all: usable::marked(&all, devices),
            all,
            taken: Table::new(devices),
            counters: Table::new(counters),
            shares: HashMap::new(),
            traits: HashMap::new(),
            trait_numbers: Table::new(devices),
            checks,
        }
    }

    /// Returns the exact requests that need more devices than there are, for any combination.
    pub(super) fn shortage(&mut self) -> Option<Shortage> {
        let mut reserved = Table::new(self.checks.inventory.len());
        for slot in self
            .requests
            .slots
            .iter()
            .filter(|slot| !slot.is_sub_request && slot.count.is_none())
        {
            self.all_of(slot)
                .iter()
                .for_each(|device| reserved.set(*device, true));
        }
        demand::shortage(self.requests, &mut self.checks, &mut self.scans, &reserved)
    }

    /// Allocates a request and those after it. The depth of recursion is bounded by the devices of a result and the requests of a claim.
    pub(super) fn request(&mut self, number: usize) -> Searched {
        self.deepest = self.deepest.max(number);
        let requests = self.requests;
        let slots = requests.of_request(number);
        if slots.is_empty() {
            return Ok(Outcome::Found);
        }
        let mut outcome = Outcome::TooMany;
        for slot in slots {
            match self.slot(slot)? {
                Outcome::Found => return Ok(Outcome::Found),
                Outcome::NotFound => outcome = Outcome::NotFound,
                Outcome::TooMany => {}
            }
        }
        Ok(outcome)
    }

    fn slot(&mut self, slot: &'r Slot<'a>) -> Searched {
        match slot.count {
            Some(count) => self.choose(slot, count, 0),
            None => match self.all_of(slot).len() {
                0 => Ok(Outcome::NotFound),
                _ => self.choose_all(slot, 0),
            },
        }
    }

    pub(super) fn all_of(&self, slot: &Slot<'_>) -> &[u32] {
        self.all
            .get(slot.number as usize)
            .and_then(Option::as_deref)
            .unwrap_or_default()
    }

    /// Chooses the devices of an `All` request from a place in its list on.
    fn choose_all(&mut self, slot: &'r Slot<'a>, place: usize) -> Searched {
        let devices = self.all_of(slot);
        let left = devices.len().saturating_sub(place);
        let Some(device) = devices.get(place).copied() else {
            return self.request(slot.request + 1);
        };
        if left > ALLOCATED_DEVICES_MAX.saturating_sub(self.chosen.len()) {
            return Ok(Outcome::TooMany);
        }
        self.spend(1)?;
        let inventory = self.checks.inventory;
        let Some(device) = inventory.device(device) else {
            return Ok(Outcome::NotFound);
        };
        let refusal = match self.take_of_all(slot, device) {
            None => {
                let outcome = self.choose_all(slot, place + 1);
                if outcome != Ok(Outcome::Found) {
                    self.untake(slot, device);
                }
                return outcome;
            }
            Some(refusal) => refusal,
        };
        match refusal {
            // The scheduler ends here, too: the claim contradicts itself with these devices.
            Some(refusal @ Refusal::Constraint(..)) => Err(Stop::AllRefused {
                slot: slot.number,
                device: device.id,
                refusal,
            }),
            _ => Ok(Outcome::NotFound),
        }
    }

    /// Returns nothing if the device was taken, else the refusal if it is one of this search.
    fn take_of_all(&mut self, slot: &'r Slot<'a>, device: &'a Offered) -> Option<Option<Refusal>> {
        match self.checks.status(slot, device) {
            // A capacity is looked at again, after the constraints, and a taint before them.
            Status::Capacity(_) if usable::untolerated(slot, device).is_some() => Some(None),
            Status::Usable | Status::Capacity(_) => self.take(slot, device).err().map(Some),
            _ => Some(None),
        }
    }

    /// Chooses as many devices as are left of a request, from a place in its list of candidates on.
    fn choose(&mut self, slot: &'r Slot<'a>, left: usize, mut place: usize) -> Searched {
        if left == 0 {
            return self.request(slot.request + 1);
        }
        if left > ALLOCATED_DEVICES_MAX.saturating_sub(self.chosen.len()) {
            return Ok(Outcome::TooMany);
        }
        let inventory = self.checks.inventory;
        let mut failed = Vec::new();
        while let Some(candidate) = self.candidate(slot, place, left) {
            place += 1;
            self.spend(1)?;
            let Some(device) = inventory.device(candidate.device) else {
                continue;
            };
            if self.taken.get(device.id) {
                self.refuse(slot, device, Refusal::Chosen);
                continue;
            }
            match candidate.status {
                Status::Usable => {}
                Status::SelectorSteps => return Err(Stop::SelectorSteps),
                status => {
                    return Err(Stop::Failed {
                        slot: slot.number,
                        device: device.id,
                        status,
                    });
                }
            }
            if !failed.is_empty() && self.is_alike(device, &failed)? {
                continue;
            }
            if let Err(refusal) = self.take(slot, device) {
                self.refuse(slot, device, refusal);
                continue;
            }
            match self.choose(slot, left - 1, place) {
                Ok(Outcome::NotFound) => self.untake(slot, device),
                Ok(Outcome::Found) => return Ok(Outcome::Found),
                ended => {
                    self.untake(slot, device);
                    return ended;
                }
            }
            failed.extend(self.trait_number(device)?);
        }
        Ok(Outcome::NotFound)
    }

    /// Returns the candidate at a place, unless too few are left.
    fn candidate(
        &mut self,
        slot: &Slot<'_>,
        place: usize,
        left: usize,
    ) -> Option<usable::Candidate> {
        let scan = self.scans.get_mut(slot.number as usize)?;
        if scan.is_short(place, left, slot, &mut self.checks) {
            return None;
        }
        scan.get(place, slot, &mut self.checks)
    }

    fn spend(&mut self, steps: u64) -> Result<(), Stop> {
        self.steps = self.steps.checked_sub(steps).ok_or(Stop::Steps)?;
        Ok(())
    }

    fn is_alike(&mut self, device: &'a Offered, failed: &[u32]) -> Result<bool, Stop> {
        Ok(self
            .trait_number(device)?
            .is_some_and(|number| failed.contains(&number)))
    }

    /// Returns the same number for devices that nothing tells apart; none for a device of which there is only one like it.
    fn trait_number(&mut self, device: &'a Offered) -> Result<Option<u32>, Stop> {
        let in_use = self.checks.usage.devices.get(device.id);
        let has_shares =
            self.shares.contains_key(&device.id) || in_use.is_some_and(|in_use| in_use.is_shared());
        if self.of_all.get(device.id) || (device.is_shareable() && has_shares) {
            return Ok(None);
        }
        if self.trait_numbers.get(device.id) == 0 {
            let requests = self.requests;
            self.spend(u64::try_from(requests.slots.len()).unwrap_or(u64::MAX))?;
            let traits = Traits {
                statuses: requests
                    .slots
                    .iter()
                    .map(|slot| self.checks.status(slot, device))
                    .collect(),
                values: self
                    .constraints
                    .iter_mut()
                    .map(|constraint| constraint.values(device))
                    .collect(),
                consumes: &device.consumes,
                capacities: device
                    .capacities
                    .as_deref()
                    .ok()
                    .filter(|_| device.is_shareable()),
            };
            let next = u32::try_from(self.traits.len() + 1).unwrap_or(u32::MAX);
            let number = *self.traits.entry(traits).or_insert(next);
            self.trait_numbers.set(device.id, number);
        }
        Ok(Some(self.trait_numbers.get(device.id)))
    }

    fn refuse(&mut self, slot: &Slot<'_>, device: &Offered, refusal: Refusal) {
        if self.refusals.len() < REFUSALS_MAX {
            self.refusals
                .entry((slot.number, device.id))
                .or_insert(refusal);
        }
    }

    /// Chooses a device that the slot can use by itself, if it can be used beside those that are chosen.
    fn take(&mut self, slot: &'r Slot<'a>, device: &'a Offered) -> Result<(), Refusal> {
        if self.taken.get(device.id) {
            return Err(Refusal::Chosen);
        }
        let shares = self.shares.get(&device.id);
        let charge =
            usable::consumes_counters(slot, device, self.checks.usage.devices.get(device.id))
                && !shares.is_some_and(|shares| shares.charged);
        if let Some(counter) = charge.then(|| self.exceeded_counter(device)).flatten() {
            return Err(Refusal::Counter(counter));
        }
        self.constrain(slot, device)?;
        match self.share(slot, device) {
            Err(capacity) => {
                self.constraints
                    .iter_mut()
                    .rev()
                    .for_each(|constraint| constraint.remove(slot));
                return Err(Refusal::Capacity(capacity));
            }
            Ok(share) => self.chosen.push(Chosen {
                slot: slot.number,
                device: device.id,
                share,
                charged: charge,
            }),
        }
        if charge {
            self.charge(device, 1);
        }
        self.taken.set(device.id, !device.is_shareable());
        if let Some(shares) = self.shares.get_mut(&device.id) {
            shares.charged |= charge;
        }
        Ok(())
    }

    fn exceeded_counter(&self, device: &Offered) -> Option<u32> {
        let (inventory, usage) = (self.checks.inventory, &self.checks.usage);
        let exceeded = device.consumes.iter().find(|(counter, amount)| {
            let total = inventory
                .counter(*counter)
                .map_or(0, |counter| counter.total);
            let used = usage
                .counters
                .get(*counter)
                .saturating_add(self.counters.get(*counter));
            used.saturating_add(*amount) > total
        });
        exceeded.map(|(counter, _)| *counter)
    }

    fn charge(&mut self, device: &Offered, sign: i128) {
        for (counter, amount) in &device.consumes {
            let sum = self
                .counters
                .get(*counter)
                .saturating_add(sign.saturating_mul(*amount));
            self.counters.set(*counter, sum);
        }
    }

    /// Adds the device to all constraints or to none.
    fn constrain(&mut self, slot: &Slot<'_>, device: &Offered) -> Result<(), Refusal> {
        let mut added = 0;
        let mut refusal = None;
        for (number, constraint) in self.constraints.iter_mut().enumerate() {
            if !constraint.add(slot, device) {
                refusal = Some(Refusal::Constraint(
                    number,
                    constraint.chosen_in_the_way(device),
                ));
                break;
            }
            added += 1;
        }
        let Some(refusal) = refusal else {
            return Ok(());
        };
        self.constraints
            .iter_mut()
            .take(added)
            .for_each(|constraint| constraint.remove(slot));
        Err(refusal)
    }

    /// Adds a share of a shareable device, and returns what it consumes. Fails with the place of the capacity that does not have enough.
    fn share(&mut self, slot: &Slot<'_>, device: &Offered) -> Result<Option<Vec<Amount>>, usize> {
        let capacities = match &device.capacities {
            Ok(capacities) if device.is_shareable() => capacities,
            _ => return Ok(None),
        };
        let device_use = self.checks.usage.devices.get(device.id);
        let shares = self.shares.get(&device.id);
        let mut consumed = Vec::with_capacity(capacities.len());
        for (place, capacity) in capacities.iter().enumerate() {
            let amount = capacity
                .consumed(slot.requested(&capacity.name))
                .map_err(|_| place)?;
            let before = device_use.map_or(0, |device_use| device_use.consumed(&capacity.name));
            let chosen = shares
                .and_then(|shares| shares.consumed.get(place))
                .copied()
                .unwrap_or(0);
            if before.saturating_add(chosen).saturating_add(amount.nanos) > capacity.value.nanos {
                return Err(place);
            }
            consumed.push(amount);
        }
        let shares = self.shares.entry(device.id).or_default();
        shares.uses += 1;
        shares.consumed.resize(consumed.len(), 0);
        shares
            .consumed
            .iter_mut()
            .zip(&consumed)
            .for_each(|(sum, amount)| *sum += amount.nanos);
        Ok(Some(consumed))
    }

    /// Reverts the last [`Self::take`], which was of this device.
    fn untake(&mut self, slot: &Slot<'_>, device: &Offered) {
        let Some(chosen) = self.chosen.pop() else {
            return;
        };
        if chosen.charged {
            self.charge(device, -1);
        }
        self.taken.set(device.id, false);
        self.constraints
            .iter_mut()
            .rev()
            .for_each(|constraint| constraint.remove(slot));
        let (Some(share), Some(shares)) = (chosen.share, self.shares.get_mut(&device.id)) else {
            return;
        };
        shares.uses -= 1;
        shares.charged &= !chosen.charged;
        shares
            .consumed
            .iter_mut()
            .zip(&share)
            .for_each(|(sum, amount)| *sum -= amount.nanos);
        if shares.uses == 0 {
            self.shares.remove(&device.id);
        }
    }
}
