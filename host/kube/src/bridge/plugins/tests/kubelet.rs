//! A kubelet as far as device plugins meet it: the folder is emptied, plugins register, are asked for their options and followed.

use std::path::Path;
use std::sync::Arc;

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use nodedock_proto::unix;
use tokio::sync::mpsc;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use wire::device_plugin_client::DevicePluginClient;
use wire::registration_server::{Registration, RegistrationServer};

use super::super::dial::dial;
use super::*;

pub(super) struct Kubelet {
    folder: PathBuf,
    pub(super) shared: Arc<Shared>,
    registered: mpsc::UnboundedReceiver<String>,
    lists: mpsc::UnboundedReceiver<String>,
    tasks: Tasks,
}

pub(super) struct Shared {
    folder: PathBuf,
    registered: mpsc::UnboundedSender<String>,
    lists: mpsc::UnboundedSender<String>,
    /// What a registration is refused with.
    pub(super) refusal: Mutex<Option<String>>,
    /// Streams that are followed; dropped to cut them.
    pub(super) streams: Mutex<Vec<Tasks>>,
    tasks: Tasks,
}

impl Kubelet {
    /// Removes every socket of the folder, then makes its own.
    pub(super) fn start(folder: &Path) -> Self {
        use std::os::unix::fs::FileTypeExt;
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_socket() {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        let (registered_sender, registered) = mpsc::unbounded_channel();
        let (lists_sender, lists) = mpsc::unbounded_channel();
        let tasks = Tasks::new();
        let shared = Arc::new(Shared {
            folder: folder.to_owned(),
            registered: registered_sender,
            lists: lists_sender,
            refusal: Mutex::default(),
            streams: Mutex::default(),
            tasks: tasks.clone(),
        });
        let listener = tokio::net::UnixListener::bind(folder.join("kubelet.sock")).unwrap();
        let server =
            tonic::transport::Server::builder().add_service(RegistrationServer::new(Face(shared.clone())));
        let stopped = tasks.stopped();
        tasks.spawn("kubelet", async move {
            tokio::select! {
                () = stopped => {}
                served = server.serve_with_incoming(unix::incoming(listener)) => served.unwrap(),
            }
        });
        Self { folder: folder.to_owned(), shared, registered, lists, tasks }
    }

    /// The endpoint that registered next.
    pub(super) async fn registered(&mut self) -> String {
        tokio::time::timeout(PATIENCE, self.registered.recv()).await.expect("nobody registers").unwrap()
    }

    /// Nobody registered since the last one.
    pub(super) fn is_quiet(&mut self) -> bool {
        self.registered.try_recv().is_err()
    }

    /// The next list, as letters; capitals are not healthy.
    pub(super) async fn listed(&mut self) -> String {
        tokio::time::timeout(PATIENCE, self.lists.recv()).await.expect("nothing is listed").unwrap()
    }

    pub(super) fn cut_streams(&self) {
        self.shared.streams.lock().unwrap().drain(..).for_each(|stream| stream.stop());
    }

    /// Dies: the socket stays, and nobody is behind it.
    pub(super) async fn die(self) {
        self.cut_streams();
        assert!(self.tasks.drain(PATIENCE).await);
    }

    pub(super) async fn client(&self, endpoint: &str) -> DevicePluginClient<Channel> {
        DevicePluginClient::new(dial(&self.folder.join(endpoint)).await.unwrap())
    }
}

struct Face(Arc<Shared>);

#[tonic::async_trait]
impl Registration for Face {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Result<Response<wire::Empty>, Status> {
        let request = request.into_inner();
        assert_eq!(
            (request.version.as_str(), request.resource_name.as_str()),
            ("v1beta1", "example.com/gpu")
        );
        if let Some(words) = self.0.refusal.lock().unwrap().clone() {
            return Err(Status::unknown(words));
        }
        let socket = self.0.folder.join(&request.endpoint);
        let channel = dial(&socket).await.map_err(|error| Status::unknown(error.to_string()))?;
        let mut client = DevicePluginClient::new(channel);
        let options = client.get_device_plugin_options(wire::Empty {}).await?.into_inner();
        assert!(options.get_preferred_allocation_available && !options.pre_start_required);
        let (shared, tasks) = (self.0.clone(), self.0.tasks.child());
        shared.streams.lock().unwrap().push(tasks.clone());
        let _ = shared.registered.send(request.endpoint);
        let stopped = tasks.stopped();
        self.0.tasks.spawn("follow", async move {
            tokio::select! {
                () = stopped => {}
                () = follow(client, shared) => {}
            }
        });
        Ok(Response::new(wire::Empty {}))
    }
}

async fn follow(mut client: DevicePluginClient<Channel>, shared: Arc<Shared>) {
    let Ok(lists) = client.list_and_watch(wire::Empty {}).await else { return };
    let mut lists = lists.into_inner();
    while let Ok(Some(list)) = lists.message().await {
        let letter = |device: &wire::Device| {
            let letter = device.id.trim_start_matches("p/").to_owned();
            if device.health == "Healthy" { letter } else { letter.to_ascii_uppercase() }
        };
        let _ = shared.lists.send(list.devices.iter().map(letter).collect());
    }
    let _ = shared.lists.send("end".to_owned());
}
