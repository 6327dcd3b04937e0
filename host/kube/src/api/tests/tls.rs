//! Real connections: certificates that do not fit, and credentials that rotate.

use std::path::PathBuf;

use http_body_util::Full;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::*;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tls").join(name)
}

/// The port of a server that tells each client which certificate it has, in bytes, and which token it sent.
async fn serve(certificate: &str) -> u16 {
    let chain = vec![CertificateDer::from_pem_file(fixture(&format!("{certificate}.pem"))).unwrap()];
    let key = PrivateKeyDer::from_pem_file(fixture(&format!("{certificate}.key"))).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("ca.pem")).unwrap()).unwrap();
    let clients = WebPkiClientVerifier::builder(Arc::new(roots)).allow_unauthenticated().build().unwrap();
    let config =
        ServerConfig::builder().with_client_cert_verifier(clients).with_single_cert(chain, key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let peer = stream.get_ref().1.peer_certificates().map(|chain| chain[0].to_vec());
                let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                    let token = request
                        .headers()
                        .get("authorization")
                        .map(|token| token.to_str().unwrap().to_owned());
                    let answer = json!({"peer": peer, "token": token}).to_string();
                    async move {
                        Ok::<_, std::convert::Infallible>(http::Response::new(Full::new(bytes::Bytes::from(
                            answer,
                        ))))
                    }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    port
}

/// A kubeconfig in a folder of its own, with `client.pem`, `client.key` and `token` beside it if it names them.
struct Place(tempfile::TempDir);

impl Place {
    fn new(port: u16, cluster: &str, user: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(
            "current-context: x\ncontexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n\
             clusters: [{{name: x, cluster: {{server: 'https://127.0.0.1:{port}', {cluster}}}}}]\n\
             users: [{{name: x, user: {{{user}}}}}]\n"
        );
        std::fs::write(dir.path().join("config"), text).unwrap();
        Self(dir)
    }

    fn copy(&self, name: &str, to: &str) {
        std::fs::copy(fixture(name), self.0.path().join(to)).unwrap();
    }

    async fn api(&self) -> Api {
        let config = ApiConfig { kubeconfig: Some(self.0.path().join("config")), ..ApiConfig::new(None) };
        Api::connect(config).await.unwrap()
    }
}

fn ca(name: &str) -> String {
    format!("certificate-authority: {}", fixture(name).display())
}

#[tokio::test]
async fn a_server_is_verified_and_what_does_not_fit_is_said() {
    let (good, expired) = (serve("server").await, serve("expired").await);
    let cases = [
        (good, ca("ca.pem"), None),
        (good, ca("other-ca.pem"), Some("invalid peer certificate")),
        (good, format!("{}, tls-server-name: other.example", ca("ca.pem")), Some("not valid for name")),
        (expired, ca("ca.pem"), Some("certificate expired")),
    ];
    for (port, cluster, words) in cases {
        let place = Place::new(port, &cluster, "token: abc");
        let outcome = place.api().await.get("/a").await;
        match (outcome, words) {
            (Ok(answer), None) => assert_eq!(answer["token"], "Bearer abc"),
            (Err(error), Some(words)) => {
                let said = error.to_string();
                assert!(said.contains(words) && error.is_away() && error.is_retryable(), "{said}");
            }
            (outcome, words) => panic!("{cluster}: {outcome:?}, {words:?} is wanted"),
        }
    }
}

#[tokio::test]
async fn a_kubeconfig_that_points_nowhere_is_said_when_it_is_used() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let error = Place::new(closed, &ca("ca.pem"), "token: abc").api().await.get("/a").await.unwrap_err();
    let words = error.to_string();
    assert!(
        words.starts_with("the API server cannot be reached: tcp connect error") && words.contains("refused"),
        "{words}"
    );
}

#[tokio::test]
async fn a_certificate_that_is_replaced_is_used_and_one_that_is_gone_changes_nothing() {
    let port = serve("server").await;
    let place = Place::new(port, &ca("ca.pem"), "client-certificate: client.pem, client-key: client.key");
    place.copy("client-1.pem", "client.pem");
    place.copy("client-1.key", "client.key");
    let api = place.api().await;
    let der = |name: &str| json!(CertificateDer::from_pem_file(fixture(name)).unwrap().to_vec());
    assert_eq!(api.get("/a").await.unwrap()["peer"], der("client-1.pem"));
    place.copy("client-2.pem", "client.pem");
    place.copy("client-2.key", "client.key");
    api.inner.connection.look_now().await;
    assert_eq!(api.get("/a").await.unwrap()["peer"], der("client-2.pem"));
    std::fs::remove_file(place.0.path().join("client.pem")).unwrap();
    api.inner.connection.look_now().await;
    assert_eq!(api.get("/a").await.unwrap()["peer"], der("client-2.pem"));
    // A key that does not fit its certificate is as if it could not be read.
    place.copy("client-1.pem", "client.pem");
    api.inner.connection.look_now().await;
    assert_eq!(api.get("/a").await.unwrap()["peer"], der("client-2.pem"));
}

#[tokio::test(start_paused = true)]
async fn a_token_is_read_again_every_minute_and_after_a_refusal() {
    let place = Place::new(1, &ca("ca.pem"), "tokenFile: token");
    let write = |token: &str| std::fs::write(place.0.path().join("token"), token).unwrap();
    write("one\n");
    let api = place.api().await;
    let connection = &api.inner.connection;
    let token = async || connection.current().await.authorization.clone().unwrap();
    write("two");
    assert_eq!(token().await, "Bearer one");
    tokio::time::advance(limit::API_CREDENTIALS_PERIOD).await;
    assert_eq!(token().await, "Bearer two");
    let used = connection.current().await;
    write("three");
    // It was looked at just now: a server that refuses everything does not make us read files all day.
    assert!(!connection.is_other_than(&used).await);
    tokio::time::advance(limit::API_CREDENTIALS_REST).await;
    assert!(connection.is_other_than(&used).await);
    assert_eq!(token().await, "Bearer three");
    write("");
    tokio::time::advance(limit::API_CREDENTIALS_PERIOD).await;
    assert_eq!(token().await, "Bearer three");
}
