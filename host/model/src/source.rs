//! Sources of drivers, and the names that are bound to them.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use super::{Caller, DriverName, ExtendedResource, Uid};
use sha2::{Digest, Sha256};

/// Kind of a source.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum SourceKind {
    /// A driver file of the drivers directory, by its name without `.wasm`.
    File,
    /// A driver image, by its name in the config.
    Image,
    /// Native plugins, by the user ID of the process that owns their socket: the instances of one plugin have one user. Of an extended
    /// resource: a device plugin, without a name.
    Plugin,
    /// The adapter of a device plugin, by its extended resource.
    Adapter,
    /// The host's own driver of devices in CDI specs, by the driver's name.
    Cdi,
    /// The pools of a driver, by the driver's name, as the source of an extended resource.
    Pools,
}

/// The source of a driver, limited to the parts that are the same after a restart and an update.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NameSource {
    pub kind: SourceKind,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl NameSource {
    pub fn file(stem: &str) -> Self {
        Self {
            kind: SourceKind::File,
            name: stem.to_owned(),
        }
    }

    pub fn image(name: &str) -> Self {
        Self {
            kind: SourceKind::Image,
            name: name.to_owned(),
        }
    }

    pub fn plugin(uid: u32) -> Self {
        Self {
            kind: SourceKind::Plugin,
            name: uid.to_string(),
        }
    }

    pub fn adapter(resource: &ExtendedResource) -> Self {
        Self {
            kind: SourceKind::Adapter,
            name: resource.to_string(),
        }
    }

    pub fn cdi(driver: &DriverName) -> Self {
        Self {
            kind: SourceKind::Cdi,
            name: driver.to_string(),
        }
    }

    /// Returns whether it is a WebAssembly driver.
    pub fn is_wasm(&self) -> bool {
        matches!(self.kind, SourceKind::File | SourceKind::Image)
    }
}

impl fmt::Display for NameSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match self.kind {
            SourceKind::File => write!(f, "the driver file {name}.wasm"),
            SourceKind::Image => write!(f, "the driver image {name}"),
            SourceKind::Plugin if name.is_empty() => f.write_str("a device plugin"),
            SourceKind::Plugin => write!(f, "native plugins of the user {name}"),
            SourceKind::Adapter => write!(f, "the adapter of {name}"),
            SourceKind::Cdi => write!(f, "the CDI driver {name}"),
            SourceKind::Pools => write!(f, "the pools of the driver {name}"),
        }
    }
}

/// The driver or the extended resource that a name belongs to: drivers' names have no `/`, and those of extended resources have one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Named {
    Driver(DriverName),
    Resource(ExtendedResource),
}

impl Named {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Driver(driver) => driver.as_str(),
            Self::Resource(resource) => resource.as_str(),
        }
    }
}

/// A name, and the source that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameRecord {
    /// Key of the record: a driver's name, or a hash of an extended resource.
    pub uid: Uid,
    pub name: Named,
    pub source: NameSource,
    /// Time since which the source has had the name, in milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// The operator who assigned it. `None`: the source was the first that served under the name, or its grant has the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Caller>,
}

impl NameRecord {
    /// Returns the record of a name.
    pub fn new(name: Named, source: NameSource, since_ms: u64, by: Option<Caller>) -> Self {
        Self {
            uid: Self::key(&name),
            name,
            source,
            since_ms,
            by,
        }
    }

    /// Returns the key of a name. A driver's name is a UID as it is, and contains no `_`.
    pub fn key(name: &Named) -> Uid {
        let text = match name {
            Named::Driver(driver) => driver.to_string(),
            Named::Resource(resource) => {
                let hash = Sha256::digest(resource.as_str().as_bytes());
                let hex: String = hash
                    .iter()
                    .take(20)
                    .map(|byte| format!("{byte:02x}"))
                    .collect();
                format!("resource_{hex}")
            }
        };
        Uid::new(text).expect("a driver's name, and letters, digits and a line, make a UID")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(name: &str) -> Named {
        Named::Driver(DriverName::new(name).unwrap())
    }

    #[test]
    fn keys_of_drivers_and_resources_differ() {
        let resource =
            |name: &str| NameRecord::key(&Named::Resource(ExtendedResource::new(name).unwrap()));
        assert_eq!(
            NameRecord::key(&driver("gpu.example.com")).as_str(),
            "gpu.example.com"
        );
        let gpu = resource("example.com/gpu");
        assert!(gpu.as_str().starts_with("resource_"), "{gpu}");
        assert_ne!(gpu, resource("example.com/gpv"));
        let longest = format!("{}.example.com/{}", "a".repeat(63), "b".repeat(63));
        assert!(resource(&longest).as_str().len() <= 128);
    }

    #[test]
    fn name_record_round_trips() {
        let by = Caller {
            uid: Some(0),
            user: Some("root".to_owned()),
            pid: Some(7),
        };
        let record = NameRecord::new(
            driver("gpu.example.com"),
            NameSource::file("gpu"),
            5,
            Some(by),
        );
        let text = serde_json::to_string(&record).unwrap();
        assert!(
            text.contains(r#""source":{"kind":"file","name":"gpu"}"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<NameRecord>(&text).unwrap(), record);
        assert!(serde_json::from_str::<NameRecord>(&text.replace("file", "socket")).is_err());
        let no_name = text.replacen(r#""name":"gpu.example.com""#, r#""name":"gpu_""#, 1);
        assert!(
            serde_json::from_str::<NameRecord>(&no_name).is_err(),
            "what is no name is no record"
        );
    }
}
