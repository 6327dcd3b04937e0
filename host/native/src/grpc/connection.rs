//! One connection to a plugin's socket, opened at once and opened again when it is lost.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{Notify, oneshot, watch};
use tonic::transport::{Channel, Endpoint, Uri};

use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
pub use nodedock_core::driver::Link;
use nodedock_model::limit;

#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("connect to {}", socket.display())]
    Connect { socket: PathBuf, source: io::Error },
    #[error("connect to {} within {} ms", socket.display(), deadline.as_millis())]
    Deadline { socket: PathBuf, deadline: Duration },
    #[error("begin HTTP/2 on {}", socket.display())]
    Begin { socket: PathBuf, source: tonic::transport::Error },
}

#[derive(Debug, Clone, Default)]
struct State {
    link: Link,
    /// The channel while the link is connected.
    channel: Option<Channel>,
}

/// Handle to a connection, shared by clones. It stays until the tasks stop with which it was opened.
#[derive(Debug, Clone)]
pub struct Connection {
    state: watch::Receiver<State>,
    redial: Arc<Notify>,
}

impl Connection {
    /// Starts to connect.
    pub fn open(socket: PathBuf, tasks: &Tasks) -> Self {
        let (sender, state) = watch::channel(State::default());
        let redial = Arc::new(Notify::new());
        let task = ConnectionTask { socket, state: sender, redial: redial.clone() };
        tasks.spawn("plugin-connection", task.run(tasks.clone()));
        Self { state, redial }
    }

    /// Connects again, because another process may own the socket. Callers that wait for a channel wait for the new one.
    pub fn redial(&self) {
        self.redial.notify_one();
    }

    pub fn link(&self) -> Link {
        self.state.borrow().link.clone()
    }

    pub fn is_connected(&self) -> bool {
        self.state.borrow().link == Link::Connected
    }

    /// Resolves when the link has changed since this handle's last check; never again after a close.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns a channel, after waiting at most `wait` for one. The error is the current link.
    pub(super) async fn channel(&self, wait: Duration) -> Result<Channel, Link> {
        let mut receiver = self.state.clone();
        let settled = receiver.wait_for(|state| state.channel.is_some() || state.link == Link::Closed);
        if let Ok(Ok(state)) = tokio::time::timeout(wait, settled).await
            && let Some(channel) = state.channel.clone()
        {
            return Ok(channel);
        }
        Err(self.link())
    }
}

/// Maintains the connection.
struct ConnectionTask {
    socket: PathBuf,
    state: watch::Sender<State>,
    redial: Arc<Notify>,
}

impl ConnectionTask {
    /// Runs until the tasks stop.
    async fn run(self, tasks: Tasks) {
        let stopped = tasks.stopped();
        tokio::pin!(stopped);
        let mut backoff = Backoff::new(limit::RECONNECT_MIN, limit::RECONNECT_MAX);
        loop {
            tokio::select! {
                // Safe to drop: calls in flight have their own handles and end by themselves, here and below.
                () = &mut stopped => break,
                () = self.redial.notified() => {
                    self.state.send_replace(State::default());
                    continue;
                }
                () = self.connect_once(&mut backoff) => {}
            }
            tokio::select! {
                () = &mut stopped => break,
                () = self.redial.notified() => {}
                () = tokio::time::sleep(backoff.delay()) => {}
            }
        }
        self.state.send_replace(State { link: Link::Closed, channel: None });
    }

    /// Connects, and returns when the connection is lost or failed.
    async fn connect_once(&self, backoff: &mut Backoff) {
        let lost = match dial(&self.socket, limit::PLUGIN_DIAL).await {
            Ok((channel, ended)) => {
                backoff.reset();
                self.state.send_replace(State { link: Link::Connected, channel: Some(channel) });
                // In both cases the stream has ended.
                ended.await.ok();
                "the plugin closed the connection".to_owned()
            }
            Err(error) => chain(&error),
        };
        self.state.send_if_modified(|state| {
            let before = std::mem::replace(&mut state.link, Link::Lost(lost));
            state.channel = None;
            before != state.link
        });
    }
}

/// Connects to a socket. The receiver resolves when the connection has ended.
pub(super) async fn dial(
    socket: &Path,
    deadline: Duration,
) -> Result<(Channel, oneshot::Receiver<()>), DialError> {
    let path = || socket.to_owned();
    let late = |_| DialError::Deadline { socket: path(), deadline };
    let stream = tokio::time::timeout(deadline, UnixStream::connect(socket)).await.map_err(late)?;
    let stream = stream.map_err(|source| DialError::Connect { socket: path(), source })?;
    let (open, ended) = oneshot::channel();
    let mut stream = Some(TokioIo::new(Plugged { stream, _open: open }));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
        std::future::ready(stream)
    });
    // Plugins get `localhost` as the authority, as from a kubelet. The connector has only one stream, so that calls on a lost
    // connection fail at once.
    let endpoint = Endpoint::from_static("http://localhost");
    let endpoint = endpoint.http2_max_header_list_size(limit::PLUGIN_HEADERS_BYTES_MAX);
    let begun =
        tokio::time::timeout(deadline, endpoint.connect_with_connector(connector)).await.map_err(late)?;
    let channel = begun.map_err(|source| DialError::Begin { socket: path(), source })?;
    Ok((channel, ended))
}

/// A stream that signals its drop, which is the end of the HTTP/2 connection.
struct Plugged {
    stream: UnixStream,
    _open: oneshot::Sender<()>,
}

impl AsyncRead for Plugged {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Plugged {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
