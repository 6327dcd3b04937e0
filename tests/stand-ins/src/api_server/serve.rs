//! Connections, and from a request to its answer.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;

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
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::convert::from_storage;
use super::fault::Fault;
use super::protobuf;
use super::reads::{self, metadata_only};
use super::resources;
use super::route::{self, Route};
use super::state::{Seen, Shared, State};
use super::status::{self, Refusal};
use super::watch::Watching;
use super::writes::{self, Write};

const BODY_MOST: usize = 3 << 20;
/// The user of each token.
const USER: &str = "system:serviceaccount:nodedock:nodedock";
const JSON: &str = "application/json";

/// A connection that ends without more of an answer.
#[derive(Debug, thiserror::Error)]
#[error("the connection is to break")]
pub struct Broken;

type Body = UnsyncBoxBody<Bytes, Broken>;

/// A port that is listened on, until this is dropped.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) port: u16,
    end: DropGuard,
    task: JoinHandle<()>,
}

impl Listening {
    pub(super) async fn on(port: u16, shared: Arc<Shared>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
        let listener = listener.unwrap_or_else(|error| panic!("port {port} cannot be listened on: {error}"));
        let port = listener.local_addr().expect("a listener has an address").port();
        let end = CancellationToken::new();
        let task = tokio::spawn(accept(listener, shared, end.clone()));
        Self { port, end: end.drop_guard(), task }
    }

    /// When this is over, nothing listens and no connection is open.
    pub(super) async fn stop(self) {
        drop(self.end);
        let _ = self.task.await;
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, end: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = end.cancelled() => return connections.shutdown().await,
            Some(_) = connections.join_next() => {}
            // What cannot be accepted is gone again.
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                connections.spawn(connection(stream, Arc::clone(&shared)));
            }
        }
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| answer(Arc::clone(&shared), request));
    let mut server = http1::Builder::new();
    // An error here is a client that went away, or a fault.
    let _ = server.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// What is to be sent.
enum Answer {
    Whole { code: u16, content_type: &'static str, text: String, retry_after: Option<u64> },
    Watch(Box<Watching>),
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.status.to_string();
        Self::Whole { code: refusal.code, content_type: JSON, text, retry_after: refusal.retry_after }
    }
}

impl Answer {
    fn text(code: u16, content_type: &'static str, text: impl Into<String>) -> Self {
        Self::Whole { code, content_type, text: text.into(), retry_after: None }
    }

    fn json(code: u16, body: &Value) -> Self {
        Self::text(code, JSON, body.to_string())
    }

    fn code(&self) -> u16 {
        match self {
            Self::Whole { code, .. } => *code,
            Self::Watch(_) => 200,
        }
    }
}

/// A request that has been read.
struct Asked {
    seen: Seen,
    route: Option<Route>,
    /// None: it is too large.
    body: Option<Bytes>,
    accept: String,
    token: String,
    faults: Vec<Fault>,
}

impl Asked {
    fn has(&self, fault: fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(fault)
    }
}

