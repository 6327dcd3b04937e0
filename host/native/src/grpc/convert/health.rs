//! Health reports. The messages of the two versions are the same.

use std::time::Duration;

use nodedock_proto::kubelet::dra_health::v1 as wire;

use nodedock_base::printable::one_line;
use nodedock_model::limit::{HEALTH_MESSAGE_BYTES_MAX, HEALTH_TIMEOUT, HEALTH_TIMEOUT_MAX};
use nodedock_model::{DeviceHealth, DeviceName, HealthState, PoolName};

#[derive(Debug)]
pub(in crate::grpc) struct DeviceReport {
    pub(in crate::grpc) key: (PoolName, DeviceName),
    pub(in crate::grpc) health: DeviceHealth,
    pub(in crate::grpc) timeout: Duration,
}

/// `None`: its names are invalid.
pub(in crate::grpc) fn device(said: wire::DeviceHealth) -> Option<DeviceReport> {
    let state = match said.health() {
        wire::HealthStatus::Healthy => HealthState::Healthy,
        wire::HealthStatus::Unhealthy => HealthState::Unhealthy,
        wire::HealthStatus::Unknown => HealthState::Unknown,
    };
    let device = said.device.unwrap_or_default();
    let key = (
        PoolName::new(&device.pool_name).ok()?,
        DeviceName::new(&device.device_name).ok()?,
    );
    let message = one_line(&said.message, HEALTH_MESSAGE_BYTES_MAX);
    let timeout = timeout(said.health_check_timeout_seconds);
    Some(DeviceReport {
        key,
        health: DeviceHealth { state, message },
        timeout,
    })
}

/// A missing or invalid value is the default.
fn timeout(seconds: i64) -> Duration {
    match u64::try_from(seconds) {
        Err(_) | Ok(0) => HEALTH_TIMEOUT,
        Ok(seconds) => Duration::from_secs(seconds).min(HEALTH_TIMEOUT_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_timeout_becomes_the_default() {
        assert_eq!(timeout(0), HEALTH_TIMEOUT);
        assert_eq!(timeout(-5), HEALTH_TIMEOUT);
        assert_eq!(timeout(7), Duration::from_secs(7));
        assert_eq!(timeout(i64::MAX), HEALTH_TIMEOUT_MAX);
    }

    fn said(health: i32, message: &str) -> DeviceHealth {
        let named = wire::DeviceIdentifier {
            pool_name: "p".to_owned(),
            device_name: "d".to_owned(),
        };
        let message = message.to_owned();
        device(wire::DeviceHealth {
            device: Some(named),
            health,
            message,
            ..Default::default()
        })
        .unwrap()
        .health
    }

    #[test]
    fn unknown_health_values_read_as_unknown() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        for (health, state) in [
            (0, Unknown),
            (1, Healthy),
            (2, Unhealthy),
            (3, Unknown),
            (-1, Unknown),
        ] {
            assert_eq!(said(health, "").state, state, "{health}");
        }
    }

    #[test]
    fn long_message_keeps_its_end() {
        let longest = "x".repeat(HEALTH_MESSAGE_BYTES_MAX);
        assert_eq!(said(2, &longest).message, longest);
        let message = said(2, &("x".repeat(2000) + ": it is hot")).message;
        assert!(
            message.len() == HEALTH_MESSAGE_BYTES_MAX && message.ends_with("x: it is hot"),
            "{message}"
        );
    }
}
