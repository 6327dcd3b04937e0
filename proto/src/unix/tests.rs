//! Tests with clients' bytes and a real HTTP/2 server.

mod generated;

use std::sync::{Arc, Mutex, Once};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::mpsc;

use super::frames::Inbound;
use super::hpack::{Decoder, Malformed, literal};
use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0x0;
const HEADERS: u8 = 0x1;
const PRIORITY_FRAME: u8 = 0x2;
const SETTINGS: u8 = 0x4;
const PUSH_PROMISE: u8 = 0x5;
const PING: u8 = 0x6;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

const GO: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fgpu-reg.sock";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A field that the decoder must add to its table.
fn remembered(name: &str, value: &str) -> Vec<u8> {
    let mut block = Vec::new();
    literal(name.as_bytes(), value.as_bytes(), &mut block);
    block[0] = 0x40;
    block
}

fn plain(name: &str, value: &str) -> Vec<u8> {
    let mut block = Vec::new();
    literal(name.as_bytes(), value.as_bytes(), &mut block);
    block
}

/// POST, http and a path by the static table, and an authority.
fn request(authority: &str) -> Vec<u8> {
    [
        &[0x83, 0x86, 0x84][..],
        &remembered(":authority", authority),
    ]
    .concat()
}

fn headers(stream: u32, block: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, stream, block)
}

fn opening() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

/// The bytes that the server reads.
fn rewritten(input: &[u8]) -> Result<Vec<u8>, Violation> {
    let (mut inbound, mut out) = (Inbound::default(), BytesMut::new());
    feed(&mut inbound, input, &mut out)?;
    Ok(out.to_vec())
}

fn feed(inbound: &mut Inbound, mut chunk: &[u8], out: &mut BytesMut) -> Result<(), Violation> {
    while !chunk.is_empty() {
        let taken = inbound.take(chunk, out)?;
        assert!(taken > 0);
        chunk = &chunk[taken..];
    }
    Ok(())
}

fn violation(frames: &[Vec<u8>]) -> Violation {
    rewritten(&[opening(), frames.concat()].concat()).unwrap_err()
}

#[derive(Debug)]
struct ReceivedRequest {
    request: Request<()>,
    body: usize,
    trailers: Option<HeaderMap>,
}

impl ReceivedRequest {
    fn authority(&self) -> &str {
        self.request.uri().authority().unwrap().as_str()
    }

    fn header(&self, name: &str) -> &str {
        self.request.headers()[name].to_str().unwrap()
    }
}

/// A client of a server that returns what it reads.
struct Client {
    stream: DuplexStream,
    seen: mpsc::UnboundedReceiver<ReceivedRequest>,
}

