//! `nodedockd probe`: the client of a pod's liveness and readiness probes, for an image without a shell.

use std::io;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::admin::http::ADMIN_CONNECTION_WALL;
use nodedock_base::paths::Paths;
use nodedock_base::printable::one_line;
use nodedock_command::{CommandError, Location, output};
use nodedock_model::Uid;

/// The most bytes of an answer, which has a line for each driver that is not ready.
const ANSWER_BYTES_MAX: u64 = 256 << 10;
/// The most bytes of the line that is printed.
const LINE_BYTES_MAX: usize = 1024;

#[derive(Args)]
pub(crate) struct ProbeArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Clone)]
enum What {
    /// Checks that every part of the daemon responds
    Live(ProbeSocket),
    /// Checks that the drivers that existed at its start are loaded, and registered where they have to be
    Ready(ProbeSocket),
}

#[derive(Args, Clone)]
struct ProbeSocket {
    /// The daemon's admin socket, where it is not ROOT/run/nodedock/admin.sock
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
    /// The instance, where there are several on one root: each has an admin socket of its own
    #[arg(long, value_name = "UID", env = "NODEDOCK_INSTANCE_UID")]
    instance_uid: Option<Uid>,
}

impl ProbeSocket {
    fn path(self, location: &Location) -> PathBuf {
        let paths = Paths::below(&location.root);
        self.admin_socket
            .or_else(|| self.instance_uid.map(|uid| paths.probes_of(&uid)))
            .unwrap_or(paths.admin)
    }
}

pub(crate) async fn run(location: &Location, args: ProbeArgs) -> Result<()> {
    let (path, socket) = match args.what {
        What::Live(socket) => ("/livez", socket.path(location)),
        What::Ready(socket) => ("/readyz", socket.path(location)),
    };
    let unreachable = |error: io::Error| CommandError::Unreachable {
        socket: socket.clone(),
        source: error.into(),
    };
    let answer = timeout(ADMIN_CONNECTION_WALL, get(&socket, path)).await;
    let answer = answer
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        .map_err(unreachable)?;
    let Some((status, text)) = parse(&answer) else {
        let error = io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP");
        return Err(unreachable(error).into());
    };
    output::print_text(&one_line(&text, LINE_BYTES_MAX))?;
    CommandError::unless_done(status == 200)
}

async fn get(socket: &std::path::Path, path: &str) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: nodedock\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .await?;
    Ok(answer)
}

/// Returns the status and the lines of an answer, joined.
fn parse(answer: &[u8]) -> Option<(u16, String)> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let lines: Vec<_> = body
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    Some((status, lines.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_response_is_parsed() {
        let ok = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nok\n";
        assert_eq!(parse(ok), Some((200, "ok".to_owned())));
        let wrong = b"HTTP/1.1 503 Service Unavailable\r\n\r\na is loading\nb is not registered\n";
        assert_eq!(
            parse(wrong),
            Some((503, "a is loading; b is not registered".to_owned()))
        );
        for bad in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 \xff\xff\xff\xff\r\n\r\n",
            b"SSH-2.0\r\n\r\n",
        ] {
            assert_eq!(parse(bad), None);
        }
    }

    #[test]
    fn each_instance_has_its_probe_socket() {
        let location = Location {
            root: "/r".into(),
            socket: None,
        };
        let of = |admin_socket: Option<&str>, uid: Option<&str>| {
            let instance_uid = uid.map(|uid| Uid::new(uid).unwrap());
            ProbeSocket {
                admin_socket: admin_socket.map(Into::into),
                instance_uid,
            }
            .path(&location)
        };
        assert_eq!(of(None, None), PathBuf::from("/r/run/nodedock/admin.sock"));
        assert_eq!(
            of(None, Some("u-1")),
            PathBuf::from("/r/run/nodedock/admin-u-1.sock")
        );
        assert_eq!(of(Some("/a"), Some("u-1")), PathBuf::from("/a"));
    }
}
