//! Files beside the checkpoint that store state for a restart, as JSON. Two are a cache of what was offered: drivers with their sockets,
//! and devices of extended resources. One that cannot be read is as good as none.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::device_plugins::{Offers, ResourceOffer, split_id};
use super::dra::OfferedDrivers;
use crate::bridge::BRIDGE_DRIVERS_MAX;
use crate::extended_resources::LocalPool;
use nodedock_base::conditions::Conditions;
use nodedock_base::file;
use nodedock_base::listeners::is_start;
use nodedock_model::limit::{NUMA_NODE_ID_MAX, PLUGIN_RESOURCES_MAX, RESOURCE_DEVICES_MAX};
use nodedock_model::{ExtendedResource, PluginDevice, Problem, ProblemCode};

/// Bytes of the stored list of devices: a hundred thousand devices.
const BRIDGE_MEMORY_BYTES_MAX: usize = 16 << 20;

const VERSION: u32 = 1;

/// What a file stores.
pub(crate) trait Stored: Clone + Default + PartialEq + Send + 'static {
    const BYTES_MAX: usize;
    /// What follows if it cannot be written.
    const CONSEQUENCE: &'static str;

    fn decode(bytes: &[u8]) -> io::Result<Self>;

    fn encode(&self) -> io::Result<Vec<u8>>;
}

pub(crate) struct StateFile<T> {
    path: PathBuf,
    conditions: Conditions,
    /// What the file has, if that is known.
    content: Option<T>,
}

impl<T: Stored> StateFile<T> {
    pub(crate) fn new(path: PathBuf, conditions: Conditions) -> Self {
        Self {
            path,
            conditions,
            content: None,
        }
    }

    /// What was stored before the restart; nothing if it cannot be read.
    pub(crate) async fn load(&mut self) -> T {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        self.loaded(read.unwrap_or_else(|error| Err(error.into())))
    }

    /// As `load`, before tasks run.
    pub(crate) fn load_at_start(&mut self) -> T {
        let read = read(&self.path);
        self.loaded(read)
    }

    fn loaded(&mut self, read: io::Result<T>) -> T {
        match read {
            Ok(content) => self.content.insert(content).clone(),
            Err(error) => {
                tracing::warn!(file = %self.path.display(), %error, "stored state cannot be read, starts without it");
                T::default()
            }
        }
    }

    pub(crate) fn has(&self, content: &T) -> bool {
        self.content.as_ref() == Some(content)
    }

    /// Whether there is no file.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(std::fs::symlink_metadata(&self.path), Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// As `save`, before tasks run.
    pub(crate) fn save_at_start(&mut self, content: &T) -> bool {
        let written = write(&self.path, content);
        self.saved(content, written)
    }

    /// Replaces what is stored, if it differs. False: it failed, and a condition says so, with what follows from it.
    pub(crate) async fn save(&mut self, content: &T) -> bool {
        if self.has(content) {
            return true;
        }
        let (path, new) = (self.path.clone(), content.clone());
        let written = tokio::task::spawn_blocking(move || write(&path, &new)).await;
        self.saved(content, written.unwrap_or_else(|error| Err(error.into())))
    }

    fn saved(&mut self, content: &T, written: io::Result<()>) -> bool {
        let subject = self.path.display().to_string();
        let Err(error) = written else {
            self.content = Some(content.clone());
            self.conditions.clear(ProblemCode::BridgeMemory, &subject);
            return true;
        };
        let message = format!("{}: write {subject}: {error}", T::CONSEQUENCE);
        self.conditions.set(
            &subject,
            Problem::unavailable(ProblemCode::BridgeMemory, message),
        );
        false
    }
}

#[derive(Serialize, Deserialize)]
struct DriversFile {
    version: u32,
    #[serde(default)]
    drivers: OfferedDrivers,
}

impl Stored for OfferedDrivers {
    /// Names of at most 63 bytes, and a few process starts each.
    const BYTES_MAX: usize = BRIDGE_DRIVERS_MAX * 512;
    const CONSEQUENCE: &'static str = "after a restart drivers are offered when they serve";

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let file: DriversFile = serde_json::from_slice(bytes)?;
        check_version(file.version)?;
        let mut drivers = file.drivers;
        drivers
            .values_mut()
            .for_each(|before| before.starts.retain(|start| is_start(start)));
        Ok(drivers)
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let drivers = self
            .iter()
            .take(BRIDGE_DRIVERS_MAX)
            .map(|(name, before)| (name.clone(), before.clone()));
        Ok(serde_json::to_vec(&DriversFile {
            version: VERSION,
            drivers: drivers.collect(),
        })?)
    }
}

