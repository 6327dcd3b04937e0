//! Accepted device plugins with a registration socket, for the device manager.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::sync::watch;

use nodedock_model::ExtendedResource;

/// A device plugin that was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePluginEndpoint {
    pub resource: ExtendedResource,
    pub endpoint: PathBuf,
    /// Versions that the plugin listed, including `v1beta1`.
    pub versions: Vec<String>,
}

/// Accepted device plugins by registration socket. Clones share the state.
#[derive(Clone, Default)]
pub struct DevicePlugins(watch::Sender<BTreeMap<String, DevicePluginEndpoint>>);

impl DevicePlugins {
    /// Returns a watch of the accepted plugins.
    pub fn follow(&self) -> watch::Receiver<BTreeMap<String, DevicePluginEndpoint>> {
        self.0.subscribe()
    }

    pub(super) fn put(&self, source: &str, endpoint: DevicePluginEndpoint) {
        self.0.send_modify(|known| drop(known.insert(source.to_owned(), endpoint)));
    }

    pub(super) fn remove(&self, source: &str) {
        self.0.send_if_modified(|known| known.remove(source).is_some());
    }
}
