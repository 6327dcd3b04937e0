//! Claims: the manager's requests about them, and the commits of their records.
//!
//! # Life of a claim
//!
//! ```text
//! absent ──prepare──► preparing ──results durable──► prepared ──last pod gone──► unpreparing ──► absent
//!                        │ ▲                            │  ▲                          │
//!                        │ └── crash: completed         │  └─ new boot: prepare again │ crash: completed
//!                        └── refused: rolled back       └─ CDI file gone: rendered again
//! ```
//!
//! - `preparing`: the intent is durable; drivers may or may not have acted. A retry calls only the drivers without a result; an unprepare calls
//!   all of them. A claim that every driver refused permanently is rolled back at once.
//! - `prepared`: every driver's result is durable. Another pod joins without a driver call. A claim whose device nodes have other numbers than at
//!   its prepare is prepared again, as after a boot.
//! - `unpreparing`: the last pod is gone; the record stays until every driver has unprepared the claim.
//!
//! Retries. A permanent refusal of a WASM driver stands until the request or the driver changes: version, grant, config, devices. A temporary
//! refusal, and every refusal of a native plugin, is retried at the driver's own time (`retry-after-ms`), or once at once and then with delays that
//! double. The request itself waits up to half a second; for a longer delay it returns the same problem with the remaining time. An unprepare is
//! retried for each claim in the same way, and at once when a driver begins to serve. All retry state is in memory. The manager ends a call
//! itself shortly after the deadline that it passed.

pub(crate) mod calls;
mod driver_changes;
pub(crate) mod files;
pub(crate) mod hardware;
mod held_hardware;
pub(crate) mod kubelet;
pub mod machine;
mod metadata;
pub(crate) mod metrics;
mod overlap;
mod prepare;
pub(crate) mod prepare_retry;
mod previous_versions;
mod release;
mod restore;
mod retry_status;
pub mod source;
pub mod table;
mod unprepare;
pub(crate) mod unprepare_retry;
pub(crate) mod upkeep;
pub mod values;

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod machine_tests;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use strum::IntoStaticStr;

use crate::checkpoint::Change;
use crate::driver::PreparedClaims;
use crate::manager::Manager;
use nodedock_base::error::chain;
use nodedock_model::{
    ChangedKind, ClaimRecord, DeviceName, DriverClaimRecord, DriverName, ObjectName, ObjectRef,
    PoolName, Problem, ProblemCode, ReleaseRecord, Uid,
};

pub use hardware::HardwareHolds;
pub use metrics::ClaimMetrics;
pub use release::{ReleasePreview, ReleaseRequest};
pub use retry_status::{ClaimView, RefusedClaim, Retry, RetryStatus};
use table::{ClaimTable, Undo};
pub use values::RecordedValues;

/// Maximum of a driver's `retry-after-ms`: a wrong number must not block a claim for days.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// The outcome of a request for one claim.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimOutcome {
    pub namespace: ObjectName,
    pub name: ObjectName,
    /// None: the claim was not found.
    pub uid: Option<Uid>,
    pub end: Result<ClaimEnd, Problem>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ClaimEnd {
    Prepared,
    Unprepared,
    /// Other pods, or a kubelet, hold it.
    Kept,
}

