//! The records of sysfs values that drivers changed: the values before, which claim restores them, and which claim inherits them; and the
//! progress that drivers saved. Pure. The rules are in `docs/decisions/0005-restored-values.md`.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::Change;
use crate::driver::values::Write;
use nodedock_model::{
    ClaimValues, DriverName, KeptValue, ObjectRef, Problem, ProblemCode, Progress, Uid,
};

/// Values below `/sys` that one driver changes for a claim, and bytes of them with their paths: each write makes all values of a claim
/// durable again.
pub(crate) const VALUES_PER_CLAIM_MAX: usize = 256;
pub(crate) const VALUES_BYTES_PER_CLAIM_MAX: usize = 256 << 10;

/// The values of every claim, of this boot only.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub(super) claims: BTreeMap<Uid, ClaimValues>,
    boot_id: String,
    last_order: u64,
    /// Claims of which the checkpoint has values of another boot.
    pub(super) outlived: Vec<Uid>,
}

impl Records {
    pub(super) fn new(mut records: Vec<ClaimValues>, boot_id: &str) -> Self {
        let mut outlived = Vec::new();
        records.retain_mut(|record| {
            if record.boot_id != boot_id {
                outlived.push(record.id.uid.clone());
                boot_id.clone_into(&mut record.boot_id);
                record.drivers.clear();
            }
            !record.is_empty()
        });
        let orders = records
            .iter()
            .flat_map(|record| record.drivers.values().flatten());
        Self {
            last_order: orders.map(|kept| kept.order).max().unwrap_or(0),
            claims: records
                .into_iter()
                .map(|record| (record.id.uid.clone(), record))
                .collect(),
            boot_id: boot_id.to_owned(),
            outlived,
        }
    }

    pub(super) fn get(&self, uid: &Uid) -> Option<&ClaimValues> {
        self.claims.get(uid)
    }

    pub(super) fn progress(&self, uid: &Uid, driver: &DriverName) -> Vec<u8> {
        let saved = self.get(uid).and_then(|record| record.progress.get(driver));
        saved.map(|progress| progress.0.clone()).unwrap_or_default()
    }

    pub(super) fn progress_of(&self, driver: &DriverName) -> BTreeMap<Uid, Vec<u8>> {
        let saved = self
            .claims
            .iter()
            .filter_map(|(uid, record)| Some((uid, record.progress.get(driver)?)));
        saved
            .map(|(uid, progress)| (uid.clone(), progress.0.clone()))
            .collect()
    }

    /// Sets a driver's progress; without bytes, removes it. Returns the progress before.
    pub(super) fn set_progress(
        &mut self,
        claim: &ObjectRef,
        driver: &DriverName,
        bytes: Vec<u8>,
    ) -> Vec<u8> {
        let boot_id = self.boot_id.clone();
        let record = self
            .claims
            .entry(claim.uid.clone())
            .or_insert_with(|| new_record(claim, boot_id));
        let before = match bytes.is_empty() {
            true => record.progress.remove(driver),
            false => record.progress.insert(driver.clone(), Progress(bytes)),
        };
        if record.is_empty() {
            self.claims.remove(&claim.uid);
        }
        before.unwrap_or_default().0
    }

    /// Removes the progress of a driver that has prepared the claim. Returns the claim's record before, if that changed it.
    pub(super) fn drop_progress(&mut self, uid: &Uid, driver: &DriverName) -> Option<ClaimValues> {
        let before = self
            .get(uid)
            .filter(|record| record.progress.contains_key(driver))?
            .clone();
        self.set_progress(&before.id, driver, Vec::new());
        Some(before)
    }

    /// The value that a path had before a driver's first write for any of these claims, with its inode.
    pub(super) fn before(
        &self,
        driver: &DriverName,
        claims: &[ObjectRef],
        path: &str,
    ) -> Option<(u64, String)> {
        let values = claims
            .iter()
            .filter_map(|claim| self.get(&claim.uid)?.drivers.get(driver))
            .flatten();
        let first = values
            .filter(|kept| kept.path == path)
            .min_by_key(|kept| kept.order)?;
        Some((first.inode, first.before.clone()?))
    }

    /// The change that makes a claim's values durable as they are now.
    pub(super) fn change(&self, uid: Uid) -> Change {
        match self.get(&uid) {
            Some(record) => Change::PutValues(Arc::new(record.clone())),
            None => Change::DeleteValues(uid),
        }
    }

