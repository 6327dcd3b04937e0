//! HTTP/1.1, one request for each connection. Connections, the size of a request and its time are bounded: a client that is slow or
//! silent occupies one connection for a short time and nothing else.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::handler::Handler;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use futures::{Stream, StreamExt};
use http::StatusCode;
use http::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use super::probes::{self, Liveness};
use super::{Admin, collect};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;

/// Delay after a failed `accept`: no file descriptor is left, and an immediate retry would busy-loop.
pub(crate) const ADMIN_ACCEPT_PAUSE: Duration = Duration::from_millis(250);

/// Deadline of a request's headers, and of a whole connection: a response has some hundred kB.
pub(crate) const ADMIN_HEADERS_WALL: Duration = Duration::from_secs(5);
pub(crate) const ADMIN_CONNECTION_WALL: Duration = Duration::from_secs(15);

/// Headers of a request there, and their bytes with the request line (the minimum of hyper).
pub(crate) const ADMIN_HEADERS_MAX: usize = 64;
pub(crate) const ADMIN_HEADERS_BYTES_MAX: usize = 8 << 10;

/// Concurrent connections to the admin socket, and to its address: further ones wait.
pub(crate) const ADMIN_CONNECTIONS_MAX: usize = 16;

/// Content type that Prometheus requests by this name.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The responses of an instance of the daemon: it lives while it waits for its turn, and is ready when it serves.
#[derive(Clone)]
pub struct Front(Arc<watch::Sender<Router>>);

impl Front {
    pub fn new(waits_for: &str) -> Self {
        Self(Arc::new(watch::Sender::new(waiting(waits_for))))
    }

    /// The instance does not serve; `why` is the response to a readiness probe.
    pub fn stand_by(&self, why: &str) {
        drop(self.0.send_replace(waiting(why)));
    }

    /// The instance serves.
    pub fn serve(&self, admin: Admin) {
        drop(self.0.send_replace(serving(admin)));
    }
}

fn waiting(why: &str) -> Router {
    let not_ready = (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"));
    Router::new()
        .route("/livez", only_get("ok\n"))
        .fallback_service(only_get(not_ready))
}

fn serving(admin: Admin) -> Router {
    let (registry, liveness) = (
        Arc::new(collect::registry(&admin)),
        Arc::new(Liveness::new(admin.clone())),
    );
    Router::new()
        .route("/metrics", only_get(async move || metrics(&registry)))
        .route(
            "/livez",
            only_get(async move || probed(&liveness.clone().problems().await)),
        )
        .route(
            "/readyz",
            only_get(async move || probed(&probes::awaited(&admin).await)),
        )
        .fallback((
            StatusCode::NOT_FOUND,
            "there are /metrics, /livez and /readyz\n",
        ))
}

/// Also refuses HEAD, which axum routes like GET.
fn only_get<H: Handler<T, ()>, T: 'static>(handler: H) -> MethodRouter {
    let refusal = (
        StatusCode::METHOD_NOT_ALLOWED,
        [(ALLOW, "GET")],
        "only GET is answered\n",
    );
    get(handler).head(refusal.clone()).fallback(refusal)
}

fn metrics(registry: &Registry) -> Response {
    let mut text = String::new();
    match encode(&mut text, registry) {
        Ok(()) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => {
            tracing::error!(error = chain(&error), "the metrics cannot be encoded");
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                "the metrics cannot be encoded\n",
            )
                .into_response()
        }
    }
}

/// The response to a probe, with a line for each problem.
fn probed(problems: &[String]) -> Response {
    match problems {
        [] => "ok\n".into_response(),
        problems => (StatusCode::SERVICE_UNAVAILABLE, problems.join("\n") + "\n").into_response(),
    }
}

/// Serves the connections of a listener. Safe to drop: a client that is not accepted yet sees the socket removed.
pub(super) async fn serve<S>(
    front: Front,
    mut incoming: impl Stream<Item = io::Result<S>> + Unpin,
    tasks: Tasks,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(ADMIN_CONNECTIONS_MAX));
    let mut failing = false;
    while let Ok(permit) = permits.clone().acquire_owned().await {
        let Some(accepted) = incoming.next().await else {
            return;
        };
        match accepted {
            Ok(stream) => {
                failing = false;
                let connection = serve_one(front.clone(), stream);
                // Safe to drop: the client can repeat its request.
                tasks.spawn_until_stopped("admin-connection", async move {
                    connection.await;
                    drop(permit);
                });
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "no connection to the admin socket can be accepted, trying again");
                }
                tokio::time::sleep(ADMIN_ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_one<S>(front: Front, stream: S)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(ADMIN_HEADERS_WALL)
        .max_headers(ADMIN_HEADERS_MAX)
        .max_header_size(ADMIN_HEADERS_BYTES_MAX)
        .max_buf_size(ADMIN_HEADERS_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(
            TokioIo::new(stream),
            service_fn(move |request| {
                let router = front.0.borrow().clone();
                router.oneshot(request)
            }),
        );
    // A client that does not read its response is disconnected after a while.
    if let Ok(Err(error)) = tokio::time::timeout(ADMIN_CONNECTION_WALL, connection).await {
        tracing::debug!(
            error = chain(&error),
            "a connection to the admin socket ended early"
        );
    }
}
