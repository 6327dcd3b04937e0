//! Registration on `kubelet.sock`, repeated whenever that socket is created again.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use nodedock_proto::kubelet::device_plugin::v1beta1::RegisterRequest;
use nodedock_proto::kubelet::device_plugin::v1beta1::registration_client::RegistrationClient;
use notify::{RecursiveMode, Watcher};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::{Endpoint, Uri};

use crate::{Event, Plugin, Register};

/// Delay between attempts to register: the agent may create its socket before it serves.
const RETRY: Duration = Duration::from_secs(1);

pub(crate) async fn register(socket: &Path, request: RegisterRequest) -> Result<(), Status> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await;
    let channel =
        channel.map_err(|error| Status::unavailable(format!("{}: {error}", socket.display())))?;
    RegistrationClient::new(channel)
        .register(request)
        .await
        .map(drop)
}

/// Distinguishes sockets of the same path: the kernel may reuse an inode number.
type Stamp = (u64, Option<SystemTime>);

fn stamp(socket: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(socket).ok()?;
    Some((found.ino(), found.modified().ok()))
}

impl Plugin {
    /// Registers on `kubelet.sock`, waits for the socket if it does not exist, and registers again whenever it is created again. The
    /// plugin first creates its own socket again, which the agent deleted. Ends with the plugin. With a registration socket there is
    /// nothing to watch.
    pub async fn keep_registered(&self) -> io::Result<()> {
        if self.options().register != Register::KubeletSocket {
            self.register().await.map_err(io::Error::other)?;
            self.died().await;
            return Ok(());
        }
        let (sender, mut changes) = mpsc::channel(1);
        // A full channel triggers a check as well as a new event does.
        let mut watcher = notify::recommended_watcher(move |_| {
            let _ = sender.try_send(());
        })
        .map_err(io::Error::other)?;
        watcher
            .watch(
                &self.options().device_plugins_dir,
                RecursiveMode::NonRecursive,
            )
            .map_err(io::Error::other)?;
        let mut registered = None;
        loop {
            let retry = self.look(&mut registered).await?;
            tokio::select! {
                () = self.died() => return Ok(()),
                _ = changes.recv() => {}
                () = tokio::time::sleep(RETRY), if retry => {}
            }
        }
    }

    /// Registers if the socket is not the previous one. Returns true if it failed and must be retried.
    async fn look(&self, registered: &mut Option<Stamp>) -> io::Result<bool> {
        let now = stamp(&self.options().kubelet_socket());
        if now.is_none() || now == *registered {
            return Ok(false);
        }
        if !self.options().socket().exists() {
            self.serve()?;
        }
        match self.register().await {
            Ok(()) => {
                *registered = now;
                Ok(false)
            }
            Err(status) => {
                self.tell(Event::Refused {
                    why: status.message().to_owned(),
                });
                Ok(true)
            }
        }
    }
}
