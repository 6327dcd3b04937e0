//! Claims that the node has prepared, as opposed to the objects of the local API. Pure.
//!
//! Follows the changes of the node's records: what one costs does not grow with the number of claims.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceRequestAllocationResult,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use rpds::RedBlackTreeMapSync;

use super::objects::Key;
use crate::pools::NodePools;
use nodedock_core::records::ClaimChanges;
use nodedock_model::{AllocatedDevice, ClaimRecord, Hold};

/// A claim that the node has prepared or is preparing, as opposed to its object of the API.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeClaim {
    /// UIDs of pods that use it.
    pub pods: Vec<String>,
    /// Its devices, under the names that slices have.
    pub allocation: AllocationResult,
    /// Devices and hardware that it keeps from others.
    pub holds: Vec<Hold>,
    /// Namespace and name.
    pub name: (String, String),
}

impl NodeClaim {
    /// The claim of a record, with the names of pools that slices have.
    fn of(record: &ClaimRecord, pools: &NodePools) -> Self {
        let devices = record.allocation.devices.iter();
        let results = devices.map(|of| device_result(record, of, pools));
        let devices = DeviceAllocationResult {
            config: None,
            results: Some(results.collect()),
        };
        Self {
            pods: record.pods.keys().map(ToString::to_string).collect(),
            allocation: AllocationResult {
                devices: Some(devices),
                ..AllocationResult::default()
            },
            holds: record.holds.clone(),
            name: (record.id.namespace.to_string(), record.id.name.to_string()),
        }
    }
}

/// Changes of the claims that the node has.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeChanges {
    /// Revision of this answer.
    pub revision: u64,
    /// The node has no others.
    pub is_all: bool,
    /// Claims by UID; `None`: the node does not have it any more.
    pub claims: Vec<(String, Option<NodeClaim>)>,
}

impl NodeChanges {
    /// Converts changes of the node's records.
    pub fn of(changes: ClaimChanges, pools: &NodePools) -> Self {
        let claims = changes.claims.into_iter().map(|(uid, record)| {
            let claim = record.map(|record| NodeClaim::of(&record, pools));
            (uid.to_string(), claim)
        });
        Self {
            revision: changes.revision,
            is_all: changes.is_all,
            claims: claims.collect(),
        }
    }
}

fn device_result(
    record: &ClaimRecord,
    device: &AllocatedDevice,
    pools: &NodePools,
) -> DeviceRequestAllocationResult {
    DeviceRequestAllocationResult {
        request: device.request.clone(),
        driver: device.driver.to_string(),
        pool: pools
            .published_in(record, &device.driver, &device.pool)
            .to_string(),
        device: device.device.to_string(),
        admin_access: device.admin_access.then_some(true),
        share_id: device.share_id.clone(),
        consumed_capacity: (!device.consumed.is_empty()).then(|| {
            let consumed = device.consumed.iter();
            consumed
                .map(|(name, amount)| (name.clone(), Quantity(amount.clone())))
                .collect()
        }),
        ..DeviceRequestAllocationResult::default()
    }
}

/// The claims that the node has.
#[derive(Default)]
pub(super) struct NodeClaims {
    seen: Option<u64>,
    claims: BTreeMap<String, NodeClaim>,
    /// Number of these claims by the UID of a pod that uses them.
    pods: BTreeMap<String, usize>,
    /// Names of these claims, by UID.
    names: RedBlackTreeMapSync<String, Key>,
}

impl NodeClaims {
    /// Returns the revision of the changes that were taken last.
    pub(super) fn seen(&self) -> Option<u64> {
        self.seen
    }

    pub(super) fn claim(&self, uid: &str) -> Option<&NodeClaim> {
        self.claims.get(uid)
    }

    pub(super) fn uids(&self) -> impl Iterator<Item = &String> {
        self.claims.keys()
    }

    /// Returns whether a pod uses one of the claims.
    pub(super) fn uses(&self, pod: &str) -> bool {
        self.pods.contains_key(pod)
    }

    /// Returns the names of the claims, by UID: a copy costs nothing.
    pub(super) fn names(&self) -> RedBlackTreeMapSync<String, Key> {
        self.names.clone()
    }

    /// Takes changes. Returns the UIDs of the claims that differ by them, with what they were.
    pub(super) fn follow(&mut self, changes: NodeChanges) -> Vec<(String, Option<NodeClaim>)> {
        self.seen = Some(changes.revision);
        let mut claims = changes.claims;
        if changes.is_all {
            let named: BTreeSet<_> = claims.iter().map(|(uid, _)| uid.clone()).collect();
            let gone = self.claims.keys().filter(|uid| !named.contains(*uid));
            claims.extend(gone.map(|uid| (uid.clone(), None)));
        }
        let mut differing = Vec::new();
        for (uid, now) in claims {
            if self.claims.get(&uid) != now.as_ref() {
                let before = self.put(&uid, now);
                differing.push((uid, before));
            }
        }
        differing
    }

    fn put(&mut self, uid: &str, now: Option<NodeClaim>) -> Option<NodeClaim> {
        let before = self.claims.remove(uid);
        for pod in before.iter().flat_map(|before| &before.pods) {
            if let Some(claims) = self.pods.get_mut(pod) {
                *claims -= 1;
                if *claims == 0 {
                    self.pods.remove(pod);
                }
            }
        }
        self.names.remove_mut(uid);
        if let Some(now) = now {
            for pod in &now.pods {
                *self.pods.entry(pod.clone()).or_default() += 1;
            }
            self.names.insert_mut(uid.to_owned(), now.name.clone());
            self.claims.insert(uid.to_owned(), now);
        }
        before
    }
}
