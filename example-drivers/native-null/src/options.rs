//! Options of a plugin: its identity and sockets.

use std::path::{Path, PathBuf};

/// Identity and sockets of a plugin.
#[derive(Debug, Clone)]
pub struct Options {
    /// A DNS subdomain of at most 63 bytes, such as `null.example.com`.
    pub driver: String,
    /// The directory that the node's agent watches.
    pub registry_dir: PathBuf,
    /// Name of the registration socket in that directory; may include subdirectories.
    pub registration_name: String,
    /// Path of the driver's socket; absolute, at most 107 bytes.
    pub endpoint: PathBuf,
    pub versions: Versions,
    /// The registered plugin type; values other than `DRAPlugin` are for tests.
    pub plugin_type: String,
    /// Overrides for the registered endpoint and services, for tests.
    pub said_endpoint: Option<String>,
    pub said_services: Option<Vec<String>>,
}

/// The services that the plugin serves and registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    pub v1: bool,
    pub v1beta1: bool,
    pub health_v1: bool,
    pub health_v1alpha1: bool,
}

impl Default for Versions {
    fn default() -> Self {
        Self {
            v1: true,
            v1beta1: true,
            health_v1: false,
            health_v1alpha1: false,
        }
    }
}

impl Options {
    /// Uses the layout of the Go helper: `DRIVER-reg.sock` in the registry, `DRIVER/dra.sock` in the plugins' directory.
    pub fn new(driver: &str, registry_dir: &Path, plugins_dir: &Path) -> Self {
        Self {
            driver: driver.to_owned(),
            registry_dir: registry_dir.to_owned(),
            registration_name: format!("{driver}-reg.sock"),
            endpoint: plugins_dir.join(driver).join("dra.sock"),
            versions: Versions::default(),
            plugin_type: "DRAPlugin".to_owned(),
            said_endpoint: None,
            said_services: None,
        }
    }

    /// Names both sockets after an instance, for a second process of the same driver during a rolling update.
    #[must_use]
    pub fn instance(mut self, id: &str) -> Self {
        self.registration_name = format!("{}-{id}-reg.sock", self.driver);
        self.endpoint.set_file_name(format!("dra-{id}.sock"));
        self
    }

    pub fn registration_socket(&self) -> PathBuf {
        self.registry_dir.join(&self.registration_name)
    }

    pub(crate) fn services(&self) -> Vec<String> {
        let all = [
            (self.versions.v1, "v1.DRAPlugin"),
            (self.versions.v1beta1, "v1beta1.DRAPlugin"),
            (self.versions.health_v1, "v1.DRAResourceHealth"),
            (self.versions.health_v1alpha1, "v1alpha1.DRAResourceHealth"),
        ];
        self.said_services.clone().unwrap_or_else(|| {
            all.iter()
                .filter(|(served, _)| *served)
                .map(|(_, name)| (*name).to_owned())
                .collect()
        })
    }
}
