//! Connections, and from a request to its answer.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, USER_AGENT};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nodedock_apiserver::{
    DRA_GROUP, PROTOBUF, Refusal, Resource, Route, discovered_group, discovered_resources,
    protobuf_to_json, status,
};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::convert::{self, from_v1, to_v1};
use super::fault::{Fault, drop_field};
use super::seen::Seen;
use super::state::{Shared, State};

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
    end: DropGuard,
    task: JoinHandle<()>,
}

impl Listening {
    pub(super) async fn on(port: u16, shared: Arc<Shared>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
        let listener =
            listener.unwrap_or_else(|error| panic!("port {port} cannot be listened on: {error}"));
        let end = CancellationToken::new();
        let task = tokio::spawn(accept(listener, shared, end.clone()));
        Self {
            end: end.drop_guard(),
            task,
        }
    }

    /// Stops listening. On return nothing listens and no connection is open.
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
    let service =
        service_fn(move |request: Request<Incoming>| answer(Arc::clone(&shared), request));
    let mut server = http1::Builder::new();
    // An error here is a client that went away, or a fault.
    let _ = server
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// A request that has been read.
struct Asked {
    seen: Seen,
    route: Option<Route>,
    head: Parts,
    /// None: it is too large.
    body: Option<Bytes>,
    token: String,
    faults: Vec<Fault>,
}

impl Asked {
    fn has(&self, fault: fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(fault)
    }
}

fn header(headers: &HeaderMap, name: HeaderName) -> String {
    headers
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_owned()
}

fn text(code: u16, content_type: &'static str, text: String) -> Response<Body> {
    let length = text.len();
    let body = Full::new(Bytes::from(text)).map_err(never).boxed_unsync();
    let response = Response::builder()
        .status(code)
        .header(CONTENT_TYPE, content_type);
    response
        .header(CONTENT_LENGTH, length)
        .body(body)
        .expect("codes and headers are our own")
}

fn json(body: &Value) -> Response<Body> {
    text(200, JSON, body.to_string())
}

fn refused(refusal: Refusal) -> Response<Body> {
    refusal
        .into_response()
        .map(|body| body.map_err(never).boxed_unsync())
}

fn never(never: Infallible) -> Broken {
    match never {}
}

/// Returns the resource that a request is for, in the version of its path.
fn routed(shared: &Shared, head: &Parts) -> Option<(Route, String)> {
    let Some(version) = convert::version(&head.uri) else {
        return shared
            .server
            .route(&head.method, &head.uri)
            .map(|route| (route, "v1".to_owned()));
    };
    let route = shared
        .server
        .route(&head.method, &convert::in_v1(&head.uri, version))?;
    shared
        .lock()
        .served
        .has(route.resource, version)
        .then(|| (route, version.to_owned()))
}

async fn read<B>(shared: &Shared, request: Request<B>) -> Result<Asked, Broken>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let (head, body) = request.into_parts();
    let (route, version) = routed(shared, &head).unzip();
    let body = match Limited::new(body, BODY_MOST).collect().await {
        Ok(body) => Some(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => None,
        Err(_) => return Err(Broken),
    };
    let text = |of: fn(&Route) -> &str| route.as_ref().map(of).unwrap_or_default().to_owned();
    let query = head.uri.query().unwrap_or_default();
    let mut seen = Seen {
        verb: route.as_ref().map_or_else(
            || head.method.as_str().to_lowercase(),
            |route| route.verb.to_owned(),
        ),
        group: text(|route| &route.group),
        version: version.unwrap_or_default(),
        resource: text(|route| route.resource.plural),
        subresource: text(|route| &route.subresource),
        namespace: text(|route| &route.namespace),
        name: text(|route| &route.name),
        path: head.uri.path().to_owned(),
        query: form_urlencoded::parse(query.as_bytes())
            .into_owned()
            .collect(),
        user_agent: header(&head.headers, USER_AGENT),
        content_type: header(&head.headers, CONTENT_TYPE),
        body: None,
        code: 0,
    };
    seen.body = body
        .as_ref()
        .and_then(|body| match seen.content_type.starts_with(PROTOBUF) {
            true => protobuf_to_json(body),
            false => serde_json::from_slice(body).ok(),
        });
    if seen.verb == "create" {
        // By its name an object that is made is known among others, where it has one.
        let name = seen
            .body
            .as_ref()
            .and_then(|body| body["metadata"]["name"].as_str());
        seen.name = name.unwrap_or_default().to_owned();
    }
    let faults = shared.change(|state| state.faults.take(&seen));
    let authorization = header(&head.headers, AUTHORIZATION);
    let token = authorization
        .strip_prefix("Bearer ")
        .unwrap_or_default()
        .to_owned();
    Ok(Asked {
        seen,
        route,
        head,
        body,
        token,
        faults,
    })
}

pub(super) async fn answer<B>(
    shared: Arc<Shared>,
    request: Request<B>,
) -> Result<Response<Body>, Broken>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let mut asked = read(&shared, request).await?;
    let is_away = asked.has(|fault| matches!(fault, Fault::Away));
    let hangs = asked.has(|fault| matches!(fault, Fault::Hang));
    let answer = match asked.faults.iter().find_map(forced) {
        _ if is_away || hangs => None,
        Some(answer) => Some(answer),
        None => Some(respond(&shared, &mut asked).await.unwrap_or_else(refused)),
    };
    asked.seen.code = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
    let is_half = asked.has(|fault| matches!(fault, Fault::HalfAnswer));
    let is_watch = asked.seen.verb == "watch" && asked.seen.code == 200;
    shared.change(|state| state.requests.push(asked.seen));
    match answer {
        Some(answer) if is_half => half(answer, is_watch).await,
        Some(answer) => Ok(answer),
        None if hangs => std::future::pending().await,
        None => Err(Broken),
    }
}

