//! Which entries a claim's `status.devices` is to have. Pure.

use std::collections::BTreeMap;

use serde_json::Value;

use super::entry::{DeviceReport, Key, entry};
use super::splice::Read;
use nodedock_model::{DeviceStatus, DriverName, ObjectRef};

/// What drivers report of a claim: of each driver that serves it, all that it reports. A driver without reports has its entries taken
/// back; one that is not here keeps them.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimStatus {
    pub claim: ObjectRef,
    pub drivers: BTreeMap<DriverName, Vec<DeviceReport>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Plan {
    /// The claim is another one, or is not allocated: its entries went with its allocation.
    Past,
    /// It has them.
    Standing,
    /// All entries that it is to have, those of others as they are.
    Write(Vec<Value>),
}

impl ClaimStatus {
    pub fn has_driver(&self, driver: &str) -> bool {
        self.drivers.contains_key(driver)
    }
}

/// `now` in RFC 3339. What does not fit is told in `left_out`, a phrase each.
pub(super) fn plan(status: &ClaimStatus, read: &Read, now: &str, left_out: &mut Vec<String>) -> Plan {
    let Some(allocated) = &read.allocated else { return Plan::Past };
    if read.uid != status.claim.uid.as_str() {
        return Plan::Past;
    }
    let is_ours = |entry: &&Value| entry["driver"].as_str().is_some_and(|driver| status.has_driver(driver));
    let (ours, others): (Vec<_>, Vec<_>) = read.entries.iter().partition(is_ours);
    let standing = by_key(ours.iter().map(|entry| (*entry).clone()));
    let mut wanted = BTreeMap::new();
    for (driver, reports) in &status.drivers {
        for report in reports.iter().filter(|report| report.status != DeviceStatus::default()) {
            let key = Key::new(driver, report);
            if !allocated.contains(&key) {
                left_out.push(format!(
                    "device {}/{} of {driver}: the claim has no such device",
                    key.pool, key.device
                ));
                continue;
            }
            let entry = entry(&key, &report.status, standing.get(&key), now, left_out);
            wanted.insert(key, entry);
        }
    }
    if ours.len() == standing.len() && wanted == standing {
        return Plan::Standing;
    }
    Plan::Write(others.into_iter().cloned().chain(wanted.into_values()).collect())
}

fn by_key(entries: impl Iterator<Item = Value>) -> BTreeMap<Key, Value> {
    entries.filter_map(|entry| Some((Key::of(&entry)?, entry))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::splice::{json, read};
    use super::*;
    use nodedock_model::{Condition, DeviceName, PoolName};

    const CLAIM: &[u8] = include_bytes!("../../../tests/fixtures/kubernetes-1.36/claim-gpu-and-nic.json");
    const SHARE: &[u8] = include_bytes!("../../../tests/fixtures/kubernetes-1.36/claim-share-a.json");
    const THEN: &str = "2026-11-20T08:15:57Z";
    const NOW: &str = "2026-11-22T07:00:00Z";

    fn report(device: &str, reason: &str) -> DeviceReport {
        let condition = Condition {
            kind: "Ready".to_owned(),
            status: Some(true),
            reason: reason.to_owned(),
            message: String::new(),
        };
        DeviceReport {
            pool: PoolName::new("node-1").unwrap(),
            device: DeviceName::new(device).unwrap(),
            share_id: None,
            status: DeviceStatus { conditions: vec![condition], ..DeviceStatus::default() },
        }
    }

    fn status(claim: &[u8], reports: Vec<DeviceReport>) -> ClaimStatus {
        let uid = read(claim).unwrap().uid;
        let claim = ObjectRef::new("default", "gpu-and-nic", &uid).unwrap();
        ClaimStatus { claim, drivers: [(DriverName::new("gpu.example.com").unwrap(), reports)].into() }
    }

    fn planned(claim: &[u8], status: &ClaimStatus, now: &str) -> (Plan, usize) {
        let mut left_out = Vec::new();
        let plan = plan(status, &read(claim).unwrap(), now, &mut left_out);
        (plan, left_out.len())
    }

    fn written(claim: &[u8], plan: Plan) -> Vec<u8> {
        let Plan::Write(entries) = plan else { panic!("{plan:?}") };
        json(claim, &entries).unwrap()
    }

    #[test]
    fn what_is_reported_is_written_once_and_times_stay_while_nothing_turns() {
        let device = read(CLAIM).unwrap().allocated.unwrap()[0].device.clone();
        let ours = status(CLAIM, vec![report(&device, "Prepared")]);
        let (first, left_out) = planned(CLAIM, &ours, THEN);
        let claim = written(CLAIM, first);
        assert_eq!(left_out, 0);
        assert_eq!(planned(&claim, &ours, NOW), (Plan::Standing, 0));
        let other_words = status(CLAIM, vec![report(&device, "Other")]);
        let again = written(&claim, planned(&claim, &other_words, NOW).0);
        let entries = read(&again).unwrap().entries;
        assert_eq!(entries[0]["conditions"][0]["lastTransitionTime"], THEN);
        assert_eq!(entries[0]["conditions"][0]["reason"], "Other");
    }

    #[test]
    fn entries_of_other_drivers_stay_as_they_are_and_ours_are_taken_back_when_nothing_is_reported() {
        let device = read(CLAIM).unwrap().allocated.unwrap()[0].device.clone();
        let nic =
            json!({"driver": "nic.example.com", "pool": "node-1", "device": "nic-0", "later": {"a": 1}});
        let claim = json(CLAIM, std::slice::from_ref(&nic)).unwrap();
        let claim = written(&claim, planned(&claim, &status(CLAIM, vec![report(&device, "a")]), NOW).0);
        assert_eq!(read(&claim).unwrap().entries.len(), 2);
        assert_eq!(planned(&claim, &status(CLAIM, vec![]), NOW).0, Plan::Write(vec![nic.clone()]));
        let silent = DeviceReport { status: DeviceStatus::default(), ..report(&device, "") };
        assert_eq!(planned(&claim, &status(CLAIM, vec![silent]), NOW).0, Plan::Write(vec![nic]));
        let none = ClaimStatus { drivers: BTreeMap::new(), ..status(CLAIM, vec![]) };
        assert_eq!(planned(&claim, &none, NOW).0, Plan::Standing);
    }

    #[test]
    fn a_device_that_the_claim_has_not_is_left_out_and_its_share_counts() {
        let (plan, left_out) = planned(CLAIM, &status(CLAIM, vec![report("gpu-77", "a")]), NOW);
        assert_eq!((plan, left_out), (Plan::Standing, 1));
        let key = read(SHARE).unwrap().allocated.unwrap()[0].clone();
        let mut shared = report(&key.device, "a");
        shared.pool = PoolName::new(&key.pool).unwrap();
        assert_eq!(planned(SHARE, &status(SHARE, vec![shared.clone()]), NOW), (Plan::Standing, 1));
        shared.share_id = key.share_id;
        assert!(matches!(planned(SHARE, &status(SHARE, vec![shared]), NOW), (Plan::Write(_), 0)));
    }

    #[test]
    fn a_claim_that_is_another_or_not_allocated_is_left_alone() {
        let ours = status(CLAIM, vec![report("gpu-0", "a")]);
        assert_eq!(planned(SHARE, &ours, NOW).0, Plan::Past);
        let claim = format!(r#"{{"metadata":{{"uid":"{}"}},"status":{{}}}}"#, ours.claim.uid);
        assert_eq!(planned(claim.as_bytes(), &ours, NOW).0, Plan::Past);
    }
}
