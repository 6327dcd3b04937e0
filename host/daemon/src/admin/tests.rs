//! The server against clients of every kind, for an instance that waits.

use std::time::Duration;

use prometheus_client::metrics::MetricType;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::*;
use crate::admin::http::{
    ADMIN_CONNECTION_WALL, ADMIN_CONNECTIONS_MAX, ADMIN_HEADERS_MAX, ADMIN_HEADERS_WALL,
};

/// A server on a socket in a directory of its own.
struct Server {
    directory: tempfile::TempDir,
    tasks: Tasks,
}

impl Server {
    fn start() -> Self {
        let (directory, tasks) = (tempfile::tempdir().unwrap(), Tasks::new());
        let listener = UnixListener::bind(directory.path().join("a.sock")).unwrap();
        tasks.spawn_until_stopped(
            "server",
            serve_front(Front::new("it starts"), listener, tasks.clone()),
        );
        Self { directory, tasks }
    }

    async fn connect(&self) -> UnixStream {
        UnixStream::connect(self.directory.path().join("a.sock"))
            .await
            .unwrap()
    }

    /// Sends these bytes and returns the response, up to the end of the connection.
    async fn ask(&self, request: &[u8]) -> String {
        let mut stream = self.connect().await;
        // The server may refuse before all is sent.
        stream.write_all(request).await.ok();
        rest(&mut stream).await
    }
}

/// A connection that is closed with bytes unread is reset, which is an end as well.
async fn rest(stream: &mut UnixStream) -> String {
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut part).await {
        answer.extend_from_slice(&part[..count]);
    }
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or_default()
}

#[tokio::test]
async fn response_closes_the_connection() {
    let server = Server::start();
    let answer = server
        .ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        .await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok\n"),
        "{answer}"
    );
    assert_eq!(
        answer.matches("200 OK").count(),
        1,
        "one request for each connection"
    );
}

#[tokio::test]
async fn starting_instance_is_live_but_unready() {
    let server = Server::start();
    for (request, expected, body) in [
        ("GET /livez", "200", "ok\n"),
        ("GET /livez?verbose=1", "200", "ok\n"),
        ("GET /readyz", "503", "it starts\n"),
        ("GET /metrics", "503", "it starts\n"),
        ("POST /livez", "405", "only GET is answered\n"),
        ("HEAD /livez", "405", ""),
        ("POST /metrics", "405", "only GET is answered\n"),
    ] {
        let answer = server
            .ask(format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
            .await;
        let (head, found) = answer.split_once("\r\n\r\n").unwrap();
        assert_eq!(
            (status(&answer), found),
            (expected, body),
            "{request}: {answer}"
        );
        let head = head.to_ascii_lowercase();
        assert!(
            head.contains("\r\ncontent-type: text/plain; charset=utf-8"),
            "{answer}"
        );
        assert_eq!(
            head.contains("\r\nallow: get\r\n"),
            expected == "405",
            "{answer}"
        );
    }
}

#[tokio::test]
async fn malformed_requests_are_refused() {
    let server = Server::start();
    let huge = format!(
        "GET /livez HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n",
        "y".repeat(1 << 20)
    );
    let many = format!(
        "GET /livez HTTP/1.1\r\n{}\r\n",
        "X: y\r\n".repeat(ADMIN_HEADERS_MAX + 1)
    );
    let long = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "y".repeat(1 << 20));
    for (request, statuses) in [
        (
            b"\x16\x03\x01\x00\xff\x00garbage\r\n\r\n".as_slice(),
            ["400", ""],
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ["400", ""]),
        (huge.as_bytes(), ["431", ""]),
        (many.as_bytes(), ["431", ""]),
        (long.as_bytes(), ["431", "414"]),
        (
            b"GET /livez HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            ["400", ""],
        ),
    ] {
        let answer = server.ask(request).await;
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]);
        assert!(statuses.contains(&status(&answer)), "{shown:?}: {answer:?}");
    }
    assert_eq!(
        status(&server.ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await),
        "200"
    );
}

#[tokio::test(start_paused = true)]
async fn unfinished_request_frees_its_connection() {
    let server = Server::start();
    let mut slow = Vec::new();
    for _ in 0..ADMIN_CONNECTIONS_MAX {
        let mut stream = server.connect().await;
        stream
            .write_all(b"GET /livez HTTP/1.1\r\nX: ")
            .await
            .unwrap();
        slow.push(stream);
    }
    let started = tokio::time::Instant::now();
    // All places are taken: this one is answered when they are cut off.
    let answer = server.ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!(status(&answer), "200");
    let waited = started.elapsed();
    assert!(
        waited >= ADMIN_HEADERS_WALL && waited < ADMIN_HEADERS_WALL * 2,
        "{waited:?}"
    );
    assert!(server.tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn trickled_request_is_cut_off() {
    let server = Server::start();
    let mut stream = server.connect().await;
    let started = tokio::time::Instant::now();
    stream
        .write_all(b"GET /livez HTTP/1.1\r\nX: ")
        .await
        .unwrap();
    while stream.write_all(b"y").await.is_ok() {
        assert!(
            started.elapsed() < ADMIN_CONNECTION_WALL * 2,
            "it is never cut off"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(
        started.elapsed() >= ADMIN_HEADERS_WALL,
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn server_stops_despite_open_clients() {
    let server = Server::start();
    let mut silent = server.connect().await;
    assert_eq!(
        status(&server.ask(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await),
        "200"
    );
    assert!(server.tasks.drain(Duration::from_secs(60)).await);
    assert_eq!(rest(&mut silent).await, "");
}

/// Names, labels and meanings are promises: a change of one is a change of the page.
#[test]
fn metrics_page_documents_every_family() {
    let row = |family: &families::Family| {
        let suffix = if matches!(family.kind, MetricType::Counter) {
            "_total"
        } else {
            ""
        };
        let labels: Vec<_> = family
            .labels
            .iter()
            .map(|label| format!("`{label}`"))
            .collect();
        let (kind, labels) = (family.kind.as_str(), labels.join(", "));
        format!(
            "| `{}{suffix}` | {kind} | {labels} | {} |",
            family.name, family.help
        )
    };
    let page = include_str!("../../../../docs/metrics.md");
    let on_page: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| `") && !line.starts_with("| `/"))
        .collect();
    let rows: Vec<_> = families::ALL.iter().map(row).collect();
    assert_eq!(
        on_page,
        rows,
        "docs/metrics.md has to have these rows:\n{}",
        rows.join("\n")
    );
}
