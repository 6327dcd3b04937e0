//! Unprepare by previous versions: if the version that serves refuses what an earlier one prepared, the code that prepared the claim is
//! called.
//!
//! It is called as soon as the serving version refuses for good or breaks down over the claim; if that version only asks for time and
//! names no end, after some tries. While no version serves none is called: the operator removed the driver.

use std::collections::BTreeMap;

use super::prepare_retry::DriverRevision;
use super::retries::Retries;
use super::timed_calls::unprepare;
use crate::driver::{Call, Driver, StoredDrivers};
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    ClaimRecord, DriverClaimRecord, DriverKind, PreparedBy, Problem, ProblemCode, ProblemKind,
    limit,
};

/// Failed attempts after which the version that prepared a claim is called to unprepare it, even if the serving version is only unavailable.
pub(crate) const FAILED_UNPREPARES_MAX: u32 = 2;

/// The versions of a driver from before the one that serves.
pub(super) struct PreviousVersions<'a> {
    pub(super) serving: &'a Driver,
    pub(super) previous: &'a dyn StoredDrivers,
    pub(super) retries: &'a Retries,
}

impl PreviousVersions<'_> {
    /// Calls the code that prepared those claims that the serving version did not unprepare. `ends` are the outcomes of that version, in
    /// the order of the claims, and become the outcomes of both.
    pub(super) async fn unprepare(
        &self,
        records: &[&ClaimRecord],
        claims: &[DriverClaimRecord],
        ends: &mut [Result<(), Problem>],
        call: &Call,
    ) {
        let Self {
            serving,
            previous,
            retries,
        } = *self;
        let revision = DriverRevision::of(serving);
        let mut batches: BTreeMap<&str, (&PreparedBy, Vec<usize>)> = BTreeMap::new();
        for (index, (record, end)) in records.iter().zip(ends.iter()).enumerate() {
            let Err(problem) = end else { continue };
            let Some(by) = previous_version(record, serving) else {
                continue;
            };
            let tries = retries.unprepare_tries(&record.id.uid, &serving.identity.name, &revision);
            if is_final(problem, tries) {
                batches
                    .entry(&by.digest)
                    .or_insert_with(|| (by, Vec::new()))
                    .1
                    .push(index);
            }
        }
        let calls = batches.into_values().map(|(by, indexes)| async move {
            let claims: Vec<_> = indexes.iter().map(|index| claims[*index].clone()).collect();
            let answers = call_version(previous, serving, by, &claims, call).await;
            indexes
                .into_iter()
                .zip(answers)
                .map(move |(index, answer)| (index, by, answer))
        });
        for (index, by, answer) in futures::future::join_all(calls).await.into_iter().flatten() {
            let (driver, claim, request) =
                (&serving.identity.name, &records[index].id, &call.request_id);
            let PreparedBy {
                version, digest, ..
            } = by;
            let Err(problem) = &mut ends[index] else {
                continue;
            };
            match answer {
                Ok(()) => {
                    tracing::info!(%driver, %claim, %request, version, digest, %problem, "claim unprepared by the version that prepared it");
                    ends[index] = Ok(());
                }
                Err(also) => {
                    tracing::warn!(%driver, %claim, %request, version, digest, code = also.code, problem = %also, "the version that prepared a claim did not unprepare it");
                    *problem = both(problem, by, &also);
                }
            }
        }
    }
}

/// The version that prepared a claim, if it has another file than the one that serves.
fn previous_version<'a>(record: &'a ClaimRecord, serving: &Driver) -> Option<&'a PreparedBy> {
    let (identity, by) = (
        &serving.identity,
        record.drivers.get(&serving.identity.name)?.by.as_ref()?,
    );
    let both_wasm = by.kind == DriverKind::Wasm && identity.kind == DriverKind::Wasm;
    (both_wasm && !by.digest.is_empty() && by.digest != identity.digest).then_some(by)
}