impl ClaimEnd {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Which pod an unprepare is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodSelector {
    Uid(Uid),
    /// Every pod of that namespace and name that holds something.
    Name(ObjectName, ObjectName),
}

impl PodSelector {
    pub(crate) fn is(&self, pod: &ObjectRef) -> bool {
        match self {
            Self::Uid(uid) => pod.uid == *uid,
            Self::Name(namespace, name) => pod.namespace == *namespace && pod.name == *name,
        }
    }
}

/// The first few names of a list, and the number of the others: a message is one line.
fn name_few<T: ToString>(names: impl ExactSizeIterator<Item = T>, max: usize) -> String {
    let others = names.len().saturating_sub(max);
    let mut named: Vec<_> = names.take(max).map(|name| name.to_string()).collect();
    if others > 0 {
        named.push(format!("and {others} more"));
    }
    named.join(", ")
}

/// The table that the manager changes and drivers read as `PreparedClaims`.
pub type SharedClaimTable = Mutex<ClaimTable>;

impl PreparedClaims for SharedClaimTable {
    fn after(
        &self,
        driver: &DriverName,
        device: Option<(&str, &str)>,
        after: Option<&str>,
        limit: usize,
    ) -> Vec<DriverClaimRecord> {
        let table = self.lock();
        let later =
            |record: &&Arc<ClaimRecord>| after.is_none_or(|uid| record.id.uid.as_str() > uid);
        let prepared = |record: &Arc<ClaimRecord>| called_for(record, driver);
        match device {
            None => table
                .claims_of_driver(driver)
                .filter(later)
                .filter_map(prepared)
                .take(limit)
                .collect(),
            Some((pool, device)) => table
                .users_of(driver, pool, device)
                .filter(later)
                .filter_map(prepared)
                .take(limit)
                .collect(),
        }
    }

    fn get(&self, driver: &DriverName, uid: &str) -> Option<DriverClaimRecord> {
        self.lock()
            .claim(uid)
            .and_then(|record| called_for(record, driver))
    }
}

/// A claim that the driver has prepared, or was called to.
fn called_for(record: &ClaimRecord, driver: &DriverName) -> Option<DriverClaimRecord> {
    let part = record.drivers.get(driver)?;
    let is_called = part.prepared.is_some() || part.by.is_some();
    is_called.then(|| record.driver_record(driver))?
}

impl Manager {
    pub(crate) fn table(&self) -> MutexGuard<'_, ClaimTable> {
        self.claims.lock()
    }

    /// Every claim, by namespace and name.
    pub fn claims(&self) -> Vec<Arc<ClaimRecord>> {
        let mut claims: Vec<_> = self.table().claims().cloned().collect();
        claims.sort_by(|a, b| (&a.id.namespace, &a.id.name).cmp(&(&b.id.namespace, &b.id.name)));
        claims
    }

    /// Claims that operators released by force, the oldest first.
    pub fn released_claims(&self) -> Vec<Arc<ReleaseRecord>> {
        self.table().released()
    }

