//! Paths of sockets in the kubelet's directories. Pure.
//!
//! A driver's sockets have the names that the Go helper uses for DRA drivers that run as several instances; a resource's socket begins with
//! `nodedock-`. Both contain the name of the process start that created them: a kubelet would deregister a plugin and register it again if
//! its socket were replaced by one of the same name. A name that is longer than a socket's path may be is shortened.

use std::path::{Component, Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use nodedock_base::listeners::START_BYTES_MAX;
use nodedock_model::limit::SOCKET_PATH_BYTES_MAX;
use nodedock_model::{DriverName, ExtendedResource};

const REGISTRY: &str = "plugins_registry";
const PLUGINS: &str = "plugins";
const DEVICE_PLUGINS: &str = "device-plugins";
const POD_RESOURCES: &str = "pod-resources/kubelet.sock";

const PREFIX: &str = "nodedock-";
const SUFFIX: &str = ".sock";
/// Bytes that a resource's socket leaves free behind its name, so that names stay what they are over updates of this daemon.
const SPARE_BYTES: usize = 4;
/// Digits of a resource's hash: with 256 resources two are alike once in a billion nodes.
const HASH_DIGITS: usize = 12;
/// Bytes below the root of the longest of the shortest names, those of resources; those of drivers have less.
const SHORTEST_BYTES: usize = 1
    + DEVICE_PLUGINS.len()
    + 1
    + PREFIX.len()
    + HASH_DIGITS
    + 1
    + START_BYTES_MAX
    + SUFFIX.len()
    + SPARE_BYTES;

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
    /// The process start in the names.
    start: String,
}

/// The sockets of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPaths {
    /// Socket on which the kubelet discovers the driver.
    pub registration: PathBuf,
    /// Socket on which the kubelet calls the driver.
    pub service: PathBuf,
}

/// Why a kubelet's root directory cannot be used.
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
    RootTooLong {
        root: PathBuf,
        length: usize,
        max: usize,
    },
    #[error(
        "{0:?} is the directory in which plugins register with this daemon, and below the kubelet's root as well: every driver \
         would be offered to this daemon itself; choose another --root or --kubelet-root"
    )]
    OwnDirectory(PathBuf),
}

impl KubeletDirectories {
    pub(super) fn new(root: PathBuf, start: String) -> Result<Self, PathError> {
        if !root.is_absolute()
            || !root
                .components()
                .all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        {
            return Err(PathError::NotPlain(root));
        }
        // Without doubled and trailing slashes, which count as bytes.
        let root: PathBuf = root.components().collect();
        let (length, max) = (bytes(&root), SOCKET_PATH_BYTES_MAX - SHORTEST_BYTES);
        if length > max {
            return Err(PathError::RootTooLong { root, length, max });
        }
        let [registry, plugins, device_plugins, pod_resources] =
            [REGISTRY, PLUGINS, DEVICE_PLUGINS, POD_RESOURCES].map(|path| root.join(path));
        Ok(Self {
            root,
            registry,
            plugins,
            device_plugins,
            pod_resources,
            start,
        })
    }

    pub(super) fn start(&self) -> &str {
        &self.start
    }

    /// A driver's sockets of a process start.
    pub(super) fn of_driver(&self, driver: &DriverName, start: &str) -> SocketPaths {
        let hash = Sha256::new()
            .chain_update(driver.as_str())
            .chain_update([0])
            .chain_update(start)
            .finalize();
        let short = format!("dra-{}", URL_SAFE_NO_PAD.encode(&hash[..16]));
        let registration = path_that_fits(
            &self.registry,
            format!("{driver}-{start}-reg.sock"),
            format!("{short}-reg.sock"),
        );
        let service = path_that_fits(
            &self.plugins,
            format!("{driver}/dra-{start}.sock"),
            format!("{short}/dra.sock"),
        );
        SocketPaths {
            registration,
            service,
        }
    }

    /// The name of a resource's socket, such as `nodedock-gpu-0123456789ab-12345678.sock`: as much of the resource's name as fits, then
    /// its hash, then the process start.
    pub(super) fn of_resource(&self, resource: &ExtendedResource) -> String {
        let taken = bytes(&self.device_plugins) + 1 + SPARE_BYTES;
        let end = format!(
            "{}-{}{SUFFIX}",
            digits(resource.as_str(), HASH_DIGITS),
            self.start
        );
        let left = SOCKET_PATH_BYTES_MAX.saturating_sub(taken + PREFIX.len() + end.len());
        match label(resource, left.saturating_sub(1)) {
            label if label.is_empty() => format!("{PREFIX}{end}"),
            label => format!("{PREFIX}{label}-{end}"),
        }
    }
}

