//! Restores sysfs values that drivers changed, when their claim ends: those of a driver that unprepared the claim and left them, of a driver that
//! failed to prepare it, and of a claim that is released without its drivers.

use super::machine::UnprepareResult;
use crate::records::values::{RecordedValues, RestoreRequest, Restored, RestoredDrivers, Restorer};
use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, DriverName};

impl RecordedValues {
    /// Finds out what a release would restore if no driver restored anything.
    pub(super) async fn preview_release(
        &self,
        record: &ClaimRecord,
        request: &RestoreRequest<'_>,
    ) -> Restored {
        let drivers = RestoredDrivers {
            restorer: |_: &_| Some(Restorer::Host),
            stays: |_: &_| false,
        };
        self.restore(&record.id, &drivers, request).await
    }

    /// Restores the values of a released claim.
    pub(super) async fn restore_released(
        &self,
        record: &ClaimRecord,
        results: &[UnprepareResult],
        request: &RestoreRequest<'_>,
    ) -> Restored {
        let drivers = RestoredDrivers {
            restorer: |driver: &_| Some(restorer(record, results, driver)),
            stays: |_: &_| false,
        };
        self.restore(&record.id, &drivers, request).await
    }

    /// Restores the values of drivers that unprepared a claim.
    pub(super) async fn restore_unprepared(
        &self,
        record: &ClaimRecord,
        results: &[UnprepareResult],
        request: &RestoreRequest<'_>,
    ) -> Restored {
        let drivers = RestoredDrivers {
            restorer: |driver: &_| {
                unprepared(results, driver).then(|| restorer(record, results, driver))
            },
            stays: |driver: &_| !unprepared(results, driver),
        };
        self.restore(&record.id, &drivers, request).await
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

fn restorer(record: &ClaimRecord, results: &[UnprepareResult], driver: &DriverName) -> Restorer {
    match unprepared(results, driver) && was_prepared(record, driver) {
        true => Restorer::Driver,
        false => Restorer::Host,
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
