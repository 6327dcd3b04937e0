//! Connections: HTTP/1.1 on a Unix socket, and with TLS and a token on a loopback address.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::{AUTHORIZATION, CONNECTION};
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::identity::{Identity, IdentityError};
use crate::peer::{self, Peer};
use crate::respond::Body;
use crate::server::Server;
use crate::status;
use crate::strangers::{STRANGERS_MAX, Stranger, Strangers};

/// Open connections of one listener, of which a client has one for each watch; on the address, those whose client has sent the token. On
/// the socket more wait until one ends.
const CONNECTIONS_MAX: usize = 1024;
/// A client that sends no request in this time loses its connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);
/// Deadline for the token, handshake included, on the address, where every user of the machine can connect.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Request line and headers on the address: selectors are in the request line.
const HEADERS_BYTES_MAX: usize = 32 << 10;
/// Maximum number of headers: several times the most that clients of Kubernetes send.
const HEADERS_MAX: usize = 64;
/// Pause after a connection could not be accepted, as with too many open files.
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
    serve(
        || async { listener.accept().await.map(|(stream, _)| stream) },
        CONNECTIONS_MAX,
        stop,
        move |stream| connection(stream, server.clone(), None),
    )
    .await;
}

/// Serves like [`serve_unix`], each connection by the server for the user of its client. `None` from `server_of` closes it; what comes with
/// the server is kept until the connection ends.
pub async fn serve_unix_by_user<F, K>(
    server_of: impl Fn(u32) -> F + Clone + Send + Sync + 'static,
    listener: UnixListener,
    stop: CancellationToken,
) where
    F: Future<Output = Option<(Server, K)>> + Send,
    K: Send,
{
    let open = move |stream: UnixStream| {
        let server_of = server_of.clone();
        async move {
            match stream.peer_cred().map(|peer| peer.uid()) {
                Ok(user) => {
                    if let Some((server, _kept)) = server_of(user).await {
                        connection(stream, server, None).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the user of a client of the API is not known");
                }
            }
        }
    };
    let accept = || async { listener.accept().await.map(|(stream, _)| stream) };
    serve(accept, CONNECTIONS_MAX, stop, open).await;
}

/// Serves like [`serve_unix`], with TLS and for clients that have the token of `identity`. Clients without it cannot block them.
///
/// # Errors
///
/// Fails at once if the listener is on an address that is not a loopback address, or if the identity is malformed.
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
    let (strangers, permits) = (
        Strangers::default(),
        Arc::new(Semaphore::new(CONNECTIONS_MAX)),
    );
    let open = move |stream: TcpStream| {
        let (acceptor, server) = (acceptor.clone(), server.clone());
        let door = enter(&stream, &strangers).map(|stranger| Door {
            token: Arc::clone(&token),
            permits: Arc::clone(&permits),
            client: Arc::new(Mutex::new(Client::Stranger(stranger))),
        });
        async move {
            let Some(door) = door else { return };
            // Dropped, a connection is closed: its client came without the token.
            tokio::select! {
                () = door.closed() => {}
                () = handshake(acceptor, stream, server, door.clone()) => {}
            }
        }
    };
    // There is always room to accept one that takes the place of another.
    serve(
        || async { listener.accept().await.map(|(stream, _)| stream) },
        CONNECTIONS_MAX + 2 * STRANGERS_MAX,
        stop,
        open,
    )
    .await;
    Ok(())
}

async fn handshake(acceptor: TlsAcceptor, stream: TcpStream, server: Server, door: Door) {
    // A failed handshake is a client that speaks no TLS, or does not trust the certificate.
    if let Ok(stream) = acceptor.accept(stream).await {
        connection(stream, server, Some(door)).await;
    }
}

