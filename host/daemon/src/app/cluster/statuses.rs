//! Brings what drivers tell of claims' devices to the writer of their statuses, each change once.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::pools::Pools;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_kube::status::{ClaimStatus, DeviceReport, Statuses};
use nodedock_model::{ClaimStatuses, DriverName, Uid, limit};

pub(super) struct StatusFeed {
    pub(super) claims: Arc<Manager>,
    pub(super) pools: Pools,
    pub(super) statuses: Statuses,
}

impl StatusFeed {
    /// Until the tasks stop.
    pub(super) async fn run(self, tasks: Tasks) {
        let mut changes = self.claims.device_status_changes();
        let mut told: BTreeMap<Uid, ClaimStatuses> = BTreeMap::new();
        loop {
            changes.mark_unchanged();
            let all_told = self.tell(&mut told);
            tokio::select! {
                () = tasks.stopped() => return,
                // What found no room is told again: it may never change.
                () = tokio::time::sleep(limit::KUBE_RETRY_MAX), if !all_told => {}
                // A change that is not seen here is seen at the next turn.
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }

    /// False: there was no room for some.
    fn tell(&self, told: &mut BTreeMap<Uid, ClaimStatuses>) -> bool {
        let now = self.claims.device_statuses().into_iter();
        let mut now: BTreeMap<Uid, ClaimStatuses> =
            now.map(|statuses| (statuses.claim.uid.clone(), statuses)).collect();
        let held = self.claims.held_for_kubelet();
        let is_held = |uid: &Uid| held.iter().any(|held| held.claim.uid == *uid);
        for (uid, before) in &*told {
            if !now.contains_key(uid) && is_held(uid) {
                // Nothing is told of it any more: what was told is taken back.
                let nothing = ClaimStatuses { claim: before.claim.clone(), devices: Vec::new() };
                now.insert(uid.clone(), nothing);
            }
        }
        told.retain(|uid, _| {
            let stays = now.contains_key(uid);
            if !stays {
                self.statuses.forget(uid);
            }
            stays
        });
        let mut all_told = true;
        for (uid, statuses) in now {
            let before = told.get(&uid);
            if before == Some(&statuses) {
                continue;
            }
            if self.statuses.report(self.status(&statuses, before)) {
                told.insert(uid, statuses);
            } else {
                all_told = false;
            }
        }
        all_told
    }

    /// A driver that told something before, and nothing now, has told nothing.
    fn status(&self, statuses: &ClaimStatuses, before: Option<&ClaimStatuses>) -> ClaimStatus {
        let told_before = before.into_iter().flat_map(|before| &before.devices);
        let mut drivers: BTreeMap<DriverName, Vec<DeviceReport>> =
            told_before.map(|device| (device.driver.clone(), Vec::new())).collect();
        for device in &statuses.devices {
            drivers.entry(device.driver.clone()).or_default().push(DeviceReport {
                pool: self.pools.published(&device.driver, &device.pool),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                status: device.status.clone(),
            });
        }
        ClaimStatus { claim: statuses.claim.clone(), drivers }
    }
}
