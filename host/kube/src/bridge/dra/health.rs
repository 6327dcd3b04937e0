//! The DRA health API, in both versions: streams of a driver's devices.
//!
//! Each message is the whole list, at first and whenever it changed, and again before a kubelet takes it for outdated. While the
//! driver does not serve nothing is sent: what was sent before counts for its time. Of a driver that reports no health nothing is sent
//! either. The stream stays open: the driver's next version may report some, and a kubelet that once got the answer that a plugin has
//! no such service does not retry (1.37).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use futures::{FutureExt, Stream, StreamExt};
use nodedock_proto::kubelet::dra_health::{v1, v1alpha1};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::{BRIDGE_HEALTH_STREAMS_MAX, OfferedDriver};
use crate::bridge::BRIDGE_LOOK_PERIOD;
use crate::bridge::convert::{self, transcode};
use crate::pools::PoolNames;
use nodedock_base::clock::now_ms;
use nodedock_base::grpc::begin;
use nodedock_base::signal::Listener;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Published;
use nodedock_model::HealthReport;

/// Interval of repeating the health list to a kubelet, well before it counts as outdated, and the minimum interval.
pub(crate) const HEALTH_RESEND: Duration = Duration::from_secs(10);
pub(crate) const HEALTH_PACE: Duration = Duration::from_millis(100);

/// The service of both versions. Streams end with the tasks.
#[derive(Clone)]
pub(in crate::bridge) struct HealthService {
    pub(in crate::bridge) driver: Arc<OfferedDriver>,
    pub(in crate::bridge) tasks: Tasks,
}

macro_rules! health_version {
    ($version:ident, $method:literal) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for HealthService {
            type NodeWatchResourcesStream = Pin<
                Box<dyn Stream<Item = Result<$version::NodeWatchResourcesResponse, Status>> + Send>,
            >;

            async fn node_watch_resources(
                &self,
                request: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                begin($method, &request);
                let messages = self
                    .lists()?
                    .map(|list| transcode(&convert::health(&list, now_ms() / 1000)));
                Ok(Response::new(Box::pin(messages)))
            }
        }
    };
}

health_version!(v1, "DRAResourceHealth.v1.NodeWatchResources");
health_version!(v1alpha1, "DRAResourceHealth.v1alpha1.NodeWatchResources");

impl HealthService {
    pub(in crate::bridge) fn lists(
        &self,
    ) -> Result<impl Stream<Item = HealthReport> + Send + use<>, Status> {
        let permit = self
            .driver
            .health_streams
            .clone()
            .try_acquire_owned()
            .map_err(|_| {
                let max = BRIDGE_HEALTH_STREAMS_MAX;
                Status::resource_exhausted(format!(
                    "{max} streams of this driver's health are open already"
                ))
            })?;
        let serving = self.driver.context.parts.registry.instances.changes();
        let watch = HealthWatch {
            serving,
            driver: self.driver.clone(),
            inventory: None,
            sent: None,
            _permit: permit,
        };
        let lists =
            futures::stream::unfold(watch, async |mut watch| Some((watch.next().await, watch)));
        Ok(lists.take_until(self.tasks.stopped().boxed()))
    }
}

/// One stream.
struct HealthWatch {
    driver: Arc<OfferedDriver>,
    serving: Listener,
    /// Devices of the serving driver, if it publishes them here.
    inventory: Option<watch::Receiver<Arc<Published>>>,
    sent: Option<(HealthReport, Instant)>,
    _permit: OwnedSemaphorePermit,
}

impl HealthWatch {
    /// The next list, when it is due.
    async fn next(&mut self) -> HealthReport {
        // Health may flap a thousand times a second.
        if let Some((_, at)) = &self.sent {
            tokio::time::sleep_until(*at + HEALTH_PACE).await;
        }
        loop {
            self.serving.mark_unchanged();
            if let Some(list) = self.current().filter(|list| self.is_due(list)) {
                self.sent = Some((list.clone(), Instant::now()));
                return list;
            }
            self.changed().await;
        }
    }

