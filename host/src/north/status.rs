//! One table from problems to gRPC codes.

use tonic::{Code, Status};

use crate::model::{Problem, ProblemKind};

/// The gRPC code for a kind of problem.
pub fn code(kind: ProblemKind) -> Code {
    match kind {
        ProblemKind::Invalid => Code::InvalidArgument,
        ProblemKind::Denied => Code::PermissionDenied,
        ProblemKind::NotFound => Code::NotFound,
        ProblemKind::Conflict => Code::FailedPrecondition,
        ProblemKind::Unavailable => Code::Unavailable,
        ProblemKind::Internal => Code::Internal,
    }
}

/// A problem as a gRPC error: its words as the message, the problem itself, encoded, as the details.
pub fn status(problem: &Problem) -> Status {
    use nodedock_proto::prost::Message;
    let details = super::convert::problem(problem).encode_to_vec();
    Status::with_details(code(problem.kind), problem.message.clone(), details.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_carries_the_whole_problem() {
        use nodedock_proto::{node::v1, prost::Message};
        let status =
            status(&Problem::conflict("device-held", "claim a holds it").with("holder", "default/a"));
        assert_eq!(status.code(), Code::FailedPrecondition);
        let problem = v1::Problem::decode(status.details()).unwrap();
        assert_eq!((problem.kind.as_str(), problem.code.as_str()), ("conflict", "device-held"));
        assert_eq!(problem.details["holder"], "default/a");
    }
}
