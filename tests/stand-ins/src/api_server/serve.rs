//! Connections, and from a request to its answer.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::fault::Fault;
use super::reads::{self, metadata_only, shown};
use super::resources;
use super::route::{self, Route};
use super::state::{Seen, Shared, State};
use super::status::{self, Refusal};
use super::watch::Watching;
use super::writes::{self, Write};

const BODY_MOST: usize = 3 << 20;
/// Who everybody is that has got a token.
const USER: &str = "system:serviceaccount:nodedock:nodedock";

/// A connection that ends without more of an answer.
#[derive(Debug)]
pub struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("the connection is to break")
    }
}

impl std::error::Error for Broken {}

pub(super) type Body = UnsyncBoxBody<Bytes, Broken>;

/// A port that is listened on. It is left when this is dropped.
#[derive(Debug)]
pub(super) struct Listening {
    port: u16,
    end: CancellationToken,
    _end: DropGuard,
    /// Ends the connections that there are; replaced for those to come.
    connections: Arc<Mutex<CancellationToken>>,
    tasks: TaskTracker,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Listening {
    pub(super) async fn on(port: u16, shared: Arc<Shared>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
        let listener = listener.unwrap_or_else(|error| panic!("port {port} cannot be listened on: {error}"));
        let port = listener.local_addr().expect("a listener has an address").port();
        let end = CancellationToken::new();
        let connections = Arc::new(Mutex::new(end.child_token()));
        let tasks = TaskTracker::new();
        let accepting = accept(listener, shared, end.clone(), Arc::clone(&connections), tasks.clone());
        tasks.spawn(accepting);
        Self { port, _end: end.clone().drop_guard(), end, connections, tasks }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn drop_connections(&self) {
        let fresh = self.end.child_token();
        std::mem::replace(&mut *locked(&self.connections), fresh).cancel();
    }

    /// When this is over, nothing listens and no connection is open.
    pub(super) async fn stop(self) {
        self.end.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

async fn accept(
    listener: TcpListener,
    shared: Arc<Shared>,
    end: CancellationToken,
    connections: Arc<Mutex<CancellationToken>>,
    tasks: TaskTracker,
) {
    loop {
        let accepted = tokio::select! {
            () = end.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        // What cannot be accepted is gone again.
        let Ok((stream, _)) = accepted else { continue };
        let broken = locked(&connections).clone();
        tasks.spawn(connection(stream, Arc::clone(&shared), broken));
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>, broken: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| answer(Arc::clone(&shared), request));
    let serve =
        http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        () = broken.cancelled() => {}
        // An error here is a client that went away, or a fault.
        _ = serve => {}
    }
}

/// What is to be sent.
enum Answer {
    Json {
        code: u16,
        body: Value,
        retry_after: Option<u64>,
    },
    Text {
        code: u16,
        kind: &'static str,
        text: &'static str,
    },
    Watch(Box<Watching>),
    /// A watch that is over before it begins.
    Nothing,
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        Self::Json { code: refusal.code, body: refusal.status, retry_after: refusal.retry_after }
    }
}

impl Answer {
    fn ok(body: Value) -> Self {
        Self::Json { code: 200, body, retry_after: None }
    }

    fn code(&self) -> u16 {
        match self {
            Self::Json { code, .. } | Self::Text { code, .. } => *code,
            Self::Watch(_) | Self::Nothing => 200,
        }
    }
}

/// A request that has been read.
struct Asked {
    seen: Seen,
    route: Option<Route>,
    path: Vec<String>,
    body: Bytes,
    too_large: bool,
    accept: String,
    token: String,
    faults: Vec<Fault>,
}

fn header(headers: &HeaderMap, name: HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

async fn read<B>(shared: &Shared, request: Request<B>) -> Result<Asked, Broken>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let at = Instant::now();
    let (head, body) = request.into_parts();
    let path = route::parts(&head.uri);
    let query = route::query(&head.uri);
    let route = route::route(&shared.lock().versions, &head.method, &path, query.clone());
    let (body, too_large) = match Limited::new(body, BODY_MOST).collect().await {
        Ok(body) => (body.to_bytes(), false),
        Err(error) if error.is::<LengthLimitError>() => (Bytes::new(), true),
        Err(_) => return Err(Broken),
    };
    let text = |of: fn(&Route) -> &str| route.as_ref().map(of).unwrap_or_default().to_owned();
    let verb = match &route {
        Some(route) => route.verb.to_owned(),
        None => head.method.as_str().to_ascii_lowercase(),
    };
    let mut seen = Seen {
        verb,
        group: text(|route| &route.group),
        version: text(|route| &route.version),
        resource: text(|route| route.resource.plural),
        subresource: text(|route| &route.subresource),
        namespace: text(|route| &route.namespace),
        name: text(|route| &route.name),
        path: head.uri.path().to_owned(),
        query,
        user_agent: header(&head.headers, USER_AGENT),
        content_type: header(&head.headers, CONTENT_TYPE),
        body: serde_json::from_slice(&body).ok(),
        code: 0,
        at,
    };
    if seen.verb == "create" {
        // By its name an object that is made can be told from others, where it has one.
        let name = seen.body.as_ref().and_then(|body| body["metadata"]["name"].as_str());
        seen.name = name.unwrap_or_default().to_owned();
    }
    let faults = shared.change(|state| state.faults.take(&seen));
    let authorization = header(&head.headers, AUTHORIZATION);
    let token = authorization.strip_prefix("Bearer ").unwrap_or_default().to_owned();
    let accept = header(&head.headers, ACCEPT);
    Ok(Asked { seen, route, path, body, too_large, accept, token, faults })
}

pub(super) async fn answer<B>(shared: Arc<Shared>, request: Request<B>) -> Result<Response<Body>, Broken>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let mut asked = read(&shared, request).await?;
    for fault in &asked.faults {
        match fault {
            Fault::Slow(time) => tokio::time::sleep(*time).await,
            Fault::Hang => {
                note(&shared, asked.seen.clone(), 0);
                std::future::pending::<Infallible>().await;
            }
            _ => {}
        }
    }
    if asked.faults.iter().any(|fault| matches!(fault, Fault::Away)) {
        note(&shared, asked.seen, 0);
        return Err(Broken);
    }
    let forced = asked.faults.iter().find_map(forced);
    let answer = match forced {
        Some(answer) => answer,
        None => respond(&shared, &mut asked),
    };
    let has = |wanted: fn(&Fault) -> bool| asked.faults.iter().any(wanted);
    if has(|fault| matches!(fault, Fault::Lost)) {
        note(&shared, asked.seen, 0);
        return Err(Broken);
    }
    let half = has(|fault| matches!(fault, Fault::HalfAnswer));
    let code = answer.code();
    let response = written(answer, half);
    note(&shared, asked.seen, code);
    Ok(response)
}

fn note(shared: &Shared, mut seen: Seen, code: u16) {
    seen.code = code;
    shared.change(|state| state.requests.push(seen));
}

/// What is answered whatever was asked.
fn forced(fault: &Fault) -> Option<Answer> {
    const PAGE: &str =
        "<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n";
    match fault {
        Fault::Html(code) => Some(Answer::Text { code: *code, kind: "text/html; charset=utf-8", text: PAGE }),
        Fault::Status(code) => Some(status::plain(*code).into()),
        Fault::TooMany { retry_after } => Some(status::too_many(*retry_after).into()),
        Fault::CloseWatchesAtOnce => Some(Answer::Nothing),
        _ => None,
    }
}

fn respond(shared: &Arc<Shared>, asked: &mut Asked) -> Answer {
    if asked.too_large {
        return status::too_large(BODY_MOST).into();
    }
    let tokens = shared.lock().tokens.clone();
    if !tokens.is_empty() && !tokens.contains(&asked.token) {
        return status::unauthorized().into();
    }
    let Some(route) = asked.route.take() else { return beside(&shared.lock(), asked).into_answer() };
    if route.verb.is_empty() {
        return status::no_such_method().into();
    }
    if !may(&shared.lock(), &asked.seen) {
        return status::forbidden(&route, USER).into();
    }
    let only_metadata = asked.accept.contains("as=PartialObjectMetadata");
    let expire = asked.faults.iter().any(|fault| matches!(fault, Fault::Expire));
    if route.verb == "watch" {
        return match Watching::open(shared, route, only_metadata) {
            Ok(mut watching) => {
                if expire {
                    watching.fail(&status::expired(1, shared.lock().revision));
                }
                Answer::Watch(Box::new(watching))
            }
            Err(refusal) => refusal.into(),
        };
    }
    if expire {
        return status::expired(1, shared.lock().revision).into();
    }
    match shared.change(|state| act(state, &route, asked)) {
        Ok((code, body)) => {
            let plain = body["kind"] == "Status" || !only_metadata;
            let body = if plain { body } else { metadata_only(body) };
            Answer::Json { code, body, retry_after: None }
        }
        Err(refusal) => refusal.into(),
    }
}

/// What is no resource.
fn beside(state: &State, asked: &Asked) -> Result<Answer, Refusal> {
    let path: Vec<&str> = asked.path.iter().map(String::as_str).collect();
    if asked.seen.verb != "get" {
        return Err(status::no_such_path());
    }
    if let Some(found) = resources::discovery(&state.versions, &path) {
        return Ok(Answer::ok(found));
    }
    match path.as_slice() {
        ["livez" | "readyz" | "healthz"] => {
            Ok(Answer::Text { code: 200, kind: "text/plain; charset=utf-8", text: "ok" })
        }
        ["version"] => Ok(Answer::ok(json!({
            "major": "1", "minor": state.minor_version, "gitVersion": "v1.36.2", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2026-06-16T00:00:00Z", "goVersion": "go1.26", "compiler": "gc", "platform": "linux/amd64",
        }))),
        _ => Err(status::no_such_path()),
    }
}

trait IntoAnswer {
    fn into_answer(self) -> Answer;
}

impl IntoAnswer for Result<Answer, Refusal> {
    fn into_answer(self) -> Answer {
        self.unwrap_or_else(Answer::from)
    }
}

fn may(state: &State, seen: &Seen) -> bool {
    let resource = seen.full_resource();
    let fits = |pattern: &str, found: &str| pattern == "*" || pattern == found;
    if state.denied.iter().any(|(verb, denied)| fits(verb, &seen.verb) && fits(denied, &resource)) {
        return false;
    }
    let Some(rules) = &state.rules else { return true };
    let has = |rule: &Value, key: &str, found: &str| {
        rule[key]
            .as_array()
            .into_iter()
            .flatten()
            .any(|pattern| fits(pattern.as_str().unwrap_or_default(), found))
    };
    rules.iter().any(|rule| {
        has(rule, "apiGroups", &seen.group)
            && has(rule, "resources", &resource)
            && has(rule, "verbs", &seen.verb)
            && (rule["resourceNames"].is_null() || has(rule, "resourceNames", &seen.name))
    })
}

fn act(state: &mut State, route: &Route, asked: &Asked) -> Result<(u16, Value), Refusal> {
    match route.verb {
        "get" => return reads::get(state, route).map(|object| (200, object)),
        "list" => return reads::list(state, route).map(|list| (200, list)),
        _ => {}
    }
    let write = write(route, asked)?;
    let (code, object) = match route.verb {
        "create" => writes::create(state, &write)?,
        "update" => writes::update(state, &write)?,
        "patch" => writes::patch(state, &write)?,
        "delete" => writes::delete(state, &write)?,
        _ => {
            let revision = state.revision;
            let items = writes::delete_all(state, &write)?;
            return Ok((200, reads::list_of(route, revision, items)));
        }
    };
    if route.verb == "delete" && matches!(route.resource.plural, "events" | "nodes" | "namespaces") {
        let details = json!({
            "name": route.name, "group": route.group, "kind": route.resource.plural, "uid": object["metadata"]["uid"],
        });
        let done = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details });
        return Ok((code, done));
    }
    Ok((code, shown(route, object)))
}

