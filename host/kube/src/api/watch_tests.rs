use proptest::prelude::*;
use serde_json::json;

use super::super::fake;
use super::*;

fn lines(parts: &[&[u8]]) -> Vec<String> {
    let (mut lines, mut found) = (Lines::default(), Vec::new());
    for part in parts {
        lines.push(part);
        while let Some(line) = lines.next().unwrap() {
            found.push(String::from_utf8_lossy(&line).into_owned());
        }
    }
    found
}

#[test]
fn lines_come_together_however_they_are_cut() {
    assert_eq!(lines(&[b"ab", b"c\nd", b"ef\n\n", b"\r\n gh\nij"]), ["abc", "def", " gh"]);
}

proptest! {
    #[test]
    fn cuts_make_no_difference(texts in proptest::collection::vec("[a-z ]{1,20}", 0..20), cuts in proptest::collection::vec(1usize..7, 1..40)) {
        let whole: String = texts.iter().map(|text| format!("{text}\n")).collect();
        let (mut parts, mut rest) = (Vec::new(), whole.as_bytes());
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (part, left) = rest.split_at((*cut).min(rest.len()));
            parts.push(part);
            rest = left;
        }
        let wanted: Vec<_> = texts.into_iter().filter(|text| !text.trim().is_empty()).collect();
        prop_assert_eq!(lines(&parts), wanted);
    }
}

#[test]
fn a_line_without_an_end_is_bounded() {
    let mut lines = Lines::default();
    lines.push(&vec![b'a'; limit::API_OBJECT_BYTES_MAX]);
    assert_eq!(lines.next(), Ok(None));
    lines.push(b"a");
    assert!(matches!(lines.next(), Err(ApiError::NotAnswer(_))));
}

/// Events of one claim, from its creation to its deletion being asked for, as an API server sent them.
#[test]
fn recorded_events_are_read() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/kubernetes-1.36/watch-one-gpu.ndjson");
    let text = std::fs::read(path).unwrap();
    let events: Vec<_> = text
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| event(line, "/a").unwrap().unwrap())
        .collect();
    let versions: Vec<_> = events.iter().map(|event| event.resource_version().unwrap()).collect();
    assert_eq!(versions, ["112", "114", "127", "130", "141", "183", "187", "187"]);
    assert!(matches!(events[0], WatchEvent::Bookmark(_)) && matches!(events[1], WatchEvent::Applied(_)));
}

#[test]
fn an_event_that_is_none_says_what_is_wrong() {
    let cases: [(&[u8], &str); 5] = [
        (b"<html>", "is there a proxy"),
        (b"{\"object\":{}}", "no type"),
        (b"{\"type\":\"ADDED\"}", "no object"),
        (b"{\"type\":\"ADDED\",\"object\":7}", "no object"),
        (b"{\"type\":\"ADDED\",\"obj", "no JSON"),
    ];
    for (line, words) in cases {
        let error = event(line, "/a").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(event(b"{\"type\":\"NEWER\",\"object\":{}}", "/a"), Ok(None));
    let gone = br#"{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old resource version: 1 (7)"}}"#;
    assert_eq!(event(gone, "/a"), Err(ApiError::Expired("too old resource version: 1 (7)".to_owned())));
}

async fn opened() -> (tokio::sync::mpsc::Sender<std::io::Result<bytes::Bytes>>, Watch) {
    let (sender, answer) = fake::open();
    let answer = std::sync::Mutex::new(Some(answer));
    let (api, _) = fake::api(move |_| {
        let answer = answer.lock().unwrap().take().unwrap();
        async move { answer }
    });
    (sender, api.watch("/a", &super::super::Selection::default(), "1").await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_silent_for_too_long_is_dead_and_bookmarks_keep_it_alive() {
    let (sender, mut watch) = opened().await;
    for version in ["5", "6", "7"] {
        tokio::time::advance(limit::WATCH_SILENCE - std::time::Duration::from_secs(1)).await;
        sender.send(fake::event("BOOKMARK", &fake::object("a", version))).await.unwrap();
        assert_eq!(watch.next().await, Ok(Some(WatchEvent::Bookmark(version.to_owned()))));
    }
    let start = tokio::time::Instant::now();
    let error = watch.next().await.unwrap_err();
    assert!(error.to_string().contains("said nothing for 150 s") && error.is_retryable(), "{error}");
    assert_eq!(start.elapsed(), limit::WATCH_SILENCE);
}

#[tokio::test]
async fn the_end_of_a_watch_is_told_from_a_break() {
    let (sender, mut watch) = opened().await;
    sender.send(fake::event("ADDED", &json!({}))).await.unwrap();
    drop(sender);
    assert_eq!(watch.next().await, Ok(Some(WatchEvent::Applied(json!({})))));
    assert_eq!(watch.next().await, Ok(None));

    let (sender, mut watch) = opened().await;
    sender.send(Ok("{\"type\":\"ADD".into())).await.unwrap();
    drop(sender);
    assert!(watch.next().await.unwrap_err().to_string().contains("within an event"));

    let (sender, mut watch) = opened().await;
    sender.send(Err(std::io::Error::other("reset"))).await.unwrap();
    assert!(watch.next().await.unwrap_err().to_string().contains("broke off"));
}