impl Client {
    fn new() -> Self {
        let (stream, server) = duplex(1 << 20);
        let (tell, seen) = mpsc::unbounded_channel();
        tokio::spawn(serve(Connection::new(server), tell));
        Self { stream, seen }
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    async fn begin(bytes: &[u8]) -> Self {
        let mut client = Self::new();
        client.send(&[&opening(), bytes].concat()).await;
        client
    }

    async fn saw(&mut self) -> ReceivedRequest {
        self.seen.recv().await.expect("the server goes on")
    }

    /// Reads the rest of the server's bytes, until it closes.
    async fn ended(mut self) -> Vec<u8> {
        let mut said = Vec::new();
        self.stream.read_to_end(&mut said).await.unwrap();
        said
    }
}

async fn serve<S>(connection: Connection<S>, tell: mpsc::UnboundedSender<ReceivedRequest>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Ok(mut server) = h2::server::handshake(connection).await else {
        return;
    };
    while let Some(Ok((request, mut respond))) = server.accept().await {
        let tell = tell.clone();
        tokio::spawn(async move {
            let (parts, mut stream) = request.into_parts();
            let mut body = 0;
            while let Some(data) = stream.data().await {
                let Ok(data) = data else { return };
                body += data.len();
                let _ = stream.flow_control().release_capacity(data.len());
            }
            let Ok(trailers) = stream.trailers().await else {
                return;
            };
            let _ = respond.send_response(Response::new(()), true);
            let _ = tell.send(ReceivedRequest {
                request: Request::from_parts(parts, ()),
                body,
                trailers,
            });
        });
    }
}

#[tokio::test]
async fn invalid_authorities_become_localhost() {
    for authority in [GO, "/run/kubelet.sock", "", "a b", "%", "\u{fc}ber"] {
        let mut client = Client::begin(&headers(1, &request(authority))).await;
        let seen = client.saw().await;
        assert_eq!(seen.authority(), "localhost", "{authority:?}");
        assert_eq!(
            (seen.request.method().as_str(), seen.request.uri().path()),
            ("POST", "/")
        );
    }
}

#[tokio::test]
async fn valid_or_missing_authority_is_kept() {
    for authority in ["localhost", "example.com:8443", "[::1]:50051", "user@host"] {
        let mut client = Client::begin(&headers(1, &request(authority))).await;
        assert_eq!(client.saw().await.authority(), authority);
    }
    let mut client = Client::begin(&headers(
        1,
        &[&[0x83, 0x86, 0x84][..], &plain("host", "a")].concat(),
    ))
    .await;
    let seen = client.saw().await;
    assert_eq!(
        (seen.request.uri().authority(), seen.header("host")),
        (None, "a")
    );
}

/// Checks `h2` without the wrapper. If this fails one day, `h2` accepts such authorities and the wrapper can be removed.
#[tokio::test]
async fn h2_alone_refuses_them() {
    let (mut stream, server) = duplex(1 << 20);
    stream
        .write_all(&[opening(), headers(1, &request(GO))].concat())
        .await
        .unwrap();
    let mut server = h2::server::Builder::new()
        .handshake::<_, Bytes>(server)
        .await
        .unwrap();
    tokio::spawn(async move { while server.accept().await.is_some() {} });
    let reset = frame(0x3, 0, 1, &1_u32.to_be_bytes());
    let mut said = Vec::new();
    while !said.windows(reset.len()).any(|bytes| bytes == reset) {
        assert!(stream.read_buf(&mut said).await.unwrap() > 0, "{said:x?}");
    }
}

#[tokio::test]
async fn later_requests_use_the_dynamic_table() {
    // Fields 62 and 63 are those that the first request added to the table.
    let first = [request(GO), remembered("user-agent", "grpc-go/1.85.0")].concat();
    let second = [0x83, 0x86, 0x84, 0xbf, 0xbe];
    // By the name of the dynamic table alone, and once more as a whole.
    let third = [&[0x83, 0x86, 0x84, 0x7f, 0x00][..], &[2], b"/x"].concat();
    let fourth = [0x83, 0x86, 0x84, 0xbe, 0xbf];
    let frames = [
        headers(1, &first),
        headers(3, &second),
        headers(5, &third),
        headers(7, &fourth),
    ];
    let mut client = Client::begin(&frames.concat()).await;
    for agent in [true, true, false, true] {
        let seen = client.saw().await;
        assert_eq!(seen.authority(), "localhost");
        assert_eq!(seen.request.headers().contains_key("user-agent"), agent);
    }
}

#[tokio::test]
async fn client_may_resize_its_table() {
    let resized = [&[0x20, 0x3f, 0xe1, 0x1f][..], &request("/b")].concat();
    let frames = [
        headers(1, &request(GO)),
        headers(3, &resized),
        headers(5, &[0x83, 0x86, 0x84, 0xbe]),
    ];
    let mut client = Client::begin(&frames.concat()).await;
    for _ in 0..3 {
        assert_eq!(client.saw().await.authority(), "localhost");
    }
}

#[tokio::test]
async fn header_block_may_be_fragmented() {
    let block = request(GO);
    let (a, rest) = block.split_at(5);
    let (b, c) = rest.split_at(7);
    let padded = [&[3][..], a, &[0; 3]].concat();
    let both = [&[4, 0, 0, 0, 0, 16][..], a, &[0; 4]].concat();
    let priority = [&[0, 0, 0, 0, 16][..], a].concat();
    let firsts = [
        (0, a),
        (PADDED, &padded[..]),
        (PRIORITY, &priority[..]),
        (PADDED | PRIORITY, &both[..]),
    ];
    for (flags, first) in firsts {
        let frames = [
            frame(HEADERS, flags | END_STREAM, 1, first),
            frame(CONTINUATION, 0, 1, b),
            frame(CONTINUATION, 0, 1, &[]),
            frame(CONTINUATION, END_HEADERS, 1, c),
        ];
        let mut client = Client::begin(&frames.concat()).await;
        assert_eq!(client.saw().await.authority(), "localhost", "{flags:#x}");
    }
}

#[tokio::test]
async fn padding_may_be_all_there_is() {
    let frames = [
        frame(HEADERS, END_STREAM | PADDED, 1, &[2, 0, 0]),
        frame(CONTINUATION, END_HEADERS, 1, &request(GO)),
    ];
    let mut client = Client::begin(&frames.concat()).await;
    assert_eq!(client.saw().await.authority(), "localhost");
}

#[tokio::test]
async fn interleaved_bodies_and_trailers_arrive() {
    let trailers = remembered("grpc-status", "0");
    let frames = [
        frame(HEADERS, END_HEADERS, 1, &request(GO)),
        frame(PING, 0, 0, &[7; 8]),
        frame(HEADERS, END_HEADERS, 3, &[0x83, 0x86, 0x84, 0xbe]),
        frame(DATA, 0, 1, &[1; 10_000]),
        frame(DATA, PADDED, 3, &[[5].as_slice(), &[3; 25]].concat()),
        frame(PRIORITY_FRAME, 0, 3, &[0, 0, 0, 0, 1]),
        frame(DATA, 0, 1, &[1; 5000]),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &trailers),
        frame(DATA, END_STREAM, 3, &[]),
    ];
    let mut client = Client::begin(&frames.concat()).await;
    let first = client.saw().await;
    assert_eq!(
        (
            first.body,
            first.trailers.unwrap()["grpc-status"].to_str().unwrap()
        ),
        (15_000, "0")
    );
    let second = client.saw().await;
    assert_eq!(
        (second.body, second.trailers, second.request.uri().host()),
        (20, None, Some("localhost"))
    );
}

