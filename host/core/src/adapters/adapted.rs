//! What is known of an adapter and of its plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use super::AdapterView;
use super::material::Material;
use super::record::AdapterRecord;
use crate::driver::{DeviceDriver, Published};
use crate::registry::Registry;
use nodedock_model::{Adapter, DeviceName, DriverKind, PluginDevice, device_id, device_name};

/// An adapter and its plugin.
pub(super) struct Adapted {
    pub(super) adapter: Adapter,
    pub(super) source: String,
    pub(super) record: AdapterRecord,
    /// It is in the record alone: it acts as a disabled one.
    pub(super) is_removed: bool,
    /// The plugin, while it is connected, and the generation of its registration.
    pub(super) plugin: Option<(u64, Arc<dyn DeviceDriver>)>,
    /// The last list, by ID. `None`: there was none since the start.
    pub(super) listed: Option<BTreeMap<String, PluginDevice>>,
    /// Since when the plugin is not connected, and why.
    pub(super) left: Option<(Instant, String)>,
    /// Devices that pods of the node API have by the plugin's IDs.
    pub(super) taken: BTreeSet<String>,
    pub(super) published: Option<watch::Sender<Arc<Published>>>,
    /// The name of the driver is another's.
    pub(super) refused: Option<String>,
    pub(super) is_dirty: bool,
    /// One call of the plugin at a time, as a kubelet calls it.
    pub(super) calling: Arc<tokio::sync::Mutex<()>>,
}

impl Adapted {
    pub(super) fn new(adapter: Adapter, source: String, record: AdapterRecord, is_removed: bool) -> Self {
        Self {
            left: Some((Instant::now(), format!("no device plugin has registered as {}", adapter.resource))),
            adapter,
            source,
            record,
            is_removed,
            plugin: None,
            listed: None,
            taken: BTreeSet::new(),
            published: None,
            refused: None,
            is_dirty: true,
            calling: Arc::default(),
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        !self.is_removed && self.record.enabled.unwrap_or(self.adapter.enabled)
    }

    pub(super) fn is_registered(&self, registry: &Registry) -> bool {
        registry.kind(&self.adapter.driver) == Some(DriverKind::Adapter)
    }

    /// Its list was withdrawn.
    pub(super) fn has_nothing(&self) -> bool {
        self.listed.as_ref().is_some_and(BTreeMap::is_empty)
    }

    pub(super) fn is_ready(&self, has_kubelet: bool) -> bool {
        self.listed.is_some() && (!has_kubelet || self.record.is_taken_over)
    }

    pub(super) fn held(&self) -> BTreeSet<String> {
        self.taken.union(&self.record.held).cloned().collect()
    }

    /// Why it offers no devices, as a sentence; empty: it does.
    pub(super) fn waits_for(&self, has_kubelet: bool) -> String {
        match (&self.refused, &self.left) {
            (Some(refused), _) => refused.clone(),
            (None, Some((_, why))) if self.plugin.is_none() => why.clone(),
            (None, Some(_)) => "the plugin has not listed its devices yet".to_owned(),
            (None, None) if !self.is_ready(has_kubelet) => {
                "the kubelet has not listed yet which devices its pods have".to_owned()
            }
            (None, None) => String::new(),
        }
    }

    pub(super) fn view(&self, has_kubelet: bool) -> AdapterView {
        let (held, waits_for) = (self.held(), self.waits_for(has_kubelet));
        AdapterView {
            resource: self.adapter.resource.clone(),
            driver: self.adapter.driver.clone(),
            pool: self.adapter.pool.clone(),
            source: self.source.clone(),
            enabled: self.is_enabled(),
            is_removed: self.is_removed,
            is_connected: self.plugin.is_some(),
            devices: self.listed.as_ref().map_or(0, BTreeMap::len),
            held,
            waits_for,
        }
    }

    pub(super) fn material(&self) -> Material {
        let held = self.held();
        let listed = self.listed.iter().flatten().filter(|(id, _)| !held.contains(*id));
        Material {
            adapter: self.adapter.clone(),
            listed: listed.map(|(id, device)| (id.clone(), device.clone())).collect(),
            left: self.left.as_ref().map(|(_, why)| why.clone()),
        }
    }

    /// The plugin's ID of a device's name, among those that are listed or held.
    pub(super) fn id_of(&self, name: &DeviceName) -> Option<String> {
        let is_known = |id: &String| {
            self.listed.as_ref().is_some_and(|listed| listed.contains_key(id))
                || self.record.held.contains(id)
                || self.taken.contains(id)
        };
        match device_id(name) {
            Some(id) => Some(id).filter(is_known),
            // The name is a hash.
            None => {
                let listed = self.listed.iter().flat_map(BTreeMap::keys);
                let mut known = listed.chain(&self.record.held).chain(&self.taken);
                known.find(|id| device_name(id) == *name).cloned()
            }
        }
    }
}
