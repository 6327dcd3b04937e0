//! Tells the memory of the API server's claims which of them this node holds, and the reconcile when one was lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;

use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_kube::claims::ApiClaims;
use nodedock_kube::reconcile::Reconcile;
use nodedock_model::{ChangedKind, ObjectRef};

pub(super) struct HeldFeed {
    pub(super) claims: Arc<Manager>,
    pub(super) api_claims: ApiClaims,
    pub(super) reconcile: Reconcile,
    pub(super) changes: Changes,
}

impl HeldFeed {
    /// Until the tasks stop.
    pub(super) async fn run(self, tasks: Tasks) {
        let (mut changes, mut lost) = (self.changes.listen(), self.api_claims.lost());
        let mut told: Option<BTreeSet<ObjectRef>> = None;
        loop {
            let held: BTreeSet<_> =
                self.claims.held_for_kubelet().into_iter().map(|held| held.claim).collect();
            if told.as_ref() != Some(&held) {
                self.api_claims.hold(&held.iter().cloned().collect::<Vec<_>>());
                told = Some(held);
            }
            loop {
                tokio::select! {
                    () = tasks.stopped() => return,
                    // What was missed is found at the next look.
                    change = changes.recv() => match change {
                        Ok(change) if change.kind == ChangedKind::Claim => break,
                        Ok(_) => {}
                        Err(RecvError::Lagged(_)) => break,
                        Err(RecvError::Closed) => return,
                    },
                    lost = lost.recv() => match lost {
                        Ok(_) | Err(RecvError::Lagged(_)) => self.reconcile.look_soon(),
                        Err(RecvError::Closed) => return,
                    },
                }
            }
        }
    }
}