#[tokio::test]
async fn bytes_may_come_one_by_one() {
    let frames = [
        frame(HEADERS, END_HEADERS, 1, &request(GO)),
        frame(DATA, 0, 1, b"hello"),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &plain("a", "b")),
    ];
    let mut client = Client::new();
    for byte in [opening(), frames.concat()].concat() {
        client.send(&[byte]).await;
        tokio::task::yield_now().await;
    }
    let seen = client.saw().await;
    assert_eq!(
        (seen.authority(), seen.body, seen.trailers.is_some()),
        ("localhost", 5, true)
    );
}

#[tokio::test]
async fn header_list_of_several_frames_arrives() {
    let value = "v".repeat(12_000);
    let block = [
        request(GO),
        plain("a", &value),
        plain("b", &value),
        plain("c", &value),
        plain("d", &value),
    ];
    let block = block.concat();
    // More pieces than `h2` itself would take.
    let mut frames = vec![frame(HEADERS, END_STREAM, 1, &[])];
    frames.extend(
        block
            .chunks(1000)
            .map(|chunk| frame(CONTINUATION, 0, 1, chunk)),
    );
    frames.push(frame(CONTINUATION, END_HEADERS, 1, &[]));
    let mut client = Client::begin(&frames.concat()).await;
    let seen = client.saw().await;
    assert_eq!(seen.authority(), "localhost");
    assert!(
        ["a", "b", "c", "d"]
            .iter()
            .all(|name| seen.header(name) == value)
    );
}

#[tokio::test]
async fn large_message_is_not_buffered() {
    let (mut client, server) = duplex(64 << 10);
    let mut connection = Connection::new(server);
    let bytes = [
        opening(),
        frame(HEADERS, END_HEADERS, 1, &request(GO)),
        frame(DATA, 0, 1, &[9; 16_384]),
    ]
    .concat();
    let mut buffer = vec![0; 32 << 10];
    client.write_all(&bytes).await.unwrap();
    let mut read = 0;
    while read < bytes.len() - GO.len() {
        read += connection.read(&mut buffer).await.unwrap();
    }
    for _ in 0..100 {
        client
            .write_all(&frame(DATA, 0, 1, &[9; 16_384]))
            .await
            .unwrap();
        let length = connection.read(&mut buffer).await.unwrap();
        assert_eq!(length, 9 + 16_384);
        assert_eq!(
            (connection.held.capacity(), connection.ready.capacity()),
            (0, 0)
        );
    }
}

