//! Converts a plugin's errors to problems. `peer` is the plugin in a message: `driver NAME` or `device plugin RESOURCE`.

use std::time::Duration;

use tokio::time::error::Elapsed;
use tonic::{Code, Status};

use super::clean;
use nodedock_core::driver::Link;
use nodedock_model::{Problem, ProblemCode, ProblemKind};

/// Converts the error of a whole call.
pub(super) fn of_status(peer: &str, status: &Status) -> Problem {
    let ((kind, code), grpc_code) = (meaning(status), format!("{:?}", status.code()));
    let text = if status.message().is_empty() {
        &grpc_code
    } else {
        status.message()
    };
    Problem::new(kind, code, clean(&format!("{peer}: {text}"))).with("grpc-code", grpc_code)
}

fn meaning(status: &Status) -> (ProblemKind, ProblemCode) {
    match status.code() {
        Code::Unknown | Code::Cancelled if is_broken(status) => {
            (ProblemKind::Unavailable, ProblemCode::DriverUnavailable)
        }
        Code::DeadlineExceeded | Code::Cancelled => {
            (ProblemKind::Unavailable, ProblemCode::DriverDeadline)
        }
        Code::Unavailable => (ProblemKind::Unavailable, ProblemCode::DriverUnavailable),
        // The local decoder's error for a message above the bound.
        Code::OutOfRange => (ProblemKind::Internal, ProblemCode::DriverAnswerTooLarge),
        Code::InvalidArgument => (ProblemKind::Invalid, ProblemCode::DriverRefused),
        Code::NotFound => (ProblemKind::NotFound, ProblemCode::DriverRefused),
        Code::PermissionDenied | Code::Unauthenticated => {
            (ProblemKind::Denied, ProblemCode::DriverRefused)
        }
        Code::AlreadyExists | Code::Aborted => (ProblemKind::Conflict, ProblemCode::DriverRefused),
        Code::Unimplemented => (ProblemKind::Internal, ProblemCode::DriverWithoutService),
        Code::Internal | Code::DataLoss => (ProblemKind::Internal, ProblemCode::DriverFailed),
        // The Go helper converts every plain error to Unknown; most of them are temporary.
        _ => (ProblemKind::Unavailable, ProblemCode::DriverRefused),
    }
}

/// Returns whether the connection broke during the call: a plugin's status has no source, and of local errors only a deadline is the
/// plugin's fault.
fn is_broken(status: &Status) -> bool {
    std::error::Error::source(status).is_some() && !is_late(status)
}

/// Returns whether the call ended at the local deadline.
fn is_late(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    std::iter::successors(first, |error| error.source())
        .any(|error| error.is::<tonic::TimeoutExpired>())
}

/// A claim that a plugin refuses by its `error`. The API has no kinds of errors, and the caller retries, as a kubelet does.
pub(super) fn of_claim(peer: &str, error: &str) -> Problem {
    Problem::unavailable(
        ProblemCode::DriverRefused,
        clean(&format!("{peer}: {error}")),
    )
}

/// A response that violates the API.
pub(super) fn not_valid(peer: &str, why: &str) -> Problem {
    Problem::internal(
        ProblemCode::DriverAnswerNotValid,
        clean(&format!("{peer} answered what is not valid: {why}")),
    )
}

/// Converts the end of a call. The deadline is sent with the call, so either side may end the call first.
pub(super) fn of_call<T>(
    peer: &str,
    deadline: Duration,
    ended: Result<Result<T, Status>, Elapsed>,
) -> Result<T, Problem> {
    match ended {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) if !is_late(&status) => match meaning(&status) {
            (_, ProblemCode::DriverDeadline) => Err(of_status(
                &format!("{peer} did not answer in time"),
                &status,
            )),
            _ => Err(of_status(peer, &status)),
        },
        Ok(Err(_)) | Err(_) => {
            let message = format!("{peer} did not answer within {} ms", deadline.as_millis());
            Err(Problem::unavailable(ProblemCode::DriverDeadline, message))
        }
    }
}

pub(super) fn not_connected(peer: &str, link: &Link) -> Problem {
    let why = match link {
        Link::Lost(why) => why.as_str(),
        Link::Closed => "its registration is gone",
        Link::Connecting | Link::Connected => "the connection is not made yet",
    };
    Problem::unavailable(
        ProblemCode::DriverNotConnected,
        clean(&format!("{peer} is not connected: {why}")),
    )
}
