//! Health reports. The two versions have the same fields.

use std::time::Duration;

use crate::grpc::cut;
use crate::grpc::health::{DeviceReport, Report};
use nodedock_model::limit::{HEALTH_MESSAGE_BYTES_MAX, HEALTH_TIMEOUT, HEALTH_TIMEOUT_MAX};
use nodedock_model::{DeviceHealth, DeviceName, HealthState, PoolName};

macro_rules! health_version {
    ($version:ident) => {
        pub(in crate::grpc) mod $version {
            use nodedock_proto::kubelet::dra_health::$version as wire;

            use crate::grpc::health::Report;

            pub(in crate::grpc) fn report(response: wire::NodeWatchResourcesResponse) -> Report {
                let device = |health: wire::DeviceHealth| {
                    let state = match health.health() {
                        wire::HealthStatus::Healthy => super::HealthState::Healthy,
                        wire::HealthStatus::Unhealthy => super::HealthState::Unhealthy,
                        wire::HealthStatus::Unknown => super::HealthState::Unknown,
                    };
                    let device = health.device.unwrap_or_default();
                    let timeout = health.health_check_timeout_seconds;
                    super::device(&device.pool_name, &device.device_name, state, timeout, &health.message)
                };
                super::counted(response.devices.into_iter().map(device))
            }
        }
    };
}

health_version!(v1);
health_version!(v1alpha1);

/// `None`: its names are invalid.
fn device(
    pool: &str,
    device: &str,
    state: HealthState,
    timeout_seconds: i64,
    message: &str,
) -> Option<DeviceReport> {
    let key = (PoolName::new(pool).ok()?, DeviceName::new(device).ok()?);
    let message = cut(message, HEALTH_MESSAGE_BYTES_MAX);
    let message = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Some(DeviceReport { key, health: DeviceHealth { state, message }, timeout: timeout(timeout_seconds) })
}

/// A missing or invalid value is the default.
fn timeout(seconds: i64) -> Duration {
    match u64::try_from(seconds) {
        Err(_) | Ok(0) => HEALTH_TIMEOUT,
        Ok(seconds) => Duration::from_secs(seconds).min(HEALTH_TIMEOUT_MAX),
    }
}

fn counted(devices: impl Iterator<Item = Option<DeviceReport>>) -> Report {
    let mut report = Report::default();
    for device in devices {
        match device {
            Some(device) => report.devices.push(device),
            None => report.nameless += 1,
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_of_nothing_or_nonsense_is_the_default() {
        assert_eq!(timeout(0), HEALTH_TIMEOUT);
        assert_eq!(timeout(-5), HEALTH_TIMEOUT);
        assert_eq!(timeout(7), Duration::from_secs(7));
        assert_eq!(timeout(i64::MAX), HEALTH_TIMEOUT_MAX);
    }

    macro_rules! state_of {
        ($version:ident, $said:expr) => {{
            use nodedock_proto::kubelet::dra_health::$version as wire;
            let named = wire::DeviceIdentifier { pool_name: "p".to_owned(), device_name: "d".to_owned() };
            let device = wire::DeviceHealth { device: Some(named), health: $said, ..Default::default() };
            $version::report(wire::NodeWatchResourcesResponse { devices: vec![device] }).devices[0]
                .health
                .state
        }};
    }

    #[test]
    fn healthy_and_unhealthy_are_read_and_everything_else_is_unknown() {
        use HealthState::{Healthy, Unhealthy, Unknown};
        for (said, state) in [(0, Unknown), (1, Healthy), (2, Unhealthy), (3, Unknown), (-1, Unknown)] {
            assert_eq!((state_of!(v1, said), state_of!(v1alpha1, said)), (state, state), "{said}");
        }
    }

    #[test]
    fn a_long_message_is_cut_to_a_kubelets_length() {
        let longest = "x".repeat(HEALTH_MESSAGE_BYTES_MAX);
        assert_eq!(device("p", "d", HealthState::Unhealthy, 0, &longest).unwrap().health.message, longest);
        let device = device("p", "d", HealthState::Unhealthy, 0, &"x".repeat(2000)).unwrap();
        assert_eq!(device.health.message.len(), HEALTH_MESSAGE_BYTES_MAX);
        assert!(device.health.message.ends_with("x..."));
    }
}