fn path_that_fits(directory: &Path, long: String, short: String) -> PathBuf {
    Some(directory.join(long))
        .filter(|path| bytes(path) <= SOCKET_PATH_BYTES_MAX)
        .unwrap_or_else(|| directory.join(short))
}

/// The part of a resource's name after its domain, in characters that need no care in a shell.
fn label(resource: &ExtendedResource, bytes_max: usize) -> String {
    let name = resource.as_str().rsplit('/').next().unwrap_or_default();
    let cut: String = name.chars().take(bytes_max.min(32)).collect();
    cut.trim_end_matches(['-', '_', '.']).to_owned()
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

    use super::*;

    const START: &str = "6f1c2d7e";
    const DEFAULT: &str = "/var/lib/kubelet";

    fn directories(root: &str, start: &str) -> KubeletDirectories {
        KubeletDirectories::new(root.into(), start.to_owned()).unwrap()
    }

    fn of(root: &str, start: &str, driver: &str) -> [String; 2] {
        let paths = directories(root, START).of_driver(&DriverName::new(driver).unwrap(), start);
        let below = |path: PathBuf| path.strip_prefix(root).unwrap().display().to_string();
        [below(paths.registration), below(paths.service)]
    }

    #[test]
    fn socket_names_match_go_helper() {
        let (short, long) = ("gpu.example.com", "a".repeat(63));
        let expected = [
            format!("plugins_registry/{short}-{START}-reg.sock"),
            format!("plugins/{short}/dra-{START}.sock"),
        ];
        assert_eq!(of(DEFAULT, START, short), expected);
        let [registration, service] = of(DEFAULT, START, &long);
        let hash = registration.strip_prefix("plugins_registry/dra-").unwrap();
        assert_eq!(
            hash.strip_suffix("-reg.sock").unwrap().len(),
            22,
            "{registration}"
        );
        assert_eq!(service, format!("plugins/{long}/dra-{START}.sock"));
    }

    #[test]
    fn socket_paths_fit_and_are_unique() {
        let long = format!("example.com/{}", "x".repeat(63));
        for root_bytes in [2, 5, 16, 40, 52] {
            let root = format!("/{}", "r".repeat(root_bytes - 1));
            let (mut seen, mut count) = (BTreeSet::new(), 0);
            for start in [START, "a", "01234567"] {
                for driver_bytes in 1..=63 {
                    for path in of(&root, start, &"d".repeat(driver_bytes)) {
                        assert!(
                            root.len() + 1 + path.len() <= SOCKET_PATH_BYTES_MAX,
                            "{path}"
                        );
                        (_, count) = (seen.insert(path), count + 1);
                    }
                }
                let directories = directories(&root, start);
                for name in ["example.com/gpu", "example.org/gpu", &long] {
                    let name = directories.of_resource(&resource(name));
                    let path = directories.device_plugins.join(&name);
                    assert!(
                        bytes(&path) + SPARE_BYTES <= SOCKET_PATH_BYTES_MAX,
                        "{name}"
                    );
                    (_, count) = (seen.insert(name), count + 1);
                }
            }
            assert_eq!(seen.len(), count, "two of the same");
        }
        let gpu = directories(DEFAULT, START).of_resource(&resource("example.com/gpu"));
        assert_eq!(gpu, format!("nodedock-gpu-eec9fd00e847-{START}.sock"));
    }

    #[test]
    fn too_long_root_is_refused() {
        let root = |bytes: usize| PathBuf::from(format!("/{}", "r".repeat(bytes - 1)));
        assert!(KubeletDirectories::new(root(52), START.to_owned()).is_ok());
        let error = KubeletDirectories::new(root(53), START.to_owned())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("has 53 bytes") && error.contains("more than 52"),
            "{error}"
        );
        assert!(error.contains("--kubelet-root"), "{error}");
        for bad in ["kubelet", "/var/../kubelet", ""] {
            let error = KubeletDirectories::new(bad.into(), START.to_owned()).unwrap_err();
            assert!(matches!(error, PathError::NotPlain(_)), "{bad}");
        }
        assert_eq!(
            directories("/var//lib/kubelet/", START).root,
            Path::new(DEFAULT)
        );
    }

    fn resource(name: &str) -> ExtendedResource {
        ExtendedResource::new(name).unwrap()
    }
}
