//! The Pods API of a kubelet, by itself: a socket below the kubelet's directory, and what it answers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use nodedock_proto::kubelet::pods::v1alpha1::pods_server::{Pods, PodsServer};
use nodedock_proto::kubelet::pods::v1alpha1::{ListPodsRequest, ListPodsResponse, Pod};
use nodedock_proto::prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

/// An empty SETTINGS frame of HTTP/2.
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

/// The response to a list of pods.
#[derive(Clone, Debug)]
pub enum PodsAnswer {
    Pods(Vec<Pod>),
    /// Bytes to send, encoded or not.
    Bytes(Vec<Vec<u8>>),
    Refusal(Code),
    /// The socket has no such service.
    NoService,
    /// The peer does not speak HTTP/2.
    NotGrpc,
    /// The connection ends in the middle.
    Cut,
}

/// A Pods API on `pods-api/pods-api.sock`. It ends when it is dropped; the socket file stays.
#[derive(Debug)]
pub struct PodsApi {
    socket: PathBuf,
    answer: Arc<Mutex<PodsAnswer>>,
    serving: JoinHandle<()>,
}

impl Drop for PodsApi {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl PodsApi {
    /// `root` is what `/var/lib/kubelet` is on a node.
    ///
    /// # Panics
    ///
    /// If the socket cannot be made.
    pub fn start(root: &Path, answer: PodsAnswer) -> Self {
        let dir = root.join("pods-api");
        std::fs::create_dir_all(&dir).expect("the directory of the Pods API can be made");
        let socket = dir.join("pods-api.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).expect("the socket of the Pods API can be made");
        let answer = Arc::new(Mutex::new(answer));
        let serving = tokio::spawn(serve(listener, Arc::clone(&answer)));
        Self {
            socket,
            answer,
            serving,
        }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Answers so from the next connection on.
    pub fn set(&self, answer: PodsAnswer) {
        *lock(&self.answer) = answer;
    }
}

fn lock(answer: &Mutex<PodsAnswer>) -> MutexGuard<'_, PodsAnswer> {
    answer
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

async fn serve(listener: UnixListener, answer: Arc<Mutex<PodsAnswer>>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let answer = lock(&answer).clone();
        connections.spawn(connection(stream, answer));
    }
}

async fn connection(mut stream: UnixStream, answer: PodsAnswer) {
    let routes = match answer {
        PodsAnswer::NotGrpc => {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            return;
        }
        PodsAnswer::Cut => {
            let _ = stream.write_all(&SETTINGS).await;
            let _ = stream.read(&mut [0; 1024]).await;
            return;
        }
        PodsAnswer::NoService => Routes::default(),
        PodsAnswer::Pods(pods) => listing(Ok(pods.iter().map(Message::encode_to_vec).collect())),
        PodsAnswer::Bytes(pods) => listing(Ok(pods)),
        PodsAnswer::Refusal(code) => listing(Err(code)),
    };
    let incoming = tokio_stream::once(Ok::<_, std::io::Error>(stream));
    let _ = Server::builder()
        .add_routes(routes)
        .serve_with_incoming(incoming)
        .await;
}

fn listing(answer: Result<Vec<Vec<u8>>, Code>) -> Routes {
    Routes::new(PodsServer::new(Listing(answer)))
}

struct Listing(Result<Vec<Vec<u8>>, Code>);

#[tonic::async_trait]
impl Pods for Listing {
    async fn list_pods(
        &self,
        _: Request<ListPodsRequest>,
    ) -> Result<Response<ListPodsResponse>, Status> {
        let pods = self
            .0
            .clone()
            .map_err(|code| Status::new(code, "the stand-in refuses"))?;
        Ok(Response::new(ListPodsResponse { pods }))
    }
}