    /// Records a write for each of its claims before it is made. It is refused as a whole.
    pub(super) fn intend(&mut self, write: &Write<'_>) -> Result<(), Problem> {
        write
            .claims
            .iter()
            .try_for_each(|claim| self.check_room(claim, write))?;
        let first = self.first_of(write);
        for claim in write.claims {
            let boot_id = &self.boot_id;
            let record = self
                .claims
                .entry(claim.uid.clone())
                .or_insert_with(|| new_record(claim, boot_id.clone()));
            let values = record.drivers.entry(write.driver.clone()).or_default();
            let at = values
                .iter()
                .position(|kept| kept.path == write.path && kept.inode == write.inode);
            match at {
                Some(at) => intend_again(&mut values[at], write),
                None => {
                    // The earlier record is of a device that is gone.
                    values.retain(|kept| kept.path != write.path);
                    values.push(KeptValue {
                        pending: Some(write.value.to_owned()),
                        ..first.clone()
                    });
                }
            }
        }
        self.last_order = self.last_order.max(first.order);
        Ok(())
    }

    /// The record of a claim that has none of the path yet: claims of one call share the value that the first of them found.
    fn first_of(&self, write: &Write<'_>) -> KeptValue {
        let known = write.claims.iter().filter_map(|claim| {
            let values = self.claims.get(&claim.uid)?.drivers.get(write.driver)?;
            values
                .iter()
                .find(|kept| kept.path == write.path && kept.inode == write.inode)
        });
        let first = known.min_by_key(|kept| kept.order);
        KeptValue {
            path: write.path.to_owned(),
            inode: write.inode,
            order: first.map_or(self.last_order + 1, |first| first.order),
            before: first.map_or_else(
                || write.before.map(str::to_owned),
                |first| first.before.clone(),
            ),
            after: None,
            pending: None,
            putting_back: false,
            also_left: Vec::new(),
            restored_from: None,
        }
    }

    fn check_room(&self, claim: &ObjectRef, write: &Write<'_>) -> Result<(), Problem> {
        let Some(values) = self
            .claims
            .get(&claim.uid)
            .and_then(|record| record.drivers.get(write.driver))
        else {
            return Ok(());
        };
        let others = values.iter().filter(|kept| kept.path != write.path);
        let (count, bytes) = others.fold((0, 0), |(count, bytes), kept| {
            (count + 1, bytes + kept.bytes())
        });
        if count < VALUES_PER_CLAIM_MAX && bytes <= VALUES_BYTES_PER_CLAIM_MAX {
            return Ok(());
        }
        let message = format!(
            "the driver changed {VALUES_PER_CLAIM_MAX} values, or {VALUES_BYTES_PER_CLAIM_MAX} bytes of them, for claim {claim} already"
        );
        Err(Problem::denied(ProblemCode::TooManyValues, message).with("path", write.path))
    }

    /// Records the value after a write. None: nothing was changed.
    pub(super) fn settle(&mut self, write: &Write<'_>, stands: Option<&str>) {
        for claim in write.claims {
            let Some(record) = self.claims.get_mut(&claim.uid) else {
                continue;
            };
            let Some(values) = record.drivers.get_mut(write.driver) else {
                continue;
            };
            for kept in values.iter_mut().filter(|kept| kept.path == write.path) {
                kept.pending = None;
                if let Some(stands) = stands {
                    kept.leave(stands);
                    kept.putting_back = false;
                    kept.also_left.clear();
                }
            }
            values.retain(|kept| kept.after.is_some() || kept.pending.is_some());
        }
    }

    /// Marks a claim's values of some drivers as about to be restored. False: all of them are marked already.
    pub(super) fn intend_restore(
        &mut self,
        uid: &Uid,
        wanted: impl Fn(&DriverName) -> bool,
    ) -> bool {
        let Some(record) = self.claims.get_mut(uid) else {
            return false;
        };
        let drivers = record
            .drivers
            .iter_mut()
            .filter(|(driver, _)| wanted(driver));
        let mut changed = false;
        for kept in drivers.flat_map(|(_, values)| values) {
            changed |= !std::mem::replace(&mut kept.putting_back, true);
        }
        changed
    }

