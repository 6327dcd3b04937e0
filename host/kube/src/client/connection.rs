//! The connection to the API server, over which every request of the daemon goes.
//!
//! With an API server that speaks HTTP/2 it is one, which pings keep open and check: a read after minutes without a request needs no new
//! handshake, and a server that is gone is noticed within [`API_PING_PERIOD`] and [`API_PING_TIMEOUT`]; what was sent to one, within
//! [`API_UNACKNOWLEDGED`]. With other servers, and through proxies, it is HTTP/1.1.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ConfigExt};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};

use super::API_CONNECT;

/// Interval of pings on a connection on which nothing arrives. Thousands of nodes send them to an API server.
pub(crate) const API_PING_PERIOD: Duration = Duration::from_secs(15);

/// Time in which a ping is answered.
pub(crate) const API_PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Time in which the other machine acknowledges what was sent, or the connection is closed: half of a request's time, so that a read can be
/// sent once more on another connection.
const API_UNACKNOWLEDGED: Duration = Duration::from_secs(5);

/// Connections without a request that are kept of a server that speaks HTTP/1.1, which needs one for each request at the same time.
const API_IDLE_MAX: usize = 8;

/// Sends requests over shared connections.
pub(super) type Transport = BoxCloneSyncService<Request<Body>, Answer, BoxError>;

/// An answer whose body comes as it is read.
pub(super) type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// The transport, and what it does not add to requests itself.
pub(super) struct Connection {
    pub(super) transport: Transport,
    /// A token that is replaced without another connection.
    pub(super) token: Option<HeaderValue>,
}

impl Connection {
    pub(super) fn send(
        &self,
        mut request: Request<Body>,
    ) -> BoxFuture<'static, Result<Answer, BoxError>> {
        if let Some(token) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        self.transport.clone().oneshot(request).boxed()
    }
}

impl From<kube::Client> for Connection {
    fn from(client: kube::Client) -> Self {
        Self {
            transport: of_client(client),
            token: None,
        }
    }
}

/// Returns the transport to the server of a configuration. It repeats nothing.
pub(super) fn transport(config: kube::Config) -> Result<Transport, BoxError> {
    if config.proxy_url.is_some() {
        return Ok(of_client(kube::Client::try_from(config)?));
    }
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(API_PING_PERIOD));
    http.set_tcp_user_timeout(Some(API_UNACKNOWLEDGED));
    let tls = HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?);
    let tls = tls.https_or_http();
    let tls = match config.tls_server_name.clone() {
        Some(name) => tls.with_server_name_resolver(FixedServerNameResolver::new(name.try_into()?)),
        None => tls,
    };
    let mut connector = TimeoutConnector::new(tls.enable_all_versions().wrap_connector(http));
    connector.set_connect_timeout(Some(API_CONNECT));
    let mut client = legacy::Client::builder(TokioExecutor::new());
    client
        .timer(TokioTimer::new())
        .pool_idle_timeout(None::<Duration>)
        .pool_max_idle_per_host(API_IDLE_MAX)
        .http2_keep_alive_interval(API_PING_PERIOD)
        .http2_keep_alive_timeout(API_PING_TIMEOUT)
        .http2_keep_alive_while_idle(true);
    let client: legacy::Client<_, Body> = client.build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_response(boxed::<hyper::body::Incoming>)
        .map_err(BoxError::from)
        .service(client);
    Ok(BoxCloneSyncService::new(service))
}

fn of_client(client: kube::Client) -> Transport {
    BoxCloneSyncService::new(service_fn(move |request| {
        let client = client.clone();
        async move { Ok::<_, BoxError>(boxed(client.send(request).await?)) }
    }))
}

fn boxed<B>(answer: Response<B>) -> Answer
where
    B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    answer.map(|body| body.map_err(Into::into).boxed_unsync())
}

/// Returns whether a request failed since its connection did, and not since there was none.
pub(super) fn broke(error: &BoxError) -> bool {
    let through_proxy = match error.downcast_ref::<kube::Error>() {
        Some(kube::Error::Service(error)) => Some(error),
        _ => None,
    };
    let error = through_proxy
        .unwrap_or(error)
        .downcast_ref::<legacy::Error>();
    error.is_some_and(|error| !error.is_connect())
}
