//! The calls of drivers: one batched call per driver, drivers side by side, each with a deadline of the manager's own. A driver's face
//! ends its calls at their deadline; that one of them does not must not hold a claim for ever.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use super::Inner;
use super::machine::DriverResult;
use super::prepare::Work;
use super::refusals::DriverMark;
use super::unprepare::Results;
use crate::driver::{Call, ClaimDriver, Driver, DriverIdentity, Outcomes, all_failed};
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{ClaimRecord, DriverName, LiveClaim, PreparedBy, Problem, ProblemKind, Uid, limit};

/// The drivers that were called, as they stood. The identity is held until what came of the call is durable: until then the code is
/// kept though no claim names it.
pub(super) type Marks = BTreeMap<DriverName, Mark>;
type Mark = (DriverMark, Arc<DriverIdentity>);

impl Inner {
    /// Prepares; the results in the order of `work`, and the drivers that were called.
    pub(super) async fn call_drivers(&self, work: &[Work], call: &Call) -> (Vec<Vec<DriverResult>>, Marks) {
        let mut batches: BTreeMap<&DriverName, Vec<usize>> = BTreeMap::new();
        for (index, (_, drivers)) in work.iter().enumerate() {
            drivers.iter().for_each(|driver| batches.entry(driver).or_default().push(index));
        }
        let calls = batches.into_iter().map(|(driver, indexes)| async move {
            let records: Vec<_> = indexes.iter().map(|index| &work[*index].0).collect();
            (driver, indexes, self.call_driver(driver, &records, call).await)
        });
        let mut results: Vec<Vec<DriverResult>> = work.iter().map(|_| Vec::new()).collect();
        let mut marks = Marks::new();
        for (driver, indexes, (answers, mark)) in futures::future::join_all(calls).await {
            indexes.into_iter().zip(answers).for_each(|(index, answer)| results[index].push(answer));
            marks.extend(mark.map(|mark| (driver.clone(), mark)));
        }
        (results, marks)
    }

    async fn call_driver(
        &self,
        name: &DriverName,
        records: &[&Arc<ClaimRecord>],
        call: &Call,
    ) -> (Vec<DriverResult>, Option<Mark>) {
        failpoint::pass(Point::PrepareCall);
        let started = Instant::now();
        let claims: Vec<_> = records.iter().map(|record| record.driver_claim(name)).collect();
        let uids = || claims.iter().map(|claim| &claim.id.uid);
        let (by, mark, mut outcomes) = match self.registry.serving(name) {
            Err(problem) => (None, None, all_failed(uids(), &problem)),
            Ok(driver) => match &driver.claims {
                None => (None, None, all_failed(uids(), &no_claims(name))),
                Some(face) => {
                    let mark = (DriverMark::of(&driver), driver.identity.clone());
                    let outcomes = in_time(name, call, uids(), face.prepare(call, &claims)).await;
                    (Some(prepared_by(&driver)), Some(mark), outcomes)
                }
            },
        };
        failpoint::pass(Point::PrepareAnswered);
        let duration_us = micros(started);
        let result = |record: &&Arc<ClaimRecord>| DriverResult {
            driver: name.clone(),
            by: by.clone(),
            outcome: outcomes.remove(&record.id.uid).unwrap_or_else(|| Err(no_outcome(name))),
            duration_us,
        };
        let results: Vec<_> = records.iter().map(result).collect();
        for (record, result) in records.iter().zip(&results) {
            if let Err(problem) = &result.outcome {
                let (code, request) = (&problem.code, &call.request_id);
                tracing::warn!(driver = %name, claim = %record.id, %request, code, problem = %problem, "claim refused");
            }
        }
        (results, mark)
    }

