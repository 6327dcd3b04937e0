//! Restores sysfs values that drivers changed: for a claim that is released without its drivers, and for a driver that failed to prepare
//! the claim. A driver that unprepares what it prepared decides itself which values it leaves.

use super::machine::UnprepareResult;
use crate::records::values::{RecordedValues, RestoreRequest, Restored};
use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, DriverName};

impl RecordedValues {
    /// Restores the values of a released claim, except those of drivers that prepared and unprepared it.
    pub(super) async fn restore_released(
        &self,
        record: &ClaimRecord,
        results: &[UnprepareResult],
        request: &RestoreRequest<'_>,
    ) -> Restored {
        self.restore(
            &record.id,
            |driver| !(unprepared(results, driver) && was_prepared(record, driver)),
            |_| false,
            request,
        )
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
        self.restore(
            &record.id,
            |driver| unprepared(results, driver) && !was_prepared(record, driver),
            |driver| !unprepared(results, driver),
            request,
        )
        .await
    }

    pub(super) async fn end_values(&self, record: &ClaimRecord, results: &[UnprepareResult]) {
        let unprepared = results.iter().filter(|(_, outcome, _)| outcome.is_ok());
        let drivers = unprepared.map(|(driver, _, _)| driver.clone()).collect();
        if let Err(error) = self.end_of_drivers(&record.id.uid, drivers).await {
            tracing::warn!(
                error = chain(&error),
                "sysfs values are recorded longer than needed"
            );
        }
    }
}

fn unprepared(results: &[UnprepareResult], driver: &DriverName) -> bool {
    results
        .iter()
        .any(|(of, outcome, _)| of == driver && outcome.is_ok())
}

/// Returns whether a driver prepared the claim, in this or an earlier boot.
fn was_prepared(record: &ClaimRecord, driver: &DriverName) -> bool {
    record
        .drivers
        .get(driver)
        .is_some_and(|part| part.prepared.is_some())
}