    pub fn users_of_device(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<ObjectRef> {
        self.table()
            .users_of(driver, pool, device)
            .map(|record| record.id.clone())
            .collect()
    }

    /// Claims that keep a device, the hardware behind it, or what it takes of counters from an exclusive claim. Pool claims are among them.
    pub fn holders_of_device(
        &self,
        driver: &DriverName,
        pool: &str,
        device: &str,
    ) -> Vec<ObjectRef> {
        let facts = self.facts(driver, pool, device);
        let table = self.table();
        let mut holders = table.holders(&facts.exclusive_holds(driver, pool, device));
        let overlapping = facts
            .hold(driver, pool, device)
            .map(|hold| overlap::in_the_way(&table, &hold));
        let is_new = |claim: &ObjectRef| holders.iter().all(|holder| holder.uid != claim.uid);
        let others: Vec<_> = overlapping.into_iter().flatten().filter(is_new).collect();
        holders.extend(others);
        holders
    }

    /// Whether devices of a driver fit beside each other and those of all claims, by what they take of counters.
    pub(in crate::manager) fn fit_together(
        &self,
        driver: &DriverName,
        devices: impl Iterator<Item = (PoolName, DeviceName)>,
    ) -> bool {
        let hold = |(pool, device): (PoolName, DeviceName)| {
            self.facts(driver, pool.as_str(), device.as_str()).hold(
                driver,
                pool.as_str(),
                device.as_str(),
            )
        };
        let holds: Vec<_> = devices.filter_map(hold).collect();
        holds.is_empty() || overlap::fits(&self.table(), &holds)
    }

    /// Repairs the CDI files of a pod's claims before they are reported; returns the problem of the first that cannot be repaired.
    /// Claims with an operation under way are left to it.
    pub async fn check_files_of(&self, pod: &str) -> Result<(), Problem> {
        let claims = self.table().claims_of_pod(pod);
        let refused = self
            .check_idle_claims(claims.iter().map(|claim| &claim.id.uid))
            .await;
        refused.into_values().next().map_or(Ok(()), Err)
    }

    pub fn claim_metrics(&self) -> &ClaimMetrics {
        &self.claim_metrics
    }

    pub fn boot_id(&self) -> &str {
        &self.settings.node.boot_id
    }

    /// Puts records into the table, then makes them durable; restores the table if that fails.
    pub(crate) async fn commit_claims(
        &self,
        records: Vec<Arc<ClaimRecord>>,
    ) -> Result<(), Problem> {
        self.commit_with(records, Vec::new(), Undo::default()).await
    }

    /// The same with changes that are in the table already. `undo`: of these, if the commit fails.
    async fn commit_with(
        &self,
        records: Vec<Arc<ClaimRecord>>,
        mut changes: Vec<Change>,
        mut undo: Undo,
    ) -> Result<(), Problem> {
        {
            let mut table = self.table();
            records
                .iter()
                .for_each(|record| undo.put(&mut table, record));
        }
        changes.extend(records.iter().cloned().map(Change::PutClaim));
        self.commit(changes, undo).await?;
        self.report_claims(&records);
        Ok(())
    }

    /// Makes changes durable that are in the table already, and with them what they mean for recorded sysfs values; restores the
    /// table if that fails.
    async fn commit(&self, changes: Vec<Change>, undo: Undo) -> Result<(), Problem> {
        if changes.is_empty() {
            return Ok(());
        }
        let Err(error) = self.values.commit_claims(changes, Vec::new()).await else {
            return Ok(());
        };
        undo.restore(&mut self.table());
        // A request that was refused because of the restored claims decides again.
        self.claims_freed.send_modify(|count| *count += 1);
        tracing::error!(error = chain(&error), "commit to the checkpoint failed");
        Err(error.problem())
    }

    fn report_claims(&self, records: &[Arc<ClaimRecord>]) {
        for record in records {
            self.changes
                .tell(ChangedKind::Claim, &record.id, record.state.as_str());
        }
        self.report_statuses(records.iter());
    }

    fn report_gone(&self, records: &[Arc<ClaimRecord>]) {
        for record in records {
            self.set_file_conditions(record, Vec::new());
            self.changes.tell(ChangedKind::Claim, &record.id, "gone");
        }
        self.report_statuses(records.iter());
    }

    /// Removes claims, and those of `pods` that hold nothing else, durably and with more changes in the same commit. They leave the
    /// table after the commit: if it failed, a device that another claim took before would be in two claims. The caller has the
    /// pods' locks. `undo`: of changes that are in the table already, if the commit fails.
    async fn forget(
        &self,
        uids: &[Uid],
        pods: &BTreeSet<Uid>,
        mut changes: Vec<Change>,
        undo: Undo,
    ) -> Result<(), Problem> {
        let pods = self.table().pods_with_nothing_but(pods, uids);
        changes.extend(uids.iter().cloned().map(Change::DeleteClaim));
        changes.extend(pods.iter().map(|pod| Change::DeletePod((*pod).clone())));
        self.commit(changes, undo).await?;
        let gone: Vec<_> = {
            let mut table = self.table();
            pods.iter()
                .for_each(|pod| drop(table.remove_pod(pod.as_str())));
            uids.iter().filter_map(|uid| table.remove(uid)).collect()
        };
        self.report_gone(&gone);
        self.tell_adapters();
        self.claims_freed.send_modify(|count| *count += 1);
        Ok(())
    }
}

fn unrendered(record: &ClaimRecord, error: &crate::cdi::RenderError) -> Problem {
    let message = format!(
        "claim {} makes no valid CDI file: {}",
        record.id,
        chain(error)
    );
    Problem::internal(ProblemCode::CdiNotValid, message)
}
