//! Unix sockets that gRPC clients in Go and Python can use.
//!
//! Owns a connection between `accept` and the server. Given a bound listener, it emits connections for `Server::serve_with_incoming`,
//! on which every `:authority` is valid for a Rust server. It does not bind, serve or answer.
//!
//! Go's grpc derives `:authority` from the path of a socket when it is dialled by a bare path, which the kubelet does to every
//! registration socket and device plugins do to the kubelet's: `%2Fvar%2Flib%2Fkubelet…`, and in old releases the path itself.
//! Python's grpcio does the same. The `h2` crate accepts neither as an authority and resets the stream with PROTOCOL_ERROR
//! (hyperium/h2#487). This module replaces such an authority by `localhost`, which other clients send on a Unix socket.
//!
//! ```no_run
//! # async fn serve(registration: impl nodedock_proto::kubelet::registration::registration_server::Registration)
//! #     -> Result<(), Box<dyn std::error::Error>> {
//! use nodedock_proto::kubelet::registration::registration_server::RegistrationServer;
//!
//! let listener = tokio::net::UnixListener::bind("/var/lib/kubelet/plugins_registry/gpu.example.com-reg.sock")?;
//! let server = tonic::transport::Server::builder().add_service(RegistrationServer::new(registration));
//! server.serve_with_incoming(nodedock_proto::unix::incoming(listener)).await?;
//! # Ok(())
//! # }
//! ```

use std::any::Any;
use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tonic::transport::server::{Connected, UdsConnectInfo};

mod frames;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod hpack;
#[cfg(test)]
mod tests;

use frames::{Inbound, Violation};

/// Delay after a failed `accept`, which means that the process has no file descriptor or memory left; an immediate retry would busy-loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(250);
/// Bound of rewritten bytes that wait for the server, without the last frame: as much as a server reads at once.
const READY_BYTES: usize = 16 << 10;
/// Buffer capacity that an idle connection keeps.
const IDLE_BYTES: usize = 4 << 10;

/// Returns the connections of clients to `listener`, while the stream is polled.
pub fn incoming(listener: UnixListener) -> Incoming {
    Incoming {
        listener,
        pause: None,
        failing: false,
    }
}

/// A stream of connections that neither ends nor fails: it logs and retries a failed `accept`.
#[derive(Debug)]
pub struct Incoming {
    listener: UnixListener,
    pause: Option<Pin<Box<Sleep>>>,
    failing: bool,
}

impl Stream for Incoming {
    type Item = Result<Connection, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok((stream, _)) => {
                    self.failing = false;
                    return Poll::Ready(Some(Ok(stream.into())));
                }
                Err(error) => self.pause_after(&error),
            }
        }
    }
}

impl Incoming {
    fn pause_after(&mut self, error: &io::Error) {
        if !self.failing {
            tracing::warn!(%error, "no connection can be accepted, trying again");
        }
        self.failing = true;
        self.pause = Some(Box::pin(tokio::time::sleep(ACCEPT_PAUSE)));
    }
}

/// A server's end of a connection. Reads return the client's HTTP/2 with valid authorities; writes change nothing.
///
/// A violation of the rules of frames or of header compression closes the connection, since the rest of the stream has no defined
/// meaning. The server checks everything else.
#[derive(Debug)]
pub struct Connection<S = UnixStream> {
    stream: S,
    peer: Option<UCred>,
    inbound: Inbound,
    /// Read and not parsed: never more than one read of the server.
    held: BytesMut,
    /// Parsed and not yet read by the server.
    ready: BytesMut,
    refused: Option<Violation>,
    /// Dropped with the connection.
    guard: Option<Box<dyn Any + Send + Sync>>,
}

impl From<UnixStream> for Connection {
    fn from(stream: UnixStream) -> Self {
        let peer = stream.peer_cred().ok();
        Self {
            peer,
            ..Self::new(stream)
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl<S> Connection<S> {
    /// Wraps a connection of any type, before its first byte is read.
    pub fn new(stream: S) -> Self {
        let (held, ready) = (BytesMut::new(), BytesMut::new());
        Self {
            stream,
            peer: None,
            inbound: Inbound::default(),
            held,
            ready,
            refused: None,
            guard: None,
        }
    }

    /// Keeps a value until the connection is dropped: the permit of a limit, or what counts open connections.
    pub fn guarded_by(mut self, guard: impl Any + Send + Sync) -> Self {
        self.guard = Some(Box::new(guard));
        self
    }

    fn deliver(&mut self, buf: &mut ReadBuf<'_>) {
        let length = self.ready.len().min(buf.remaining());
        buf.put_slice(&self.ready[..length]);
        self.ready.advance(length);
        forget_if_empty(&mut self.ready);
    }

    /// Parses buffered bytes, up to the size of one read of a server.
    fn look(&mut self) -> Result<(), Violation> {
        while !self.held.is_empty() && self.ready.len() < READY_BYTES {
            let taken = self.inbound.take(&self.held, &mut self.ready)?;
            self.held.advance(taken);
        }
        forget_if_empty(&mut self.held);
        Ok(())
    }

    /// Leaves the bytes of `buf` from `start` on that pass unchanged, and buffers the rest.
    fn sift(&mut self, buf: &mut ReadBuf<'_>, start: usize) -> Result<(), Violation> {
        let read = &buf.filled()[start..];
        let passing = self.inbound.passing(read);
        if let Ok(passing) = passing {
            self.held.extend_from_slice(&read[passing..]);
        }
        buf.set_filled(start + passing.as_ref().copied().unwrap_or(0));
        passing.map(drop)
    }

    fn refuse(&mut self, violation: Violation) {
        let (pid, uid) = (
            self.peer.and_then(|peer| peer.pid()),
            self.peer.map(|peer| peer.uid()),
        );
        tracing::warn!(peer_pid = pid, peer_uid = uid, reason = %violation, "connection closed: not proper http/2");
        self.held = BytesMut::new();
        self.refused = Some(violation);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let start = buf.filled().len();
        while buf.remaining() > 0 {
            if let Err(violation) = self.look() {
                self.refuse(violation);
            }
            if !self.ready.is_empty() {
                self.deliver(buf);
                break;
            }
            if let Some(violation) = &self.refused {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    violation.clone(),
                )));
            }
            // Reads directly into the server's buffer: most bytes of a message are never copied.
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
            if buf.filled().len() == start {
                break;
            }
            if let Err(violation) = self.sift(buf, start) {
                self.refuse(violation);
            }
            if buf.filled().len() > start {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Releases a large buffer after a rare large frame.
fn forget_if_empty(buffer: &mut BytesMut) {
    if buffer.is_empty() && buffer.capacity() > IDLE_BYTES {
        *buffer = BytesMut::new();
    }
}