/// Returns the pools whose devices were offered to a kubelet before the start, with their resource. Those of which every device is
/// unhealthy were perhaps not.
pub(super) fn offered_pools(path: &Path) -> BTreeMap<LocalPool, ExtendedResource> {
    let offers: Offers = read(path).unwrap_or_default();
    let mut pools = BTreeMap::new();
    for offer in offers.values() {
        let Some(driver) = offer.source.driver() else {
            continue;
        };
        for (pool, _) in offer
            .devices
            .iter()
            .filter(|device| device.healthy)
            .filter_map(|device| split_id(&device.id))
        {
            pools.insert(
                LocalPool {
                    driver: driver.clone(),
                    pool,
                },
                offer.resource.clone(),
            );
        }
    }
    pools
}

#[derive(Serialize, Deserialize)]
struct DevicesFile {
    version: u32,
    #[serde(default)]
    resources: Vec<ResourceOffer>,
}

impl Stored for Offers {
    const BYTES_MAX: usize = BRIDGE_MEMORY_BYTES_MAX;
    const CONSEQUENCE: &'static str =
        "after a restart the kubelet has no devices until drivers serve";

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        let file: DevicesFile = serde_json::from_slice(bytes)?;
        check_version(file.version)?;
        let checked = |mut offer: ResourceOffer| {
            check(&mut offer.devices, offer.source.driver().is_some());
            (offer.resource.clone(), offer)
        };
        Ok(file
            .resources
            .into_iter()
            .take(PLUGIN_RESOURCES_MAX)
            .map(checked)
            .collect())
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let file = DevicesFile {
            version: VERSION,
            resources: self.values().cloned().collect(),
        };
        Ok(serde_json::to_vec(&file)?)
    }
}

