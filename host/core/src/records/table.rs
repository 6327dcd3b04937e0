//! The claims and pods that this node knows, with the indexes that decisions need.
//!
//! A claim takes devices here before that is durable, so that two requests cannot both take them; a failed commit restores what was
//! before. A claim that is unprepared leaves the table after the commit only: until then no other claim can have its devices. No
//! answer is made from the table before it is durable. Pure: decides only which claim is in another's way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;

use super::change_log::{ChangeLog, ClaimChanges};
use super::ended::EndedClaims;
use super::index::Index;
use crate::driver::PreparedClaims;
use nodedock_model::{
    ClaimRecord, DriverClaimRecord, DriverName, EndedRecord, ExtendedResource, HeldKeys, Hold,
    ObjectName, ObjectRef, PodRecord, ReleaseRecord, Uid,
};

/// Records of released claims, the newest: years of manual releases.
pub(crate) const RELEASED_MAX: usize = 256;

/// Every claim and pod that this node knows. No query looks at every claim.
#[derive(Debug, Default)]
pub struct ClaimTable {
    claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    pods: BTreeMap<Uid, Arc<PodRecord>>,
    by_name: BTreeMap<(ObjectName, ObjectName), Uid>,
    /// Claims by namespace.
    namespaces: Index<ObjectName>,
    /// Holds of claims, which exclude other claims.
    held: HeldKeys<Uid>,
    /// Claims by `driver/pool/device`, including claims with admin access, which exclude no claim.
    users: Index<String>,
    /// Claims by the counters and capacities that several devices or claims use (`Use::of`).
    things: Index<String>,
    claims_of_pods: Index<Uid>,
    /// Every pod that has a record or a claim, by namespace and name.
    known_pods: BTreeSet<ObjectRef>,
    /// Claims by digest of the driver file that prepared a part of them, or was called to.
    prepared_by: Index<String>,
    /// UIDs of claims whose records this release cannot read. Another may, so their files, values and code stay.
    unreadable: BTreeSet<String>,
    /// The newest claims that operators released by force.
    released: BTreeMap<Uid, Arc<ReleaseRecord>>,
    ended: EndedClaims,
    log: ChangeLog,
}

impl ClaimTable {
    pub fn new(claims: Vec<ClaimRecord>, pods: Vec<PodRecord>) -> Self {
        let mut table = Self::default();
        claims
            .into_iter()
            .for_each(|claim| drop(table.put(Arc::new(claim))));
        pods.into_iter()
            .for_each(|pod| drop(table.put_pod(Arc::new(pod))));
        table
    }

    /// Adds claims of which the checkpoint has records that cannot be read.
    pub fn with_unreadable(self, claims: BTreeSet<String>) -> Self {
        Self {
            unreadable: claims,
            ..self
        }
    }

    pub fn with_released(self, records: Vec<ReleaseRecord>) -> Self {
        let released = records
            .into_iter()
            .map(|record| (record.id.uid.clone(), Arc::new(record)));
        Self {
            released: released.collect(),
            ..self
        }
    }

    pub fn with_ended(self, records: Vec<EndedRecord>) -> Self {
        let ended = EndedClaims::new(records);
        Self { ended, ..self }
    }

    /// Returns whether there is a record of a claim, readable or not.
    pub fn is_known(&self, uid: &str) -> bool {
        self.claims.contains_key(uid) || self.unreadable.contains(uid)
    }

    pub fn claim(&self, uid: &str) -> Option<&Arc<ClaimRecord>> {
        self.claims.get(uid)
    }

