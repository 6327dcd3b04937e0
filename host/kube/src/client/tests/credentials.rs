//! Kubeconfigs, and real connections: certificates that do not fit, and credentials that rotate.

use std::path::PathBuf;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::*;
use crate::client::connection::{API_PING_PERIOD, API_PING_TIMEOUT};
use crate::client::credentials::{API_CREDENTIALS_PERIOD, API_CREDENTIALS_REST};
use nodedock_base::error::chain;

/// A bound for what takes a moment.
const DEADLINE: Duration = Duration::from_secs(5);

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/tls")
        .join(name)
}

/// A server that answers which certificate a client has, in bytes, and which token it sent; 401 to the token `old`.
struct Server {
    port: u16,
    /// Connections that were opened.
    connections: Arc<AtomicUsize>,
    /// The connections that are open until then answer nothing any more.
    silence: watch::Sender<()>,
}

impl Server {
    fn connections(&self) -> usize {
        self.connections.load(Relaxed)
    }
}

/// The port of a server of HTTP/1.1.
async fn serve(certificate: &str) -> u16 {
    serve_protocol(certificate, "http/1.1").await.port
}

async fn serve_protocol(certificate: &str, protocol: &str) -> Server {
    let is_http2 = protocol == "h2";
    let chain =
        vec![CertificateDer::from_pem_file(fixture(&format!("{certificate}.pem"))).unwrap()];
    let key = PrivateKeyDer::from_pem_file(fixture(&format!("{certificate}.key"))).unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(fixture("ca.pem")).unwrap())
        .unwrap();
    let clients = WebPkiClientVerifier::builder(Arc::new(roots))
        .allow_unauthenticated()
        .build()
        .unwrap();
    let mut config = ServerConfig::builder()
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server {
        port: listener.local_addr().unwrap().port(),
        connections: Arc::default(),
        silence: watch::Sender::default(),
    };
    let (connections, silence) = (server.connections.clone(), server.silence.clone());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            connections.fetch_add(1, Relaxed);
            let (acceptor, mut silenced) = (acceptor.clone(), silence.subscribe());
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let peer = stream
                    .get_ref()
                    .1
                    .peer_certificates()
                    .map(|chain| chain[0].to_vec());
                let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                    let token = request
                        .headers()
                        .get("authorization")
                        .map(|token| token.to_str().unwrap());
                    let code = if token == Some("Bearer old") {
                        401
                    } else {
                        200
                    };
                    let body = Full::new(Bytes::from(
                        json!({"peer": peer, "token": token}).to_string(),
                    ));
                    let answer = http::Response::builder().status(code).body(body).unwrap();
                    async move { Ok::<_, std::convert::Infallible>(answer) }
                });
                let stream = TokioIo::new(stream);
                let serving = async {
                    if is_http2 {
                        let server = http2::Builder::new(TokioExecutor::new());
                        let _ = server.serve_connection(stream, service).await;
                    } else {
                        let server = http1::Builder::new();
                        let _ = server.serve_connection(stream, service).await;
                    }
                };
                let mut serving = std::pin::pin!(serving);
                tokio::select! {
                    () = &mut serving => {}
                    // Kept open, and never read.
                    _ = silenced.changed() => std::future::pending().await,
                }
            });
        }
    });
    server
}

/// A kubeconfig in a directory of its own, with `client.pem`, `client.key` and `token` beside it if it names them.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new(server: &str, cluster: &str, user: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(
            "current-context: x\ncontexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n\
             clusters: [{{name: x, cluster: {{server: '{server}', {cluster}}}}}]\n\
             users: [{{name: x, user: {{{user}}}}}]\n"
        );
        std::fs::write(dir.path().join("config"), text).unwrap();
        std::fs::write(dir.path().join("empty"), "").unwrap();
        Self(dir)
    }

    fn copy(&self, name: &str, to: &str) {
        std::fs::copy(fixture(name), self.0.path().join(to)).unwrap();
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    async fn connect(&self) -> Result<KubeClient, String> {
        let kubeconfig = Some(self.0.path().join("config"));
        KubeClient::connect(ClientConfig {
            kubeconfig,
            ..ClientConfig::default()
        })
        .await
        .map_err(|error| chain(&error))
    }

    async fn client(&self) -> KubeClient {
        self.connect().await.unwrap()
    }
}

