//! Requests and watches at an API server in memory, so that the clock can be turned; TLS and credentials are below.

mod credentials;
mod errors;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject};
use kube::client::Body;
use kube::runtime::watcher::Event;
use nodedock_stand_ins::api_server::{Allocated, ApiServer, Fault, When};

use super::counts::Call;
use super::*;
use crate::client::reachability::API_AWAY_NOTICE;
use crate::client::send::{API_OBJECT_BYTES_MAX, WATCH_SILENCE, WATCH_STEADY};
use crate::client::{API_PROBE_PERIOD, API_REQUEST};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::ObjectName;

/// A client whose credentials do not change.
fn fixed(client: kube::Client) -> KubeClient {
    KubeClient::with_credentials(Credentials::new(
        ClientConfig::default(),
        client.into(),
        Files::default(),
    ))
}

/// A client of a server in memory.
pub(crate) fn over(server: &Arc<ApiServer>) -> KubeClient {
    let server = Arc::clone(server);
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let server = Arc::clone(&server);
        async move { server.handle(request).await }
    });
    fixed(kube::Client::new(service, "default"))
}

/// A client whose requests are answered one after the other, and the last answer again and again.
pub(crate) fn answered(answers: Vec<http::Response<&'static str>>) -> KubeClient {
    let next = AtomicUsize::new(0);
    let service = tower::service_fn(move |_: http::Request<Body>| {
        let answer = answers[next.fetch_add(1, Relaxed).min(answers.len() - 1)].clone();
        async move { Ok::<_, std::convert::Infallible>(answer.map(Full::from)) }
    });
    fixed(kube::Client::new(service, "default"))
}

pub(crate) fn answer(
    code: u16,
    content_type: &str,
    body: &'static str,
) -> http::Response<&'static str> {
    http::Response::builder()
        .status(code)
        .header("content-type", content_type)
        .body(body)
        .unwrap()
}

async fn server() -> (Arc<ApiServer>, KubeClient) {
    let server = Arc::new(ApiServer::start().await);
    server.add_node("node-1");
    let client = over(&server);
    (server, client)
}

async fn node(client: kube::Client) -> Result<Node, ApiError> {
    Ok(Api::<Node>::all(client).get("node-1").await?)
}

#[tokio::test(start_paused = true)]
async fn throttled_client_waits_and_counts_requests() {
    let (server, client) = server().await;
    server.fail_times(1, Fault::TooMany { retry_after: 5 }, When::any());
    let refused = node(client.client()).await.unwrap_err();
    assert_eq!(
        (refused.kind, refused.retry_after),
        (ErrorKind::Throttled, Some(Duration::from_secs(5)))
    );
    let start = Instant::now();
    node(client.urgent()).await.unwrap();
    assert!(
        start.elapsed() >= Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    let nodes: Api<Node> = Api::all(client.client());
    nodes.list(&kube::api::ListParams::default()).await.unwrap();
    let metrics = client.metrics();
    for (verb, code) in [("get", 200), ("get", 429), ("list", 200)] {
        let labels = AnsweredLabels {
            verb,
            resource: "nodes",
            code,
        };
        assert_eq!(
            metrics.requests.get(&labels).unwrap().get(),
            1,
            "{labels:?}"
        );
    }
    assert_eq!(
        (
            metrics.requests.len(),
            metrics.waits.count(),
            metrics.seconds.count()
        ),
        (3, 3, 3)
    );
    assert_eq!(
        Call::of(
            &http::Method::PATCH,
            &"/apis/resource.k8s.io/v1/namespaces/pods/resourceclaims/a/status"
                .parse()
                .unwrap()
        )
        .verb,
        Verb::Patch
    );
}

#[tokio::test(start_paused = true)]
async fn silent_server_times_out() {
    let (server, client) = server().await;
    server.fail(Fault::Hang, When::any());
    let start = Instant::now();
    let error = node(client.client()).await.unwrap_err();
    assert_eq!(start.elapsed(), API_REQUEST);
    assert!(
        error.to_string().contains("no answer within 10 s") && error.is_unreachable(),
        "{error}"
    );
    // Callers that wait for the version wait together.
    let start = Instant::now();
    let outcomes = futures::future::join_all((0..20).map(|_| client.dra_version())).await;
    assert!(outcomes.iter().all(Result::is_err));
    assert_eq!(start.elapsed(), API_REQUEST);
}

#[tokio::test]
async fn partial_and_oversized_responses_are_refused() {
    let (server, client) = server().await;
    server.fail_times(1, Fault::HalfAnswer, When::any());
    assert_eq!(
        node(client.client()).await.unwrap_err().kind,
        ErrorKind::Unreachable
    );
    let large: &'static str = String::leak(format!(
        "{{\"a\":\"{}\"}}",
        "a".repeat(API_OBJECT_BYTES_MAX)
    ));
    let client = answered(vec![answer(200, "application/json", large)]);
    let error = node(client.client()).await.unwrap_err();
    assert!(
        error.to_string().contains("more than 4194304 bytes"),
        "{error}"
    );
}

