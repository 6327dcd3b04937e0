//! The memory of the claim manager: every claim and pod that this node knows, and the indexes that decisions need.
//!
//! What is taken stands here before it is durable, so that two requests cannot both take it, and is put back when the commit
//! fails. What is given up leaves after the commit only: until then nobody else can have it. Nothing of the table is answered
//! before it is durable. Decides nothing but who is in whose way.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::sync::Arc;

use nodedock_model::{ClaimRecord, DriverName, Hold, ObjectName, ObjectRef, PodRecord, Uid};

/// Every claim and pod that this node knows, with the indexes that decisions need: none of them looks at every claim.
#[derive(Debug, Default)]
pub struct Table {
    claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    pods: BTreeMap<Uid, Arc<PodRecord>>,
    by_name: HashMap<(ObjectName, ObjectName), Uid>,
    /// By what is held, claims that keep out everybody and claims that keep out those who want it alone.
    holders: HashMap<String, Holders>,
    /// By `driver/pool/device`; claims with admin access, which hold nothing, are among them.
    users: BTreeMap<String, BTreeSet<Uid>>,
    claims_of_pods: HashMap<Uid, BTreeSet<Uid>>,
    /// By namespace and name, every pod that has a record or a claim.
    known_pods: BTreeSet<ObjectRef>,
    /// By digest of a driver's file, the parts of claims that it has prepared, or was asked for.
    prepared_by: HashMap<String, usize>,
    /// UIDs of claims of which nothing is known but that there are records of them.
    unreadable: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct Holders {
    exclusive: BTreeSet<Uid>,
    shared: BTreeSet<Uid>,
}

impl Holders {
    fn kind(&mut self, shared: bool) -> &mut BTreeSet<Uid> {
        if shared { &mut self.shared } else { &mut self.exclusive }
    }

    /// A holder other than `uid` that keeps it from somebody who would share it, or would not.
    fn in_the_way(&self, uid: &Uid, shared: bool) -> Option<&Uid> {
        let sharers = (!shared).then_some(&self.shared);
        self.exclusive.iter().chain(sharers.into_iter().flatten()).find(|other| *other != uid)
    }
}

impl Table {
    pub fn new(claims: Vec<ClaimRecord>, pods: Vec<PodRecord>) -> Self {
        let mut table = Self::default();
        claims.into_iter().for_each(|claim| drop(table.put(Arc::new(claim))));
        pods.into_iter().for_each(|pod| drop(table.put_pod(Arc::new(pod))));
        table
    }

    pub fn set_unreadable(&mut self, claims: BTreeSet<String>) {
        self.unreadable = claims;
    }

    /// Whether there is a record of a claim, if only one that cannot be read.
    pub fn is_known(&self, uid: &str) -> bool {
        self.claims.contains_key(uid) || self.unreadable.contains(uid)
    }

    pub fn claim(&self, uid: &str) -> Option<&Arc<ClaimRecord>> {
        self.claims.get(uid)
    }

    pub fn claims(&self) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.claims.values()
    }

    pub fn claim_named(&self, namespace: &ObjectName, name: &ObjectName) -> Option<&Arc<ClaimRecord>> {
        self.claims.get(self.by_name.get(&(namespace.clone(), name.clone()))?)
    }

