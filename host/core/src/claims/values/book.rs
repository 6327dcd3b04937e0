//! What is known of values below `/sys` that drivers changed: which stood there before, whose is put back and when, and who inherits.
//! No IO, no clock, no task. The rules are in `docs/decisions/0005-restored-values.md`.

use std::collections::BTreeMap;

use crate::driver::values::Write;
use nodedock_model::limit::{VALUES_BYTES_PER_CLAIM_MAX, VALUES_PER_CLAIM_MAX};
use nodedock_model::{Caller, ClaimValues, DriverName, KeptValue, ObjectRef, Problem, Uid};

/// Values of every claim, of this boot only.
#[derive(Debug, Default)]
pub(super) struct Book {
    claims: BTreeMap<Uid, ClaimValues>,
    boot_id: String,
    last_order: u64,
    /// Claims of which the checkpoint has values of another boot.
    outlived: Vec<Uid>,
    /// Claims whose release was begun by an older release of this program, which noted that here, in whatever boot.
    releasing: Vec<(Uid, Caller)>,
}

impl Book {
    pub(super) fn new(mut records: Vec<ClaimValues>, boot_id: &str) -> Self {
        let begun = |record: &mut ClaimValues| Some((record.id.uid.clone(), record.releasing.take()?));
        let releasing = records.iter_mut().filter_map(begun).collect();
        let (records, outlived): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| record.boot_id == boot_id);
        let orders = records.iter().flat_map(|record| record.drivers.values().flatten());
        Self {
            last_order: orders.map(|kept| kept.order).max().unwrap_or(0),
            claims: records.into_iter().map(|record| (record.id.uid.clone(), record)).collect(),
            boot_id: boot_id.to_owned(),
            outlived: outlived.into_iter().map(|record| record.id.uid).collect(),
            releasing,
        }
    }

    pub(super) fn get(&self, uid: &Uid) -> Option<&ClaimValues> {
        self.claims.get(uid)
    }

    pub(super) fn claims(&self) -> impl Iterator<Item = &ClaimValues> {
        self.claims.values()
    }

    /// Claims whose values in the checkpoint mean nothing any more.
    pub(super) fn take_outlived(&mut self) -> Vec<Uid> {
        std::mem::take(&mut self.outlived)
    }

    pub(super) fn take_releasing(&mut self) -> Vec<(Uid, Caller)> {
        std::mem::take(&mut self.releasing)
    }

    /// Takes a write into the values of its claims before it is made. Refused as a whole.
    pub(super) fn intend(&mut self, write: &Write<'_>) -> Result<(), Problem> {
        write.claims.iter().try_for_each(|claim| self.check_room(claim, write))?;
        let first = self.first_of(write);
        for claim in write.claims {
            let boot_id = &self.boot_id;
            let record =
                self.claims.entry(claim.uid.clone()).or_insert_with(|| new_record(claim, boot_id.clone()));
            let values = record.drivers.entry(write.driver.clone()).or_default();
            let at = values.iter().position(|kept| kept.path == write.path && kept.inode == write.inode);
            match at {
                Some(at) => intend_again(&mut values[at], write),
                None => {
                    // What was kept of a device that is gone is of no use.
                    values.retain(|kept| kept.path != write.path);
                    values.push(KeptValue { pending: Some(write.value.to_owned()), ..first.clone() });
                }
            }
        }
        self.last_order = self.last_order.max(first.order);
        Ok(())
    }

    /// What a claim keeps that is new to the path: claims of one call share what the first of them found.
    fn first_of(&self, write: &Write<'_>) -> KeptValue {
        let known = write.claims.iter().filter_map(|claim| {
            let values = self.claims.get(&claim.uid)?.drivers.get(write.driver)?;
            values.iter().find(|kept| kept.path == write.path && kept.inode == write.inode)
        });
        let new = || KeptValue {
            path: write.path.to_owned(),
            inode: write.inode,
            order: self.last_order + 1,
            before: write.before.map(str::to_owned),
            after: None,
            pending: None,
            putting_back: false,
            also_left: Vec::new(),
        };
        known.min_by_key(|kept| kept.order).map_or_else(new, |kept| KeptValue {
            after: None,
            pending: None,
            putting_back: false,
            also_left: Vec::new(),
            ..kept.clone()
        })
    }

    fn check_room(&self, claim: &ObjectRef, write: &Write<'_>) -> Result<(), Problem> {
        let Some(values) = self.claims.get(&claim.uid).and_then(|record| record.drivers.get(write.driver))
        else {
            return Ok(());
        };
        let others = values.iter().filter(|kept| kept.path != write.path);
        let (count, bytes) = others.fold((0, 0), |(count, bytes), kept| (count + 1, bytes + kept.bytes()));
        if count < VALUES_PER_CLAIM_MAX && bytes <= VALUES_BYTES_PER_CLAIM_MAX {
            return Ok(());
        }
        let message = format!(
            "the driver changed {VALUES_PER_CLAIM_MAX} values, or {VALUES_BYTES_PER_CLAIM_MAX} bytes of them, for claim {claim} already"
        );
        Err(Problem::denied("too-many-values", message).with("path", write.path))
    }

    /// Notes what came of a write: what it reads as, or (none) that nothing was changed.
    pub(super) fn settle(&mut self, write: &Write<'_>, stands: Option<&str>) {
        for claim in write.claims {
            let Some(record) = self.claims.get_mut(&claim.uid) else { continue };
            let Some(values) = record.drivers.get_mut(write.driver) else { continue };
            for kept in values.iter_mut().filter(|kept| kept.path == write.path) {
                kept.pending = None;
                if let Some(stands) = stands {
                    kept.after = Some(stands.to_owned());
                    kept.putting_back = false;
                    kept.also_left.clear();
                }
            }
            values.retain(|kept| kept.after.is_some() || kept.pending.is_some());
        }
    }

    /// Marks that a claim's values of some drivers are about to be put back. False: it was known of all of them.
    pub(super) fn intend_put_back(&mut self, uid: &Uid, wanted: impl Fn(&DriverName) -> bool) -> bool {
        let Some(record) = self.claims.get_mut(uid) else { return false };
        let drivers = record.drivers.iter_mut().filter(|(driver, _)| wanted(driver));
        let mut changed = false;
        for kept in drivers.flat_map(|(_, values)| values) {
            changed |= !std::mem::replace(&mut kept.putting_back, true);
        }
        changed
    }

    /// A claim's values of some drivers, the newest first: the order in which they are put back.
    pub(super) fn newest_first(
        &self,
        uid: &Uid,
        wanted: impl Fn(&DriverName) -> bool,
    ) -> Vec<(DriverName, KeptValue)> {
        let Some(record) = self.claims.get(uid) else { return Vec::new() };
        let values = record.newest_first().into_iter().filter(|(driver, _)| wanted(driver));
        values.map(|(driver, kept)| (driver.clone(), kept.clone())).collect()
    }

    /// Another claim, or a driver of this one that `stays` with it, that wrote the path in the same call or found this value there:
    /// it is theirs to put back.
    pub(super) fn successor(
        &self,
        uid: &Uid,
        kept: &KeptValue,
        stays: &dyn Fn(&DriverName) -> bool,
    ) -> Option<(&ObjectRef, &DriverName)> {
        let later = |other: &&KeptValue| {
            other.path == kept.path && other.inode == kept.inode && other.order >= kept.order
        };
        let parts = self.claims.values().flat_map(|record| {
            let is_others = move |driver: &DriverName| record.id.uid != *uid || stays(driver);
            let others = record.drivers.iter().filter(move |(driver, _)| is_others(driver));
            others.map(move |(driver, values)| (&record.id, driver, values))
        });
        let of_path = parts.filter_map(|(id, driver, values)| {
            let first = values.iter().filter(later).map(|other| other.order).min()?;
            Some((first, (id, driver)))
        });
        of_path.min_by_key(|(order, _)| *order).map(|(_, other)| other)
    }

    /// Ends a claim's values, of one driver or of all. A later claim, or another driver of this one, that found there what these left
    /// has found nothing that anybody wants any more: it inherits what they had found. Gives what is no more, and the claims that are
    /// changed.
    pub(super) fn end(&mut self, uid: &Uid, driver: Option<&DriverName>) -> Ended {
        let Some(record) = self.claims.get_mut(uid) else { return Ended::default() };
        let before = record.clone();
        let mut gone: Vec<KeptValue> = match driver {
            Some(driver) => record.drivers.remove(driver).unwrap_or_default(),
            None => std::mem::take(&mut record.drivers).into_values().flatten().collect(),
        };
        // The newest first: what one hands down may be what the one before it left.
        gone.sort_by_key(|kept| std::cmp::Reverse(kept.order));
        if record.drivers.is_empty() {
            self.claims.remove(uid);
        }
        let heirs = gone.iter().filter_map(|kept| self.hand_down(kept)).collect();
        Ended { before: Some(before), heirs }
    }

    fn hand_down(&mut self, gone: &KeptValue) -> Option<Uid> {
        let values = self.claims.values_mut().flat_map(|record| {
            let uid = record.id.uid.clone();
            record.drivers.values_mut().flatten().map(move |kept| (uid.clone(), kept))
        });
        let later = values.filter(|(_, kept)| {
            kept.path == gone.path && kept.inode == gone.inode && kept.order > gone.order
        });
        let (uid, heir) = later.min_by_key(|(_, kept)| kept.order)?;
        let found_it = heir.before.as_deref().is_some_and(|before| gone.may_have_left(before));
        if !found_it {
            return None;
        }
        heir.inherit(gone.before.clone());
        Some(uid)
    }

    /// Takes back an end that did not become durable. What heirs have inherited they keep: the claim is on its way out.
    pub(super) fn restore(&mut self, before: ClaimValues) {
        self.claims.insert(before.id.uid.clone(), before);
    }
}

/// What an end changed.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The claim's values before it.
    pub(super) before: Option<ClaimValues>,
    pub(super) heirs: Vec<Uid>,
}

/// What was found first stays. After a crash nobody knows what came of the last write: what stands there now is taken for its work.
fn intend_again(kept: &mut KeptValue, write: &Write<'_>) {
    if kept.pending.is_some() && write.before.is_some() {
        kept.after = write.before.map(str::to_owned);
    }
    kept.pending = Some(write.value.to_owned());
}

fn new_record(claim: &ObjectRef, boot_id: String) -> ClaimValues {
    let (drivers, unknown) = (BTreeMap::new(), BTreeMap::new());
    ClaimValues { id: claim.clone(), boot_id, drivers, releasing: None, unknown }
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod book_tests;
