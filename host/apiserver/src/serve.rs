//! Connections: HTTP/1.1 on a Unix socket, and with TLS and a token on a loopback address.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::{AUTHORIZATION, CONNECTION};
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::identity::{Identity, IdentityError};
use crate::respond::Body;
use crate::server::Server;
use crate::status;

/// Open connections of one listener, of which a client has one for each watch. More wait until one ends.
const CONNECTIONS_MAX: usize = 1024;
/// A client that sends no request in this time loses its connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);
/// As [`HEADER_TIMEOUT`] with TLS, where every user of the machine can connect.
const TLS_HEADER_TIMEOUT: Duration = Duration::from_secs(10);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After a connection could not be accepted, as with too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a listener is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot read the address of the listener")]
    Address(#[source] io::Error),
    #[error("the API is served on loopback addresses, not on {0}")]
    NotLoopback(SocketAddr),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Serves until `stop` is cancelled, then closes every connection. Who can open the socket may do everything: its directory says who.
pub async fn serve_unix(server: Server, listener: UnixListener, stop: CancellationToken) {
    let accept = || async { listener.accept().await.map(|(stream, _)| stream) };
    serve(accept, stop, move |stream| connection(stream, server.clone(), None)).await;
}

/// As [`serve_unix`] with TLS, for clients that have the token of `identity`.
///
/// # Errors
///
/// At once, if the listener is on an address that is not a loopback address, or the identity is malformed.
pub async fn serve_tls(
    server: Server,
    listener: TcpListener,
    identity: &Identity,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let address = listener.local_addr().map_err(ServeError::Address)?;
    if !address.ip().is_loopback() {
        return Err(ServeError::NotLoopback(address));
    }
    let acceptor = TlsAcceptor::from(Arc::new(identity.server_config()?));
    let token: Arc<str> = identity.token.as_str().into();
    let accept = || async { listener.accept().await.map(|(stream, _)| stream) };
    let open = move |stream| {
        let (acceptor, server, token) = (acceptor.clone(), server.clone(), Arc::clone(&token));
        async move {
            // A failed handshake is a client that speaks no TLS, or does not trust the certificate.
            if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                connection(stream, server, Some(token)).await;
            }
        }
    };
    serve(accept, stop, open).await;
    Ok(())
}

async fn serve<S, A, F>(accept: impl Fn() -> A, stop: CancellationToken, open: impl Fn(S) -> F)
where
    A: Future<Output = io::Result<S>>,
    F: Future<Output = ()> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let mut failed = false;
    loop {
        let next = async {
            // The semaphore is never closed.
            let permit = Arc::clone(&permits).acquire_owned().await;
            (permit, accept().await)
        };
        // A connection that is not accepted yet waits in the listener; a permit that is not used is returned.
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            (permit, accepted) = next => match accepted {
                Ok(stream) => {
                    failed = false;
                    let connection = open(stream);
                    connections.spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    if !std::mem::replace(&mut failed, true) {
                        tracing::warn!(error = &error as &dyn std::error::Error, "cannot accept a connection to the API");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
    connections.shutdown().await;
}

/// Serves one connection, whose client has to send the token, if there is one.
pub(crate) async fn connection<S>(stream: S, server: Server, token: Option<Arc<str>>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let header_timeout = if token.is_some() { TLS_HEADER_TIMEOUT } else { HEADER_TIMEOUT };
    let service = service_fn(move |request: Request<Incoming>| {
        let (server, token) = (server.clone(), token.clone());
        async move {
            Ok::<Response<Body>, std::convert::Infallible>(admitted(&server, token.as_deref(), request).await)
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(header_timeout);
    // An error here is a client that went away.
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

async fn admitted(server: &Server, token: Option<&str>, request: Request<Incoming>) -> Response<Body> {
    match token.is_none_or(|token| has_token(&request, token)) {
        true => server.handle(request).await,
        false => {
            // A client without the token does not hold a connection.
            let mut refused = status::plain(401).into_response();
            refused.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            refused
        }
    }
}

/// In a time that does not depend on how much of the token is right.
fn has_token<B>(request: &Request<B>, token: &str) -> bool {
    let given = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
    given.ct_eq(token.as_bytes()).into()
}
