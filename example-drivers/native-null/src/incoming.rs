//! Listening sockets for plugins whose connections tests can break.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use nodedock_proto::unix::{self, Connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixListener;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

pub type Incoming = Pin<Box<dyn Stream<Item = io::Result<Breakable>> + Send>>;

/// Listens on `path`. Replaces a socket that a previous process left there.
pub fn listen(path: &Path, stop: &CancellationToken) -> io::Result<Incoming> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let stop = stop.clone();
    // A kubelet's registration client sends the socket's path as the authority, which the `h2` crate refuses.
    let connections = unix::incoming(UnixListener::bind(path)?).map(move |stream| {
        let broken = Box::pin(stop.clone().cancelled_owned());
        let Ok(stream) = stream;
        Ok(Breakable { stream, broken })
    });
    Ok(Box::pin(connections))
}

/// A stream that breaks when the plugin stops, as the kernel breaks those of a killed process.
pub struct Breakable {
    stream: Connection,
    broken: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Breakable {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.broken.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl Connected for Breakable {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl AsyncRead for Breakable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Breakable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
