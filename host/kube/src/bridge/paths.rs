//! Where sockets are in the kubelet's directories. Pure.
//!
//! A driver's sockets have the names of the Go helper for DRA drivers, with the instance's UID in them where there is one; a resource's
//! socket begins with `nodedock-`. A name that is longer than a socket's path may be is shortened step by step; the last name of a
//! driver has the same length for every driver.

use std::path::{Component, Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use nodedock_base::device_plugin_sockets::{SocketId, Sockets};
use nodedock_model::limit::SOCKET_PATH_BYTES_MAX;
use nodedock_model::{DriverName, ExtendedResource, Uid};

const REGISTRY: &str = "plugins_registry";
const PLUGINS: &str = "plugins";
const DEVICE_PLUGINS: &str = "device-plugins";
const POD_RESOURCES: &str = "pod-resources/kubelet.sock";
/// Bytes below the root of the shortest names that any driver can have: `/plugins_registry/a-reg.sock`.
const SHORTEST_BYTES: usize = 1 + REGISTRY.len() + 1 + "a-reg.sock".len();

const PREFIX: &str = "nodedock-";
const SUFFIX: &str = ".sock";
/// Bytes that a resource's socket leaves free behind its name, so that names stay what they are over updates of this daemon.
const SPARE_BYTES: usize = 4;
/// Digits of a resource's hash: with 256 resources two are alike once in a billion nodes.
const HASH_DIGITS: usize = 12;
const INSTANCE_DIGITS: usize = 8;

/// The directories of a kubelet.
#[derive(Debug)]
pub(super) struct KubeletDirectories {
    pub(super) root: PathBuf,
    /// The kubelet looks here for registration sockets.
    pub(super) registry: PathBuf,
    pub(super) plugins: PathBuf,
    /// The kubelet takes registrations of device plugins here.
    pub(super) device_plugins: PathBuf,
    /// The kubelet's own socket that lists the devices of pods.
    pub(super) pod_resources: PathBuf,
    instance: Option<Uid>,
}

/// The sockets of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPaths {
    /// Where the kubelet learns of the driver.
    pub registration: PathBuf,
    /// Where the driver is called.
    pub service: PathBuf,
}

/// Why a kubelet's root directory cannot be used, or not for a driver.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error(
        "the kubelet's directory {0:?} is not an absolute path without '..': give --kubelet-root as the kubelet has it"
    )]
    NotPlain(PathBuf),
    #[error(
        "the kubelet's directory {root:?} has {length} bytes, and with more than {max} no socket fits into the \
         {SOCKET_PATH_BYTES_MAX} that the system allows: choose a shorter --kubelet-root (and the kubelet's --root-dir)"
    )]
    RootTooLong { root: PathBuf, length: usize, max: usize },
    #[error(
        "{0:?} is the directory in which plugins register with this daemon, and below the kubelet's root as well: every driver \
         would be offered to this daemon itself; choose another --root or --kubelet-root"
    )]
    OwnDirectory(PathBuf),
    /// The path is the shortest there is.
    #[error(
        "the socket path {path:?} has {length} bytes, and the system allows {SOCKET_PATH_BYTES_MAX}: for driver {driver} the \
         kubelet's directory (--kubelet-root) may have {root_max} bytes"
    )]
    DriverTooLong { driver: DriverName, path: PathBuf, length: usize, root_max: usize },
}

impl KubeletDirectories {
    pub(super) fn new(root: PathBuf, instance: Option<Uid>) -> Result<Self, PathError> {
        let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
        if !root.is_absolute() || !root.components().all(is_plain) {
            return Err(PathError::NotPlain(root));
        }
        // Without doubled and trailing slashes, which count as bytes.
        let root: PathBuf = root.components().collect();
        let shortest =
            SHORTEST_BYTES.max(1 + DEVICE_PLUGINS.len() + 1 + shortest_resource_bytes(instance.as_ref()));
        let (length, max) = (bytes(&root), SOCKET_PATH_BYTES_MAX - shortest);
        if length > max {
            return Err(PathError::RootTooLong { root, length, max });
        }
        let [registry, plugins, device_plugins, pod_resources] =
            [REGISTRY, PLUGINS, DEVICE_PLUGINS, POD_RESOURCES].map(|path| root.join(path));
        Ok(Self { root, registry, plugins, device_plugins, pod_resources, instance })
    }

