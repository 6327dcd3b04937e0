//! Frees a pod's devices, or chooses them again.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::allocate::{busy, choose_from_pool};
use super::choose;
use super::record::Want;
use super::{DeviceNodes, ResourceSource};
use crate::manager::Manager;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    AllocationEntry, ExtendedResource, ObjectRef, PodAllocation, PooledClaim, Problem, ProblemCode, Uid,
};

impl Manager {
    /// Frees the devices of a pod whose lock the caller has; a pod without devices is success. Its pool claims are unprepared by the
    /// caller.
    pub(crate) async fn free(&self, pod: &Uid) -> Result<(), Problem> {
        let Some(record) = self.allocation(pod.as_str()) else { return Ok(()) };
        let freed = PodAllocation { entries: Vec::new(), ..PodAllocation::clone(&record) };
        self.commit_allocation(&Arc::new(freed)).await?;
        failpoint::pass(Point::AllocateFreed);
        self.report_resources(record.entries.iter().map(|entry| entry.resource.clone()));
        Ok(())
    }

    /// Chooses again for a container whose pool claim lost its device to another claim, and whose pod's lock the caller has. The claim must
    /// have been unprepared: it is prepared again with other devices. A container for which there are none loses its entry.
    pub(crate) async fn reallocate(
        &self,
        pod: &Uid,
        container: &str,
        resource: &ExtendedResource,
        request_id: &str,
    ) -> Result<DeviceNodes, Problem> {
        let record = self.allocation(pod.as_str());
        let found = record.as_ref().and_then(|record| Some((record, record.entry(container, resource)?)));
        let (record, claim, old) = found
            .and_then(|(record, entry)| Some((record, entry.claim.clone()?, entry.clone())))
            .ok_or_else(|| not_pooled(container, resource))?;
        let deadline = Instant::now() + self.settings.call_deadline;
        // Held until the choice is durable: devices that are freed here cannot be taken before.
        let lock = timeout_at(deadline, self.resource_locks.take([resource.clone()])).await;
        let _lock = lock.map_err(|_| busy(resource))?;
        let chosen = self.choose_pooled_again(&record.pod, &old, &claim);
        tracing::info!(pod = %record.pod, container, %resource, request = request_id, found = chosen.is_ok(), "choosing devices again");
        let mut next = PodAllocation::clone(record);
        next.entries.retain_mut(|entry| {
            let shares = entry.claim.as_ref().is_some_and(|known| known.id.uid == claim.id.uid);
            if let (true, Ok(devices)) = (shares, &chosen) {
                entry.devices = devices.clone();
            }
            !shares || chosen.is_ok()
        });
        self.commit_allocation(&Arc::new(next)).await?;
        self.report_resources([resource.clone()]);
        chosen
    }

    fn choose_pooled_again(
        &self,
        pod: &ObjectRef,
        old: &AllocationEntry,
        claim: &PooledClaim,
    ) -> Result<DeviceNodes, Problem> {
        let snapshot = self.snapshot(&old.resource, Some((&pod.uid, &claim.id.uid)))?;
        if !matches!(&snapshot.offer.source, ResourceSource::Pools(driver) if *driver == claim.driver) {
            return Err(choose::unregistered(&old.resource));
        }
        let want = Want {
            container: old.container.clone(),
            kind: old.kind,
            resource: old.resource.clone(),
            count: old.devices.len(),
            // The container's affinity is not recorded; the nodes of its devices are.
            affinity: old.devices.values().flatten().copied().collect(),
        };
        choose_from_pool(&want, &snapshot)
    }
}

fn not_pooled(container: &str, resource: &ExtendedResource) -> Problem {
    let message = format!("container {container} has no device of {resource} that is of a driver's pool");
    Problem::not_found(ProblemCode::NoSuchAllocation, message)
}
