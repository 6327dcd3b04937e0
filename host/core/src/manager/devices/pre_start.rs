//! Calls the plugins that want to be called before a container starts.

use std::sync::Arc;

use tokio::time::Instant;

use super::allocate::{no_plugin, plugin_call, within};
use crate::manager::Manager;
use nodedock_model::{AllocationEntry, Problem, ProblemCode, Uid};

impl Manager {
    /// Calls the plugins of a container's devices. A container without devices is success.
    pub(crate) async fn pre_start(
        &self,
        pod: &Uid,
        container: &str,
        request_id: &Arc<str>,
    ) -> Result<(), Problem> {
        let record = self.allocation(pod.as_str());
        let entries = record.iter().flat_map(|record| &record.entries);
        for entry in entries.filter(|entry| entry.container == container && entry.claim.is_none()) {
            self.pre_start_entry(entry, request_id).await?;
        }
        Ok(())
    }

    async fn pre_start_entry(&self, entry: &AllocationEntry, request_id: &Arc<str>) -> Result<(), Problem> {
        let AllocationEntry { container, resource, .. } = entry;
        if !entry.is_complete() {
            let message =
                format!("container {container} has no devices of {resource}: they are not allocated yet");
            return Err(Problem::unavailable(ProblemCode::DevicesNotAllocated, message));
        }
        let Some(driver) = self.plugin(resource) else {
            // The plugin's options at the allocation still count.
            return if entry.pre_start { Err(no_plugin(resource)) } else { Ok(()) };
        };
        if !driver.options().pre_start_required {
            return Ok(());
        }
        let ids: Vec<_> = entry.devices.keys().cloned().collect();
        let deadline = Instant::now() + self.settings.pre_start_deadline;
        let call = plugin_call(request_id, deadline);
        within(deadline, resource, "before the start of a container", driver.pre_start(&call, &ids)).await
    }
}
