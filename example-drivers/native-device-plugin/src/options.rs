//! Options of the plugin: its resource, sockets and registration.

use std::path::{Path, PathBuf};

/// File name of the socket on which device plugins register.
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// A plugin's resource, sockets and registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub resource: String,
    /// The directory with `kubelet.sock`, where the plugin creates its own socket.
    pub device_plugins_dir: PathBuf,
    /// File name of the plugin's socket in it.
    pub endpoint: String,
    pub register: Register,
    /// Requests PreStartContainer before each start of a container.
    pub pre_start: bool,
    /// Overrides for its registration, for tests.
    pub said_version: Option<String>,
    pub said_resource: Option<String>,
    pub said_endpoint: Option<String>,
}

/// The way in which the plugin registers with the node's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Register {
    /// The plugin calls `kubelet.sock`.
    KubeletSocket,
    /// The plugin creates a registration socket in this directory; the agent calls the plugin.
    PluginsRegistry(PathBuf),
}

impl Options {
    /// Creates options that register on `kubelet.sock`, with a socket named after the resource.
    pub fn new(resource: &str, device_plugins_dir: &Path) -> Self {
        Self {
            resource: resource.to_owned(),
            device_plugins_dir: device_plugins_dir.to_owned(),
            endpoint: format!("{}.sock", resource.replace('/', "_")),
            register: Register::KubeletSocket,
            pre_start: false,
            said_version: None,
            said_resource: None,
            said_endpoint: None,
        }
    }

    /// Returns the path of the plugin's own socket.
    pub fn socket(&self) -> PathBuf {
        self.device_plugins_dir.join(&self.endpoint)
    }

    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins_dir.join(KUBELET_SOCKET)
    }

    /// Returns the path of the registration socket; `None` if the plugin registers on `kubelet.sock`.
    pub fn registration_socket(&self) -> Option<PathBuf> {
        match &self.register {
            Register::KubeletSocket => None,
            Register::PluginsRegistry(directory) => {
                Some(directory.join(format!("{}-reg.sock", self.resource.replace('/', "_"))))
            }
        }
    }

    pub(crate) fn version(&self) -> String {
        self.said_version
            .clone()
            .unwrap_or_else(|| "v1beta1".to_owned())
    }

    pub(crate) fn name(&self) -> String {
        self.said_resource
            .clone()
            .unwrap_or_else(|| self.resource.clone())
    }
}
