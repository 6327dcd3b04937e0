//! Sockets, TLS and tokens.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;

use super::client::server;
use crate::serve::{Door, connection};
use crate::strangers::STRANGERS_PER_USER_MAX;
use crate::{Identity, ServeError, kubeconfig, serve_tls, serve_unix};

/// A whole answer of a connection that is closed after it.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, token: &str) -> String {
    let request = format!(
        "GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

fn client(identity: &Identity) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(identity.certificate_pem.as_bytes()).unwrap())
        .unwrap();
    let config = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config).into()
}

#[tokio::test]
async fn clients_need_certificate_and_token() {
    let identity = Identity::generate().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
    let serving = tokio::spawn({
        let (server, identity, stop) = (server().await, identity.clone(), stop.clone());
        async move { serve_tls(server, listener, &identity, stop).await }
    });
    for name in ["localhost", "127.0.0.1"] {
        let connect = async |trusted: &Identity| {
            let stream = TcpStream::connect(address).await.unwrap();
            client(trusted)
                .connect(ServerName::try_from(name).unwrap(), stream)
                .await
        };
        let answer = exchange(connect(&identity).await.unwrap(), &identity.token).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        for token in ["", "wrong", &identity.token[1..]] {
            let refused = exchange(connect(&identity).await.unwrap(), token).await;
            assert!(
                refused.starts_with("HTTP/1.1 401 Unauthorized"),
                "{refused}"
            );
            let status: Value =
                serde_json::from_str(refused.split_once("\r\n\r\n").unwrap().1).unwrap();
            assert_eq!(
                status,
                json!({
                    "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                    "message": "Unauthorized", "reason": "Unauthorized", "code": 401,
                })
            );
        }
        assert!(connect(&Identity::generate().unwrap()).await.is_err());
    }
    stop.cancel();
    serving.await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn unauthenticated_connections_are_closed() {
    let (mut client, served) = tokio::io::duplex(1 << 16);
    let serving = tokio::spawn(connection(
        served,
        server().await,
        Some(Door::new("secret")),
    ));
    client
        .write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await
        .unwrap();
    let mut refused = String::new();
    client.read_to_string(&mut refused).await.unwrap();
    assert!(
        refused.starts_with("HTTP/1.1 401 Unauthorized"),
        "{refused}"
    );
    assert!(refused.contains("\r\nconnection: close\r\n"), "{refused}");
    serving.await.unwrap();

    let (_client, served) = tokio::io::duplex(1 << 16);
    let begin = tokio::time::Instant::now();
    connection(served, server().await, None).await;
    assert_eq!(begin.elapsed().as_secs(), 60);

    let door = Door::new("secret");
    let begin = tokio::time::Instant::now();
    door.closed().await;
    assert_eq!(begin.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn authenticated_connection_does_not_time_out() {
    let (mut client, served) = tokio::io::duplex(1 << 16);
    let door = Door::new("secret");
    tokio::spawn(connection(served, server().await, Some(door.clone())));
    let closed = door.closed();
    tokio::pin!(closed);
    assert!(
        tokio::time::timeout(Duration::from_secs(9), &mut closed)
            .await
            .is_err()
    );
    client
        .write_all(b"GET /version HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\n\r\n")
        .await
        .unwrap();
    let mut answer = [0; 15];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    assert!(
        tokio::time::timeout(Duration::from_secs(3600), &mut closed)
            .await
            .is_err()
    );
}

/// A process without the token took 543 MB of memory, and a request of a client with it timed out.
#[tokio::test]
async fn unauthenticated_clients_use_little_memory() {
    let identity = Identity::generate().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
    let serving = tokio::spawn({
        let (server, identity, stop) = (server().await, identity.clone(), stop.clone());
        async move { serve_tls(server, listener, &identity, stop).await }
    });
    let connect = async || {
        let stream = TcpStream::connect(address).await.unwrap();
        client(&identity)
            .connect(ServerName::try_from("localhost").unwrap(), stream)
            .await
    };
    let served = async || {
        exchange(connect().await.unwrap(), &identity.token)
            .await
            .starts_with("HTTP/1.1 200")
    };
    let mut known = connect().await.unwrap();
    known
        .write_all(
            format!(
                "GET /version HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {}\r\n\r\n",
                identity.token
            )
            .as_bytes(),
        )
        .await
        .unwrap();
    let mut begin = [0; 15];
    known.read_exact(&mut begin).await.unwrap();
    let before = resident_bytes();

    let mut half_open = Vec::new();
    for _ in 0..1500 {
        half_open.push(TcpStream::connect(address).await.unwrap());
    }
    assert!(served().await);
    let mut slow = Vec::new();
    for _ in 0..2 * STRANGERS_PER_USER_MAX {
        let mut stream = connect().await.unwrap();
        stream
            .write_all(b"GET /version HTTP/1.1\r\nX: ")
            .await
            .unwrap();
        slow.push(stream);
    }
    assert!(served().await);
    let header = vec![b'x'; 31 << 10];
    let mut large = Vec::new();
    for _ in 0..2 * STRANGERS_PER_USER_MAX {
        let mut stream = connect().await.unwrap();
        stream
            .write_all(b"GET /version HTTP/1.1\r\nX: ")
            .await
            .unwrap();
        stream.write_all(&header).await.unwrap();
        stream.flush().await.unwrap();
        large.push(stream);
    }
    assert!(served().await);
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes, with those of the clients");

    let mut over = connect().await.unwrap();
    let too_large = [
        b"GET /version HTTP/1.1\r\nX: ".as_slice(),
        &vec![b'x'; 64 << 10],
    ]
    .concat();
    over.write_all(&too_large).await.unwrap();
    let mut refused = [0; 12];
    over.read_exact(&mut refused).await.unwrap();
    assert_eq!(&refused, b"HTTP/1.1 431");
    for stream in half_open.iter_mut().take(1400) {
        assert!(
            matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_)),
            "its place is taken"
        );
    }
    known
        .write_all(b"GET /version HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut rest = String::new();
    known.read_to_string(&mut rest).await.unwrap();
    assert!(
        rest.contains("HTTP/1.1 401"),
        "each request needs the token: {rest}"
    );
    stop.cancel();
    serving.await.unwrap().unwrap();
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[tokio::test]
async fn server_requires_loopback_and_valid_identity() {
    let identity = Identity::generate().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    let refused = serve_tls(
        server().await,
        listener,
        &identity,
        CancellationToken::new(),
    )
    .await;
    assert!(matches!(refused, Err(ServeError::NotLoopback(_))));
    let broken = [
        Identity {
            certificate_pem: "none".to_owned(),
            ..identity.clone()
        },
        Identity {
            key_pem: String::new(),
            ..identity.clone()
        },
        Identity {
            key_pem: Identity::generate().unwrap().key_pem,
            ..identity.clone()
        },
        Identity {
            token: String::new(),
            ..identity
        },
    ];
    for identity in broken {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let refused = serve_tls(
            server().await,
            listener,
            &identity,
            CancellationToken::new(),
        )
        .await;
        assert!(matches!(refused, Err(ServeError::Identity(_))));
    }
}

#[tokio::test]
async fn a_unix_socket_needs_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api.sock");
    let (listener, stop) = (UnixListener::bind(&path).unwrap(), CancellationToken::new());
    let serving = tokio::spawn(serve_unix(server().await, listener, stop.clone()));
    let answer = exchange(UnixStream::connect(&path).await.unwrap(), "").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    stop.cancel();
    serving.await.unwrap();
}

#[test]
fn kubeconfig_has_address_certificate_and_token() {
    let identity = Identity {
        certificate_pem: "CERT".to_owned(),
        key_pem: "KEY".to_owned(),
        token: "TOKEN".to_owned(),
    };
    let config: Value =
        serde_json::from_str(&kubeconfig("https://127.0.0.1:6443", &identity)).unwrap();
    let cluster =
        json!({ "server": "https://127.0.0.1:6443", "certificate-authority-data": "Q0VSVA==" });
    assert_eq!(
        config,
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "nodedock",
            "clusters": [{ "name": "nodedock", "cluster": cluster }],
            "users": [{ "name": "nodedock", "user": { "token": "TOKEN" } }],
            "contexts": [{
                "name": "nodedock",
                "context": { "cluster": "nodedock", "user": "nodedock", "namespace": "default" },
            }],
        })
    );
    assert!(!format!("{identity:?}").contains("TOKEN") && !format!("{identity:?}").contains("KEY"));
    let [one, other] = [(); 2].map(|()| Identity::generate().unwrap());
    assert_eq!(one.token.len(), 64);
    assert_ne!(one.token, other.token);
}
