//! The health streams of DRA drivers.

use std::sync::Arc;

use nodedock_proto::kubelet::dra_health::{v1, v1alpha1};
use tokio::time::Instant;
use tonic::Status;

use super::Release;
use super::dra;
use super::state::Inner;

/// What a driver last said of a device.
#[derive(Clone, Debug)]
pub struct DeviceHealth {
    /// `None` if it does not know.
    pub healthy: Option<bool>,
    pub message: String,
    pub timeout_seconds: i64,
    /// When it came: a kubelet does not look at the driver's own time.
    pub received: Instant,
}

/// Whether health is asked for by `v1` rather than `v1alpha1`; `None` if it is not asked for.
pub(super) fn version(release: Release, versions: &[String]) -> Option<bool> {
    let has = |wanted: &str| versions.iter().any(|version| version == wanted);
    match release {
        Release::V1_36 => Some(false),
        Release::V1_37 if has("v1.DRAResourceHealth") => Some(true),
        Release::V1_37 if has("v1alpha1.DRAResourceHealth") => Some(false),
        Release::V1_37 => None,
    }
}

/// Reads the stream, and begins again some time after it ended.
pub(super) async fn follow(inner: Arc<Inner>, driver: String, link: Link, newer: bool) {
    loop {
        let ended = if newer {
            read_v1(&inner, &driver, &link).await
        } else {
            read_v1alpha1(&inner, &driver, &link).await
        };
        inner.change(|state| state.health.remove(&driver));
        let outcome = ended.map_err(|status| format!("{:?}: {}", status.code(), status.message()));
        inner.note_outcome("NodeWatchResources", &driver, outcome);
        tokio::time::sleep(inner.options.health_again).await;
    }
}

type Link = tokio::sync::watch::Sender<dra::Link>;

async fn read_v1(inner: &Inner, driver: &str, link: &Link) -> Result<(), Status> {
    let channel = dra::channel(link).await?;
    let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let mut stream = client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await?.into_inner();
    while let Some(report) = stream.message().await? {
        let devices = report.devices.into_iter().map(|device| {
            let healthy = match device.health() {
                v1::HealthStatus::Healthy => Some(true),
                v1::HealthStatus::Unhealthy => Some(false),
                v1::HealthStatus::Unknown => None,
            };
            let id = device.device.unwrap_or_default();
            let timeout_seconds = device.health_check_timeout_seconds;
            let health =
                DeviceHealth { healthy, message: device.message, timeout_seconds, received: Instant::now() };
            ((id.pool_name, id.device_name), health)
        });
        keep(inner, driver, devices);
    }
    Ok(())
}

async fn read_v1alpha1(inner: &Inner, driver: &str, link: &Link) -> Result<(), Status> {
    let channel = dra::channel(link).await?;
    let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let mut stream = client.node_watch_resources(v1alpha1::NodeWatchResourcesRequest {}).await?.into_inner();
    while let Some(report) = stream.message().await? {
        let devices = report.devices.into_iter().map(|device| {
            let healthy = match device.health() {
                v1alpha1::HealthStatus::Healthy => Some(true),
                v1alpha1::HealthStatus::Unhealthy => Some(false),
                v1alpha1::HealthStatus::Unknown => None,
            };
            let id = device.device.unwrap_or_default();
            let timeout_seconds = device.health_check_timeout_seconds;
            let health =
                DeviceHealth { healthy, message: device.message, timeout_seconds, received: Instant::now() };
            ((id.pool_name, id.device_name), health)
        });
        keep(inner, driver, devices);
    }
    Ok(())
}

/// Devices that a report leaves out keep what was said of them.
fn keep(inner: &Inner, driver: &str, devices: impl Iterator<Item = ((String, String), DeviceHealth)>) {
    inner.change(|state| state.health.entry(driver.to_owned()).or_default().extend(devices));
}
