//! What a pod has is taken back, or chosen anew.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::Inner;
use super::allocate::{busy, choose_pooled};
use super::choose;
use super::record::Want;
use super::resources::Origin;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    AllocationEntry, ExtendedResource, ObjectRef, PodAllocation, PooledClaim, Problem, Uid,
};

impl Inner {
    pub(super) async fn free(&self, pod: &Uid) -> Result<(), Problem> {
        let _pod = self.pod_locks.take([pod.clone()]).await;
        let Some(record) = self.state().table.pod(pod.as_str()).cloned() else { return Ok(()) };
        self.commit(&Arc::new(PodAllocation { entries: Vec::new(), ..PodAllocation::clone(&record) }))
            .await?;
        failpoint::pass(Point::AllocateFreed);
        self.changed(record.entries.iter().map(|entry| entry.resource.clone()));
        Ok(())
    }

    pub(super) async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        request_id: &str,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
        let _pod = self.pod_locks.take([pod.clone()]).await;
        let record = self.state().table.pod(pod.as_str()).cloned();
        let found = record.as_ref().and_then(|record| Some((record, record.entry(container, resource)?)));
        let (record, claim, old) = found
            .and_then(|(record, entry)| Some((record, entry.claim.clone()?, entry.clone())))
            .ok_or_else(|| not_pooled(container, resource))?;
        let deadline = Instant::now() + self.settings.call_deadline;
        // Held until it is durable: what is given up here is nobody else's before.
        let lock = timeout_at(deadline, self.resource_locks.take([resource.clone()])).await;
        let _lock = lock.map_err(|_| busy(resource))?;
        let chosen = self.pick_again(&record.pod, &old, &claim);
        tracing::info!(pod = %record.pod, container, %resource, request = request_id, found = chosen.is_ok(), "choosing devices anew");
        let mut next = PodAllocation::clone(record);
        next.entries.retain_mut(|entry| {
            let shares = entry.claim.as_ref().is_some_and(|known| known.id.uid == claim.id.uid);
            if let (true, Ok(devices)) = (shares, &chosen) {
                entry.devices = devices.clone();
            }
            !shares || chosen.is_ok()
        });
        self.commit(&Arc::new(next)).await?;
        self.changed([resource.clone()]);
        chosen
    }

    fn pick_again(
        &self,
        pod: &ObjectRef,
        old: &AllocationEntry,
        claim: &PooledClaim,
    ) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
        let snapshot = self.snapshot(&old.resource, Some((&pod.uid, &claim.id.uid)));
        let snapshot = snapshot.ok_or_else(|| choose::unregistered(&old.resource))?;
        if !matches!(&snapshot.origin, Origin::Pools(driver) if *driver == claim.driver) {
            return Err(choose::unregistered(&old.resource));
        }
        let want = Want {
            container: old.container.clone(),
            kind: old.kind,
            resource: old.resource.clone(),
            count: old.devices.len(),
            // Where the container should be is not known any more; where it was to be is.
            affinity: old.devices.values().flatten().copied().collect(),
        };
        choose_pooled(&want, &snapshot)
    }
}

fn not_pooled(container: &str, resource: &ExtendedResource) -> Problem {
    let message = format!("container {container} has no device of {resource} that is of a driver's pool");
    Problem::not_found("no-such-allocation", message)
}
