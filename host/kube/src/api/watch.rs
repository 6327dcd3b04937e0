//! A watch: lines of JSON, an event each.

use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

use super::answer::spoken;
use super::error::{self, ApiError};
use nodedock_model::limit;

/// What a watch tells.
#[derive(Debug, Clone, PartialEq)]
pub enum WatchEvent {
    /// It is there, new or changed.
    Applied(Value),
    /// It is gone, as it was last.
    Deleted(Value),
    /// Nothing happened up to this resource version.
    Bookmark(String),
}

impl WatchEvent {
    /// Where a watch that goes on from here begins.
    pub fn resource_version(&self) -> Option<&str> {
        match self {
            Self::Applied(object) | Self::Deleted(object) => {
                object.get("metadata")?.get("resourceVersion")?.as_str().filter(|version| !version.is_empty())
            }
            Self::Bookmark(version) => Some(version),
        }
    }
}

/// An open watch.
pub struct Watch {
    body: Body,
    lines: Lines,
    path: String,
}

impl Watch {
    pub(super) fn new(body: Body, path: String) -> Self {
        Self { body, lines: Lines::default(), path }
    }

    /// The next event. None: the server ended it, as it does every few minutes. May be given up and called again.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, ApiError> {
        loop {
            if let Some(line) = self.lines.next()? {
                if let Some(event) = event(&line, &self.path)? {
                    return Ok(Some(event));
                }
                continue;
            }
            let Ok(frame) = tokio::time::timeout(limit::WATCH_SILENCE, self.body.frame()).await else {
                let words = format!("a watch has said nothing for {} s", limit::WATCH_SILENCE.as_secs());
                return Err(ApiError::unavailable(words));
            };
            match frame {
                None if self.lines.is_empty() => return Ok(None),
                None => return Err(ApiError::unavailable("a watch ended within an event")),
                Some(Err(error)) => {
                    return Err(ApiError::unavailable(format!("a watch broke off: {}", spoken(error))));
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.lines.push(&data);
                    }
                }
            }
        }
    }
}

/// Bytes that become lines.
#[derive(Debug, Default)]
struct Lines {
    bytes: BytesMut,
    /// What is known to hold no end of a line.
    looked: usize,
}

impl Lines {
    fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    /// The next line that is not empty, without its end.
    fn next(&mut self) -> Result<Option<BytesMut>, ApiError> {
        loop {
            let Some(end) = self.bytes[self.looked..].iter().position(|byte| *byte == b'\n') else {
                self.looked = self.bytes.len();
                if self.bytes.len() > limit::API_OBJECT_BYTES_MAX {
                    let words =
                        format!("an event of a watch has more than {} bytes", limit::API_OBJECT_BYTES_MAX);
                    return Err(ApiError::NotAnswer(words));
                }
                return Ok(None);
            };
            let line = self.bytes.split_to(self.looked + end);
            self.bytes.advance(1);
            self.looked = 0;
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.bytes.trim_ascii().is_empty()
    }
}

/// What a line says. None: an event of a kind that we do not know.
fn event(line: &[u8], path: &str) -> Result<Option<WatchEvent>, ApiError> {
    let mut event = super::answer::object("application/json", line)?;
    let object = event.get_mut("object").map(Value::take);
    let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
    let Some(object) = object.filter(Value::is_object) else {
        return Err(ApiError::NotAnswer("an event of a watch has no object".to_owned()));
    };
    match kind {
        "ADDED" | "MODIFIED" => Ok(Some(WatchEvent::Applied(object))),
        "DELETED" => Ok(Some(WatchEvent::Deleted(object))),
        "BOOKMARK" => {
            let version = object.get("metadata").and_then(|meta| meta.get("resourceVersion")?.as_str());
            Ok(version.filter(|version| !version.is_empty()).map(|v| WatchEvent::Bookmark(v.to_owned())))
        }
        "ERROR" => Err(error::of_event(object, path)),
        "" => Err(ApiError::NotAnswer("an event of a watch has no type".to_owned())),
        _ => Ok(None),
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