    pub fn claims(&self) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.claims.values()
    }

    /// Claims of a namespace, by UID.
    pub fn claims_in(&self, namespace: &ObjectName) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.found(self.namespaces.get(namespace))
    }

    /// Returns the claims that changed since a revision of an earlier answer; all claims, if there is none or it is too long ago. Costs as
    /// much as changed.
    pub fn changes_since(&self, seen: Option<u64>) -> ClaimChanges {
        let revision = self.log.revision();
        let changed = seen.and_then(|seen| self.log.since(seen));
        let (is_all, claims) = match changed {
            Some(changed) => {
                let claims = changed.into_iter().map(|uid| {
                    let record = self.claims.get(uid).cloned();
                    (uid.clone(), record)
                });
                (false, claims.collect())
            }
            None => {
                let all = self.claims.iter();
                let claims = all.map(|(uid, record)| (uid.clone(), Some(record.clone())));
                (true, claims.collect())
            }
        };
        ClaimChanges {
            revision,
            is_all,
            claims,
        }
    }

    pub fn claim_named(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Option<&Arc<ClaimRecord>> {
        self.claims
            .get(self.by_name.get(&(namespace.clone(), name.clone()))?)
    }

    pub fn pod(&self, uid: &str) -> Option<&Arc<PodRecord>> {
        self.pods.get(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = &Arc<PodRecord>> {
        self.pods.values()
    }

    /// Pods of a name that have a record or a claim: several, if one replaced another.
    pub fn pods_named(&self, namespace: &ObjectName, name: &ObjectName) -> Vec<ObjectRef> {
        let Ok(first) = Uid::new("0") else {
            return Vec::new();
        };
        let from = ObjectRef {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: first,
        };
        // No UID sorts before "0".
        self.known_pods
            .range(from..)
            .take_while(|pod| pod.namespace == *namespace && pod.name == *name)
            .cloned()
            .collect()
    }

    /// The pod of a UID, if it has a record or a claim.
    pub fn pod_ref(&self, uid: &Uid) -> Option<ObjectRef> {
        let of_record = self.pods.get(uid).map(|record| &record.pod);
        of_record
            .or_else(|| {
                self.found(self.claims_of_pods.get(uid))
                    .next()?
                    .pods
                    .get(uid)
            })
            .cloned()
    }

    /// Claims that a pod holds, in the order in which operations lock them.
    pub fn claims_of_pod(&self, pod: &str) -> Vec<Arc<ClaimRecord>> {
        self.found(self.claims_of_pods.get(pod)).cloned().collect()
    }

    /// Drivers of which claims have devices, sorted. Costs as much as there are drivers, however many claims they have.
    pub fn drivers(&self) -> Vec<DriverName> {
        let (mut drivers, mut from) = (Vec::new(), String::new());
        while let Some(key) = self.users.first_from(from.as_str()) {
            let driver = key.split('/').next().unwrap_or_default();
            drivers.extend(DriverName::new(driver).ok());
            // `0` follows `/`.
            from = format!("{driver}0");
        }
        drivers
    }

    /// Claims that have a device of a driver, each once.
    pub fn claims_of_driver(&self, driver: &DriverName) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        let (from, to) = device_keys_of(driver);
        self.found(self.users.range(from..to).into_iter())
    }

    /// Returns whether a claim has a device of a driver, or may have: any claim that cannot be read may.
    pub fn has_claims_of(&self, driver: &DriverName) -> bool {
        let (from, to) = device_keys_of(driver);
        let first = self.users.first_from(from.as_str());
        !self.unreadable.is_empty() || first.is_some_and(|key| *key < to)
    }

    /// Returns whether a claim was prepared by the driver file of a digest, or may have been: any claim that cannot be read may.
    pub fn needs_code(&self, digest: &str) -> bool {
        self.prepared_by.contains(digest) || !self.unreadable.is_empty()
    }

    /// Claims that have a device, by UID.
    pub fn users_of(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.found(self.users.get(&device_key(driver, pool, device)))
    }

    /// Claims that keep one of `holds` from a claim that has none of them yet, each once.
    pub fn holders(&self, holds: &[Hold]) -> Vec<ObjectRef> {
        let others = holds
            .iter()
            .flat_map(|hold| self.held.all_in_the_way(None, hold));
        let uids: BTreeSet<_> = others.map(|(uid, _)| uid).collect();
        self.found(uids.into_iter())
            .map(|record| record.id.clone())
            .collect()
    }

    /// Claims whose devices use a thing (`Use::of`).
    pub(crate) fn users_of_thing(&self, thing: &str) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.found(self.things.get(thing))
    }

    fn found<'a>(
        &'a self,
        uids: impl Iterator<Item = &'a Uid>,
    ) -> impl Iterator<Item = &'a Arc<ClaimRecord>> {
        uids.filter_map(|uid| self.claims.get(uid))
    }

    /// Returns the devices that pods have of device plugins without an adapter, by resource.
    pub fn taken_of_plugins(&self) -> BTreeMap<ExtendedResource, BTreeSet<String>> {
        let mut taken: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
        for claim in self.claims().filter(|claim| claim.is_of_plugin()) {
            let Some(of) = &claim.resource else { continue };
            taken
                .entry(of.resource.clone())
                .or_default()
                .extend(of.devices.keys().cloned());
        }
        taken
    }

    /// Sets a claim's record and returns the one before.
    pub fn put(&mut self, record: Arc<ClaimRecord>) -> Option<Arc<ClaimRecord>> {
        let uid = &record.id.uid;
        let before = self.take(uid);
        self.log.note(uid);
        self.by_name.insert(full_name(&record), uid.clone());
        self.namespaces.add(record.id.namespace.clone(), uid);
        record
            .holds
            .iter()
            .for_each(|hold| self.held.add(uid, hold));
        device_keys(&record).for_each(|key| self.users.add(key, uid));
        things(&record).for_each(|thing| self.things.add(thing.to_owned(), uid));
        for pod in record.pods.values() {
            self.claims_of_pods.add(pod.uid.clone(), uid);
            self.known_pods.insert(pod.clone());
        }
        digests(&record).for_each(|digest| self.prepared_by.add(digest.to_owned(), uid));
        self.claims.insert(uid.clone(), record);
        before
    }

    pub fn remove(&mut self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        let record = self.take(uid)?;
        self.log.note(uid);
        Some(record)
    }

    fn take(&mut self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        let record = self.claims.remove(uid)?;
        let name = full_name(&record);
        self.namespaces.remove(&record.id.namespace, uid);
        if self.by_name.get(&name) == Some(uid) {
            self.by_name.remove(&name);
        }
        record
            .holds
            .iter()
            .for_each(|hold| self.held.remove(uid, hold));
        device_keys(&record).for_each(|key| self.users.remove(&key, uid));
        things(&record).for_each(|thing| self.things.remove(thing, uid));
        digests(&record).for_each(|digest| self.prepared_by.remove(digest, uid));
        for pod in record.pods.values() {
            self.claims_of_pods.remove(&pod.uid, uid);
            self.forget_pod(pod);
        }
        Some(record)
    }

    pub fn put_pod(&mut self, record: Arc<PodRecord>) -> Option<Arc<PodRecord>> {
        self.known_pods.insert(record.pod.clone());
        self.pods.insert(record.pod.uid.clone(), record)
    }

    pub fn remove_pod(&mut self, uid: &str) -> Option<Arc<PodRecord>> {
        let record = self.pods.remove(uid)?;
        self.forget_pod(&record.pod);
        Some(record)
    }

    fn forget_pod(&mut self, pod: &ObjectRef) {
        if !self.pods.contains_key(&pod.uid) && !self.claims_of_pods.contains(&pod.uid) {
            self.known_pods.remove(pod);
        }
    }

    /// Those of `pods` that hold no claims but `except`.
    pub fn pods_with_nothing_but<'a>(
        &self,
        pods: &'a BTreeSet<Uid>,
        except: &[Uid],
    ) -> Vec<&'a Uid> {
        pods.iter()
            .filter(|pod| {
                self.claims_of_pods
                    .get(*pod)
                    .all(|claim| except.contains(claim))
            })
            .collect()
    }

    /// The claim that keeps one of `holds` from the claim `uid`, and the key that it holds. `made_for`: the claim is for an extended resource of a
    /// pod, whose claims for that resource do not exclude each other: an init container leaves its devices to those after it.
    pub(crate) fn conflict(
        &self,
        uid: &Uid,
        made_for: Option<(&ExtendedResource, &Uid)>,
        holds: &[Hold],
    ) -> Option<(&Arc<ClaimRecord>, &str)> {
        if made_for.is_none() {
            let found = holds
                .iter()
                .find_map(|hold| self.held.in_the_way(Some(uid), hold));
            return found.and_then(|(holder, key)| Some((self.claims.get(holder)?, key)));
        }
        holds.iter().find_map(|hold| {
            let others = self.held.all_in_the_way(Some(uid), hold).into_iter();
            let mut others =
                others.filter_map(|(holder, key)| Some((self.claims.get(holder)?, key)));
            others.find(|(holder, _)| holder.made_for() != made_for)
        })
    }

    /// Claims that operators released by force, the oldest first.
    pub fn released(&self) -> Vec<Arc<ReleaseRecord>> {
        let mut records: Vec<_> = self.released.values().cloned().collect();
        records.sort_by_key(|record| record.at_ms);
        records
    }

    pub(crate) fn ended(&self) -> &EndedClaims {
        &self.ended
    }

    /// Takes claims that ended, and forgets those beyond the bounds (`EndedClaims::outdated`).
    pub(crate) fn put_ended(&mut self, new: Vec<Arc<EndedRecord>>, outdated: &[Uid]) {
        self.ended.put(new, outdated);
    }

    /// The oldest released claims, beyond the bound, if `new` is released now.
    pub(crate) fn outdated_releases(&self, new: &Uid) -> Vec<Uid> {
        let others = self
            .released()
            .into_iter()
            .rev()
            .filter(|record| record.id.uid != *new);
        others
            .skip(RELEASED_MAX - 1)
            .map(|record| record.id.uid.clone())
            .collect()
    }

    pub(crate) fn put_released(&mut self, record: Arc<ReleaseRecord>, outdated: &[Uid]) {
        outdated
            .iter()
            .for_each(|uid| drop(self.released.remove(uid)));
        self.released.insert(record.id.uid.clone(), record);
    }
}

