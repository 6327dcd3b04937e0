//! Requests over an API server that is a function, so that the clock can be turned; what follows sets of objects, and TLS, are below.

mod follow;
mod tls;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::*;

/// Answers one after the other, and the last again and again.
fn answers(answers: Vec<fn() -> fake::Answer>) -> impl Fn(fake::Asked) -> std::future::Ready<fake::Answer> {
    let next = AtomicUsize::new(0);
    move |_| std::future::ready(answers[next.fetch_add(1, Relaxed).min(answers.len() - 1)]())
}

fn fine() -> fake::Answer {
    fake::answer(200, &json!({"kind": "Thing"}))
}

#[tokio::test]
async fn requests_are_what_an_api_server_expects() {
    let (api, log) = fake::api(answers(vec![fine]));
    let object = json!({"metadata": {"name": "a"}});
    api.create("/things", &object).await.unwrap();
    api.update("/things/a", &object).await.unwrap();
    let apply = Patch::Apply { object: object.clone(), manager: "gpu.example.com".to_owned(), force: true };
    api.patch("/things/a/status", &apply).await.unwrap();
    api.patch("/things/a", &Patch::Merge(object.clone())).await.unwrap();
    let wanted = Preconditions { uid: Some("u".to_owned()), resource_version: Some("7".to_owned()) };
    api.delete("/things/a", &wanted).await.unwrap();
    let log = log.lock().unwrap().clone();
    let asked: Vec<_> =
        log.iter().map(|asked| format!("{} {}?{}", asked.method, asked.path, asked.query)).collect();
    assert_eq!(
        asked,
        [
            "POST /things?fieldManager=nodedock",
            "PUT /things/a?fieldManager=nodedock",
            "PATCH /things/a/status?fieldManager=gpu.example.com&force=true",
            "PATCH /things/a?fieldManager=nodedock",
            "DELETE /things/a?",
        ]
    );
    let kinds: Vec<_> =
        log.iter().map(|asked| asked.headers["content-type"].to_str().unwrap().to_owned()).collect();
    let merge = "application/merge-patch+json";
    assert_eq!(
        kinds,
        ["application/json", "application/json", "application/apply-patch+yaml", merge, "application/json"]
    );
    assert_eq!(log[0].body, object);
    assert_eq!(log[4].body["preconditions"], json!({"uid": "u", "resourceVersion": "7"}));
    assert!(log[0].headers["user-agent"].to_str().unwrap().starts_with("nodedock/"));
    assert_eq!(log[0].headers["accept"], "application/json");
}

#[tokio::test]
async fn a_list_is_read_page_by_page() {
    let (api, log) = fake::api(|asked| {
        let next = if asked.query.contains("continue=two%2F") { "" } else { "two/" };
        let list =
            json!({"metadata": {"resourceVersion": "9", "continue": next}, "items": [{"a": asked.query}]});
        std::future::ready(fake::answer(200, &list))
    });
    let listed = api.list("/things", &Selection::fields("spec.nodeName=a")).await.unwrap();
    assert_eq!((listed.items.len(), listed.resource_version.as_str()), (2, "9"));
    let queries: Vec<_> = log.lock().unwrap().iter().map(|asked| asked.query.clone()).collect();
    let first = "limit=250&fieldSelector=spec.nodeName%3Da";
    assert_eq!(queries, [first.to_owned(), format!("{first}&continue=two%2F")]);
}

