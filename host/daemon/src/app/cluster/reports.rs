//! What the claim manager prepared for the kubelet, reported to those who read and write claims at the API server.

use std::sync::Arc;

use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::pools::NodePools;
use nodedock_kube::reconcile::Reconcile;
use nodedock_kube::status::{Reported, Statuses};
use nodedock_model::{ChangedKind, ClaimStatuses};

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

/// Reports to the writer of statuses what drivers report of claims' devices, until the tasks stop.
pub(super) async fn report_statuses(
    claims: Arc<Manager>,
    pools: NodePools,
    statuses: Statuses,
    tasks: Tasks,
) {
    let mut changes = claims.device_status_changes();
    loop {
        changes.mark_unchanged();
        statuses.set(reported(&claims, &pools));
        tokio::select! {
            () = tasks.stopped() => return,
            // A change that is missed here is seen in the next round.
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

/// What drivers report of each prepared claim, by the names of pools that the API server has; of some nothing.
fn reported(claims: &Manager, pools: &NodePools) -> Reported {
    let prepared = claims.held_for_kubelet().into_iter();
    let prepared = prepared.map(|held| ClaimStatuses { claim: held.claim, devices: Vec::new() });
    let mut all: Vec<_> = prepared.chain(claims.device_statuses()).collect();
    for device in all.iter_mut().flat_map(|statuses| &mut statuses.devices) {
        device.pool = pools.published(&device.driver, &device.pool);
    }
    all.into_iter().map(|statuses| (statuses.claim.uid.clone(), statuses)).collect()
}
