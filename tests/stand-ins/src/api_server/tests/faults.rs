//! What goes wrong on request.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::get;
use crate::api_server::{ApiServer, Fault, When};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

#[tokio::test]
async fn faults_meet_the_requests_they_are_for_as_often_as_they_are_meant_to() {
    let server = ApiServer::start().await;
    server.fail_times(
        2,
        Fault::TooMany { retry_after: 7 },
        When::any().verb("list").resource("resourceslices"),
    );
    for _ in 0..2 {
        let answer = get(&server, SLICES).await;
        assert_eq!(answer.code, 429);
        assert_eq!(answer.headers["retry-after"], "7");
    }
    assert_eq!(get(&server, SLICES).await.code, 200);
    let id = server.fail(Fault::Html(200), When::any());
    let page = get(&server, "/version").await;
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    assert!(page.text.starts_with("<!DOCTYPE html>"));
    server.lift(id);
    assert_eq!(get(&server, "/version").await.body["minor"], "36");
    server.fail(Fault::Status(503), When::any().version("v1"));
    assert_eq!(get(&server, SLICES).await.body["reason"], "ServiceUnavailable");
    server.lift_all();
    assert_eq!(get(&server, SLICES).await.code, 200);
}

#[tokio::test]
async fn a_server_that_stops_is_gone_and_comes_back_as_it_was() {
    let server = ApiServer::start().await;
    server.put(serde_json::json!({ "kind": "ResourceSlice", "metadata": { "name": "a" } }));
    let open = async || TcpStream::connect(("127.0.0.1", server.port)).await;
    let mut stream = open().await.unwrap();
    let request = format!("GET {SLICES}?watch=true HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    assert_ne!(stream.read(&mut [0; 4096]).await.unwrap(), 0);
    server.stop().await;
    // The open watch breaks, and there is no new connection.
    let _ = stream.read_to_end(&mut Vec::new()).await;
    assert!(open().await.is_err());
    server.start_again().await;
    assert!(open().await.is_ok());
    assert_eq!(get(&server, SLICES).await.body["items"].as_array().map(Vec::len), Some(1));
}
