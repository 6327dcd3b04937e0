//! Sockets in the kubelet's directories: created or adopted, served, checked, handed over and removed.
//!
//! A kubelet dials what appears in its directories at once, so a socket is bound under a name that begins with a dot, which a kubelet
//! ignores, given its mode, and renamed into place. A file that is not a socket, and a socket on which another process listens, is never
//! touched; nor is a socket removed that is not the very one that was created here.
//!
//! While another instance takes over, no connection is accepted: those that clients make wait for that instance. Calls on the connections
//! that are open are forwarded to it (`Forwarding`), by a connection to the same socket.

use std::convert::Infallible;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use http::{Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use nodedock_proto::unix;
use prometheus_client::metrics::counter::Counter;
use sha2::{Digest, Sha256};
use tokio::net::UnixListener;
use tokio::sync::{OnceCell, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::{Channel, Server};
use tower::Service;

use nodedock_base::device_plugin_sockets::{SocketId, socket_id};
use nodedock_base::error::chain;
use nodedock_base::listeners::{Listeners, Opened};
use nodedock_base::socket::{BindError, connect, refuse_occupied};
use nodedock_base::tasks::Tasks;

/// Concurrent connections to one socket in the kubelet's directories (a kubelet has one), and calls in flight on each: a pod has one.
const BRIDGE_CONNECTIONS_MAX: usize = 32;
const BRIDGE_STREAMS_MAX: u32 = 512;

/// Methods that answer until the connection ends: these are not forwarded, and end with this instance's sockets.
const STREAMS: [&str; 3] = ["ListAndWatch", "NodeWatchResources", "WatchResources"];

/// Bytes of a request: the limit of gRPC itself, and the five before its message.
const REQUEST_BYTES_MAX: usize = (4 << 20) + 5;

/// Mode of the kubelet's directories, as the kubelet creates them.
const DIRECTORY_MODE: u32 = 0o750;

#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    #[error(transparent)]
    Bind(#[from] BindError),
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

/// State of the handover to another instance, to which calls are forwarded once it has begun.
#[derive(Clone)]
pub(super) struct Handover {
    /// Stopped when it begins.
    pub(super) changing: Tasks,
    /// It has begun. Calls that still come are forwarded, also while the connections end.
    is_under_way: Arc<AtomicBool>,
}

impl Handover {
    pub(super) fn new(tasks: Tasks) -> Self {
        Self {
            changing: tasks.child(),
            is_under_way: Arc::default(),
        }
    }

    pub(super) fn begin(&self) {
        self.is_under_way.store(true, Ordering::SeqCst);
        self.changing.stop();
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.is_under_way.load(Ordering::SeqCst)
    }
}

/// A socket that is served until it is closed or dropped. Calls under way then are answered.
pub(super) struct ServedSocket {
    path: PathBuf,
    pub(super) id: SocketId,
    /// It was open before this process, or this instance.
    pub(super) adopted: bool,
    listeners: Listeners,
    tasks: Tasks,
}

impl ServedSocket {
    /// Listens on `path`, where a socket on which no process listens any more is replaced, and answers by `routes` until the tasks stop.
    /// `connections` count those to this socket.
    pub(super) async fn open(
        name: &'static str,
        path: &Path,
        routes: Routes,
        connections: Vec<Arc<Connections>>,
        (listeners, handover): (&Listeners, &Handover),
        tasks: Tasks,
    ) -> Result<Self, SocketError> {
        let hidden = hidden(path);
        refuse_occupied(&hidden).await?;
        let Opened {
            listener,
            id,
            adopted,
        } = listeners.open_by(path, &hidden).await?;
        let incoming = incoming(listener, connections, handover.clone());
        let service = Forwarding {
            inner: routes.prepare(),
            next: Arc::new(NextInstance {
                handover: handover.clone(),
                path: path.to_owned(),
                channel: OnceCell::new(),
            }),
        };
        let (server, stopped) = (
            Server::builder().max_concurrent_streams(BRIDGE_STREAMS_MAX),
            tasks.stopped(),
        );
        tasks.spawn(name, async move {
            if let Err(error) = server
                .serve_with_incoming_shutdown(service, incoming, stopped)
                .await
            {
                tracing::error!(
                    socket = name,
                    error = chain(&error),
                    "a socket of the kubelet is not served any more"
                );
            }
        });
        Ok(Self {
            path: path.to_owned(),
            id,
            adopted,
            listeners: listeners.clone(),
            tasks,
        })
    }

    /// Returns whether the socket's file still exists.
    pub(super) fn is_present(&self) -> bool {
        socket_id(&self.path) == Some(self.id)
    }

    /// Stops serving, and leaves the socket to the process that listens next. The tasks end with the calls under way.
    pub(super) fn leave(self) -> Tasks {
        self.tasks.stop();
        self.tasks.clone()
    }

    /// Removes the socket, unless another instance has it. The tasks end with the calls under way.
    pub(super) fn close(self) -> Tasks {
        self.listeners.remove(&self.path, self.id);
        self.leave()
    }
}

impl Drop for ServedSocket {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// The connections that clients make, of which no more are served at once than the limit says; more wait. While another instance takes
/// over, all wait for that one.
fn incoming(
    listener: UnixListener,
    connections: Vec<Arc<Connections>>,
    handover: Handover,
) -> impl Stream<Item = Result<unix::Connection, Infallible>> {
    let permits = Arc::new(Semaphore::new(BRIDGE_CONNECTIONS_MAX));
    let mut accepted = unix::incoming(listener);
    let accepted = futures::stream::poll_fn(move |cx| {
        if handover.changing.is_stopping() {
            Poll::Pending
        } else {
            accepted.poll_next_unpin(cx)
        }
    });
    accepted.then(move |accepted| {
        let (permits, connections) = (permits.clone(), connections.clone());
        async move {
            let permit = permits.acquire_owned().await;
            let open: Vec<_> = connections
                .iter()
                .map(|connections| connections.begin())
                .collect();
            accepted.map(|connection| connection.guarded_by((permit, open)))
        }
    })
}

/// The instance that takes over, on one socket.
struct NextInstance {
    handover: Handover,
    path: PathBuf,
    channel: OnceCell<Channel>,
}

impl NextInstance {
    /// Answers a call by the instance that listens on the socket next. Its client's deadline is that of the call.
    async fn call(&self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let channel = self.channel.get_or_try_init(|| connect(&self.path)).await;
        let mut channel = channel
            .map_err(|error| Status::unavailable(chain(&error)))?
            .clone();
        std::future::poll_fn(|cx| channel.poll_ready(cx))
            .await
            .map_err(|error| Status::from_error(error.into()))?;
        channel
            .call(request)
            .await
            .map_err(|error| Status::from_error(error.into()))
    }
}

/// Answers calls here, and from the beginning of a handover on by the next instance. A call under way at that moment is answered by that
/// one as well: what it asks for may be repeated at any time.
#[derive(Clone)]
struct Forwarding {
    inner: Routes,
    next: Arc<NextInstance>,
}

impl Service<Request<Body>> for Forwarding {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<Body>>::poll_ready(&mut self.inner, cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let rest = self.inner.clone();
        let (mut inner, next) = (std::mem::replace(&mut self.inner, rest), self.next.clone());
        let method = request.uri().path().rsplit('/').next();
        if method.is_some_and(|method| STREAMS.contains(&method)) {
            return Box::pin(inner.call(request));
        }
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = match Limited::new(body, REQUEST_BYTES_MAX).collect().await {
                Ok(body) => Full::new(body.to_bytes()),
                Err(error) => return Ok(Status::from_error(error).into_http()),
            };
            let request = |body| Request::from_parts(parts.clone(), Body::new(body));
            let mut own = None;
            if !next.handover.is_under_way() {
                let response = inner.call(request(body.clone())).await?;
                if !next.handover.is_under_way() {
                    return Ok(response);
                }
                own = Some(response);
            }
            Ok(next
                .call(request(body))
                .await
                .unwrap_or_else(|status| own.unwrap_or_else(|| status.into_http())))
        })
    }
}

/// A name beside `path` that a kubelet ignores, shorter than any socket's name here.
fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let digest = Sha256::digest(name.as_encoded_bytes());
    path.with_file_name(format!(".{}", hex::encode(&digest[..3])))
}

/// Creates a directory whose parent is there, unless it is there.
pub(super) fn make_directory(path: &Path) -> Result<(), SocketError> {
    let directory = |source| SocketError::Directory {
        path: path.to_owned(),
        source,
    };
    match std::fs::DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => {
            // Sets the mode regardless of the umask.
            return made
                .and_then(|()| {
                    std::fs::set_permissions(path, Permissions::from_mode(DIRECTORY_MODE))
                })
                .map_err(directory);
        }
    }
    let found = std::fs::metadata(path).map_err(directory)?;
    if found.is_dir() {
        Ok(())
    } else {
        Err(SocketError::NotADirectory(path.to_owned()))
    }
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
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    async fn open(path: &Path) -> Result<ServedSocket, SocketError> {
        let (listeners, tasks) = (Listeners::of_start("start1"), Tasks::new());
        let handover = Handover::new(tasks.clone());
        ServedSocket::open(
            "test",
            path,
            Routes::default(),
            Vec::new(),
            (&listeners, &handover),
            tasks,
        )
        .await
    }

    #[tokio::test]
    async fn private_socket_replaces_stale_ones() {
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
    async fn foreign_files_are_not_removed() {
        let (directory, path) = directory();
        let elsewhere = directory.path().join("elsewhere.sock");
        drop(StdListener::bind(&elsewhere).unwrap());
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(
            open(&path).await,
            Err(SocketError::Bind(BindError::NotASocket(_)))
        ));
        assert!(path.is_symlink());
        std::fs::remove_file(&path).unwrap();

        let ours = open(&path).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let theirs = open(&path).await.unwrap();
        ours.close();
        assert!(
            theirs.is_present(),
            "another socket in its place is not removed"
        );
    }

    #[test]
    fn hidden_name_is_shorter_than_socket() {
        for name in ["dra-a.sock", "a-a-reg.sock"] {
            let hidden = hidden(&Path::new("/x").join(name));
            let hidden = hidden.file_name().unwrap().to_str().unwrap();
            assert!(
                hidden.starts_with('.') && hidden.len() < name.len(),
                "{hidden}"
            );
        }
    }

    #[test]
    fn directories_have_the_kubelets_mode() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("plugins");
        make_directory(&directory).unwrap();
        make_directory(&directory).unwrap();
        assert_eq!(std::fs::metadata(&directory).unwrap().mode() & 0o777, 0o750);
        std::fs::write(directory.join("file"), "").unwrap();
        assert!(matches!(
            make_directory(&directory.join("file")),
            Err(SocketError::NotADirectory(_))
        ));
        let nowhere = root.path().join("no/plugins");
        assert!(matches!(
            make_directory(&nowhere),
            Err(SocketError::Directory { .. })
        ));
    }
}
