//! Execution of callers' requests: each runs to its end, or returns a problem that says that it did not.

use std::future::Future;

use nodedock_base::tasks::Tasks;
use nodedock_model::{Problem, ProblemCode};

/// Others have what a claim wants: another device may be free.
const IN_USE: [ProblemCode; 4] = [
    ProblemCode::DeviceHeld,
    ProblemCode::CounterExceeded,
    ProblemCode::CapacityExceeded,
    ProblemCode::IncompatibleGroups,
];

/// Runs a request to its end: it is not cancelled when the caller drops the returned future.
pub(super) async fn complete<T: Send + 'static>(
    tasks: &Tasks,
    name: &'static str,
    request: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    tasks
        .complete(name, request)
        .await
        .unwrap_or_else(|| Err(interrupted()))
}

/// Returns whether other claims have what a claim wants.
pub fn is_in_use(problem: &Problem) -> bool {
    IN_USE.iter().any(|code| problem.code == *code)
}

pub(super) fn interrupted() -> Problem {
    Problem::unavailable(ProblemCode::Interrupted, "the daemon is stopping")
}
