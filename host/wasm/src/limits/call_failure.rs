//! Why a call gave no answer.

use std::time::Duration;

use crate::limits::limiter::Reached;
use crate::stats::{Limit, Outcome};
use nodedock_core::driver::containment::CallResult;
use nodedock_model::{Problem, ProblemCode};

#[derive(Debug, Clone, thiserror::Error)]
pub enum CallFailure {
    /// The call did not begin.
    #[error("{0}")]
    Quarantined(Box<Problem>),
    /// The call got no permit, or no thread, in time.
    #[error("{}", busy(*.limit, *.max, *.waited))]
    Busy {
        /// Calls of the driver, or of all drivers.
        limit: Limit,
        /// None: the call had its permits, and no thread.
        max: Option<usize>,
        waited: Duration,
    },
    #[error("the driver did not answer within {0:?}")]
    Timeout(Duration),
    #[error(transparent)]
    Limit(#[from] Reached),
    #[error("the driver ended itself with exit({0})")]
    Exited(i32),
    #[error("the driver trapped: {0}")]
    Trapped(String),
}

fn busy(limit: Limit, max: Option<usize>, waited: Duration) -> String {
    let whose = if limit == Limit::DriverCalls {
        "the driver"
    } else {
        "the node"
    };
    let max = max.map_or(String::new(), |max| format!("{max} "));
    format!("{whose} was busy with {max}other calls for {waited:?}")
}

impl CallFailure {
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Self::Quarantined(_) => Outcome::Quarantined,
            Self::Busy { .. } => Outcome::Busy,
            Self::Timeout(_) => Outcome::Deadline,
            Self::Limit(_) => Outcome::Limit,
            Self::Exited(_) | Self::Trapped(_) => Outcome::Trap,
        }
    }

    pub fn code(&self) -> ProblemCode {
        match self {
            Self::Quarantined(_) => ProblemCode::DriverQuarantined,
            Self::Busy { .. } => ProblemCode::DriverBusy,
            Self::Timeout(_) => ProblemCode::DriverDeadline,
            Self::Limit(reached) => reached.code(),
            Self::Exited(_) => ProblemCode::DriverExited,
            Self::Trapped(_) => ProblemCode::DriverTrapped,
        }
    }

    pub(crate) fn into_problem(self) -> Problem {
        let message = self.to_string();
        match self {
            Self::Quarantined(problem) => *problem,
            // The node may be busy: a retry may succeed.
            Self::Busy { .. } | Self::Timeout(_) => Problem::unavailable(self.code(), message),
            _ => Problem::internal(self.code(), message),
        }
    }

    /// Returns the result of the call for the driver's containment; `Unknown` if the call did not run.
    pub(crate) fn call_result(&self) -> CallResult {
        match self {
            Self::Busy { .. } | Self::Quarantined(_) => CallResult::Unknown,
            failure => CallResult::Failed(failure.to_string()),
        }
    }
}