/// The table that the manager changes and drivers read as `PreparedClaims`.
pub type SharedClaimTable = Mutex<ClaimTable>;

impl PreparedClaims for SharedClaimTable {
    fn after(
        &self,
        driver: &DriverName,
        device: Option<(&str, &str)>,
        after: Option<&str>,
        limit: usize,
    ) -> Vec<DriverClaimRecord> {
        let table = self.lock();
        let later =
            |record: &&Arc<ClaimRecord>| after.is_none_or(|uid| record.id.uid.as_str() > uid);
        let prepared = |record: &Arc<ClaimRecord>| called_for(record, driver);
        match device {
            None => table
                .claims_of_driver(driver)
                .filter(later)
                .filter_map(prepared)
                .take(limit)
                .collect(),
            Some((pool, device)) => table
                .users_of(driver, pool, device)
                .filter(later)
                .filter_map(prepared)
                .take(limit)
                .collect(),
        }
    }

    fn get(&self, driver: &DriverName, uid: &str) -> Option<DriverClaimRecord> {
        self.lock()
            .claim(uid)
            .and_then(|record| called_for(record, driver))
    }
}

/// A claim that the driver has prepared, or was called to.
fn called_for(record: &ClaimRecord, driver: &DriverName) -> Option<DriverClaimRecord> {
    let part = record.drivers.get(driver)?;
    let is_called = part.prepared.is_some() || part.by.is_some();
    is_called.then(|| record.driver_record(driver))?
}