/// Removes devices that cannot have been written here. Those in pools have the name of their pool.
fn check(devices: &mut Vec<PluginDevice>, are_pooled: bool) {
    devices.truncate(RESOURCE_DEVICES_MAX);
    devices.retain(|device| {
        if are_pooled {
            split_id(&device.id).is_some()
        } else {
            !device.id.is_empty()
        }
    });
    for PluginDevice { numa_nodes, .. } in devices.iter_mut() {
        numa_nodes.retain(|node| *node <= NUMA_NODE_ID_MAX);
        numa_nodes.sort_unstable();
        numa_nodes.dedup();
    }
    devices.sort_by(|a, b| a.id.cmp(&b.id));
    devices.dedup_by(|a, b| a.id == b.id);
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

pub(crate) fn check_version(version: u32) -> io::Result<()> {
    if version != VERSION {
        return Err(invalid(format!(
            "it has version {version}, and {VERSION} is known"
        )));
    }
    Ok(())
}

fn check_size<T: Stored>(bytes: &[u8]) -> io::Result<()> {
    if bytes.len() > T::BYTES_MAX {
        return Err(invalid(format!(
            "more than the {} bytes that are stored",
            T::BYTES_MAX
        )));
    }
    Ok(())
}

fn read<T: Stored>(path: &Path) -> io::Result<T> {
    let mut options = OpenOptions::new();
    let file = match options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
    {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(T::default()),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take(T::BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    check_size::<T>(&bytes)?;
    T::decode(&bytes)
}

/// Replaces the file as a whole: after a crash it has the content before or this one.
fn write<T: Stored>(path: &Path, content: &T) -> io::Result<()> {
    let bytes = content.encode()?;
    check_size::<T>(&bytes)?;
    file::replace(path, &bytes)
}

#[cfg(test)]
mod tests {
    use nodedock_model::DriverName;

    use super::*;
    use crate::bridge::device_plugins::OfferSource;
    use crate::bridge::dra::OfferedBefore;
    use nodedock_core::driver::DeviceOptions;

    const START: &str = "6f1c2d7e";

    fn path() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("offered");
        (directory, path)
    }

    fn drivers(count: usize) -> OfferedDrivers {
        let before = OfferedBefore {
            starts: [START.to_owned()].into(),
            registered: true,
        };
        (0..count)
            .map(|n| {
                (
                    DriverName::new(format!("{n:0>63}")).unwrap(),
                    before.clone(),
                )
            })
            .collect()
    }

    fn offers() -> Offers {
        let device = |id: &str, healthy, numa_nodes| PluginDevice {
            id: id.to_owned(),
            healthy,
            numa_nodes,
        };
        let devices = vec![
            device("p/0", true, vec![0, 1]),
            device("p/1", false, vec![]),
        ];
        let resource = ExtendedResource::new("example.com/gpu").unwrap();
        let source = OfferSource::Driver(DriverName::new("gpu.example.com").unwrap());
        let plugin = ResourceOffer {
            resource: ExtendedResource::new("example.com/nic").unwrap(),
            source: OfferSource::Plugin(DeviceOptions {
                pre_start_required: true,
                ..DeviceOptions::default()
            }),
            devices: vec![device("any id", true, vec![])],
        };
        let pooled = ResourceOffer {
            resource,
            source,
            devices,
        };
        [pooled, plugin]
            .into_iter()
            .map(|offer| (offer.resource.clone(), offer))
            .collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let (directory, path) = path();
        assert_eq!(read::<Offers>(&path).unwrap(), Offers::new());
        std::fs::write(path.with_added_extension("new"), "of a crash").unwrap();
        for expected in [drivers(2), drivers(0), drivers(BRIDGE_DRIVERS_MAX)] {
            write(&path, &expected).unwrap();
            assert_eq!(read::<OfferedDrivers>(&path).unwrap(), expected);
        }
        write(&path, &drivers(BRIDGE_DRIVERS_MAX + 5)).unwrap();
        assert_eq!(
            read::<OfferedDrivers>(&path).unwrap(),
            drivers(BRIDGE_DRIVERS_MAX)
        );
        for expected in [offers(), Offers::new()] {
            write(&path, &expected).unwrap();
            assert_eq!(read::<Offers>(&path).unwrap(), expected);
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_read_or_written_is_as_good_as_none() {
        let (directory, path) = path();
        for content in [
            "gpu.example.com\n",
            r#"{"version":1,"drivers":{"NOT A NAME":{"starts":[],"registered":true}}}"#,
        ] {
            std::fs::write(&path, content).unwrap();
            assert!(read::<OfferedDrivers>(&path).is_err(), "{content:?}");
        }
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read::<OfferedDrivers>(&path).is_err());
        let foreign = r#"{"version":1,"resources":[{"resource":"cpu","driver":"a","devices":[]}]}"#;
        for content in [
            "",
            r#"{"version":1,"resources":[{"resource":"gpu""#,
            foreign,
            r#"{"version":2}"#,
        ] {
            std::fs::write(&path, content).unwrap();
            assert!(read::<Offers>(&path).is_err(), "{content:?}");
        }
        std::fs::File::create(&path)
            .unwrap()
            .set_len(BRIDGE_MEMORY_BYTES_MAX as u64 + 1)
            .unwrap();
        assert!(
            read::<Offers>(&path)
                .unwrap_err()
                .to_string()
                .contains("16777216 bytes")
        );

        let (conditions, path) = (Conditions::default(), directory.path().join("directory"));
        std::fs::create_dir(&path).unwrap();
        let mut file = StateFile::<Offers>::new(path.clone(), conditions.clone());
        assert_eq!(file.load().await, Offers::new());
        assert!(!file.save(&offers()).await && !file.has(&offers()));
        let [condition] = &conditions.list()[..] else {
            panic!("one condition")
        };
        let (subject, message) = (path.display().to_string(), &condition.problem.message);
        assert_eq!(
            (&condition.problem.code[..], &condition.subject),
            (ProblemCode::BridgeMemory.as_str(), &subject)
        );
        assert!(
            message.starts_with("after a restart the kubelet has no devices")
                && message.contains(&subject)
        );
    }

    #[test]
    fn starts_that_cannot_have_been_written_are_left_out() {
        let content = br#"{"version":1,"drivers":{"a":{"starts":["../../etc","","0123456789","6f1c2d7e"],"registered":false}}}"#;
        let drivers = OfferedDrivers::decode(content).unwrap();
        assert_eq!(
            drivers.values().next().unwrap().starts,
            [START.to_owned()].into()
        );
    }

    #[test]
    fn devices_that_cannot_have_been_written_are_left_out() {
        let content = br#"{"version":1,"resources":[{"resource":"example.com/gpu","driver":"gpu.example.com","devices":[
            {"id":"p/1","healthy":true,"numaNodes":[1,0,1,5000]},{"id":"p/0","healthy":true},{"id":"p/0","healthy":false},
            {"id":"../x","healthy":true},{"id":"","healthy":true}]}]}"#;
        let offers = Offers::decode(content).unwrap();
        let devices = &offers.values().next().unwrap().devices;
        let known: Vec<_> = devices
            .iter()
            .map(|device| (device.id.as_str(), device.numa_nodes.as_slice()))
            .collect();
        assert_eq!(known, [("p/0", &[][..]), ("p/1", &[0, 1][..])]);
    }
}
