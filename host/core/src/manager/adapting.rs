//! Adapters that are written while the daemon runs: the plugin of a new one changes its owner.
//!
//! In this order, so that no device is given away twice: from the first step on no request takes devices by the plugin's own IDs; those that did are
//! in claims at the second; the adapter keeps what these have from its own devices at the third.

use std::collections::BTreeSet;

use futures::future::join_all;

use super::Manager;
use crate::adapters::{AdapterEntries, claimed};
use nodedock_base::tasks::Tasks;
use nodedock_model::Problem;

impl Manager {
    /// Takes all adapters as they are written now ([`crate::adapters::Adapters::apply`]), and waits until the devices of new ones may be
    /// published. `tasks`: in which new ones publish.
    ///
    /// # Errors
    ///
    /// The checkpoint takes no writes now. Nothing has changed then.
    pub async fn apply_adapters(
        &self,
        entries: AdapterEntries,
        tasks: &Tasks,
    ) -> Result<BTreeSet<String>, Problem> {
        let Some(adapters) = &self.adapters else {
            return Ok(BTreeSet::new());
        };
        let claimed = {
            let table = self.records.table();
            claimed(table.claims().map(AsRef::as_ref))
        };
        let renamed = adapters.apply(entries, &claimed, tasks).await?;
        self.devices.adopt_plugins();
        let settled = adapters.unsettled().into_iter().map(|resource| async move {
            self.choices.until_in_claims(&resource).await;
            let mut taken = self.records.table().taken_of_plugins();
            // no error: no pod has a device of the plugin
            adapters.settle(&resource, taken.remove(&resource).unwrap_or_default());
            // A device that was freed between the two.
            let taken = self.records.table().taken_of_plugins();
            adapters.set_taken(&taken);
        });
        join_all(settled).await;
        Ok(renamed)
    }
}
