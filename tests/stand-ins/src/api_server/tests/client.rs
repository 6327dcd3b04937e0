//! As little of an HTTP client as shows every byte of an answer.

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::api_server::ApiServer;

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) code: u16,
    pub(super) headers: String,
    pub(super) text: String,
    pub(super) body: Value,
}

/// An answer that goes on.
pub(super) struct Lines {
    pub(super) code: u16,
    headers: String,
    reader: BufReader<TcpStream>,
    rest: String,
}

impl Lines {
    /// The next piece of a chunked body, or everything of one with a length; `None` at its end or when the connection breaks.
    async fn piece(&mut self) -> Option<String> {
        let length = self.headers.lines().find_map(|line| line.strip_prefix("content-length: "));
        if let Some(length) = length {
            let mut bytes = vec![0; length.parse().unwrap()];
            self.headers.clear();
            self.reader.read_exact(&mut bytes).await.ok()?;
            return Some(String::from_utf8(bytes).unwrap());
        }
        let mut size = String::new();
        self.reader.read_line(&mut size).await.ok()?;
        let size = usize::from_str_radix(size.trim(), 16).ok().filter(|size| *size > 0)?;
        let mut bytes = vec![0; size + 2];
        self.reader.read_exact(&mut bytes).await.ok()?;
        Some(String::from_utf8(bytes[..size].to_vec()).unwrap())
    }

    /// The next event of a watch.
    pub(super) async fn next(&mut self) -> Option<Value> {
        while !self.rest.contains('\n') {
            let piece = self.piece().await?;
            self.rest += &piece;
        }
        let (line, rest) = self.rest.split_once('\n').unwrap();
        let line = serde_json::from_str(line).unwrap();
        self.rest = rest.to_owned();
        Some(line)
    }

    /// The type and the name of the next event.
    pub(super) async fn next_name(&mut self) -> (String, String) {
        let event = self.next().await.expect("the watch goes on");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&event["type"]), text(&event["object"]["metadata"]["name"]))
    }
}

pub(super) struct Asking<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) kind: &'a str,
    pub(super) token: &'a str,
    pub(super) body: &'a str,
}

/// `None` if the connection is refused, or breaks before an answer.
pub(super) async fn open(server: &ApiServer, asking: &Asking<'_>) -> Option<Lines> {
    let Asking { method, path, kind, token, body } = asking;
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.ok()?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: stand-in\r\nConnection: close\r\nUser-Agent: tests/1.0\r\n\
         Authorization: Bearer {token}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut reader = BufReader::new(stream);
    let mut headers = String::new();
    while !headers.ends_with("\r\n\r\n") {
        if reader.read_line(&mut headers).await.ok()? == 0 {
            return None;
        }
    }
    let headers = headers.replace("\r\n", "\n");
    let code = headers.split(' ').nth(1).unwrap().parse().unwrap();
    Some(Lines { code, headers, reader, rest: String::new() })
}

/// A whole answer; `None` if none comes, or not all of it.
pub(super) async fn try_ask(server: &ApiServer, asking: &Asking<'_>) -> Option<Answer> {
    let mut lines = open(server, asking).await?;
    let headers = lines.headers.clone();
    let text = lines.piece().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::Null);
    Some(Answer { code: lines.code, headers, text, body })
}

pub(super) async fn send(server: &ApiServer, method: &str, path: &str, body: &Value) -> Answer {
    send_as(server, method, path, "application/json", body).await
}

pub(super) async fn send_as(
    server: &ApiServer,
    method: &str,
    path: &str,
    kind: &str,
    body: &Value,
) -> Answer {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let asking = Asking { method, path, kind, token: "", body: &text };
    try_ask(server, &asking).await.unwrap_or_else(|| panic!("no answer to {method} {path}"))
}

pub(super) async fn get(server: &ApiServer, path: &str) -> Answer {
    send(server, "GET", path, &Value::Null).await
}

pub(super) async fn watch(server: &ApiServer, path: &str) -> Lines {
    open(server, &Asking { method: "GET", path, kind: "", token: "", body: "" })
        .await
        .expect("a watch begins")
}
