//! The layer around the client: the rate of requests, their time, the size of their answers, and what these say of the server.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Collected, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::Frame;
use kube::client::Body;
use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, timeout};
use tower::BoxError;

use super::connection::{Answer, Connection, broke};
use super::counts::{Call, Verb};
use super::error::{content_type, described};
use super::rate::Urgency;
use super::{API_REQUEST, ApiError, ErrorKind, RequestLayer, reachability};

/// Age after which a watch does not count as flapping.
pub(crate) const WATCH_STEADY: Duration = Duration::from_secs(10);

/// Time without an event after which a watch is dead: bookmarks arrive every minute.
pub(crate) const WATCH_SILENCE: Duration = Duration::from_secs(150);

/// Bytes of a page of a list: a node has some hundred pods and slices.
const API_PAGE_BYTES_MAX: usize = 16 << 20;

/// Bytes of an object: etcd takes 1.5 MiB in a denser form.
pub(crate) const API_OBJECT_BYTES_MAX: usize = 4 << 20;

type AnswerBody = UnsyncBoxBody<Bytes, BoxError>;

/// A client whose requests go through this layer.
pub(super) fn client(shared: &Arc<RequestLayer>, urgency: Urgency) -> kube::Client {
    let shared = Arc::clone(shared);
    let service = tower::service_fn(move |request| {
        let shared = Arc::clone(&shared);
        async move { shared.send(urgency, request).await.map_err(BoxError::from) }
    });
    kube::Client::new(service, "default")
}

impl RequestLayer {
    /// Repeats a request that was refused with credentials that have been replaced since.
    pub(super) async fn send(
        &self,
        urgency: Urgency,
        request: Request<Body>,
    ) -> Result<Answer, ApiError> {
        let (used, again) = (self.credentials.current(), copied(&request));
        let once_more = again.as_ref().and_then(copied);
        match (self.timed(urgency, &used, request, once_more).await, again) {
            (Err(error), Some(request)) if error.kind == ErrorKind::Unauthorized => {
                let Some(newer) = self.credentials.replaced(&used).await else {
                    return Err(error);
                };
                self.metrics.retries.inc();
                self.timed(urgency, &newer, request, None).await
            }
            (outcome, _) => outcome,
        }
    }

    /// Waits until the rate allows the request, and limits its time. `again`: a copy of it, to be sent on another connection if the first one
    /// breaks.
    async fn timed(
        &self,
        urgency: Urgency,
        connection: &Connection,
        request: Request<Body>,
        again: Option<Request<Body>>,
    ) -> Result<Answer, ApiError> {
        let call = Call::of(request.method(), request.uri());
        let asked = Instant::now();
        let permit = self.rate.permit(urgency).await;
        self.metrics.waits.observe(asked.elapsed().as_secs_f64());
        let _permit = permit?;
        let sent = Instant::now();
        let exchange = async {
            let mut sent = connection.send(request).await;
            let is_lost = matches!(&sent, Err(error) if is_repeated(call, error));
            if is_lost && let Some(again) = again {
                sent = connection.send(again).await;
            }
            match sent {
                Ok(answer) => self.answer(call, answer).await,
                Err(error) => Err(ApiError::of_transport(error)),
            }
        };
        // no error: the outcome is another error then
        let outcome = timeout(API_REQUEST, exchange).await.unwrap_or_else(|_| {
            let words = format!("no answer within {} s", API_REQUEST.as_secs());
            Err(ApiError::unreachable(words))
        });
        let code = outcome
            .as_ref()
            .map_or_else(|error| error.code, |answer| answer.status().as_u16());
        self.metrics.answered(call, code, sent.elapsed());
        let failure = outcome.as_ref().err();
        reachability::learn(&self.reachability, failure);
        if let Some(delay) = failure.and_then(|failure| failure.retry_after) {
            self.rate.pause(delay);
        }
        if call.verb == Verb::Watch && failure.is_some() {
            self.metrics.watch_restarts.inc();
        }
        outcome
    }

