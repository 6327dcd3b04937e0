//! The calls of drivers: one batched call for each driver, drivers in parallel. Each call has a deadline of the manager's own, beyond the
//! driver's: a driver whose call never ends must not lock a claim for ever.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;

use super::machine::{DriverResult, UnprepareResult};
use super::prepare::Work;
use super::prepare_retry::DriverRevision;
use crate::driver::{Call, ClaimDriver, Driver, DriverIdentity, Outcomes, all_failed, skipped};
use crate::manager::Manager;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    ClaimRecord, DriverClaim, DriverClaimRecord, DriverKind, DriverName, PreparedBy, Problem,
    ProblemCode, ProblemKind, Uid,
};

/// Time that the manager waits for a driver after the deadline: the driver ends its calls itself, and checks files afterwards.
pub(crate) const CALL_MARGIN: Duration = Duration::from_secs(5);

/// A driver that was called, as it served. Holding the identity keeps the driver's file until the results are durable, though no claim
/// names it yet.
pub(super) type CalledDriver = (DriverRevision, Arc<DriverIdentity>);

/// A driver to call, as it serves when a request is decided, or why it cannot be called.
type Callee = Result<(Driver, Arc<dyn ClaimDriver>), Problem>;
pub(super) type Callees = BTreeMap<DriverName, Callee>;

/// Whether the calls cannot change the node.
pub(super) fn are_pure(callees: &Callees) -> bool {
    let is_pure = |callee: &Callee| callee.as_ref().is_ok_and(|(_, driver)| driver.is_pure());
    !callees.is_empty() && callees.values().all(is_pure)
}

/// The calls for some work: each driver, with the indexes and the records of its claims.
fn batches(work: &[Work]) -> impl Iterator<Item = (&DriverName, Vec<usize>, Vec<&ClaimRecord>)> {
    let mut batches: BTreeMap<&DriverName, (Vec<usize>, Vec<&ClaimRecord>)> = BTreeMap::new();
    for (index, (record, drivers)) in work.iter().enumerate() {
        for driver in drivers
            .iter()
            .filter(|driver| record.drivers.contains_key(*driver))
        {
            let (indexes, records) = batches.entry(driver).or_default();
            indexes.push(index);
            records.push(record);
        }
    }
    batches
        .into_iter()
        .map(|(driver, (indexes, records))| (driver, indexes, records))
}

/// The results of calls in the order of the work.
fn by_claim<R>(work: &[Work], calls: Vec<(Vec<usize>, Vec<R>)>) -> Vec<Vec<R>> {
    let mut results: Vec<Vec<R>> = work.iter().map(|_| Vec::new()).collect();
    for (indexes, answers) in calls {
        indexes
            .into_iter()
            .zip(answers)
            .for_each(|(index, answer)| results[index].push(answer));
    }
    results
}

impl Manager {
    pub(super) fn callees(&self, work: &[Work]) -> Callees {
        let names = work.iter().flat_map(|(_, drivers)| drivers);
        names
            .map(|name| (name.clone(), self.claim_driver(name)))
            .collect()
    }

    /// Prepares; returns the results in the order of `work`, each with the driver if it was called.
    pub(super) async fn call_prepare(
        &self,
        work: &[Work],
        callees: &Callees,
        call: &Call,
    ) -> Vec<Vec<(DriverResult, Option<CalledDriver>)>> {
        let calls = batches(work).filter_map(|(name, indexes, records)| {
            let callee = callees.get(name)?;
            Some(async move {
                (
                    indexes,
                    self.prepare_with(name, callee, &records, call).await,
                )
            })
        });
        by_claim(work, join_all(calls).await)
    }

    /// The driver that serves under a name, and its service for claims.
    fn claim_driver(&self, name: &DriverName) -> Callee {
        let driver = self.registry.serving(name)?;
        let claims = driver.claims.clone().ok_or_else(|| no_claims(name))?;
        Ok((driver, claims))
    }

    /// Unprepares; returns the results in the order of `work`.
    pub(super) async fn call_unprepare(
        &self,
        work: &[Work],
        call: &Call,
    ) -> Vec<Vec<UnprepareResult>> {
        let calls = batches(work).map(|(driver, indexes, records)| async move {
            let of_driver = |record: &ClaimRecord| {
                let mut of_driver = record.driver_record(driver)?;
                of_driver.claim.progress = self.values.progress_for(&record.id.uid, driver);
                Some(of_driver)
            };
            let found = records.into_iter().filter_map(|record| Some((record, of_driver(record)?)));
            let (records, claims): (Vec<_>, Vec<_>) = found.unzip();
            let started = Instant::now();
            let ends = self.unprepare_with(driver, &records, &claims, call).await;
            let duration_us = micros(started);
            let result = |(record, end): (&&ClaimRecord, Result<(), Problem>)| {
                if let Err(problem) = &end {
                    let (claim, request, code) = (&record.id, &call.request_id, &problem.code);
                    tracing::warn!(%driver, %claim, %request, code, %problem, "claim not unprepared");
                }
                (driver.clone(), end, duration_us)
            };
            (indexes, records.iter().zip(ends).map(result).collect())
        });
        by_claim(work, join_all(calls).await)
    }

