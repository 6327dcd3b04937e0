//! What two instances say to each other: a line of JSON for each word, of bounded length and in bounded time.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use nodedock_model::{Uid, limit};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "kebab-case")]
pub(super) enum Word {
    /// Of who comes: it wants the place.
    Ask { instance: Uid },
    /// Of who serves: a newer one is there, and who asks may wait for its end on this connection.
    StandBy { instance: Uid },
    /// Of who served: the checkpoint is closed, and the place free.
    Released { instance: Uid },
    /// Of who serves: nothing will come of it.
    Refused { why: String },
    /// Of who took over: the kubelet knows its sockets, and those of the one before are for nobody.
    Serving,
}

/// A connection between two instances.
#[derive(Debug)]
pub(super) struct Talk(BufReader<UnixStream>);

impl Talk {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self(BufReader::new(stream))
    }

    /// None: the other side is gone.
    pub(super) async fn hear(&mut self, within: Duration) -> io::Result<Option<Word>> {
        let line = async {
            let mut line = Vec::new();
            (&mut self.0).take(limit::HANDOVER_WORD_BYTES_MAX).read_until(b'\n', &mut line).await?;
            Ok::<_, io::Error>(line)
        };
        let line = timeout(within, line).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        match line.split_last() {
            None => Ok(None),
            Some((b'\n', word)) => Ok(Some(serde_json::from_slice(word)?)),
            Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a word that does not end")),
        }
    }

    pub(super) async fn say(&mut self, word: &Word) -> io::Result<()> {
        let mut line = serde_json::to_vec(word)?;
        line.push(b'\n');
        let sent = timeout(limit::HANDOVER_WORD, self.0.get_mut().write_all(&line)).await;
        sent.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Ends when the other side is gone. What it says until then is for nobody.
    pub(super) async fn gone(&mut self) {
        let mut rest = [0; 256];
        while let Ok(1..) = self.0.read(&mut rest).await {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn words_come_whole_or_as_an_error_in_time() {
        let pair = || UnixStream::pair().map(|(a, b)| (Talk::new(a), b)).unwrap();
        let (mut talk, other) = pair();
        let (ask, mut far) = (Word::Ask { instance: Uid::new("i-1").unwrap() }, Talk::new(other));
        far.say(&ask).await.unwrap();
        far.say(&Word::Serving).await.unwrap();
        assert_eq!(talk.hear(limit::HANDOVER_WORD).await.unwrap(), Some(ask));
        assert_eq!(talk.hear(limit::HANDOVER_WORD).await.unwrap(), Some(Word::Serving));
        let silent = talk.hear(limit::HANDOVER_WORD).await.unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(far);
        assert_eq!(talk.hear(limit::HANDOVER_WORD).await.unwrap(), None);
        talk.gone().await;

        for bad in [b"GET / HTTP/1.1\r\n".to_vec(), b"{\"word\":\"ask\"".to_vec(), vec![b'x'; 1 << 16]] {
            let (mut talk, mut other) = pair();
            let send = async move {
                // The reader may have gone.
                let _ = other.write_all(&bad).await;
            };
            let (heard, ()) = tokio::join!(talk.hear(limit::HANDOVER_WORD), send);
            heard.unwrap_err();
        }
    }

    #[test]
    fn the_words_are_these() {
        let text = |word: &Word| serde_json::to_string(word).unwrap();
        assert_eq!(text(&Word::Ask { instance: Uid::new("a").unwrap() }), r#"{"word":"ask","instance":"a"}"#);
        assert_eq!(text(&Word::Serving), r#"{"word":"serving"}"#);
    }
}
