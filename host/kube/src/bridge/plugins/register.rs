//! One registration with a kubelet (`v1beta1.Registration`).

use std::path::Path;

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tonic::Request;
use wire::registration_client::RegistrationClient;

use super::convert;
use super::dial::{DialError, dial};
use nodedock_base::device_plugin_sockets::{SocketId, socket_id};
use nodedock_base::printable::one_line;
use nodedock_model::{ExtendedResource, limit};

/// Bytes of a kubelet's words that are kept.
const WORDS_BYTES_MAX: usize = 512;

#[derive(Debug, thiserror::Error)]
pub(super) enum RegisterError {
    #[error("no socket is there")]
    Missing,
    #[error("the socket was replaced meanwhile")]
    Replaced,
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("no answer within {} s", limit::REGISTER_DEADLINE.as_secs())]
    Deadline,
    #[error("{code:?}: {words}")]
    Refused { code: tonic::Code, words: String },
}

impl RegisterError {
    /// Whether a kubelet is there that does not want the plugin.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Refused { code, .. } => {
                // What tonic says itself of a connection that broke.
                !matches!(code, tonic::Code::Unavailable | tonic::Code::Cancelled)
            }
            _ => false,
        }
    }
}

/// Registers with whoever listens on `socket`. The id says which socket was dialled: the one that stands there may be another
/// before and after, and a kubelet that took the registration must not be asked again.
pub(super) async fn register(
    socket: &Path,
    resource: &ExtendedResource,
    endpoint: &str,
) -> Result<SocketId, (Option<SocketId>, RegisterError)> {
    let Some(id) = socket_id(socket) else { return Err((None, RegisterError::Missing)) };
    let call = async {
        let channel = dial(socket).await?;
        if socket_id(socket) != Some(id) {
            return Err(RegisterError::Replaced);
        }
        let request = wire::RegisterRequest {
            version: convert::VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_string(),
            options: Some(convert::options()),
        };
        let client = RegistrationClient::new(channel).max_decoding_message_size(limit::REGISTER_BYTES_MAX);
        let refused = |status: tonic::Status| RegisterError::Refused {
            code: status.code(),
            words: one_line(status.message(), WORDS_BYTES_MAX),
        };
        let mut client = client;
        client.register(Request::new(request)).await.map(drop).map_err(refused)
    };
    match tokio::time::timeout(limit::REGISTER_DEADLINE, call).await {
        Ok(Ok(())) => Ok(id),
        Ok(Err(error)) => Err((Some(id), error)),
        Err(_) => Err((Some(id), RegisterError::Deadline)),
    }
}
