//! Instances of DRA drivers: their connections, and what they last said of devices.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;

/// The state of a connection.
#[derive(Clone, Debug)]
pub(super) enum Link {
    Connecting,
    Ready(Channel),
    Failed(String),
}

/// One registered socket of a driver.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) number: u64,
    pub(super) endpoint: PathBuf,
    pub(super) link: watch::Sender<Link>,
    /// True if the driver has been notified of its registration.
    notified: AtomicBool,
    pub(super) end: CancellationToken,
}

impl Instance {
    pub(super) fn new(number: u64, endpoint: PathBuf) -> Self {
        Self {
            number,
            endpoint,
            link: watch::Sender::new(Link::Connecting),
            notified: AtomicBool::new(false),
            end: CancellationToken::new(),
        }
    }

    pub(super) fn set_notified(&self) {
        self.notified.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_connected(&self) -> bool {
        matches!(*self.link.borrow(), Link::Ready(_))
    }

    pub(super) fn is_notified(&self) -> bool {
        self.notified.load(Ordering::SeqCst)
    }

    /// Makes a call. If the connection ended before it was sent, it is made on the next one, as grpc-go does it.
    pub(super) async fn sent<T, F>(
        &self,
        call: impl Fn(DraPluginClient<Channel>) -> F,
    ) -> Result<T, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        loop {
            let mut link = self.link.subscribe();
            let answer = call(DraPluginClient::new(channel(&self.link).await?)).await;
            match answer {
                Err(status) if was_not_sent(&status) => {
                    let is_over = |link: &Link| !matches!(link, Link::Ready(_));
                    // The end of the connection may have been seen already.
                    if is_over(&link.borrow()) || link.has_changed().unwrap_or(true) {
                        continue;
                    }
                    link.changed().await.map_err(|_| status)?;
                }
                answer => return answer,
            }
        }
    }
}

/// Returns whether a call failed because the connection had ended before the call was sent.
fn was_not_sent(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let is_canceled = error.downcast_ref().is_some_and(hyper::Error::is_canceled);
        let io = error.downcast_ref::<std::io::Error>();
        if is_canceled || io.is_some_and(|error| error.kind() == std::io::ErrorKind::NotConnected) {
            return true;
        }
        source = error.source();
    }
    false
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// Waits while a connection is being made; one that failed fails at once.
pub(super) async fn channel(link: &watch::Sender<Link>) -> Result<Channel, Status> {
    let mut link = link.subscribe();
    loop {
        match &*link.borrow_and_update() {
            Link::Ready(channel) => return Ok(channel.clone()),
            Link::Failed(why) => return Err(Status::unavailable(why.clone())),
            Link::Connecting => {}
        }
        let gone = Status::unavailable("the plugin is gone");
        link.changed().await.map_err(|_| gone)?;
    }
}

/// The last health that a driver reported for a device.
#[derive(Clone, Debug)]
pub struct DeviceHealth {
    /// `None` if it does not know.
    pub healthy: Option<bool>,
    pub message: String,
}
