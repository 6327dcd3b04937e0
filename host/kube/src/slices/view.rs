//! The slices of this node as the server has them, as far as we know: what the watch told, and what the server answered to our own
//! writes, which the watch tells later.

use std::collections::{BTreeMap, BTreeSet};

use super::content::Content;
use super::planner::{Held, PoolKey};
use super::wire;
use nodedock_model::{DriverName, limit};

/// What became known of slices of this node.
#[derive(Debug)]
pub enum SliceEvent {
    /// All that there are.
    Listed(Vec<Held>),
    /// One that is new, or changed.
    Changed(Box<Held>),
    Deleted {
        name: String,
        uid: String,
    },
}

#[derive(Debug, Default)]
pub(super) struct View {
    slices: BTreeMap<String, Held>,
    /// UIDs that we know are gone, which the watch may still tell of.
    gone: BTreeSet<String>,
    /// UIDs of what we wrote and the watch has not told of yet.
    fresh: BTreeSet<String>,
    /// What a list did not have although we wrote it: the list may be the older. It has to be read.
    doubtful: BTreeMap<String, String>,
    is_listed: bool,
}

impl View {
    /// Whether all slices were listed once.
    pub(super) fn is_listed(&self) -> bool {
        self.is_listed
    }

    pub(super) fn of_pool<'a>(&'a self, key: &'a PoolKey) -> impl Iterator<Item = &'a Held> {
        self.slices.values().filter(move |held| held.key == *key)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Held> {
        self.slices.values()
    }

    /// Drivers of slices that say that they are ours.
    pub(super) fn our_drivers(&self) -> BTreeSet<DriverName> {
        let ours = self.slices.values().filter(|held| wire::is_ours(&held.metadata));
        ours.map(|held| held.key.driver.clone()).collect()
    }

    /// Takes an event; the pools that are another thing now than before.
    pub(super) fn apply(&mut self, event: SliceEvent) -> BTreeSet<PoolKey> {
        match event {
            SliceEvent::Listed(slices) => self.list(slices),
            SliceEvent::Changed(held) => self.change(*held).into_iter().collect(),
            SliceEvent::Deleted { name, uid } => self.drop_one(&name, &uid).into_iter().collect(),
        }
    }

    fn list(&mut self, slices: Vec<Held>) -> BTreeSet<PoolKey> {
        let first = !std::mem::replace(&mut self.is_listed, true);
        let listed: BTreeSet<String> = slices.iter().map(|held| held.uid.clone()).collect();
        let missing = self.slices.values().filter(|held| !listed.contains(&held.uid));
        let missing = missing.map(|held| (held.name.clone(), held.uid.clone()));
        let (doubtful, left): (BTreeMap<_, _>, Vec<_>) = {
            let (doubtful, left): (Vec<_>, Vec<_>) = missing.partition(|(_, uid)| self.fresh.contains(uid));
            (doubtful.into_iter().collect(), left)
        };
        self.doubtful = doubtful;
        let mut touched: BTreeSet<_> =
            left.iter().filter_map(|(name, uid)| self.drop_one(name, uid)).collect();
        // A list may be older than what we know to be gone.
        self.gone.retain(|uid| listed.contains(uid));
        for held in slices.into_iter().take(limit::SLICES_MAX) {
            let key = held.key.clone();
            let changed = self.change(held);
            touched.extend(if first { Some(key) } else { changed });
        }
        touched
    }

    /// What is to be read since a list and our own writes do not agree: names and UIDs.
    pub(super) fn take_doubtful(&mut self) -> Vec<(String, String)> {
        std::mem::take(&mut self.doubtful).into_iter().collect()
    }

    fn change(&mut self, mut held: Held) -> Option<PoolKey> {
        if self.gone.contains(&held.uid) {
            return None;
        }
        let known = self.slices.get(&held.name);
        if known.is_none() && self.slices.len() >= limit::SLICES_MAX {
            return None;
        }
        if let Some(known) = known.filter(|known| known.uid == held.uid) {
            if is_older(&held.resource_version, &known.resource_version) {
                return None;
            }
            self.fresh.remove(&held.uid);
            if known.content == held.content {
                held.sent.clone_from(&known.sent);
            }
            let is_same = Held { resource_version: known.resource_version.clone(), ..held.clone() } == *known;
            if is_same {
                self.slices.insert(held.name.clone(), held);
                return None;
            }
        }
        let key = held.key.clone();
        self.slices.insert(held.name.clone(), held);
        Some(key)
    }

    /// Takes what the server answered to a write of ours.
    pub(super) fn wrote(&mut self, sent: Content, mut held: Held) {
        if held.content != sent {
            held.sent = Some(sent);
        }
        self.fresh.insert(held.uid.clone());
        self.slices.insert(held.name.clone(), held);
    }

    /// What a read of one slice found. None: it is gone.
    pub(super) fn read(&mut self, name: &str, uid: &str, found: Option<Held>) {
        match found {
            Some(held) if held.uid == uid => drop(self.change(held)),
            Some(_) | None => drop(self.deleted(name, uid)),
        }
    }

    /// Notes that a slice is gone before the watch tells it.
    pub(super) fn deleted(&mut self, name: &str, uid: &str) -> Option<PoolKey> {
        if self.gone.len() < limit::SLICES_MAX {
            self.gone.insert(uid.to_owned());
        }
        self.remove(name, uid)
    }

    fn drop_one(&mut self, name: &str, uid: &str) -> Option<PoolKey> {
        self.gone.remove(uid);
        self.remove(name, uid)
    }

    fn remove(&mut self, name: &str, uid: &str) -> Option<PoolKey> {
        self.fresh.remove(uid);
        self.slices.get(name).filter(|known| known.uid == uid)?;
        self.slices.remove(name).map(|held| held.key)
    }
}

/// Whether a resource version is before another. Where they are no numbers, what comes later counts.
fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
