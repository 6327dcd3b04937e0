//! Watches.

use std::sync::Arc;

use serde_json::{Value, json};

use super::client::{CLAIMS, Lines, claim, get, get_as, send, server};
use crate::{Loaded, Memory, Options, Server};

fn event(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

#[tokio::test]
async fn a_watch_from_a_forgotten_version_is_refused_and_an_open_one_that_is_too_slow_ends() {
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

/// After a lost checkpoint, versions begin again: a client that goes on from one of those before would never see a change.
#[tokio::test]
async fn a_watch_from_a_version_that_is_not_reached_yet_is_refused_so_that_its_client_lists_again()
{
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
async fn a_list_can_be_streamed_until_a_bookmark_says_that_it_is_whole() {
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
async fn options_that_do_not_go_together_are_refused() {
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
async fn a_watch_of_metadata_and_of_rows_has_them_in_its_events() {
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
