//! Connections to a socket: counted, and bounded.

use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use nodedock_proto::unix;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::{Connected, UdsConnectInfo};

use nodedock_model::limit::BRIDGE_CONNECTIONS_MAX;

/// Connections that were made, and those that are open.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    made: AtomicU64,
    ended: AtomicU64,
}

impl Gauge {
    pub(super) fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    pub(super) fn open(&self) -> u64 {
        // Read first, so that the difference is never below none.
        let ended = self.ended.load(Relaxed);
        self.made().saturating_sub(ended)
    }
}

/// The connections that clients make, no more of them open at once than the limits say; more wait.
pub(super) fn incoming(
    listener: UnixListener,
    gauges: [Arc<Gauge>; 2],
) -> impl Stream<Item = Result<Counted, Infallible>> {
    let (places, accepted) = (Arc::new(Semaphore::new(BRIDGE_CONNECTIONS_MAX)), unix::incoming(listener));
    futures::stream::unfold((places, accepted), move |(places, mut accepted)| {
        let gauges = gauges.clone();
        async move {
            // It is never closed.
            let place = Arc::clone(&places).acquire_owned().await.ok()?;
            let Ok(stream) = accepted.next().await?;
            gauges.iter().for_each(|gauge| {
                gauge.made.fetch_add(1, Relaxed);
            });
            Some((Ok(Counted { stream, gauges, _place: place }), (places, accepted)))
        }
    })
}

/// A connection that is counted until it is dropped.
pub(super) struct Counted {
    stream: unix::Connection,
    gauges: [Arc<Gauge>; 2],
    _place: OwnedSemaphorePermit,
}

impl Drop for Counted {
    fn drop(&mut self) {
        for gauge in &self.gauges {
            gauge.ended.fetch_add(1, Relaxed);
        }
    }
}

impl Connected for Counted {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
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