#[tokio::test]
async fn proxy_responses_are_detected() {
    let mut redirect = answer(302, "", "");
    redirect
        .headers_mut()
        .insert("location", "https://login.example/".parse().unwrap());
    let answers = vec![
        answer(200, "text/html", "<html>Sign in</html>"),
        redirect,
        answer(
            200,
            "application/json",
            "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\"}",
        ),
        answer(200, "application/json", "{\"kind\":"),
    ];
    let client = answered(answers);
    for words in [
        "is there a proxy",
        "302 Found to https://login.example/",
        "Status",
        "EOF",
    ] {
        let error = node(client.client()).await.unwrap_err();
        assert!(
            error.kind == ErrorKind::NotKubernetes && error.to_string().contains(words),
            "{error}"
        );
    }
}

#[tokio::test]
async fn api_version_is_cached_until_gone() {
    let (server, client) = server().await;
    server.serve_versions(&["v1beta1"]);
    server.allocate_claim(Allocated::new("default", "one"));
    let claim = async || {
        let get = |version: DraVersion| {
            let resource = version.resource(DraResource::Claims);
            let api: Api<DynamicObject> =
                Api::namespaced_with(client.client(), "default", &resource);
            async move { Ok(api.get("one").await.map(|_| version)?) }
        };
        client.versioned(get).await
    };
    assert_eq!(claim().await, Ok(DraVersion::V1beta1));
    assert_eq!(claim().await, Ok(DraVersion::V1beta1));
    assert_eq!(server.requests().len(), 3);
    server.serve_versions(&["v1"]);
    assert_eq!(claim().await, Ok(DraVersion::V1));
    assert_eq!(server.requests().len(), 6);
    server.serve_versions(&[]);
    let words = claim().await.unwrap_err().to_string();
    assert!(
        words.contains("dynamic resource allocation has to be turned on"),
        "{words}"
    );
}

