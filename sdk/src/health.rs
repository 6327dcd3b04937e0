//! Health of devices.

/// Health of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HealthState {
    /// The driver cannot determine the health.
    #[default]
    Unknown,
    /// The device works.
    Healthy,
    /// The device does not work.
    Unhealthy,
}

/// Health of one device, and the reason.
///
/// ```
/// use nodedock_sdk::{DeviceHealth, HealthState};
///
/// let health = DeviceHealth::unhealthy("gpus", "gpu-0", "7 uncorrectable memory errors");
/// assert_eq!(health.state, HealthState::Unhealthy);
/// assert_eq!(DeviceHealth::healthy("gpus", "gpu-1").message, "");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Health of the device.
    pub state: HealthState,
    /// Human-readable reason, at most 1 KiB.
    pub message: String,
}

impl DeviceHealth {
    /// Reports a healthy device.
    pub fn healthy(pool: impl Into<String>, device: impl Into<String>) -> Self {
        Self::new(pool, device, HealthState::Healthy, "")
    }

    /// Reports an unhealthy device and the reason.
    pub fn unhealthy(
        pool: impl Into<String>,
        device: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(pool, device, HealthState::Unhealthy, message)
    }

    /// Reports a device of unknown health and the reason.
    pub fn unknown(
        pool: impl Into<String>,
        device: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(pool, device, HealthState::Unknown, message)
    }

    fn new(
        pool: impl Into<String>,
        device: impl Into<String>,
        state: HealthState,
        message: impl Into<String>,
    ) -> Self {
        DeviceHealth {
            pool: pool.into(),
            device: device.into(),
            state,
            message: message.into(),
        }
    }
}
