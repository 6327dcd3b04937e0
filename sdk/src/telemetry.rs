//! Values of devices that change.

/// A value of a device now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// What is measured, then its unit, in snake case: `temperature_celsius`, `power_watts`. At most 64 bytes.
    pub name: String,
    /// Finite.
    pub value: f64,
}

/// Readings of one device.
///
/// ```
/// use nodedock_sdk::DeviceReadings;
///
/// let readings = DeviceReadings::new("gpus", "gpu-0").reading("temperature_celsius", 65.5);
/// assert_eq!(readings.readings[0].name, "temperature_celsius");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceReadings {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// At most 32, each name once.
    pub readings: Vec<Reading>,
}

impl DeviceReadings {
    /// A device without readings.
    pub fn new(pool: impl Into<String>, device: impl Into<String>) -> Self {
        Self {
            pool: pool.into(),
            device: device.into(),
            readings: Vec::new(),
        }
    }

    /// Adds a reading.
    #[must_use]
    pub fn reading(mut self, name: impl Into<String>, value: f64) -> Self {
        self.readings.push(Reading {
            name: name.into(),
            value,
        });
        self
    }
}
