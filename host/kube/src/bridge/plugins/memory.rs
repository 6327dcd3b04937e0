//! The devices that were offered last, in a file: what a kubelet is told after our restart until the drivers serve again.
//!
//! Owns one file beside the checkpoint. It is a memory and no truth: one that cannot be read is as good as none.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::claim::split;
use super::offer::{Offers, PoolOffer};
use nodedock_model::{DriverName, ExtendedResource, PluginDevice, limit};

const VERSION: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} is not what we wrote", path.display())]
    Content { path: PathBuf, source: serde_json::Error },
    #[error("{} has version {version}, and {VERSION} is known", path.display())]
    Version { path: PathBuf, version: u32 },
    #[error("{} would have more than the {} bytes that are kept", path.display(), limit::BRIDGE_MEMORY_BYTES_MAX)]
    TooLarge { path: PathBuf },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    version: u32,
    #[serde(default)]
    resources: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    resource: ExtendedResource,
    driver: DriverName,
    devices: Vec<KnownDevice>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct KnownDevice {
    id: String,
    healthy: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    numa_nodes: Vec<u32>,
}

/// What the file has. A file that is not there has nothing.
pub(super) fn read(path: &Path) -> Result<Offers, MemoryError> {
    let failed = |source| MemoryError::Read { path: path.to_owned(), source };
    let file =
        match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Offers::new()),
            opened => opened.map_err(failed)?,
        };
    let mut bytes = Vec::new();
    let most = limit::BRIDGE_MEMORY_BYTES_MAX as u64 + 1;
    file.take(most).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > limit::BRIDGE_MEMORY_BYTES_MAX {
        return Err(MemoryError::TooLarge { path: path.to_owned() });
    }
    parse(path, &bytes)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Offers, MemoryError> {
    let content = |source| MemoryError::Content { path: path.to_owned(), source };
    let memory: Memory = serde_json::from_slice(bytes).map_err(content)?;
    if memory.version != VERSION {
        return Err(MemoryError::Version { path: path.to_owned(), version: memory.version });
    }
    let resources = memory.resources.into_iter().take(limit::PLUGIN_RESOURCES_MAX);
    Ok(resources
        .map(|entry| (entry.resource, PoolOffer { driver: entry.driver, devices: known(entry.devices) }))
        .collect())
}

fn known(devices: Vec<KnownDevice>) -> Vec<PluginDevice> {
    let devices = devices.into_iter().take(limit::RESOURCE_DEVICES_MAX);
    let is_node = |node: &u32| *node <= limit::NUMA_NODE_ID_MAX;
    let mut devices: Vec<_> = devices
        .filter(|device| split(&device.id).is_some())
        .map(|KnownDevice { id, healthy, mut numa_nodes }| {
            numa_nodes.retain(is_node);
            numa_nodes.sort_unstable();
            numa_nodes.dedup();
            PluginDevice { id, healthy, numa_nodes }
        })
        .collect();
    devices.sort_by(|a, b| a.id.cmp(&b.id));
    devices.dedup_by(|a, b| a.id == b.id);
    devices
}

/// Replaces the file as a whole: after a crash it is the one before or this one.
pub(super) fn write(path: &Path, offers: &Offers) -> Result<(), MemoryError> {
    let entry = |(resource, offer): (&ExtendedResource, &PoolOffer)| Entry {
        resource: resource.clone(),
        driver: offer.driver.clone(),
        devices: offer.devices.iter().map(KnownDevice::from).collect(),
    };
    let memory = Memory { version: VERSION, resources: offers.iter().map(entry).collect() };
    let bytes = serde_json::to_vec(&memory)
        .map_err(|source| MemoryError::Content { path: path.to_owned(), source })?;
    if bytes.len() > limit::BRIDGE_MEMORY_BYTES_MAX {
        return Err(MemoryError::TooLarge { path: path.to_owned() });
    }
    replace(path, &bytes).map_err(|source| MemoryError::Write { path: path.to_owned(), source })
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("json.new");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

impl From<&PluginDevice> for KnownDevice {
    fn from(device: &PluginDevice) -> Self {
        Self { id: device.id.clone(), healthy: device.healthy, numa_nodes: device.numa_nodes.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers() -> Offers {
        let device = |id: &str, healthy, numa_nodes| PluginDevice { id: id.to_owned(), healthy, numa_nodes };
        let devices = vec![device("p/0", true, vec![0, 1]), device("p/1", false, vec![])];
        let offer = PoolOffer { driver: DriverName::new("gpu.example.com").unwrap(), devices };
        Offers::from([(ExtendedResource::new("example.com/gpu").unwrap(), offer)])
    }

    #[test]
    fn what_is_written_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bridge-devices.json");
        assert_eq!(read(&path).unwrap(), Offers::new());
        std::fs::write(path.with_extension("json.new"), "of a crash").unwrap();
        write(&path, &offers()).unwrap();
        assert_eq!(read(&path).unwrap(), offers());
        write(&path, &Offers::new()).unwrap();
        assert_eq!(read(&path).unwrap(), Offers::new());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_not_ours_is_named_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bridge-devices.json");
        for (bytes, words) in [
            (&b""[..], "is not what we wrote"),
            (b"{\"version\":1,\"resources\":[{\"resource\":\"gpu\"", "is not what we wrote"),
            (
                b"{\"version\":1,\"resources\":[{\"resource\":\"cpu\",\"driver\":\"a\",\"devices\":[]}]}",
                "is not what",
            ),
            (b"{\"version\":2}", "version 2"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("bridge-devices.json"), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(read(&path), Err(MemoryError::Read { .. })));
        assert!(matches!(write(&path, &offers()), Err(MemoryError::Write { .. })));
        let file = File::create(dir.path().join("large")).unwrap();
        file.set_len(limit::BRIDGE_MEMORY_BYTES_MAX as u64 + 1).unwrap();
        assert!(matches!(read(&dir.path().join("large")), Err(MemoryError::TooLarge { .. })));
    }

    #[test]
    fn devices_that_cannot_be_ours_are_left_out() {
        let bytes = br#"{"version":1,"resources":[{"resource":"example.com/gpu","driver":"gpu.example.com","devices":[
            {"id":"p/1","healthy":true,"numaNodes":[1,0,1,5000]},{"id":"p/0","healthy":true},{"id":"p/0","healthy":false},
            {"id":"../x","healthy":true},{"id":"","healthy":true}]}]}"#;
        let offers = parse(Path::new("f"), bytes).unwrap();
        let devices = &offers.values().next().unwrap().devices;
        let known: Vec<_> =
            devices.iter().map(|device| (device.id.as_str(), device.numa_nodes.as_slice())).collect();
        assert_eq!(known, [("p/0", &[][..]), ("p/1", &[0, 1][..])]);
    }
}
