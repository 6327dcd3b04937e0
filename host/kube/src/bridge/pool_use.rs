//! Pools with devices that claims have. Pure.
//!
//! Follows the changes of claims: what one more claim costs does not grow with the number of claims.

use std::collections::{BTreeMap, BTreeSet};

use super::plugin_claim::is_plugin_claim;
use crate::extended_resources::{LocalPool, Mechanism, PoolsInUse};
use nodedock_core::records::ClaimChanges;
use nodedock_model::{ClaimRecord, Uid};

/// A pool, and the mechanism by which its devices were given.
type Given = (LocalPool, Mechanism);

/// The pools of the claims that it was given.
#[derive(Debug, Default)]
pub(super) struct PoolUse {
    seen: Option<u64>,
    claims: BTreeMap<Uid, BTreeSet<Given>>,
    /// Number of claims with devices of each pool.
    users: BTreeMap<Given, usize>,
}

impl PoolUse {
    /// Returns the revision of the changes that were taken last.
    pub(super) fn seen(&self) -> Option<u64> {
        self.seen
    }

    /// Takes the changes since `seen`.
    pub(super) fn follow(&mut self, changes: ClaimChanges) {
        self.seen = Some(changes.revision);
        if changes.is_all {
            (self.claims, self.users) = Default::default();
        }
        for (uid, record) in changes.claims {
            let before = self.claims.remove(&uid);
            before
                .into_iter()
                .flatten()
                .for_each(|given| self.end(&given));
            let now = record.as_deref().map(given).unwrap_or_default();
            for given in &now {
                *self.users.entry(given.clone()).or_default() += 1;
            }
            if !now.is_empty() {
                self.claims.insert(uid, now);
            }
        }
    }

    fn end(&mut self, given: &Given) {
        if let Some(users) = self.users.get_mut(given) {
            *users -= 1;
            if *users == 0 {
                self.users.remove(given);
            }
        }
    }

    pub(super) fn in_use(&self) -> PoolsInUse {
        let mut in_use = PoolsInUse::new();
        for (pool, mechanism) in self.users.keys() {
            in_use.entry(pool.clone()).or_default().insert(*mechanism);
        }
        in_use
    }
}

/// The pools of a claim, without those that it only has with admin access.
fn given(record: &ClaimRecord) -> BTreeSet<Given> {
    let mechanism = match is_plugin_claim(&record.id) {
        true => Mechanism::DevicePlugin,
        false => Mechanism::Dra,
    };
    let devices = record.allocation.devices.iter();
    let devices = devices.filter(|device| !device.admin_access);
    devices
        .map(|device| (LocalPool::new(&device.driver, &device.pool), mechanism))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use nodedock_core::records::table::ClaimTable;
    use nodedock_model::{
        AllocatedDevice, ClaimState, DeviceName, DriverName, ObjectRef, PoolName,
    };

    fn record(name: usize, pools: &BTreeSet<usize>) -> Arc<ClaimRecord> {
        let id = ObjectRef::new("default", &format!("c{name}"), &format!("u{name}")).unwrap();
        let mut record = ClaimRecord::new(id, ClaimState::Prepared, "boot-1");
        let driver = DriverName::new("gpu.example.com").unwrap();
        let devices = pools.iter().map(|pool| {
            let pool = PoolName::new(format!("p{pool}")).unwrap();
            let device = DeviceName::new(format!("d{name}")).unwrap();
            let mut device = AllocatedDevice::whole("r", driver.clone(), pool, device);
            device.admin_access = name == 0;
            device
        });
        record.allocation.devices = devices.collect();
        Arc::new(record)
    }

    proptest! {
        /// Pools in use by the changes are those that a look at every claim finds.
        #[test]
        fn pools_are_those_of_claims(
            steps in proptest::collection::vec((0usize..4, proptest::collection::btree_set(0usize..3, 0..3), any::<bool>()), 0..24)
        ) {
            let (mut table, mut pools) = (ClaimTable::default(), PoolUse::default());
            for (name, of, is_removed) in steps {
                match is_removed {
                    true => drop(table.remove(&Uid::new(format!("u{name}")).unwrap())),
                    false => drop(table.put(record(name, &of))),
                }
                pools.follow(table.changes_since(pools.seen()));
                let mut all = PoolUse::default();
                all.follow(table.changes_since(None));
                prop_assert_eq!(pools.in_use(), all.in_use());
                let found: BTreeSet<_> = table.claims().flat_map(|record| given(record)).map(|(pool, _)| pool).collect();
                prop_assert_eq!(pools.in_use().into_keys().collect::<BTreeSet<_>>(), found);
            }
        }
    }
}
