//! Events about devices that became unhealthy: on the pods of the claims that have them, or on the node.

use std::sync::Arc;

use tokio::time::Instant;

use super::{EVENT_PODS_MAX, Events, named, of_pod, warning};
use crate::pools::PoolNames;
use crate::slices::{OnUnhealthy, UnhealthyDevice};
use nodedock_core::manager::claims::KubeletClaims;
use nodedock_core::records::RecordStore;
use nodedock_model::KubeletClaim;

/// Publishes what the slices report.
pub fn on_unhealthy(
    events: Events,
    records: Arc<RecordStore>,
    kubelet: Arc<KubeletClaims>,
) -> OnUnhealthy {
    Arc::new(move |device| {
        let users =
            records.users_of_device(&device.driver, device.pool.as_str(), device.device.as_str());
        let claims: Vec<_> = users
            .iter()
            .filter_map(|claim| kubelet.held_claim(&claim.uid))
            .collect();
        events.unhealthy(device, &claims);
    })
}

impl Events {
    /// Publishes that a device became unhealthy, on the pods of `claims`, which have it; on the node if there are none. Drops what exceeds
    /// the rate of such events: the driver's reports set their pace.
    fn unhealthy(&self, device: &UnhealthyDevice, claims: &[KubeletClaim]) {
        let UnhealthyDevice {
            driver,
            pool,
            device,
            message,
        } = device;
        let pool = PoolNames {
            node: self.node_name.clone(),
        }
        .shown(pool);
        let why = if message.is_empty() {
            String::new()
        } else {
            format!(": {message}")
        };
        let note = format!("device {pool}/{device} of driver {driver} is unhealthy{why}");
        let consumers = claims.iter().flat_map(|held| {
            held.consumers
                .iter()
                .map(|consumer| (&held.claim, consumer))
        });
        let pods = consumers
            .filter(|(_, consumer)| consumer.is_pod())
            .take(EVENT_PODS_MAX);
        let mut objects: Vec<_> = pods
            .map(|(claim, pod)| of_pod(&claim.namespace, pod))
            .collect();
        if objects.is_empty() {
            objects.push(self.node());
        }
        for object in objects {
            if self.device_tokens.lock().take(Instant::now(), 0).is_err() {
                self.counters.dropped.inc();
                continue;
            }
            // The recorder tells devices of one object apart by the related object.
            let related = Some(named(format!("{driver}/{pool}/{device}")));
            self.publish(
                object,
                warning("DeviceUnhealthy", "Check", note.clone(), related),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{Scene, claim, pod};
    use super::*;
    use crate::events::{DEVICE_EVENTS_BURST, DEVICE_EVENTS_EVERY};
    use nodedock_model::{DeviceName, DriverName, PoolName};

    fn unhealthy(device: &str) -> UnhealthyDevice {
        UnhealthyDevice {
            driver: DriverName::new("gpu.example.com").unwrap(),
            pool: PoolName::new("gpus").unwrap(),
            device: DeviceName::new(device).unwrap(),
            message: "it is hot".to_owned(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn device_event_targets_pods_or_node() {
        let scene = Scene::new().await;
        let held = KubeletClaim {
            claim: claim(),
            drivers: vec![],
            consumers: vec![pod("a"), pod("b")],
            since_ms: 0,
            last_request: None,
            early: false,
        };
        scene.events.unhealthy(&unhealthy("gpu-0"), &[held]);
        scene.events.unhealthy(&unhealthy("gpu-1"), &[]);
        scene.events.unhealthy(&unhealthy("gpu-2"), &[]);
        tokio::time::sleep(Duration::from_millis(100)).await;
        let events = scene.events().into_iter().map(|event| {
            let object = &event["involvedObject"];
            assert_eq!(
                (&event["reason"], &event["type"]),
                (&"DeviceUnhealthy".into(), &"Warning".into())
            );
            format!(
                "{} {}: {}",
                object["kind"], object["name"], event["message"]
            )
            .replace('"', "")
        });
        let mut events: Vec<_> = events.collect();
        events.sort();
        let note = |device: &str| {
            format!("device node-1/gpus/{device} of driver gpu.example.com is unhealthy: it is hot")
        };
        let expected = [
            format!("Node node-1: {}", note("gpu-1")),
            format!("Node node-1: {}", note("gpu-2")),
            format!("Pod a: {}", note("gpu-0")),
            format!("Pod b: {}", note("gpu-0")),
        ];
        assert_eq!(events, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn device_events_have_their_own_rate() {
        let scene = Scene::new().await;
        for index in 0..1000 {
            scene
                .events
                .unhealthy(&unhealthy(&format!("gpu-{index}")), &[]);
        }
        scene.refuse("held");
        tokio::time::sleep(Duration::from_millis(100)).await;
        let burst = DEVICE_EVENTS_BURST as usize;
        assert_eq!(
            (scene.events().len(), scene.counts()[3]),
            (burst + 1, 1000 - burst as u64)
        );
        tokio::time::sleep(DEVICE_EVENTS_EVERY).await;
        scene.events.unhealthy(&unhealthy("gpu-0"), &[]);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(scene.counts()[3], 1000 - burst as u64);
    }
}
