//! Two files beside the checkpoint that keep what was offered over a restart: names of drivers, a line each, and devices of extended
//! resources as JSON. They are a cache: one that cannot be read is as good as none.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::device_plugins::{Offers, PoolOffer, split_id};
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_model::limit::{
    BRIDGE_DRIVERS_MAX, BRIDGE_MEMORY_BYTES_MAX, NUMA_NODE_ID_MAX, PLUGIN_RESOURCES_MAX, RESOURCE_DEVICES_MAX,
};
use nodedock_model::{DriverName, ExtendedResource, PluginDevice, Problem};

/// What is offered cannot be kept, by the file.
const NOT_KEPT: &str = "bridge-memory";
/// Bytes of the file of drivers: names of at most 63 bytes, and the ends of lines.
const DRIVERS_BYTES_MAX: usize = BRIDGE_DRIVERS_MAX * 64;
const VERSION: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub(super) enum StateFileError {
    #[error("read {path:?}")]
    Read { path: PathBuf, source: io::Error },
    #[error("write {path:?}")]
    Write { path: PathBuf, source: io::Error },
    #[error("{path:?} has more than the {max} bytes that are kept")]
    TooLarge { path: PathBuf, max: usize },
    #[error("{path:?} is not a list of drivers' names (line {line})")]
    Names { path: PathBuf, line: usize },
    #[error("{path:?} is not a list of devices")]
    Devices { path: PathBuf, source: serde_json::Error },
    #[error("{path:?} has version {version}, and {VERSION} is known")]
    Version { path: PathBuf, version: u32 },
}

#[derive(Serialize, Deserialize)]
struct DevicesFile {
    version: u32,
    #[serde(default)]
    resources: Vec<ResourceEntry>,
}

#[derive(Serialize, Deserialize)]
struct ResourceEntry {
    resource: ExtendedResource,
    #[serde(flatten)]
    offer: PoolOffer,
}

/// Runs a write on a thread that may block. False: it failed, and a condition says so, with what follows from it.
pub(super) async fn save(
    conditions: &Conditions,
    path: &Path,
    consequence: &str,
    write: impl FnOnce() -> Result<(), StateFileError> + Send + 'static,
) -> bool {
    let subject = path.display().to_string();
    let error = match tokio::task::spawn_blocking(write).await {
        Ok(Ok(())) => {
            conditions.clear(NOT_KEPT, &subject);
            return true;
        }
        Ok(Err(error)) => chain(&error),
        Err(error) => error.to_string(),
    };
    conditions.set(&subject, Problem::unavailable(NOT_KEPT, format!("{consequence}: {error}")));
    false
}

pub(super) fn load_drivers(path: &Path) -> Result<Vec<DriverName>, StateFileError> {
    let bytes = read(path, DRIVERS_BYTES_MAX)?.unwrap_or_default();
    let names = |line| StateFileError::Names { path: path.to_owned(), line };
    let text = String::from_utf8(bytes).map_err(|_| names(1))?;
    let name = |(index, line)| DriverName::new(line).map_err(|_| names(index + 1));
    text.lines().enumerate().map(name).collect()
}

pub(super) fn save_drivers<'a>(
    path: &Path,
    names: impl IntoIterator<Item = &'a DriverName>,
) -> Result<(), StateFileError> {
    let text: String = names.into_iter().take(BRIDGE_DRIVERS_MAX).map(|name| format!("{name}\n")).collect();
    write(path, text.as_bytes())
}

pub(super) fn load_devices(path: &Path) -> Result<Offers, StateFileError> {
    let Some(bytes) = read(path, BRIDGE_MEMORY_BYTES_MAX)? else { return Ok(Offers::new()) };
    let devices = |source| StateFileError::Devices { path: path.to_owned(), source };
    let file: DevicesFile = serde_json::from_slice(&bytes).map_err(devices)?;
    if file.version != VERSION {
        return Err(StateFileError::Version { path: path.to_owned(), version: file.version });
    }
    let checked = |mut entry: ResourceEntry| {
        check(&mut entry.offer.devices);
        (entry.resource, entry.offer)
    };
    Ok(file.resources.into_iter().take(PLUGIN_RESOURCES_MAX).map(checked).collect())
}

/// Removes devices that cannot have been written here.
fn check(devices: &mut Vec<PluginDevice>) {
    devices.truncate(RESOURCE_DEVICES_MAX);
    devices.retain(|device| split_id(&device.id).is_some());
    for PluginDevice { numa_nodes, .. } in devices.iter_mut() {
        numa_nodes.retain(|node| *node <= NUMA_NODE_ID_MAX);
        numa_nodes.sort_unstable();
        numa_nodes.dedup();
    }
    devices.sort_by(|a, b| a.id.cmp(&b.id));
    devices.dedup_by(|a, b| a.id == b.id);
}

pub(super) fn save_devices(path: &Path, offers: &Offers) -> Result<(), StateFileError> {
    let entry = |(resource, offer): (&ExtendedResource, &PoolOffer)| ResourceEntry {
        resource: resource.clone(),
        offer: offer.clone(),
    };
    let file = DevicesFile { version: VERSION, resources: offers.iter().map(entry).collect() };
    let bytes = serde_json::to_vec(&file)
        .map_err(|source| StateFileError::Devices { path: path.to_owned(), source })?;
    if bytes.len() > BRIDGE_MEMORY_BYTES_MAX {
        return Err(StateFileError::TooLarge { path: path.to_owned(), max: BRIDGE_MEMORY_BYTES_MAX });
    }
    write(path, &bytes)
}