/// Returns the response that a fault forces, regardless of the request.
fn forced(fault: &Fault) -> Option<Response<Body>> {
    const PAGE: &str = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n";
    match fault {
        Fault::Html(code) => Some(text(*code, "text/html; charset=utf-8", PAGE.to_owned())),
        Fault::Status(code) => Some(refused(status::plain(*code))),
        Fault::TooMany { retry_after } => Some(refused(status::too_many(*retry_after))),
        // A watch that is over before it begins.
        Fault::CloseWatchesAtOnce => Some(text(200, JSON, String::new())),
        _ => None,
    }
}

async fn respond(shared: &Arc<Shared>, asked: &mut Asked) -> Result<Response<Body>, Refusal> {
    let body = asked
        .body
        .take()
        .ok_or_else(|| status::too_large(BODY_MOST))?;
    let tokens = shared.lock().tokens.clone();
    if !tokens.is_empty() && !tokens.contains(&asked.token) {
        return Err(status::plain(401));
    }
    let Some(route) = asked.route.take() else {
        return beside(shared, asked, body).await;
    };
    if !route.verb.is_empty() && !may(&shared.lock(), &asked.seen) {
        return Err(status::forbidden(&route, &asked.seen.full_resource(), USER));
    }
    if asked.has(|fault| matches!(fault, Fault::Expire)) {
        let expired = status::expired(1, shared.server.snapshot().revision());
        return match route.verb {
            "watch" => Ok(text(
                200,
                JSON,
                format!("{}\n", json!({ "type": "ERROR", "object": expired.status })),
            )),
            _ => Err(expired),
        };
    }
    let version = asked.seen.version.clone();
    let mut request = engine_request(&asked.head, body);
    if version != "v1" {
        *request.uri_mut() = convert::in_v1(&asked.head.uri, &version);
    }
    if let Some(body) = changed_body(asked, route.resource) {
        *request.body_mut() = Full::from(body.to_string());
        if asked.seen.content_type.starts_with(PROTOBUF) {
            request
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static(JSON));
        }
    }
    let answer = shared
        .server
        .handle(request)
        .await
        .map(|body| body.map_err(never).boxed_unsync());
    match version.as_str() {
        "v1" => Ok(answer),
        _ => Ok(converted(answer, version, route).await),
    }
}

fn engine_request(head: &Parts, body: Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body));
    request.method_mut().clone_from(&head.method);
    request.uri_mut().clone_from(&head.uri);
    request.headers_mut().clone_from(&head.headers);
    request
}

/// The body without the fields that this server does not know, in `v1`; `None` if it is for the engine as it is.
fn changed_body(asked: &Asked, resource: &Resource) -> Option<Value> {
    let mut body = asked.seen.body.clone()?;
    let drops = asked.faults.iter().filter_map(|fault| match fault {
        Fault::DropField(path) => Some(path),
        _ => None,
    });
    drops.for_each(|path| drop_field(&mut body, path));
    if asked.seen.version != "v1" {
        to_v1(&asked.seen.version, resource, &mut body);
    }
    (Some(&body) != asked.seen.body.as_ref()).then_some(body)
}