    /// The answer, or what it means if it is no success.
    async fn answer(&self, call: Call, response: Answer) -> Result<Answer, ApiError> {
        let (head, body) = response.into_parts();
        if head.status.is_redirection() {
            let to = head
                .headers
                .get(http::header::LOCATION)
                .and_then(|to| to.to_str().ok());
            let to = to.unwrap_or("nowhere");
            let words = format!(
                "{} to {to}; is there a proxy or a login page between?",
                head.status
            );
            return Err(ApiError::new(ErrorKind::NotKubernetes, words));
        }
        if head.status.is_success() && call.verb == Verb::Watch {
            let body = watched(body, self.metrics.watch_restarts.clone());
            return Ok(Response::from_parts(head, body));
        }
        let bytes_max = match call.verb {
            Verb::List => API_PAGE_BYTES_MAX,
            _ => API_OBJECT_BYTES_MAX,
        };
        let bytes = collected(body, bytes_max).await?;
        if !head.status.is_success() {
            return Err(ApiError::of_answer(head.status, &head.headers, &bytes));
        }
        if !bytes.trim_ascii_start().starts_with(b"{") {
            let words = described(content_type(&head.headers), &bytes);
            return Err(ApiError::new(ErrorKind::NotKubernetes, words));
        }
        let body = Full::new(bytes)
            .map_err(|never| match never {})
            .boxed_unsync();
        Ok(Response::from_parts(head, body))
    }
}

/// Returns whether a request that failed is sent once more: a read has no effect, and a connection that was without requests for long may
/// have been lost unnoticed.
fn is_repeated(call: Call, error: &BoxError) -> bool {
    matches!(call.verb, Verb::Get | Verb::List) && broke(error)
}

fn copied(request: &Request<Body>) -> Option<Request<Body>> {
    let mut copy = Request::new(request.body().try_clone()?);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

/// Collects a body of at most so many bytes. A type of its own, since the compiler does not prove that the future of [`Limited`] is `Send` within another
/// one.
fn limited(
    body: AnswerBody,
    bytes_max: usize,
) -> BoxFuture<'static, Result<Collected<Bytes>, BoxError>> {
    Limited::new(body, bytes_max).collect().boxed()
}

async fn collected(body: AnswerBody, bytes_max: usize) -> Result<Bytes, ApiError> {
    match limited(body, bytes_max).await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let words = format!("its answer has more than {bytes_max} bytes");
            Err(ApiError::new(ErrorKind::NotKubernetes, words))
        }
        Err(error) => {
            let words = nodedock_base::error::chain(error.as_ref());
            Err(ApiError::unreachable(format!(
                "the answer broke off: {words}"
            )))
        }
    }
}

/// The body of a watch, which fails when it is silent for too long or has too large an event, and when the server ends it as soon as
/// it began: then the next one waits.
fn watched(body: AnswerBody, restarts: Counter) -> AnswerBody {
    let opened = Instant::now();
    let frames = futures::stream::try_unfold((body, 0), move |(mut body, line)| {
        let restarts = restarts.clone();
        async move {
            let next = frame(&mut body, line).await;
            if !matches!(next, Ok(Some(_))) {
                restarts.inc();
            }
            match next? {
                Some((data, line)) => Ok(Some((Frame::data(data), (body, line)))),
                None if opened.elapsed() < WATCH_STEADY => Err(BoxError::from(
                    ApiError::unreachable("it ended a watch at once"),
                )),
                None => Ok(None),
            }
        }
    });
    StreamBody::new(frames).boxed_unsync()
}

/// The next bytes of a watch, and how many have come since the last event ended.
async fn frame(body: &mut AnswerBody, line: usize) -> Result<Option<(Bytes, usize)>, ApiError> {
    let Ok(frame) = timeout(WATCH_SILENCE, body.frame()).await else {
        let words = format!("a watch was silent for {} s", WATCH_SILENCE.as_secs());
        return Err(ApiError::unreachable(words));
    };
    let data = match frame {
        None => return Ok(None),
        Some(Err(error)) => return Err(ApiError::of_transport(error)),
        Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
    };
    let line = match data.iter().rposition(|byte| *byte == b'\n') {
        Some(end) => data.len() - end,
        None => line + data.len(),
    };
    if line > API_OBJECT_BYTES_MAX {
        let words = format!(
            "an event of a watch has more than {} bytes",
            API_OBJECT_BYTES_MAX
        );
        return Err(ApiError::new(ErrorKind::NotKubernetes, words));
    }
    Ok(Some((data, line)))
}
