//! Unix sockets: listening ones with one owner, mode 0600, visible only when they accept; and connections to gRPC servers on them.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::io::InspectReader;
use tonic::transport::{Channel, Endpoint, Uri};

use nodedock_model::limit::SOCKET_PATH_BYTES_MAX;

/// Bytes of the headers of a plugin's response: they contain an error's text, and a longer one would end the call without the text.
const PLUGIN_HEADERS_BYTES_MAX: u32 = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error(
        "the socket path {path} has {length} bytes, and the system allows {SOCKET_PATH_BYTES_MAX}: choose a shorter --root or --socket"
    )]
    TooLong { path: String, length: usize },
    #[error("another process listens on {0}")]
    InUse(PathBuf),
    #[error("{0} exists and is not a socket")]
    NotASocket(PathBuf),
    #[error("bind {path}")]
    Io { path: PathBuf, source: io::Error },
}

/// Listens on `path`; replaces a stale socket, and fails on a live one. The socket is created under a temporary name, gets its mode,
/// and is renamed into place, so that a client never finds it with another mode or before it accepts.
pub async fn bind(path: &Path) -> Result<UnixListener, BindError> {
    bind_by(path, &path.with_extension("sock.new")).await
}

/// Listens on `path`, as `bind` does, with a temporary name of the caller's choice in the same directory.
pub async fn bind_by(path: &Path, temporary: &Path) -> Result<UnixListener, BindError> {
    let length = temporary.as_os_str().len().max(path.as_os_str().len());
    if length > SOCKET_PATH_BYTES_MAX {
        return Err(BindError::TooLong { path: path.display().to_string(), length: path.as_os_str().len() });
    }
    refuse_occupied(path).await?;
    let io = |source| BindError::Io { path: path.to_owned(), source };
    match std::fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let listener = UnixListener::bind(temporary).map_err(io)?;
    std::fs::set_permissions(temporary, PermissionsExt::from_mode(0o600)).map_err(io)?;
    std::fs::rename(temporary, path).map_err(io)?;
    Ok(listener)
}

/// Removes a socket, whatever process has it open. A file that is not a socket stays.
pub fn remove(path: &Path) -> Result<(), BindError> {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let removed = if is_socket { std::fs::remove_file(path) } else { Ok(()) };
    removed.map_err(|source| BindError::Io { path: path.to_owned(), source })
}

/// Fails if a process listens on `path`, or if the file is not a socket.
pub async fn refuse_occupied(path: &Path) -> Result<(), BindError> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(BindError::Io { path: path.to_owned(), source }),
        Ok(found) if !found.file_type().is_socket() => Err(BindError::NotASocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path).await.map_err(|error| error.kind()) {
            Err(io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => Ok(()),
            // A process whose backlog is full owns the socket as well.
            _ => Err(BindError::InUse(path.to_owned())),
        },
    }
}

/// Why a socket cannot be called.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("connect to {}", socket.display())]
    Connect { socket: PathBuf, source: io::Error },
    #[error("begin HTTP/2 on {}", socket.display())]
    Http2 { socket: PathBuf, source: tonic::transport::Error },
}

/// Connects to the gRPC server on a socket, once: a channel whose connection has ended does not connect again, and its calls fail at
/// once. The caller sets a deadline.
pub async fn connect(socket: &Path) -> Result<Channel, ConnectError> {
    connect_guarded(socket, ()).await
}

/// Connects as `connect` does. The guard is dropped when the connection ends.
pub async fn connect_guarded<G>(socket: &Path, guard: G) -> Result<Channel, ConnectError>
where
    G: Send + Unpin + 'static,
{
    over(open(socket).await?, socket, guard).await
}

/// Connects as `connect` does. Returns also the user ID of the process that listens.
pub async fn connect_to_user(socket: &Path) -> Result<(Channel, u32), ConnectError> {
    let stream = open(socket).await?;
    let peer = stream.peer_cred();
    let peer = peer.map_err(|source| ConnectError::Connect { socket: socket.to_owned(), source })?;
    Ok((over(stream, socket, ()).await?, peer.uid()))
}

async fn open(socket: &Path) -> Result<UnixStream, ConnectError> {
    let stream = UnixStream::connect(socket).await;
    stream.map_err(|source| ConnectError::Connect { socket: socket.to_owned(), source })
}

async fn over<G>(stream: UnixStream, socket: &Path, guard: G) -> Result<Channel, ConnectError>
where
    G: Send + Unpin + 'static,
{
    let owner = move |_: &[u8]| {
        let _ = &guard;
    };
    let mut stream = Some(TokioIo::new(InspectReader::new(stream, owner)));
    let connector = tower::service_fn(move |_: Uri| {
        std::future::ready(stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    // The authority is `localhost`, as from a kubelet.
    let endpoint =
        Endpoint::from_static("http://localhost").http2_max_header_list_size(PLUGIN_HEADERS_BYTES_MAX);
    let connected = endpoint.connect_with_connector(connector).await;
    connected.map_err(|source| ConnectError::Http2 { socket: socket.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let living = bind(&path).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(bind(&path).await, Err(BindError::InUse(_))));
        drop(living);
        bind(&path).await.unwrap();
    }

    #[tokio::test]
    async fn a_file_in_the_way_and_a_path_too_long_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path).await, Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(120));
        assert!(bind(&long).await.unwrap_err().to_string().contains("107"));
    }
}
