//! Requests without a connection.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use serde_json::Value;

use crate::api_server::{ApiServer, Broken};

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) code: u16,
    pub(super) headers: http::HeaderMap,
    pub(super) text: String,
    pub(super) body: Value,
}

/// The answer to a watch.
pub(super) struct Lines {
    pub(super) code: u16,
    headers: http::HeaderMap,
    body: UnsyncBoxBody<Bytes, Broken>,
    rest: String,
}

impl Lines {
    /// The next event; `None` at the end, or when the connection breaks.
    pub(super) async fn next(&mut self) -> Option<Value> {
        while !self.rest.contains('\n') {
            let data = self.body.frame().await?.ok()?.into_data().unwrap();
            self.rest += std::str::from_utf8(&data).unwrap();
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
        (
            text(&event["type"]),
            text(&event["object"]["metadata"]["name"]),
        )
    }
}

#[derive(Clone, Copy)]
pub(super) struct Asking<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) kind: &'a str,
    pub(super) accept: &'a str,
    pub(super) token: &'a str,
    pub(super) body: &'a str,
}

impl<'a> Asking<'a> {
    pub(super) fn get(path: &'a str) -> Self {
        Self {
            method: "GET",
            path,
            kind: "",
            accept: "",
            token: "",
            body: "",
        }
    }
}

/// `None` if the connection breaks before an answer.
async fn open(server: &ApiServer, asking: &Asking<'_>) -> Option<Lines> {
    let request = http::Request::builder()
        .method(asking.method)
        .uri(asking.path)
        .header("authorization", format!("Bearer {}", asking.token))
        .header("accept", asking.accept)
        .header("content-type", asking.kind)
        .body(Full::from(asking.body.to_owned()))
        .unwrap();
    let (head, body) = server.handle(request).await.ok()?.into_parts();
    Some(Lines {
        code: head.status.as_u16(),
        headers: head.headers,
        body,
        rest: String::new(),
    })
}

/// A whole answer; `None` if none comes, or not all of it.
pub(super) async fn try_ask(server: &ApiServer, asking: &Asking<'_>) -> Option<Answer> {
    let Lines {
        code,
        headers,
        body,
        ..
    } = open(server, asking).await?;
    let text = String::from_utf8(body.collect().await.ok()?.to_bytes().to_vec()).unwrap();
    let body = serde_json::from_str(&text).unwrap_or(Value::Null);
    Some(Answer {
        code,
        headers,
        text,
        body,
    })
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
    let text = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let asking = Asking {
        method,
        kind,
        body: &text,
        ..Asking::get(path)
    };
    try_ask(server, &asking)
        .await
        .unwrap_or_else(|| panic!("no answer to {method} {path}"))
}

pub(super) async fn get(server: &ApiServer, path: &str) -> Answer {
    send(server, "GET", path, &Value::Null).await
}

pub(super) async fn watch(server: &ApiServer, path: &str) -> Lines {
    open(server, &Asking::get(path))
        .await
        .expect("a watch begins")
}
