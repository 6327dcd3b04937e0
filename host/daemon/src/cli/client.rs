//! The connection to the daemon.

use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use nodedock_proto::node::v1::node_client::NodeClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use super::{CliError, Place};
use nodedock_model::limit;

pub(super) type Client = NodeClient<Channel>;

/// Connects to the daemon.
pub(super) async fn connect(place: &Place) -> Result<Client, CliError> {
    let socket = place.socket();
    let path = socket.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let path: PathBuf = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is for the protocol only; the connector knows the socket.
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    let channel = channel.map_err(|error| CliError::Unreachable { socket, source: error.into() })?;
    Ok(NodeClient::new(channel)
        .max_decoding_message_size(limit::NODE_API_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limit::NODE_API_MESSAGE_BYTES_MAX))
}

/// What the daemon said, in its own words.
pub(super) fn said(place: &Place) -> impl Fn(Status) -> anyhow::Error {
    let socket = place.socket();
    move |status| {
        let gone = status.code() == Code::Unavailable && status.details().is_empty();
        if gone {
            return CliError::Unreachable { socket: socket.clone(), source: status.into() }.into();
        }
        anyhow::anyhow!("{}", status.message())
    }
}
