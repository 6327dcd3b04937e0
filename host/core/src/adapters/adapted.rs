//! State of an adapter and of its plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::AdapterView;
use super::material::Material;
use crate::driver::DeviceDriver;
use crate::sysfs::blocking::SYSFS_THREADS_PER_DRIVER;
use nodedock_model::{Adapter, AdapterRecord, DeviceName, PluginDevice, device_id, device_name};

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
    /// Time since which no connected plugin has a list, and the reason.
    pub(super) left: Option<(Instant, String)>,
    /// Its list was withdrawn because of that.
    pub(super) is_expired: bool,
    /// No request is about to give devices to pods by the plugin's IDs any more, so `taken` has all of them.
    pub(super) is_settled: bool,
    /// Devices that pods of the node API have by the plugin's IDs.
    pub(super) taken: BTreeSet<String>,
    /// The name of the driver is another's.
    pub(super) refused: Option<String>,
    pub(super) is_dirty: bool,
    /// One call of the plugin at a time, as a kubelet calls it.
    pub(super) calling: Arc<tokio::sync::Mutex<()>>,
    /// Threads that read below `/sys`.
    pub(super) looks: Arc<Semaphore>,
}

/// An adapter as its driver is made of it.
pub(super) struct KnownAdapter {
    pub(super) adapter: Adapter,
    pub(super) calling: Arc<tokio::sync::Mutex<()>>,
    /// The name of the driver is another's.
    pub(super) is_refused: bool,
}

impl Adapted {
    pub(super) fn new(
        adapter: Adapter,
        source: String,
        record: AdapterRecord,
        is_removed: bool,
    ) -> Self {
        Self {
            left: Some((
                Instant::now(),
                format!("no device plugin has registered as {}", adapter.resource),
            )),
            adapter,
            source,
            record,
            is_removed,
            plugin: None,
            listed: None,
            is_expired: false,
            is_settled: true,
            taken: BTreeSet::new(),
            refused: None,
            is_dirty: true,
            calling: Arc::default(),
            looks: Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER)),
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        !self.is_removed && self.record.enabled.unwrap_or(self.adapter.enabled)
    }

    pub(super) fn set_left(&mut self, left: Option<(Instant, String)>) {
        (self.left, self.is_expired, self.is_dirty) = (left, false, true);
    }

    pub(super) fn is_ready(&self, has_kubelet: bool) -> bool {
        self.listed.is_some() && self.is_taken_over(has_kubelet)
    }

    /// Returns whether it is known which devices pods have by the plugin's IDs.
    fn is_taken_over(&self, has_kubelet: bool) -> bool {
        self.is_settled && (!has_kubelet || self.record.is_taken_over)
    }

    pub(super) fn held(&self) -> BTreeSet<String> {
        self.taken.union(&self.record.held).cloned().collect()
    }

    /// Identity strings of the devices that are held, each with an ID.
    pub(super) fn held_identities(&self) -> BTreeMap<String, String> {
        self.taken
            .iter()
            .chain(&self.record.held)
            .flat_map(|id| {
                let id = id.clone();
                self.adapter
                    .identity(&id)
                    .into_iter()
                    .map(move |identity| (identity, id.clone()))
            })
            .collect()
    }

    /// Identity strings of listed devices of which pods may have some by the plugin's IDs: it is not known yet which.
    pub(super) fn unread_identities(&self, has_kubelet: bool) -> BTreeSet<String> {
        let is_unread = !self.is_taken_over(has_kubelet);
        let listed = self
            .listed
            .iter()
            .flat_map(BTreeMap::keys)
            .filter(|_| is_unread);
        listed.flat_map(|id| self.adapter.identity(id)).collect()
    }

    /// The ID by which a pod has the device of an ID, or its hardware, from the time before the adapter.
    pub(super) fn holder<'a>(
        &self,
        id: &'a str,
        identities: &'a BTreeMap<String, String>,
    ) -> Option<&'a str> {
        if self.taken.contains(id) || self.record.held.contains(id) {
            return Some(id);
        }
        // Most plugins have none.
        let identity = if identities.is_empty() {
            Vec::new()
        } else {
            self.adapter.identity(id)
        };
        identity
            .iter()
            .find_map(|identity| identities.get(identity))
            .map(String::as_str)
    }

    /// Why it offers no devices, as a sentence; empty: it does.
    pub(super) fn waits_for(&self, has_kubelet: bool) -> String {
        match (&self.refused, &self.left) {
            (Some(refused), _) => refused.clone(),
            (None, Some((_, why))) if self.plugin.is_none() => why.clone(),
            (None, Some(_)) => "the plugin has not listed its devices yet".to_owned(),
            (None, None) if !self.is_settled => {
                "pods are being given devices by the plugin's own IDs".to_owned()
            }
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

    pub(super) fn known(&self) -> KnownAdapter {
        KnownAdapter {
            adapter: self.adapter.clone(),
            calling: self.calling.clone(),
            is_refused: self.refused.is_some(),
        }
    }

    pub(super) fn material(&self) -> Material {
        let identities = self.held_identities();
        let listed = self
            .listed
            .iter()
            .flatten()
            .filter(|(id, _)| self.holder(id, &identities).is_none());
        Material {
            adapter: self.adapter.clone(),
            listed: listed
                .map(|(id, device)| (id.clone(), device.clone()))
                .collect(),
            left: self.left.as_ref().map(|(_, why)| why.clone()),
        }
    }

    /// The plugin's ID of a device's name, among those that are listed or held.
    pub(super) fn id_of(&self, name: &DeviceName) -> Option<String> {
        match device_id(name) {
            Some(id) => Some(id).filter(|id| {
                self.listed
                    .as_ref()
                    .is_some_and(|listed| listed.contains_key(id))
                    || self.record.held.contains(id)
                    || self.taken.contains(id)
            }),
            // The name is a hash.
            None => {
                let listed = self.listed.iter().flat_map(BTreeMap::keys);
                let mut known = listed.chain(&self.record.held).chain(&self.taken);
                known.find(|id| device_name(id) == *name).cloned()
            }
        }
    }
}
