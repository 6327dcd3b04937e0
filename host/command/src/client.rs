//! The connection to the daemon.

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

/// Returns whether the connection broke, as opposed to an answer of the daemon.
pub fn is_connection_error(status: &Status) -> bool {
    // Only what this side made has a source: one that is reset in a call is `Unknown`.
    std::error::Error::source(status).is_some()
        || status.code() == Code::Unavailable && status.details().is_empty()
}

/// Returns whether the daemon has waited for the devices of a claim, and would wait again.
pub fn is_not_allocated(status: &Status) -> bool {
    // no error: a status without a problem says nothing of a claim
    let problem = v1::Problem::decode(status.details()).ok();
    problem.is_some_and(|problem| {
        problem.code == ProblemCode::ClaimNotAllocated.as_str()
            && problem.kind == ProblemKind::Unavailable.as_str()
    })
}

/// Turns the status of a call into the error that the command fails with: the daemon's own message, if it answered.
pub fn call_error(status: Status, location: &Location) -> anyhow::Error {
    if is_connection_error(&status) {
        return CommandError::Unreachable {
            socket: location.socket(),
            source: status.into(),
        }
        .into();
    }
    anyhow::anyhow!("{}", status.message())
}
