//! Check that the exact requests of a claim have enough devices at all, before any combination is tried: a matching of requests with
//! devices.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::request::{Requests, Slot};
use super::table::Table;
use super::usable::{Checks, Scan};

/// Requests that need more devices together than they can use.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shortage {
    /// Numbers of the slots.
    pub(super) slots: BTreeSet<u32>,
    pub(super) needed: usize,
    pub(super) usable: usize,
}

/// A device, and the slot if other slots can have a share of it.
type Supply = (u32, Option<u32>);

struct Matching<'r, 'c, 'a> {
    requests: &'r Requests<'a>,
    checks: &'c mut Checks<'a>,
    scans: &'c mut [Scan],
    reserved: &'c Table<bool>,
    slot_of_supply: HashMap<Supply, u32>,
}

/// Returns a shortage that no combination can help. `reserved` are the devices that `All` requests have to have. A device on which a
/// selector fails counts as usable, so that the search comes to it.
pub(super) fn shortage<'a>(
    requests: &Requests<'a>,
    checks: &mut Checks<'a>,
    scans: &mut [Scan],
    reserved: &Table<bool>,
) -> Option<Shortage> {
    let mut matching = Matching {
        requests,
        checks,
        scans,
        reserved,
        slot_of_supply: HashMap::new(),
    };
    for slot in requests.slots.iter().filter(|slot| !slot.is_sub_request) {
        for _ in 0..slot.count.unwrap_or(0) {
            let mut visited = HashSet::new();
            if !matching.assign(slot, &mut visited) {
                return matching.shortage(slot, &visited);
            }
        }
    }
    None
}

impl Matching<'_, '_, '_> {
    /// Assigns a supply to one more device of a slot, and moves others to other supplies for it. Its depth is bounded by the devices of a
    /// claim.
    fn assign(&mut self, slot: &Slot<'_>, visited: &mut HashSet<Supply>) -> bool {
        let mut place = 0;
        while let Some(supply) = self.supply_at(slot, place) {
            place += 1;
            if self.slot_of_supply.get(&supply) == Some(&slot.number) || !visited.insert(supply) {
                visited.insert(supply);
                continue;
            }
            let requests = self.requests;
            let other = self
                .slot_of_supply
                .get(&supply)
                .and_then(|other| requests.slot(*other));
            let reserved = supply.1.is_none() && self.reserved.get(supply.0);
            if !reserved && other.is_none_or(|other| self.assign(other, visited)) {
                self.slot_of_supply.insert(supply, slot.number);
                return true;
            }
        }
        false
    }

    fn supply_at(&mut self, slot: &Slot<'_>, place: usize) -> Option<Supply> {
        let scan = self.scans.get_mut(slot.number as usize)?;
        let candidate = scan.get(place, slot, self.checks)?;
        let device = self.checks.inventory.device(candidate.device)?;
        Some((device.id, device.is_shareable().then_some(slot.number)))
    }

    /// The visited supplies are all that their slots can use.
    fn shortage(&self, slot: &Slot<'_>, visited: &HashSet<Supply>) -> Option<Shortage> {
        let mut slots: BTreeSet<u32> = visited
            .iter()
            .filter_map(|supply| self.slot_of_supply.get(supply))
            .copied()
            .collect();
        slots.insert(slot.number);
        let mut scans = slots.iter().map(|slot| self.scans.get(*slot as usize));
        if scans.any(|scan| scan.is_some_and(Scan::has_failures)) {
            return None;
        }
        let counts = slots
            .iter()
            .filter_map(|slot| self.requests.slot(*slot)?.count);
        Some(Shortage {
            needed: counts.sum(),
            usable: visited
                .iter()
                .filter(|supply| supply.1.is_some() || !self.reserved.get(supply.0))
                .count(),
            slots,
        })
    }
}