    /// Unprepares; the results in the order of `work`.
    pub(super) async fn call_unprepare(&self, work: &[Work], call: &Call) -> Vec<Results> {
        let mut batches: BTreeMap<&DriverName, Vec<(usize, LiveClaim)>> = BTreeMap::new();
        for (index, (record, drivers)) in work.iter().enumerate() {
            for driver in drivers {
                if let Some(live) = record.live_claim(driver) {
                    batches.entry(driver).or_default().push((index, live));
                }
            }
        }
        let calls = batches.into_iter().map(|(driver, claims)| async move {
            let (indexes, claims): (Vec<_>, Vec<_>) = claims.into_iter().unzip();
            let records: Vec<_> = indexes.iter().map(|index| &*work[*index].0).collect();
            let started = Instant::now();
            let ends = self.unprepare_with(driver, &records, &claims, call).await;
            (driver, indexes, ends, micros(started))
        });
        let mut results: Vec<Results> = work.iter().map(|_| Vec::new()).collect();
        for (driver, indexes, ends, duration_us) in futures::future::join_all(calls).await {
            for (index, end) in indexes.into_iter().zip(ends) {
                if let Err(problem) = &end {
                    let claim = &work[index].0.id;
                    tracing::warn!(%driver, %claim, request = %call.request_id, code = problem.code, %problem, "claim not given up");
                }
                results[index].push((driver.clone(), end, duration_us));
            }
        }
        results
    }
}

impl Inner {
    /// One driver's part: the version that serves is asked, and where it refuses, the one that prepared the claim.
    async fn unprepare_with(
        &self,
        name: &DriverName,
        records: &[&ClaimRecord],
        claims: &[LiveClaim],
        call: &Call,
    ) -> Vec<Result<(), Problem>> {
        failpoint::pass(Point::UnprepareCall);
        let driver = match self.registry.serving(name) {
            Ok(driver) => driver,
            Err(problem) => return vec![Err(gone_driver(&problem)); claims.len()],
        };
        let Some(face) = &driver.claims else { return vec![Err(no_claims(name)); claims.len()] };
        let mut ends = give_back(name, face.as_ref(), claims, call).await;
        failpoint::pass(Point::UnprepareAnswered);
        self.ask_predecessors(&driver, records, claims, &mut ends, call).await;
        ends
    }
}

/// Asks a driver to give claims back; the answers in the order of the claims.
pub(super) async fn give_back(
    driver: &DriverName,
    face: &dyn ClaimDriver,
    claims: &[LiveClaim],
    call: &Call,
) -> Vec<Result<(), Problem>> {
    let uids = claims.iter().map(|live| &live.claim.id.uid);
    let mut outcomes = in_time(driver, call, uids, face.unprepare(call, claims)).await;
    let outcome =
        |live: &LiveClaim| outcomes.remove(&live.claim.id.uid).unwrap_or_else(|| Err(no_outcome(driver)));
    claims.iter().map(outcome).collect()
}

/// What a face answers, or that it does not. A call that is given up may have been carried out.
async fn in_time<'a, T>(
    driver: &DriverName,
    call: &Call,
    claims: impl Iterator<Item = &'a Uid>,
    answer: impl Future<Output = Outcomes<T>>,
) -> Outcomes<T> {
    match tokio::time::timeout(call.deadline + limit::CALL_MARGIN, answer).await {
        Ok(outcomes) => outcomes,
        Err(_) => {
            let (request, deadline_ms) = (&call.request_id, call.deadline.as_millis());
            tracing::error!(%driver, %request, deadline_ms, "a call did not end at its deadline and is given up");
            all_failed(claims, &no_end(driver, call))
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn prepared_by(driver: &Driver) -> PreparedBy {
    let identity = &driver.identity;
    PreparedBy { kind: identity.kind, version: identity.version.clone(), digest: identity.digest.clone() }
}

fn no_claims(driver: &DriverName) -> Problem {
    Problem::invalid("driver-without-claims", format!("driver {driver} takes no claims"))
}

fn no_outcome(driver: &DriverName) -> Problem {
    Problem::internal("claim-skipped", format!("driver {driver} gave no outcome for the claim"))
}

fn no_end(driver: &DriverName, call: &Call) -> Problem {
    let message = format!(
        "the call of driver {driver} did not end at its deadline of {} ms",
        call.deadline.as_millis()
    );
    Problem::internal("driver-call-stuck", message)
}

/// The driver's absence keeps the claim: it is given up when the driver is back.
fn gone_driver(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    problem.kind = ProblemKind::Unavailable;
    problem.message = format!("the claim is kept until its driver is back: {}", problem.message);
    problem
}
