//! The health streams of DRA drivers.

use std::sync::Arc;

use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient;
use nodedock_proto::kubelet::dra_health::v1alpha1::{HealthStatus, NodeWatchResourcesRequest};
use tokio::sync::watch;
use tonic::Status;

use super::instance::{DeviceHealth, Link, channel};
use super::state::Shared;

/// Reads the stream, and begins again some time after it ended.
pub(super) async fn follow(shared: Arc<Shared>, driver: String, link: watch::Sender<Link>) {
    loop {
        let ended = read(&shared, &driver, &link).await;
        shared.change(|state| state.health.remove(&driver));
        let outcome = ended.map_err(|status| format!("{:?}: {}", status.code(), status.message()));
        shared.note_outcome("NodeWatchResources", &driver, outcome);
        tokio::time::sleep(shared.options.health_again).await;
    }
}

async fn read(shared: &Shared, driver: &str, link: &watch::Sender<Link>) -> Result<(), Status> {
    let mut client = DraResourceHealthClient::new(channel(link).await?);
    let mut stream = client
        .node_watch_resources(NodeWatchResourcesRequest {})
        .await?
        .into_inner();
    while let Some(report) = stream.message().await? {
        let devices = report.devices.into_iter().map(|device| {
            let healthy = match device.health() {
                HealthStatus::Healthy => Some(true),
                HealthStatus::Unhealthy => Some(false),
                HealthStatus::Unknown => None,
            };
            let id = device.device.unwrap_or_default();
            (
                (id.pool_name, id.device_name),
                DeviceHealth {
                    healthy,
                    message: device.message,
                },
            )
        });
        // Devices that a report leaves out keep what was said of them.
        shared.change(|state| {
            state
                .health
                .entry(driver.to_owned())
                .or_default()
                .extend(devices)
        });
    }
    Ok(())
}
