//! The health that a plugin reports for its devices, and its validity.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra_health::v1 as wire;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use tonic::{Code, Request, Status, Streaming};

use super::convert::health::DeviceReport;
use super::{Connection, HealthService, Tap, clean, convert, rpc};
use crate::grpc::PLUGIN_DIAL;
use nodedock_base::tasks::Tasks;
use nodedock_model::limit::{DEVICES_MAX, PLUGIN_ANSWER_BYTES_MAX};
use nodedock_model::{DeviceHealth, DeviceName, DriverName, HealthReport, PoolName};

/// Delay from the end of a health stream to the next, as in a kubelet.
const HEALTH_RESTART: Duration = Duration::from_secs(5);

/// Last report for each device. Clones share the state.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<BTreeMap<(PoolName, DeviceName), Reported>>>);

#[derive(Debug)]
struct Reported {
    health: DeviceHealth,
    /// The time of receipt counts, as in a kubelet, not the plugin's clock.
    until: Instant,
}

impl Health {
    /// Reads the plugin's stream until the tasks stop.
    pub fn follow(
        driver: DriverName,
        service: HealthService,
        connection: Connection,
        tap: Tap,
        tasks: &Tasks,
    ) -> Self {
        let health = Self::default();
        let watch = Watch {
            driver,
            service,
            connection,
            tap,
            health: health.clone(),
        };
        // Safe to drop: the next stream sends the health again.
        tasks.spawn_until_stopped("plugin-health", watch.run());
        health
    }

    /// Returns the current health. A device without a report within its timeout is unknown.
    pub fn now(&self) -> HealthReport {
        let now = Instant::now();
        let known = self.lock();
        let fresh = known.iter().map(|(key, last)| match now < last.until {
            true => (key.clone(), last.health.clone()),
            false => (key.clone(), DeviceHealth::default()),
        });
        fresh.collect()
    }

    /// Applies a message. Devices that it omits keep their report until its timeout. Returns the number of devices whose names are not
    /// valid, or for which there is no room.
    fn take(&self, devices: impl IntoIterator<Item = Option<DeviceReport>>, now: Instant) -> usize {
        let mut known = self.lock();
        known.retain(|_, last| now < last.until);
        let mut dropped = 0;
        for device in devices {
            match device {
                Some(device) if known.len() < DEVICES_MAX || known.contains_key(&device.key) => {
                    let until = now + device.timeout;
                    known.insert(
                        device.key,
                        Reported {
                            health: device.health,
                            until,
                        },
                    );
                }
                _ => dropped += 1,
            }
        }
        dropped
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(PoolName, DeviceName), Reported>> {
        self.0.lock()
    }
}

struct Watch {
    driver: DriverName,
    service: HealthService,
    connection: Connection,
    tap: Tap,
    health: Health,
}

impl Watch {
    /// Opens the stream again whenever it ends, if the plugin implements it.
    async fn run(self) {
        let mut complained = false;
        loop {
            let (end, driver) = (self.stream().await, &self.driver);
            match end {
                Err(status) if status.code() == Code::Unimplemented => {
                    // The Go helper registers the service for every driver.
                    tracing::info!(%driver, "the driver registered a health service that it does not implement");
                    return;
                }
                Err(status) if !std::mem::replace(&mut complained, true) => {
                    let (code, why) = (format!("{:?}", status.code()), clean(status.message()));
                    tracing::warn!(%driver, code, why, "the health stream ended, opening it again");
                }
                Err(_) | Ok(()) => {}
            }
            tokio::time::sleep(HEALTH_RESTART).await;
        }
    }

    /// Reads one stream, from the connection to its end.
    async fn stream(&self) -> Result<(), Status> {
        let connected = self.connection.channel(PLUGIN_DIAL).await;
        let channel = connected.map_err(|link| Status::unavailable(link.as_str()))?;
        let request = wire::NodeWatchResourcesRequest {};
        let path = format!("/{}/NodeWatchResources", self.service.listed_as());
        let messages = rpc::stream(
            channel,
            path,
            Request::new(request),
            PLUGIN_ANSWER_BYTES_MAX,
        )
        .await?;
        self.drain(messages).await
    }

    async fn drain(
        &self,
        mut messages: Streaming<wire::NodeWatchResourcesResponse>,
    ) -> Result<(), Status> {
        while let Some(message) = messages.message().await? {
            self.tap.received("", "NodeWatchResources", &message);
            let devices = message.devices.into_iter().map(convert::health::device);
            let dropped = self.health.take(devices, Instant::now());
            if dropped > 0 {
                tracing::debug!(driver = %self.driver, dropped, "health of some devices is not taken");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::HealthState;

    fn key(device: &str) -> (PoolName, DeviceName) {
        (
            PoolName::new("pool").unwrap(),
            DeviceName::new(device).unwrap(),
        )
    }

    fn report(device: &str, seconds: u64) -> [Option<DeviceReport>; 1] {
        let health = DeviceHealth {
            state: HealthState::Healthy,
            message: "fine".into(),
        };
        [Some(DeviceReport {
            key: key(device),
            health,
            timeout: Duration::from_secs(seconds),
        })]
    }

    #[tokio::test(start_paused = true)]
    async fn expired_device_health_is_unknown() {
        let health = Health::default();
        assert_eq!(health.take(report("short", 10), Instant::now()), 0);
        assert_eq!(
            health.take([None].into_iter().chain(report("long", 60)), Instant::now()),
            1
        );
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(health.now()[&key("short")].state, HealthState::Healthy);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(health.now()[&key("short")], DeviceHealth::default());
        assert_eq!(health.now()[&key("long")].message, "fine");
        assert!(
            !health.now().contains_key(&key("other")),
            "it had no report"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn report_refreshes_only_named_devices() {
        let health = Health::default();
        health.take(report("a", 30), Instant::now());
        tokio::time::advance(Duration::from_secs(20)).await;
        health.take(report("b", 30), Instant::now());
        assert_eq!(health.now().len(), 2);
        tokio::time::advance(Duration::from_secs(20)).await;
        health.take(report("b", 30), Instant::now());
        assert_eq!(health.now().keys().collect::<Vec<_>>(), [&key("b")]);
    }

    #[test]
    fn health_of_excess_devices_is_refused() {
        let health = Health::default();
        let now = Instant::now();
        for index in 0..DEVICES_MAX {
            assert_eq!(health.take(report(&format!("d{index}"), 30), now), 0);
        }
        assert_eq!(health.take(report("one-more", 30), now), 1);
        assert_eq!(
            health.take(report("d0", 30), now),
            0,
            "known ones are refreshed"
        );
    }
}
