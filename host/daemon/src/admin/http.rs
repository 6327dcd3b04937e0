//! HTTP/1.1, one request for each connection. Connections, the size of a request and its time are bounded: a client that is slow, or
//! says nothing, holds one place for a short time and nothing else.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::probes::{self, Live};
use super::{Admin, collect};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::limit;

/// What Prometheus asks for by this name.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// Where connections come from.
pub(super) trait Listener: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    fn connection(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn connection(&self) -> io::Result<Self::Stream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Listener for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn connection(&self) -> io::Result<Self::Stream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

/// What answers a request, by its method and path.
pub(super) trait Answers: Send + Sync + 'static {
    fn answer(&self, method: &Method, path: &str) -> impl Future<Output = Answer> + Send;
}

/// What answers for the node.
pub(super) struct Face {
    admin: Admin,
    live: Live,
}

pub(super) type Answer = Response<Full<Bytes>>;

impl Answers for Face {
    /// Whatever the query: a scraper may add one.
    async fn answer(&self, method: &Method, path: &str) -> Answer {
        if !matches!(path, "/metrics" | "/livez" | "/readyz") {
            return text(StatusCode::NOT_FOUND, "there are /metrics, /livez and /readyz\n".to_owned());
        }
        if method != Method::GET {
            return only_get();
        }
        match path {
            "/metrics" => self.metrics(),
            "/livez" => told(self.live.look().await),
            _ => told(probes::awaited(&self.admin).await),
        }
    }
}

impl Face {
    pub(super) fn new(admin: Admin) -> Self {
        Self { live: probes::live(admin.clone()), admin }
    }

    fn metrics(&self) -> Answer {
        match collect::exposition(&self.admin) {
            Ok(metrics) => with_type(StatusCode::OK, metrics, OPENMETRICS),
            Err(error) => {
                tracing::error!(error = chain(&error), "the metrics cannot be told");
                text(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be told\n".to_owned())
            }
        }
    }
}

pub(super) fn only_get() -> Answer {
    let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered\n".to_owned());
    refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
    refusal
}

/// What is wrong, a line each; nothing is well.
pub(super) fn told(wrong: Vec<String>) -> Answer {
    match wrong.as_slice() {
        [] => text(StatusCode::OK, "ok\n".to_owned()),
        wrong => text(StatusCode::SERVICE_UNAVAILABLE, wrong.join("\n") + "\n"),
    }
}

pub(super) fn text(status: StatusCode, body: String) -> Answer {
    with_type(status, body, TEXT)
}

fn with_type(status: StatusCode, body: String, kind: &'static str) -> Answer {
    let mut answer = Response::new(Full::from(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// Answers on a listener until the tasks stop.
pub(super) async fn serve(face: Arc<impl Answers>, listener: impl Listener, tasks: Tasks) {
    let places = Arc::new(Semaphore::new(limit::ADMIN_CONNECTIONS_MAX));
    let stopped = tasks.stopped();
    tokio::pin!(stopped);
    let mut failing = false;
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.connection().await)
        };
        let (place, accepted) = tokio::select! {
            // Who is not accepted yet sees the socket go.
            () = &mut stopped => return,
            next = next => next,
        };
        match accepted {
            Ok(stream) => {
                failing = false;
                let connection = serve_one(face.clone(), stream, tasks.clone());
                tasks.spawn("admin-connection", async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "no connection to the admin socket can be accepted, trying again");
                }
                tokio::time::sleep(limit::ADMIN_ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_one<S>(face: Arc<impl Answers>, stream: S, tasks: Tasks)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let face = face.clone();
        async move { Ok::<_, Infallible>(face.answer(request.method(), request.uri().path()).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limit::ADMIN_HEADERS_WALL)
        .max_headers(limit::ADMIN_HEADERS_MAX)
        .max_header_size(limit::ADMIN_HEADERS_BYTES_MAX)
        .max_buf_size(limit::ADMIN_HEADERS_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // The answer can be asked for again.
        () = tasks.stopped() => {}
        // A client that does not read its answer is left after a while.
        ended = tokio::time::timeout(limit::ADMIN_CONNECTION_WALL, connection) => {
            if let Ok(Err(error)) = ended {
                tracing::debug!(error = chain(&error), "a connection to the admin socket ended early");
            }
        }
    }
}