    /// A claim's values of some drivers, the newest first: the order in which they are restored.
    pub(super) fn newest_first(
        &self,
        uid: &Uid,
        wanted: impl Fn(&DriverName) -> bool,
    ) -> Vec<(DriverName, KeptValue)> {
        let Some(record) = self.claims.get(uid) else {
            return Vec::new();
        };
        let values = record
            .newest_first()
            .into_iter()
            .filter(|(driver, _)| wanted(driver));
        values
            .map(|(driver, kept)| (driver.clone(), kept.clone()))
            .collect()
    }

    /// The claim that has to restore a value instead: another one, or this one with a driver that `stays`, for which the path was
    /// written in the same call or later.
    pub(super) fn successor(
        &self,
        uid: &Uid,
        kept: &KeptValue,
        stays: &dyn Fn(&DriverName) -> bool,
    ) -> Option<(&ObjectRef, &DriverName)> {
        let parts = self.claims.values().flat_map(|record| {
            let others = record
                .drivers
                .iter()
                .filter(move |(driver, _)| record.id.uid != *uid || stays(driver));
            others.map(move |(driver, values)| (&record.id, driver, values))
        });
        let of_path = parts.filter_map(|(id, driver, values)| {
            let later = values.iter().filter(|other| {
                other.path == kept.path && other.inode == kept.inode && other.order >= kept.order
            });
            let first = later.map(|other| other.order).min()?;
            Some((first, (id, driver)))
        });
        of_path
            .min_by_key(|(order, _)| *order)
            .map(|(_, other)| other)
    }

    /// Ends a claim's values, of one driver or of all. A later claim, or another driver of this one, that found a value which these left
    /// inherits the value that these had found.
    pub(super) fn end(&mut self, uid: &Uid, driver: Option<&DriverName>) -> Ended {
        let Some(record) = self.claims.get_mut(uid) else {
            return Ended::default();
        };
        let before = record.clone();
        let mut gone: Vec<KeptValue> = match driver {
            Some(driver) => {
                record.progress.remove(driver);
                record.drivers.remove(driver).unwrap_or_default()
            }
            None => {
                record.progress.clear();
                std::mem::take(&mut record.drivers)
                    .into_values()
                    .flatten()
                    .collect()
            }
        };
        // The newest first: the value that it hands down may be one that an earlier record left.
        gone.sort_by_key(|kept| std::cmp::Reverse(kept.order));
        if record.is_empty() {
            self.claims.remove(uid);
        }
        let heirs = gone
            .iter()
            .filter_map(|kept| self.hand_down(kept))
            .collect();
        Ended {
            before: Some(before),
            heirs,
        }
    }

    fn hand_down(&mut self, gone: &KeptValue) -> Option<Uid> {
        let values = self.claims.values_mut().flat_map(|record| {
            let uid = record.id.uid.clone();
            record
                .drivers
                .values_mut()
                .flatten()
                .map(move |kept| (uid.clone(), kept))
        });
        let later = values.filter(|(_, kept)| {
            kept.path == gone.path && kept.inode == gone.inode && kept.order > gone.order
        });
        let (uid, heir) = later.min_by_key(|(_, kept)| kept.order)?;
        let found_it = heir
            .before
            .as_deref()
            .is_some_and(|before| gone.may_have_been_found(before));
        if !found_it {
            return None;
        }
        heir.inherit(gone.before.clone());
        Some(uid)
    }

    /// Undoes an end that did not become durable. Heirs keep what they inherited: the claim is being unprepared.
    pub(super) fn restore(&mut self, before: ClaimValues) {
        self.claims.insert(before.id.uid.clone(), before);
    }
}

/// The changes of an end.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The claim's values before it.
    pub(super) before: Option<ClaimValues>,
    pub(super) heirs: Vec<Uid>,
}

/// The value that was found first stays recorded. After a crash the outcome of the last write is unknown: the value now is taken for it.
fn intend_again(kept: &mut KeptValue, write: &Write<'_>) {
    if let (Some(_), Some(now)) = (&kept.pending, write.before) {
        kept.leave(now);
    }
    kept.pending = Some(write.value.to_owned());
}

fn new_record(claim: &ObjectRef, boot_id: String) -> ClaimValues {
    let (drivers, progress, unknown) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    ClaimValues {
        id: claim.clone(),
        boot_id,
        drivers,
        progress,
        unknown,
    }
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
