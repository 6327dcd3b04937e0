//! Connections to sockets of plugins, with the `:authority` that Go's grpc makes of how they are dialled.

use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Uri};

/// Pause between attempts to connect: a socket's file exists shortly before its server listens on it.
const AGAIN: Duration = Duration::from_millis(10);
const PREFACE_BYTES: usize = 24;
const FRAME_HEAD_BYTES: usize = 9;
const HEADERS: u8 = 1;
/// `:authority: localhost` as h2 encodes it the first time on a connection: a literal that goes into the table, in Huffman's code.
const LOCALHOST: [u8; 8] = [0x41, 0x86, 0xa0, 0xe4, 0x1d, 0x13, 0x9d, 0x09];

/// Connects, trying again until the deadline, as a blocking dial does. With a deadline of zero it fails however fast a plugin is.
pub async fn dial(path: &Path, deadline: Duration) -> Result<UnixStream, String> {
    if deadline.is_zero() {
        return Err(format!(
            "failed to dial {}: no time is left",
            path.display()
        ));
    }
    let end = Instant::now() + deadline;
    loop {
        match UnixStream::connect(path).await {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() + AGAIN >= end => {
                return Err(format!("failed to dial {}: {error}", path.display()));
            }
            Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}

/// A channel on one connection, and a token that is cancelled when that connection ends; it does not connect again. Its requests name
/// `localhost`, or another authority.
pub async fn channel(
    server: UnixStream,
    authority: Option<String>,
) -> Result<(Channel, CancellationToken), String> {
    let (client, theirs) = tokio::io::duplex(64 << 10);
    let lost = CancellationToken::new();
    let ended = lost.clone().drop_guard();
    tokio::spawn(async move {
        carry(theirs, server, authority).await;
        drop(ended);
    });
    let mut only = Some(client);
    let connector = tower::service_fn(move |_: Uri| {
        let stream = only
            .take()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
        std::future::ready(stream.map(TokioIo::new))
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint
        .connect_with_connector(connector)
        .await
        .map_err(|error| error.to_string())?;
    Ok((channel, lost))
}

/// The authority of a dial by the bare path: the path, percent-encoded.
pub fn of_path(path: &Path) -> Option<String> {
    Some(path.display().to_string().replace('/', "%2F"))
}

/// Ends with the connection, or with the channel.
async fn carry(client: tokio::io::DuplexStream, server: UnixStream, authority: Option<String>) {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async {
        match authority {
            Some(authority) => rename(&mut from_client, &mut to_server, &authority).await,
            None => tokio::io::copy(&mut from_client, &mut to_server)
                .await
                .map(drop),
        }
    };
    tokio::select! {
        _ = requests => {}
        _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
    }
}

/// Passes a client's frames on, with another authority in their headers.
async fn rename(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    authority: &str,
) -> io::Result<()> {
    let mut preface = [0; PREFACE_BYTES];
    from.read_exact(&mut preface).await?;
    to.write_all(&preface).await?;
    loop {
        let mut head = [0; FRAME_HEAD_BYTES];
        from.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).expect("it has 24 bits")];
        from.read_exact(&mut payload).await?;
        if head[3] == HEADERS {
            payload = renamed(payload, authority);
            let length = u32::try_from(payload.len()).expect("headers are small");
            head[..3].copy_from_slice(&length.to_be_bytes()[1..]);
        }
        to.write_all(&head).await?;
        to.write_all(&payload).await?;
    }
}

fn renamed(block: Vec<u8>, authority: &str) -> Vec<u8> {
    let Some(at) = block
        .windows(LOCALHOST.len())
        .position(|bytes| bytes == LOCALHOST)
    else {
        return block;
    };
    let mut named = block[..at].to_vec();
    // The same kind of literal, not in Huffman's code.
    named.push(LOCALHOST[0]);
    let length = authority.len();
    if length < 127 {
        named.push(u8::try_from(length).expect("it is below 127"));
    } else {
        named.push(127);
        let mut rest = length - 127;
        while rest >= 128 {
            named.push(u8::try_from(rest % 128).expect("it is below 128") | 128);
            rest /= 128;
        }
        named.push(u8::try_from(rest).expect("it is below 128"));
    }
    named.extend_from_slice(authority.as_bytes());
    named.extend_from_slice(&block[at + LOCALHOST.len()..]);
    named
}