/// The table's state before changes that are not durable yet.
#[derive(Default)]
pub(crate) struct Undo {
    claims: Vec<(Uid, Option<Arc<ClaimRecord>>)>,
    pods: Vec<(Uid, Option<Arc<PodRecord>>)>,
}

impl Undo {
    pub(crate) fn put(&mut self, table: &mut ClaimTable, record: &Arc<ClaimRecord>) {
        self.claims
            .push((record.id.uid.clone(), table.put(record.clone())));
    }

    pub(crate) fn put_pod(&mut self, table: &mut ClaimTable, record: &Arc<PodRecord>) {
        self.pods
            .push((record.pod.uid.clone(), table.put_pod(record.clone())));
    }

    pub(crate) fn remove_pod(&mut self, table: &mut ClaimTable, uid: &Uid) {
        self.pods
            .push((uid.clone(), table.remove_pod(uid.as_str())));
    }

    /// Undoes the changes of these claims.
    pub(crate) fn restore_claims(&mut self, table: &mut ClaimTable, uids: &BTreeSet<Uid>) {
        let (undone, kept) = std::mem::take(&mut self.claims)
            .into_iter()
            .partition(|(uid, _)| uids.contains(uid));
        self.claims = kept;
        let undone = Self {
            claims: undone,
            pods: Vec::new(),
        };
        undone.restore(table);
    }

