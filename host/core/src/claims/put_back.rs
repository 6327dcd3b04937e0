//! When the host puts back what drivers changed below `/sys`: for a claim that is released without them, and for a driver that never
//! said that it had prepared the claim. A driver that unprepares what it prepared has had its chance: what it leaves is its decision.

use std::sync::Arc;

use super::Inner;
use super::unprepare::Results;
use super::values::{Doing, Errand, PutBacks};
use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, ClaimState, DriverName, Uid};

impl Inner {
    /// What drivers left that were not told of the end of the claim, and those that were and had never prepared it.
    pub(super) async fn put_back_released(
        &self,
        record: &ClaimRecord,
        results: &Results,
        errand: &Errand<'_>,
    ) -> PutBacks {
        let is_theirs = |driver: &DriverName| gave_up(results, driver) && was_prepared(record, driver);
        let wanted = |driver: &DriverName| !is_theirs(driver);
        self.values.put_back(&record.id, wanted, |_| false, Doing::PutBack, errand).await
    }

    /// What drivers left that have given up a claim which they never prepared: their calls failed, and so may have their clearing up.
    pub(super) async fn put_back_unfinished(
        &self,
        record: &ClaimRecord,
        results: &Results,
        errand: &Errand<'_>,
    ) -> PutBacks {
        let unfinished = |driver: &DriverName| gave_up(results, driver) && !was_prepared(record, driver);
        let stays = |driver: &DriverName| !gave_up(results, driver);
        self.values.put_back(&record.id, unfinished, stays, Doing::PutBack, errand).await
    }

    /// Ends what is kept for drivers that have given up a claim.
    pub(super) async fn end_values(&self, record: &ClaimRecord, results: &Results) {
        let given_up = results.iter().filter(|(_, outcome, _)| outcome.is_ok());
        let drivers = given_up.map(|(driver, _, _)| driver.clone()).collect();
        if let Err(error) = self.values.end_of_drivers(&record.id.uid, drivers).await {
            tracing::warn!(error = chain(&error), "values below /sys are kept longer than needed");
        }
    }

    /// At start: forgets values that mean nothing any more.
    pub(super) async fn resume_values(&self) {
        self.adopt_releases().await;
        let is_known = |uid: &Uid| self.table.lock().is_known(uid.as_str());
        if let Err(error) = self.values.tidy(is_known).await {
            tracing::warn!(error = chain(&error), "values of another boot stay in the checkpoint");
        }
    }

    /// Takes into the claims' records what an older release of this program noted with their values, which end with their boot.
    async fn adopt_releases(&self) {
        for (uid, by) in self.values.take_releasing() {
            let _held = self.claim_locks.take([uid.clone()]).await;
            let known = self.table.lock().claim(uid.as_str()).cloned();
            let is_open = |known: &Arc<ClaimRecord>| {
                known.state == ClaimState::Unpreparing && known.releasing.is_none()
            };
            let Some(known) = known.filter(is_open) else { continue };
            let record = ClaimRecord { releasing: Some(by), ..ClaimRecord::clone(&known) };
            if let Err(problem) = self.commit_claims(vec![record.into()]).await {
                tracing::warn!(claim = %known.id, %problem, "a release that was begun is finished like an unprepare");
            }
        }
    }
}

fn gave_up(results: &Results, driver: &DriverName) -> bool {
    results.iter().any(|(of, outcome, _)| of == driver && outcome.is_ok())
}

/// In whatever boot: it has had the claim, and knows what it did.
fn was_prepared(record: &ClaimRecord, driver: &DriverName) -> bool {
    record.drivers.get(driver).is_some_and(|part| part.prepared.is_some())
}
