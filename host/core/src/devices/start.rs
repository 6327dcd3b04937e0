//! Before a container starts: plugins that want to know of it are told.

use std::sync::Arc;

use tokio::time::Instant;

use super::Inner;
use super::allocate::{stopped, within};
use nodedock_model::{AllocationEntry, Problem, Uid};

impl Inner {
    pub(super) async fn pre_start(
        &self,
        pod: &Uid,
        container: &str,
        request_id: &Arc<str>,
    ) -> Result<(), Problem> {
        let record = self.state().table.pod(pod.as_str()).cloned();
        let entries = record.iter().flat_map(|record| &record.entries);
        for entry in entries.filter(|entry| entry.container == container && entry.claim.is_none()) {
            self.tell_start(entry, request_id).await?;
        }
        Ok(())
    }

    async fn tell_start(&self, entry: &AllocationEntry, request_id: &Arc<str>) -> Result<(), Problem> {
        let AllocationEntry { container, resource, .. } = entry;
        if !entry.is_complete() {
            let message = format!(
                "container {container} has no devices of {resource}: they were asked for, and not given"
            );
            return Err(Problem::unavailable("devices-not-allocated", message));
        }
        let Some(driver) = self.plugin(resource) else {
            // What it wanted when it gave the devices still counts.
            return if entry.pre_start { Err(stopped(resource)) } else { Ok(()) };
        };
        if !driver.options().pre_start_required {
            return Ok(());
        }
        let ids: Vec<_> = entry.devices.keys().cloned().collect();
        let deadline = Instant::now() + self.settings.pre_start_deadline;
        let call = self.call(request_id, deadline);
        within(deadline, resource, "before the start of a container", driver.pre_start(&call, &ids)).await
    }
}
