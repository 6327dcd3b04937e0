//! The connection to the daemon.

use std::error::Error;
use std::fmt;
use std::path::Path;

use nodedock_proto::node::v1;
use nodedock_proto::node::v1::node_client::NodeClient;
use nodedock_proto::prost::Message;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use nodedock_model::limit::NODE_API_MESSAGE_BYTES_MAX;
use nodedock_model::{ProblemCode, ProblemKind};

use crate::{CommandError, Location};

/// A client of the node API.
pub type Client = NodeClient<Channel>;

/// Connects to the socket of the node API.
pub async fn connect(location: &Location) -> Result<Client, CommandError> {
    let socket = location.socket();
    let channel = dial(&socket)
        .await
        .map_err(|error| CommandError::Unreachable {
            socket,
            source: error.into(),
        })?;
    Ok(NodeClient::new(channel)
        .max_decoding_message_size(NODE_API_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(NODE_API_MESSAGE_BYTES_MAX))
}

async fn dial(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix:{}", socket.display()))?
        .connect()
        .await
}

/// The status of a call as an error whose text is plain: that of the status itself has its cause in Rust's form.
#[derive(Debug)]
struct CallFailed(Status);

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.message() {
            "" => f.write_str(self.0.code().description()),
            message => f.write_str(message),
        }
    }
}

impl Error for CallFailed {
    /// Returns the cause below the one whose text the status has.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        let cause = Error::source(&self.0)?;
        match cause.to_string() == self.0.message() {
            true => cause.source(),
            false => Some(cause),
        }
    }
}

/// Returns whether the connection broke, as opposed to an answer of the daemon.
pub fn is_connection_error(status: &Status) -> bool {
    // Only what this side made has a source: one that is reset in a call is `Unknown`.
    Error::source(status).is_some()
        || status.code() == Code::Unavailable && status.details().is_empty()
}

/// Returns whether the daemon has waited for the devices of a claim, and would wait again.
pub fn is_not_allocated(status: &Status) -> bool {
    problem_of(status).is_some_and(|problem| {
        problem.code == ProblemCode::ClaimNotAllocated.as_str()
            && problem.kind == ProblemKind::Unavailable.as_str()
    })
}

/// Returns whether the daemon stops, and did not end the request: its next instance can.
pub fn is_interrupted(status: &Status) -> bool {
    problem_of(status).is_some_and(|problem| problem.code == ProblemCode::Interrupted.as_str())
}

fn problem_of(status: &Status) -> Option<v1::Problem> {
    // no error: a status without a problem says nothing of a claim
    v1::Problem::decode(status.details()).ok()
}

/// Turns the status of a call into the error that the command fails with: the daemon's own message, if it answered.
pub fn call_error(status: Status, location: &Location) -> anyhow::Error {
    if is_connection_error(&status) {
        return CommandError::Unreachable {
            socket: location.socket(),
            source: CallFailed(status).into(),
        }
        .into();
    }
    anyhow::anyhow!("{}", status.message())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    #[tokio::test]
    async fn broken_connection_is_plain_text() {
        let directory = tempfile::tempdir().unwrap();
        let dialled = dial(&directory.path().join("none.sock")).await;
        let status = Status::from_error(Box::new(dialled.unwrap_err()));
        let text = chain(&CallFailed(status));
        assert!(!text.contains("tonic::"), "{text}");
        assert!(text.contains("No such file or directory"), "{text}");
        assert_eq!(
            chain(&CallFailed(Status::unavailable(""))),
            Code::Unavailable.description()
        );
    }
}
