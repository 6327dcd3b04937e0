//! Device plugins that registered on a registration socket: where the device manager finds them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::sync::watch;

use nodedock_model::ExtendedResource;

/// A device plugin that was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePluginEndpoint {
    pub resource: ExtendedResource,
    pub endpoint: PathBuf,
    /// As the plugin listed them; `v1beta1` is among them.
    pub versions: Vec<String>,
}

/// Accepted device plugins by registration socket. Clones see the same.
#[derive(Clone, Default)]
pub struct DevicePlugins(watch::Sender<BTreeMap<String, DevicePluginEndpoint>>);

impl DevicePlugins {
    /// What is accepted now, and every change of it.
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
