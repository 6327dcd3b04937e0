//! How devices are doing.

/// How a device is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HealthState {
    /// Nobody can say.
    #[default]
    Unknown,
    /// It works.
    Healthy,
    /// It does not.
    Unhealthy,
}

/// How one device is doing, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// How it is doing.
    pub state: HealthState,
    /// Why, for people; at most 1 KiB.
    pub message: String,
}

impl DeviceHealth {
    /// A device that works.
    pub fn healthy(pool: impl Into<String>, device: impl Into<String>) -> Self {
        Self::new(pool, device, HealthState::Healthy, "")
    }

    /// A device that does not work, and why.
    pub fn unhealthy(pool: impl Into<String>, device: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(pool, device, HealthState::Unhealthy, message)
    }

    /// A device of which nobody can say, and why not.
    pub fn unknown(pool: impl Into<String>, device: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(pool, device, HealthState::Unknown, message)
    }

    fn new(
        pool: impl Into<String>,
        device: impl Into<String>,
        state: HealthState,
        message: impl Into<String>,
    ) -> Self {
        DeviceHealth { pool: pool.into(), device: device.into(), state, message: message.into() }
    }
}
