//! The messages between two instances: a line of JSON each, of bounded length and in bounded time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::app::handover::HANDOVER_MESSAGE;
use nodedock_base::descriptors::{DESCRIPTORS_MAX, Received, receive_line, send_line};
use nodedock_base::listeners::Listeners;
use nodedock_model::Uid;

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
    /// Listening sockets by their names (`Listeners::give`), with a descriptor for each; more may follow.
    Listeners { names: Vec<String> },
    /// The successor serves.
    Serving,
    /// The previous instance has ended its connections.
    Ended,
}

impl Message {
    /// Returns the name of the message, for the log.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Ask { .. } => "ask",
            Self::StandBy { .. } => "stand-by",
            Self::Released { .. } => "released",
            Self::Refused { .. } => "refused",
            Self::Listeners { .. } => "listeners",
            Self::Serving => "serving",
            Self::Ended => "ended",
        }
    }
}

/// A connection to another instance.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    received: Received,
}

/// Another instance that has said who it is.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) instance: Uid,
    pub(super) connection: Connection,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            received: Received::default(),
        }
    }

    /// `None`: the other side is gone.
    pub(super) async fn receive(&mut self, within: Duration) -> io::Result<Option<Message>> {
        let line = timeout(within, receive_line(&self.stream, &mut self.received));
        let line = line.await.map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(line.map(|line| serde_json::from_str(&line)).transpose()?)
    }

    pub(super) async fn send(&mut self, message: &Message) -> io::Result<()> {
        self.send_with(message, &[]).await
    }

    async fn send_with(
        &mut self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let line = serde_json::to_string(message)?;
        let sent = timeout(
            HANDOVER_MESSAGE,
            send_line(&self.stream, &line, descriptors),
        )
        .await;
        sent.map_err(|_| io::ErrorKind::TimedOut)?
    }

    /// Sends the listening sockets, which the other instance needs to continue listening, and then the message.
    pub(super) async fn give(
        &mut self,
        listeners: &Listeners,
        message: &Message,
    ) -> io::Result<()> {
        for some in listeners.give()?.chunks(DESCRIPTORS_MAX) {
            let names = some.iter().map(|(name, _)| name.clone()).collect();
            let descriptors: Vec<_> = some.iter().map(|(_, listener)| listener.as_fd()).collect();
            self.send_with(&Message::Listeners { names }, &descriptors)
                .await?;
        }
        self.send(message).await
    }

    /// Takes the sockets of the other instance, and returns its next message. `None`: the other side is gone.
    pub(super) async fn adopt(
        &mut self,
        listeners: &Listeners,
        within: Duration,
    ) -> io::Result<Option<Message>> {
        loop {
            match self.receive(within).await? {
                Some(Message::Listeners { names }) => {
                    let given = self.received.descriptors(names.len())?;
                    listeners.adopt(names.into_iter().zip(given).collect());
                }
                message => return Ok(message),
            }
        }
    }

    /// Resolves when the other side is gone. Its messages until then are dropped.
    pub(super) async fn closed(&mut self) {
        let mut dropped = [0; 256];
        while self
            .stream
            .read(&mut dropped)
            .await
            .is_ok_and(|count| count > 0)
        {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn messages_arrive_whole_or_fail() {
        let pair = || {
            UnixStream::pair()
                .map(|(a, b)| (Connection::new(a), b))
                .unwrap()
        };
        let (mut near, other) = pair();
        let (ask, mut far) = (
            Message::Ask {
                instance: Uid::new("i-1").unwrap(),
            },
            Connection::new(other),
        );
        far.send(&ask).await.unwrap();
        far.send(&Message::Serving).await.unwrap();
        assert_eq!(near.receive(HANDOVER_MESSAGE).await.unwrap(), Some(ask));
        assert_eq!(
            near.receive(HANDOVER_MESSAGE).await.unwrap(),
            Some(Message::Serving)
        );
        let silent = near.receive(HANDOVER_MESSAGE).await.unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(far);
        assert_eq!(near.receive(HANDOVER_MESSAGE).await.unwrap(), None);
        near.closed().await;

        for bad in [
            b"GET / HTTP/1.1\r\n".to_vec(),
            b"{\"word\":\"ask\"".to_vec(),
            vec![b'x'; 1 << 16],
        ] {
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
            text(&Message::Ask {
                instance: Uid::new("a").unwrap()
            }),
            r#"{"word":"ask","instance":"a"}"#
        );
        assert_eq!(text(&Message::Serving), r#"{"word":"serving"}"#);
    }
}
