//! Watches.

use std::sync::Arc;

use serde_json::{Value, json};

use super::client::{CLAIMS, Lines, claim, get, get_as, send, server};
use crate::{Loaded, Memory, Options, Server};

fn event(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

#[tokio::test]
async fn expired_and_slow_watches_fail() {
    let options = Options {
        history_bytes_max: 2500,
        ..Options::default()
    };
    let server = Server::open(options, Arc::new(Memory), Loaded::default())
        .await
        .unwrap();
    let version = get(&server, CLAIMS).await.version();
    let path = format!("{CLAIMS}?watch=true&resourceVersion={version}");
    let (mut slow, mut quick) = (
        Lines::open(&server, &path).await,
        Lines::open(&server, &path).await,
    );
    for name in ["a", "b", "c"] {
        assert_eq!(send(&server, "POST", CLAIMS, &claim(name)).await.code, 201);
        assert_eq!(quick.next_name().await, event("ADDED", name));
    }
    for watch in [&mut slow, &mut Lines::open(&server, &path).await] {
        let refused = watch.next().await.unwrap();
        assert_eq!(
            (&refused["type"], &refused["object"]["code"]),
            (&json!("ERROR"), &json!(410))
        );
        assert_eq!(watch.next().await, None);
    }
}

/// Covers a lost checkpoint, after which versions begin again: a client that continues from one of the earlier versions would never see a
/// change.
#[tokio::test]
async fn future_resource_version_is_refused() {
    let server = server().await;
    let version: u64 = get(&server, CLAIMS).await.version().parse().unwrap();
    let watch = format!("{CLAIMS}?watch=true");
    let streamed = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    for query in ["", streamed] {
        let mut ahead = Lines::open(&server, &format!("{watch}{query}&resourceVersion=5230")).await;
        let refused = ahead.next().await.unwrap();
        let message = json!(format!("too large resource version: 5230 ({version})"));
        assert_eq!(
            (&refused["type"], &refused["object"]["code"]),
            (&json!("ERROR"), &json!(410))
        );
        assert_eq!(
            (&refused["object"]["reason"], &refused["object"]["message"]),
            (&json!("Expired"), &message)
        );
        assert_eq!(ahead.next().await, None);
    }
    let mut newest = Lines::open(&server, &format!("{watch}&resourceVersion={version}")).await;
    send(&server, "POST", CLAIMS, &claim("a")).await;
    assert_eq!(newest.next_name().await, event("ADDED", "a"));
}

#[tokio::test]
async fn streamed_list_ends_with_a_bookmark() {
    let server = server().await;
    send(&server, "POST", CLAIMS, &claim("a")).await;
    let options =
        "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let mut watch = Lines::open(&server, &format!("{CLAIMS}?watch=true&{options}")).await;
    assert_eq!(watch.next_name().await, event("ADDED", "a"));
    let bookmark = watch.next().await.unwrap();
    assert_eq!(bookmark["type"], "BOOKMARK");
    let metadata = &bookmark["object"]["metadata"];
    assert_eq!(
        metadata["annotations"],
        json!({ "k8s.io/initial-events-end": "true" })
    );
    assert_eq!(
        metadata["resourceVersion"],
        get(&server, CLAIMS).await.version()
    );
    send(&server, "POST", CLAIMS, &claim("b")).await;
    assert_eq!(watch.next_name().await, event("ADDED", "b"));
    let mut changes_alone = Lines::open(
        &server,
        &format!("{CLAIMS}?watch=true&sendInitialEvents=false&resourceVersionMatch=NotOlderThan"),
    )
    .await;
    send(&server, "DELETE", &format!("{CLAIMS}/a"), &Value::Null).await;
    assert_eq!(changes_alone.next_name().await, event("DELETED", "a"));
}

#[tokio::test]
async fn contradictory_list_options_are_refused() {
    let server = server().await;
    for (query, message) in [
        (
            "watch=true&sendInitialEvents=true",
            "ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: sendInitialEvents requires setting \
             resourceVersionMatch to NotOlderThan",
        ),
        (
            "watch=true&resourceVersionMatch=NotOlderThan",
            "ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch \
             unless sendInitialEvents is provided",
        ),
        (
            "resourceVersionMatch=Exact",
            "ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless \
             resourceVersion is provided",
        ),
        (
            "resourceVersion=1&resourceVersionMatch=Newest",
            "ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Unsupported value: \"Newest\": supported values: \
             \"Exact\", \"NotOlderThan\", \"\"",
        ),
    ] {
        let refused = get(&server, &format!("{CLAIMS}?{query}")).await;
        assert_eq!((refused.code, refused.message()), (422, message));
    }
    assert_eq!(
        get(&server, &format!("{CLAIMS}?watch=true&resourceVersion=x"))
            .await
            .code,
        400
    );
    assert_eq!(
        get(&server, &format!("{CLAIMS}?watch=true&labelSelector=a%20b"))
            .await
            .code,
        400
    );
    let ahead = get(&server, &format!("{CLAIMS}?resourceVersion=999999")).await;
    assert_eq!(
        (ahead.code, &ahead.body["details"]["causes"][0]["reason"]),
        (504, &json!("ResourceVersionTooLarge"))
    );
    for how in ["Exact", "NotOlderThan"] {
        let path = format!("{CLAIMS}?resourceVersion=999999&resourceVersionMatch={how}");
        assert_eq!(get(&server, &path).await.code, 504, "{how}");
    }
    let exact = get(
        &server,
        &format!("{CLAIMS}?resourceVersion=1&resourceVersionMatch=Exact"),
    )
    .await;
    assert_eq!(
        (exact.code, &exact.body["reason"]),
        (410, &json!("Expired"))
    );
}

#[tokio::test]
async fn watch_events_use_negotiated_form() {
    let server = server().await;
    send(&server, "POST", CLAIMS, &claim("a")).await;
    for (accept, kind) in [
        (
            "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
            "PartialObjectMetadata",
        ),
        ("application/json;as=Table;g=meta.k8s.io;v=v1", "Table"),
    ] {
        let path = format!("{CLAIMS}?watch=true&timeoutSeconds=1&resourceVersion=0");
        let events = get_as(&server, &path, accept).await.text;
        let first: Value = serde_json::from_str(events.lines().next().unwrap()).unwrap();
        assert_eq!(
            (&first["type"], &first["object"]["kind"]),
            (&json!("ADDED"), &json!(kind))
        );
    }
}
