//! The Unix sockets of `nodedock_proto::unix` with tonic on both ends, and what they cost.

use std::path::Path;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use nodedock_proto::kubelet::registration::registration_client::RegistrationClient;
use nodedock_proto::kubelet::registration::registration_server::{
    Registration, RegistrationServer,
};
use nodedock_proto::kubelet::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use nodedock_proto::unix;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::{Router, UdsConnectInfo};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

/// Says in its name who called.
struct Plugin;

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(
        &self,
        request: Request<InfoRequest>,
    ) -> Result<Response<PluginInfo>, Status> {
        let peer = request
            .extensions()
            .get::<UdsConnectInfo>()
            .and_then(|info| info.peer_cred);
        let name = peer
            .and_then(|peer| peer.pid())
            .map_or_else(String::new, |pid| pid.to_string());
        Ok(Response::new(PluginInfo {
            name,
            ..Default::default()
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let length = request.get_ref().error.len();
        if length == 0 {
            Ok(Response::new(Default::default()))
        } else {
            Err(Status::aborted(length.to_string()))
        }
    }
}

fn router() -> Router {
    let service = RegistrationServer::new(Plugin).max_decoding_message_size(64 << 20);
    Server::builder().add_service(service)
}

async fn connect(path: &Path) -> RegistrationClient<Channel> {
    let path = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .unwrap();
    RegistrationClient::new(channel)
}

#[tokio::test]
async fn tonic_client_identifies_its_peer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(router().serve_with_incoming(unix::incoming(listener)));
    let mut client = connect(&path).await;
    let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.name, std::process::id().to_string());
    let large = RegistrationStatus {
        plugin_registered: true,
        error: "x".repeat(10 << 20),
    };
    let status = client.notify_registration_status(large).await.unwrap_err();
    assert_eq!(status.message(), (10 << 20).to_string());
}

/// `cargo test --release -p nodedock-proto --test unix_sockets -- --ignored --nocapture`
#[tokio::test]
#[ignore = "measures, and asserts nothing"]
async fn what_it_costs() {
    let directory = tempfile::tempdir().unwrap();
    let (stock, ours) = (
        directory.path().join("stock.sock"),
        directory.path().join("ours.sock"),
    );
    let listener = UnixListener::bind(&stock).unwrap();
    tokio::spawn(router().serve_with_incoming(UnixListenerStream::new(listener)));
    let listener = UnixListener::bind(&ours).unwrap();
    tokio::spawn(router().serve_with_incoming(unix::incoming(listener)));
    for (size, rounds) in [(0, 4000), (1 << 10, 4000), (4 << 20, 20)] {
        for _ in 0..3 {
            let (stock, ours) = (
                measure(&stock, size, rounds).await,
                measure(&ours, size, rounds).await,
            );
            println!("request of {size:>8} bytes: {stock:>9.1?} without, {ours:>9.1?} with");
        }
    }
}

/// The median of one call after the other.
async fn measure(path: &Path, size: usize, rounds: usize) -> Duration {
    let mut client = connect(path).await;
    let status = RegistrationStatus {
        plugin_registered: true,
        error: "x".repeat(size),
    };
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let (request, began) = (status.clone(), Instant::now());
        let _ = client.notify_registration_status(request).await;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    times[rounds / 2]
}
