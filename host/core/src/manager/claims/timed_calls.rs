//! Calls of one driver with a deadline of the manager's own.

use std::future::Future;
use std::time::Duration;

use crate::driver::{Call, ClaimDriver, Outcomes, all_failed, skipped};
use nodedock_model::{DriverClaimRecord, DriverName, Problem, ProblemCode, Uid};

/// Time that the manager waits for a driver after the deadline: the driver ends its calls itself, and checks files afterwards.
pub(crate) const CALL_MARGIN: Duration = Duration::from_secs(5);

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
pub(super) async fn in_time<'a, T>(
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

fn no_end(driver: &DriverName, call: &Call) -> Problem {
    let deadline_ms = call.deadline.as_millis();
    let message =
        format!("the call of driver {driver} did not end at its deadline of {deadline_ms} ms");
    Problem::internal(ProblemCode::DriverCallStuck, message)
}
