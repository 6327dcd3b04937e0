//! The section `recording`: the drivers whose calls are recorded.

use std::fmt;

use serde::Deserialize;
use serde::de::Error;

use super::values;
use nodedock_core::recording::RING_BYTES_MAX;
use nodedock_model::{DriverName, ExtendedResource};

/// Bytes of a recording on disk unless the config says otherwise.
pub(super) const BYTES_MAX_DEFAULT: u64 = 16 << 20;

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RecordingSection {
    /// Names of drivers, and of the extended resources of device plugins.
    pub drivers: Vec<RecordedName>,
    /// Bytes of one driver's recording on disk; the oldest calls are dropped first.
    #[serde(deserialize_with = "values::within::<_, _, 65_536, { RING_BYTES_MAX }>")]
    pub max_bytes: Option<u64>,
}

/// The name of a driver or of an extended resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedName(String);

impl fmt::Display for RecordedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for RecordedName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let parsed = match name.contains('/') {
            true => ExtendedResource::new(&name).map(drop),
            false => DriverName::new(&name).map(drop),
        };
        parsed.map_err(D::Error::custom)?;
        Ok(Self(name))
    }
}