#[test]
fn frames_without_headers_pass_unchanged() {
    let frames = [
        frame(DATA, END_STREAM, 1, &[0; 300]),
        frame(PING, 0, 0, &[1; 8]),
        frame(0xbb, 0x7f, 5, b"?"),
    ];
    let input = [opening(), frames.concat()].concat();
    assert_eq!(Inbound::default().passing(&input), Ok(input.len()));
    assert_eq!(rewritten(&input).unwrap(), input);
}

#[test]
fn frame_violations_are_named() {
    assert_eq!(
        rewritten(b"GET / HTTP/1.1\r\n").unwrap_err(),
        Violation::NotHttp2
    );
    assert_eq!(
        violation(&[frame(CONTINUATION, 0, 1, &[])]),
        Violation::StrayContinuation
    );
    assert_eq!(
        violation(&[headers(1, &[0x82]), frame(CONTINUATION, 0, 1, &[])]),
        Violation::StrayContinuation
    );
    assert_eq!(
        violation(&[frame(HEADERS, END_HEADERS, 0, &[0x82])]),
        Violation::NoStream
    );
    assert_eq!(
        violation(&[frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2])]),
        Violation::PushPromise
    );
    let open = frame(HEADERS, 0, 1, &[0x82]);
    for kind in [DATA, HEADERS, SETTINGS, PUSH_PROMISE, 0xbb] {
        let within = frame(kind, 0, 1, &[]);
        assert_eq!(
            violation(&[open.clone(), within]),
            Violation::BlockInterrupted(kind)
        );
    }
    let foreign = frame(CONTINUATION, END_HEADERS, 3, &[]);
    assert_eq!(
        violation(&[open, foreign]),
        Violation::BlockInterrupted(CONTINUATION)
    );
}

#[test]
fn invalid_padding_and_priority_are_named() {
    let short = [
        frame(HEADERS, END_HEADERS | PADDED, 1, &[]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[1]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[3, 0x82, 0]),
        frame(HEADERS, END_HEADERS | PRIORITY, 1, &[0; 4]),
        frame(
            HEADERS,
            END_HEADERS | PADDED | PRIORITY,
            1,
            &[1, 0, 0, 0, 0, 0],
        ),
    ];
    for frame in short {
        assert_eq!(
            violation(std::slice::from_ref(&frame)),
            Violation::HeadersTooShort,
            "{frame:x?}"
        );
    }
}

#[test]
fn bad_compression_is_named() {
    assert_eq!(
        violation(&[headers(1, &[0xbe])]),
        Malformed::Index(62).into()
    );
    assert_eq!(
        violation(&[headers(1, &[0x00, 0x05])]),
        Malformed::Cut.into()
    );
}

#[test]
fn header_blocks_and_lists_are_bounded() {
    // One large frame is refused before its payload arrives.
    let large = &frame(HEADERS, END_HEADERS, 1, &vec![0; 70_000])[..9];
    assert_eq!(violation(&[large.to_vec()]), Violation::BlockTooLarge);
    let mut endless = vec![frame(HEADERS, 0, 1, &[])];
    endless.extend((0..10_000).map(|_| frame(CONTINUATION, 0, 1, &[])));
    assert_eq!(violation(&endless), Violation::BlockTooLarge);
    // A few bytes that expand to many: an entry of 4000 bytes, referenced a hundred times.
    let bomb = [remembered("a", &"x".repeat(4000)), vec![0xbe; 100]].concat();
    assert_eq!(violation(&[headers(1, &bomb)]), Violation::ListTooLarge);
}

