//! The DRA health API, in both versions: streams of a driver's devices.
//!
//! Each message is the whole list, at first and whenever it changed, and again before a kubelet takes it for outdated. While the
//! driver does not serve nothing is sent: what was said before counts for its time. Of a driver that tells no health nothing is sent
//! either. The stream stays open: its next version may tell some, and a kubelet that was once told that a plugin has no such service
//! does not ask again (1.37).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use nodedock_proto::kubelet::dra_health::{v1, v1alpha1};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::convert;
use super::offer::Offer;
use super::report::{self, Line, Told};
use nodedock_base::clock::now_ms;
use nodedock_base::grpc::begin;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Published;
use nodedock_model::limit::{BRIDGE_HEALTH_STREAMS_MAX, BRIDGE_LOOK_PERIOD, HEALTH_PACE, HEALTH_RESEND};

/// The service of both versions. Streams end with the tasks.
#[derive(Clone)]
pub(super) struct Face {
    pub(super) offer: Arc<Offer>,
    pub(super) tasks: Tasks,
}

macro_rules! health_version {
    ($version:ident, $method:literal) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Face {
            type NodeWatchResourcesStream =
                Pin<Box<dyn Stream<Item = Result<$version::NodeWatchResourcesResponse, Status>> + Send>>;

            async fn node_watch_resources(
                &self,
                request: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                begin($method, &request);
                let lists = self.lists()?;
                let messages =
                    lists.map(|lines| Ok(convert::health::$version::message(&lines, now_seconds())));
                Ok(Response::new(Box::pin(messages)))
            }
        }
    };
}

health_version!(v1, "DRAResourceHealth.v1.NodeWatchResources");
health_version!(v1alpha1, "DRAResourceHealth.v1alpha1.NodeWatchResources");

impl Face {
    pub(super) fn lists(&self) -> Result<impl Stream<Item = Vec<Line>> + Send + use<>, Status> {
        let place = self.offer.health_streams.clone().try_acquire_owned().map_err(|_| {
            let max = BRIDGE_HEALTH_STREAMS_MAX;
            Status::resource_exhausted(format!("{max} streams of this driver's health are open already"))
        })?;
        let watch = Watch {
            serving: self.offer.ground.registry.serving_changes(),
            offer: self.offer.clone(),
            inventory: None,
            sent: None,
            _place: place,
        };
        let lists = futures::stream::unfold(watch, |mut watch| async move {
            let lines = watch.next().await;
            Some((lines, watch))
        });
        Ok(lists.take_until(self.tasks.stopped().boxed()))
    }
}

/// One stream.
struct Watch {
    offer: Arc<Offer>,
    serving: watch::Receiver<u64>,
    /// Of the driver that serves, when it publishes with us.
    inventory: Option<watch::Receiver<Arc<Published>>>,
    sent: Option<(Vec<Line>, Instant)>,
    _place: OwnedSemaphorePermit,
}

impl Watch {
    /// The next list, when it is due.
    async fn next(&mut self) -> Vec<Line> {
        // Health may flap a thousand times a second.
        if let Some((_, at)) = &self.sent {
            tokio::time::sleep_until(*at + HEALTH_PACE).await;
        }
        loop {
            self.serving.mark_unchanged();
            match self.look() {
                Told::Devices(lines) if self.is_due(&lines) => {
                    self.sent = Some((lines.clone(), Instant::now()));
                    return lines;
                }
                Told::NotYet | Told::Devices(_) => self.changed().await,
            }
        }
    }

    fn look(&mut self) -> Told {
        let Offer { driver: name, ground, .. } = &*self.offer;
        self.inventory = None;
        let Ok(driver) = ground.registry.serving(name) else { return Told::NotYet };
        match driver.inventory {
            None => report::native(ground.registry.native_health(name)),
            Some(mut inventory) => {
                let told = report::published(&inventory.borrow_and_update(), &ground.pool_names);
                self.inventory = Some(inventory);
                told
            }
        }
    }

    fn is_due(&self, lines: &[Line]) -> bool {
        self.sent.as_ref().is_none_or(|(sent, at)| sent != lines || at.elapsed() >= HEALTH_RESEND)
    }

    /// Resolves when there may be something else to tell. What a plugin says is not told by anybody, so it is looked at.
    async fn changed(&mut self) {
        let period = if self.inventory.is_some() { self.rest() } else { BRIDGE_LOOK_PERIOD };
        tokio::select! {
            // What is not seen here is seen at the next look, for each of the three.
            () = published(&mut self.inventory) => {}
            _ = self.serving.changed() => {}
            () = tokio::time::sleep(period) => {}
        }
    }

    /// Until the list is due again, or a while where it is and there is none.
    fn rest(&self) -> Duration {
        let since = self.sent.as_ref().map_or(Duration::ZERO, |(_, at)| at.elapsed());
        HEALTH_RESEND.saturating_sub(since).max(BRIDGE_LOOK_PERIOD)
    }
}

/// Resolves when the driver published something. One that is replaced does so no more: the next begins to serve.
async fn published(inventory: &mut Option<watch::Receiver<Arc<Published>>>) {
    if let Some(inventory) = inventory
        && inventory.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

fn now_seconds() -> i64 {
    i64::try_from(now_ms() / 1000).unwrap_or(i64::MAX)
}
