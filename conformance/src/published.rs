//! The contents of ResourceSlices.

use std::collections::BTreeMap;

use serde_json::Value;

/// A device that can be allocated.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceId {
    pub(crate) pool: String,
    pub(crate) name: String,
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}/{}", self.pool, self.name)
    }
}

/// Returns whether there is a pool, and each pool has as many slices of its newest generation as it declares.
pub(crate) fn is_complete(slices: &[Value]) -> bool {
    let mut pools: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for slice in slices {
        let pool = &slice["spec"]["pool"];
        pools
            .entry(pool["name"].as_str().unwrap_or_default())
            .or_default()
            .push(pool);
    }
    !slices.is_empty() && pools.values().all(|pools| is_pool_complete(pools))
}

fn is_pool_complete(pools: &[&Value]) -> bool {
    let newest = pools
        .iter()
        .filter_map(|pool| pool["generation"].as_i64())
        .max();
    let of_newest: Vec<_> = pools
        .iter()
        .filter(|pool| pool["generation"].as_i64() == newest)
        .collect();
    of_newest
        .iter()
        .all(|pool| pool["resourceSliceCount"].as_u64() == Some(of_newest.len() as u64))
}

/// The devices of slices without a taint of their own, those that consume no counters first.
pub(crate) fn devices(slices: &[Value]) -> Vec<DeviceId> {
    let mut found = Vec::new();
    for slice in slices {
        let pool = slice["spec"]["pool"]["name"].as_str().unwrap_or_default();
        for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
            let shares = device["consumesCounters"]
                .as_array()
                .is_some_and(|counters| !counters.is_empty());
            let is_tainted = device["taints"]
                .as_array()
                .is_some_and(|taints| !taints.is_empty());
            let name = device["name"].as_str().unwrap_or_default().to_owned();
            if !is_tainted {
                found.push((
                    shares,
                    DeviceId {
                        pool: pool.to_owned(),
                        name,
                    },
                ));
            }
        }
    }
    found.sort();
    found.into_iter().map(|(_, device)| device).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn complete_pool_has_all_newest_slices() {
        let slice = |pool: &str, generation: i64, count: u64| json!({ "spec": { "pool": { "name": pool, "generation": generation, "resourceSliceCount": count } } });
        for (slices, expected) in [
            (vec![], false),
            (vec![slice("a", 1, 1)], true),
            (vec![slice("a", 1, 2)], false),
            (
                vec![slice("a", 1, 2), slice("a", 1, 2), slice("b", 3, 1)],
                true,
            ),
            (vec![slice("a", 1, 1), slice("a", 2, 1)], true),
            (vec![slice("a", 2, 1), slice("a", 2, 1)], false),
        ] {
            assert_eq!(is_complete(&slices), expected, "{slices:?}");
        }
    }

    #[test]
    fn tainted_devices_are_skipped_sharing_last() {
        let devices = json!([
            { "name": "part", "consumesCounters": [{ "counterSet": "gpu", "counters": {} }] },
            { "name": "sick", "taints": [{ "key": "x", "effect": "NoSchedule" }] },
            { "name": "whole" },
        ]);
        let slice = json!({ "spec": { "pool": { "name": "p" }, "devices": devices } });
        let found = super::devices(&[slice]);
        assert_eq!(
            found
                .iter()
                .map(|device| device.name.as_str())
                .collect::<Vec<_>>(),
            ["whole", "part"]
        );
    }
}