    /// Unprepares one driver's parts: with the version that serves, and if that refuses, with the one that prepared the claim.
    async fn unprepare_with(
        &self,
        name: &DriverName,
        records: &[&ClaimRecord],
        claims: &[DriverClaimRecord],
        call: &Call,
    ) -> Vec<Result<(), Problem>> {
        failpoint::pass(Point::UnprepareCall);
        let driver = match self.registry.serving(name) {
            Ok(driver) => driver,
            Err(problem) => return vec![Err(absent_driver(&problem)); claims.len()],
        };
        let Some(claim_driver) = &driver.claims else {
            return vec![Err(no_claims(name)); claims.len()];
        };
        let mut ends = unprepare(name, claim_driver.as_ref(), claims, call).await;
        failpoint::pass(Point::UnprepareAnswered);
        self.unprepare_with_previous_versions(&driver, records, claims, &mut ends, call)
            .await;
        ends
    }
}

impl Manager {
    async fn prepare_with(
        &self,
        name: &DriverName,
        callee: &Callee,
        records: &[&ClaimRecord],
        call: &Call,
    ) -> Vec<(DriverResult, Option<CalledDriver>)> {
        failpoint::pass(Point::PrepareCall);
        let started = Instant::now();
        let claim = |record: &&ClaimRecord| DriverClaim {
            reserved_for: record.consumers(),
            progress: self.values.progress_for(&record.id.uid, name),
            ..record.driver_claim(name)
        };
        let claims: Vec<_> = records.iter().map(claim).collect();
        let uids = || claims.iter().map(|claim| &claim.id.uid);
        let (by, called, mut outcomes) = match callee {
            Err(problem) => (None, None, all_failed(uids(), problem)),
            Ok((driver, claim_driver)) => {
                let called = (DriverRevision::of(driver), driver.identity.clone());
                let outcomes =
                    in_time(name, call, uids(), claim_driver.prepare(call, &claims)).await;
                (Some(prepared_by(driver)), Some(called), outcomes)
            }
        };
        failpoint::pass(Point::PrepareAnswered);
        let duration_us = micros(started);
        let result = |record: &&ClaimRecord| {
            let outcome = outcomes
                .remove(&record.id.uid)
                .unwrap_or_else(|| Err(skipped(&record.id.uid)));
            if let Err(problem) = &outcome {
                let (claim, request, code) = (&record.id, &call.request_id, &problem.code);
                tracing::warn!(driver = %name, %claim, %request, code, %problem, "claim refused");
            }
            (
                DriverResult {
                    driver: name.clone(),
                    by: by.clone(),
                    outcome,
                    duration_us,
                },
                called.clone(),
            )
        };
        records.iter().map(result).collect()
    }
}

/// Calls a driver to unprepare claims; returns the outcomes in the order of the claims.
pub(super) async fn unprepare(
    name: &DriverName,
    driver: &dyn ClaimDriver,
    claims: &[DriverClaimRecord],
    call: &Call,
) -> Vec<Result<(), Problem>> {
    let uids = claims.iter().map(|live| &live.claim.id.uid);
    let mut outcomes = in_time(name, call, uids, driver.unprepare(call, claims)).await;
    let uids = claims.iter().map(|live| &live.claim.id.uid);
    uids.map(|uid| outcomes.remove(uid).unwrap_or_else(|| Err(skipped(uid))))
        .collect()
}

/// The outcomes of a call, or a problem if it does not end. A call that did not end may have been carried out.
async fn in_time<'a, T>(
    driver: &DriverName,
    call: &Call,
    claims: impl Iterator<Item = &'a Uid>,
    outcomes: impl Future<Output = Outcomes<T>>,
) -> Outcomes<T> {
    match tokio::time::timeout(call.deadline + CALL_MARGIN, outcomes).await {
        Ok(outcomes) => outcomes,
        Err(_) => {
            let (request, deadline_ms) = (&call.request_id, call.deadline.as_millis());
            tracing::error!(%driver, %request, deadline_ms, "a driver call did not end at its deadline and is dropped");
            all_failed(claims, &no_end(driver, call))
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn prepared_by(driver: &Driver) -> PreparedBy {
    let identity = &driver.identity;
    PreparedBy {
        kind: identity.kind,
        version: identity.version.clone(),
        digest: identity.digest.clone(),
        lists: identity.kind == DriverKind::Grpc && driver.inventory.is_some(),
    }
}

fn no_claims(driver: &DriverName) -> Problem {
    Problem::invalid(
        ProblemCode::DriverWithoutClaims,
        format!("driver {driver} takes no claims"),
    )
}

fn no_end(driver: &DriverName, call: &Call) -> Problem {
    let deadline_ms = call.deadline.as_millis();
    let message =
        format!("the call of driver {driver} did not end at its deadline of {deadline_ms} ms");
    Problem::internal(ProblemCode::DriverCallStuck, message)
}

/// A claim is kept while its driver is absent, and unprepared when the driver serves again.
fn absent_driver(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    problem.kind = ProblemKind::Unavailable;
    problem.message = format!(
        "the claim is kept until its driver is back: {}",
        problem.message
    );
    problem
}
