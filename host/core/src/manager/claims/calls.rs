//! The calls of drivers: one batched call for each driver, drivers in parallel. Each call has a deadline of the manager's own, beyond the
//! driver's: a driver whose call never ends must not lock a claim for ever.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;

use super::ClaimEnd;
use super::machine::{DriverResult, UnprepareResult};
use super::prepare_retry::{CalledDriver, DriverRevision};
use super::previous_versions::PreviousVersions;
use super::retries::Retries;
use super::timed_calls::{in_time, unprepare};
use crate::driver::{Call, ClaimDriver, Driver, all_failed, skipped, validate_claims};
use crate::records::values::RecordedValues;
use crate::registry::Registry;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    ClaimRecord, DriverClaim, DriverClaimRecord, DriverKind, DriverName, PreparedBy, Problem,
    ProblemCode, ProblemKind, Uid,
};

/// A claim whose drivers have to be called, with the drivers.
pub(super) type Work = (Arc<ClaimRecord>, Vec<DriverName>);
pub(super) type Outcomes = BTreeMap<Uid, Result<ClaimEnd, Problem>>;

/// A driver to call, as it serves when a request is decided, or why it cannot be called.
type Callee = Result<(Driver, Arc<dyn ClaimDriver>), Problem>;
pub(super) type Callees = BTreeMap<DriverName, Callee>;

/// Returns whether the calls cannot change the node.
pub(super) fn are_pure(callees: &Callees) -> bool {
    !callees.is_empty()
        && callees
            .values()
            .all(|callee| callee.as_ref().is_ok_and(|(_, driver)| driver.is_pure()))
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

/// Calls drivers for claims. Keeps nothing between calls.
pub(crate) struct DriverCalls {
    registry: Registry,
    values: Arc<RecordedValues>,
    retries: Arc<Retries>,
    /// Deadline of one call.
    deadline: Duration,
}

impl DriverCalls {
    pub(in crate::manager) fn new(
        registry: Registry,
        values: Arc<RecordedValues>,
        retries: Arc<Retries>,
        deadline: Duration,
    ) -> Self {
        Self {
            registry,
            values,
            retries,
            deadline,
        }
    }

    /// A driver call of a request, with the usual deadline.
    pub(super) fn driver_call(&self, request_id: Arc<str>) -> Call {
        Call {
            request_id,
            deadline: self.deadline,
        }
    }

    pub(super) fn callees(&self, work: &[Work]) -> Callees {
        let names = work.iter().flat_map(|(_, drivers)| drivers);
        names
            .map(|name| (name.clone(), self.claim_driver(name)))
            .collect()
    }

    /// Has the drivers check the parameters of the claims; returns the results that refuse one, by claim, each with its driver.
    pub(super) async fn call_validate(
        &self,
        work: &[Work],
        callees: &Callees,
        call: &Call,
    ) -> BTreeMap<Uid, Vec<(DriverResult, Option<CalledDriver>)>> {
        let calls = batches(work).filter_map(|(name, _, records)| {
            let (driver, claim_driver) = callees.get(name)?.as_ref().ok()?;
            let claims: Vec<_> = records
                .iter()
                .map(|record| record.driver_claim(name))
                .collect();
            let called = (DriverRevision::of(driver), driver.identity.clone());
            Some(async move {
                let started = Instant::now();
                let uids = claims.iter().map(|claim| &claim.id.uid);
                let verdicts = validate_claims(claim_driver.as_ref(), call, &claims);
                let verdicts = in_time(name, call, uids, verdicts).await;
                let refused = verdicts.into_iter().filter_map(|(uid, verdict)| Some((uid, verdict.err()?)));
                let duration_us = micros(started);
                let results = refused.map(|(uid, problem)| {
                    let (request, code) = (&call.request_id, &problem.code);
                    tracing::warn!(driver = %name, claim = %uid, %request, code, %problem, "parameters refused");
                    let result = DriverResult {
                        driver: name.clone(),
                        by: None,
                        outcome: Err(problem),
                        duration_us,
                    };
                    (uid, (result, Some(called.clone())))
                });
                results.collect::<Vec<_>>()
            })
        });
        let mut refused = BTreeMap::<_, Vec<_>>::new();
        for (uid, result) in join_all(calls).await.into_iter().flatten() {
            refused.entry(uid).or_default().push(result);
        }
        refused
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
            let found = records.into_iter().filter_map(|record| {
                let mut of_driver = record.driver_record(driver)?;
                of_driver.claim.progress = self.values.progress_for(&record.id.uid, driver);
                Some((record, of_driver))
            });
            let (records, claims): (Vec<_>, Vec<_>) = found.unzip();
            let started = Instant::now();
            let ends = self.unprepare_with(driver, &records, &claims, call).await;
            let duration_us = micros(started);
            let results = records.iter().zip(ends).map(|(record, end)| {
                if let Err(problem) = &end {
                    let (claim, request, code) = (&record.id, &call.request_id, &problem.code);
                    tracing::warn!(%driver, %claim, %request, code, %problem, "claim not unprepared");
                }
                (driver.clone(), end, duration_us)
            });
            (indexes, results.collect())
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
        if let Some(previous) = self.registry.instances.stored_drivers() {
            let versions = PreviousVersions {
                serving: &driver,
                previous: previous.as_ref(),
                retries: &self.retries,
            };
            versions.unprepare(records, claims, &mut ends, call).await;
        }
        ends
    }

    async fn prepare_with(
        &self,
        name: &DriverName,
        callee: &Callee,
        records: &[&ClaimRecord],
        call: &Call,
    ) -> Vec<(DriverResult, Option<CalledDriver>)> {
        failpoint::pass(Point::PrepareCall);
        let started = Instant::now();
        let claims = records.iter().map(|record| DriverClaim {
            reserved_for: record.consumers(),
            progress: self.values.progress_for(&record.id.uid, name),
            ..record.driver_claim(name)
        });
        let claims: Vec<_> = claims.collect();
        let uids = claims.iter().map(|claim| &claim.id.uid);
        let (by, called, mut outcomes) = match callee {
            Err(problem) => (None, None, all_failed(uids, problem)),
            Ok((driver, claim_driver)) => {
                let called = (DriverRevision::of(driver), driver.identity.clone());
                let outcomes = in_time(name, call, uids, claim_driver.prepare(call, &claims)).await;
                (Some(prepared_by(driver)), Some(called), outcomes)
            }
        };
        failpoint::pass(Point::PrepareAnswered);
        let duration_us = micros(started);
        let results = records.iter().map(|record| {
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
        });
        results.collect()
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
