//! Reuse of devices of a pod's init containers: an init container ends before the next container starts.

use std::collections::{BTreeMap, BTreeSet};

use crate::manager::entry::Entry;
use nodedock_model::{ContainerKind, DriverName, PooledClaim};

/// Devices of one resource that later containers of a pod may reuse.
///
/// A plugin's devices one by one. Devices of a pool are of a claim, which keeps them from other claims, so only the claim as a whole
/// can serve another container.
#[derive(Debug, Default)]
pub(super) struct Reuse {
    devices: BTreeSet<String>,
    claims: Vec<(PooledClaim, BTreeMap<String, Vec<u32>>)>,
}

impl Reuse {
    /// Notes the devices of a container: an init container leaves them to later ones, another keeps them.
    pub(super) fn settle(&mut self, entry: &Entry) {
        let ends = entry.kind == ContainerKind::Init;
        if entry.is_of_plugin() {
            match ends {
                true => self.devices.extend(entry.devices.keys().cloned()),
                false => self.devices.retain(|id| !entry.devices.contains_key(id)),
            }
            return;
        }
        self.claims
            .retain(|(known, _)| known.id.uid != entry.claim.id.uid);
        self.claims
            .extend(ends.then(|| (entry.claim.clone(), entry.devices.clone())));
    }

    pub(super) fn devices(&self) -> &BTreeSet<String> {
        &self.devices
    }

    /// A claim that serves a container as it is: of as many devices, all of them `usable`.
    pub(super) fn claim(
        &self,
        driver: &DriverName,
        count: usize,
        usable: impl Fn(&str) -> bool,
    ) -> Option<&(PooledClaim, BTreeMap<String, Vec<u32>>)> {
        self.claims.iter().find(|(claim, devices)| {
            claim.driver == *driver && devices.len() == count && devices.keys().all(|id| usable(id))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::{entry, ids, pooled_entry};

    fn devices(reuse: &Reuse) -> Vec<String> {
        reuse.devices().iter().cloned().collect()
    }

    #[test]
    fn init_container_devices_are_reused() {
        let mut reuse = Reuse::default();
        reuse.settle(&entry("init-1", ContainerKind::Init, &["a"]));
        reuse.settle(&entry("init-2", ContainerKind::Init, &["a", "b", "c"]));
        assert_eq!(devices(&reuse), ids(&["a", "b", "c"]));
        reuse.settle(&entry("sidecar", ContainerKind::Sidecar, &["a"]));
        reuse.settle(&entry("init-3", ContainerKind::Init, &["b", "d"]));
        assert_eq!(
            devices(&reuse),
            ids(&["b", "c", "d"]),
            "a sidecar goes on beside the others"
        );
        reuse.settle(&entry("app", ContainerKind::App, &["b", "e"]));
        assert_eq!(devices(&reuse), ids(&["c", "d"]));
    }

    #[test]
    fn pool_devices_are_reused_with_claim() {
        let mut reuse = Reuse::default();
        let first = pooled_entry("init", ContainerKind::Init, &["pool/a", "pool/b"]);
        reuse.settle(&first);
        let claim = first.claim.clone();
        let found = |reuse: &Reuse, count, bad: &str| {
            reuse
                .claim(&claim.driver, count, |id| id != bad)
                .map(|(claim, _)| claim.id.clone())
        };
        assert_eq!(found(&reuse, 2, ""), Some(claim.id.clone()));
        assert_eq!(
            (found(&reuse, 1, ""), found(&reuse, 2, "pool/b")),
            (None, None)
        );
        assert!(devices(&reuse).is_empty());
        let again = Entry {
            claim: claim.clone(),
            ..pooled_entry("app", ContainerKind::App, &["pool/a", "pool/b"])
        };
        reuse.settle(&again);
        assert_eq!(found(&reuse, 2, ""), None, "one container uses it now");
    }
}
