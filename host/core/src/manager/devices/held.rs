//! Extended resources that pods have by claims. Pure.

use std::collections::BTreeMap;

use crate::manager::entry::Entry;
use crate::manager::pool_claims;
use crate::records::table::ClaimTable;
use nodedock_model::{ClaimRecord, ClaimState, ExtendedResource, ObjectRef, PooledClaim};

/// Returns the entries of a pod, in the order of its containers, of claims that are not being unprepared.
pub(super) fn entries(table: &ClaimTable, pod: &str) -> Vec<Entry> {
    let Some(record) = table.pod(pod) else {
        return Vec::new();
    };
    let entries = pool_claims::users(record).into_iter().filter_map(|user| {
        let claim = table
            .claim(user.claim.uid.as_str())
            .filter(|claim| claim.pods.contains_key(pod))?;
        let driver = claim.allocation.devices.first()?.driver.clone();
        Some(Entry {
            container: user.container,
            kind: user.kind,
            resource: user.resource,
            claim: PooledClaim {
                driver,
                id: user.claim,
            },
            devices: pool_claims::devices_of(claim),
            is_prepared: is_prepared(claim),
        })
    });
    entries.collect()
}

fn is_prepared(claim: &ClaimRecord) -> bool {
    claim.state == ClaimState::Prepared
        || claim.drivers.values().any(|part| part.prepared.is_some())
}

/// Pods that have devices of each resource, by device.
pub(super) fn owners(
    table: &ClaimTable,
) -> BTreeMap<ExtendedResource, BTreeMap<String, Vec<ObjectRef>>> {
    let mut owners: BTreeMap<_, BTreeMap<_, Vec<ObjectRef>>> = BTreeMap::new();
    for claim in table.claims() {
        let Some(of) = &claim.resource else { continue };
        let of_resource = owners.entry(of.resource.clone()).or_default();
        for device in of.devices.keys() {
            let pods: &mut Vec<_> = of_resource.entry(device.clone()).or_default();
            // Containers of one pod may have it one after the other.
            pods.extend(
                claim
                    .pods
                    .values()
                    .filter(|pod| !pods.contains(pod))
                    .cloned()
                    .collect::<Vec<_>>(),
            );
        }
    }
    owners
}
