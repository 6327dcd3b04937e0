//! Converts a plugin's errors to problems.

use std::fmt;
use std::time::Duration;

use tonic::{Code, Status};

use super::{Link, clean};
use nodedock_model::{DriverName, ExtendedResource, Problem, ProblemKind};

/// The subject of a problem.
#[derive(Debug, Clone, Copy)]
pub(super) enum Peer<'a> {
    Driver(&'a DriverName),
    DevicePlugin(&'a ExtendedResource),
}

impl<'a> From<&'a DriverName> for Peer<'a> {
    fn from(name: &'a DriverName) -> Self {
        Self::Driver(name)
    }
}

impl<'a> From<&'a ExtendedResource> for Peer<'a> {
    fn from(resource: &'a ExtendedResource) -> Self {
        Self::DevicePlugin(resource)
    }
}

impl fmt::Display for Peer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver(name) => write!(f, "driver {name}"),
            Self::DevicePlugin(resource) => write!(f, "device plugin {resource}"),
        }
    }
}

/// Converts the error of a whole call.
pub(super) fn of_status<'a>(peer: impl Into<Peer<'a>>, status: &Status) -> Problem {
    let (kind, code) = meaning(status);
    Problem::new(kind, code, clean(&format!("{}: {}", peer.into(), text(status))))
        .with("grpc-code", format!("{:?}", status.code()))
}

fn meaning(status: &Status) -> (ProblemKind, &'static str) {
    match status.code() {
        Code::Unknown | Code::Cancelled if is_broken(status) => {
            (ProblemKind::Unavailable, "driver-unavailable")
        }
        Code::DeadlineExceeded | Code::Cancelled => (ProblemKind::Unavailable, "driver-deadline"),
        Code::Unavailable => (ProblemKind::Unavailable, "driver-unavailable"),
        // The local decoder's error for a message above the bound.
        Code::OutOfRange => (ProblemKind::Internal, "driver-answer-too-large"),
        Code::InvalidArgument => (ProblemKind::Invalid, "driver-refused"),
        Code::NotFound => (ProblemKind::NotFound, "driver-refused"),
        Code::PermissionDenied | Code::Unauthenticated => (ProblemKind::Denied, "driver-refused"),
        Code::AlreadyExists | Code::Aborted => (ProblemKind::Conflict, "driver-refused"),
        Code::Unimplemented => (ProblemKind::Internal, "driver-without-service"),
        Code::Internal | Code::DataLoss => (ProblemKind::Internal, "driver-failed"),
        // The Go helper converts every plain error to Unknown; most of them are temporary.
        _ => (ProblemKind::Unavailable, "driver-refused"),
    }
}

/// Returns whether the connection broke during the call: a plugin's status has no source, and of local errors only a deadline is the
/// plugin's fault.
fn is_broken(status: &Status) -> bool {
    std::error::Error::source(status).is_some() && !is_late(status)
}

/// Returns whether the call ended at the local deadline.
pub(super) fn is_late(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    std::iter::successors(first, |error| error.source()).any(|error| error.is::<tonic::TimeoutExpired>())
}

fn text(status: &Status) -> String {
    match status.message() {
        "" => format!("{:?}", status.code()),
        message => message.to_owned(),
    }
}

/// A claim that a plugin refuses by its `error`. The API has no kinds of errors, and the caller retries, as a kubelet does.
pub(super) fn of_claim(driver: &DriverName, error: &str) -> Problem {
    Problem::unavailable("driver-refused", clean(&format!("driver {driver}: {error}")))
}

/// A response that violates the API.
pub(super) fn not_valid<'a>(peer: impl Into<Peer<'a>>, why: &str) -> Problem {
    let message = format!("{} answered what is not valid: {why}", peer.into());
    Problem::internal("driver-answer-not-valid", clean(&message))
}

pub(super) fn no_answer<'a>(peer: impl Into<Peer<'a>>, deadline: Duration) -> Problem {
    let message = format!("{} did not answer within {} ms", peer.into(), deadline.as_millis());
    Problem::unavailable("driver-deadline", message)
}

pub(super) fn not_connected(driver: &DriverName, link: &Link) -> Problem {
    let why = match link {
        Link::Lost(why) => why.as_str(),
        Link::Closed => "its registration is gone",
        Link::Connecting | Link::Connected => "the connection is not made yet",
    };
    Problem::unavailable("driver-not-connected", clean(&format!("driver {driver} is not connected: {why}")))
}