    pub fn pod(&self, uid: &str) -> Option<&Arc<PodRecord>> {
        self.pods.get(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = &Arc<PodRecord>> {
        self.pods.values()
    }

    /// Pods of a name that have a record or a claim: several, where one replaced another.
    pub fn pods_named(&self, namespace: &ObjectName, name: &ObjectName) -> Vec<ObjectRef> {
        let Ok(first) = Uid::new("0") else { return Vec::new() };
        let from = ObjectRef { namespace: namespace.clone(), name: name.clone(), uid: first };
        let named = |pod: &&ObjectRef| pod.namespace == *namespace && pod.name == *name;
        // No UID sorts before "0".
        self.known_pods.range(from..).take_while(named).cloned().collect()
    }

    /// The pod of a UID, if it has a record or a claim.
    pub fn pod_ref(&self, uid: &Uid) -> Option<ObjectRef> {
        let of_record = self.pods.get(uid).map(|record| &record.pod);
        let claim = || self.claims.get(self.claims_of_pods.get(uid)?.first()?);
        of_record.or_else(|| claim()?.pods.get(uid)).cloned()
    }

    /// Claims that a pod holds, in the order in which operations take them.
    pub fn claims_of_pod(&self, pod: &str) -> Vec<Arc<ClaimRecord>> {
        self.found(self.claims_of_pods.get(pod)).cloned().collect()
    }

    /// Claims that have a device of a driver, each once.
    pub fn claims_of_driver(&self, driver: &DriverName) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        let (from, to) = (format!("{driver}/"), format!("{driver}0"));
        let uids: BTreeSet<_> = self.users.range(from..to).flat_map(|(_, uids)| uids).collect();
        uids.into_iter().filter_map(|uid| self.claims.get(uid))
    }

    /// Whether a claim was prepared by the driver file of a digest, or may have been, as any that cannot be read.
    pub fn needs_code(&self, digest: &str) -> bool {
        self.prepared_by.contains_key(digest) || !self.unreadable.is_empty()
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

    /// Claims that hold a device, or a piece of hardware behind it, each once.
    pub fn keepers(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
        identity: &[String],
    ) -> Vec<ObjectRef> {
        let own = device_key(driver, pool, device);
        let keys = std::iter::once(&own).chain(identity);
        let holders = keys.filter_map(|key| self.holders.get(key));
        let uids: BTreeSet<_> =
            holders.flat_map(|holders| holders.exclusive.iter().chain(&holders.shared)).collect();
        uids.into_iter().filter_map(|uid| Some(self.claims.get(uid)?.id.clone())).collect()
    }

    fn found<'a>(&'a self, uids: Option<&'a BTreeSet<Uid>>) -> impl Iterator<Item = &'a Arc<ClaimRecord>> {
        uids.into_iter().flatten().filter_map(|uid| self.claims.get(uid))
    }

    /// Sets a claim's record and returns the one before.
    pub fn put(&mut self, record: Arc<ClaimRecord>) -> Option<Arc<ClaimRecord>> {
        let uid = &record.id.uid;
        let before = self.remove(uid);
        let name = (record.id.namespace.clone(), record.id.name.clone());
        self.by_name.insert(name, uid.clone());
        for hold in &record.holds {
            self.holders.entry(hold.key.clone()).or_default().kind(hold.shared).insert(uid.clone());
        }
        for key in device_keys(&record) {
            self.users.entry(key).or_default().insert(uid.clone());
        }
        for pod in record.pods.values() {
            self.claims_of_pods.entry(pod.uid.clone()).or_default().insert(uid.clone());
            self.known_pods.insert(pod.clone());
        }
        for digest in digests(&record) {
            *self.prepared_by.entry(digest.to_owned()).or_default() += 1;
        }
        self.claims.insert(uid.clone(), record);
        before
    }

    pub fn remove(&mut self, uid: &Uid) -> Option<Arc<ClaimRecord>> {
        let record = self.claims.remove(uid)?;
        let name = (record.id.namespace.clone(), record.id.name.clone());
        if self.by_name.get(&name) == Some(uid) {
            self.by_name.remove(&name);
        }
        for hold in &record.holds {
            if let Entry::Occupied(mut holders) = self.holders.entry(hold.key.clone()) {
                holders.get_mut().kind(hold.shared).remove(uid);
                if holders.get().exclusive.is_empty() && holders.get().shared.is_empty() {
                    holders.remove();
                }
            }
        }
        for key in device_keys(&record) {
            if let btree_map::Entry::Occupied(mut users) = self.users.entry(key) {
                users.get_mut().remove(uid);
                if users.get().is_empty() {
                    users.remove();
                }
            }
        }
        for digest in digests(&record) {
            if let Entry::Occupied(mut parts) = self.prepared_by.entry(digest.to_owned()) {
                *parts.get_mut() -= 1;
                if *parts.get() == 0 {
                    parts.remove();
                }
            }
        }
        for pod in record.pods.values() {
            if let Entry::Occupied(mut claims) = self.claims_of_pods.entry(pod.uid.clone()) {
                claims.get_mut().remove(uid);
                if claims.get().is_empty() {
                    claims.remove();
                }
            }
            self.forget_pod(pod);
        }
        Some(record)
    }

    /// Puts back what stood before a change that did not become durable.
    pub fn restore(&mut self, uid: &Uid, before: Option<Arc<ClaimRecord>>) {
        match before {
            Some(record) => drop(self.put(record)),
            None => drop(self.remove(uid)),
        }
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
        if !self.pods.contains_key(&pod.uid) && !self.claims_of_pods.contains_key(&pod.uid) {
            self.known_pods.remove(pod);
        }
    }

    pub fn restore_pod(&mut self, uid: &Uid, before: Option<Arc<PodRecord>>) {
        match before {
            Some(record) => drop(self.put_pod(record)),
            None => drop(self.remove_pod(uid.as_str())),
        }
    }

    /// Those of `pods` that hold nothing but the claims `except`.
    pub fn pods_with_nothing_but<'a>(&self, pods: &'a BTreeSet<Uid>, except: &[Uid]) -> Vec<&'a Uid> {
        let only = |claims: &BTreeSet<Uid>| claims.iter().all(|claim| except.contains(claim));
        pods.iter().filter(|pod| self.claims_of_pods.get(*pod).is_none_or(only)).collect()
    }

