//! What the plugin is, and where.

use std::path::{Path, PathBuf};

/// File name of the socket on which device plugins register.
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// A plugin's resource, sockets and words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub resource: String,
    /// The folder with `kubelet.sock`, where the plugin's own socket is made.
    pub device_plugins_dir: PathBuf,
    /// File name of the plugin's socket in it.
    pub endpoint: String,
    pub register: Register,
    /// It wants to be called before each start of a container.
    pub pre_start: bool,
    /// What it says in its registration, where that is not the truth.
    pub said_version: Option<String>,
    pub said_resource: Option<String>,
    pub said_endpoint: Option<String>,
}

/// How the node's agent learns of the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Register {
    /// The plugin calls `kubelet.sock`.
    KubeletSocket,
    /// A registration socket in this folder; the agent calls the plugin.
    PluginsRegistry(PathBuf),
}

impl Options {
    /// Registers on `kubelet.sock`, with a socket that is named after the resource.
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

    /// The plugin's own socket.
    pub fn socket(&self) -> PathBuf {
        self.device_plugins_dir.join(&self.endpoint)
    }

    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins_dir.join(KUBELET_SOCKET)
    }

    /// None: it registers on `kubelet.sock`.
    pub fn registration_socket(&self) -> Option<PathBuf> {
        match &self.register {
            Register::KubeletSocket => None,
            Register::PluginsRegistry(folder) => {
                Some(folder.join(format!("{}-reg.sock", self.resource.replace('/', "_"))))
            }
        }
    }

    pub(crate) fn version(&self) -> String {
        self.said_version.clone().unwrap_or_else(|| "v1beta1".to_owned())
    }

    pub(crate) fn name(&self) -> String {
        self.said_resource.clone().unwrap_or_else(|| self.resource.clone())
    }
}
