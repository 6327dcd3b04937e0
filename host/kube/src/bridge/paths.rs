//! Where a driver's sockets are in a kubelet's folders. Pure.
//!
//! The names are those of the Go helper for DRA drivers, with the instance's UID in them where there is one. What is longer than a
//! socket's path may be is shortened step by step, the last name being of the same length for every driver.

use std::path::{Component, Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use nodedock_model::limit::SOCKET_PATH_BYTES_MAX;
use nodedock_model::{DriverName, Uid};

const REGISTRY: &str = "plugins_registry";
const PLUGINS: &str = "plugins";
/// Bytes below the root of the shortest names that any driver can have: `/plugins_registry/a-reg.sock`.
const SHORTEST_BYTES: usize = 1 + REGISTRY.len() + 1 + "a-reg.sock".len();

/// The folders of a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Folders {
    root: PathBuf,
    instance: Option<Uid>,
}

/// The sockets of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SocketPaths {
    /// Where the kubelet learns of the driver.
    pub(super) registration: PathBuf,
    /// The folder of `service`.
    pub(super) folder: PathBuf,
    /// Where the driver is called.
    pub(super) service: PathBuf,
}

/// Why a kubelet's folder cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    #[error(
        "the kubelet's folder {0:?} is not an absolute path without '..': give --kubelet-root as the kubelet has it"
    )]
    NotPlain(PathBuf),
    #[error(
        "the kubelet's folder {root:?} has {length} bytes, and with more than {max} no driver's socket fits into \
         the {SOCKET_PATH_BYTES_MAX} that the system allows: choose a shorter --kubelet-root (and the kubelet's --root-dir)"
    )]
    TooLong { root: PathBuf, length: usize, max: usize },
}

/// A driver's sockets do not fit below this root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the socket path {path:?} has {length} bytes, and the system allows {SOCKET_PATH_BYTES_MAX}: for driver {driver} the \
     kubelet's folder (--kubelet-root) may have {root_max} bytes"
)]
pub(super) struct TooLong {
    driver: DriverName,
    /// The shortest there is.
    path: PathBuf,
    length: usize,
    root_max: usize,
}