    /// The claim that keeps one of `holds` from the claim `uid`, and which.
    pub(super) fn conflict<'a>(&self, uid: &Uid, holds: &'a [Hold]) -> Option<(&Arc<ClaimRecord>, &'a str)> {
        holds.iter().find_map(|hold| {
            let holder = self.holders.get(&hold.key)?.in_the_way(uid, hold.shared)?;
            Some((self.claims.get(holder)?, hold.key.as_str()))
        })
    }
}

/// What stood in the table before changes that are not durable yet.
#[derive(Default)]
pub(super) struct Undo {
    claims: Vec<(Uid, Option<Arc<ClaimRecord>>)>,
    pods: Vec<(Uid, Option<Arc<PodRecord>>)>,
}

impl Undo {
    pub(super) fn put(&mut self, table: &mut Table, record: &Arc<ClaimRecord>) {
        self.claims.push((record.id.uid.clone(), table.put(record.clone())));
    }

    pub(super) fn put_pod(&mut self, table: &mut Table, record: &Arc<PodRecord>) {
        self.pods.push((record.pod.uid.clone(), table.put_pod(record.clone())));
    }

    pub(super) fn remove_pod(&mut self, table: &mut Table, uid: &Uid) {
        self.pods.push((uid.clone(), table.remove_pod(uid.as_str())));
    }

    /// The newest change is taken back first.
    pub(super) fn restore(self, table: &mut Table) {
        self.claims.into_iter().rev().for_each(|(uid, before)| table.restore(&uid, before));
        self.pods.into_iter().rev().for_each(|(uid, before)| table.restore_pod(&uid, before));
    }
}

fn device_keys(record: &ClaimRecord) -> impl Iterator<Item = String> {
    let devices = record.allocation.devices.iter();
    devices.map(|device| device_key(&device.driver, device.pool.as_str(), device.device.as_str()))
}

fn digests(record: &ClaimRecord) -> impl Iterator<Item = &str> {
    let by = record.drivers.values().filter_map(|part| part.by.as_ref());
    by.map(|by| by.digest.as_str()).filter(|digest| !digest.is_empty())
}

pub(super) fn device_key(driver: &DriverName, pool: &str, device: &str) -> String {
    format!("{driver}/{pool}/{device}")
}
