//! One connection to a plugin's socket, opened at once and opened again when it is lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tonic::transport::Channel;

use crate::grpc::PLUGIN_DIAL;
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::socket::{self, ConnectError};
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Link;

/// Delay of a reconnect: a plugin that restarts is back within seconds, and an attempt costs one system call.
pub(crate) const RECONNECT_MIN: Duration = Duration::from_millis(20);
pub(crate) const RECONNECT_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("connect to {} within {} ms", socket.display(), deadline.as_millis())]
    Deadline { socket: PathBuf, deadline: Duration },
}

#[derive(Debug, Clone, Default)]
struct ConnectionState {
    link: Link,
    /// The channel while the link is connected.
    channel: Option<Channel>,
}

/// Handle to a connection, shared by clones. It stays until the tasks stop with which it was opened.
#[derive(Debug, Clone)]
pub struct Connection {
    state: watch::Receiver<ConnectionState>,
    redial: Arc<Notify>,
}

impl Connection {
    /// Starts to connect.
    pub fn open(socket: PathBuf, tasks: &Tasks) -> Self {
        let (sender, state) = watch::channel(ConnectionState::default());
        let redial = Arc::new(Notify::new());
        let task = ConnectionTask {
            socket,
            state: sender,
            redial: redial.clone(),
        };
        tasks.spawn("plugin-connection", task.run(tasks.clone()));
        Self { state, redial }
    }

    /// Connects again, because another process may own the socket. Callers that wait for a channel wait for the new one.
    pub fn redial(&self) {
        self.redial.notify_one();
    }

    pub fn link(&self) -> Link {
        self.state.borrow().link.clone()
    }

    /// Resolves when the link has changed since this handle's last check; never again after a close.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns a channel, after waiting at most `wait` for one. The error is the current link.
    pub(super) async fn channel(&self, wait: Duration) -> Result<Channel, Link> {
        let mut receiver = self.state.clone();
        let settled =
            receiver.wait_for(|state| state.channel.is_some() || state.link == Link::Closed);
        if let Ok(Ok(state)) = tokio::time::timeout(wait, settled).await
            && let Some(channel) = state.channel.clone()
        {
            return Ok(channel);
        }
        Err(self.link())
    }
}

/// Maintains the connection.
struct ConnectionTask {
    socket: PathBuf,
    state: watch::Sender<ConnectionState>,
    redial: Arc<Notify>,
}

impl ConnectionTask {
    /// Runs until the tasks stop.
    async fn run(self, tasks: Tasks) {
        let stopped = tasks.stopped();
        tokio::pin!(stopped);
        let mut backoff = Backoff::new(RECONNECT_MIN, RECONNECT_MAX);
        loop {
            tokio::select! {
                // Safe to drop: calls in flight have their own handles and end by themselves, here and below.
                () = &mut stopped => break,
                () = self.redial.notified() => {
                    self.state.send_replace(ConnectionState::default());
                    continue;
                }
                () = self.connect_once(&mut backoff) => {}
            }
            tokio::select! {
                () = &mut stopped => break,
                () = self.redial.notified() => {}
                () = tokio::time::sleep(backoff.delay()) => {}
            }
        }
        self.state.send_replace(ConnectionState {
            link: Link::Closed,
            channel: None,
        });
    }

    /// Connects, and returns when the connection is lost or failed.
    async fn connect_once(&self, backoff: &mut Backoff) {
        let lost = match dial(&self.socket, PLUGIN_DIAL).await {
            Ok((channel, ended)) => {
                backoff.reset();
                self.state.send_replace(ConnectionState {
                    link: Link::Connected,
                    channel: Some(channel),
                });
                // no error: in both cases the stream has ended
                ended.await.ok();
                "the plugin closed the connection".to_owned()
            }
            Err(error) => chain(&error),
        };
        self.state.send_if_modified(|state| {
            let before = std::mem::replace(&mut state.link, Link::Lost(lost));
            state.channel = None;
            before != state.link
        });
    }
}

/// Connects to a socket. The receiver resolves when the connection has ended.
pub(super) async fn dial(
    socket: &Path,
    deadline: Duration,
) -> Result<(Channel, oneshot::Receiver<()>), DialError> {
    let (open, ended) = oneshot::channel();
    let connected = tokio::time::timeout(deadline, socket::connect_plugin(socket, open)).await;
    let channel = connected.map_err(|_| DialError::Deadline {
        socket: socket.to_owned(),
        deadline,
    })??;
    Ok((channel, ended))
}