impl Folders {
    pub(super) fn new(root: PathBuf, instance: Option<Uid>) -> Result<Self, RootError> {
        let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
        if !root.is_absolute() || !root.components().all(is_plain) {
            return Err(RootError::NotPlain(root));
        }
        // Without doubled and trailing slashes, which count as bytes.
        let root: PathBuf = root.components().collect();
        let (length, max) = (bytes(&root), SOCKET_PATH_BYTES_MAX - SHORTEST_BYTES);
        if length > max {
            return Err(RootError::TooLong { root, length, max });
        }
        Ok(Self { root, instance })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The kubelet looks here for registration sockets.
    pub(super) fn registry(&self) -> PathBuf {
        self.root.join(REGISTRY)
    }

    pub(super) fn plugins(&self) -> PathBuf {
        self.root.join(PLUGINS)
    }

    pub(super) fn of(&self, driver: &DriverName) -> Result<SocketPaths, TooLong> {
        let registry = self.registry();
        let names = self.registration_names(driver);
        let registration = self.first_that_fits(driver, names.into_iter().map(|name| registry.join(name)))?;
        let plugins = self.plugins();
        let services = self.service_names(driver);
        let services = services.into_iter().map(|(folder, name)| plugins.join(folder).join(name));
        let service = self.first_that_fits(driver, services)?;
        let folder = service.parent().unwrap_or(&plugins).to_owned();
        Ok(SocketPaths { registration, folder, service })
    }

    /// The wish first, the last resort last.
    fn registration_names(&self, driver: &DriverName) -> Vec<String> {
        let last = format!("dra-{}-reg.sock", self.of_both(driver));
        match &self.instance {
            None => vec![format!("{driver}-reg.sock"), last],
            Some(uid) => {
                vec![format!("{driver}-{uid}-reg.sock"), format!("{driver}-{}-reg.sock", of_uid(uid)), last]
            }
        }
    }

    /// Folder and name.
    fn service_names(&self, driver: &DriverName) -> Vec<(String, String)> {
        let last = (format!("dra-{}", self.of_both(driver)), "dra.sock".to_owned());
        let own = driver.to_string();
        match &self.instance {
            None => vec![(own, "dra.sock".to_owned()), last],
            Some(uid) => vec![
                (own.clone(), format!("dra-{uid}.sock")),
                (own, format!("dra-{}.sock", of_uid(uid))),
                last,
            ],
        }
    }

    fn of_both(&self, driver: &DriverName) -> String {
        let uid = self.instance.as_ref().map_or("", Uid::as_str);
        let digest =
            Sha256::new().chain_update(driver.as_str()).chain_update([0]).chain_update(uid).finalize();
        URL_SAFE_NO_PAD.encode(&digest[..16])
    }

    fn first_that_fits(
        &self,
        driver: &DriverName,
        paths: impl Iterator<Item = PathBuf>,
    ) -> Result<PathBuf, TooLong> {
        let mut shortest: Option<PathBuf> = None;
        for path in paths {
            if bytes(&path) <= SOCKET_PATH_BYTES_MAX {
                return Ok(path);
            }
            if shortest.as_ref().is_none_or(|shortest| bytes(&path) < bytes(shortest)) {
                shortest = Some(path);
            }
        }
        let path = shortest.unwrap_or_default();
        let length = bytes(&path);
        let below = length.saturating_sub(bytes(&self.root));
        let root_max = SOCKET_PATH_BYTES_MAX.saturating_sub(below);
        Err(TooLong { driver: driver.clone(), path, length, root_max })
    }
}

fn of_uid(uid: &Uid) -> String {
    URL_SAFE_NO_PAD.encode(&Sha256::digest(uid.as_str())[..8])
}

fn bytes(path: &Path) -> usize {
    path.as_os_str().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6f1c2d7e-0f7b-4d1f-9d3b-2a6f0e9c1b11";
    const DEFAULT: &str = "/var/lib/kubelet";

    fn folders(root: &str, instance: Option<&str>) -> Folders {
        Folders::new(root.into(), instance.map(|uid| Uid::new(uid).unwrap())).unwrap()
    }

    fn of(root: &str, instance: Option<&str>, driver: &str) -> Result<[String; 2], TooLong> {
        let paths = folders(root, instance).of(&DriverName::new(driver).unwrap())?;
        assert_eq!(paths.service.parent(), Some(&*paths.folder));
        let below = |path: PathBuf| path.strip_prefix(root).unwrap().display().to_string();
        Ok([below(paths.registration), below(paths.service)])
    }

    #[test]
    fn names_are_those_of_the_go_helper_and_are_shortened_where_they_must() {
        let long = "a".repeat(63);
        let (h8, h16) = ("FqsfgVM4bvQ", "rAMdRKW0iNz7rm_L9CpxFw");
        let short = "gpu.example.com";
        assert_eq!(
            of(DEFAULT, None, short).unwrap(),
            ["plugins_registry/gpu.example.com-reg.sock", "plugins/gpu.example.com/dra.sock"]
        );
        assert_eq!(
            of(DEFAULT, Some(UID), short).unwrap(),
            [
                format!("plugins_registry/gpu.example.com-{UID}-reg.sock"),
                format!("plugins/gpu.example.com/dra-{UID}.sock")
            ]
        );
        let [registration, service] = of(DEFAULT, None, &long).unwrap();
        assert_eq!(registration, format!("plugins_registry/{long}-reg.sock"));
        assert_eq!(service, format!("plugins/{long}/dra.sock"));
        // 45 bytes: with the UID too long, with its hash not.
        let middle = "b".repeat(45);
        let [registration, service] = of(DEFAULT, Some(UID), &middle).unwrap();
        let of_middle = registration.strip_prefix(&format!("plugins_registry/{middle}-")).unwrap();
        assert_eq!(of_middle, format!("{h8}-reg.sock"));
        assert_eq!(service, format!("plugins/{middle}/dra-{h8}.sock"));
        let [registration, service] = of(DEFAULT, Some(UID), &long).unwrap();
        assert_eq!(registration, format!("plugins_registry/dra-{h16}-reg.sock"));
        assert_eq!(service, format!("plugins/dra-{h16}/dra.sock"));
    }

    #[test]
    fn every_path_that_is_given_fits_and_differs_from_those_of_other_drivers_and_instances() {
        for root_bytes in [5, 16, 40, 54, 60, 79] {
            let root = format!("/{}", "r".repeat(root_bytes - 1));
            let mut seen = std::collections::BTreeSet::new();
            let mut count = 0;
            for instance in [None, Some(UID), Some("other"), Some(&*"u".repeat(128))] {
                for driver_bytes in 1..=63 {
                    match of(&root, instance, &"d".repeat(driver_bytes)) {
                        Ok(paths) => {
                            count += 2;
                            for path in paths {
                                assert!(root.len() + 1 + path.len() <= SOCKET_PATH_BYTES_MAX, "{path}");
                                seen.insert(path);
                            }
                        }
                        Err(error) => {
                            assert!(root_bytes > 54, "{error}");
                            assert!(
                                error.root_max >= 54 && error.length > SOCKET_PATH_BYTES_MAX,
                                "{error:?}"
                            );
                        }
                    }
                }
            }
            assert_eq!(seen.len(), count, "two of the same");
            assert!(count > 0 || root_bytes > 54);
        }
    }

    #[test]
    fn a_root_that_no_driver_fits_below_is_refused_with_the_fix() {
        let root = |bytes: usize| PathBuf::from(format!("/{}", "r".repeat(bytes - 1)));
        assert!(Folders::new(root(79), None).is_ok());
        let error = Folders::new(root(80), None).unwrap_err().to_string();
        assert!(error.contains("has 80 bytes") && error.contains("more than 79"), "{error}");
        assert!(error.contains("--kubelet-root"), "{error}");
        for bad in ["kubelet", "/var/../kubelet", ""] {
            let error = Folders::new(bad.into(), None).unwrap_err();
            assert!(matches!(error, RootError::NotPlain(_)), "{bad}");
        }
        assert_eq!(folders("/var//lib/kubelet/", None).root(), Path::new(DEFAULT));
    }

    #[test]
    fn a_driver_that_does_not_fit_is_named_with_how_long_the_root_may_be() {
        let root = format!("/{}", "r".repeat(69));
        assert!(of(&root, None, "short").is_ok());
        let error = of(&root, None, &"d".repeat(40)).unwrap_err().to_string();
        assert!(error.contains(&"d".repeat(40)) && error.contains("--kubelet-root"), "{error}");
        assert!(error.ends_with("may have 54 bytes"), "{error}");
    }
}
