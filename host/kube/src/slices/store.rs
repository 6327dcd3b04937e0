//! The observed slices of this node: what the watch reports, and what the server answered to writes, which the watch reports later.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::reflector::{ObjectRef, Store, store::Writer};
use kube::runtime::watcher::Event;

use super::slice::{Content, Slice};
use crate::client::{DraResource, DraVersion};
use crate::pools::PoolKey;
use nodedock_base::error::chain;

/// Slices of this node that are read: many times those of a node with many drivers.
const SLICES_MAX: usize = 16 * 1024;

pub(super) struct SliceStore {
    store: Store<Slice>,
    writer: Writer<Slice>,
    /// All slices were listed once.
    pub(super) is_listed: bool,
}

/// The type of the store's keys: slices of all versions of the API are the same objects.
fn resource() -> ApiResource {
    DraVersion::V1.resource(DraResource::Slices)
}

impl SliceStore {
    pub(super) fn new() -> Self {
        let writer = Writer::new(resource());
        Self {
            store: writer.as_reader(),
            writer,
            is_listed: false,
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Slice>> {
        self.store.state()
    }

    pub(super) fn of_pool(&self, key: &PoolKey) -> Vec<Arc<Slice>> {
        self.store.state_filter(|slice| {
            slice.spec.driver == key.driver && slice.spec.pool.name == key.pool
        })
    }

    pub(super) fn pools(&self) -> BTreeSet<PoolKey> {
        self.all().iter().map(|slice| slice.spec.key()).collect()
    }

    /// Takes an event of the watch and returns the pools that it may have changed.
    pub(super) fn apply(&mut self, event: Event<DynamicObject>) -> BTreeSet<PoolKey> {
        match event {
            Event::Apply(object) => {
                return self.reported(object, Event::Apply).into_iter().collect();
            }
            Event::Delete(object) => {
                return self.reported(object, Event::Delete).into_iter().collect();
            }
            Event::InitApply(object) => drop(self.reported(object, Event::InitApply)),
            Event::Init => self.writer.apply_watcher_event(&Event::Init),
            Event::InitDone => {
                let before = self.pools();
                self.writer.apply_watcher_event(&Event::InitDone);
                self.is_listed = true;
                return before.into_iter().chain(self.pools()).collect();
            }
        }
        BTreeSet::new()
    }

    /// Takes a reported slice, unless it is older than the server's answer to a write.
    fn reported(
        &mut self,
        object: DynamicObject,
        event: fn(Slice) -> Event<Slice>,
    ) -> Option<PoolKey> {
        let slice = object.try_parse::<Slice>();
        // Not one of ours, and ignored.
        let slice =
            slice.inspect_err(|error| tracing::debug!(error = chain(error), "a slice is ignored"));
        let mut slice = slice.ok()?;
        let known = self
            .store
            .get(&ObjectRef::from_obj_with(&slice, resource()));
        if known.is_none() && self.store.len() >= SLICES_MAX {
            return None;
        }
        if let Some(known) = known.filter(|known| known.uid() == slice.uid()) {
            if version(&slice) < version(&known) {
                slice = (*known).clone();
            } else if slice.spec.content == known.spec.content {
                slice.spec.sent.clone_from(&known.spec.sent);
                slice.spec.content.share(&known.spec.content);
            }
        }
        // They are as large as the slice, and only their managers are used.
        slice
            .managed_fields_mut()
            .iter_mut()
            .for_each(|manager| manager.fields_v1 = None);
        let key = slice.spec.key();
        self.writer.apply_watcher_event(&event(slice));
        Some(key)
    }

    /// Takes the server's answer to a write of `sent`, before the watch reports it.
    pub(super) fn written(&mut self, mut slice: Slice, sent: Content) {
        slice.spec.content.share(&sent);
        slice.spec.sent = Some(sent).filter(|sent| *sent != slice.spec.content);
        self.writer.apply_watcher_event(&Event::Apply(slice));
    }

    /// Removes a slice that was deleted, before the watch reports it.
    pub(super) fn deleted(&mut self, slice: &Slice) {
        self.writer
            .apply_watcher_event(&Event::Delete(slice.clone()));
    }
}

/// Versions that are no numbers are not compared.
fn version(slice: &Slice) -> u64 {
    slice
        .metadata
        .resource_version
        .as_deref()
        .and_then(|version| version.parse().ok())
        .unwrap_or(u64::MAX)
}