    pub(super) fn of_driver(&self, driver: &DriverName) -> Result<SocketPaths, PathError> {
        let uid = self.instance.as_ref().map_or("", Uid::as_str);
        let ends = match uid {
            "" => vec![String::new()],
            uid => vec![format!("-{uid}"), format!("-{}", URL_SAFE_NO_PAD.encode(&Sha256::digest(uid)[..8]))],
        };
        let hash = Sha256::new().chain_update(driver.as_str()).chain_update([0]).chain_update(uid).finalize();
        let short = format!("dra-{}", URL_SAFE_NO_PAD.encode(&hash[..16]));
        let registrations = ends.iter().map(|end| format!("{driver}{end}-reg.sock"));
        let services = ends.iter().map(|end| format!("{driver}/dra{end}.sock"));
        let registrations = registrations.chain([format!("{short}-reg.sock")]);
        let services = services.chain([format!("{short}/dra.sock")]);
        Ok(SocketPaths {
            registration: self.first_that_fits(driver, registrations.map(|name| self.registry.join(name)))?,
            service: self.first_that_fits(driver, services.map(|name| self.plugins.join(name)))?,
        })
    }

    fn first_that_fits(
        &self,
        driver: &DriverName,
        paths: impl Iterator<Item = PathBuf> + Clone,
    ) -> Result<PathBuf, PathError> {
        if let Some(path) = paths.clone().find(|path| bytes(path) <= SOCKET_PATH_BYTES_MAX) {
            return Ok(path);
        }
        let path = paths.min_by_key(|path| bytes(path)).unwrap_or_default();
        let length = bytes(&path);
        let root_max = SOCKET_PATH_BYTES_MAX.saturating_sub(length.saturating_sub(bytes(&self.root)));
        Err(PathError::DriverTooLong { driver: driver.clone(), path, length, root_max })
    }

    /// The name of a resource's socket, such as `nodedock-gpu-0123456789ab.sock`: as much of the resource's name as fits, then its
    /// hash, then the instance, or the instance's hash where the directory's path leaves no room.
    pub(super) fn of_resource(&self, resource: &ExtendedResource) -> String {
        let taken = bytes(&self.device_plugins) + 1 + SPARE_BYTES;
        let room = SOCKET_PATH_BYTES_MAX.saturating_sub(taken);
        let hash = digits(resource.as_str(), HASH_DIGITS);
        let plain = |instance: &str| format!("{PREFIX}{hash}{instance}{SUFFIX}");
        let uid = self.instance.as_ref().map_or("", Uid::as_str);
        let whole = if uid.is_empty() { String::new() } else { format!("-{uid}") };
        let fits = plain(&whole).len() <= room;
        let instance = if fits { whole } else { format!("-{}", digits(uid, INSTANCE_DIGITS)) };
        let left = room.saturating_sub(plain(&instance).len());
        match label(resource, left.saturating_sub(1)) {
            label if label.is_empty() => plain(&instance),
            label => format!("{PREFIX}{label}-{hash}{instance}{SUFFIX}"),
        }
    }
}

/// Bytes of the shortest name that a resource's socket can have.
fn shortest_resource_bytes(instance: Option<&Uid>) -> usize {
    let instance = if instance.is_some() { 1 + INSTANCE_DIGITS } else { 0 };
    PREFIX.len() + HASH_DIGITS + instance + SUFFIX.len() + SPARE_BYTES
}

/// The part of a resource's name after its domain, in characters that need no care in a shell.
fn label(resource: &ExtendedResource, bytes_max: usize) -> String {
    let name = resource.as_str().rsplit('/').next().unwrap_or_default();
    let cut: String = name.chars().take(bytes_max.min(32)).collect();
    cut.trim_end_matches(['-', '_', '.']).to_owned()
}

