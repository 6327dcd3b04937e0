//! A connection to a socket of the kubelet.

use std::io;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use nodedock_model::limit;

#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("connect to {}", socket.display())]
    Connect { socket: PathBuf, source: io::Error },
    #[error("begin HTTP/2 on {}", socket.display())]
    Begin { socket: PathBuf, source: tonic::transport::Error },
}

/// Connects once: a channel whose connection is gone does not come back. The caller's deadline counts.
pub(super) async fn dial(socket: &Path) -> Result<Channel, DialError> {
    let stream = UnixStream::connect(socket).await;
    let stream = stream.map_err(|source| DialError::Connect { socket: socket.to_owned(), source })?;
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_: Uri| {
        std::future::ready(stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let endpoint = endpoint.http2_max_header_list_size(limit::PLUGIN_HEADERS_BYTES_MAX);
    let begun = endpoint.connect_with_connector(connector).await;
    begun.map_err(|source| DialError::Begin { socket: socket.to_owned(), source })
}
