//! The connection to the daemon.

use nodedock_proto::node::v1::node_client::NodeClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::{CliError, Location};
use crate::node_api::NODE_API_MESSAGE_BYTES_MAX;

pub(super) type Client = NodeClient<Channel>;

pub(super) async fn connect(location: &Location) -> Result<Client, CliError> {
    let socket = location.socket();
    let unreachable = |error: tonic::transport::Error| CliError::Unreachable {
        socket: socket.clone(),
        source: error.into(),
    };
    let endpoint =
        Endpoint::from_shared(format!("unix:{}", socket.display())).map_err(unreachable)?;
    let channel = endpoint.connect().await.map_err(unreachable)?;
    Ok(NodeClient::new(channel)
        .max_decoding_message_size(NODE_API_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(NODE_API_MESSAGE_BYTES_MAX))
}

/// Whether the connection broke, as opposed to an answer of the daemon.
pub(super) fn is_connection_error(status: &Status) -> bool {
    // Only what this side made has a source: one that is reset in a call is `Unknown`.
    std::error::Error::source(status).is_some()
        || status.code() == Code::Unavailable && status.details().is_empty()
}

/// Turns the status of a call into the error that the command fails with: the daemon's own message, if it answered.
pub(super) fn call_error(status: Status, location: &Location) -> anyhow::Error {
    if is_connection_error(&status) {
        return CliError::Unreachable {
            socket: location.socket(),
            source: status.into(),
        }
        .into();
    }
    anyhow::anyhow!("{}", status.message())
}
