//! When the manager restores sysfs values that drivers changed: for a claim that is released without its drivers, and for a driver that
//! failed to prepare the claim. A driver that unprepares what it prepared decides itself which values it leaves.

use std::sync::Arc;

use super::machine::UnprepareResult;
use super::values::{RestoreRequest, Restored};
use crate::manager::Manager;
use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, ClaimState, DriverName, Uid};

impl Manager {
    /// Restores the values of a released claim, except those of drivers that prepared and unprepared it.
    pub(super) async fn restore_released(
        &self,
        record: &ClaimRecord,
        results: &[UnprepareResult],
        request: &RestoreRequest<'_>,
    ) -> Restored {
        let decided =
            |driver: &DriverName| unprepared(results, driver) && was_prepared(record, driver);
        self.values
            .restore(&record.id, |driver| !decided(driver), |_| false, request)
            .await
    }

    /// Restores the values of drivers that unprepared a claim which they never prepared: their calls failed, and so may have their
    /// cleanup.
    pub(super) async fn restore_unfinished(
        &self,
        record: &ClaimRecord,
        results: &[UnprepareResult],
        request: &RestoreRequest<'_>,
    ) -> Restored {
        let unfinished =
            |driver: &DriverName| unprepared(results, driver) && !was_prepared(record, driver);
        self.values
            .restore(
                &record.id,
                unfinished,
                |driver| !unprepared(results, driver),
                request,
            )
            .await
    }

    pub(super) async fn end_values(&self, record: &ClaimRecord, results: &[UnprepareResult]) {
        let unprepared = results.iter().filter(|(_, outcome, _)| outcome.is_ok());
        let drivers = unprepared.map(|(driver, _, _)| driver.clone()).collect();
        if let Err(error) = self.values.end_of_drivers(&record.id.uid, drivers).await {
            tracing::warn!(
                error = chain(&error),
                "sysfs values are recorded longer than needed"
            );
        }
    }

    /// At the start: removes values of earlier boots and of unknown claims.
    pub(super) async fn resume_values(&self) {
        self.adopt_releases().await;
        let is_known = |uid: &Uid| self.table().is_known(uid.as_str());
        if let Err(error) = self.values.tidy(is_known).await {
            tracing::warn!(
                error = chain(&error),
                "sysfs values of another boot stay in the checkpoint"
            );
        }
    }

    /// Takes into the claims' records what an older release of this program noted with their values, which end with their boot.
    async fn adopt_releases(&self) {
        for (uid, by) in self.values.take_releasing() {
            let _claim = self.claim_locks.take([uid.clone()]).await;
            let known = self.table().claim(uid.as_str()).cloned();
            let is_open = |known: &Arc<ClaimRecord>| {
                known.state == ClaimState::Unpreparing && known.releasing.is_none()
            };
            let Some(known) = known.filter(is_open) else {
                continue;
            };
            let record = ClaimRecord {
                releasing: Some(by),
                ..ClaimRecord::clone(&known)
            };
            if let Err(problem) = self.commit_claims(vec![record.into()]).await {
                tracing::warn!(claim = %known.id, %problem, "a release that was begun is finished like an unprepare");
            }
        }
    }
}

fn unprepared(results: &[UnprepareResult], driver: &DriverName) -> bool {
    results
        .iter()
        .any(|(of, outcome, _)| of == driver && outcome.is_ok())
}

/// Whether a driver prepared the claim, in whatever boot.
fn was_prepared(record: &ClaimRecord, driver: &DriverName) -> bool {
    record
        .drivers
        .get(driver)
        .is_some_and(|part| part.prepared.is_some())
}
