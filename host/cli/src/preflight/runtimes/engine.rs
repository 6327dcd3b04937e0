//! The answer to `GET /info` of Docker's API, which podman's service has as well.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Time for an answer, of which Docker's counts its containers and images.
const DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of an answer of which more are not read.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// An answer of HTTP/1.0 is in one piece, and ends with the connection.
const REQUEST: &[u8] = b"GET /info HTTP/1.0\r\nHost: localhost\r\n\r\n";

#[derive(Debug, Deserialize)]
pub(super) struct EngineInfo {
    #[serde(rename = "ServerVersion")]
    pub(super) version: String,
    /// The directories that Docker reads; none with CDI off, and before 25.
    #[serde(rename = "CDISpecDirs")]
    pub(super) cdi_spec_dirs: Option<Vec<PathBuf>>,
    #[serde(rename = "Runtimes")]
    pub(super) runtimes: Option<BTreeMap<String, IgnoredAny>>,
    #[serde(rename = "DefaultRuntime")]
    pub(super) default_runtime: Option<String>,
    #[serde(rename = "BuildahVersion")]
    buildah: Option<String>,
}

impl EngineInfo {
    /// Returns whether the answer is podman's, which may have a link at Docker's path.
    pub(super) fn is_podman(&self) -> bool {
        self.buildah.is_some()
    }
}

/// Asks the service that listens on a socket.
pub(super) async fn info(socket: &Path) -> Result<EngineInfo> {
    let answer = timeout(DEADLINE, ask(socket))
        .await
        .with_context(|| format!("no answer within {DEADLINE:?}"))??;
    parse(&answer)
}

async fn ask(socket: &Path) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(REQUEST).await?;
    let mut answer = Vec::new();
    stream
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .await?;
    Ok(answer)
}

fn parse(answer: &[u8]) -> Result<EngineInfo> {
    let answer = std::str::from_utf8(answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the answer is not HTTP")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(
        status.split(' ').nth(1) == Some("200"),
        "the answer is {status:?}"
    );
    serde_json::from_str(body).context("the answer is not that of Docker")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use tokio::net::UnixListener;

    /// Answers one request on a socket with a body.
    pub(in super::super) fn serve(socket: &Path, body: &str) {
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let listener = UnixListener::bind(socket).unwrap();
        let answer = format!("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{body}");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; REQUEST.len()];
            stream.read_exact(&mut request).await.unwrap();
            assert_eq!(request, REQUEST);
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
    }

    #[test]
    fn only_infos_are_answers() {
        let of_podman =
            "HTTP/1.0 200 OK\r\n\r\n{\"ServerVersion\":\"5.4.2\",\"BuildahVersion\":\"1.39\"}";
        assert!(parse(of_podman.as_bytes()).unwrap().is_podman());
        let of_docker = "HTTP/1.0 200 OK\r\n\r\n{\"ServerVersion\":\"26.1.5\",\"CDISpecDirs\":null,\"Runtimes\":{\"runc\":{\"path\":\"runc\"}}}";
        let info = parse(of_docker.as_bytes()).unwrap();
        assert!(
            !info.is_podman() && info.cdi_spec_dirs.is_none(),
            "{info:?}"
        );
        for (answer, words) in [
            ("", "not HTTP"),
            ("HTTP/1.0 500 Oh\r\n\r\n{}", "500 Oh"),
            ("HTTP/1.0 200 OK\r\n\r\n{}", "not that of Docker"),
        ] {
            let error = parse(answer.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "{answer}: {error}");
        }
    }
}
