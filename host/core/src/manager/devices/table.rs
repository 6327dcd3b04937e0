//! The allocations of pods, with the index that choices need.
//!
//! Devices are taken here before that is durable, so that two pods cannot both take them; a failed commit restores what was before. Devices
//! are freed after the commit only. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::manager::index::Index;
use nodedock_model::{ExtendedResource, ObjectRef, PodAllocation, Uid};

#[derive(Debug, Default)]
pub(crate) struct AllocationTable {
    pods: BTreeMap<Uid, Arc<PodAllocation>>,
    /// By resource and device, the pods that have it.
    owners: BTreeMap<ExtendedResource, Index<String>>,
}

impl AllocationTable {
    pub(super) fn new(records: Vec<PodAllocation>) -> Self {
        let mut table = Self::default();
        records.into_iter().for_each(|record| drop(table.put(Arc::new(record))));
        table
    }

    pub(super) fn pod(&self, uid: &str) -> Option<&Arc<PodAllocation>> {
        self.pods.get(uid)
    }

    pub(super) fn pods(&self) -> impl Iterator<Item = &Arc<PodAllocation>> {
        self.pods.values()
    }

    /// Resources of which pods have devices, with the number of those.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&ExtendedResource, usize)> {
        self.owners.iter().map(|(resource, owners)| (resource, owners.keys().len()))
    }

    pub(super) fn pods_with(&self, resource: &ExtendedResource, device: &str) -> Vec<ObjectRef> {
        let uids = self.owners.get(resource).into_iter().flat_map(|owners| owners.get(device));
        uids.filter_map(|uid| Some(self.pods.get(uid)?.pod.clone())).collect()
    }

    /// Devices of a resource that pods have.
    pub(super) fn taken(&self, resource: &ExtendedResource) -> BTreeSet<String> {
        self.owners.get(resource).into_iter().flat_map(Index::keys).cloned().collect()
    }

    /// The same without the devices that only entries of a pod with that pool claim have.
    pub(super) fn taken_but(&self, resource: &ExtendedResource, pod: &Uid, claim: &Uid) -> BTreeSet<String> {
        let mut taken = self.taken(resource);
        let entries = self.pods.get(pod).into_iter().flat_map(|record| &record.entries);
        let (own, others): (Vec<_>, Vec<_>) = entries
            .filter(|entry| entry.resource == *resource)
            .partition(|entry| entry.claim.as_ref().is_some_and(|known| known.id.uid == *claim));
        for device in own.iter().flat_map(|entry| entry.devices.keys()) {
            let alone = self.pods_with(resource, device).iter().all(|owner| owner.uid == *pod);
            if alone && !others.iter().any(|entry| entry.devices.contains_key(device)) {
                taken.remove(device);
            }
        }
        taken
    }

    /// Sets a pod's record and returns the one before.
    pub(super) fn put(&mut self, record: Arc<PodAllocation>) -> Option<Arc<PodAllocation>> {
        let before = self.remove(&record.pod.uid);
        for entry in &record.entries {
            let owners = self.owners.entry(entry.resource.clone()).or_default();
            entry.devices.keys().for_each(|device| owners.add(device.clone(), &record.pod.uid));
        }
        self.pods.insert(record.pod.uid.clone(), record);
        before
    }

    pub(super) fn remove(&mut self, uid: &Uid) -> Option<Arc<PodAllocation>> {
        let record = self.pods.remove(uid)?;
        for entry in &record.entries {
            let Some(owners) = self.owners.get_mut(&entry.resource) else { continue };
            entry.devices.keys().for_each(|device| owners.remove(device, uid));
            if owners.keys().len() == 0 {
                self.owners.remove(&entry.resource);
            }
        }
        Some(record)
    }

    /// Restores a pod's record after a change that did not become durable.
    pub(super) fn restore(&mut self, uid: &Uid, before: Option<Arc<PodAllocation>>) {
        match before {
            Some(record) => drop(self.put(record)),
            None => drop(self.remove(uid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::{entry, pod, resource, uid};
    use nodedock_model::{AllocationEntry, ContainerKind};

    fn record(short: &str, entries: Vec<AllocationEntry>) -> Arc<PodAllocation> {
        Arc::new(PodAllocation { pod: pod(short), entries, since_ms: 1, unknown: BTreeMap::new() })
    }

    #[test]
    fn devices_are_taken_while_a_pod_has_them_and_a_change_can_be_undone() {
        let (mut table, gpu) = (AllocationTable::default(), resource("gpu"));
        let init = entry("init", ContainerKind::Init, &["a", "b"]);
        let app = entry("app", ContainerKind::App, &["b"]);
        table.put(record("one", vec![init.clone(), app]));
        assert_eq!(table.taken(&gpu), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
        assert_eq!(table.pods_with(&gpu, "b"), [pod("one")]);
        assert_eq!(
            table.counts().collect::<Vec<_>>(),
            [(&gpu, 2)],
            "a device that is used again counts once"
        );

        let before = table.put(record("one", vec![init]));
        assert_eq!(table.taken(&gpu).len(), 2);
        table.restore(&uid("one"), before);
        assert_eq!(table.pod("uid-one").unwrap().entries.len(), 2);
        table.restore(&uid("one"), None);
        assert!(table.taken(&gpu).is_empty() && table.owners.is_empty() && table.pods.is_empty());
    }
}