fn header(headers: &HeaderMap, name: HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

async fn read<B>(shared: &Shared, request: Request<B>) -> Result<Asked, Broken>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let (head, body) = request.into_parts();
    let query = route::query(&head.uri);
    let parts = route::parts(&head.uri);
    let route = route::route(&shared.lock().served, &head.method, &parts, query.clone());
    let body = match Limited::new(body, BODY_MOST).collect().await {
        Ok(body) => Some(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => None,
        Err(_) => return Err(Broken),
    };
    let text = |of: fn(&Route) -> &str| route.as_ref().map(of).unwrap_or_default().to_owned();
    let mut seen = Seen {
        verb: route
            .as_ref()
            .map_or_else(|| head.method.as_str().to_lowercase(), |route| route.verb.to_owned()),
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
        body: None,
        code: 0,
    };
    let is_protobuf = seen.content_type.starts_with(protobuf::CONTENT_TYPE);
    seen.body = body.as_ref().and_then(|body| match is_protobuf {
        true => protobuf::to_json(body),
        false => serde_json::from_slice(body).ok(),
    });
    if seen.verb == "create" {
        // By its name an object that is made is known among others, where it has one.
        let name = seen.body.as_ref().and_then(|body| body["metadata"]["name"].as_str());
        seen.name = name.unwrap_or_default().to_owned();
    }
    let faults = shared.change(|state| state.faults.take(&seen));
    let authorization = header(&head.headers, AUTHORIZATION);
    let token = authorization.strip_prefix("Bearer ").unwrap_or_default().to_owned();
    Ok(Asked { seen, route, body, accept: header(&head.headers, ACCEPT), token, faults })
}

pub(super) async fn answer<B>(shared: Arc<Shared>, request: Request<B>) -> Result<Response<Body>, Broken>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let mut asked = read(&shared, request).await?;
    let is_away = asked.has(|fault| matches!(fault, Fault::Away));
    let hangs = asked.has(|fault| matches!(fault, Fault::Hang));
    let answer = match asked.faults.iter().find_map(forced) {
        _ if is_away || hangs => None,
        Some(answer) => Some(answer),
        None => Some(respond(&shared, &mut asked).unwrap_or_else(Answer::from)),
    };
    asked.seen.code = answer.as_ref().map_or(0, Answer::code);
    let is_half = asked.has(|fault| matches!(fault, Fault::HalfAnswer));
    shared.change(|state| state.requests.push(asked.seen));
    match answer {
        Some(answer) => Ok(written(answer, is_half)),
        None if hangs => std::future::pending().await,
        None => Err(Broken),
    }
}

/// What is answered whatever was asked.
fn forced(fault: &Fault) -> Option<Answer> {
    const PAGE: &str =
        "<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n";
    match fault {
        Fault::Html(code) => Some(Answer::text(*code, "text/html; charset=utf-8", PAGE)),
        Fault::Status(code) => Some(status::plain(*code).into()),
        Fault::TooMany { retry_after } => Some(status::too_many(*retry_after).into()),
        // A watch that is over before it begins.
        Fault::CloseWatchesAtOnce => Some(Answer::text(200, JSON, "")),
        _ => None,
    }
}

fn respond(shared: &Arc<Shared>, asked: &mut Asked) -> Result<Answer, Refusal> {
    let body = asked.body.take().ok_or_else(|| status::plain(413))?;
    let tokens = shared.lock().tokens.clone();
    if !tokens.is_empty() && !tokens.contains(&asked.token) {
        return Err(status::plain(401));
    }
    let Some(route) = asked.route.take() else { return beside(&shared.lock(), asked) };
    if route.verb.is_empty() {
        return Err(status::no_such_method());
    }
    if !may(&shared.lock(), &asked.seen) {
        return Err(status::forbidden(&route, &asked.seen.full_resource(), USER));
    }
    let expired = asked.has(|fault| matches!(fault, Fault::Expire));
    let expired = expired.then(|| status::expired(1, shared.lock().revision));
    if route.verb == "watch" {
        let mut watching = Watching::open(shared, route)?;
        if let Some(expired) = expired {
            watching.fail(&expired);
        }
        return Ok(Answer::Watch(Box::new(watching)));
    }
    if let Some(expired) = expired {
        return Err(expired);
    }
    let (code, object) = shared.change(|state| act(state, &route, asked, &body))?;
    let is_brief = asked.accept.contains("as=PartialObjectMetadata");
    Ok(Answer::json(code, &if is_brief { metadata_only(&object) } else { object }))
}

/// What is no resource.
fn beside(state: &State, asked: &Asked) -> Result<Answer, Refusal> {
    let path: Vec<&str> = asked.seen.path.split('/').filter(|part| !part.is_empty()).collect();
    let found = match path.as_slice() {
        _ if asked.seen.verb != "get" => None,
        ["version"] => Some(json!({
            "major": "1", "minor": state.minor_version, "gitVersion": "v1.36.2", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "2026-06-16T00:00:00Z", "goVersion": "go1.26", "compiler": "gc", "platform": "linux/amd64",
        })),
        path => resources::discovery(&state.served, path),
    };
    found.map(|found| Answer::json(200, &found)).ok_or_else(|| status::plain(404))
}

