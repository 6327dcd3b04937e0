//! Reports of the claims that the claim manager prepared for the kubelet, for the readers and writers of claims at the API server.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use nodedock_base::changes::Changes;
use nodedock_base::rest::rest_after;
use nodedock_base::tasks::Tasks;
use nodedock_core::records::{ClaimChanges, RecordStore, statuses as statuses_of};
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::pools::NodePools;
use nodedock_kube::reconcile::Reconcile;
use nodedock_kube::status::{Reported, Statuses};
use nodedock_model::{
    ChangedKind, ClaimRecord, ClaimStatuses, DeviceName, DriverName, PoolName, ReportedDevice,
};

/// Reports to the cache of the API server's claims which of them are prepared here, and wakes the reconcile when one was lost. Costs as much
/// as changed, and not as much as there are claims.
pub(super) async fn report_prepared(
    records: Arc<RecordStore>,
    api_claims: ApiClaims,
    reconcile: Reconcile,
    changes: Changes,
    tasks: Tasks,
) {
    let (mut changed_claims, mut lost) = (changes.signal_of(ChangedKind::Claim), api_claims.lost());
    let mut seen = None;
    loop {
        changed_claims.mark_unchanged();
        let changed = records.changes_since(seen);
        seen = Some(changed.revision);
        let claims = changed.claims.into_iter().map(|(uid, record)| {
            let is_held = record.is_some_and(|record| record.is_held_by_api_kubelet());
            (uid, is_held)
        });
        api_claims.hold(changed.is_all, claims);
        tokio::select! {
            () = tasks.stopped() => return,
            // What changed meanwhile is found in the next round.
            Ok(()) = changed_claims.changed() => {}
            lost = lost.changed() => match lost {
                Ok(()) => reconcile.trigger(),
                Err(_) => return,
            },
        }
    }
}

/// Reports to the writer of statuses what drivers report of claims' devices, and `early` what is known of claims for which a scheduler
/// waits, until the tasks stop.
pub(in crate::app) async fn report_statuses(
    records: Arc<RecordStore>,
    pools: NodePools,
    mut early: watch::Receiver<Reported>,
    statuses: Statuses,
    tasks: Tasks,
) {
    let mut changes = records.device_status_changes();
    let (mut of_claims, mut seen) = (Reported::new(), None);
    loop {
        changes.mark_unchanged();
        let began = Instant::now();
        let changed = records.changes_since(seen);
        seen = Some(changed.revision);
        follow(&mut of_claims, changed);
        let mut reported = with_early(of_claims.clone(), &early.borrow_and_update());
        for device in reported
            .values_mut()
            .flat_map(|statuses| &mut statuses.devices)
        {
            device.pool = pools.published(&device.driver, &device.pool);
        }
        statuses.set(reported);
        let rest = rest_after(began, Duration::ZERO);
        tokio::select! {
            () = tasks.stopped() => return,
            // A change that is missed here is seen in the next round.
            changed = changes.changed() => if changed.is_err() { return },
            Ok(()) = early.changed() => {}
        }
        tokio::select! {
            () = tasks.stopped() => return,
            // It has passed, or passes in the next iteration.
            () = sleep(rest) => {}
        }
    }
}

/// Takes changes into the device statuses that drivers report of each prepared claim; of some claims there are none.
fn follow(reported: &mut Reported, changes: ClaimChanges) {
    if changes.is_all {
        reported.clear();
    }
    for (uid, record) in changes.claims {
        let record = record.filter(|record| record.is_held_by_api_kubelet());
        match record {
            Some(record) => drop(reported.insert(uid, of_record(&record))),
            None => drop(reported.remove(&uid)),
        }
    }
}

fn of_record(record: &ClaimRecord) -> ClaimStatuses {
    statuses_of(record).unwrap_or_else(|| ClaimStatuses {
        claim: record.id.clone(),
        allocated_ms: 0,
        devices: Vec::new(),
    })
}

/// Adds the times of allocations, and the failures of devices. A device may have both a failure and what its driver reported.
fn with_early(mut reported: Reported, early: &Reported) -> Reported {
    for (uid, early) in early {
        let known = reported
            .entry(uid.clone())
            .or_insert_with(|| ClaimStatuses {
                devices: Vec::new(),
                ..early.clone()
            });
        known.allocated_ms = early.allocated_ms;
        for failed in &early.devices {
            match known
                .devices
                .iter_mut()
                .find(|device| key(device) == key(failed))
            {
                // Of too many conditions the first are published.
                Some(device) => drop(
                    device
                        .status
                        .conditions
                        .splice(0..0, failed.status.conditions.clone()),
                ),
                None => known.devices.push(failed.clone()),
            }
        }
    }
    reported
}

fn key(of: &ReportedDevice) -> (&DriverName, &PoolName, &DeviceName, Option<&str>) {
    (&of.driver, &of.pool, &of.device, of.share_id.as_deref())
}

#[cfg(test)]
mod tests {
    use nodedock_model::{Condition, DeviceName, DeviceStatus, DriverName, ObjectRef, PoolName};

    use super::*;

    fn statuses(claim: &str, allocated_ms: u64, devices: &[(&str, &str)]) -> Reported {
        let claim = ObjectRef::new("default", claim, &format!("uid-{claim}")).unwrap();
        let device = |(device, kind): &(&str, &str)| {
            let (reason, message) = ("Some".to_owned(), String::new());
            let condition = Condition {
                kind: (*kind).to_owned(),
                status: Some(true),
                reason,
                message,
            };
            ReportedDevice {
                driver: DriverName::new("gpu.example.com").unwrap(),
                pool: PoolName::new("gpus").unwrap(),
                device: DeviceName::new(*device).unwrap(),
                share_id: None,
                status: DeviceStatus {
                    conditions: vec![condition],
                    ..DeviceStatus::default()
                },
            }
        };
        let devices = devices.iter().map(device).collect();
        [(
            claim.uid.clone(),
            ClaimStatuses {
                claim,
                allocated_ms,
                devices,
            },
        )]
        .into()
    }

    #[test]
    fn failure_is_added_to_driver_conditions() {
        let reported = statuses("one", 0, &[("gpu-0", "Ready")]);
        let early = statuses("one", 7, &[("gpu-0", "Failed"), ("gpu-1", "Failed")]);
        let both = with_early(reported, &early);
        let known = both.values().next().unwrap();
        let types = |index: usize| {
            let conditions = known.devices[index].status.conditions.iter();
            conditions
                .map(|condition| condition.kind.as_str())
                .collect::<Vec<_>>()
        };
        assert_eq!((known.allocated_ms, known.devices.len()), (7, 2));
        assert_eq!(
            (types(0), types(1)),
            (vec!["Failed", "Ready"], vec!["Failed"])
        );
        // Of a claim that is not prepared only the failure is known; one without a failure is named as well.
        assert_eq!(with_early(Reported::new(), &early), early);
        let none = statuses("two", 9, &[]);
        assert_eq!(with_early(Reported::new(), &none), none);
    }
}
