//! Lists of devices' health. The two versions have the same fields.

use crate::bridge::report::Line;
use nodedock_model::HealthState;
use nodedock_model::limit::HEALTH_TIMEOUT;

macro_rules! health_version {
    ($version:ident) => {
        pub(in crate::bridge) mod $version {
            use nodedock_proto::kubelet::dra_health::$version as wire;

            use super::{HEALTH_TIMEOUT, HealthState, Line};

            /// A whole list, as it is known at `now_seconds` since the Unix epoch.
            pub(in crate::bridge) fn message(
                lines: &[Line],
                now_seconds: i64,
            ) -> wire::NodeWatchResourcesResponse {
                let state = |state| match state {
                    HealthState::Unknown => wire::HealthStatus::Unknown,
                    HealthState::Healthy => wire::HealthStatus::Healthy,
                    HealthState::Unhealthy => wire::HealthStatus::Unhealthy,
                };
                let device = |line: &Line| wire::DeviceHealth {
                    device: Some(wire::DeviceIdentifier {
                        pool_name: line.pool.to_string(),
                        device_name: line.device.to_string(),
                    }),
                    health: state(line.state).into(),
                    last_updated_time: now_seconds,
                    health_check_timeout_seconds: i64::try_from(HEALTH_TIMEOUT.as_secs()).unwrap_or(0),
                    message: line.message.clone(),
                };
                wire::NodeWatchResourcesResponse { devices: lines.iter().map(device).collect() }
            }
        }
    };
}

health_version!(v1);
health_version!(v1alpha1);
