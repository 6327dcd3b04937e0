//! Processing of a request up to its response.

use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, USER_AGENT, WARNING};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::Frame;
use serde_json::Value;

use crate::negotiate::{Form, form};
use crate::protobuf;
use crate::reads;
use crate::route::{self, Route};
use crate::server::Server;
use crate::shape::Shape;
use crate::status::{self, Refusal};
use crate::validate::{Compiled, Verdicts};
use crate::watch::Watching;
use crate::writes::{self, APPLY, PATCHES, Write};
use crate::{discovery, openapi, reviews, yaml};

/// Largest body of a request in bytes, that of Kubernetes' API server.
const BODY_BYTES_MAX: usize = 3 << 20;
/// A client that does not send its body in this time does not hold its connection longer.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Times that a write is decided again because expressions of the object were to be compiled, or its parameters to be checked: a patch has
/// others if the object changes meanwhile.
const TRIES_MAX: usize = 5;
const JSON: &str = "application/json";
const YAML: &str = "application/yaml";
/// The encodings of an object. Kubernetes' protobuf is one of some kinds alone, so that no client is advised to use it.
const BODIES: [&str; 2] = [JSON, YAML];

/// Body of a response; for a watch, it continues until the watch ends.
pub type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;

enum ApiResponse {
    Whole {
        code: u16,
        content_type: &'static str,
        text: String,
        headers: Vec<(HeaderName, HeaderValue)>,
    },
    Watch(Box<Watching>),
}

impl From<Refusal> for ApiResponse {
    fn from(refusal: Refusal) -> Self {
        let retry_after = refusal
            .retry_after
            .map(|seconds| (RETRY_AFTER, HeaderValue::from(seconds)));
        let text = refusal.status.to_string();
        Self::Whole {
            code: refusal.code,
            content_type: JSON,
            text,
            headers: retry_after.into_iter().collect(),
        }
    }
}

impl ApiResponse {
    fn text(code: u16, content_type: &'static str, text: impl Into<String>) -> Self {
        Self::Whole {
            code,
            content_type,
            text: text.into(),
            headers: Vec::new(),
        }
    }

    fn json(code: u16, body: &Value) -> Self {
        Self::text(code, JSON, body.to_string())
    }