#[tokio::test(start_paused = true)]
async fn unreachable_server_sets_condition_until_reachable() {
    let (server, client) = server().await;
    let fault = server.fail(Fault::Status(503), When::any());
    let changes = nodedock_base::changes::Changes::default();
    let mut listener = changes.listen();
    let (conditions, tasks) = (Conditions::new(changes), Tasks::new());
    client.report_reachability(conditions.clone(), &tasks);
    let start = Instant::now();
    assert!(node(client.client()).await.is_err());
    assert_eq!(
        listener.recv().await.unwrap().state,
        "api-server-unreachable"
    );
    assert_eq!(start.elapsed(), API_AWAY_NOTICE);
    let condition = conditions.list().remove(0);
    assert_eq!(condition.subject, "API server");
    let message = condition.problem.message;
    assert!(
        message.starts_with("the API server cannot be reached: "),
        "{message}"
    );
    server.lift(fault);
    assert_eq!(listener.recv().await.unwrap().state, "over");
    assert!(start.elapsed() <= API_PROBE_PERIOD + Duration::from_millis(1));

    // One that is replaced within seconds is none.
    server.fail_times(1, Fault::Status(503), When::any());
    assert!(node(client.client()).await.is_err());
    tokio::time::sleep(Duration::from_secs(4)).await;
    node(client.client()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(
        (conditions.list(), client.is_unreachable()),
        (vec![], false)
    );
    assert!(tasks.drain(Duration::from_secs(1)).await);
}

/// A refusal of what is asked for comes from a server that is reachable; one of our credentials does not count as such.
#[tokio::test]
async fn refusal_does_not_mean_unreachable() {
    let (server, client) = server().await;
    for (fault, kind, unreachable) in [
        (403, ErrorKind::Forbidden, false),
        (401, ErrorKind::Unauthorized, true),
        (404, ErrorKind::NotServed, false),
    ] {
        server.fail_times(1, Fault::Status(fault), When::any());
        assert_eq!(node(client.client()).await.unwrap_err().kind, kind);
        assert_eq!(client.is_unreachable(), unreachable, "{fault}");
    }
}

/// Events of a watch of claims in `default`, in order.
struct Watched {
    server: Arc<ApiServer>,
    client: KubeClient,
    events: stream::BoxStream<'static, Result<Event<DynamicObject>, ApiError>>,
}

impl Watched {
    async fn new(claims: &[&str]) -> Self {
        Self::since(claims, |_| None).await
    }

    /// `since`: the version that is known, out of the newest.
    async fn since(claims: &[&str], since: impl FnOnce(String) -> Option<String>) -> Self {
        let (server, client) = server().await;
        claims
            .iter()
            .for_each(|claim| drop(server.allocate_claim(Allocated::new("default", claim))));
        let newest =
            server.list("resourceclaims").pop().unwrap()["metadata"]["resourceVersion"].clone();
        let since = since(newest.as_str().unwrap().to_owned());
        let namespace = Some(ObjectName::new("default").unwrap());
        let events = client
            .watch(
                "claims",
                DraResource::Claims,
                namespace,
                String::new(),
                since,
            )
            .boxed();
        Self {
            server,
            client,
            events,
        }
    }

    /// The next event that is no error.
    async fn next(&mut self) -> String {
        loop {
            match self.events.next().await.unwrap() {
                Ok(Event::Init) => return "init".to_owned(),
                Ok(Event::InitApply(claim)) => return format!("listed {}", claim.name_any()),
                Ok(Event::InitDone) => return "done".to_owned(),
                Ok(Event::Apply(claim)) => return format!("applied {}", claim.name_any()),
                Ok(Event::Delete(claim)) => return format!("deleted {}", claim.name_any()),
                Err(_) => {}
            }
        }
    }

    async fn nexts(&mut self, count: usize) -> Vec<String> {
        let mut found = Vec::new();
        for _ in 0..count {
            found.push(self.next().await);
        }
        found
    }

    /// Polls until the watch is open: the server changes nothing before.
    async fn open(&mut self) {
        let server = Arc::clone(&self.server);
        tokio::select! {
            () = server.wait_until("the watch", |state| state.watches("resourceclaims") > 0) => {}
            event = self.next() => panic!("{event}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn watch_resumes_after_server_ends_it() {
    let mut watched = Watched::new(&["a"]).await;
    assert_eq!(watched.nexts(3).await, ["init", "listed a", "done"]);
    watched.open().await;
    watched
        .server
        .allocate_claim(Allocated::new("default", "b"));
    assert_eq!(watched.next().await, "applied b");
    tokio::time::sleep(WATCH_STEADY).await;
    watched.server.close_watches();
    watched.open().await;
    watched.server.delete("resourceclaims", "default", "b");
    assert_eq!(watched.next().await, "deleted b");
    assert_eq!(watched.client.metrics().watch_restarts.get(), 1);
}

/// Objects that were deleted while nothing was watched are missing from the list that follows a 410.
#[tokio::test(start_paused = true)]
async fn expired_version_or_broken_watch_relists() {
    let mut watched = Watched::new(&["a"]).await;
    watched
        .server
        .fail_times(1, Fault::Expire, When::any().verb("watch"));
    assert_eq!(
        watched.nexts(6).await,
        ["init", "listed a", "done", "init", "listed a", "done"]
    );
    watched
        .server
        .fail_times(1, Fault::HalfAnswer, When::any().verb("watch"));
    watched.open().await;
    watched
        .server
        .allocate_claim(Allocated::new("default", "b"));
    assert_eq!(
        watched.nexts(4).await,
        ["init", "listed a", "listed b", "done"]
    );
    // The version that is watched is not served any more.
    watched.open().await;
    watched.server.serve_versions(&["v1beta2"]);
    watched.server.close_watches();
    while watched.next().await != "listed b" {}
    assert_eq!(watched.server.requests().last().unwrap().version, "v1beta2");
}

#[tokio::test(start_paused = true)]
async fn known_version_is_watched_without_list() {
    let mut watched = Watched::since(&["a"], Some).await;
    assert_eq!(watched.next().await, "done");
    watched
        .server
        .allocate_claim(Allocated::new("default", "b"));
    assert_eq!(watched.next().await, "applied b");
    tokio::time::sleep(WATCH_STEADY).await;
    watched.server.close_watches();
    assert_eq!(watched.next().await, "done");
    watched.server.delete("resourceclaims", "default", "b");
    assert_eq!(watched.next().await, "deleted b");
    let lists = |server: &ApiServer| {
        server
            .requests()
            .iter()
            .filter(|seen| seen.verb == "list")
            .count()
    };
    assert_eq!(lists(&watched.server), 0);
    // A bookmark is a version as well: what other objects changed before it may be forgotten.
    watched.server.skip_versions(9);
    watched.server.bookmark();
    assert!(
        tokio::time::timeout(WATCH_STEADY, watched.next())
            .await
            .is_err(),
        "it is no event"
    );
    watched.server.compact();
    watched.server.close_watches();
    assert_eq!(
        (watched.next().await.as_str(), lists(&watched.server)),
        ("done", 0)
    );
    // A version that is too old.
    watched
        .server
        .allocate_claim(Allocated::new("default", "c"));
    assert_eq!(watched.next().await, "applied c");
    watched
        .server
        .fail_times(1, Fault::Expire, When::any().verb("watch"));
    watched.server.close_watches();
    assert_eq!(
        watched.nexts(4).await,
        ["init", "listed a", "listed c", "done"]
    );
    let mut watched = Watched::since(&["a"], |_| Some("1".to_owned())).await;
    watched.server.compact();
    while watched.next().await != "listed a" {}
}

#[tokio::test(start_paused = true)]
async fn failing_server_is_not_hammered() {
    let known = |version: String| Some(version);
    let unknown = |_| None;
    for (since, fault, when) in [
        (
            unknown as fn(String) -> _,
            Fault::CloseWatchesAtOnce,
            When::any().verb("watch"),
        ),
        (known, Fault::CloseWatchesAtOnce, When::any().verb("watch")),
        (unknown, Fault::Status(403), When::any().verb("list")),
        (unknown, Fault::Away, When::any()),
        (known, Fault::Away, When::any()),
    ] {
        let mut watched = Watched::since(&["a"], since).await;
        watched.client.dra_version().await.unwrap();
        watched.server.fail(fault.clone(), when);
        let ten_minutes = tokio::time::timeout(Duration::from_secs(600), async {
            loop {
                watched.next().await;
            }
        });
        assert!(ten_minutes.await.is_err());
        let requests = watched.server.requests().len();
        assert!((10..=100).contains(&requests), "{fault:?}: {requests}");
    }
}

/// A watch whose body is made of these parts, and never ends.
async fn watch_of(parts: Vec<Bytes>) -> Option<ApiError> {
    let parts = Mutex::new(Some(parts));
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let is_watch = request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        let parts = is_watch
            .then(|| parts.lock().unwrap().take())
            .flatten()
            .unwrap_or_default();
        let list = r#"{"kind":"ResourceClaimList","apiVersion":"resource.k8s.io/v1","metadata":{"resourceVersion":"5"},"items":[]}"#;
        let group = r#"{"kind":"APIGroup","apiVersion":"v1","name":"resource.k8s.io","versions":[{"groupVersion":"resource.k8s.io/v1","version":"v1"}]}"#;
        let body: UnsyncBoxBody<Bytes, std::convert::Infallible> = match request.uri().path() {
            _ if is_watch => {
                let parts = stream::iter(parts).map(|part| Ok(Frame::data(part)));
                StreamBody::new(parts.chain(stream::pending())).boxed_unsync()
            }
            "/apis/resource.k8s.io" => Full::from(group).boxed_unsync(),
            _ => Full::from(list).boxed_unsync(),
        };
        async move { Ok::<_, std::convert::Infallible>(http::Response::new(body)) }
    });
    let client = fixed(kube::Client::new(service, "default"));
    let mut events = client
        .watch("claims", DraResource::Claims, None, String::new(), None)
        .boxed();
    loop {
        if let Err(error) = events.next().await? {
            return Some(error);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn silent_watch_and_oversized_event_fail() {
    let start = Instant::now();
    let silent = watch_of(vec![]).await.unwrap();
    assert!(
        silent.to_string().contains("silent for 150 s") && start.elapsed() == WATCH_SILENCE,
        "{silent}"
    );
    let part = Bytes::from(vec![b'a'; API_OBJECT_BYTES_MAX / 2 + 1]);
    let large = watch_of(vec![part.clone(), part]).await.unwrap();
    assert!(
        large.to_string().contains("more than 4194304 bytes"),
        "{large}"
    );
    for rubbish in ["<html>\n", "{\"type\":\"ADDED\"}\n", "{}\n", "\0\n"] {
        assert_eq!(
            watch_of(vec![Bytes::from(rubbish)]).await.unwrap().kind,
            ErrorKind::NotKubernetes,
            "{rubbish}"
        );
    }
}