/// None: there is no file.
fn read(path: &Path, max: usize) -> Result<Option<Vec<u8>>, StateFileError> {
    let failed = |source| StateFileError::Read { path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    let file = match options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > max {
        return Err(StateFileError::TooLarge { path: path.to_owned(), max });
    }
    Ok(Some(bytes))
}

/// Replaces the file as a whole: after a crash it has the content before or this one.
fn write(path: &Path, bytes: &[u8]) -> Result<(), StateFileError> {
    replace(path, bytes).map_err(|source| StateFileError::Write { path: path.to_owned(), source })
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = path.to_owned().into_os_string();
    temporary.push(".new");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("offered");
        (directory, path)
    }

    fn names(words: &[&str]) -> Vec<DriverName> {
        words.iter().map(|name| DriverName::new(name).unwrap()).collect()
    }

    fn offers() -> Offers {
        let device = |id: &str, healthy, numa_nodes| PluginDevice { id: id.to_owned(), healthy, numa_nodes };
        let devices = vec![device("p/0", true, vec![0, 1]), device("p/1", false, vec![])];
        let offer = PoolOffer { driver: DriverName::new("gpu.example.com").unwrap(), devices };
        Offers::from([(ExtendedResource::new("example.com/gpu").unwrap(), offer)])
    }

    #[test]
    fn what_is_written_is_read_again() {
        let (directory, path) = path();
        assert_eq!(load_drivers(&path).unwrap(), []);
        assert_eq!(load_devices(&path).unwrap(), Offers::new());
        std::fs::write(path.with_extension("new"), "of a crash").unwrap();
        for expected in [names(&["a.example.com", "b"]), names(&["b"]), names(&[])] {
            save_drivers(&path, &expected).unwrap();
            assert_eq!(load_drivers(&path).unwrap(), expected);
        }
        let many: Vec<_> =
            (0..BRIDGE_DRIVERS_MAX + 5).map(|n| DriverName::new(format!("{n:0>63}")).unwrap()).collect();
        save_drivers(&path, &many).unwrap();
        assert_eq!(load_drivers(&path).unwrap(), many[..BRIDGE_DRIVERS_MAX]);
        for expected in [offers(), Offers::new()] {
            save_devices(&path, &expected).unwrap();
            assert_eq!(load_devices(&path).unwrap(), expected);
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_something_else_is_named_and_so_is_one_that_cannot_be_written() {
        let (directory, path) = path();
        for (content, line) in [("a\nNOT A NAME\n", 2), ("\u{0}", 1), ("a\n\nb", 2)] {
            std::fs::write(&path, content).unwrap();
            let error = load_drivers(&path).unwrap_err();
            assert!(
                matches!(error, StateFileError::Names { line: found, .. } if found == line),
                "{content:?}"
            );
        }
        std::fs::write(&path, b"\xff").unwrap();
        assert!(matches!(load_drivers(&path), Err(StateFileError::Names { .. })));
        for (content, words) in [
            (&b""[..], "is not a list of devices"),
            (b"{\"version\":1,\"resources\":[{\"resource\":\"gpu\"", "is not a list"),
            (
                b"{\"version\":1,\"resources\":[{\"resource\":\"cpu\",\"driver\":\"a\",\"devices\":[]}]}",
                "is not a list",
            ),
            (b"{\"version\":2}", "version 2"),
        ] {
            std::fs::write(&path, content).unwrap();
            let error = load_devices(&path).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("offered"), "{error}");
        }
        File::create(&path).unwrap().set_len(BRIDGE_MEMORY_BYTES_MAX as u64 + 1).unwrap();
        assert!(matches!(load_drivers(&path), Err(StateFileError::TooLarge { .. })));
        assert!(matches!(load_devices(&path), Err(StateFileError::TooLarge { .. })));
        assert!(matches!(load_drivers(directory.path()), Err(StateFileError::Read { .. })));
        let nowhere = directory.path().join("no/offered");
        assert!(matches!(save_drivers(&nowhere, &[]), Err(StateFileError::Write { .. })));
        assert!(matches!(save_devices(directory.path(), &offers()), Err(StateFileError::Write { .. })));
    }

    #[test]
    fn devices_that_cannot_have_been_written_are_left_out() {
        let (_directory, path) = path();
        let content = br#"{"version":1,"resources":[{"resource":"example.com/gpu","driver":"gpu.example.com","devices":[
            {"id":"p/1","healthy":true,"numaNodes":[1,0,1,5000]},{"id":"p/0","healthy":true},{"id":"p/0","healthy":false},
            {"id":"../x","healthy":true},{"id":"","healthy":true}]}]}"#;
        std::fs::write(&path, content).unwrap();
        let offers = load_devices(&path).unwrap();
        let devices = &offers.values().next().unwrap().devices;
        let known: Vec<_> =
            devices.iter().map(|device| (device.id.as_str(), device.numa_nodes.as_slice())).collect();
        assert_eq!(known, [("p/0", &[][..]), ("p/1", &[0, 1][..])]);
    }
}