/// Returns whether the answer of the serving version is final. A quarantine's delay is not the driver's own, and a quarantined driver may
/// never recover, so a quarantine becomes final after `FAILED_UNPREPARES_MAX` tries, as does a problem without a delay. `tries`: earlier
/// failed tries of this version.
fn is_final(problem: &Problem, tries: u32) -> bool {
    let is_broken = problem.kind.is_permanent() || problem.kind == ProblemKind::Internal;
    let names_time =
        problem.retry_after_ms.is_some() && problem.code != ProblemCode::DriverQuarantined;
    is_broken || tries >= FAILED_UNPREPARES_MAX && !names_time
}

async fn call_version(
    previous: &dyn StoredDrivers,
    serving: &Driver,
    by: &PreparedBy,
    claims: &[DriverClaimRecord],
    call: &Call,
) -> Vec<Result<(), Problem>> {
    let name = &serving.identity.name;
    failpoint::pass(Point::PredecessorCall);
    let answers = match tokio::time::timeout(call.deadline, previous.driver(name, &by.digest)).await
    {
        Ok(Ok(driver)) => unprepare(name, driver.as_ref(), claims, call).await,
        Ok(Err(problem)) => vec![Err(problem); claims.len()],
        Err(_) => vec![Err(not_loaded_in_time(call)); claims.len()],
    };
    failpoint::pass(Point::PredecessorAnswered);
    answers
}

fn not_loaded_in_time(call: &Call) -> Problem {
    let deadline_ms = call.deadline.as_millis();
    let message = format!(
        "it was not loaded within {deadline_ms} ms; loading continues, and the claim is retried"
    );
    Problem::unavailable(ProblemCode::PredecessorNotLoaded, message)
}

/// The problem of the serving version, with that of the previous one in its details.
fn both(serving: &Problem, by: &PreparedBy, also: &Problem) -> Problem {
    let mut problem = serving.clone();
    let version = format!("version {} ({})", by.version, by.digest);
    let details = [
        ("predecessor", version.as_str()),
        ("predecessor-code", &also.code),
        ("predecessor-problem", &also.message),
    ];
    let room = limit::LABELS_MAX.saturating_sub(problem.details.len());
    let details = details.into_iter().take(room);
    problem
        .details
        .extend(details.map(|(key, value)| (key.to_owned(), value.to_owned())));
    problem
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permanent_error_is_final_unlike_delay() {
        let quarantined = || {
            Problem::unavailable(ProblemCode::DriverQuarantined, "quarantined")
                .retry_after(std::time::Duration::from_secs(5))
        };
        let transient = || Problem::unavailable("device-busy", "not now");
        for (problem, tries, wanted) in [
            (Problem::invalid("a", "never"), 0, true),
            (Problem::internal("driver-trapped", "it broke"), 0, true),
            (transient(), 0, false),
            (transient(), FAILED_UNPREPARES_MAX, true),
            (
                transient().retry_after(std::time::Duration::from_secs(60)),
                99,
                false,
            ),
            (quarantined(), 0, false),
            (quarantined(), FAILED_UNPREPARES_MAX, true),
            (Problem::conflict("a", "held"), 0, false),
        ] {
            assert_eq!(
                is_final(&problem, tries),
                wanted,
                "{problem:?} after {tries}"
            );
        }
    }

    #[test]
    fn serving_versions_problem_takes_precedence() {
        let by = PreparedBy {
            kind: DriverKind::Wasm,
            version: "1.0.0".to_owned(),
            digest: "sha256:00".to_owned(),
            lists: false,
        };
        let mut first = Problem::invalid("unknown-memo", "what is this");
        let problem = both(
            &first,
            &by,
            &Problem::internal("predecessor-missing", "it is not kept"),
        );
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Invalid, "unknown-memo")
        );
        let keys: Vec<_> = problem
            .details
            .iter()
            .map(|(key, _)| key.as_str())
            .collect();
        assert_eq!(
            keys,
            ["predecessor", "predecessor-code", "predecessor-problem"]
        );
        first.details = vec![("k".to_owned(), "v".to_owned()); limit::LABELS_MAX - 1];
        assert_eq!(both(&first, &by, &problem).details.len(), limit::LABELS_MAX);
    }
}
