//! Answers of bounded size, as JSON.

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

use super::error::{ApiError, described};
use nodedock_base::error::chain;
use nodedock_model::limit;

/// The whole body.
pub(super) async fn collect(mut body: Body, bytes_max: usize) -> Result<Bytes, ApiError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| ApiError::unavailable(format!("half an answer came: {}", spoken(error))))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > bytes_max {
            return Err(ApiError::NotAnswer(format!("its answer has more than {bytes_max} bytes")));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// What a body says; an object, as everything that an API server answers with success.
pub(super) fn object(content_type: &str, body: &[u8]) -> Result<Value, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(Value::Object(fields)),
        Ok(_) => Err(ApiError::NotAnswer(described(content_type, body))),
        Err(error) => {
            Err(ApiError::NotAnswer(format!("{} and is no JSON: {error}", described(content_type, body))))
        }
    }
}

/// A page of a list.
#[derive(Debug, PartialEq)]
pub(super) struct Page {
    pub(super) items: Vec<Value>,
    pub(super) resource_version: String,
    /// What asks for the next page.
    pub(super) next: Option<String>,
}

pub(super) fn page(mut list: Value) -> Result<Page, ApiError> {
    let meta = |name: &str| list.get("metadata").and_then(|meta| meta.get(name)).and_then(Value::as_str);
    let Some(resource_version) = meta("resourceVersion").filter(|version| !version.is_empty()) else {
        return Err(ApiError::NotAnswer("a list without metadata.resourceVersion".to_owned()));
    };
    let resource_version = resource_version.to_owned();
    let next = meta("continue").filter(|next| !next.is_empty()).map(str::to_owned);
    match list.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => Ok(Page { items, resource_version, next }),
        // Go writes an empty list so, now and then.
        Some(Value::Null) => Ok(Page { items: Vec::new(), resource_version, next }),
        _ => Err(ApiError::NotAnswer("a list without items".to_owned())),
    }
}

/// A client's error in words, without those that say only that it is one.
pub(super) fn spoken(error: kube::Error) -> String {
    let words = match &error {
        kube::Error::Service(cause) => chain(cause.as_ref()),
        other => chain(other),
    };
    let words = words.strip_prefix("client error (Connect): ").unwrap_or(&words);
    nodedock_base::printable::one_line(words, limit::API_WORDS_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_an_object_is_an_answer() {
        assert_eq!(object("application/json", b"{\"a\":1}"), Ok(json!({"a": 1})));
        let wrong = [
            (&b""[..], "an empty answer"),
            (b"[]", "begins \"[]\""),
            (b"{\"a\":", "is no JSON"),
            (b"<!DOCTYPE html><html>", "is there a proxy"),
            (b"\xff\xfe", "is no JSON"),
        ];
        for (body, words) in wrong {
            let Err(ApiError::NotAnswer(said)) = object("application/json", body) else { panic!("{body:?}") };
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn a_list_of_another_depth_than_a_parser_takes_is_refused() {
        let deep = format!("{{\"a\":{}", "[".repeat(100_000));
        assert!(matches!(object("application/json", deep.as_bytes()), Err(ApiError::NotAnswer(_))));
    }

    #[test]
    fn a_page_has_items_and_a_resource_version() {
        let meta = json!({"resourceVersion": "7", "continue": ""});
        let nothing = Page { items: vec![], resource_version: "7".to_owned(), next: None };
        assert_eq!(page(json!({"metadata": meta, "items": null})), Ok(nothing));
        let next = json!({"resourceVersion": "7", "continue": "abc"});
        let some = page(json!({"metadata": next, "items": [{}]})).unwrap();
        assert_eq!((some.items.len(), some.next.as_deref()), (1, Some("abc")));
        for wrong in [
            json!({}),
            json!({"metadata": meta}),
            json!({"metadata": {}, "items": []}),
            json!({"metadata": meta, "items": {}}),
        ] {
            assert!(page(wrong).is_err());
        }
    }
}