    fn into_response(self) -> Response<Body> {
        let (code, content_type, more, body) = match self {
            Self::Whole {
                code,
                content_type,
                text,
                mut headers,
            } => {
                headers.push((CONTENT_LENGTH, HeaderValue::from(text.len())));
                (
                    code,
                    content_type,
                    headers,
                    Full::new(Bytes::from(text)).boxed_unsync(),
                )
            }
            Self::Watch(watching) => {
                let frames = watching.lines().map(|line| Ok(Frame::data(line)));
                (
                    200,
                    JSON,
                    Vec::new(),
                    StreamBody::new(frames).boxed_unsync(),
                )
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() =
            StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        for (name, value) in more {
            headers.append(name, value);
        }
        response
    }
}

impl Refusal {
    /// The answer.
    pub fn into_response(self) -> Response<Body> {
        ApiResponse::from(self).into_response()
    }
}

fn header(headers: &HeaderMap, name: HeaderName) -> &str {
    headers
        .get(name)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

impl Server {
    /// Answers a request of any client: the caller decides which clients are let in. A body that breaks off is answered with 400.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let (head, body) = request.into_parts();
        let answer = match body_of(body).await {
            Ok(body) => self.answer(&head, &body).await,
            Err(refusal) => Err(refusal),
        };
        answer.unwrap_or_else(ApiResponse::from).into_response()
    }

    async fn answer(
        &self,
        head: &http::request::Parts,
        body: &[u8],
    ) -> Result<ApiResponse, Refusal> {
        let Some(route) = self.route(&head.method, &head.uri) else {
            return self.beside(head, body);
        };
        if route.verb.is_empty() {
            return Err(status::no_such_method());
        }
        if let Some(access) = &self.access {
            access(&route)?;
        }
        let shape = Shape::of(&route, header(&head.headers, ACCEPT))?;
        let object = |object| Ok(ApiResponse::json(200, &shape.of_object(&route, object)));
        match route.verb {
            "watch" => Watching::open(&self.shared, route, shape)
                .map(|watching| ApiResponse::Watch(watching.into())),
            "get" => object(reads::get(&self.snapshot(), &route)?),
            "list" => {
                let (snapshot, forgotten) = {
                    let state = self.shared.lock();
                    (state.now.clone(), state.forgotten)
                };
                object(reads::list(&snapshot, forgotten, &route)?)
            }
            _ => {
                let ((code, written), warnings) = self.written(&route, &head.headers, body).await?;
                let text = shape.of_object(&route, written).to_string();
                let headers = warnings
                    .iter()
                    .filter_map(|warning| warning_header(warning))
                    .collect();
                Ok(ApiResponse::Whole {
                    code,
                    content_type: JSON,
                    text,
                    headers,
                })
            }
        }
    }

    async fn written(
        &self,
        route: &Route,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<(writes::Written, Vec<String>), Refusal> {
        let content_type = header(headers, CONTENT_TYPE);
        let mut write = Write {
            options: &self.shared.options,
            check: self.check.as_ref().or(self.shared.options.check.as_ref()),
            route,
            body: read(route, content_type, body)?,
            content_type,
            user_agent: header(headers, USER_AGENT),
            compiled: Compiled::default(),
            to_compile: Mutex::default(),
            verdicts: Verdicts::default(),
            to_validate: Mutex::default(),
        };
        let dry_run = is_dry_run(route, &write.body)?;
        if route.verb == "deletecollection" {
            let (items, warnings) = self
                .write(dry_run, |draft| writes::delete_all(draft, &write))
                .await?;
            let list = reads::list_of(route, self.snapshot().revision(), items.into_iter());
            return Ok(((200, list), warnings));
        }
        let mut tries = 0;
        let (written, warnings) = loop {
            let decided = self.write(dry_run, |draft| match route.verb {
                "create" => writes::create(draft, &write),
                "update" => writes::update(draft, &write),
                "patch" => writes::patch(draft, &write),
                _ => writes::delete(draft, &write),
            });
            let decided = decided.await;
            tries += 1;
            let (to_compile, to_validate) = (write.take_to_compile(), write.take_to_validate());
            let is_decided = to_compile.is_empty() && to_validate.is_empty();
            if is_decided || tries > TRIES_MAX {
                break decided?;
            }
            if !to_compile.is_empty() {
                write.compiled.compile_apart(to_compile).await;
            }
            if let Some(check) = &self.shared.options.parameters {
                write.verdicts.add(check, to_validate).await;
            }
        };
        Ok((writes::served(route, written), warnings))
    }

    /// Answers requests for paths that are no resource.
    fn beside(&self, head: &http::request::Parts, body: &[u8]) -> Result<ApiResponse, Refusal> {
        let path = route::parts(&head.uri);
        if let Some(review) = reviews::find(&path) {
            if head.method != Method::POST {
                return Err(status::no_such_method());
            }
            // Every review says that its user may do everything.
            if self.access.is_some() {
                return Err(status::plain(403));
            }
            // The answer does not depend on what is asked, which kubectl encodes as protobuf.
            let is_json = !header(&head.headers, CONTENT_TYPE).starts_with(protobuf::CONTENT_TYPE);
            let asked = if is_json { parsed(body)? } else { Value::Null };
            return Ok(ApiResponse::json(201, &reviews::answer(review, &asked)));
        }
        if head.method != Method::GET {
            return Err(status::plain(404));
        }
        let options = &self.shared.options;
        match path.as_slice() {
            ["healthz" | "livez" | "readyz", ..] => {
                return Ok(ApiResponse::text(200, "text/plain; charset=utf-8", "ok"));
            }
            [root @ ("api" | "apis")]
                if form(header(&head.headers, ACCEPT))
                    .is_ok_and(|form| form == Form::AggregatedDiscovery) =>
            {
                let document = discovery::aggregated(options, root);
                return Ok(ApiResponse::text(
                    200,
                    discovery::AGGREGATED,
                    document.to_string(),
                ));
            }
            ["openapi", "v2"] => {
                return Ok(ApiResponse::text(
                    200,
                    openapi::V2_CONTENT_TYPE,
                    openapi::V2,
                ));
            }
            _ => {}
        }
        if let ["openapi", "v3", group @ ..] = path.as_slice() {
            let document = match group {
                [] => Some(openapi::index()),
                group => openapi::document_of(&group.join("/")),
            };
            return document
                .map(|text| ApiResponse::text(200, JSON, text))
                .ok_or_else(|| status::plain(404));
        }
        let document = discovery::document(options, &path);
        document
            .map(|document| ApiResponse::json(200, &document))
            .ok_or_else(|| status::plain(404))
    }
}

async fn body_of<B>(body: B) -> Result<Bytes, Refusal>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, BODY_BYTES_MAX).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(status::too_large(BODY_BYTES_MAX)),
        Ok(Err(error)) => Err(status::bad_request(format!(
            "the body of the request breaks off: {error}"
        ))),
        Err(_) => Err(status::body_timeout()),
    }
}

fn parsed(body: &[u8]) -> Result<Value, Refusal> {
    serde_json::from_slice(body).map_err(|error| {
        status::bad_request(format!(
            "couldn't get version/kind; json parse error: {error}"
        ))
    })
}

/// The body of a write as JSON, by its content type.
fn read(route: &Route, content_type: &str, body: &[u8]) -> Result<Value, Refusal> {
    let is_delete = route.verb.starts_with("delete");
    if body.is_empty() && is_delete {
        return Ok(Value::Null);
    }
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    match (route.verb, media_type) {
        ("patch", APPLY) => yaml::parsed(body),
        ("patch", media_type) if PATCHES.contains(&media_type) => parsed(body),
        ("patch", _) => Err(status::unsupported_type(&PATCHES)),
        (_, "" | JSON) => parsed(body),
        (_, YAML) => yaml::parsed(body),
        (_, protobuf::CONTENT_TYPE) => {
            protobuf::to_json(body).ok_or_else(|| status::unsupported_type(&BODIES))
        }
        _ => Err(status::unsupported_type(&BODIES)),
    }
}

/// Returns true if a write is a dry run, by its address or by the options in the body of a deletion.
fn is_dry_run(route: &Route, body: &Value) -> Result<bool, Refusal> {
    let in_body = body["dryRun"]
        .as_array()
        .filter(|_| route.verb.starts_with("delete"));
    let mut asked = in_body
        .into_iter()
        .flatten()
        .map(|value| value.as_str().unwrap_or_default())
        .collect::<Vec<_>>();
    asked.extend(route.query.get("dryRun").map(String::as_str));
    match asked.iter().find(|asked| **asked != "All") {
        Some(other) => Err(status::bad_request(format!(
            "dryRun: Unsupported value: \"{other}\": supported values: \"All\""
        ))),
        None => Ok(!asked.is_empty()),
    }
}

/// Builds a `Warning` header (RFC 9111) that applies to this response only.
fn warning_header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
    HeaderValue::from_str(&format!("299 - \"{quoted}\""))
        .ok()
        .map(|value| (WARNING, value))
}