/// Sockets of other instances for the same resource that were made later than `own`.
pub(super) fn newer_sockets(
    sockets: &Sockets,
    resource: &ExtendedResource,
    own: (&str, SocketId),
) -> Vec<String> {
    let hash = digits(resource.as_str(), HASH_DIGITS);
    let is_of_resource = |name: &str| {
        let inner = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
        inner.is_some_and(|inner| inner.split('-').any(|part| part == hash))
    };
    let is_newer = |(name, id): &(&String, &SocketId)| {
        *name != own.0 && is_of_resource(name) && (id.made, name.as_str()) > (own.1.made, own.0)
    };
    sockets.iter().filter(is_newer).map(|(name, _)| name.clone()).collect()
}

fn digits(text: &str, count: usize) -> String {
    hex::encode(Sha256::digest(text))[..count].to_owned()
}

fn bytes(path: &Path) -> usize {
    path.as_os_str().len()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::{Duration, SystemTime};

    use super::*;

    const UID: &str = "6f1c2d7e-0f7b-4d1f-9d3b-2a6f0e9c1b11";
    const DEFAULT: &str = "/var/lib/kubelet";

    fn directories(root: &str, instance: Option<&str>) -> KubeletDirectories {
        KubeletDirectories::new(root.into(), instance.map(|uid| Uid::new(uid).unwrap())).unwrap()
    }

    fn of(root: &str, instance: Option<&str>, driver: &str) -> Result<[String; 2], PathError> {
        let paths = directories(root, instance).of_driver(&DriverName::new(driver).unwrap())?;
        let below = |path: PathBuf| path.strip_prefix(root).unwrap().display().to_string();
        Ok([below(paths.registration), below(paths.service)])
    }

    #[test]
    fn names_are_those_of_the_go_helper_and_are_shortened_where_they_must() {
        let (short, long) = ("gpu.example.com", "a".repeat(63));
        // With the UID its names are too long, with the UID's hash they are not.
        let middle = "b".repeat(45);
        let (h8, h16) = ("FqsfgVM4bvQ", "rAMdRKW0iNz7rm_L9CpxFw");
        for (instance, driver, registration, service) in [
            (None, short, format!("{short}-reg.sock"), format!("{short}/dra.sock")),
            (Some(UID), short, format!("{short}-{UID}-reg.sock"), format!("{short}/dra-{UID}.sock")),
            (None, &long, format!("{long}-reg.sock"), format!("{long}/dra.sock")),
            (Some(UID), &middle, format!("{middle}-{h8}-reg.sock"), format!("{middle}/dra-{h8}.sock")),
            (Some(UID), &long, format!("dra-{h16}-reg.sock"), format!("dra-{h16}/dra.sock")),
        ] {
            let expected = [format!("plugins_registry/{registration}"), format!("plugins/{service}")];
            assert_eq!(of(DEFAULT, instance, driver).unwrap(), expected);
        }
    }

    #[test]
    fn every_path_that_is_given_fits_and_differs_from_those_of_other_drivers_and_instances() {
        for root_bytes in [5, 16, 40, 52, 54, 60] {
            let root = format!("/{}", "r".repeat(root_bytes - 1));
            let (mut seen, mut count) = (BTreeSet::new(), 0);
            let instances = [None, Some(UID), Some("other"), Some(&*"u".repeat(128))];
            for instance in instances.into_iter().filter(|instance| root_bytes <= 52 || instance.is_none()) {
                for driver_bytes in 1..=63 {
                    match of(&root, instance, &"d".repeat(driver_bytes)) {
                        Ok(paths) => {
                            count += 2;
                            for path in paths {
                                assert!(root.len() + 1 + path.len() <= SOCKET_PATH_BYTES_MAX, "{path}");
                                seen.insert(path);
                            }
                        }
                        Err(PathError::DriverTooLong { length, root_max, .. }) => {
                            assert!(root_bytes > 54 && length > SOCKET_PATH_BYTES_MAX);
                            // The last name of a driver is of the same length for every driver.
                            assert!(root_max == 54 || root_max > 54 && driver_bytes < 26);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            assert_eq!(seen.len(), count, "two of the same");
            assert!(count > 0);
        }
    }

    #[test]
    fn a_root_without_room_for_sockets_is_refused_with_the_fix() {
        let root = |bytes: usize| PathBuf::from(format!("/{}", "r".repeat(bytes - 1)));
        assert!(KubeletDirectories::new(root(61), None).is_ok());
        let error = KubeletDirectories::new(root(62), None).unwrap_err().to_string();
        assert!(error.contains("has 62 bytes") && error.contains("more than 61"), "{error}");
        assert!(KubeletDirectories::new(root(53), Some(Uid::new(UID).unwrap())).is_err());
        assert!(error.contains("--kubelet-root"), "{error}");
        for bad in ["kubelet", "/var/../kubelet", ""] {
            let error = KubeletDirectories::new(bad.into(), None).unwrap_err();
            assert!(matches!(error, PathError::NotPlain(_)), "{bad}");
        }
        assert_eq!(directories("/var//lib/kubelet/", None).root, Path::new(DEFAULT));
    }

    fn resource(name: &str) -> ExtendedResource {
        ExtendedResource::new(name).unwrap()
    }

    #[test]
    fn every_name_of_a_resource_fits_and_resources_and_instances_differ() {
        let long = format!("example.com/{}", "x".repeat(63));
        for root_bytes in 2..=61 {
            let root = format!("/{}", "r".repeat(root_bytes - 1));
            for instance in [None, Some(UID)].into_iter().filter(|uid| root_bytes <= 52 || uid.is_none()) {
                let directories = directories(&root, instance);
                let resources = ["example.com/gpu", "example.org/gpu", &long];
                let names: BTreeSet<_> =
                    resources.map(|name| directories.of_resource(&resource(name))).into();
                assert_eq!(names.len(), 3);
                let directory = &directories.device_plugins;
                let fits =
                    |name: &String| bytes(&directory.join(name)) + SPARE_BYTES <= SOCKET_PATH_BYTES_MAX;
                assert!(names.iter().all(fits), "{names:?}");
            }
        }
        let gpu = resource("example.com/gpu");
        assert_eq!(directories(DEFAULT, None).of_resource(&gpu), "nodedock-gpu-eec9fd00e847.sock");
        let own = directories(DEFAULT, Some(UID)).of_resource(&gpu);
        assert!(own.starts_with("nodedock-gpu-") && own.ends_with(&format!("-{UID}.sock")), "{own}");
    }

    #[test]
    fn of_instances_that_offer_a_resource_the_newest_is_known() {
        let gpu = resource("example.com/gpu");
        let named =
            |resource: &ExtendedResource, uid: &str| directories(DEFAULT, Some(uid)).of_resource(resource);
        let id = |second: u64| SocketId {
            device: 1,
            inode: second,
            made: SystemTime::UNIX_EPOCH + Duration::from_secs(second),
        };
        let (a, b, c) = (named(&gpu, "a"), named(&gpu, "b"), named(&resource("example.com/nic"), "c"));
        let sockets = Sockets::from([
            (a.clone(), id(1)),
            (b.clone(), id(2)),
            (c, id(3)),
            ("kubelet.sock".to_owned(), id(4)),
            ("other-gpu.sock".to_owned(), id(5)),
        ]);
        assert_eq!(newer_sockets(&sockets, &gpu, (&a, id(1))), [b.as_str()]);
        assert!(newer_sockets(&sockets, &gpu, (&b, id(2))).is_empty());
        let both = Sockets::from([(a.clone(), id(1)), (b.clone(), id(1))]);
        let of = |own: &str| newer_sockets(&both, &gpu, (own, id(1))).len();
        assert_eq!(of(&a) + of(&b), 1, "of two that were made at once one is the newer");
    }
}