#[tokio::test]
async fn a_list_that_never_ends_is_left() {
    let same =
        || fake::answer(200, &json!({"metadata": {"resourceVersion": "9", "continue": "x"}, "items": []}));
    let (api, log) = fake::api(answers(vec![same]));
    let error = api.list("/things", &Selection::default()).await.unwrap_err();
    assert!(error.to_string().contains("the same page"), "{error}");
    assert_eq!(log.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_asks_to_be_left_alone_is() {
    let busy = || {
        let mut answer = fake::refusal(429, "TooManyRequests", "slow down");
        answer.headers_mut().insert("retry-after", "5".parse().unwrap());
        answer
    };
    let (api, log) = fake::api(answers(vec![busy, fine]));
    let refused = api.get("/a").await.unwrap_err();
    assert_eq!(refused.retry_after(), Some(Duration::from_secs(5)));
    let start = Instant::now();
    api.urgent().get("/b").await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(log.lock().unwrap().len(), 2);
    let counts = api.counts();
    assert_eq!(counts.requests, [(Verb::Get, "other", 200, 1), (Verb::Get, "other", 429, 1)]);
    assert_eq!(counts.waits.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_is_left_after_ten_seconds() {
    let (api, _) = fake::api(|_| std::future::pending());
    let start = Instant::now();
    let error = api.get("/a").await.unwrap_err();
    assert_eq!(start.elapsed(), limit::API_REQUEST);
    assert!(error.to_string().contains("no answer within 10 s") && error.is_away(), "{error}");
    // Opening a watch is no longer than any other request.
    assert!(api.watch("/a", &Selection::default(), "1").await.is_err());
    assert_eq!(start.elapsed(), limit::API_REQUEST * 2);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_stops_in_the_middle_is_left_too() {
    let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (api, _) = fake::api(move |_| {
        let (sender, answer) = fake::open();
        sender.try_send(Ok("{\"kind\":".into())).unwrap();
        kept.lock().unwrap().push(sender);
        std::future::ready(answer)
    });
    assert!(api.get("/a").await.unwrap_err().to_string().contains("no answer within"));
}

#[tokio::test]
async fn half_an_answer_and_one_that_is_too_large_are_none() {
    let half = || {
        let (sender, answer) = fake::open();
        sender.try_send(Ok("{\"kind\":".into())).unwrap();
        sender.try_send(Err(std::io::Error::other("reset"))).unwrap();
        answer
    };
    let cut = || fake::text(200, "application/json", "{\"kind\":");
    let large =
        || fake::text(200, "application/json", &format!("\"{}\"", "a".repeat(limit::API_OBJECT_BYTES_MAX)));
    let (api, _) = fake::api(answers(vec![half, cut, large]));
    let error = async || api.get("/a").await.unwrap_err().to_string();
    assert!(error().await.contains("half an answer came: reset"));
    assert!(error().await.contains("is no JSON"));
    assert!(error().await.contains("more than 4194304 bytes"));
}

#[tokio::test]
async fn strangers_are_known_as_such() {
    let html = || fake::text(200, "text/html", "<html>Sign in</html>");
    let redirect = || {
        let mut answer = fake::text(302, "", "");
        answer.headers_mut().insert("location", "https://login.example/".parse().unwrap());
        answer
    };
    let failure = || fake::answer(200, &json!({"kind": "Status", "status": "Failure", "message": "no"}));
    let (api, _) = fake::api(answers(vec![html, redirect, failure]));
    for words in ["is there a proxy", "302 Found to https://login.example/", "200"] {
        let error = api.get("/a").await.unwrap_err();
        assert!(matches!(error, ApiError::NotAnswer(_)) && error.to_string().contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_path_that_is_none_is_refused_and_nothing_is_sent() {
    let (api, log) = fake::api(answers(vec![fine]));
    assert!(matches!(api.get("/a b\n").await, Err(ApiError::Invalid { .. })));
    assert!(log.lock().unwrap().is_empty());
}

#[tokio::test]
async fn the_version_is_asked_once_and_again_when_it_is_gone() {
    let upgraded = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let is_upgraded = upgraded.clone();
    let (api, log) = fake::api(move |asked| {
        let upgraded = is_upgraded.load(Relaxed);
        let served = if upgraded { "v1" } else { "v1beta1" };
        std::future::ready(match asked.path.as_str() {
            "/apis/resource.k8s.io" => fake::group(&[served]),
            path if path.contains(&format!("/{served}/")) => fine(),
            _ => fake::answer(
                404,
                &json!({"kind": "Status", "code": 404, "message": "the server could not find the requested resource", "details": {}}),
            ),
        })
    });
    let slices = async || {
        api.versioned(|version| {
            let (api, path) = (api.clone(), version.slices());
            async move { api.get(&path).await.map(|_| version) }
        })
        .await
    };
    assert_eq!(slices().await, Ok(Version::V1beta1));
    assert_eq!(slices().await, Ok(Version::V1beta1));
    assert_eq!(log.lock().unwrap().len(), 3);
    upgraded.store(true, Relaxed);
    assert_eq!(slices().await, Ok(Version::V1));
    assert_eq!(log.lock().unwrap().len(), 6);
}

#[tokio::test]
async fn a_cluster_without_the_api_is_said_to_have_none() {
    let none = || fake::text(404, "text/plain", "404 page not found\n");
    let alpha = || fake::group(&["v1alpha3"]);
    let (api, _) = fake::api(answers(vec![none, alpha]));
    let words = api.version().await.unwrap_err().to_string();
    assert!(words.contains("dynamic resource allocation has to be turned on"), "{words}");
    let words = api.version().await.unwrap_err().to_string();
    assert!(words.contains("of this group it serves v1alpha3"), "{words}");
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_the_version_of_a_server_that_is_away_waits_together() {
    let (api, _) = fake::api(|_| std::future::pending());
    let start = Instant::now();
    let waiting = (0..20).map(|_| {
        let api = api.clone();
        async move { api.version().await }
    });
    let outcomes = futures::future::join_all(waiting).await;
    assert!(outcomes.iter().all(Result::is_err));
    assert_eq!(start.elapsed(), limit::API_REQUEST);
}

/// The state of the only condition, as a watcher of the node sees it.
async fn told(changes: &mut tokio::sync::broadcast::Receiver<nodedock_model::Changed>) -> String {
    changes.recv().await.unwrap().state
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_a_condition_until_it_is_back() {
    let away = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let is_away = away.clone();
    let (api, _) = fake::api(move |_| {
        std::future::ready(if is_away.load(Relaxed) { fake::text(503, "", "") } else { fine() })
    });
    let changes = nodedock_base::changes::Changes::default();
    let mut listener = changes.listen();
    let (conditions, tasks) = (Conditions::new(changes), Tasks::new());
    api.tell_reach(conditions.clone(), &tasks);
    let start = Instant::now();
    assert!(api.get("/a").await.is_err());
    assert_eq!(told(&mut listener).await, "api-server-unreachable");
    assert_eq!(start.elapsed(), limit::API_AWAY_NOTICE);
    let condition = conditions.list().remove(0);
    assert_eq!(condition.subject, "API server");
    assert!(condition.problem.message.starts_with("the API server cannot be reached: 503"), "{condition:?}");
    away.store(false, Relaxed);
    assert_eq!(told(&mut listener).await, "over");
    assert!(start.elapsed() <= limit::API_PROBE_PERIOD + Duration::from_millis(1));
    assert!(tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_replaced_within_seconds_is_no_condition() {
    let (api, _) = fake::api(answers(vec![|| fake::text(503, "", ""), fine]));
    let (conditions, tasks) = (Conditions::default(), Tasks::new());
    api.tell_reach(conditions.clone(), &tasks);
    assert!(api.get("/a").await.is_err());
    tokio::time::sleep(Duration::from_secs(4)).await;
    api.get("/a").await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(conditions.list(), []);
    assert_eq!(*api.reach().borrow(), Reach::Here);
}

/// A refusal of what is asked for is an answer of somebody who is there.
#[tokio::test]
async fn a_refusal_is_no_sign_that_the_server_is_away() {
    let (api, _) = fake::api(answers(vec![
        || fake::refusal(403, "Forbidden", "not you"),
        || fake::refusal(401, "Unauthorized", "who?"),
        || fake::refusal(404, "NotFound", "none"),
    ]));
    assert_eq!(api.get("/a").await, Err(ApiError::Forbidden("not you".to_owned())));
    assert!(!api.is_away());
    assert_eq!(api.get("/a").await, Err(ApiError::Unauthorized("who?".to_owned())));
    assert!(api.is_away());
    assert_eq!(api.get("/a").await, Err(ApiError::NotFound("none".to_owned())));
    assert!(!api.is_away());
}