fn may(state: &State, seen: &Seen) -> bool {
    let resource = seen.full_resource();
    let fits = |pattern: &str, found: &str| pattern == "*" || pattern == found;
    if state.denied.iter().any(|(verb, denied)| fits(verb, &seen.verb) && fits(denied, &resource)) {
        return false;
    }
    let Some(rules) = &state.rules else { return true };
    let has = |rule: &Value, key: &str, found: &str| {
        let mut patterns = rule[key].as_array().into_iter().flatten();
        patterns.any(|pattern| fits(pattern.as_str().unwrap_or_default(), found))
    };
    rules.iter().any(|rule| {
        has(rule, "apiGroups", &seen.group)
            && has(rule, "resources", &resource)
            && has(rule, "verbs", &seen.verb)
            && (rule["resourceNames"].is_null() || has(rule, "resourceNames", &seen.name))
    })
}

fn act(state: &mut State, route: &Route, asked: &Asked, body: &[u8]) -> Result<(u16, Value), Refusal> {
    match route.verb {
        "get" => return Ok((200, reads::get(state, route)?)),
        "list" => return Ok((200, reads::list(state, route)?)),
        _ => {}
    }
    let write = write(route, asked, body)?;
    let (code, object) = match route.verb {
        "create" => writes::create(state, &write)?,
        "update" => writes::update(state, &write)?,
        "patch" => writes::patch(state, &write)?,
        "delete" => writes::delete(state, &write)?,
        _ => {
            let revision = state.revision;
            let items = writes::delete_all(state, &write)?;
            return Ok((200, reads::list_of(route, revision, items.into_iter())));
        }
    };
    Ok((code, from_storage(route, object)))
}

fn write<'a>(route: &'a Route, asked: &'a Asked, body: &[u8]) -> Result<Write<'a>, Refusal> {
    let kind = asked.seen.content_type.as_str();
    let deletes = route.verb.starts_with("delete");
    let is_read = kind.starts_with(protobuf::CONTENT_TYPE) && asked.seen.body.is_some();
    if !(kind.starts_with(JSON) || is_read || route.verb == "patch" || deletes) {
        return Err(status::unsupported_type(kind));
    }
    let parsed = match &asked.seen.body {
        Some(parsed) => parsed.clone(),
        None if body.is_empty() && deletes => Value::Null,
        None => {
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
        body: parsed,
        content_type: kind,
        user_agent: &asked.seen.user_agent,
        drops: drops.collect(),
    })
}

fn written(answer: Answer, is_half: bool) -> Response<Body> {
    let mut response = Response::builder().status(answer.code());
    let (content_type, body) = match answer {
        Answer::Whole { content_type, text, retry_after, .. } => {
            response = response.header(CONTENT_LENGTH, text.len());
            if let Some(seconds) = retry_after {
                response = response.header(RETRY_AFTER, HeaderValue::from(seconds));
            }
            let body = Bytes::from(text);
            let body = match is_half {
                true => StreamBody::new(broken_after(body.slice(..body.len() / 2))).boxed_unsync(),
                false => Full::new(body).map_err(|never: Infallible| match never {}).boxed_unsync(),
            };
            (content_type, body)
        }
        Answer::Watch(watching) if is_half => {
            let lines = watching.lines().take(1);
            let broken = lines.flat_map(|line| broken_after(line.slice(..line.len() / 2)).boxed());
            (JSON, StreamBody::new(broken).boxed_unsync())
        }
        Answer::Watch(watching) => {
            (JSON, StreamBody::new(watching.lines().map(|line| Ok(Frame::data(line)))).boxed_unsync())
        }
    };
    response.header(CONTENT_TYPE, content_type).body(body).expect("codes and headers are our own")
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
