//! Sockets in the kubelet's directories: created, served, checked and removed.
//!
//! A kubelet dials what appears in its directories at once, so a socket is bound under a name that begins with a dot, which a kubelet
//! ignores, given its mode, and renamed into place. A file that is not a socket, and a socket on which another process listens, is never
//! touched; nor is a socket removed that is not the very one that was created here.

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{Stream, StreamExt};
use nodedock_proto::unix;
use prometheus_client::metrics::counter::Counter;
use sha2::{Digest, Sha256};
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tonic::transport::Server;
use tonic::transport::server::Router;

use nodedock_base::device_plugin_sockets::{SocketId, socket_id};
use nodedock_base::error::chain;
use nodedock_base::socket::{BindError, bind_by, refuse_occupied};
use nodedock_base::tasks::Tasks;

/// Concurrent connections to one socket in the kubelet's directories (a kubelet has one), and calls in flight on each: a pod has one.
const BRIDGE_CONNECTIONS_MAX: usize = 32;
const BRIDGE_STREAMS_MAX: u32 = 512;

/// As a kubelet creates its directories.
const DIRECTORY_MODE: u32 = 0o750;

#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("the socket {0:?} was removed at once")]
    Removed(PathBuf),
    #[error("no directory {path:?}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("{0:?} is not a directory: remove it")]
    NotADirectory(PathBuf),
}

/// Connections to sockets: how many there were, and those that are open, each of which has a clone of the second.
#[derive(Debug, Default)]
pub(super) struct Connections {
    made: Counter,
    open: Arc<()>,
}

impl Connections {
    pub(super) fn made(&self) -> u64 {
        self.made.get()
    }

    pub(super) fn open(&self) -> u64 {
        (Arc::strong_count(&self.open) - 1) as u64
    }

    /// Counts a connection as open until the result is dropped.
    fn begin(&self) -> Arc<()> {
        self.made.inc();
        self.open.clone()
    }
}

/// The server of a socket, without services.
pub(super) fn server() -> Server {
    Server::builder().max_concurrent_streams(BRIDGE_STREAMS_MAX)
}

/// A socket that is served until it is closed or dropped. Calls under way then are answered.
pub(super) struct ServedSocket {
    path: PathBuf,
    pub(super) id: SocketId,
    tasks: Tasks,
}

impl ServedSocket {
    /// Listens on `path`, where a socket on which no process listens any more is replaced, and answers by `router` until the tasks stop. `connections` count those to this socket.
    pub(super) async fn open(
        name: &'static str,
        path: &Path,
        router: Router,
        connections: Vec<Arc<Connections>>,
        tasks: Tasks,
    ) -> Result<Self, SocketError> {
        let hidden = hidden(path);
        refuse_occupied(&hidden).await?;
        let listener = bind_by(path, &hidden).await?;
        let id = socket_id(path).ok_or_else(|| SocketError::Removed(path.to_owned()))?;
        let (incoming, stopped) = (incoming(listener, connections), tasks.stopped());
        tasks.spawn(name, async move {
            if let Err(error) = router.serve_with_incoming_shutdown(incoming, stopped).await {
                tracing::error!(
                    socket = name,
                    error = chain(&error),
                    "a socket of the kubelet is not served any more"
                );
            }
        });
        Ok(Self { path: path.to_owned(), id, tasks })
    }

    /// Whether the socket's file is still there.
    pub(super) fn is_present(&self) -> bool {
        socket_id(&self.path) == Some(self.id)
    }

    /// Removes the socket. The tasks end with the calls under way.
    pub(super) fn close(self) -> Tasks {
        if self.is_present()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(socket = %self.path.display(), %error, "a socket cannot be removed");
        }
        self.tasks.stop();
        self.tasks.clone()
    }
}

impl Drop for ServedSocket {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// The connections that clients make, of which no more are served at once than the limit says; more wait.
fn incoming(
    listener: UnixListener,
    connections: Vec<Arc<Connections>>,
) -> impl Stream<Item = Result<unix::Connection, Infallible>> {
    let permits = Arc::new(Semaphore::new(BRIDGE_CONNECTIONS_MAX));
    unix::incoming(listener).then(move |accepted| {
        let (permits, connections) = (permits.clone(), connections.clone());
        async move {
            let permit = permits.acquire_owned().await;
            let open: Vec<_> = connections.iter().map(|connections| connections.begin()).collect();
            accepted.map(|connection| connection.guarded_by((permit, open)))
        }
    })
}

/// A name beside `path` that a kubelet ignores, no longer than any socket's name here.
fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let digest = Sha256::digest(name.as_encoded_bytes());
    path.with_file_name(format!(".{}", hex::encode(&digest[..3])))
}

/// Creates a directory whose parent is there, unless it is there.
pub(super) fn make_directory(path: &Path) -> Result<(), SocketError> {
    let directory = |source| SocketError::Directory { path: path.to_owned(), source };
    match std::fs::DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map_err(directory),
    }
    let found = std::fs::metadata(path).map_err(directory)?;
    if found.is_dir() { Ok(()) } else { Err(SocketError::NotADirectory(path.to_owned())) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixListener as StdListener;

    use tokio::net::UnixStream;

    use super::*;

    fn directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gpu.example.com-reg.sock");
        (directory, path)
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    async fn open(path: &Path) -> Result<ServedSocket, SocketError> {
        let router = server().add_routes(tonic::service::Routes::default());
        ServedSocket::open("test", path, router, Vec::new(), Tasks::new()).await
    }

    #[tokio::test]
    async fn a_socket_is_private_and_alone_and_replaces_stale_ones() {
        let (directory, path) = directory();
        drop(StdListener::bind(&path).unwrap());
        drop(StdListener::bind(hidden(&path)).unwrap());
        let socket = open(&path).await.unwrap();
        assert_eq!(names(directory.path()), ["gpu.example.com-reg.sock"]);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        UnixStream::connect(&path).await.unwrap();
        assert!(socket.is_present());
        socket.close();
        assert!(names(directory.path()).is_empty());
    }

    #[tokio::test]
    async fn files_of_others_are_left_as_they_are() {
        let (directory, path) = directory();
        let elsewhere = directory.path().join("elsewhere.sock");
        drop(StdListener::bind(&elsewhere).unwrap());
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(open(&path).await, Err(SocketError::Bind(BindError::NotASocket(_)))));
        assert!(path.is_symlink());
        std::fs::remove_file(&path).unwrap();

        let ours = open(&path).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let theirs = open(&path).await.unwrap();
        ours.close();
        assert!(theirs.is_present(), "another socket in its place is not removed");
    }

    #[test]
    fn a_hidden_name_is_shorter_than_the_shortest_socket() {
        for name in ["dra.sock", "a-reg.sock"] {
            let hidden = hidden(&Path::new("/x").join(name));
            let hidden = hidden.file_name().unwrap().to_str().unwrap();
            assert!(hidden.starts_with('.') && hidden.len() < name.len(), "{hidden}");
        }
    }

    #[test]
    fn directories_are_made_as_a_kubelet_makes_them_and_a_file_in_the_way_is_named() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("plugins");
        make_directory(&directory).unwrap();
        make_directory(&directory).unwrap();
        assert_eq!(std::fs::metadata(&directory).unwrap().mode() & 0o777, 0o750);
        std::fs::write(directory.join("file"), "").unwrap();
        assert!(matches!(make_directory(&directory.join("file")), Err(SocketError::NotADirectory(_))));
        let nowhere = root.path().join("no/plugins");
        assert!(matches!(make_directory(&nowhere), Err(SocketError::Directory { .. })));
    }
}
