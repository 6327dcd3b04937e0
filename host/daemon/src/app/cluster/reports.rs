//! What the claim manager prepared for the kubelet, reported to those who read and write claims at the API server.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::pools::NodePools;
use nodedock_kube::reconcile::Reconcile;
use nodedock_kube::status::Statuses;
use nodedock_model::{ChangedKind, ClaimStatuses, DriverName, ReportedDevice, Uid, limit};

/// Reports to the cache of the API server's claims which of them are prepared here, and wakes the reconcile when one was lost.
pub(super) async fn report_prepared(
    claims: Arc<Manager>,
    api_claims: ApiClaims,
    reconcile: Reconcile,
    changes: Changes,
    tasks: Tasks,
) {
    let (mut changes, mut lost) = (changes.listen(), api_claims.lost());
    let mut reported = None;
    loop {
        let prepared: Vec<_> = claims.held_for_kubelet().into_iter().map(|held| held.claim).collect();
        if reported.as_ref() != Some(&prepared) {
            api_claims.hold(&prepared);
            reported = Some(prepared);
        }
        tokio::select! {
            () = tasks.stopped() => return,
            // What was missed is found in the next round.
            () = Changes::next_of(&mut changes, ChangedKind::Claim) => {}
            lost = lost.changed() => match lost {
                Ok(()) => reconcile.trigger(),
                Err(_) => return,
            },
        }
    }
}

/// Reports what drivers say of claims' devices to the writer of their statuses, each change once.
pub(super) struct StatusReports {
    pub(super) claims: Arc<Manager>,
    pub(super) pools: NodePools,
    pub(super) statuses: Statuses,
    pub(super) reported: BTreeMap<Uid, ClaimStatuses>,
}

impl StatusReports {
    /// Until the tasks stop.
    pub(super) async fn run(mut self, tasks: Tasks) {
        let mut changes = self.claims.device_status_changes();
        loop {
            changes.mark_unchanged();
            let had_room = self.report();
            tokio::select! {
                () = tasks.stopped() => return,
                // What found no room is reported again: it may never change.
                () = tokio::time::sleep(limit::KUBE_RETRY_MAX), if !had_room => {}
                // A change that is missed here is seen in the next round.
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }

    /// False: there was no room for some.
    fn report(&mut self) -> bool {
        let current = self.claims.device_statuses().into_iter();
        let mut current: BTreeMap<Uid, ClaimStatuses> =
            current.map(|statuses| (statuses.claim.uid.clone(), statuses)).collect();
        for prepared in self.claims.held_for_kubelet() {
            let uid = &prepared.claim.uid;
            if self.reported.contains_key(uid) && !current.contains_key(uid) {
                // Its drivers report nothing any more: what was reported is taken back.
                let nothing = ClaimStatuses { claim: prepared.claim.clone(), devices: Vec::new() };
                current.insert(uid.clone(), nothing);
            }
        }
        for (_, gone) in self.reported.extract_if(.., |uid, _| !current.contains_key(uid)) {
            self.statuses.forget(&gone.claim);
        }
        let mut had_room = true;
        for (uid, statuses) in current {
            let before = self.reported.get(&uid);
            if before == Some(&statuses) {
                continue;
            }
            if self.statuses.report(&statuses.claim, self.by_driver(&statuses, before)) {
                self.reported.insert(uid, statuses);
            } else {
                had_room = false;
            }
        }
        had_room
    }

    /// A driver that reported something before, and nothing now, has an empty report.
    fn by_driver(
        &self,
        statuses: &ClaimStatuses,
        before: Option<&ClaimStatuses>,
    ) -> BTreeMap<DriverName, Vec<ReportedDevice>> {
        let before = before.into_iter().flat_map(|before| &before.devices);
        let mut drivers: BTreeMap<_, Vec<_>> =
            before.map(|device| (device.driver.clone(), Vec::new())).collect();
        for device in &statuses.devices {
            let pool = self.pools.published(&device.driver, &device.pool);
            let device = ReportedDevice { pool, ..device.clone() };
            drivers.entry(device.driver.clone()).or_default().push(device);
        }
        drivers
    }
}
