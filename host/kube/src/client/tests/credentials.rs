//! Kubeconfigs, and real connections: certificates that do not fit, and credentials that rotate.

use std::path::PathBuf;

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::*;
use crate::client::credentials::{API_CREDENTIALS_PERIOD, API_CREDENTIALS_REST};
use nodedock_base::error::chain;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/tls")
        .join(name)
}

/// The port of a server that answers which certificate a client has, in bytes, and which token it sent; 401 to the token `old`.
async fn serve(certificate: &str) -> u16 {
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
    let config = ServerConfig::builder()
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
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
                let server = hyper::server::conn::http1::Builder::new();
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    port
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

/// The next request checks the files.
async fn a_minute_passes() {
    tokio::time::pause();
    tokio::time::advance(API_CREDENTIALS_PERIOD).await;
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
    a_minute_passes().await;
    assert_eq!(ask(&client).await.unwrap()["peer"], der("client-2.pem"));
    std::fs::remove_file(directory.0.path().join("client.pem")).unwrap();
    a_minute_passes().await;
    assert_eq!(ask(&client).await.unwrap()["peer"], der("client-2.pem"));
    // A key that does not fit its certificate is as if it could not be read.
    directory.copy("client-1.pem", "client.pem");
    a_minute_passes().await;
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