    /// Undoes the newest change first.
    pub(crate) fn restore(self, table: &mut ClaimTable) {
        for (uid, before) in self.claims.into_iter().rev() {
            drop(table.remove(&uid));
            before.map(|record| table.put(record));
        }
        for (uid, before) in self.pods.into_iter().rev() {
            drop(table.remove_pod(uid.as_str()));
            before.map(|record| table.put_pod(record));
        }
    }
}

fn full_name(record: &ClaimRecord) -> (ObjectName, ObjectName) {
    (record.id.namespace.clone(), record.id.name.clone())
}

/// The range of a driver's keys of devices: `0` follows `/`.
fn device_keys_of(driver: &DriverName) -> (String, String) {
    (format!("{driver}/"), format!("{driver}0"))
}

fn device_keys(record: &ClaimRecord) -> impl Iterator<Item = String> {
    let devices = record.allocation.devices.iter();
    devices.map(|device| device_key(&device.driver, device.pool.as_str(), device.device.as_str()))
}

fn things(record: &ClaimRecord) -> impl Iterator<Item = &str> {
    record
        .holds
        .iter()
        .flat_map(|hold| &hold.uses)
        .map(|used| used.of.as_str())
}

fn digests(record: &ClaimRecord) -> impl Iterator<Item = &str> {
    let by = record.drivers.values().filter_map(|part| part.by.as_ref());
    by.map(|by| by.digest.as_str())
        .filter(|digest| !digest.is_empty())
}

pub(crate) fn device_key(driver: &DriverName, pool: &str, device: &str) -> String {
    format!("{driver}/{pool}/{device}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::claims::fixtures::{claim, driver, pod};
    use nodedock_model::ClaimState;

    #[test]
    fn each_driver_is_listed_once() {
        let record = |name: &str, devices: &[&str]| {
            let claim = claim(name, devices, &[&pod("a")]);
            let mut record = ClaimRecord::new(claim.id, ClaimState::Prepared, "boot-1");
            record.allocation = claim.allocation.unwrap();
            record
        };
        let claims = vec![
            record("one", &["gpu/0", "gpu/1", "nic/0"]),
            record("two", &["gpu/0", "gpu-2/0"]),
            record("three", &["gpu0/0"]),
        ];
        let table = ClaimTable::new(claims, Vec::new());
        assert_eq!(table.drivers(), ["gpu-2", "gpu", "gpu0", "nic"].map(driver));
        assert_eq!(ClaimTable::default().drivers(), []);
        for (name, is_known) in [
            ("gpu", true),
            ("gpu0", true),
            ("gp", false),
            ("nic-2", false),
        ] {
            assert_eq!(table.has_claims_of(&driver(name)), is_known, "{name}");
        }
    }
}