/// Counts a connection for its user. None: the client has closed it already.
fn enter(stream: &TcpStream, strangers: &Strangers) -> Option<Stranger> {
    match peer::peer(stream) {
        Ok(Peer::User(user)) => Some(strangers.enter(Some(user))),
        Ok(Peer::Closed) => None,
        Err(error) => {
            tracing::debug!(%error, "the user of a client of the API is not known");
            Some(strangers.enter(None))
        }
    }
}

/// Lets the client of a connection in when it sends the token.
#[derive(Clone)]
pub(crate) struct Door {
    token: Arc<str>,
    /// Permits of clients that have sent the token.
    permits: Arc<Semaphore>,
    client: Arc<Mutex<Client>>,
}

enum Client {
    Stranger(Stranger),
    Known { _permit: OwnedSemaphorePermit },
}

impl Door {
    #[cfg(test)]
    pub(crate) fn new(token: &str) -> Self {
        let client = Arc::new(Mutex::new(Client::Stranger(
            Strangers::default().enter(None),
        )));
        Self {
            token: token.into(),
            permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            client,
        }
    }

    /// Resolves when the client has to leave: for another one, or since it has not sent the token in time.
    pub(crate) async fn closed(&self) {
        let Some(ended) = self.ended() else {
            return std::future::pending().await;
        };
        tokio::select! {
            // Of a client that has sent the token meanwhile, this never resolves.
            () = ended => {}
            () = tokio::time::sleep(TOKEN_TIMEOUT) => {
                if self.is_known() {
                    std::future::pending().await
                }
            }
        }
    }

    /// None: the client has sent the token.
    fn ended(&self) -> Option<WaitForCancellationFutureOwned> {
        match &*self.client() {
            Client::Stranger(stranger) => Some(stranger.ended()),
            Client::Known { .. } => None,
        }
    }

    fn is_known(&self) -> bool {
        matches!(*self.client(), Client::Known { .. })
    }

    fn client(&self) -> std::sync::MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The status with which a request is refused.
    fn refusal<B>(&self, request: &Request<B>) -> Option<u16> {
        if !has_token(request, &self.token) {
            return Some(401);
        }
        let mut client = self.client();
        if let Client::Stranger(_) = &*client {
            let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
                return Some(503);
            };
            *client = Client::Known { _permit: permit };
        }
        None
    }
}

async fn serve<S, A, F>(
    accept: impl Fn() -> A,
    connections_max: usize,
    stop: CancellationToken,
    open: impl Fn(S) -> F,
) where
    A: Future<Output = io::Result<S>>,
    F: Future<Output = ()> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(connections_max));
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

/// Serves one connection, whose client has to send the token, if there is a door.
pub(crate) async fn connection<S>(stream: S, server: Server, door: Option<Door>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    if door.is_some() {
        http.max_headers(HEADERS_MAX)
            .max_header_size(HEADERS_BYTES_MAX)
            .max_buf_size(HEADERS_BYTES_MAX);
    }
    let service = service_fn(move |request: Request<Incoming>| {
        let (server, door) = (server.clone(), door.clone());
        async move {
            Ok::<Response<Body>, std::convert::Infallible>(
                admitted(&server, door.as_ref(), request).await,
            )
        }
    });
    // An error here is a client that went away.
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

async fn admitted(
    server: &Server,
    door: Option<&Door>,
    request: Request<Incoming>,
) -> Response<Body> {
    match door.and_then(|door| door.refusal(&request)) {
        None => server.handle(request).await,
        Some(code) => {
            // A client that is not let in does not hold a connection.
            let mut refused = status::plain(code).into_response();
            refused
                .headers_mut()
                .insert(CONNECTION, HeaderValue::from_static("close"));
            refused
        }
    }
}

/// Compares the token in a time that does not depend on the number of its correct characters.
fn has_token<B>(request: &Request<B>, token: &str) -> bool {
    let given = request
        .headers()
        .get(AUTHORIZATION)
        .map(HeaderValue::as_bytes)
        .unwrap_or_default();
    let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
    given.ct_eq(token.as_bytes()).into()
}