fn ca(name: &str) -> String {
    format!("certificate-authority: {}", fixture(name).display())
}

async fn ask(client: &KubeClient) -> Result<Value, ApiError> {
    let request = http::Request::get("/a").body(Vec::new()).unwrap();
    Ok(client.client().request(request).await?)
}

/// The files are read, as every minute.
async fn files_are_read(client: &KubeClient) {
    client.shared.credentials.refresh().await;
}

async fn time_passes(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

#[tokio::test]
async fn server_certificate_is_verified() {
    let (good, expired) = (serve("server").await, serve("expired").await);
    let closed = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for (port, cluster, words) in [
        (good, ca("ca.pem"), None),
        (good, ca("other-ca.pem"), Some("invalid peer certificate")),
        (
            good,
            format!("{}, tls-server-name: other.example", ca("ca.pem")),
            Some("not valid for name"),
        ),
        (expired, ca("ca.pem"), Some("certificate expired")),
        (closed, ca("ca.pem"), Some("refused")),
    ] {
        let directory =
            Directory::new(&format!("https://127.0.0.1:{port}"), &cluster, "token: abc");
        match (ask(&directory.client().await).await, words) {
            (Ok(answer), None) => assert_eq!(answer["token"], "Bearer abc"),
            (Err(error), Some(words)) => {
                let said = error.to_string();
                assert!(
                    said.contains(words) && error.is_unreachable() && error.is_retryable(),
                    "{said}"
                );
                assert!(
                    said.starts_with("the API server cannot be reached: "),
                    "{said}"
                );
            }
            (outcome, words) => panic!("{cluster}: {outcome:?}, {words:?} is wanted"),
        }
    }
}

#[tokio::test]
async fn replaced_client_certificate_is_used() {
    let server = format!("https://127.0.0.1:{}", serve("server").await);
    let directory = Directory::new(
        &server,
        &ca("ca.pem"),
        "client-certificate: client.pem, client-key: client.key",
    );
    directory.copy("client-1.pem", "client.pem");
    directory.copy("client-1.key", "client.key");
    let client = directory.client().await;
    let der = |name: &str| {
        json!(
            CertificateDer::from_pem_file(fixture(name))
                .unwrap()
                .to_vec()
        )
    };
    assert_eq!(ask(&client).await.unwrap()["peer"], der("client-1.pem"));
    directory.copy("client-2.pem", "client.pem");
    directory.copy("client-2.key", "client.key");
    files_are_read(&client).await;
    assert_eq!(ask(&client).await.unwrap()["peer"], der("client-2.pem"));
    std::fs::remove_file(directory.0.path().join("client.pem")).unwrap();
    files_are_read(&client).await;
    assert_eq!(ask(&client).await.unwrap()["peer"], der("client-2.pem"));
    // A key that does not fit its certificate is as if it could not be read.
    directory.copy("client-1.pem", "client.pem");
    files_are_read(&client).await;
    assert_eq!(ask(&client).await.unwrap()["peer"], der("client-2.pem"));
}

#[tokio::test]
async fn token_is_read_again_after_refusal() {
    let server = format!("https://127.0.0.1:{}", serve("server").await);
    let directory = Directory::new(&server, &ca("ca.pem"), "tokenFile: token");
    directory.write("token", "old");
    let client = directory.client().await;
    assert_eq!(
        ask(&client).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    directory.write("token", "new");
    // The files were looked at a moment ago: a server that refuses everything does not make us read files all day.
    assert_eq!(
        ask(&client).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    tokio::time::sleep(API_CREDENTIALS_REST).await;
    assert_eq!(ask(&client).await.unwrap()["token"], "Bearer new");
    assert_eq!(client.metrics().retries.get(), 1);
}

#[tokio::test]
async fn rotated_token_keeps_the_connection() {
    let server = serve_protocol("server", "h2").await;
    let address = format!("https://127.0.0.1:{}", server.port);
    let directory = Directory::new(&address, &ca("ca.pem"), "tokenFile: token");
    directory.write("token", "first\n");
    let client = directory.client().await;
    assert_eq!(ask(&client).await.unwrap()["token"], "Bearer first");
    let tasks = Tasks::new();
    client.keep_ready(&tasks);
    tokio::task::yield_now().await;
    directory.write("token", "second\n");
    time_passes(API_CREDENTIALS_PERIOD).await;
    tokio::time::timeout(DEADLINE, async {
        while ask(&client).await.unwrap()["token"] != "Bearer second" {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the file is read in the background");
    // Neither an empty file nor one that is gone is another token.
    directory.write("token", " \n");
    files_are_read(&client).await;
    assert_eq!(ask(&client).await.unwrap()["token"], "Bearer second");
    std::fs::remove_file(directory.0.path().join("token")).unwrap();
    files_are_read(&client).await;
    assert_eq!(ask(&client).await.unwrap()["token"], "Bearer second");
    assert_eq!(server.connections(), 1);
    assert!(tasks.drain(DEADLINE).await);
}

#[tokio::test]
async fn idle_connection_stays_open() {
    let server = serve_protocol("server", "h2").await;
    let address = format!("https://127.0.0.1:{}", server.port);
    let client = Directory::new(&address, &ca("ca.pem"), "token: abc");
    let client = client.client().await;
    let together = futures::future::join_all((0..8).map(|_| ask(&client)));
    assert!(together.await.iter().all(Result::is_ok));
    let before = server.connections();
    for _ in 0..20 {
        time_passes(Duration::from_secs(60)).await;
        ask(&client).await.unwrap();
    }
    assert_eq!(server.connections(), before, "no read needs a handshake");
}

#[tokio::test]
async fn dead_connection_is_replaced() {
    let server = serve_protocol("server", "h2").await;
    let address = format!("https://127.0.0.1:{}", server.port);
    let client = Directory::new(&address, &ca("ca.pem"), "token: abc");
    let client = client.client().await;
    ask(&client).await.unwrap();
    server.silence.send_replace(());
    // The ping is sent, and then not answered.
    for time in [API_PING_PERIOD, API_PING_TIMEOUT] {
        tokio::task::yield_now().await;
        time_passes(time + Duration::from_millis(1)).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::timeout(DEADLINE, ask(&client))
        .await
        .expect("no read waits for a connection that is dead")
        .unwrap();
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn kubeconfig_errors_name_the_file() {
    let good = ("https://127.0.0.1:6443", ca("ca.pem"), "token: abc");
    for (server, cluster, user, words) in [
        ("not a url", &*good.1, good.2, "invalid uri"),
        ("ftp://a", &good.1, good.2, "https://HOST:PORT is needed"),
        ("http://192.0.2.1", &good.1, good.2, "is not https"),
        (good.0, "certificate-authority: /none", good.2, "/none"),
        (
            good.0,
            "certificate-authority: empty",
            good.2,
            "empty holds no certificate",
        ),
        (good.0, "certificate-authority-data: '%'", good.2, "base64"),
        (
            good.0,
            "insecure-skip-tls-verify: true",
            good.2,
            "insecure-skip-tls-verify is set",
        ),
        (good.0, &good.1, "tokenFile: none", "none"),
        (good.0, &good.1, "tokenFile: empty", "empty holds no token"),
        (
            good.0,
            &good.1,
            "client-certificate: none, client-key: none",
            "none",
        ),
        (
            good.0,
            &good.1,
            "exec: {apiVersion: client.authentication.k8s.io/v1, command: /no/program}",
            "auth exec",
        ),
    ] {
        let error = Directory::new(server, cluster, user).connect().await.err();
        let error = error.unwrap_or_else(|| panic!("{server} {cluster} {user} is taken"));
        assert!(error.contains(words), "{cluster} {user}: {error}");
        assert!(
            error.contains("kubeconfig") || error.contains("config") || words == "is not https",
            "{error}"
        );
    }
    assert!(
        Directory::new(good.0, &good.1, good.2)
            .connect()
            .await
            .is_ok()
    );
    assert!(
        Directory::new("http://127.0.0.1:8080", "", good.2)
            .connect()
            .await
            .is_ok()
    );
    let config = ClientConfig {
        kubeconfig: Some(PathBuf::from("/nowhere/config")),
        ..ClientConfig::default()
    };
    let error = chain(&KubeClient::connect(config).await.err().unwrap());
    assert!(
        error.starts_with("load the kubeconfig /nowhere/config: ")
            && error.contains("No such file"),
        "{error}"
    );
}