/// Many small requests that each expand to a large one, without a reader.
#[tokio::test]
async fn slow_server_bounds_memory_use() {
    let (mut client, server) = duplex(1 << 20);
    let mut connection = Connection::new(server);
    let first = headers(1, &remembered("a", &"x".repeat(4000)));
    let mut bytes = [opening(), first].concat();
    for stream in 1..5000 {
        bytes.extend(headers(2 * stream + 1, &[0xbe; 15]));
    }
    client.write_all(&bytes).await.unwrap();
    let mut buffer = vec![0; 32 << 10];
    for _ in 0..200 {
        let read = connection.read(&mut buffer).await.unwrap();
        assert!(read > 0);
        let waiting = connection.held.len() + connection.ready.len();
        assert!(
            waiting <= (32 << 10) + READY_BYTES + (64 << 10),
            "{waiting}"
        );
    }
}

#[tokio::test]
async fn violation_closes_connection_after_earlier_requests() {
    let frames = [headers(1, &request(GO)), frame(CONTINUATION, 0, 1, &[])];
    let mut client = Client::begin(&frames.concat()).await;
    // The request gets no response: the client is gone.
    client.seen.close();
    client.ended().await;
}

/// A subscriber for one thread that records log lines.
fn log() -> (Arc<Mutex<Vec<u8>>>, tracing::subscriber::DefaultGuard) {
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    // Without a subscriber of all threads, a log line that another thread writes first may be switched off for this thread too.
    static OF_ALL_THREADS: Once = Once::new();
    OF_ALL_THREADS.call_once(|| {
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
    });
    let text = Arc::new(Mutex::new(Vec::new()));
    let sink = text.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || Sink(sink.clone()))
        .finish();
    (text, tracing::subscriber::set_default(subscriber))
}

#[tokio::test]
async fn violation_is_logged_once() {
    let (text, _guard) = log();
    let (mut client, server) = UnixStream::pair().unwrap();
    let mut connection = Connection::from(server);
    client
        .write_all(&[opening(), frame(CONTINUATION, 0, 1, &[])].concat())
        .await
        .unwrap();
    let mut read = Vec::new();
    for _ in 0..3 {
        let error = connection.read_to_end(&mut read).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    assert_eq!(read, opening());
    let text = String::from_utf8(text.lock().unwrap().clone()).unwrap();
    let (pid, uid) = (std::process::id(), connection.peer.unwrap().uid());
    let line = format!(
        "connection closed: not proper http/2 peer_pid={pid} peer_uid={uid} reason=CONTINUATION without HEADERS before it"
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(&line), "{text}");
}

#[tokio::test]
async fn client_may_end_within_a_frame() {
    let (mut client, server) = duplex(1024);
    let mut connection = Connection::new(server);
    client
        .write_all(&[&opening(), &headers(1, &request(GO))[..20]].concat())
        .await
        .unwrap();
    client.shutdown().await.unwrap();
    let mut read = Vec::new();
    connection.read_to_end(&mut read).await.unwrap();
    assert_eq!(read, opening());
}

#[tokio::test]
async fn accepted_connections_keep_their_credentials() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.sock");
    let mut incoming = incoming(UnixListener::bind(&path).unwrap());
    let _client = UnixStream::connect(&path).await.unwrap();
    let Some(Ok(connection)) = tokio_stream::StreamExt::next(&mut incoming).await else {
        unreachable!()
    };
    let peer = connection.connect_info().peer_cred.unwrap();
    assert_eq!(peer.pid(), i32::try_from(std::process::id()).ok());
}

#[test]
fn the_rewritten_block_needs_no_table() {
    let output = rewritten(
        &[
            opening(),
            headers(1, &request(GO)),
            headers(3, &[0x83, 0xbe]),
        ]
        .concat(),
    )
    .unwrap();
    let blocks = &output[opening().len()..];
    let first_length = usize::from(blocks[2]) + usize::from(blocks[1]) * 256;
    let second = &blocks[9 + first_length + 9..];
    let mut fields = Vec::new();
    // With a decoder without state.
    let decoded = Decoder::default().decode(second, |name, value| {
        fields.push((name.to_vec(), value.to_vec()));
        Ok::<_, Malformed>(())
    });
    decoded.unwrap();
    assert_eq!(
        fields,
        [
            (b":method".to_vec(), b"POST".to_vec()),
            (b":authority".to_vec(), b"localhost".to_vec())
        ]
    );
}
