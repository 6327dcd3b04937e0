//! Sources of drivers, and the names that are bound to them.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use super::{Caller, ExtendedResource, Uid};
use sha2::{Digest, Sha256};

/// Kind of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, IntoStaticStr)]
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
    /// Of an extended resource: the pools of a driver, by the driver's name.
    Pools,
}

/// Where a driver comes from, as far as that is the same after a restart and an update.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NameSource {
    pub kind: SourceKind,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl NameSource {
    pub fn file(stem: &str) -> Self {
        Self { kind: SourceKind::File, name: stem.to_owned() }
    }

    pub fn image(name: &str) -> Self {
        Self { kind: SourceKind::Image, name: name.to_owned() }
    }

    pub fn plugin(uid: u32) -> Self {
        Self { kind: SourceKind::Plugin, name: uid.to_string() }
    }

    pub fn adapter(resource: &ExtendedResource) -> Self {
        Self { kind: SourceKind::Adapter, name: resource.to_string() }
    }

    /// Whether it is a WebAssembly driver.
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
            SourceKind::Pools => write!(f, "the pools of the driver {name}"),
        }
    }
}

/// A name, and the source that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameRecord {
    /// Key of the record: a driver's name, or a hash of an extended resource.
    pub uid: Uid,
    /// Name of a driver, or of an extended resource.
    pub name: String,
    pub source: NameSource,
    /// Since when; milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// The operator who assigned it. `None`: the source was the first that served under the name, or its grant has the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Caller>,
}

impl NameRecord {
    /// Returns the record of a name: of a driver, or of an extended resource.
    pub fn new(name: &str, source: NameSource, since_ms: u64, by: Option<Caller>) -> Self {
        Self { uid: Self::key(name), name: name.to_owned(), source, since_ms, by }
    }

    /// Returns the key of a name. A driver's name is a UID as it is, and contains no `_`.
    pub fn key(name: &str) -> Uid {
        Uid::new(name).unwrap_or_else(|_| {
            let hash = Sha256::digest(name.as_bytes());
            let hex: String = hash.iter().take(20).map(|byte| format!("{byte:02x}")).collect();
            Uid::new(format!("resource_{hex}")).expect("letters, digits and a line make a UID")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_drivers_and_resources_differ() {
        assert_eq!(NameRecord::key("gpu.example.com").as_str(), "gpu.example.com");
        let resource = NameRecord::key("example.com/gpu");
        assert!(resource.as_str().starts_with("resource_"), "{resource}");
        assert_ne!(resource, NameRecord::key("example.com/gpv"));
        let longest = format!("{}/{}", "a".repeat(63), "b".repeat(63));
        assert!(NameRecord::key(&longest).as_str().len() <= 128);
    }

    #[test]
    fn a_record_reads_as_it_was_written() {
        let by = Caller { uid: Some(0), user: Some("root".to_owned()), pid: Some(7) };
        let record = NameRecord::new("gpu.example.com", NameSource::file("gpu"), 5, Some(by));
        let text = serde_json::to_string(&record).unwrap();
        assert!(text.contains(r#""source":{"kind":"file","name":"gpu"}"#), "{text}");
        assert_eq!(serde_json::from_str::<NameRecord>(&text).unwrap(), record);
        assert!(serde_json::from_str::<NameRecord>(&text.replace("file", "socket")).is_err());
    }
}
