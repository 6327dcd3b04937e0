//! The memory of the claim manager: every claim and pod that this node knows, and the indexes that decisions need.
//!
//! What is taken stands here before it is durable, so that two requests cannot both take it, and is put back when the commit
//! fails. What is given up leaves after the commit only: until then nobody else can have it. Nothing of the table is answered
//! before it is durable. Decides nothing but who is in whose way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::{ClaimRecord, DriverName, Hold, ObjectName, PodRecord, Uid};

/// Every claim and pod that this node knows, with the indexes that decisions need.
#[derive(Debug, Default)]
pub struct Table {
    claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    pods: BTreeMap<Uid, Arc<PodRecord>>,
    by_name: HashMap<(ObjectName, ObjectName), Uid>,
    by_pod: HashMap<Uid, BTreeSet<Uid>>,
    /// By device or identity: who holds it, and whether shared.
    holders: HashMap<String, BTreeMap<Uid, bool>>,
}

impl Table {
    pub fn new(claims: Vec<ClaimRecord>, pods: Vec<PodRecord>) -> Self {
        let mut table = Self::default();
        for claim in claims {
            table.put(Arc::new(claim));
        }
        table.pods = pods.into_iter().map(|pod| (pod.pod.uid.clone(), Arc::new(pod))).collect();
        table
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

    /// Claims that a pod holds, in the order in which operations take them.
    pub fn claims_of_pod(&self, pod: &str) -> Vec<Arc<ClaimRecord>> {
        let uids = self.by_pod.get(pod).into_iter().flatten();
        uids.filter_map(|uid| self.claims.get(uid)).cloned().collect()
    }

    /// Sets a claim's record and returns the one before.
    pub fn put(&mut self, record: Arc<ClaimRecord>) -> Option<Arc<ClaimRecord>> {
        let uid = &record.id.uid;
        let before = self.remove(uid);
        self.by_name.insert((record.id.namespace.clone(), record.id.name.clone()), uid.clone());
        for pod in record.pods.keys() {
            self.by_pod.entry(pod.clone()).or_default().insert(uid.clone());
        }
        for hold in &record.holds {
            self.holders.entry(hold.key.clone()).or_default().insert(uid.clone(), hold.shared);
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
        for pod in record.pods.keys() {
            if let Some(claims) = self.by_pod.get_mut(pod) {
                claims.remove(uid);
                if claims.is_empty() {
                    self.by_pod.remove(pod);
                }
            }
        }
        for hold in &record.holds {
            if let Some(holders) = self.holders.get_mut(&hold.key) {
                holders.remove(uid);
                if holders.is_empty() {
                    self.holders.remove(&hold.key);
                }
            }
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
        self.pods.insert(record.pod.uid.clone(), record)
    }

    pub fn remove_pod(&mut self, uid: &str) -> Option<Arc<PodRecord>> {
        self.pods.remove(uid)
    }

    pub fn restore_pod(&mut self, uid: &Uid, before: Option<Arc<PodRecord>>) {
        match before {
            Some(record) => drop(self.put_pod(record)),
            None => drop(self.remove_pod(uid.as_str())),
        }
    }

    /// Claims that hold a device of this name.
    pub fn holders_of(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<&Arc<ClaimRecord>> {
        let key = device_key(driver, pool, device);
        let uids = self.holders.get(&key).map(|holders| holders.keys()).into_iter().flatten();
        uids.filter_map(|uid| self.claims.get(uid)).collect()
    }

    /// Those of `pods` that hold nothing but the claims `except`.
    pub fn pods_with_nothing_but<'a>(&self, pods: &'a BTreeSet<Uid>, except: &[Uid]) -> Vec<&'a Uid> {
        let only = |claims: &BTreeSet<Uid>| claims.iter().all(|claim| except.contains(claim));
        pods.iter().filter(|pod| self.by_pod.get(*pod).is_none_or(only)).collect()
    }

    /// The claim that keeps one of `holds` from the claim `uid`, and which.
    pub(super) fn conflict<'a>(&self, uid: &Uid, holds: &'a [Hold]) -> Option<(&Arc<ClaimRecord>, &'a str)> {
        holds.iter().find_map(|hold| {
            let holders = self.holders.get(&hold.key)?;
            let (holder, _) =
                holders.iter().find(|(other, shared)| *other != uid && !(hold.shared && **shared))?;
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

pub(super) fn device_key(driver: &DriverName, pool: &str, device: &str) -> String {
    format!("{driver}/{pool}/{device}")
}
