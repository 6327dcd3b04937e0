//! The messages between two instances: a line of JSON each, of bounded length and in bounded time.

use std::io;
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::codec::{Framed, LinesCodec};

use crate::app::handover::HANDOVER_MESSAGE;
use nodedock_model::Uid;

/// Bytes of a message between instances.
const HANDOVER_MESSAGE_BYTES_MAX: u64 = 4096;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "kebab-case")]
pub(super) enum Message {
    /// Requests the handover.
    Ask { instance: Uid },
    /// This newer instance serves; the other side may wait for its end on this connection.
    StandBy { instance: Uid },
    /// This instance has closed the checkpoint and released the lock.
    Released { instance: Uid },
    /// The request is not valid.
    Refused { why: String },
    /// The successor serves, and the kubelet knows its sockets: the previous instance's are unused.
    Serving,
}

/// A connection to another instance.
#[derive(Debug)]
pub(super) struct Connection(Framed<UnixStream, LinesCodec>);

/// Another instance that has said who it is.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) instance: Uid,
    pub(super) connection: Connection,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self(Framed::new(stream, LinesCodec::new_with_max_length(HANDOVER_MESSAGE_BYTES_MAX as usize)))
    }

    /// `None`: the other side is gone.
    pub(super) async fn receive(&mut self, within: Duration) -> io::Result<Option<Message>> {
        let line = timeout(within, self.0.next()).await.map_err(|_| io::ErrorKind::TimedOut)?;
        let line = line.transpose().map_err(io::Error::other)?;
        Ok(line.map(|line| serde_json::from_str(&line)).transpose()?)
    }

    pub(super) async fn send(&mut self, message: &Message) -> io::Result<()> {
        let line = serde_json::to_string(message)?;
        let sent = timeout(HANDOVER_MESSAGE, self.0.send(line)).await;
        sent.map_err(|_| io::ErrorKind::TimedOut)?.map_err(io::Error::other)
    }

    /// Resolves when the other side is gone. Its messages until then are dropped.
    pub(super) async fn closed(&mut self) {
        let mut dropped = [0; 256];
        while self.0.get_mut().read(&mut dropped).await.is_ok_and(|count| count > 0) {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn messages_arrive_whole_or_as_an_error_in_time() {
        let pair = || UnixStream::pair().map(|(a, b)| (Connection::new(a), b)).unwrap();
        let (mut near, other) = pair();
        let (ask, mut far) = (Message::Ask { instance: Uid::new("i-1").unwrap() }, Connection::new(other));
        far.send(&ask).await.unwrap();
        far.send(&Message::Serving).await.unwrap();
        assert_eq!(near.receive(HANDOVER_MESSAGE).await.unwrap(), Some(ask));
        assert_eq!(near.receive(HANDOVER_MESSAGE).await.unwrap(), Some(Message::Serving));
        let silent = near.receive(HANDOVER_MESSAGE).await.unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(far);
        assert_eq!(near.receive(HANDOVER_MESSAGE).await.unwrap(), None);
        near.closed().await;

        for bad in [b"GET / HTTP/1.1\r\n".to_vec(), b"{\"word\":\"ask\"".to_vec(), vec![b'x'; 1 << 16]] {
            let (mut near, mut other) = pair();
            let send = async move {
                // The reader may have gone.
                let _ = other.write_all(&bad).await;
            };
            let (received, ()) = tokio::join!(near.receive(HANDOVER_MESSAGE), send);
            received.unwrap_err();
        }
    }

    #[test]
    fn the_wire_format_is_stable() {
        let text = |message: &Message| serde_json::to_string(message).unwrap();
        assert_eq!(
            text(&Message::Ask { instance: Uid::new("a").unwrap() }),
            r#"{"word":"ask","instance":"a"}"#
        );
        assert_eq!(text(&Message::Serving), r#"{"word":"serving"}"#);
    }
}
