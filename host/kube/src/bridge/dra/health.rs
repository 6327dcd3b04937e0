//! The DRA health API, in both versions: streams of a driver's devices.
//!
//! Each message is the whole list, at first and whenever it changed, and again before a kubelet takes it for outdated. While the
//! driver does not serve nothing is sent: what was sent before counts for its time. Of a driver that reports no health nothing is sent
//! either. The stream stays open: the driver's next version may report some, and a kubelet that once got the answer that a plugin has
//! no such service does not retry (1.37).
//!
//! After a reboot a kubelet starts pods before their drivers are here, and syncs a pod whose prepare failed again only after a minute or
//! more, but at once when the reported health of a device changes that a claim in its cache has. It has the health of the time before in
//! that cache, so one that is as it was wakes no pod. So devices of claims that a kubelet holds since an earlier boot are first reported as
//! unknown, once their driver serves and has them, and then as they are (`Announcement`).

use std::cell::OnceCell;
use std::collections::BTreeSet;
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
use crate::bridge::convert::{self, transcode};
use crate::bridge::{BRIDGE_LOOK_PERIOD, Context};
use crate::pools::PoolNames;
use nodedock_base::clock::now_ms;
use nodedock_base::grpc::begin;
use nodedock_base::signal::Listener;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Published;
use nodedock_model::{DeviceHealth, DeviceName, DriverName, HealthReport, PoolName};

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
            announcement: Announcement::default(),
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
    announcement: Announcement,
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
        let context = &self.driver.context;
        let (parts, name) = (&context.parts, &self.driver.name);
        self.inventory = None;
        let driver = parts.registry.serving(name).ok()?;
        let since_earlier_boot = || context.devices_since_earlier_boot(name);
        let Some(mut inventory) = driver.inventory else {
            let health = parts.registry.instances.native_health(name);
            let health = health.filter(|health| !health.is_empty());
            return self.announcement.list(health, since_earlier_boot, |_| true);
        };
        let (now, names) = (inventory.borrow_and_update().clone(), &parts.pools.names);
        self.inventory = Some(inventory);
        let devices = OnceCell::new();
        let is_listed = |device: &DeviceKey| {
            let devices = devices.get_or_init(|| published_devices(&now, names));
            devices.contains(device)
        };
        let health = published(&now, names);
        self.announcement
            .list(health, since_earlier_boot, is_listed)
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

type DeviceKey = (PoolName, DeviceName);

/// Health message of devices that are announced.
const ANNOUNCED: &str = "the node has started, and the device's claims are to be prepared again";

/// The devices of claims of an earlier boot in one stream: each is unknown in one list, and as it is from the next on.
#[derive(Debug, Default)]
struct Announcement {
    /// Those that are still to be announced; `None`: not read yet.
    awaiting: Option<BTreeSet<DeviceKey>>,
    /// Those of the list before.
    announced: BTreeSet<DeviceKey>,
}

impl Announcement {
    /// Returns the list to send. `health`: as the driver reports it, if it does; `since_earlier_boot`: the devices of claims that are to be
    /// prepared again, which is called once; `is_listed`: whether the driver has a device, as far as it lists them.
    fn list(
        &mut self,
        health: Option<HealthReport>,
        since_earlier_boot: impl FnOnce() -> BTreeSet<DeviceKey>,
        is_listed: impl Fn(&DeviceKey) -> bool,
    ) -> Option<HealthReport> {
        let awaiting = self.awaiting.get_or_insert_with(since_earlier_boot);
        let ready: BTreeSet<_> = awaiting
            .extract_if(.., |device| is_listed(device))
            .collect();
        let before = std::mem::replace(&mut self.announced, ready.clone());
        if ready.is_empty() && before.is_empty() {
            return health;
        }
        // For a kubelet a device without reported health is unknown, without a message.
        let mut list: HealthReport = before
            .into_iter()
            .map(|device| (device, DeviceHealth::default()))
            .collect();
        list.extend(health.into_iter().flatten());
        list.extend(ready.into_iter().map(|device| {
            let unknown = DeviceHealth {
                message: ANNOUNCED.to_owned(),
                ..DeviceHealth::default()
            };
            (device, unknown)
        }));
        Some(list)
    }
}

impl Context {
    /// Devices of a driver, by their published names, in claims that a kubelet holds since an earlier boot.
    fn devices_since_earlier_boot(&self, driver: &DriverName) -> BTreeSet<DeviceKey> {
        let parts = &self.parts;
        let records = parts.manager.kubelet.held_since_earlier_boot(driver);
        let keys = records.iter().flat_map(|record| {
            let devices = record.allocation.of_driver(driver);
            devices.map(|of| {
                let pool = parts.pools.published_in(record, driver, &of.pool);
                (pool, of.device.clone())
            })
        });
        keys.collect()
    }
}

/// The devices in the inventory, by the names that claims have.
fn published_devices(published: &Published, names: &PoolNames) -> BTreeSet<DeviceKey> {
    let pools = published.inventory.pools.iter();
    let named = pools.filter_map(|(pool, listed)| {
        // no error: a pool whose name is too long is in no slice, so no claim has its devices
        Some((names.published(pool).ok()?, listed))
    });
    named
        .flat_map(|(pool, listed)| {
            let devices = listed.devices.keys();
            devices.map(move |device| (pool.clone(), device.clone()))
        })
        .collect()
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
    fn devices_of_earlier_boot_change_once() {
        let healthy = DeviceHealth {
            state: HealthState::Healthy,
            message: String::new(),
        };
        let report = |device: &str| Some(HealthReport::from([(key("p", device), healthy.clone())]));
        let both = || BTreeSet::from([key("p", "a"), key("p", "b")]);
        let shown = |list: Option<HealthReport>| -> Vec<String> {
            let line = |((_, device), health): (DeviceKey, DeviceHealth)| {
                let is_announced = health.message == ANNOUNCED;
                format!("{device} {:?} {is_announced}", health.state)
            };
            list.into_iter().flatten().map(line).collect()
        };

        // A driver that reports health, and lists a device later.
        let mut announcement = Announcement::default();
        let mut next = |health, listed: &[&str]| {
            let is_listed = |(_, device): &DeviceKey| listed.contains(&device.as_str());
            shown(announcement.list(health, both, is_listed))
        };
        assert_eq!(next(None, &[]), [""; 0]);
        for (listed, expected) in [
            (&["a"][..], &["a Unknown true"][..]),
            (&["a"], &["a Healthy false"]),
            (&["a", "b"], &["a Healthy false", "b Unknown true"]),
            (&["a", "b"], &["a Healthy false", "b Unknown false"]),
            (&["a", "b"], &["a Healthy false"]),
        ] {
            assert_eq!(next(report("a"), listed), expected);
        }

        // One that reports none, and one without claims.
        let mut announcement = Announcement::default();
        let mut next = || shown(announcement.list(None, both, |_| true));
        assert_eq!(next(), ["a Unknown true", "b Unknown true"]);
        assert_eq!(next(), ["a Unknown false", "b Unknown false"]);
        assert_eq!(next(), [""; 0]);
        let mut announcement = Announcement::default();
        assert_eq!(announcement.list(None, BTreeSet::new, |_| true), None);
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
