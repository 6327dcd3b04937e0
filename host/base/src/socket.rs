//! Unix sockets: listening ones with one owner, mode 0600, visible only when they accept; and connections to gRPC servers on them.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::io::InspectReader;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::own_sockets::{self, FindError, OtherSocket};
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
        return Err(BindError::TooLong {
            path: path.display().to_string(),
            length: path.as_os_str().len(),
        });
    }
    refuse_occupied(path).await?;

    let listener = bind_in_place(path, temporary).map_err(|source| BindError::Io {
        path: path.to_owned(),
        source,
    })?;
    own_sockets::add(path);
    Ok(listener)
}

fn bind_in_place(path: &Path, temporary: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(temporary)?;
    std::fs::set_permissions(temporary, PermissionsExt::from_mode(0o600))?;
    std::fs::rename(temporary, path)?;
    Ok(listener)
}

/// Removes a socket, regardless of the process that has it open. A file that is not a socket is unchanged.
pub fn remove(path: &Path) -> Result<(), BindError> {
    use std::os::unix::fs::FileTypeExt;
    let found = crate::file::symlink_metadata(path);
    let removed =
        found.and_then(
            |found| match found.is_some_and(|found| found.file_type().is_socket()) {
                true => std::fs::remove_file(path),
                false => Ok(()),
            },
        );
    removed.map_err(|source| BindError::Io {
        path: path.to_owned(),
        source,
    })
}

/// Fails if a process listens on `path`, or if the file is not a socket.
pub async fn refuse_occupied(path: &Path) -> Result<(), BindError> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(BindError::Io {
            path: path.to_owned(),
            source,
        }),
        Ok(found) if !found.file_type().is_socket() => Err(BindError::NotASocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path)
            .await
            .map_err(|error| error.kind())
        {
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
    #[error("{} is a socket of this daemon, and not of a plugin", socket.display())]
    Own { socket: PathBuf },
    #[error("begin HTTP/2 on {}", socket.display())]
    Http2 {
        socket: PathBuf,
        source: tonic::transport::Error,
    },
}

/// Connects to the gRPC server on a socket, once: a channel whose connection has ended does not connect again, and its calls fail at
/// once. The caller sets a deadline.
pub async fn connect(socket: &Path) -> Result<Channel, ConnectError> {
    let stream = UnixStream::connect(socket).await;
    let stream = stream.map_err(|source| ConnectError::Connect {
        socket: socket.to_owned(),
        source,
    })?;
    channel(socket, stream, ()).await
}

/// Connects to a plugin as `connect` does, and not to a socket of this process. The guard is dropped when the connection ends.
pub async fn connect_plugin<G>(socket: &Path, guard: G) -> Result<Channel, ConnectError>
where
    G: Send + Unpin + 'static,
{
    channel(socket, open_plugin(socket).await?, guard).await
}

/// Connects to a plugin as `connect_plugin` does. Returns also the user ID of the process that listens.
pub async fn connect_to_user(socket: &Path) -> Result<(Channel, u32), ConnectError> {
    let stream = open_plugin(socket).await?;
    let peer = stream.peer_cred();
    let peer = peer.map_err(|source| ConnectError::Connect {
        socket: socket.to_owned(),
        source,
    })?;
    Ok((channel(socket, stream, ()).await?, peer.uid()))
}

async fn open_plugin(socket: &Path) -> Result<UnixStream, ConnectError> {
    let failed = |source| ConnectError::Connect {
        socket: socket.to_owned(),
        source,
    };
    let other = OtherSocket::find(socket).map_err(|error| match error {
        FindError::Io(source) => failed(source),
        FindError::Own => ConnectError::Own {
            socket: socket.to_owned(),
        },
    })?;
    other.connect().await.map_err(failed)
}

async fn channel<G>(socket: &Path, stream: UnixStream, guard: G) -> Result<Channel, ConnectError>
where
    G: Send + Unpin + 'static,
{
    let stream = InspectReader::new(stream, move |_| {
        let _ = &guard;
    });
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_: Uri| {
        std::future::ready(
            stream
                .take()
                .ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)),
        )
    });
    // The authority is `localhost`, as from a kubelet.
    let endpoint = Endpoint::from_static("http://localhost")
        .http2_max_header_list_size(PLUGIN_HEADERS_BYTES_MAX);
    let connected = endpoint.connect_with_connector(connector).await;
    connected.map_err(|source| ConnectError::Http2 {
        socket: socket.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_stale_sockets_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let living = bind(&path).await.unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(matches!(bind(&path).await, Err(BindError::InUse(_))));
        drop(living);
        bind(&path).await.unwrap();
    }

    #[tokio::test]
    async fn own_socket_is_no_plugin() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("nodedock.sock");
        let _listener = bind(&own).await.unwrap();
        let (link, other_name) = (dir.path().join("link.sock"), dir.path().join("other.sock"));
        std::os::unix::fs::symlink(&own, &link).unwrap();
        std::fs::hard_link(&own, &other_name).unwrap();
        for path in [
            &own,
            &link,
            &other_name,
            &dir.path().join("../").join(dir.path()).join("link.sock"),
        ] {
            let refused = connect_plugin(path, ()).await.unwrap_err();
            assert!(
                matches!(refused, ConnectError::Own { .. }),
                "{path:?}: {refused:?}"
            );
        }
        assert!(matches!(
            connect_plugin(&dir.path().join("none"), ()).await,
            Err(ConnectError::Connect { .. })
        ));

        // Another process has the name now.
        std::fs::remove_file(&own).unwrap();
        let _plugin = UnixListener::bind(&own).unwrap();
        let refused = connect_plugin(&own, ()).await;
        assert!(
            matches!(refused, Err(ConnectError::Own { .. })),
            "the path is the daemon's: {refused:?}"
        );
        let plugin = dir.path().join("plugin.sock");
        let listener = UnixListener::bind(&plugin).unwrap();
        let (connected, accepted) = tokio::join!(connect_plugin(&plugin, ()), listener.accept());
        accepted.unwrap();
        connected.unwrap();
    }

    #[tokio::test]
    async fn occupied_and_overlong_paths_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path).await, Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(120));
        assert!(bind(&long).await.unwrap_err().to_string().contains("107"));
    }
}
