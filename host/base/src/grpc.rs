//! The mapping from problems to gRPC codes.

use std::sync::Arc;

use nodedock_proto::node::v1;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Code, Request, Status};

use nodedock_model::{Problem, ProblemKind};

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

/// Converts a problem to a gRPC error: its message, and the encoded problem as the details.
pub fn status(problem: &Problem) -> Status {
    use nodedock_proto::prost::Message;
    let details = self::problem(problem).encode_to_vec();
    Status::with_details(code(problem.kind), problem.message.clone(), details.into())
}

pub fn problem(problem: &Problem) -> v1::Problem {
    v1::Problem {
        kind: problem.kind.as_str().to_owned(),
        code: problem.code.clone(),
        message: problem.message.clone(),
        retry_after_ms: problem.retry_after_ms,
        details: problem.details.iter().cloned().collect(),
    }
}

/// Names the call in every log line of it, and says who called.
pub fn begin<T>(method: &'static str, request: &Request<T>) -> Arc<str> {
    let given = request
        .metadata()
        .get("x-request-id")
        .and_then(|id| id.to_str().ok());
    let request_id: Arc<str> = given
        .filter(|id| !id.is_empty() && id.len() <= 64 && id.bytes().all(|b| b.is_ascii_graphic()))
        .map_or_else(crate::request::new_id, Into::into);
    let peer = request
        .extensions()
        .get::<UdsConnectInfo>()
        .and_then(|info| info.peer_cred);
    let (uid, pid) = (peer.map(|p| p.uid()), peer.and_then(|p| p.pid()));
    tracing::debug!(method, request = %request_id, peer_uid = uid, peer_pid = pid, "call");
    request_id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_carries_the_whole_problem() {
        use nodedock_proto::{node::v1, prost::Message};
        let status = status(
            &Problem::conflict("device-held", "claim a holds it").with("holder", "default/a"),
        );
        assert_eq!(status.code(), Code::FailedPrecondition);
        let problem = v1::Problem::decode(status.details()).unwrap();
        assert_eq!(
            (problem.kind.as_str(), problem.code.as_str()),
            ("conflict", "device-held")
        );
        assert_eq!(problem.details["holder"], "default/a");
    }
}