/// An answer of the engine in another version; of a watch, line by line.
async fn converted(answer: Response<Body>, version: String, route: Route) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    if route.verb == "watch" && head.status == 200 {
        let lines = body.map_frame(move |frame| {
            frame.map_data(|line| {
                let Ok(mut event) = serde_json::from_slice::<Value>(&line) else {
                    return line;
                };
                from_v1(&version, route.resource, &mut event["object"]);
                Bytes::from(format!("{event}\n"))
            })
        });
        return Response::from_parts(head, lines.boxed_unsync());
    }
    let whole = body
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    let whole = match serde_json::from_slice::<Value>(&whole) {
        Ok(mut object) => {
            from_v1(&version, route.resource, &mut object);
            Bytes::from(object.to_string())
        }
        Err(_) => whole,
    };
    head.headers
        .insert(CONTENT_LENGTH, HeaderValue::from(whole.len()));
    Response::from_parts(head, Full::new(whole).map_err(never).boxed_unsync())
}

/// Answers requests for paths that are not resources: tests set the version and the group of claims and slices.
async fn beside(shared: &Shared, asked: &Asked, body: Bytes) -> Result<Response<Body>, Refusal> {
    let path: Vec<&str> = asked
        .seen
        .path
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    match path.as_slice() {
        ["version"] if asked.seen.verb == "get" => {
            let answer = engine(shared, Uri::from_static("/version")).await;
            let mut version = answer.ok_or_else(|| status::plain(404))?;
            version["minor"] = shared.lock().minor_version.clone().into();
            Ok(json(&version))
        }
        ["apis", DRA_GROUP, rest @ ..] => {
            let found = if asked.seen.verb == "get" {
                discovery(&shared.lock(), rest)
            } else {
                None
            };
            found
                .map(|found| json(&found))
                .ok_or_else(|| status::plain(404))
        }
        _ => {
            let answer = shared
                .server
                .handle(engine_request(&asked.head, body))
                .await;
            Ok(answer.map(|body| body.map_err(never).boxed_unsync()))
        }
    }
}

/// A document of the engine.
async fn engine(shared: &Shared, uri: Uri) -> Option<Value> {
    let mut request = Request::new(Full::new(Bytes::new()));
    *request.uri_mut() = uri;
    let Ok(body) = shared
        .server
        .handle(request)
        .await
        .into_body()
        .collect()
        .await;
    serde_json::from_slice(&body.to_bytes()).ok()
}

/// Returns the discovery document of the group of claims and slices, or of a version of it.
fn discovery(state: &State, path: &[&str]) -> Option<Value> {
    let versions: Vec<&str> = state.served.versions.iter().map(String::as_str).collect();
    match path {
        [] => discovered_group(DRA_GROUP, &versions),
        [version] if state.served.has_version(version) => {
            let resources = nodedock_apiserver::resources();
            let here = resources.iter().filter(|resource| {
                resource.group == DRA_GROUP && state.served.has(resource, version)
            });
            Some(discovered_resources(
                &format!("{DRA_GROUP}/{version}"),
                here,
            ))
        }
        _ => None,
    }
}

fn may(state: &State, seen: &Seen) -> bool {
    let resource = seen.full_resource();
    let fits = |pattern: &str, found: &str| pattern == "*" || pattern == found;
    if state
        .denied
        .iter()
        .any(|(verb, denied)| fits(verb, &seen.verb) && fits(denied, &resource))
    {
        return false;
    }
    let Some(rules) = &state.rules else {
        return true;
    };
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

/// The first half of an answer, of a watch that of its first event; then the connection breaks.
async fn half(answer: Response<Body>, is_watch: bool) -> Result<Response<Body>, Broken> {
    let (head, mut body) = answer.into_parts();
    let whole = match is_watch {
        true => body
            .frame()
            .await
            .and_then(|frame| frame.ok()?.into_data().ok())
            .unwrap_or_default(),
        false => body.collect().await?.to_bytes(),
    };
    let first = whole.slice(..whole.len() / 2);
    Ok(Response::from_parts(
        head,
        StreamBody::new(broken_after(first)).boxed_unsync(),
    ))
}

/// Returns a body that breaks after these first bytes.
fn broken_after(first: Bytes) -> impl Stream<Item = Result<Frame<Bytes>, Broken>> + Send {
    let breaks = async {
        // What is there is sent before the server looks again.
        tokio::task::yield_now().await;
        Err(Broken)
    };
    stream::iter([Ok(Frame::data(first))]).chain(stream::once(breaks))
}
