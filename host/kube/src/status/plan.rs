//! Plan of the entries that a claim's `status.devices` is to have for a driver. Pure.

use std::collections::BTreeMap;

use kube::api::DynamicObject;
use serde_json::Value;

use super::entry::{Key, entry};
use nodedock_model::{DeviceStatus, DriverName, ObjectRef, ReportedDevice};

/// All that a driver reports of a claim. Without reports the driver's entries are removed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DriverStatus {
    pub(super) claim: ObjectRef,
    /// Time of the allocation, as in [`nodedock_model::ClaimStatuses`].
    pub(super) allocated_ms: u64,
    pub(super) driver: DriverName,
    pub(super) devices: Vec<ReportedDevice>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Plan {
    /// The claim is another one, or is not allocated: its entries went with its allocation.
    Past,
    /// It has them.
    Unchanged,
    /// All entries of the driver that it is to have.
    Apply(Vec<Value>),
}

/// `now` in RFC 3339. What does not fit is described in `left_out`, a phrase each.
pub(super) fn plan(
    status: &DriverStatus,
    claim: &DynamicObject,
    now: &str,
    left_out: &mut Vec<String>,
) -> Plan {
    let driver = &status.driver;
    let list = |pointer: &str| {
        claim
            .data
            .pointer(pointer)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
    };
    let is_allocated = claim
        .data
        .pointer("/status/allocation")
        .is_some_and(Value::is_object);
    if !is_allocated || claim.metadata.uid.as_deref() != Some(status.claim.uid.as_str()) {
        return Plan::Past;
    }
    let allocated: Vec<Key> = list("/status/allocation/devices/results")
        .filter_map(Key::of)
        .collect();
    let ours = list("/status/devices").filter_map(|entry| Some((Key::of(entry)?, entry)));
    let current: BTreeMap<Key, &Value> = ours
        .filter(|(key, _)| key.driver == driver.as_str())
        .collect();
    let mut wanted = BTreeMap::new();
    for report in status
        .devices
        .iter()
        .filter(|report| report.status != DeviceStatus::default())
    {
        let key = Key::new(report);
        if !allocated.contains(&key) {
            left_out.push(format!(
                "device {}/{} of {driver}: the claim has no such device",
                key.pool, key.device
            ));
            continue;
        }
        let entry = entry(
            &key,
            &report.status,
            current.get(&key).copied(),
            now,
            left_out,
        );
        wanted.insert(key, entry);
    }
    if wanted
        .iter()
        .eq(current.iter().map(|(key, entry)| (key, *entry)))
    {
        return Plan::Unchanged;
    }
    Plan::Apply(wanted.into_values().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use nodedock_model::{Condition, DeviceName, PoolName};

    const CLAIM: &str =
        include_str!("../../../tests/fixtures/kubernetes-1.36/claim-gpu-and-nic.json");
    const SHARE: &str = include_str!("../../../tests/fixtures/kubernetes-1.36/claim-share-a.json");
    const THEN: &str = "2026-11-20T08:15:57Z";
    const NOW: &str = "2026-11-22T07:00:00Z";

    fn recorded(claim: &str, devices: Vec<Value>) -> DynamicObject {
        let mut claim: Value = serde_json::from_str(claim).unwrap();
        claim["status"]["devices"] = devices.into();
        serde_json::from_value(claim).unwrap()
    }

    /// The first allocated device.
    fn allocated(claim: &str) -> Key {
        let claim: Value = serde_json::from_str(claim).unwrap();
        Key::of(&claim["status"]["allocation"]["devices"]["results"][0]).unwrap()
    }

    fn report(key: &Key, reason: &str) -> ReportedDevice {
        let condition = Condition {
            kind: "Ready".to_owned(),
            status: Some(true),
            reason: reason.to_owned(),
            message: String::new(),
        };
        ReportedDevice {
            driver: DriverName::new(&key.driver).unwrap(),
            pool: PoolName::new(&key.pool).unwrap(),
            device: DeviceName::new(&key.device).unwrap(),
            share_id: key.share_id.clone(),
            status: DeviceStatus {
                conditions: vec![condition],
                ..DeviceStatus::default()
            },
        }
    }

    fn status(claim: &str, devices: Vec<ReportedDevice>) -> DriverStatus {
        let uid = recorded(claim, vec![]).metadata.uid.unwrap();
        let claim = ObjectRef::new("default", "gpu-and-nic", &uid).unwrap();
        DriverStatus {
            claim,
            allocated_ms: 0,
            driver: DriverName::new("gpu.example.com").unwrap(),
            devices,
        }
    }

    fn planned(claim: &DynamicObject, status: &DriverStatus, now: &str) -> (Plan, usize) {
        let mut left_out = Vec::new();
        let plan = plan(status, claim, now, &mut left_out);
        (plan, left_out.len())
    }

    fn applied(plan: Plan) -> Vec<Value> {
        let Plan::Apply(entries) = plan else {
            panic!("{plan:?}")
        };
        entries
    }

    #[test]
    fn report_is_applied_once() {
        let key = allocated(CLAIM);
        let ours = status(CLAIM, vec![report(&key, "Prepared")]);
        let (first, left_out) = planned(&recorded(CLAIM, vec![]), &ours, THEN);
        assert_eq!(left_out, 0);
        let nic = json!({"driver": "nic.example.com", "pool": "node-1", "device": "nic-0", "later": {"a": 1}});
        let claim = recorded(CLAIM, applied(first).into_iter().chain([nic]).collect());
        assert_eq!(planned(&claim, &ours, NOW), (Plan::Unchanged, 0));
        let other_words = status(CLAIM, vec![report(&key, "Other")]);
        let entries = applied(planned(&claim, &other_words, NOW).0);
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0]["conditions"][0]["lastTransitionTime"], THEN);
        assert_eq!(entries[0]["conditions"][0]["reason"], "Other");
        // Nothing is reported any more.
        let silent = ReportedDevice {
            status: DeviceStatus::default(),
            ..report(&key, "")
        };
        for nothing in [vec![], vec![silent]] {
            assert_eq!(
                planned(&claim, &status(CLAIM, nothing), NOW).0,
                Plan::Apply(vec![])
            );
        }
        assert_eq!(
            planned(&recorded(CLAIM, vec![]), &status(CLAIM, vec![]), NOW).0,
            Plan::Unchanged
        );
    }

    #[test]
    fn unallocated_device_is_left_out() {
        let none = Key {
            device: "gpu-77".to_owned(),
            ..allocated(CLAIM)
        };
        let none = status(CLAIM, vec![report(&none, "a")]);
        assert_eq!(
            planned(&recorded(CLAIM, vec![]), &none, NOW),
            (Plan::Unchanged, 1)
        );
        let key = allocated(SHARE);
        let unshared = status(
            SHARE,
            vec![report(
                &Key {
                    share_id: None,
                    ..key.clone()
                },
                "a",
            )],
        );
        assert_eq!(
            planned(&recorded(SHARE, vec![]), &unshared, NOW),
            (Plan::Unchanged, 1)
        );
        let shared = status(SHARE, vec![report(&key, "a")]);
        assert!(matches!(
            planned(&recorded(SHARE, vec![]), &shared, NOW),
            (Plan::Apply(_), 0)
        ));
    }

    #[test]
    fn replaced_or_deallocated_claim_is_skipped() {
        let ours = status(CLAIM, vec![report(&allocated(CLAIM), "a")]);
        assert_eq!(planned(&recorded(SHARE, vec![]), &ours, NOW).0, Plan::Past);
        let mut free = recorded(CLAIM, vec![]);
        free.data["status"] = json!({});
        assert_eq!(planned(&free, &ours, NOW).0, Plan::Past);
    }
}
