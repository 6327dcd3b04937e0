//! The cache of claims: the last state of each, which of them are watched, and which leaves first. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use super::{CLAIM_FOLLOW_IDLE, ClaimWatch, KNOWN_CLAIMS_MAX};
use nodedock_model::{Claim, ObjectName, ObjectRef, Uid};

/// Concurrently watched claims: each is a separate connection, and thousands of nodes share the API server.
pub(crate) const FOLLOWED_CLAIMS_MAX: usize = 32;

/// Namespace and name.
pub(super) type Key = (ObjectName, ObjectName);

/// The state of a claim, by a get or a watch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CachedClaim {
    pub(super) claim: Claim,
    /// The resource version, where it is a number: the higher is the newer.
    pub(super) version: Option<u64>,
}

/// Claims that are allocated, to this node as far as they say.
#[derive(Default)]
pub(super) struct ClaimCache {
    entries: BTreeMap<Key, Entry>,
    updates: u64,
}

struct Entry {
    state: CachedClaim,
    /// The number of the update that brought it.
    update: u64,
    asked_at: Instant,
    held: bool,
    /// Its newest state cannot be read: it has to be got again.
    invalid: bool,
    watch: Option<ClaimWatch>,
}

impl ClaimCache {
    /// The last state of the claim, if it has that UID, and whether it is watched.
    pub(super) fn last(&mut self, key: &Key, uid: &Uid, now: Instant) -> Option<(Claim, bool)> {
        let entry = self.entries.get_mut(key).filter(|entry| entry.state.claim.id.uid == *uid)?;
        entry.asked_at = now;
        let is_watched = entry.watch.as_ref().is_some_and(|watch| watch.live.load(Relaxed));
        (!entry.invalid).then(|| (entry.state.claim.clone(), is_watched))
    }

    /// How many updates there were, for `updated_after`.
    pub(super) fn updates(&self) -> u64 {
        self.updates
    }

    /// The claim, if it has that UID and a later update brought it.
    pub(super) fn updated_after(&self, update: u64, key: &Key, uid: &Uid) -> Option<Claim> {
        let entry = self.entries.get(key).filter(|entry| !entry.invalid && entry.update > update)?;
        let claim = &entry.state.claim;
        (claim.id.uid == *uid).then(|| claim.clone())
    }

    /// Takes a state. Returns whether the claim that was cached is lost by it.
    pub(super) fn update(&mut self, key: &Key, state: CachedClaim, node_name: &str, now: Instant) -> bool {
        self.updates += 1;
        let Some(entry) = self.entries.get_mut(key) else {
            self.add(key, state, node_name, now);
            return false;
        };
        if entry.state.version.zip(state.version).is_some_and(|(old, new)| new < old) {
            // A get that the watch overtook, or a late event of the claim that had the name before.
            return false;
        }
        if !is_allocated_to(&state.claim, node_name) {
            return self.remove(key);
        }
        let same = entry.state.claim.id.uid == state.claim.id.uid;
        (entry.state, entry.update, entry.invalid) = (state, self.updates, false);
        entry.held &= same;
        !same
    }

    fn add(&mut self, key: &Key, state: CachedClaim, node_name: &str, now: Instant) {
        let is_full = self.entries.len() >= KNOWN_CLAIMS_MAX;
        if !is_allocated_to(&state.claim, node_name) || (is_full && !self.evict()) {
            return;
        }
        let entry =
            Entry { state, update: self.updates, asked_at: now, held: false, invalid: false, watch: None };
        self.entries.insert(key.clone(), entry);
    }

    /// Removes the claim that is not held and was asked for the longest ago.
    fn evict(&mut self) -> bool {
        let idle = self.entries.iter().filter(|(_, entry)| !entry.held);
        let first = idle.min_by_key(|(_, entry)| entry.asked_at).map(|(key, _)| key.clone());
        first.and_then(|key| self.entries.remove(&key)).is_some()
    }

    /// The claim does not exist. Returns whether it was cached.
    pub(super) fn remove(&mut self, key: &Key) -> bool {
        self.entries.remove(key).is_some()
    }

    /// The claim of that UID was deleted. One that has had its name since stays. Returns whether it was cached.
    pub(super) fn deleted(&mut self, key: &Key, uid: Option<&str>) -> bool {
        let cached = self.entries.get(key).map(|entry| entry.state.claim.id.uid.as_str());
        uid.is_none_or(|uid| cached == Some(uid)) && self.remove(key)
    }

    /// The newest state of the claim cannot be read.
    pub(super) fn invalidate(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.invalid = true;
        }
    }

    /// Takes all claims that are held. Those that were held and are not any more are forgotten.
    pub(super) fn hold(&mut self, held: &[ObjectRef], now: Instant) {
        let held: BTreeSet<&Uid> = held.iter().map(|claim| &claim.uid).collect();
        self.entries.retain(|_, entry| {
            let is_held = held.contains(&entry.state.claim.id.uid);
            let was_held = std::mem::replace(&mut entry.held, is_held);
            if is_held {
                entry.asked_at = now;
            }
            is_held || !was_held
        });
    }

    pub(super) fn forget_idle(&mut self, now: Instant) {
        let idle = |entry: &Entry| now.saturating_duration_since(entry.asked_at) >= CLAIM_FOLLOW_IDLE;
        self.entries.retain(|_, entry| entry.held || !idle(entry));
    }

    /// A claim to be watched, if the bound allows one more: the one that was asked for last comes first.
    pub(super) fn to_watch(&self) -> Option<Key> {
        if self.watched() >= FOLLOWED_CLAIMS_MAX {
            return None;
        }
        let unwatched = self.entries.iter().filter(|(_, entry)| entry.watch.is_none());
        unwatched.max_by_key(|(_, entry)| entry.asked_at).map(|(key, _)| key.clone())
    }

    pub(super) fn watched_by(&mut self, key: &Key, watch: ClaimWatch) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.watch = Some(watch);
        }
    }

    pub(super) fn watched(&self) -> usize {
        self.entries.values().filter(|entry| entry.watch.is_some()).count()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn is_allocated_to(claim: &Claim, node_name: &str) -> bool {
    let allocation = claim.allocation.as_ref();
    allocation.is_some_and(|allocation| allocation.node_name.as_deref().is_none_or(|node| node == node_name))
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