    /// None: the driver does not serve, or has reported no health so far.
    fn current(&mut self) -> Option<HealthReport> {
        let parts = &self.driver.context.parts;
        self.inventory = None;
        let driver = parts.registry.serving(&self.driver.name).ok()?;
        match driver.inventory {
            None => parts
                .registry
                .instances
                .native_health(&self.driver.name)
                .filter(|health| !health.is_empty()),
            Some(mut inventory) => {
                let list = published(&inventory.borrow_and_update(), &parts.pools.names);
                self.inventory = Some(inventory);
                list
            }
        }
    }

    fn is_due(&self, list: &HealthReport) -> bool {
        self.sent
            .as_ref()
            .is_none_or(|(sent, at)| sent != list || at.elapsed() >= HEALTH_RESEND)
    }

    /// Resolves when there may be another list, or this one is due again. A change of what a native plugin reports is seen by polling.
    async fn changed(&mut self) {
        let published =
            OptionFuture::from(self.inventory.as_mut().map(|inventory| inventory.changed()));
        tokio::select! {
            // What is missed here is seen in the next round, for each of the three. A driver that is replaced publishes no more: the
            // next begins to serve.
            Some(Ok(())) = published => {}
            _ = self.serving.changed() => {}
            () = tokio::time::sleep(BRIDGE_LOOK_PERIOD) => {}
        }
    }
}

/// The health of every device in the inventory; one of which nothing was reported is unknown. Pools have the names that claims have; one
/// whose name would be too long is in no slice, and so not in the list. None: the driver reports no health.
fn published(published: &Published, names: &PoolNames) -> Option<HealthReport> {
    let Published {
        inventory, health, ..
    } = published;
    if health.is_empty() {
        return None;
    }
    let mut list = HealthReport::new();
    for (pool, listed) in &inventory.pools {
        let Ok(name) = names.published(pool) else {
            continue;
        };
        for device in listed.devices.keys() {
            let reported = health
                .get(&(pool.clone(), device.clone()))
                .cloned()
                .unwrap_or_default();
            list.insert((name.clone(), device.clone()), reported);
        }
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{
        Device, DeviceHealth, DeviceName, HealthState, Inventory, Pool, PoolName,
    };

    fn key(pool: &str, device: &str) -> (PoolName, DeviceName) {
        (
            PoolName::new(pool).unwrap(),
            DeviceName::new(device).unwrap(),
        )
    }

    fn inventory(devices: &[&str]) -> Inventory {
        let device = |name: &&str| (DeviceName::new(*name).unwrap(), Device::default());
        let pool = Pool {
            devices: devices.iter().map(device).collect(),
            ..Pool::default()
        };
        Inventory {
            pools: [(PoolName::new("p").unwrap(), pool)].into(),
        }
    }

    #[test]
    fn health_lists_exactly_the_inventory() {
        let hot = DeviceHealth {
            state: HealthState::Unhealthy,
            message: "hot".into(),
        };
        let health = [
            (key("p", "a"), hot.clone()),
            (key("gone", "a"), hot.clone()),
        ]
        .into();
        let reported = Published {
            inventory: inventory(&["a", "b"]),
            health,
            ..Published::default()
        };
        let names = PoolNames {
            node: nodedock_model::ObjectName::new("node-1").unwrap(),
        };
        let expected = [
            (key("node-1/p", "a"), hot),
            (key("node-1/p", "b"), DeviceHealth::default()),
        ];
        assert_eq!(published(&reported, &names), Some(expected.into()));
        for devices in [&[][..], &["a"]] {
            let silent = Published {
                inventory: inventory(devices),
                ..Published::default()
            };
            assert_eq!(
                published(&silent, &names),
                None,
                "a driver that reports no health"
            );
        }
    }
}