fn write<'a>(route: &'a Route, asked: &'a Asked) -> Result<Write<'a>, Refusal> {
    let kind = asked.seen.content_type.as_str();
    let deletes = route.verb.starts_with("delete");
    let json = kind.starts_with("application/json")
        || (route.verb == "patch")
        || (kind.is_empty() && asked.body.is_empty());
    if !(json || deletes) {
        return Err(status::unsupported_type(kind));
    }
    let body = match (&asked.seen.body, asked.body.is_empty()) {
        (Some(body), _) => body.clone(),
        (None, true) if deletes => Value::Null,
        (None, _) => {
            return Err(status::bad_request(
                "couldn't get version/kind; json parse error: the body is no JSON",
            ));
        }
    };
    let drops = asked.faults.iter().filter_map(|fault| match fault {
        Fault::DropField(path) => Some(path.clone()),
        _ => None,
    });
    Ok(Write {
        route,
        body,
        spaced: route.resource.plural == "resourceclaims" && writes::has_spaced_parameters(&asked.body),
        content_type: kind,
        user_agent: if asked.seen.user_agent.is_empty() { "unknown" } else { &asked.seen.user_agent },
        drops: drops.collect(),
    })
}

fn written(answer: Answer, half: bool) -> Response<Body> {
    let code = answer.code();
    let (kind, body, retry_after) = match answer {
        Answer::Json { body, retry_after, .. } => {
            ("application/json", Bytes::from(body.to_string()), retry_after)
        }
        Answer::Text { kind, text, .. } => (kind, Bytes::from_static(text.as_bytes()), None),
        Answer::Nothing => ("application/json", Bytes::new(), None),
        Answer::Watch(watching) => return watched(*watching, half),
    };
    let length = body.len();
    let body = if half {
        StreamBody::new(broken_after(body.slice(..length / 2))).boxed_unsync()
    } else {
        Full::new(body).map_err(|never: Infallible| match never {}).boxed_unsync()
    };
    let mut response =
        Response::builder().status(code).header(CONTENT_TYPE, kind).header(CONTENT_LENGTH, length);
    if let Some(seconds) = retry_after {
        response = response.header(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response.body(body).expect("codes and headers are our own")
}

/// What is sent up to here, and then breaks.
fn broken_after(first: Bytes) -> impl Stream<Item = Result<Frame<Bytes>, Broken>> + Send {
    let breaks = async {
        // What is there is sent before the server looks again.
        tokio::task::yield_now().await;
        Err(Broken)
    };
    stream::iter([Ok(Frame::data(first))]).chain(stream::once(breaks))
}

fn watched(watching: Watching, half: bool) -> Response<Body> {
    let lines = watching.lines();
    let body = if half {
        let broken = lines.take(1).flat_map(|line| broken_after(line.slice(..line.len() / 2)).boxed());
        StreamBody::new(broken).boxed_unsync()
    } else {
        StreamBody::new(lines.map(|line| Ok(Frame::data(line)))).boxed_unsync()
    };
    Response::builder()
        .status(200)
        .header(CONTENT_TYPE, "application/json")
        .body(body)
        .expect("codes and headers are our own")
}
